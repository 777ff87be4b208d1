"""`python -m python_tests.soak`: random requests in threads and processes, for as long as is asked; `make soak`.

Each answer is looked at: every token must be possible, and the stream of them must have the exact distribution
(`uniformity`). Callers cancel, processes are interrupted, drafters are careless; models and drafters are used on.
Memory must stay where it is. Exit code 1, and what was wrong, where something was.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from specdec_kernels.options import POSITIVE, SECONDS, SEED, THREADS

from .run import soak
from .uniformity import LEVEL


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m python_tests.soak", description=__doc__.splitlines()[2])
    parser.add_argument("--minutes", type=SECONDS, default=20)
    parser.add_argument("--threads", type=THREADS, default=8, help="callers in each process (default 8)")
    parser.add_argument("--processes", type=POSITIVE, default=2)
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument("--json", type=Path, help="write the counts there")
    given = parser.parse_args()
    print(f"soaking for {given.minutes:g} minutes with seed {given.seed} ...", flush=True)
    found = soak(given.minutes, given.threads, given.processes, given.seed)
    tested = {name: stream.pvalues() for name, stream in found.streams.items() if stream.pvalues()}
    least = min((min(p) for p in tested.values()), default=float("nan"))
    counts = dict(found.counts) | {
        "kinds": len(found.streams), "kinds tested": len(tested), "least p-value": least, "level of all": LEVEL
    }  # fmt: skip
    for name, value in counts.items():
        print(f"{name:>16}  {value:,}" if isinstance(value, int) else f"{name:>16}  {value:.2g}")
    if given.json:
        given.json.write_text(json.dumps(counts | {"wrong": found.wrong}, indent=1) + "\n")
    for sentence in found.wrong[:20]:
        print(f"wrong: {sentence}", file=sys.stderr)
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
