"""The measuring process: goes through the cases phase by phase, and writes each step to the journal before it takes it.

`bench.gpu.grid` says which cases and providers a phase has, and its share of the time; what is not reached is left out
and reported as such.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.options import POSITIVE, SECONDS

from ..providers import PROVIDERS
from ..registry import VERIFY_CASES
from . import grid, hardware, measure, rehearsal
from .clock import Clock
from .journal import Journal

DIED = 3
"""Exit code of a process that goes no further because the device does not."""
REPEATS = 20
WAYS = 3
"""Of timing a provider: cold by graph, cold by launches, and some of the warm ones."""
MOST_DEATHS = 2
"""A provider that took so many processes with it is left out altogether."""


def barred(journal: Journal) -> set[tuple[str | None, str | None]]:
    """Pairs (case, provider) not to be tried again; (None, provider) for a provider that keeps crashing."""
    failed = [f for f in journal.all("failed") if f["what"] in ("inputs", "prepare", "died")]
    deaths = Counter(f["provider"] for f in failed if f["what"] == "died" and f["provider"])
    pairs: set[tuple[str | None, str | None]] = {(f["case"], f["provider"]) for f in failed}
    return pairs | {(None, name) for name, count in deaths.items() if count >= MOST_DEATHS}


def work(phases: Sequence[grid.Phase], setup: measure.Setup, start: float, deadline: float) -> int:
    """Measure until everything is done or the time is over; `DIED` if another process must go on."""
    journal = setup.journal
    done = {tuple(pair) for pair in journal.all("finished")}
    out = barred(journal)
    begin = start
    for number, phase in enumerate(phases, start=1):
        until = start + phase.share * (deadline - start)
        # Half of the phase's time: the other half goes into inputs, warming up and capturing.
        seconds_each = 0.5 * (until - begin) / max(1, len(phase.cases) * len(phase.providers) * WAYS)
        begin = until
        for case in phase.cases:
            label = measure.name_of(case)
            if (number, label) in done or (label, None) in out:
                continue
            if time.time() > until:
                break
            try:
                rows = measure.measure(case, phase.providers, setup, out, REPEATS, seconds_each, phase.launches)
            except measure.Broken:
                return DIED
            journal.write(rows=rows)
            journal.write(finished=[number, label])
            torch.cuda.empty_cache()
    return 0


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.worker", description=__doc__)
    parse.add_argument("--journal", type=Path, required=True)
    parse.add_argument("--start", type=SECONDS, required=True, help="seconds since the epoch")
    parse.add_argument("--deadline", type=SECONDS, required=True)
    parse.add_argument("--rehearse", action="store_true", help="no GPU: small cases on the CPU, with stand-in events")
    parse.add_argument("--plan", choices=grid.PLANS, default="verify_chain", help="what is measured")
    parse.add_argument("--providers", nargs="+", choices=PROVIDERS, help="only these")
    parse.add_argument("--case", nargs="+", choices=VERIFY_CASES)
    parse.add_argument("--vocab", nargs="+", type=POSITIVE)
    parse.add_argument("--batch", nargs="+", type=POSITIVE)
    parse.add_argument("--draft", nargs="+", type=POSITIVE)
    return parse


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends with an error if one of them asks for something that the plan does not measure."""
    parse = parser()
    options = parse.parse_args(arguments)
    for name in ("case", "draft") if options.plan == "ops" else ():
        if getattr(options, name):
            parse.error(f"--{name} must be left out with --plan ops, which has its own")
    phases = phases_of(options, "cuda")
    cases = [case for phase in phases for case in phase.cases]
    measured: dict[str, set[Any]] = {
        "case": {case.name for case in cases}, "vocab": {case.vocab for case in cases},
        "batch": {case.batch for case in cases}, "draft": {case.num_draft for case in cases},
        "providers": {name for phase in phases for name in phase.providers},
    }  # fmt: skip
    for name, known in measured.items():
        if beyond := [value for value in getattr(options, name) or () if value not in known]:
            parse.error(f"--{name} must be of what --plan {options.plan} measures with these options, got {beyond[0]}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    with rehearsal.device(options.rehearse):
        return run(options)


def phases_of(options: argparse.Namespace, device: str) -> list[grid.Phase]:
    """The plan's phases, as far as the options ask for them."""
    sizes = rehearsal.SIZES if options.rehearse else {}
    asked = {"vocabs": options.vocab, "batches": options.batch, "drafts": options.draft, "names": options.case}
    some = grid.Sizes(**{**sizes, **{k: v for k, v in asked.items() if v}})
    phases = grid.PLANS[options.plan](device, some)
    if options.providers:
        phases = [replace(p, providers=tuple(n for n in p.providers if n in options.providers)) for p in phases]
    return [phase for phase in phases if phase.cases and phase.providers]


def run(options: argparse.Namespace) -> int:
    """One measuring process, from its options."""
    device = "cpu" if options.rehearse else "cuda"
    if options.rehearse:
        torch.set_num_threads(1)
    phases = phases_of(options, device)
    journal = Journal(options.journal)
    facts: dict[str, Any] = next(iter(journal.all("facts")), {})
    clock = Clock(device, hardware.cache_bytes())
    if not facts:
        size = rehearsal.COPY_BYTES if options.rehearse else hardware.COPY_BYTES
        with journal.step("hardware", None, "copy", measure.TIMING_S):
            copied, read = hardware.copy_gb_per_s(device, clock, size), hardware.read_gb_per_s(device, clock, size)
        everybody = dict.fromkeys(name for phase in phases for name in phase.providers)
        ops = {case.op for phase in phases for case in phase.cases}
        missing = {name: why for name in everybody for op in ops if (why := PROVIDERS[name].why_missing(op, device))}
        facts = {
            "gpu": hardware.describe(), "copy_gb_per_s": copied, "read_gb_per_s": read,
            "cases_of_phases": [len(phase.cases) for phase in phases], "missing": missing,
        }  # fmt: skip
        journal.write(facts=facts)
    best = max(facts["copy_gb_per_s"], facts["read_gb_per_s"])
    setup = measure.Setup(device, clock, hardware.cache_bytes(), best, journal)
    gc.collect()
    gc.freeze()  # every capture collects garbage: keep it from scanning all modules each time
    with torch.inference_mode():
        return work(phases, setup, options.start, options.deadline)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # on a broken device a regular exit would fail too
