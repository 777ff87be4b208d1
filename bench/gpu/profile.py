"""What Nsight Compute says of each kernel: ``python -m bench.gpu.profile`` writes ``profile.json``.

The clocks are left as they are (``--clock-control none``). Each case runs in its own process of the profiler; with
``--only`` this is the program that is profiled.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.options import COUNT, POSITIVE, SECONDS, device

from .. import inputs, machine
from ..inputs import Case
from ..providers import PROVIDERS
from . import drafts, grid, process, rehearsal
from .measure import name_of

LABELS = {"Kernel Name": "kernel", "Grid Size": "grid", "Block Size": "block"}
METRICS = {
    "gpu__time_duration.sum": "duration",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
    "launch__waves_per_multiprocessor": "waves",
}


def cases(device: str, vocab: int = grid.VOCAB, batches: Sequence[int] = (32, 1, 256)) -> list[Case]:
    """Plain and truncated, few to many sequences."""
    return grid.cases(device, grid.Sizes([vocab], batches, [5], ["T=1", "truncated"]))


def once(number: int, provider: str, device: str, vocab: int) -> None:
    """The profiled program: one case, warm, then one call with the profiler on."""
    case = cases(device, vocab)[number]
    call = PROVIDERS[provider].builders["verify_chain"](case)
    assert call is not None
    step = inputs.chain(case, torch.Generator(device).manual_seed(0), drafts.drafted)
    with rehearsal.pretended() if device == "cpu" else contextlib.nullcontext():
        for _ in range(2):
            call(step)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call(step)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def read(text: str) -> list[dict[str, Any]]:
    """The kernels in the output of ``--page raw --csv``: a line of names, a line of units, then one line per kernel."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return []
    names, units, *rest = csv.reader(lines[first:])
    found = []
    for values in rest:
        if len(values) != len(names):
            continue
        row = dict(zip(names, values, strict=True))
        unit = dict(zip(names, units, strict=True))
        kernel: dict[str, Any] = {short: row.get(name) for name, short in LABELS.items()}
        for metric, short in METRICS.items():
            if metric in row:
                kernel[short] = f"{row[metric]} {unit[metric]}".strip()
        found.append(kernel)
    return found


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.profile", description=__doc__)
    parse.add_argument("--budget", type=SECONDS, default=120.0, help="seconds; default: 120")
    parse.add_argument("--folder", type=Path, help="default: bench/results/<the GPU>")
    parse.add_argument("--logs", type=Path, default=process.LOGS)
    parse.add_argument("--tool", help="default: ncu, where it is found")
    parse.add_argument("--provider", default="cuda")
    parse.add_argument("--device", type=device, default="cuda")
    parse.add_argument("--vocab", type=POSITIVE, default=grid.VOCAB)
    parse.add_argument("--most", type=POSITIVE, help="so many cases at most; default: all")
    parse.add_argument("--only", type=COUNT, help=argparse.SUPPRESS)
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.only is not None:
        once(options.only, options.provider, options.device, options.vocab)
        return 0
    tool = options.tool or process.find("ncu")
    if tool is None:
        print("ncu (Nsight Compute) was not found")
        return process.ABSENT
    deadline = time.monotonic() + options.budget
    rows: list[dict[str, Any]] = []
    bad = unfinished = False
    some = cases(options.device, options.vocab)[: options.most]
    for number, case in enumerate(some):
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{len(some) - number} of {len(some)} cases: no time was left")
            unfinished = True
            break
        with tempfile.TemporaryDirectory() as scratch:
            table = Path(scratch) / "kernels.csv"
            command = [
                tool, "--csv", "--page", "raw", "--log-file", str(table), "--profile-from-start", "off",
                "--clock-control", "none", "--metrics", ",".join(METRICS), sys.executable, "-m", "bench.gpu.profile",
                "--only", str(number), "--provider", options.provider, "--device", options.device,
                "--vocab", str(options.vocab),
            ]  # fmt: skip
            outcome = process.run(command, left, options.logs / f"profile-{number}.log")
            kernels = read(table.read_text()) if table.exists() else []
        for kernel in kernels:
            rows.append({"case": name_of(case), **kernel})
            print(f"{name_of(case)}: {', '.join(f'{k} {v}' for k, v in kernel.items())}")
        if outcome.code is None:
            unfinished = True
            print(f"{name_of(case)}: {len(kernels)} kernels, not finished in {outcome.seconds:.0f} s")
        elif outcome.code != 0 or not kernels:
            bad = True
            print(f"{name_of(case)}: {len(kernels)} kernels, exit code {outcome.code}\n{outcome.tail()}")
    if rows:
        folder = rehearsal.folder(options.folder, options.device == "cpu")
        print("wrote", machine.save(folder, "profile", rows, {"provider": options.provider}))
    return 1 if bad else process.UNFINISHED if unfinished else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
