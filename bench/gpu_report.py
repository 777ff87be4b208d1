"""All that needs a GPU, in parts of under nine minutes: ``python -m bench.gpu_report bench`` (``make gpu-report``).

==========  =========================================================================================================
build       compiles the libraries in place, for the GPU that is here; runs every kernel once: a table, the clocks
bench       ``verify_chain`` and its peers, the cells that goals are stated for first; JSON, a roofline and ratio plots
crossovers  every layout of ``verify_chain`` at many batches, and the thresholds in csrc/cuda/strategy.cu that follow
ops         ``verify_tree``, ``sample``, ``gather_kv_``, the match rule and a step with every processor
decode      a decoding loop of models of 1 and 8 billion random weights: time of a step, share of the verify step
tests       the tests of ops, laws and loops on the device
sanitizer   compute-sanitizer: memcheck and racecheck on every op, memcheck on the tests of the ops
profile     Nsight Compute on a few cases; only where asked for by name
==========  =========================================================================================================

Parts are chosen by name and run in this order, each in a process with its own time limit; without names all but the
last run, in half an hour. A part that fails stops no other; one whose time runs out is "not finished", which is no
failure, and what it had is written. Nothing is installed. The results go to ``bench/results/<the GPU>``, with
``report.json`` saying when and how every part last ended, also those of earlier calls; logs go to
``build/gpu-report``. The exit code is 0 if no part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_kernels.files import write_whole

from .gpu import process

END_S = 5.0
"""What is kept for the report itself."""
UNFINISHED = "not finished"
PYTHON = sys.executable


@dataclass(frozen=True)
class Machine:
    """What the parts need to know: where the results go, and the GPU's name; `capability` is empty in a rehearsal."""

    name: str
    capability: str
    folder: Path
    logs: Path

    @property
    def rehearsing(self) -> bool:
        """Whether there is no GPU, so that the parts do what they can on the CPU."""
        return not self.capability


@dataclass(frozen=True)
class Part:
    """`command` takes the machine and the part's seconds. `least`: the seconds that earlier parts must leave it."""

    command: Callable[[Machine, float], list[str]]
    limit: float
    least: float
    shown: int = 3  # lines of its output that are printed here too
    said: int = 0  # lines of its output that ``report.json`` keeps


def shown(path: Path) -> str:
    """`path` relative to this checkout: results record their command, which must not contain one machine's folders."""
    path = path.absolute()
    return str(path.relative_to(process.ROOT) if path.is_relative_to(process.ROOT) else path)


def program(name: str, machine: Machine, seconds: float, *options: str) -> list[str]:
    """A module of `bench.gpu`, told its time and whether it rehearses."""
    command = [PYTHON, "-m", f"bench.gpu.{name}", "--budget", f"{max(3.0, seconds):.0f}", *options]
    return [*command, "--rehearse"] if machine.rehearsing else command


def build(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.build`."""
    command = [PYTHON, "-m", "bench.gpu.build", "--budget", f"{seconds - 5:.0f}", "--folder", shown(machine.folder)]
    command += ["--logs", shown(machine.logs)]
    return command if machine.rehearsing else [*command, "--capability", machine.capability]


def tests(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.suite`."""
    return program("suite", machine, seconds - 15, "--logs", shown(machine.logs))


def sanitizer(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.sanitizer`."""
    return program("sanitizer", machine, seconds - 15, "--logs", shown(machine.logs))


def measuring(plan: str) -> Callable[[Machine, float], list[str]]:
    """`bench.gpu.bench`, ended somewhat before its time is over: it still has to write and draw."""

    def command(machine: Machine, seconds: float) -> list[str]:
        left = seconds - (10 if machine.rehearsing else 30)
        return program("bench", machine, left, "--plan", plan, "--folder", shown(machine.folder))

    return command


def decode(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.decode`."""
    return program("decode", machine, seconds - 15, "--folder", shown(machine.folder))


def profile(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.profile`."""
    command = [PYTHON, "-m", "bench.gpu.profile", "--budget", f"{seconds - 5:.0f}"]
    command += ["--folder", shown(machine.folder), "--logs", shown(machine.logs)]
    on_the_cpu = ["--provider", "cpu", "--device", "cpu", "--vocab", "300", "--most", "1"]
    return [*command, *on_the_cpu] if machine.rehearsing else command


PARTS: dict[str, Part] = {
    "build": Part(build, 200, 30, shown=110),
    "bench": Part(measuring("verify_chain"), 500, 90, shown=110),
    "crossovers": Part(measuring("crossovers"), 200, 60, shown=110),
    "ops": Part(measuring("ops"), 150, 60, shown=80),
    "decode": Part(decode, 300, 60, shown=40),
    "tests": Part(tests, 240, 60, shown=8, said=4),
    "sanitizer": Part(sanitizer, 180, 40, shown=8, said=3),
    "profile": Part(profile, 120, 40, shown=40),
}
DEFAULT = tuple(name for name in PARTS if name != "profile")


def find_machine(folder: Path | None, logs: Path) -> Machine | None:
    """The first CUDA device, asked for in another process, so that this one holds no memory on it."""
    code = """if True:
        import json, torch
        from bench import machine
        if torch.cuda.is_available():
            name, capability = torch.cuda.get_device_name(), "{}.{}".format(*torch.cuda.get_device_capability())
            print(json.dumps([name, capability, str(machine.RESULTS / machine.label(gpu=True))]))
    """
    try:
        done = subprocess.run([PYTHON, "-c", code], cwd=process.ROOT, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        print("the GPU did not answer within two minutes", file=sys.stderr)
        return None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        print(*done.stderr.splitlines()[-3:], sep="\n", file=sys.stderr)
        return None
    name, capability, results = json.loads(lines[-1])
    return Machine(name, capability, folder or Path(results), logs)


def ended(name: str, status: str, code: int | None, seconds: float, said: Sequence[str] = ()) -> dict[str, Any]:
    """How a part ended, now: its entry in ``report.json``."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"part": name, "date": now, "status": status, "exit_code": code, "seconds": round(seconds, 1),
            "said": list(said)}  # fmt: skip


def run_part(name: str, machine: Machine, seconds: float) -> dict[str, Any]:
    """Run one part; returns how it ended."""
    part = PARTS[name]
    command = part.command(machine, seconds)
    outcome = process.run(command, seconds, machine.logs / f"{name}.log")
    status = {0: "passed", process.ABSENT: "absent", process.UNFINISHED: UNFINISHED, None: UNFINISHED}.get(
        outcome.code, "failed"
    )
    summary = outcome.tail(part.shown if status in ("passed", "absent") else max(part.shown, 30))
    print(summary, flush=True)
    return ended(name, status, outcome.code, outcome.seconds, outcome.tail(part.said).splitlines())


def earlier(path: Path, gpu: str) -> dict[str, Mapping[str, Any]]:
    """How parts ended in earlier calls, by name; nothing if `path` holds no report of this GPU."""
    try:
        report = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(report, dict) or report.get("gpu") != gpu:
        return {}
    # Older reports had one date for all their parts.
    return {entry["part"]: {**entry, "date": entry.get("date", report.get("date"))} for entry in report["parts"]}


def save(machine: Machine, results: Sequence[Mapping[str, Any]]) -> Path:
    """Write ``report.json``: after each part, so that it is there whatever happens to the next. Parts of earlier calls
    stay in it until they run again.
    """
    machine.folder.mkdir(parents=True, exist_ok=True)
    path = machine.folder / "report.json"
    parts = {**earlier(path, machine.name), **{result["part"]: result for result in results}}
    report = {"gpu": machine.name, "capability": machine.capability, "parts": list(parts.values())}
    write_whole(path, lambda made: made.write_text(json.dumps(report, indent=1) + "\n"))
    return path


def run(names: Sequence[str], machine: Machine, budget: float | None = None) -> int:
    """Run the parts in turn, each within its own limit and, given a `budget`, within what the later parts leave it; 0
    if none failed.
    """
    deadline = time.monotonic() + (budget or sum(PARTS[name].limit for name in names) + END_S) - END_S
    results: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        kept = sum(PARTS[later].least for later in names[number + 1 :])
        left = deadline - time.monotonic()
        seconds = min(PARTS[name].limit, max(left - kept, min(left, PARTS[name].least)))
        if seconds < 1:
            results.append(ended(name, UNFINISHED, None, 0.0))
            continue
        print(f"\n=== {name} (at most {seconds:.0f} s)", flush=True)
        results.append(run_part(name, machine, seconds))
        save(machine, results)
    print(f"\n{machine.name}: results in {machine.folder}, logs in {machine.logs}")
    for result in results:
        print(f"  {result['part']:12}{result['status']:14}{result['seconds']:6.0f} s")
    save(machine, results)
    return int(any(result["status"] == "failed" for result in results))


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(
        prog="python -m bench.gpu_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {', '.join(PARTS)}")
    parse.add_argument("--budget", type=float, help="seconds in all; default: what the parts may take")
    parse.add_argument("--folder", type=Path, help="for the results; default: bench/results/<the GPU>")
    parse.add_argument("--logs", type=Path, default=process.LOGS)
    parse.add_argument("--rehearse", action="store_true", help="no GPU: what of it runs without, to a temporary folder")
    options = parse.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parse.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    names = [name for name in PARTS if name in (options.parts or DEFAULT)]
    if not options.rehearse:
        machine = find_machine(options.folder, options.logs)
        if machine is None:
            print("gpu-report: torch finds no CUDA device (--rehearse does what runs without one)", file=sys.stderr)
            return 2
        return run(names, machine, options.budget)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return run(names, Machine("rehearsal", "", folder, folder / "logs"), options.budget)


if __name__ == "__main__":
    sys.exit(main())
