"""Measure on a GPU within a time: ``python -m bench.gpu.bench --budget 300``.

Measuring processes (`bench.gpu.worker`) are started one after the other: one that crashes or hangs costs the step it
was in, and the next goes on behind it. What was measured is written whatever happens.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import machine
from . import plot, process, summary, worker
from .journal import Journal, unfinished

MOST_PROCESSES = 12
OVER = "the time was over"
START_S = 120.0
"""How long a process may take until its first step: importing torch, and waking the device."""
GRACE_S = 15.0
"""How long it may go on after the deadline: the case it is in."""


def limit_reached(journal: Journal, started: float, deadline: float) -> str | None:
    """Why the running process is to be stopped, if it is."""
    now = time.time()
    if now > deadline + GRACE_S:
        return OVER
    entries = [e for e in journal.entries() if e["time"] >= started]
    step = unfinished(entries)
    if step is not None:
        return f"hung for {step['limit_s']:.0f} s" if now - step["time"] > step["limit_s"] else None
    last = entries[-1]["time"] if entries else started
    return f"no step for {START_S:.0f} s" if now - last > START_S else None


def run_worker(journal: Journal, command: Sequence[str], deadline: float) -> tuple[int, str | None]:
    """One measuring process: its exit code, and why it was stopped, if it was."""
    started = time.time()
    child = subprocess.Popen(command, cwd=process.ROOT, start_new_session=True)
    try:
        while (code := child.poll()) is None:
            if why := limit_reached(journal, started, deadline):
                return -signal.SIGKILL, why
            time.sleep(0.5)
        return code, None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def measure(journal: Journal, command: Sequence[str], deadline: float) -> list[str]:
    """Measuring processes until one ends well, the time is over, or they get nowhere; what went wrong."""
    problems: list[str] = []
    for _ in range(MOST_PROCESSES):
        before = len(journal.entries())
        code, why = run_worker(journal, command, deadline)
        if code == 0:
            return problems
        if why == OVER:  # no fault of the step that it was in
            return problems
        step = unfinished(journal.entries())
        error = why or f"the process ended with exit code {code}"
        problems.append(error if step is None else f"{step['begin']}: {error}")
        if step is not None:
            journal.failed(step["begin"]["case"], step["begin"]["provider"], "died", error)
            journal.write(end=True)
        elif len(journal.entries()) == before:
            return problems  # it does not even start
        if time.time() > deadline:
            return problems
    return problems


def newest(journal: Journal) -> list[dict[str, Any]]:
    """The rows, of a case measured again the last ones."""
    found = {(row["id"], row["provider"]): row for rows in journal.all("rows") for row in rows}
    return list(found.values())


def left_out(journal: Journal, num_cases: int) -> list[str]:
    """What the time did not suffice for."""
    finished = journal.all("finished")
    found = []
    for phase, what in ((1, "this package's backends"), (2, "all peers")):
        missing = num_cases - sum(number == phase for number, _ in finished)
        if missing:
            found.append(f"{missing} of {num_cases} cases with {what}")
    return found


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.bench", description=__doc__)
    parse.add_argument("--budget", type=float, default=300.0, help="seconds; default: 300")
    parse.add_argument("--folder", type=Path, help="default: bench/results/<the GPU>")
    parse.add_argument("--rehearse", action="store_true", help="no GPU: small cases on the CPU, figures mean nothing")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Options that this does not know go to the measuring processes (``--case``, ``--batch``, ``--providers`` …)."""
    options, rest = parser().parse_known_args(arguments)
    if options.rehearse and options.folder is None:
        raise SystemExit("bench.gpu.bench: a rehearsal needs --folder: its figures are no results")
    folder = options.folder or machine.RESULTS / machine.label(gpu=True)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    journal.path.unlink(missing_ok=True)
    start = time.time()
    deadline = start + options.budget
    passed = ["--journal", str(journal.path), "--start", str(start), "--deadline", str(deadline), *rest]
    if options.rehearse:
        passed.append("--rehearse")
    worker.parser().parse_args(passed)  # a wrong option stops here, not in every process
    problems = measure(journal, [sys.executable, "-m", "bench.gpu.worker", *passed], deadline)
    return write(folder, journal, problems, options.budget)


def write(folder: Path, journal: Journal, problems: Sequence[str], budget: float) -> int:
    """The result file, the plots and the tables; 0 if there are rows and nothing died."""
    rows, facts = newest(journal), next(iter(journal.all("facts")), None)
    if facts is None or not rows:
        print("nothing was measured:", *(problems or ["no case was reached"]), sep="\n  ")
        return 1
    failed = journal.all("failed")
    settings = {**facts, "budget_s": budget, "failed": failed, "problems": list(problems),
                "left_out": left_out(journal, facts["num_cases"])}  # fmt: skip
    found = summary.targets(rows)
    path = machine.save(folder, "verify_chain", rows, settings, found)
    result = {"benchmark": "verify_chain", "rows": rows, "settings": settings}
    print("wrote", path)
    try:
        print("drew", *plot.draw(result, folder))
    except ModuleNotFoundError as error:
        print("no plots:", error)
    journal.path.unlink()
    for name, why in facts["missing"].items():
        print(f"without {name}: {why}")
    for text in dict.fromkeys(f"failed: {f['provider'] or f['case']} ({f['what']}): {f['error']}" for f in failed):
        print(text)
    for text in settings["left_out"]:
        print("left out:", text)
    print(f"\nTargets (each of them stands in {path.name}):\n{summary.counts(found)}\n")
    print(f"{facts['gpu']['name']}: a copy moves {facts['copy_gb_per_s']:.0f} GB/s\n{summary.table(rows)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
