"""Measure ops against their peers, interleaved in one process: ``python -m bench.run --op verify_chain``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specdec_kernels.options import POSITIVE, SECONDS, THREADS, fill

from . import inputs, machine, report
from .inputs import Case
from .providers import PROVIDERS
from .registry import BATCHES, REGISTRY, VOCABS
from .timing import Call, interleave, peak_memory

PUBLISHED = machine.RESULTS / machine.label()
"""Where results are saved that pages quote."""


def build(case: Case, names: Sequence[str]) -> dict[str, Call]:
    """The calls of the providers that are present and offer this case."""
    calls = {}
    for name in names:
        builder = PROVIDERS[name].builders.get(case.op)
        call = None if builder is None or PROVIDERS[name].why_missing(case.op, case.device) else builder(case)
        if call is not None:
            calls[name] = call
    return calls


def input_sets(case: Case) -> list[Any]:
    """As many input sets as it takes to keep the caches cold."""
    generator = torch.Generator().manual_seed(0)
    make = REGISTRY[case.op].make
    first = make(case, generator)
    logits = getattr(first, "target_logits", getattr(first, "logits", None))
    surely_read = 8 if logits is None else int(logits.nbytes * REGISTRY[case.op].least_read)
    held = inputs.bytes_held(list(vars(first).values()))
    return [first, *(make(case, generator) for _ in range(inputs.num_sets(surely_read, held) - 1))]


def memory(case: Case, name: str, call: Call, one: Any) -> dict[str, int | None]:
    """Extra memory of `call`. Whatever a provider sets up once is done before, on a tiny case, so that scratch space
    kept between calls of this size is seen; what is compiled for its shapes is warmed up on these."""
    if name == "compile":
        call(one)
    else:
        tiny = replace(case, vocab=64)
        small = PROVIDERS[name].builders[case.op](tiny)
        assert small is not None
        small(REGISTRY[case.op].make(tiny, torch.Generator().manual_seed(0)))
    return peak_memory(lambda: call(one))


def measure(case: Case, names: Sequence[str], repeats: int, seconds_each: float) -> list[dict[str, Any]]:
    """One row of results per provider. Memory's bandwidth is taken before and after, as others may use it too."""
    entry = REGISTRY[case.op]
    calls = build(case, names)
    sets = input_sets(case)
    peaks = {name: memory(case, name, call, sets[0]) for name, call in calls.items()}
    bandwidth = machine.read_gb_per_s()
    samples = interleave(
        calls, sets, lambda step, output: entry.bytes_read(case, step, output),
        hot=case.cache == "hot", repeats=repeats, seconds_each=seconds_each,
    )  # fmt: skip
    if not samples:
        return []
    bandwidth = max(bandwidth, machine.read_gb_per_s())
    fastest = min(samples, key=lambda name: statistics.median(samples[name].seconds))
    described = {
        "id": str(case), "case": case.name, "vocab": case.vocab, "batch": case.batch, "num_draft": case.num_draft,
        "dtype": str(case.dtype).removeprefix("torch."), "cache": case.cache, "input_sets": len(sets),
        "tokens_per_step": tokens_per_step(case, calls[fastest], sets) if case.op.startswith("verify") else None,
    }  # fmt: skip
    rows = []
    for name, sample in samples.items():
        found = sample.summary()
        share = found["gb_per_s"] / bandwidth
        rows.append({**described, "provider": name, **found, "share_of_bandwidth": share, **peaks[name]})
    return rows


def tokens_per_step(case: Case, call: Call, sets: Sequence[Any]) -> float:
    """Mean tokens emitted per sequence and step: what the inputs' acceptance really amounts to."""
    rounds = max(1, 200 // (case.batch * len(sets)))  # each with other uniforms
    return 1 + statistics.fmean(call(step)[1].float().mean().item() for _ in range(rounds) for step in sets)


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parse.add_argument("--op", nargs="+", choices=REGISTRY, default=list(REGISTRY), help="default: all")
    parse.add_argument(
        "--providers",
        nargs="+",
        choices=PROVIDERS,
        default=[name for name, p in PROVIDERS.items() if not p.gpu],
        help="default: all here",
    )
    parse.add_argument("--case", nargs="+", help="names of cases, such as T=1 truncated greedy overhead; default: all")
    for name, usual, what in (("vocab", VOCABS, "target ids"), ("batch", BATCHES, "sequences")):
        shown = " ".join(map(str, usual))
        parse.add_argument(f"--{name}", nargs="+", type=POSITIVE, default=list(usual), help=f"{what}; default: {shown}")
    parse.add_argument("--cache", choices=("cold", "hot"), help="only these; default: both")
    parse.add_argument("--threads", type=THREADS, help="default: torch's")
    parse.add_argument("--repeats", type=POSITIVE, help="timings of a provider and case, at most; default: 60")
    parse.add_argument("--seconds", type=SECONDS, help="time for a provider and case; default: 4")
    parse.add_argument("--quick", action="store_true", help="few timings: to see that everything runs")
    parse.add_argument(
        "--save", type=Path, nargs="?", const=PUBLISHED, metavar="FOLDER",
        help="write FOLDER/<op>.json; without FOLDER: bench/results/<this machine> (commands in old results call this "
        "option --json)",
    )  # fmt: skip
    parse.add_argument(
        "--json", action="store_true", help="print rows and targets as one JSON document; all else goes to stderr"
    )
    return parse


def why_not(folder: Path, wanted: Mapping[str, Sequence[Case]], options: argparse.Namespace) -> str | None:
    """Why nothing could be saved there, if so: known before minutes of measuring."""
    if folder.suffix == ".json" or (folder.exists() and not folder.is_dir()):
        return f"--save must be given a folder, got {folder}"
    if folder.resolve() != PUBLISHED.resolve():
        return None
    if options.quick:
        return "--save must be given a folder of its own with --quick, whose figures mean nothing"
    whole = parser().parse_args([])
    all_cases = all(getattr(options, name) == getattr(whole, name) for name in ("case", "vocab", "batch", "cache"))
    for op, cases in wanted.items():
        path = folder / f"{op}.json"
        if not cases or not path.exists():
            continue
        here = {name for name in options.providers if PROVIDERS[name].why_missing(op, "cpu") is None}
        measured = None if all_cases else {str(case) for case in cases}  # a case that no longer exists is no loss
        rows = json.loads(path.read_text())["rows"]
        lost = [r for r in rows if r["provider"] not in here or (measured is not None and r["id"] not in measured)]
        if lost:
            return f"--save must be given another folder: {path} holds {len(lost)} rows that this would not measure"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parse = parser()
    options = parse.parse_args(arguments)
    known = {case.name for op in options.op for case in REGISTRY[op].cases(options.vocab, options.batch)}
    if unknown := set(options.case or ()) - known:
        parse.error(f"no case named {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    fill(parse, options, usual={"repeats": 60, "seconds": 4.0}, quick={"repeats": 8, "seconds": 0.3})
    wanted = {
        op: [
            case
            for case in REGISTRY[op].cases(options.vocab, options.batch)
            if (not options.case or case.name in options.case) and options.cache in (None, case.cache)
        ]
        for op in options.op
    }
    if options.save:
        if why := why_not(options.save, wanted, options):
            parse.error(why)
        options.save.mkdir(parents=True, exist_ok=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    say = partial(print, file=sys.stderr if options.json else sys.stdout)
    load = machine.describe()["load_average"]
    say(f"{machine.cpu_model()}, {torch.get_num_threads()} threads, load {load:.2f}")
    bandwidth = machine.read_gb_per_s()
    say(f"memory read by torch.sum: {bandwidth:.1f} GB/s")
    for name in options.providers:
        missing = {op: why for op in options.op if (why := PROVIDERS[name].why_missing(op, "cpu"))}
        for why in dict.fromkeys(missing.values()):
            say(f"without {name}: {why}")
    settings = {
        "threads": torch.get_num_threads(), "repeats": options.repeats, "seconds": options.seconds,
        "read_gb_per_s": bandwidth, "acceptance": inputs.ACCEPTANCE,
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    for op in options.op:
        rows: list[dict[str, Any]] = []
        progress = tqdm(wanted[op], desc=op, disable=None, leave=False)
        for case in progress:
            progress.set_postfix_str(str(case))
            new = measure(case, options.providers, options.repeats, options.seconds)
            rows += new
            if new:
                progress.write(f"\n{op} {report.table(new)}", file=sys.stderr if options.json else sys.stdout)
        reached = report.targets(op, rows)
        found += reached
        measured += [{"op": op, **row} for row in rows]
        if options.save and rows:
            say("wrote", machine.save(options.save, op, rows, settings, reached))
    if found:
        say("\n" + report.targets_table(found))
    if options.json:
        print(json.dumps({"rows": measured, "targets": found}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
