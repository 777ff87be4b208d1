"""The test-suite on a GPU: ``python -m bench.gpu.suite --budget 170``.

What the time is not enough for counts as not finished, which is no failure; a test that had already failed is one. The
CUDA kernels come first, then the steps captured in graphs, Triton's kernels, and whatever else names the device, so
that the time runs out where it matters least.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import process

FOLDERS = ("python_tests/ops", "python_tests/law", "python_tests/decoding")
CAPTURED = ("python_tests/decoding/test_graph_gpu.py",)
COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|xfailed|errors?)")
BAD = re.compile(r"\d+ (?:failed|error)")
NOTHING_CHOSEN = 5
"""pytest's exit code where no test was selected."""


def steps(rehearse: bool) -> dict[str, list[str]]:
    """What pytest is asked to run, in order."""
    if rehearse:
        return {"rehearsal": ["python_tests/ops/test_uniform_samples.py", "-k", "reference"]}
    everywhere = [*FOLDERS, "-m", "not model", "-k"]
    return {
        "CUDA kernels": [*everywhere, "cuda-cuda"],
        "captured steps": [*CAPTURED],
        "Triton kernels": [*everywhere, "triton-cuda"],
        "the rest": [*everywhere, "cuda and not cuda-cuda and not triton-cuda and not emulated"],
    }


def pytest(rehearse: bool) -> list[str]:
    """pytest; but for a rehearsal in several processes and with a time limit per test, if its plugin is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "--tier=all", "--maxfail=40"]
    command += ["-p", "no:cacheprovider"]
    if not rehearse:
        command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadgroup"]
    if not rehearse and importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", "120"]
    return command


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.suite", description=__doc__)
    parse.add_argument("--budget", type=float, default=170.0, help="seconds; default: 170")
    parse.add_argument("--logs", type=Path, default=process.LOGS)
    parse.add_argument("--rehearse", action="store_true", help="a few tests on the CPU")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    deadline = time.monotonic() + options.budget
    failed = unfinished = False
    for number, (what, selection) in enumerate(steps(options.rehearse).items(), start=1):
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{what}: no time was left")
            unfinished = True
            continue
        command = [*pytest(options.rehearse), *selection]
        outcome = process.run(command, left, options.logs / f"tests-{number}.log")
        counts = ", ".join(COUNTS.findall(outcome.tail(3)))
        reason = {None: "not finished", 0: "passed", NOTHING_CHOSEN: "none chosen"}.get(outcome.code, "FAILED")
        print(f"{what}: {reason}{': ' if counts else ''}{counts} ({outcome.seconds:.0f} s)", flush=True)
        wrong = bool(BAD.search(counts)) or outcome.code not in (None, 0, NOTHING_CHOSEN)
        wrong |= number == 1 and outcome.code is not None and "passed" not in counts  # nothing ran, or all was skipped
        if wrong:
            print(outcome.tail(60))
        failed |= wrong
        unfinished |= outcome.code is None
    return 1 if failed else process.UNFINISHED if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
