"""Inputs that look like a language model's: peaked, heavy-tailed rows, and drafts with a known chance of acceptance.

A target row is a Zipf law over a random permutation of the vocabulary, ``logit = −s · log(rank) + noise`` with an
exponent s drawn for each row from [1, 3] (from flat rows to nearly certain ones, as in text) and Gaussian noise of
standard deviation 0.5.

A draft row is the target row plus Gaussian noise, whose scale is found by bisection so that the mean of ``Σ min(P, Q)``
after the case's sampling parameters is `ACCEPTANCE`; greedy: so that both argmaxes agree that often. A one-hot
draft proposes the target's most likely id, and there the target's rows are scaled until that id's mean probability is
`ACCEPTANCE`. Draft tokens are drawn from the draft's law, with the stats kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import specdec_kernels as sk

from . import machine

ACCEPTANCE = 0.7


@dataclass(frozen=True)
class Case:
    """One thing to measure: an op, its sizes and how it is called."""

    op: str
    name: str
    vocab: int
    batch: int
    dtype: torch.dtype = torch.float32
    cache: str = "cold"  # "hot": the same input was used by the same provider just before
    num_draft: int = 5
    params: sk.SamplingParams = sk.SamplingParams()
    acceptance: str = "token"
    one_hot: bool = False
    drawn_before: bool = False  # uniforms come from outside the timed call: for the overhead of one public call

    @property
    def greedy(self) -> bool:
        return self.params.is_greedy

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} V={self.vocab} B={self.batch} {dtype} {self.cache}"


@dataclass
class ChainInputs:
    """What one verify step has: `verify_chain`'s inputs, and what a peer may have kept from drafting."""

    target_logits: Tensor  # [batch, num_draft + 1, vocab]
    draft_tokens: Tensor  # [batch, num_draft]
    draft_logits: Tensor | None  # [batch, num_draft, vocab]
    draft_stats: sk.RowStats | None
    draft_probs: Tensor | None
    seeds: Tensor  # [batch]
    uniform_samples: Tensor  # [batch, num_draft + 1]


@dataclass
class PackedInputs:
    """The same for ragged drafts laid end to end."""

    target_logits: Tensor  # [total + batch, vocab]
    draft_tokens: Tensor  # [total]
    draft_logits: Tensor  # [total, vocab]
    draft_stats: sk.RowStats
    cu_num_draft_tokens: Tensor  # [batch + 1]
    seeds: Tensor  # [batch]
    used: Tensor  # [batch, num_draft + 1] bool: which uniforms of a padded step the packed one uses
    uniform_samples: Tensor  # [total + batch]


@dataclass
class RowInputs:
    """Rows of logits, and a uniform for each."""

    logits: Tensor  # [batch, n, vocab]
    seeds: Tensor  # [batch]
    uniform_samples: Tensor  # [batch, n]


@dataclass
class SeedInputs:
    """Seeds and positions."""

    seeds: Tensor  # [batch]
    positions: Tensor  # [batch, n]


def rows(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """``[count, vocab]`` float32 target rows."""
    exponent = 1 + 2 * torch.rand(count, 1, generator=generator)
    logits = torch.randn(count, vocab, generator=generator) * 0.5
    log_rank = torch.arange(1, vocab + 1).log()
    for row, s in zip(logits, exponent, strict=True):
        row -= s * log_rank[torch.randperm(vocab, generator=generator)]
    return logits


def bisect(decreasing: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a decreasing function passes `goal`, to a few per mille."""
    for _ in range(9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if decreasing(middle) > goal else (low, middle)
    return math.sqrt(low * high)


@functools.cache
def draft_noise(vocab: int, params: sk.SamplingParams) -> float:
    """Standard deviation of the noise that makes a draft accepted with probability `ACCEPTANCE`."""
    generator = torch.Generator().manual_seed(vocab)
    count = 400 if params.is_greedy else 120  # the greedy mean is one of zeros and ones
    target = rows(count, vocab, generator)
    noise = torch.randn(count, vocab, generator=generator)
    law = target.argmax(-1) if params.is_greedy else sk.warp_probs(target, params)

    def overlap(scale: float) -> float:
        draft = target + scale * noise
        if params.is_greedy:
            return (draft.argmax(-1) == law).float().mean().item()
        return torch.minimum(law, sk.warp_probs(draft, params)).sum(-1).mean().item()

    return bisect(overlap, ACCEPTANCE, 0.05, 10.0)


@functools.cache
def one_hot_sharpness(vocab: int) -> float:
    """Factor on the target's rows that makes their most likely id's mean probability `ACCEPTANCE`."""
    target = rows(120, vocab, torch.Generator().manual_seed(vocab))
    return 1 / bisect(lambda flatness: (target / flatness).softmax(-1).amax(-1).mean().item(), ACCEPTANCE, 0.1, 10.0)


def chain(case: Case, generator: torch.Generator) -> ChainInputs:
    """One verify step of `case`."""
    batch, k, vocab = case.batch, case.num_draft, case.vocab
    target = rows(batch * (k + 1), vocab, generator).view(batch, k + 1, vocab)
    draft = stats = probs = None
    if case.one_hot:
        target *= one_hot_sharpness(vocab)
        tokens = target[:, :k].argmax(-1)
    else:
        noise = torch.randn(batch, k, vocab, generator=generator)
        draft = (target[:, :k] + draft_noise(vocab, case.params) * noise).to(case.dtype)
        drawn = sk.sample(draft, case.params, uniform_samples=torch.rand(batch, k, generator=generator))
        tokens, stats = drawn.token, drawn.stats
        probs = None if case.greedy else sk.warp_probs(draft, case.params)
    seeds = torch.randint(0, 2**62, (batch,), generator=generator)
    uniforms = torch.rand(batch, k + 1, generator=generator)
    return ChainInputs(target.to(case.dtype), tokens, draft, stats, probs, seeds, uniforms)


def packed(case: Case, generator: torch.Generator) -> PackedInputs:
    """One verify step whose sequences have 1 … num_draft draft tokens."""
    step = chain(case, generator)
    assert step.draft_logits is not None and step.draft_stats is not None
    lengths = torch.randint(1, case.num_draft + 1, (case.batch, 1), generator=generator)
    targets = torch.arange(case.num_draft + 1) <= lengths
    used = targets[:, 1:]
    stats = step.draft_stats
    cu = torch.nn.functional.pad(lengths[:, 0].cumsum(0), (1, 0)).to(torch.int32)
    return PackedInputs(
        step.target_logits[targets], step.draft_tokens[used], step.draft_logits[used],
        sk.RowStats(stats.values[used], stats.argmax[used], stats.status[used]), cu,
        step.seeds, targets, step.uniform_samples[targets],
    )  # fmt: skip


def verified_rows(case: Case, generator: torch.Generator) -> RowInputs:
    """The target rows of one verify step, ``[batch, num_draft + 1, vocab]``."""
    return _rows(case, case.num_draft + 1, generator)


def next_rows(case: Case, generator: torch.Generator) -> RowInputs:
    """The rows of one drafting step, ``[batch, 1, vocab]``."""
    return _rows(case, 1, generator)


def _rows(case: Case, n: int, generator: torch.Generator) -> RowInputs:
    logits = rows(case.batch * n, case.vocab, generator).view(case.batch, n, case.vocab).to(case.dtype)
    seeds = torch.randint(0, 2**62, (case.batch,), generator=generator)
    return RowInputs(logits, seeds, torch.rand(case.batch, n, generator=generator))


def seeds_and_positions(case: Case, generator: torch.Generator) -> SeedInputs:
    """``[batch]`` seeds and ``[batch, num_draft + 1]`` positions."""
    seeds = torch.randint(0, 2**62, (case.batch,), generator=generator)
    positions = torch.randint(0, 4096, (case.batch, 1), generator=generator) + torch.arange(case.num_draft + 1)
    return SeedInputs(seeds, positions)


def num_sets(case: Case, bytes_read: int) -> int:
    """So many input sets that rotating through them finds none in a cache, if a call reads `bytes_read`; at least 8."""
    if case.cache == "hot":
        return 8
    return min(256, max(8, math.ceil(4 * machine.last_level_cache_bytes() / bytes_read)))
