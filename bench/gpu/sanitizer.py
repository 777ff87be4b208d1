"""compute-sanitizer on the ops: ``python -m bench.gpu.sanitizer --budget 90``.

racecheck and memcheck on `bench.gpu.exercise`, then memcheck on the tests of the ops on the device, as far as the time
allows. A run that is stopped has not failed if the tool had found nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import process

FOUND = 86
"""Exit code that the tool is told to give where it found an error."""
REFUSED = "Device not supported"
"""What the tool says on some virtual machines."""
EXERCISE = ("-m", "bench.gpu.exercise")
# A capture cannot allocate in the way set below.
TESTS = ("-m", "pytest", "python_tests/ops", "-q", "-x", "-k", "cuda-cuda and not captured", "-p", "no:cacheprovider")
# Otherwise a write past a tensor's end lands in the cached block it was cut from, and nobody sees it.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def steps(rehearse: bool) -> list[tuple[str, tuple[str, ...], float]]:
    """Tool, program, and the share of the remaining time which it may take."""
    if rehearse:
        return [("memcheck", (*EXERCISE, "--backend", "cpu", "--device", "cpu", "--most-shapes", "1"), 1.0)]
    return [
        ("racecheck", (*EXERCISE, "--most-shapes", "2"), 0.4),
        ("memcheck", EXERCISE, 0.6),
        ("memcheck", TESTS, 1.0),
    ]


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.sanitizer", description=__doc__)
    parse.add_argument("--budget", type=float, default=90.0, help="seconds; default: 90")
    parse.add_argument("--logs", type=Path, default=process.LOGS)
    parse.add_argument("--tool", help="default: compute-sanitizer, where it is found")
    parse.add_argument("--rehearse", action="store_true", help="the CPU's kernels")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    tool = options.tool or process.find("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer was not found")
        return process.ABSENT
    deadline = time.monotonic() + options.budget
    bad = unfinished = False
    for number, (kind, program, share) in enumerate(steps(options.rehearse), start=1):
        left = share * (deadline - time.monotonic())
        what = f"{kind} on {program[1] if program[1] != 'pytest' else 'the tests of the ops'}"
        if left < 1:
            print(f"{what}: no time was left")
            unfinished = True
            continue
        told = ["--tool", kind, "--error-exitcode", str(FOUND), "--print-limit", "20", "--report-api-errors", "no"]
        command = [tool, *told, sys.executable, *program]
        outcome = process.run(command, left, options.logs / f"sanitizer-{number}-{kind}.log", ENVIRONMENT)
        # A summary names what it counts even where that is none: "RACECHECK SUMMARY: 0 hazards displayed".
        errors = [line for line in outcome.text().splitlines() if "=========" in line and "SUMMARY" not in line]
        if REFUSED in outcome.text():
            print(f"{what}: {REFUSED}")
            return 1 if bad else process.ABSENT
        if outcome.code is None:
            wrong = any("Invalid" in line or "hazard" in line for line in errors)
            unfinished = True
            print(f"{what}: {'ERRORS' if wrong else 'no error so far'}, not finished in {outcome.seconds:.0f} s")
        else:
            wrong = outcome.code != 0
            reason = "found errors" if outcome.code == FOUND else f"ended with exit code {outcome.code}"
            print(f"{what}: {reason if wrong else 'no error'} ({outcome.seconds:.0f} s)")
        if wrong:
            print(outcome.tail())
        bad |= wrong
    return 1 if bad else process.UNFINISHED if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
