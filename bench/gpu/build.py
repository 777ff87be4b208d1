"""Build for the GPU that is here, and run every kernel once: ``python -m bench.gpu.build --budget 180``.

Four programs: the build, in place; at the same time the compilation of peers that compile themselves; every op in every
layout against the reference (`bench.gpu.exercise`); the table of kernels (`bench.gpu.kernels`).
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import process, rehearsal

PEERS = ("-m", "bench.providers.beside")
EXERCISE = ("-m", "bench.gpu.exercise", "--most-shapes", "2")
KERNELS = ("-m", "bench.gpu.kernels")


def architecture(capability: str) -> str:
    """``9.0`` as the build wants it, ``90a``: from Hopper on, features specific to this kind of GPU are compiled in."""
    major, minor = capability.split(".")
    return f"{major}{minor}" + ("a" if int(major) >= 9 else "")


def environment(capability: str | None) -> Mapping[str, str]:
    """The environment that builds for this GPU alone; a missing nvcc is an error. None: for a rehearsal."""
    if capability is None:
        return {"SPECDEC_CUDA": "0"}
    return {"SPECDEC_CUDA": "1", "SPECDEC_CUDA_ARCHS": architecture(capability)}


def steps(folder: Path, capability: str | None) -> dict[str, list[str]]:
    """The programs to run in turn. A rehearsal asks the build for its help only: others may use what is built."""
    if capability is None:
        return {
            "build": ["setup.py", "build_ext", "--help"],
            "every op against the reference": [*EXERCISE[:-1], "1", "--backend", "cpu", "--device", "cpu"],
            "kernels": [*KERNELS, "--folder", str(folder), "--rehearse"],
        }
    return {
        "build": ["setup.py", "build_ext", "--inplace"],
        "every op against the reference": [*EXERCISE],
        "kernels": [*KERNELS, "--folder", str(folder)],
    }


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.build", description=__doc__)
    parse.add_argument("--budget", type=float, default=180.0, help="seconds; default: 180")
    parse.add_argument("--folder", type=Path, required=True, help="for the results")
    parse.add_argument("--logs", type=Path, default=process.LOGS)
    parse.add_argument("--capability", help="of the GPU, as 9.0; none: a rehearsal")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    folder = rehearsal.folder(options.folder, not options.capability)
    deadline = time.monotonic() + options.budget
    said: list[str] = []

    def peers() -> None:
        outcome = process.run([sys.executable, *PEERS], options.budget, options.logs / "build-peers.log")
        said.append(f"peers: {outcome.tail(3) if outcome.code is not None else 'their time was over'}")

    beside = threading.Thread(target=peers, daemon=True)
    beside.start()
    code = 0
    for number, (what, command) in enumerate(steps(folder, options.capability).items(), start=1):
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{what}: no time was left")
            code = code or process.UNFINISHED
            continue
        log = options.logs / f"build-{number}.log"
        outcome = process.run([sys.executable, *command], left, log, environment(options.capability))
        reason = {0: "done", None: "not finished"}.get(outcome.code, "FAILED")
        print(f"{what}: {reason} ({outcome.seconds:.0f} s)\n{outcome.tail(90 if what == 'kernels' else 3)}", flush=True)
        if outcome.code is None:
            code = code or process.UNFINISHED
        elif outcome.code:
            code = 1
            print(outcome.tail(30))
            if number == 1:
                break  # what follows would test an older build
    beside.join(max(1.0, deadline - time.monotonic()))
    print(*said, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
