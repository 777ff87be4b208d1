"""The measuring process: goes through the cases by phases, and writes each step to the journal before it takes it.

1. this package's backends in every case, 2. all peers with them, 3. what compiles for each case. Each phase has a share
of the time; what it does not reach is left out and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..inputs import Case
from ..providers import PROVIDERS
from ..registry import VERIFY_CASES
from . import grid, hardware, measure, rehearsal
from .clock import Clock
from .journal import Journal

DIED = 3
"""Exit code of a process that goes no further because the device does not."""
SHARES = (0.45, 0.8, 1.0)
"""How much of the time has passed when a phase ends."""
REPEATS = 20
MOST_DEATHS = 2
"""A provider that took so many processes with it is left out altogether."""


def barred(journal: Journal) -> set[tuple[str | None, str | None]]:
    """(case, provider) that are not to be tried again; (None, provider) for a provider that crashes again and again."""
    failed = [f for f in journal.all("failed") if f["what"] in ("inputs", "prepare", "died")]
    deaths = Counter(f["provider"] for f in failed if f["what"] == "died" and f["provider"])
    pairs: set[tuple[str | None, str | None]] = {(f["case"], f["provider"]) for f in failed}
    return pairs | {(None, name) for name, count in deaths.items() if count >= MOST_DEATHS}


def phases(cases: Sequence[Case], roster: grid.Roster) -> list[tuple[Sequence[Case], tuple[str, ...]]]:
    """The cases and providers of each phase."""
    central = [case for case in cases if grid.is_central(case)]
    together = (*roster.own, *roster.peers)
    return [(cases, roster.own), (cases, together), (central if roster.slow else [], (*roster.own, *roster.slow))]


def work(cases: Sequence[Case], roster: grid.Roster, setup: measure.Setup, start: float, deadline: float) -> int:
    """Measure until everything is done or the time is over; `DIED` where another process must go on."""
    journal = setup.journal
    done = {tuple(pair) for pair in journal.all("finished")}
    out = barred(journal)
    seconds_each = (deadline - start) / (54 * len(cases))  # some 9 providers and 3 ways each, in half of the time
    for number, (some, names) in enumerate(phases(cases, roster), start=1):
        until = start + SHARES[number - 1] * (deadline - start)
        for case in some:
            label = measure.name_of(case)
            if (number, label) in done or (label, None) in out:
                continue
            if time.time() > until:
                break
            try:
                rows = measure.measure(
                    case, names, setup, out, REPEATS, seconds_each, number == 2 and case.num_draft == 5
                )
            except measure.Broken:
                return DIED
            journal.write(rows=rows)
            journal.write(finished=[number, label])
            torch.cuda.empty_cache()
    return 0


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.worker", description=__doc__)
    parse.add_argument("--journal", type=Path, required=True)
    parse.add_argument("--start", type=float, required=True, help="seconds since the epoch")
    parse.add_argument("--deadline", type=float, required=True)
    parse.add_argument("--rehearse", action="store_true", help="no GPU: small cases on the CPU, with stand-in events")
    parse.add_argument("--providers", nargs="+", choices=PROVIDERS, help="only these")
    parse.add_argument("--case", nargs="+", choices=VERIFY_CASES, default=list(VERIFY_CASES))
    parse.add_argument("--vocab", nargs="+", type=int)
    parse.add_argument("--batch", nargs="+", type=int)
    parse.add_argument("--draft", nargs="+", type=int)
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    with rehearsal.pretended() if options.rehearse else contextlib.nullcontext():
        return run(options)


def run(options: argparse.Namespace) -> int:
    """One measuring process, from its options."""
    device = "cpu" if options.rehearse else "cuda"
    if options.rehearse:
        torch.set_num_threads(1)
    sizes = rehearsal.SIZES if options.rehearse else {}
    asked = {"vocabs": options.vocab, "batches": options.batch, "drafts": options.draft}
    cases = grid.cases(device, names=options.case, **{**sizes, **{k: v for k, v in asked.items() if v}})
    roster = grid.REHEARSAL if options.rehearse else grid.GPU
    if options.providers:
        roster = grid.Roster(*(tuple(n for n in g if n in options.providers) for g in vars(roster).values()))
    journal = Journal(options.journal)
    facts: dict[str, Any] = next(iter(journal.all("facts")), {})
    clock = Clock(device, hardware.cache_bytes())
    if not facts:
        copy_bytes = rehearsal.COPY_BYTES if options.rehearse else hardware.COPY_BYTES
        with journal.step("hardware", None, "copy", measure.TIMING_S):
            rate = hardware.copy_gb_per_s(device, clock, copy_bytes)
        everybody = [name for group in vars(roster).values() for name in group]
        missing = {name: PROVIDERS[name].why_missing("verify_chain", device) for name in everybody}
        facts = {
            "gpu": hardware.describe(), "copy_gb_per_s": rate, "num_cases": len(cases),
            "missing": {name: why for name, why in missing.items() if why},
        }  # fmt: skip
        journal.write(facts=facts)
    setup = measure.Setup(device, clock, hardware.cache_bytes(), facts["copy_gb_per_s"], journal)
    gc.collect()
    gc.freeze()  # every capture collects garbage: let it not go through all modules each time
    with torch.inference_mode():
        return work(cases, roster, setup, options.start, options.deadline)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a broken device would also break the way out
