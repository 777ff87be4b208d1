"""``python -m python_tests.fuzz``: random calls below the public API, under ASan and UBSan unless ``--plain``.

Each case has a number, from which all of it comes: ``--replay NUMBER`` runs it again. A worker process writes down the
number of the case it begins and each call before it makes it, so that a crash and a hang have them too. What is known
of a failure is printed and kept in build/fuzz; another worker goes on behind it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from unittest import mock

from specdec_kernels.options import POSITIVE, SECONDS, SEED

ROOT = Path(__file__).resolve().parents[2]
MOST_FAILURES = 10
HANGS = 60  # seconds on one case
STARTS = 240  # and until the first one: torch under ASan, on a busy machine
PROGRESS_BYTES = 1 << 18
PRINTED_BYTES = 1 << 16  # of what a worker prints, the end is kept
FAILURES = ROOT / "build/fuzz"


def sanitized_environment() -> dict[str, str]:
    """Build the package under sanitizers; what a process that loads it needs."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_sanitized"], cwd=ROOT, check=True)
    with mock.patch("setuptools.setup"):  # what its own build took
        compiler = runpy.run_path(str(ROOT / "setup.py"))["find_cxx"]()
    found = [
        subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")  # both before Python's own, or exceptions are not caught
    ]
    options = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=256:detect_stack_use_after_return=0"
    return {
        "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "build/sanitized", ROOT))),
    }  # fmt: skip


class Progress:
    """Where a worker is, in a file that its supervisor reads, whatever becomes of the worker.

    The number of its case, how many it has ended, and the calls of this case in words.
    """

    def __init__(self, file: BinaryIO) -> None:
        file.truncate(PROGRESS_BYTES)
        self.shared = mmap.mmap(file.fileno(), PROGRESS_BYTES)
        self.end = 16

    def begin(self, number: int, ended: int) -> None:
        self.shared[:17] = number.to_bytes(8, "little") + ended.to_bytes(8, "little") + b"\0"
        self.end = 16

    def tell(self, call: str) -> None:
        text = call.encode()[: PROGRESS_BYTES - 1 - self.end]
        self.shared[self.end : self.end + len(text) + 1] = text + b"\0"
        self.end += len(text)

    def read(self) -> tuple[int, int, str]:
        number, ended = (int.from_bytes(self.shared[at : at + 8], "little") for at in (0, 8))
        return number, ended, self.shared[16:].partition(b"\0")[0].decode(errors="replace")


def work(first: int, limit: int, file: str) -> None:
    """Run cases from number `first` on, at most `limit`."""
    import faulthandler

    from python_tests.fuzz import run_case

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # a supervisor that has waited long enough asks where this hangs
    with open(file, "r+b") as opened:
        progress, supervisor = Progress(opened), os.getppid()
        for number in range(first, first + limit):
            if os.getppid() != supervisor:  # it was killed
                return
            progress.begin(number, number - first)
            if problem := run_case(number, progress.tell):
                sys.exit(problem)
        progress.begin(first + limit - 1, limit)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m python_tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=SECONDS, default=120, metavar="S", help="how long (default: 120)")
    parser.add_argument("--calls", type=POSITIVE, metavar="N", help="how many cases, instead")
    parser.add_argument("--seed", type=SEED, default=None, metavar="N", help="where to begin (default: anywhere)")
    parser.add_argument("--replay", type=SEED, metavar="NUMBER", help="run this one case")
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
    """Keep a worker at work until `calls` or, without, `seconds` are over; 1 if a case failed, or none was run."""
    began, done, failures = time.monotonic(), 0, 0
    deadline = None if calls else began + seconds
    kept = FAILURES / f"{first}.txt"
    while (done < calls if calls else time.monotonic() < began + seconds) and failures < MOST_FAILURES:
        limit = calls - done if calls else 10**9
        end = run_worker(first + done, limit, environment, deadline)
        done += end.ended + bool(end.problem)
        if end.problem:
            failures += 1
            report = f"case {end.number} failed: {end.problem}\n{end.call}\n{end.printed}\n"
            if limit > 1:
                alone = run_worker(end.number, 1, environment, None)
                report += f"by itself: {alone.problem or 'it does not fail'}\n{alone.printed}\n"
            kept.parent.mkdir(parents=True, exist_ok=True)
            with open(kept, "a") as file:
                file.write(report)
            print(f"fuzz: {report}fuzz: kept in {kept}")
            print(f"fuzz: again: python -m python_tests.fuzz --replay {end.number}", flush=True)
        elif limit == 1:
            print(f"{end.call}\n{end.printed}")
    print(f"fuzz: {done} cases in {time.monotonic() - began:.0f} s, {failures} failed", flush=True)
    return int(failures > 0 or done == 0)


@dataclass(frozen=True)
class End:
    """Of a worker: its last case, how many it ended, and, if that one failed, how, its calls, and what was printed."""

    number: int
    ended: int
    problem: str
    call: str
    printed: str


def run_worker(first: int, limit: int, environment: dict[str, str], deadline: float | None) -> End:
    """Let a process run cases until one fails, `limit` are done or one has ended after the `deadline`."""
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as log:
        progress = Progress(file)
        progress.begin(first, 0)
        progress.tell("the worker starts")
        command = [sys.executable, "-P", "-m", "python_tests.fuzz", "--worker", str(first), str(limit), file.name]
        worker = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        seen, since, problem = progress.read(), time.monotonic() + STARTS, ""
        try:
            while worker.poll() is None and not problem:
                time.sleep(0.1)
                if (now := progress.read()) != seen:
                    another, seen, since = now[1] > seen[1], now, time.monotonic()
                    if another and deadline is not None and since > deadline:
                        break
                if time.monotonic() > since + HANGS:
                    problem = f"it takes more than {HANGS} seconds"
                    worker.send_signal(signal.SIGUSR1)
                    time.sleep(1)
            if worker.returncode:
                problem = f"exit status {worker.returncode}"
        finally:
            worker.kill()
            worker.wait()
        number, ended, call = progress.read()
        log.seek(max(0, log.seek(0, os.SEEK_END) - PRINTED_BYTES))
        return End(number, ended, problem, call, log.read().decode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
