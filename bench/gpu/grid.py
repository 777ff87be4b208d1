"""What is measured on a GPU, in order of importance, and the fewest bytes that each case has to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..inputs import Case
from ..registry import VERIFY_CASES

BATCHES = (1, 8, 32, 128, 256)
DRAFTS = (3, 5, 7)
VOCABS = (32000, 128256, 151936)
LAUNCH_US = 2.5
"""What a launch costs at least, in microseconds: the constant part of a floor."""


@dataclass(frozen=True)
class Roster:
    """Who takes part: in every case, beside its peers, and where a provider is slow to prepare."""

    own: tuple[str, ...]
    peers: tuple[str, ...]
    slow: tuple[str, ...]


GPU = Roster(
    own=("cuda", "triton"),
    peers=(
        *("cuda, uniforms given", "cuda, no draft_stats", "cuda, split", "cuda, walk", "cuda, cluster"),
        *("eager", "flashinfer", "vllm V1", "vllm V2", "sglang"),
    ),
    slow=("compile",),
)
REHEARSAL = Roster(own=("cpu",), peers=("cpu, no draft_stats", "eager", "flashinfer"), slow=())


def cases(
    device: str,
    vocabs: Sequence[int] = VOCABS,
    batches: Sequence[int] = BATCHES,
    drafts: Sequence[int] = DRAFTS,
    names: Sequence[str] = tuple(VERIFY_CASES),
) -> list[Case]:
    """`verify_chain` on bfloat16 logits, the middle of the grid first; target laws at the middle draft length alone."""
    grid = [
        Case("verify_chain", name, v, b, torch.bfloat16, num_draft=k, device=device, **VERIFY_CASES[name])
        for k in sorted(drafts, key=lambda k: (k != 5, k))
        for v in sorted(vocabs, key=lambda v: (v != 128256, v))
        for name in names
        for b in batches
    ]
    return [case for case in grid if case.target_law is None or case.num_draft == 5]


def is_central(case: Case) -> bool:
    """The few cases that a provider slow to prepare takes part in."""
    if case.acceptance == "block" or case.target_law is not None:
        return False
    return case.num_draft == 5 and case.vocab == 128256 and case.batch in (8, 128)


@dataclass(frozen=True)
class Traffic:
    """Bytes of logits that a call has to read: with every target row, and with a stop at the first rejection."""

    full: float
    exit: float

    def floor_us(self, copy_gb_per_s: float) -> tuple[float, float]:
        """Both as microseconds: the launch, then the bytes at the rate of a large copy."""
        return LAUNCH_US + self.full / copy_gb_per_s / 1e3, LAUNCH_US + self.exit / copy_gb_per_s / 1e3


def traffic(case: Case, accepted: float, rejecting: float) -> Traffic:
    """`accepted`: mean number of accepted draft tokens; `rejecting`: the share of sequences that reject one.

    The draft's log-normalisers come from drafting, so that of the draft the row at the rejection is read. The block
    rule looks at every row of both, rejected or not; a cascade at both rows of each position that is walked.
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
