"""``python -m python_tests.fuzz``: random calls below the public API, under ASan and UBSan unless ``--plain``.

Each case has a number, from which all of it comes: ``--replay NUMBER`` runs it again. A worker process writes the
number of the case it begins, so that a crash has one too; after a failure another worker goes on behind it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_FAILURES = 10
HANGS = 60  # seconds on one case


def sanitized_environment() -> dict[str, str]:
    """Build the package under sanitizers; what a process that loads it needs."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_sanitized"], cwd=ROOT, check=True)
    compiler = os.environ.get("CXX", "c++")
    found = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")  # both before Python's own, or exceptions are not caught
    ]
    options = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=256:detect_stack_use_after_return=0"
    return {
        "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "build/sanitized", ROOT))),
    }  # fmt: skip


def work(first: int, limit: int, progress: str) -> None:
    """Run cases from number `first` on, at most `limit`; their numbers stand in the file `progress`."""
    import faulthandler

    from python_tests.fuzz import run_case

    faulthandler.enable()
    with open(progress, "r+b") as file, mmap.mmap(file.fileno(), 16) as shared:
        for number in range(first, first + limit):
            shared[:16] = number.to_bytes(8, "little") + (number - first).to_bytes(8, "little")
            if problem := run_case(number, aloud=limit == 1):
                print(problem, file=sys.stderr)
                sys.exit(1)
        shared[8:16] = limit.to_bytes(8, "little")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m python_tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="how long (default: 120)")
    parser.add_argument("--calls", type=int, metavar="N", help="how many cases, instead")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="where to begin (default: anywhere)")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="run this one case")
    parser.add_argument("--plain", action="store_true", help="with the installed package, without sanitizers")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(int(asked.worker[0]), int(asked.worker[1]), asked.worker[2])
        return 0
    environment = os.environ | ({"PYTHONPATH": str(ROOT)} if asked.plain else sanitized_environment())
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    first = asked.replay if asked.replay is not None else seed << 32
    calls = 1 if asked.replay is not None else asked.calls
    print(f"fuzz: seed {seed}, cases from {first}", flush=True)
    return supervise(first, calls, asked.seconds, environment)


def supervise(first: int, calls: int | None, seconds: float, environment: dict[str, str]) -> int:
    """Keep a worker at work until `calls` or, without, `seconds` are over; 1 if a case failed."""
    began, done, failures = time.monotonic(), 0, 0
    deadline = None if calls else began + seconds
    with tempfile.NamedTemporaryFile() as progress:
        while (done < calls if calls else time.monotonic() < began + seconds) and failures < MOST_FAILURES:
            progress.seek(0)
            progress.write(bytes(16))
            progress.flush()
            limit = calls - done if calls else 10**9
            failed, ran, number = _one_worker(first + done, limit, environment, progress.name, deadline)
            done += ran + failed
            if failed:
                failures += 1
                if limit > 1:  # alone it says what it does before it does it
                    _one_worker(number, 1, environment, progress.name, None)
                print(f"fuzz: case {number} failed; again: python -m python_tests.fuzz --replay {number}", flush=True)
    print(f"fuzz: {done} cases in {time.monotonic() - began:.0f} s, {failures} failed", flush=True)
    return int(failures > 0)


def _one_worker(
    first: int, limit: int, environment: dict[str, str], progress: str, deadline: float | None
) -> tuple[bool, int, int]:
    """Whether it failed, how many cases it ended, and the number of its last one."""
    command = [sys.executable, "-P", "-m", "python_tests.fuzz", "--worker", str(first), str(limit), progress]
    worker = subprocess.Popen(command, env=environment, cwd=ROOT)
    seen, since, failed = -1, time.monotonic(), False
    while True:
        try:
            failed = worker.wait(0.5) != 0
            break
        except subprocess.TimeoutExpired:
            pass
        ran = int.from_bytes(Path(progress).read_bytes()[8:16], "little")
        if ran != seen:
            seen, since = ran, time.monotonic()
        if time.monotonic() > since + HANGS:
            print(f"fuzz: a case takes more than {HANGS} seconds", flush=True)
            failed = True
        if failed or (deadline and time.monotonic() > deadline):
            worker.kill()
            worker.wait()
            break
    state = Path(progress).read_bytes()
    return failed, int.from_bytes(state[8:16], "little"), int.from_bytes(state[:8], "little")


if __name__ == "__main__":
    sys.exit(main())
