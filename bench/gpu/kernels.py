"""Every kernel of every op, seen by torch's profiler: ``python -m bench.gpu.kernels --folder FOLDER``.

A table of each kernel's time, grid, registers and shared memory in the registry's cases at few and many sequences, with
the clocks before, under load and after. The times are the profiler's, from one call each on a warm cache: they show
where the time of a call goes; how long a call takes, `bench.gpu.bench` tells.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import machine
from ..inputs import OVERHEAD, Case
from ..providers import PROVIDERS
from ..registry import MATCH, REGISTRY, VERIFY_CASES
from ..timing import quiet
from . import grid, hardware, measure, rehearsal, strategy
from .names import shortened

BATCHES = (1, 64)
ARGS = {
    "grid": "grid", "block": "block", "registers per thread": "registers", "shared memory": "shared_bytes",
    "est. achieved occupancy %": "occupancy_percent",
}  # fmt: skip
LOAD_S = 1.0


def cases(device: str, vocab: int = grid.VOCAB, batches: Sequence[int] = BATCHES) -> list[tuple[Case, str]]:
    """Cases and providers: every rule of a chain, a chain in every layout, every other op."""
    shared: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    chains = grid.cases(device, grid.Sizes([vocab], batches, [5], tuple(VERIFY_CASES)))
    chains += [Case("verify_chain", "match", vocab, b, **shared, **MATCH) for b in batches]
    others = [
        replace(case, **shared)
        for op in REGISTRY
        for case in REGISTRY[op].cases([vocab], [b for b in batches if b <= 32])
        if op != "verify_chain" and case.name != OVERHEAD
    ]
    layouts = [(chains[0], f"cuda, {name}") for name in strategy.LAYOUTS]
    return [*((case, "cuda") for case in (*chains, *others)), *layouts]


def traced(call: Any, step: Any) -> list[dict[str, Any]]:
    """What the profiler saw of one call."""
    activities = torch.profiler.supported_activities()
    with quiet(), torch.profiler.profile(activities=activities) as profiler:
        call(step)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels among a trace's events, in their order."""
    found = []
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"]):
        args = event.get("args", {})
        facts = {short: args[name] for name, short in ARGS.items() if name in args}
        found.append({"kernel": shortened(event["name"])[:60], "us": event["dur"], **facts})
    return found


def under_load(device: str, cache_bytes: int) -> dict[str, str] | None:
    """The GPU's state while it has been reading memory for a second or so."""
    data = torch.ones(32 * max(cache_bytes, 2**20) // 4, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    data.sum()
    end.record()
    end.synchronize()
    for _ in range(min(20_000, int(LOAD_S * 1e3 / max(start.elapsed_time(end), 1e-3)))):
        data.sum()
    return hardware.state()


def line(row: dict[str, Any]) -> str:
    """One kernel of the table."""
    facts = (f"{row[name]}" if name in row else "-" for name in ARGS.values())
    return f"{row['case']:40}{row['kernel']:44}{row['us']:9.1f}  " + "  ".join(facts)


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.kernels", description=__doc__)
    parse.add_argument("--folder", type=Path, required=True)
    parse.add_argument("--rehearse", action="store_true", help="small cases on the CPU; a made-up kernel a call")
    options = parse.parse_args(arguments)
    folder = rehearsal.folder(options.folder, options.rehearse)
    with rehearsal.device(options.rehearse) as device:
        some = cases(device, 300, (1, 3)) if options.rehearse else cases(device)
        see = (lambda call, step: rehearsal.TRACE) if options.rehearse else traced
        return run(some, folder, device, see, options.rehearse)


def run(some: Sequence[tuple[Case, str]], folder: Path, device: str, see: Any, rehearsing: bool) -> int:
    """Every case; the file is rewritten after each."""
    if rehearsing:
        print(rehearsal.NOTICE)
    states = {"before": hardware.state()}
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    settings: dict[str, Any] = {"gpu": hardware.describe(), "states": states, "failed": failed}
    for case, provider in some:
        label = measure.name_of(case) + provider.removeprefix("cuda")
        call = PROVIDERS[provider].builders[case.op](case)
        assert call is not None
        try:
            step = measure.make(case, torch.Generator(device).manual_seed(0))
            measure.check(case, step, call(step))  # this also sets up what is set up once
            found = kernels(see(call, step))
        except Exception as error:  # a failure is one row less; on a broken device all later ones fail, and say so
            failed.append(f"{label}: {measure.describe(error)}")
            continue
        rows += [{"case": label, **kernel} for kernel in found]
        machine.save(folder, "kernels", rows, settings)
    states["under load"] = under_load(device, hardware.cache_bytes())
    machine.save(folder, "kernels", rows, settings)
    print(f"{'':40}{'kernel':44}{'µs':>9}  {'  '.join(ARGS.values())}")
    print(*map(line, rows), *(f"FAILED: {text}" for text in failed), sep="\n")
    for when, state in states.items():
        print(f"{when}: {state or 'nvidia-smi says nothing'}")
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
