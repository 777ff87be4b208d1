"""What is measured on a GPU, in order of importance, and the fewest bytes that each case has to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..inputs import OVERHEAD, Case
from ..registry import MATCH, REGISTRY, VERIFY_CASES
from ..report import VARIANTS
from . import strategy

BATCHES = (1, 8, 32, 128, 256)
DRAFTS = (3, 5, 7)
VOCABS = (32000, 128256, 151936)
HEADLINE = ("T=1", "truncated", "greedy")
VOCAB = 128256
CROSSOVER_BATCHES = (1, 4, 8, 16, 32, 48, 64, 66, 96, 128, 192, 198, 256)
"""Around half a sequence and one and a half a multiprocessor of 132, where the layouts hand over."""
LAUNCH_US = 2.5
"""What a launch costs at least, in microseconds: the constant part of a floor."""

OWN = ("cuda", "triton")
PEERS = (
    *("cuda, uniforms given", "cuda, no draft_stats"),
    *("eager", *VARIANTS, "flashinfer", "vllm V1", "vllm V2", "sglang"),
)
LAYOUTS = ("cuda", *(f"cuda, {name}{how}" for name in strategy.LAYOUTS for how in ("", ", no overlap")))


@dataclass(frozen=True)
class Phase:
    """Cases and the providers that take part in them, until `share` of the time has passed."""

    cases: Sequence[Case]
    providers: tuple[str, ...]
    share: float
    launches: bool = False
    """Whether the launches of a call are counted."""


@dataclass(frozen=True)
class Sizes:
    """What is measured; less in a rehearsal, or if the user asks for a part."""

    vocabs: Sequence[int] = VOCABS
    batches: Sequence[int] = BATCHES
    drafts: Sequence[int] = DRAFTS
    names: Sequence[str] = tuple(VERIFY_CASES)


def cases(device: str, sizes: Sizes = Sizes()) -> list[Case]:
    """`verify_chain` on bfloat16 logits, the middle of the grid first; target laws at the middle draft length alone."""
    grid = [
        Case("verify_chain", name, v, b, torch.bfloat16, num_draft=k, device=device, **VERIFY_CASES[name])
        for k in sorted(sizes.drafts, key=lambda k: (k != 5, k))
        for v in sorted(sizes.vocabs, key=lambda v: (v != VOCAB, v))
        for name in sizes.names
        for b in sizes.batches
    ]
    return [case for case in grid if case.target_law is None or case.num_draft == 5]


def middle(vocabs: Sequence[int]) -> int:
    """The vocabulary that is measured first."""
    return VOCAB if VOCAB in vocabs else vocabs[0]


def processed(device: str, sizes: Sizes = Sizes()) -> Case:
    """A step with every processor."""
    return Case(
        "verify_chain", "processors", middle(sizes.vocabs), 8, torch.bfloat16, device=device, processed=True
    )  # fmt: skip


def bench_phases(device: str, sizes: Sizes) -> list[Phase]:
    """The cells that the goals are stated for, with all providers; the rest of the grid with this package's backends,
    its middle with all peers; then what compiles for each case.
    """
    grid = cases(device, sizes)
    best = [c for c in grid if c.name in HEADLINE and c.vocab == middle(sizes.vocabs) and c.num_draft == 5]
    rest = [case for case in grid if case not in best]
    return [
        Phase(best, OWN + PEERS, 0.6, launches=True),
        Phase(rest, OWN, 0.75),
        Phase([case for case in rest if case.num_draft == 5], OWN + PEERS, 0.9),
        Phase([case for case in best if case.batch in (8, 128)], (*OWN, *PEERS, "compile"), 1.0, launches=True),
    ]


def crossover_phases(device: str, sizes: Sizes) -> list[Phase]:
    """Every layout at every batch size, with and without overlapping kernels; first at the headline's vocabulary."""
    batches = sizes.batches if sizes.batches != BATCHES else CROSSOVER_BATCHES
    some = replace(sizes, batches=batches, drafts=[k for k in sizes.drafts if k == 5])
    return [
        Phase(cases(device, replace(some, names=[name for name in names if name in sizes.names])), LAYOUTS, share)
        for names, share in ((("T=1", "truncated"), 0.75), (("greedy", "one-hot"), 1.0))
    ]


def op_phases(device: str, sizes: Sizes) -> list[Phase]:
    """The other ops of a step, the match rule, and steps with every processor."""
    vocab = middle(sizes.vocabs)
    few, some = [b for b in sizes.batches if b <= 32], [b for b in sizes.batches if b <= 128]
    shared: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    own: list[Case] = [Case("verify_chain", "match", vocab, b, **shared, **MATCH) for b in some]
    own += [replace(processed(device, sizes), batch=b) for b in some]
    others = [
        replace(case, **shared)
        for op, batches in (("sample", some), ("verify_tree", few), ("gather_kv_", some))
        for case in REGISTRY[op].cases([vocab], batches)
        if case.name != OVERHEAD
    ]
    with_peers = (*OWN, "eager", "flashinfer", "sglang")
    return [Phase(own, OWN, 0.2, launches=True), Phase(others, with_peers, 1.0, launches=True)]


PLANS: Mapping[str, Callable[[str, Sizes], list[Phase]]] = {
    "verify_chain": bench_phases,
    "crossovers": crossover_phases,
    "ops": op_phases,
}
"""What one run of `bench.gpu.bench` measures; its results have this name."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of logits that a call has to read: for every target row, and when stopping at the first rejection."""

    full: float
    exit: float

    def floor_us(self, gb_per_s: float) -> tuple[float, float]:
        """Both as microseconds: the launch, plus the bytes at the highest memory rate seen."""
        return LAUNCH_US + self.full / gb_per_s / 1e3, LAUNCH_US + self.exit / gb_per_s / 1e3


def traffic(case: Case, accepted: float, rejecting: float) -> Traffic:
    """`accepted`: mean number of accepted draft tokens; `rejecting`: the share of sequences that reject one.

    The draft's log-normalisers come from drafting, so only the draft row at the rejection is read. The block rule looks
    at every row of both models, rejected or not; a cascade at both rows of each position that is walked.
    """
    row = case.batch * case.vocab * case.dtype.itemsize
    all_rows, k = case.num_draft + 1, case.num_draft
    if case.greedy or case.one_hot:
        return Traffic(row * all_rows, row * (accepted + 1))
    if case.acceptance == "block":
        return Traffic(row * (all_rows + k), row * (all_rows + k))
    if case.target_law is not None:
        return Traffic(row * (all_rows + k), row * (2 * accepted + 1 + rejecting))
    return Traffic(row * (all_rows + 1), row * (accepted + 1 + rejecting))
