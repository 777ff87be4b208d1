"""Measure on a GPU within a time: ``python -m bench.gpu.bench --budget 300``; ``--plan`` says what (`bench.gpu.grid`).

Measuring processes (`bench.gpu.worker`) run one after the other: one that crashes or hangs loses only the step it was
in, and the next continues after it. The result file is rewritten every `SAVE_S` seconds, so that whatever ends this
process, what was measured is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_kernels.options import SECONDS

from .. import machine
from ..providers import beside
from . import crossovers, grid, hardware, model, plot, process, rehearsal, summary, worker
from .build import PEERS
from .journal import Journal, unfinished

MOST_PROCESSES = 12
OVER = "the time was over"
START_S = 120.0
"""How long a process may take until its first step: importing torch, and waking the device."""
GRACE_S = 15.0
"""How long it may go on after the deadline: the case it is in."""
SAVE_S = 20.0
PEERS_S = 240.0
"""How long peers may compile themselves."""


def limit_reached(journal: Journal, started: float, deadline: float) -> str | None:
    """Why the running process must be stopped, if it must."""
    now = time.time()
    if now > deadline + GRACE_S:
        return OVER
    entries = [e for e in journal.entries() if e["time"] >= started]
    step = unfinished(entries)
    if step is not None:
        return f"hung for {step['limit_s']:.0f} s" if now - step["time"] > step["limit_s"] else None
    last = entries[-1]["time"] if entries else started
    return f"no step for {START_S:.0f} s" if now - last > START_S else None


def run_worker(
    journal: Journal, command: Sequence[str], deadline: float, save: Callable[[], object] = lambda: None
) -> tuple[int, str | None]:
    """Run a measuring process; its exit code, and why it was stopped, if so. `save` is called now and then."""
    started = saved = time.time()
    child = subprocess.Popen(command, cwd=process.ROOT, start_new_session=True)
    try:
        while (code := child.poll()) is None:
            if why := limit_reached(journal, started, deadline):
                return -signal.SIGKILL, why
            if time.time() > saved + SAVE_S:
                save()
                saved = time.time()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.5)
        return code, None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def measure(
    journal: Journal, command: Sequence[str], deadline: float, save: Callable[[], object] = lambda: None
) -> list[str]:
    """Run measuring processes until one ends well, the time is over, or they get nowhere; returns what went wrong."""
    problems: list[str] = []
    for _ in range(MOST_PROCESSES):
        before = len(journal.entries())
        code, why = run_worker(journal, command, deadline, save)
        if code == 0:
            return problems
        if why == OVER:  # not the fault of the step that it was in
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
    """The rows; of a case measured again, the latest ones."""
    found = {(row["id"], row["provider"]): row for rows in journal.all("rows") for row in rows}
    return list(found.values())


def left_out(journal: Journal, cases_of_phases: Sequence[int]) -> list[str]:
    """What the time was not enough for."""
    finished = journal.all("finished")
    found = []
    for phase, cases in enumerate(cases_of_phases, start=1):
        missing = cases - sum(number == phase for number, _ in finished)
        if missing:
            found.append(f"{missing} of {cases} cases of phase {phase}")
    return found


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.bench", description=__doc__)
    parse.add_argument("--budget", type=SECONDS, default=300.0, help="seconds; default: 300")
    parse.add_argument("--folder", type=Path, help="default: bench/results/<the GPU>")
    parse.add_argument("--plan", choices=grid.PLANS, default="verify_chain", help="what is measured")
    parse.add_argument("--rehearse", action="store_true", help="no GPU: small cases on the CPU, nothing is timed")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Unknown options go to the measuring processes (``--case``, ``--batch``, ``--providers`` …)."""
    options, rest = parser().parse_known_args(arguments)
    folder = rehearsal.folder(options.folder, options.rehearse)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / f"{options.plan}.journal")
    passed = ["--journal", str(journal.path), "--plan", options.plan, *rest]
    if options.rehearse:
        passed.append("--rehearse")
    asked = worker.parsed([*passed, "--start", "0", "--deadline", "0"])  # a wrong option stops here, once
    deadline = time.time() + options.budget
    if beside.FOLDER.is_dir() and not options.rehearse:
        if any("flashinfer" in phase.providers for phase in worker.phases_of(asked, "cuda")):
            compile_peers(options.budget / 2)
    start = time.time()
    passed += ["--start", str(start), "--deadline", str(deadline)]
    journal.path.unlink(missing_ok=True)
    beside.mount()  # for their versions
    states: list[dict[str, str]] = []

    def save(problems: Sequence[str] = ("it was stopped",)) -> dict[str, Any] | None:
        if not options.rehearse and (state := hardware.state()) is not None:
            states.append(state)
        return write(folder, options.plan, journal, problems, {"budget_s": options.budget, "states": states})

    problems = measure(journal, [sys.executable, "-m", "bench.gpu.worker", *passed], deadline, save)
    result = save(problems)
    if result is None:
        print("nothing was measured:", *(problems or ["no case was reached"]), sep="\n  ")
        return 1
    journal.path.unlink()
    tell(result, folder)
    return 1 if problems else 0


def compile_peers(seconds: float) -> None:
    """Let peers compile themselves before the first case, which would wait for that, and be lost if it took long."""
    outcome = process.run([sys.executable, *PEERS], min(seconds, PEERS_S), process.LOGS / "peers.log")
    said = "not compiled in time" if outcome.code is None else outcome.tail(1)
    print(f"peers: {said} ({outcome.seconds:.0f} s)", flush=True)


def write(
    folder: Path, plan: str, journal: Journal, problems: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Write the result file from what the journal has; None if that is nothing."""
    rows, facts = newest(journal), next(iter(journal.all("facts")), None)
    if facts is None or not rows:
        return None
    settings = {**facts, **settings, "failed": journal.all("failed"), "problems": list(problems),
                "left_out": left_out(journal, facts["cases_of_phases"])}  # fmt: skip
    found = summary.targets(rows) if plan == "verify_chain" else []
    machine.save(folder, plan, rows, settings, found)
    return {"benchmark": plan, "rows": rows, "settings": settings, "targets": found}


def tell(result: Mapping[str, Any], folder: Path) -> None:
    """Print the result of a run, with its tables last."""
    plan, rows, settings = result["benchmark"], result["rows"], result["settings"]
    print("wrote", folder / f"{plan}.json")
    if settings["gpu"]["name"] == rehearsal.NAME:
        print(rehearsal.NOTICE)
    if plan == "verify_chain":
        try:
            print("drew", *plot.draw(dict(result), folder))
        except ModuleNotFoundError as error:
            print("no plots:", error)
    for name, why in settings["missing"].items():
        print(f"without {name}: {why}")
    failed = settings["failed"]
    for text in dict.fromkeys(f"failed: {f['provider'] or f['case']} ({f['what']}): {f['error']}" for f in failed):
        print(text)
    for text in settings["left_out"]:
        print("left out:", text)
    held = {state["held_down_by"] for state in settings["states"]}
    print("clocks were held down by:", ", ".join(sorted(held)) or "nobody knows")
    if plan == "verify_chain":
        print(f"\nTargets (each of them stands in {plan}.json):\n{summary.counts(result['targets'])}\n")
    print(
        f"{settings['gpu']['name']}: {settings['copy_gb_per_s']:.0f} GB/s copied, {settings['read_gb_per_s']:.0f} read"
    )
    if plan == "crossovers":
        print(crossovers.table(rows))
        print(crossovers.told(rows, settings["gpu"]["multiprocessors"]))
    else:
        print(summary.table(rows, None if plan == "ops" else 5, model.of_gpu(machine.slug(settings["gpu"]["name"]))))


if __name__ == "__main__":
    sys.exit(main())
