"""MODEL: what a GPU should take for the benchmark's cells, from counts and a data sheet: ``python -m bench.gpu.model``.

No figure of it is measured. The CUDA kernels run in the emulator (csrc/emulator), which counts what they do: launches,
blocks, bytes, barriers, collectives, atomics; ``make resources`` leaves machine code, in which the instructions per
tile are counted where they can be found (`sass`). `CARDS` and `COSTS` turn counts into microseconds, `terms` says how,
and every term is listed beside the sum, so that a measurement can show which of them is wrong. Counts are taken when
this runs, so a kernel that changed gets a new prediction.

Up to `SAMPLE` sequences are emulated, on a device with the same share of the card's multiprocessors, so that the layout
and the blocks per row are those of the whole batch; totals are scaled up. Writes ``bench/model/<GPU>.json`` and
``.png``.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sk
from specdec_kernels.options import POSITIVE

from .. import inputs, machine
from ..inputs import Case
from ..report import Row
from . import grid, sass
from .process import ROOT
from .sass import FOLDER

OBJECTS = ROOT / "build/obj/kernels"
SAMPLE = 4
NOTICE = "MODEL, not measured"
NUMBERS = (
    "blocks", "threads", "cluster", "overlapping", "bytes", "most_bytes", "loading", "barriers", "cluster_barriers",
    "atomics", "most_collectives", "shared_atomics", "rounds", "most_copied",
)  # fmt: skip
"""What specdec_emulator_counted gives of a launch, in its order. "atomics" are those on device memory, "rounds" those
of loads that come one after the other, on the longest way through a block, "most_copied" a block's bytes that bulk
copies bring."""


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet; the clock is derived from the sheet's float32 rate and the number of multiprocessors."""

    multiprocessors: int
    gb_per_s: float
    float32_tflops: float
    source: str

    @property
    def ghz(self) -> float:
        """From 128 fused multiply-adds per multiprocessor and cycle."""
        return self.float32_tflops * 1e3 / (self.multiprocessors * 128 * 2)


CARDS: Mapping[str, Card] = {
    "nvidia-h100-80gb-hbm3": Card(
        132, 3350, 67, "NVIDIA H100 data sheet, SXM; 132 SMs: NVIDIA H100 architecture paper"
    ),
    "nvidia-h200": Card(132, 4800, 67, "NVIDIA H200 data sheet, SXM; 132 SMs: GH100 as in the H100"),
}
COSTS: Mapping[str, tuple[float, str]] = {
    "share of the bandwidth": (0.9, "assumed: what large copies reach, 3.0 of 3.35 and 4.3 of 4.8 TB/s"),
    "first launch, µs": (grid.LAUNCH_US, "bench/gpu/grid.py"),
    "later launch, µs": (1.0, "assumed: a kernel node behind another in a graph"),
    "overlapping launch, µs": (0.5, "assumed: programmatic dependent launch"),
    "prologue, µs": (0.5, "assumed: parameters, shared memory, the first instructions"),
    "load, cycles": (800, "assumed: device memory with its address translation, a chain of loads"),
    "bytes in flight a thread": (64, "csrc/cuda/row.cuh: load_tile has four loads of 16 bytes under way"),
    "bytes a cycle and multiprocessor": (64, "NVIDIA A100 architecture paper: the L2's port"),
    "blocks a multiprocessor": (2, "the kernels' __launch_bounds__"),
    "barrier, cycles": (40, "assumed"),
    "cluster barrier, cycles": (250, "assumed"),
    "collective, cycles": (12, "assumed: between a shuffle's 23 where the next waits for it and one a cycle or two"),
    "atomic, cycles": (800, "assumed: one round to the L2 for all that meet there"),
    "instructions a cycle and multiprocessor": (4, "four schedulers, NVIDIA H100 architecture paper"),
}
"""Each with where it comes from. "assumed" ones are what a measurement is to correct."""


def cost(name: str) -> float:
    return COSTS[name][0]


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the emulator counted it, for the whole batch; `instructions`: warp instructions per KiB
    loaded, None if there is no machine code or it has no such loop.
    """

    kernel: str
    counts: Mapping[str, float]
    instructions: float | None = None


def terms(launch: Launch, card: Card, first: bool) -> dict[str, float]:
    """Microseconds by term. Work that can overlap is one term, the slowest of: bytes at the card's bandwidth; those of
    the busiest block at the rate that the loads it can have in flight allow (all of them, for bulk copies);
    instructions. The rest adds up.
    """
    c = launch.counts
    cycle = 1e-3 / card.ghz  # µs
    start = cost("first launch, µs") if first else cost("later launch, µs")
    if c["overlapping"] and not first:
        start = cost("overlapping launch, µs")
    places = card.multiprocessors * cost("blocks a multiprocessor")
    waves = -(-c["blocks"] // places)
    flight = c["threads"] * cost("bytes in flight a thread") / cost("load, cycles")
    port = cost("bytes a cycle and multiprocessor") / min(
        cost("blocks a multiprocessor"), -(-c["blocks"] // card.multiprocessors)
    )
    reading = {
        "bandwidth": c["bytes"] / (card.gb_per_s * cost("share of the bandwidth")) / 1e3,
        "busiest block": waves
        * ((c["most_bytes"] - c["most_copied"]) / min(flight, port) + c["most_copied"] / port)
        * cycle,
    }
    if launch.instructions is not None:
        busy = min(card.multiprocessors, c["blocks"])
        issued = c["bytes"] / 1024 * launch.instructions
        reading["instructions"] = issued / busy / cost("instructions a cycle and multiprocessor") * cycle
    slowest = max(reading, key=lambda name: reading[name])
    return {
        "launch": start,
        "prologue": cost("prologue, µs"),
        "chain of loads": c["loading"] * cost("load, cycles") * cycle,
        "barriers": c["barriers"] * cost("barrier, cycles") * cycle,
        "cluster barriers": c["cluster_barriers"] * cost("cluster barrier, cycles") * cycle,
        "collectives": c["most_collectives"] * cost("collective, cycles") * cycle,
        "atomics": (c["atomics"] > 0) * cost("atomic, cycles") * cycle,
        f"reading ({slowest})": reading[slowest],
    }  # fmt: skip


def predicted(launches: Sequence[Launch], card: Card) -> dict[str, float]:
    """The terms of all launches of a call together."""
    found: dict[str, float] = {}
    for number, launch in enumerate(launches):
        for name, us in terms(launch, card, number == 0).items():
            found[name] = found.get(name, 0.0) + us
    return {name: us for name, us in found.items() if us > 0}


# ---------------------------------------------------------------------------------------------------- counting


@functools.cache
def emulator() -> Any:
    """The tests' module, which builds and loads the emulated kernels."""
    from python_tests import emulated

    library = emulated.library()
    library.specdec_emulator_counted.restype = ctypes.c_char_p
    library.specdec_emulator_counted.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    return emulated


def counted(call: Callable[[], object]) -> list[Launch]:
    """The launches of a call of the emulated kernels."""
    library = emulator().library()
    library.specdec_emulator_count(1)
    try:
        call()
        found: list[Launch] = []
        numbers = (ctypes.c_int64 * len(NUMBERS))()
        while (name := library.specdec_emulator_counted(len(found), numbers)) is not None:
            counts = dict(zip(NUMBERS, map(float, numbers), strict=True))
            found.append(Launch(kernel_of(name.decode(), counts["cluster"] > 1), counts))
    finally:
        library.specdec_emulator_count(0)
    return found


def kernel_of(written: str, clustered: bool) -> str:
    """The kernel of a launch from its source text: ``a ? walk_kernel<true> : walk_kernel<false>, shape, …``."""
    names = re.findall(r"\w+_kernel(?:<[^>]*>)?", written)
    return str(names[0 if clustered or len(names) == 1 else -1]) if names else written.partition(",")[0]


@functools.lru_cache(8)
def sample(case: Case) -> Any:
    """One input set, shared by the batches of a cell."""
    return inputs.chain(case, torch.Generator().manual_seed(0))


@functools.cache
def launches_of(case: Case, multiprocessors: int) -> tuple[list[Launch], torch.Tensor]:
    """The launches of one call of `case` on the CUDA kernels, and how many tokens each sampled sequence accepted."""
    some = replace(case, batch=min(case.batch, SAMPLE), device="cpu")
    scale = case.batch / some.batch
    step = sample(some)
    accepted: list[torch.Tensor] = []
    emulated = emulator()

    def call() -> None:
        if case.greedy:
            out = sk.verify_chain(step.target_logits, step.draft_tokens, acceptance="greedy", backend=emulated.NAME)
        else:
            out = sk.verify_chain(
                step.target_logits, step.draft_tokens, step.draft_logits, seeds=step.seeds, step=0,
                params=case.params, draft_params=None if case.one_hot else case.params, acceptance=case.acceptance,
                target_law=case.target_law, draft_stats=step.draft_stats, processors=step.processors,
                backend=emulated.NAME,
            )  # fmt: skip
        accepted.append(out.num_accepted)

    with emulated.running(multiprocessors=max(1, round(multiprocessors / scale))):
        found = counted(call)
    totals = ("blocks", "bytes", "atomics", "shared_atomics")
    scaled = [replace(x, counts={**x.counts, **{k: scale * x.counts[k] for k in totals}}) for x in found]
    return scaled, accepted[0].float()


@functools.cache
def instructions() -> dict[str, float]:
    """Warp instructions per KiB loaded, by kernel without template arguments: those of a tile of 1024 bfloat16 ids if
    the machine code has a loop over tiles; empty if there is no code to read.
    """
    objects = sorted(OBJECTS.glob("*.o"))
    if not objects or sass.find_tool("cuobjdump") is None:
        return {}
    found: dict[str, list[float]] = {}
    for path in objects:
        for kernel in sass.kernels_of(path, "sm_90a"):
            name = re.search(r"(?<=\d)[a-z_]+_kernel", kernel.name)
            tiles = [n for exps in (0, 32) if (n := kernel.of_a_tile(4, exps)) is not None]
            if name and tiles:
                found.setdefault(name[0], []).append(max(tiles) / 2)  # two KiB per tile
    return {name: sum(values) / len(values) for name, values in found.items()}


def with_instructions(launches: Sequence[Launch], known: Mapping[str, float]) -> list[Launch]:
    return [replace(launch, instructions=known.get(launch.kernel.partition("<")[0])) for launch in launches]


# ------------------------------------------------------------------------------------------------------ output


def row(case: Case, label: str, card: Card, known: Mapping[str, float]) -> Row:
    """The prediction for one cell, with the floors at the sample's acceptance."""
    launches, accepted = launches_of(case, card.multiprocessors)
    parts = predicted(with_instructions(launches, known), card)
    mean, rejecting = accepted.mean().item(), (accepted < case.num_draft).float().mean().item()
    full, early = grid.traffic(case, mean, rejecting).floor_us(card.gb_per_s * cost("share of the bandwidth"))
    return {
        "gpu": label, "case": case.name, "vocab": case.vocab, "batch": case.batch, "num_draft": case.num_draft,
        "model_us": round(sum(parts.values()), 2), "floor_us": round(full, 2), "floor_exit_us": round(early, 2),
        "terms_us": {name: round(us, 2) for name, us in parts.items()}, "accepted": mean,
        "launches": [launch.kernel for launch in launches], "bytes": sum(x.counts["bytes"] for x in launches),
    }  # fmt: skip


def of_gpu(label: str, folder: Path = FOLDER) -> dict[tuple[str, int, int, int], float]:
    """Predicted µs by (case, vocab, batch, num_draft) from a GPU's file; empty if there is none."""
    path = folder / f"{label}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(r["case"], r["vocab"], r["batch"], r["num_draft"]): r["model_us"] for r in rows}


def table(rows: Sequence[Row]) -> str:
    """One line per cell, with every term."""
    lines = [f"{NOTICE}: µs{'':34}{'sum':>8}{'floor':>8}{'exit':>8}  terms"]
    for r in rows:
        where = f"{r['gpu'].removeprefix('nvidia-')[:5]} {r['case']} V={r['vocab']} B={r['batch']} K={r['num_draft']}"
        parts = ", ".join(f"{name} {us:g}" for name, us in r["terms_us"].items())
        lines.append(f"{where:41}{r['model_us']:8.1f}{r['floor_us']:8.1f}{r['floor_exit_us']:8.1f}  {parts}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel per headline case: the sum and the floors by batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    some = [r for r in rows if r["case"] in grid.HEADLINE and r["num_draft"] == 5 and r["vocab"] == rows[0]["vocab"]]
    names = list(dict.fromkeys(r["case"] for r in some))
    figure, axes = pyplot.subplots(
        1, max(1, len(names)), figsize=(4 * max(1, len(names)), 3.6), layout="constrained", squeeze=False
    )
    for panel, name in zip(axes[0], names, strict=False):
        mine = [r for r in some if r["case"] == name]
        for key, style in (("model_us", "o-"), ("floor_us", "k--"), ("floor_exit_us", "k:")):
            panel.plot([r["batch"] for r in mine], [r[key] for r in mine], style, label=key.removesuffix("_us"))
        panel.set(xscale="log", yscale="log", xlabel="batch", ylabel="µs, predicted", title=name)
    axes[0][0].legend()
    figure.suptitle(f"{NOTICE}: {rows[0]['gpu']}, V={rows[0]['vocab']}, K=5")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(
        prog="python -m bench.gpu.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--gpu", nargs="+", choices=CARDS, default=list(CARDS))
    parse.add_argument("--vocab", nargs="+", type=POSITIVE, default=list(grid.VOCABS))
    parse.add_argument("--batch", nargs="+", type=POSITIVE, default=list(grid.BATCHES))
    parse.add_argument("--draft", nargs="+", type=POSITIVE, default=list(grid.DRAFTS))
    parse.add_argument("--case", nargs="+", choices=grid.Sizes().names, default=list(grid.Sizes().names))
    parse.add_argument("--folder", type=Path, default=FOLDER)
    options = parse.parse_args(arguments)
    sizes = grid.Sizes(options.vocab, options.batch, options.draft, options.case)
    cases = [*grid.cases("cpu", sizes), *([grid.processed("cpu", sizes)] if 8 in options.batch else [])]
    known = instructions()
    if not known:
        print("no machine code was read: run `make resources` (needs nvcc); the term for instructions is left out")
    rows: dict[str, list[Row]] = {label: [] for label in options.gpu}
    options.folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        for label, found in rows.items():
            found.append(row(case, label, CARDS[label], known))
            print(table(found[-1:]).splitlines()[-1], flush=True)
            settings = {"notice": NOTICE, "card": vars(CARDS[label]), "costs": dict(COSTS), "instructions_a_kib": known}
            machine.save(options.folder, label, found, {"model": settings})
    for label, found in rows.items():
        draw(found, options.folder / f"{label}.png")
        print(f"{NOTICE}: wrote {label}.json and .png in {options.folder}")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
