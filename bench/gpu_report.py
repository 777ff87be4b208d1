"""All that needs a GPU, in one command and nine minutes: ``python -m bench.gpu_report`` (``make gpu-report``).

=========  ==========================================================================================================
build      compiles the libraries in place, for the GPU that is here
tests      the tests of ops, laws and loops on the device
sanitizer  compute-sanitizer: memcheck and racecheck on every op, memcheck on the tests of the ops
bench      `bench.gpu.bench`: ``verify_chain`` and its peers; JSON, a roofline and ratio plots
profile    `bench.gpu.profile`: Nsight Compute on a few cases; only where asked for by name
=========  ==========================================================================================================

Each part is a process with a time of its own; one that fails stops no other. Nothing is installed. The results go to
``bench/results/<the GPU>``, with ``report.json`` saying how every part ended; logs to ``build/gpu-report``. The exit
code is 0 if no part failed; a part whose tool is missing has not failed.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gpu import process

BUDGET_S = 525.0
END_S = 5.0
"""What is kept for the report itself."""
"""Exit code of a part whose tool is not there."""
PYTHON = sys.executable


@dataclass(frozen=True)
class Machine:
    """What the parts need to know: where the results go, and of which GPU; `capability` is empty in a rehearsal."""

    name: str
    capability: str
    folder: Path
    logs: Path

    @property
    def rehearsing(self) -> bool:
        """Whether there is no GPU, and the parts do on the CPU what they can."""
        return not self.capability


@dataclass(frozen=True)
class Part:
    """`command` takes the machine and the part's seconds. `least`: the seconds that the parts before leave it."""

    command: Callable[[Machine, float], list[str]]
    limit: float
    least: float
    environment: Callable[[Machine], Mapping[str, str]] = field(default=lambda machine: {})
    shown: int = 3  # lines of its output that are repeated here
    said: int = 0  # lines of its output that ``report.json`` keeps


def architecture(capability: str) -> str:
    """``9.0`` as the build wants it, ``90a``: what only this kind of GPU has is compiled in from Hopper on."""
    major, minor = capability.split(".")
    return f"{major}{minor}" + ("a" if int(major) >= 9 else "")


def shown(path: Path) -> str:
    """`path` as a command of this checkout names it: results record their command, and no folder of one machine."""
    path = path.absolute()
    return str(path.relative_to(process.ROOT) if path.is_relative_to(process.ROOT) else path)


def build_environment(machine: Machine) -> Mapping[str, str]:
    """For the build of this GPU alone; a missing nvcc is an error."""
    if machine.rehearsing:
        return {"SPECDEC_CUDA": "0"}
    return {"SPECDEC_CUDA": "1", "SPECDEC_CUDA_ARCHS": architecture(machine.capability)}


def build(machine: Machine, seconds: float) -> list[str]:
    """`setup.py` in place; the rehearsal only asks it for its help, since others may be using what is built."""
    return [PYTHON, "setup.py", "build_ext", *(["--help"] if machine.rehearsing else ["--inplace"])]


def tests(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.suite`."""
    command = [PYTHON, "-m", "bench.gpu.suite", "--budget", f"{seconds - 5:.0f}", "--logs", shown(machine.logs)]
    return [*command, "--rehearse"] if machine.rehearsing else command


def sanitizer(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.sanitizer`."""
    command = [PYTHON, "-m", "bench.gpu.sanitizer", "--budget", f"{seconds - 5:.0f}", "--logs", shown(machine.logs)]
    return [*command, "--rehearse"] if machine.rehearsing else command


def bench(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.bench`, done somewhat before its time is over: it still has to write and draw."""
    budget = max(3.0, seconds - (10 if machine.rehearsing else 30))
    command = [PYTHON, "-m", "bench.gpu.bench", "--budget", f"{budget:.0f}", "--folder", shown(machine.folder)]
    return [*command, "--rehearse"] if machine.rehearsing else command


def profile(machine: Machine, seconds: float) -> list[str]:
    """`bench.gpu.profile`."""
    command = [PYTHON, "-m", "bench.gpu.profile", "--budget", f"{seconds - 5:.0f}"]
    command += ["--folder", shown(machine.folder), "--logs", shown(machine.logs)]
    on_the_cpu = ["--provider", "cpu", "--device", "cpu", "--vocab", "300", "--most", "1"]
    return [*command, *on_the_cpu] if machine.rehearsing else command


PARTS: dict[str, Part] = {
    "build": Part(build, 150, 30, build_environment),
    "tests": Part(tests, 170, 60, shown=8, said=3),
    "sanitizer": Part(sanitizer, 100, 40, shown=8, said=3),
    "bench": Part(bench, 600, 150, shown=110),
    "profile": Part(profile, 120, 40, shown=40),
}
DEFAULT = ("build", "tests", "sanitizer", "bench")


def find_machine(folder: Path | None, logs: Path) -> Machine | None:
    """The first CUDA device, asked for in another process: this one is not to hold memory on it."""
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


def run_part(name: str, machine: Machine, seconds: float) -> dict[str, Any]:
    """One part, and how it ended."""
    part = PARTS[name]
    command = part.command(machine, seconds)
    outcome = process.run(command, seconds, machine.logs / f"{name}.log", part.environment(machine))
    status = {0: "passed", process.ABSENT: "absent", None: "out of time"}.get(outcome.code, "failed")
    summary = outcome.tail(part.shown) if status in ("passed", "absent") else outcome.tail(max(part.shown, 30))
    print(summary, flush=True)
    return {"part": name, "status": status, "exit_code": outcome.code, "seconds": round(outcome.seconds, 1),
            "said": outcome.tail(part.said).splitlines()}  # fmt: skip


def save(machine: Machine, results: Sequence[Mapping[str, Any]]) -> Path:
    """Write ``report.json``: after each part, so that it is there whatever happens to the next."""
    machine.folder.mkdir(parents=True, exist_ok=True)
    path = machine.folder / "report.json"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = {"gpu": machine.name, "capability": machine.capability, "date": now, "parts": results}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def run(names: Sequence[str], machine: Machine, budget: float) -> int:
    """The parts in turn, each within what it may take and what the later ones leave it; 0 if none failed."""
    deadline = time.monotonic() + budget - END_S
    results: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        kept = sum(PARTS[later].least for later in names[number + 1 :])
        left = deadline - time.monotonic()
        seconds = min(PARTS[name].limit, max(left - kept, min(left, PARTS[name].least)))
        if seconds < 1:
            results.append({"part": name, "status": "out of time", "exit_code": None, "seconds": 0.0})
            continue
        print(f"\n=== {name} (at most {seconds:.0f} s)", flush=True)
        results.append(run_part(name, machine, seconds))
        save(machine, results)
    print(f"\n{machine.name}: results in {machine.folder}, logs in {machine.logs}")
    for result in results:
        print(f"  {result['part']:10}{result['status']:12}{result['seconds']:6.0f} s")
    save(machine, results)
    return int(any(result["status"] in ("failed", "out of time") for result in results))


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(
        prog="python -m bench.gpu_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--parts", nargs="+", choices=PARTS, default=list(DEFAULT))
    parse.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds in all; default: {BUDGET_S:.0f}")
    parse.add_argument("--folder", type=Path, help="for the results; default: bench/results/<the GPU>")
    parse.add_argument("--logs", type=Path, default=process.ROOT / "build/gpu-report")
    parse.add_argument("--rehearse", action="store_true", help="no GPU: what of it runs without, to a temporary folder")
    options = parse.parse_args(arguments)
    names = [name for name in PARTS if name in options.parts]
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
