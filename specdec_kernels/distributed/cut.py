"""Rows that sampling truncates: the logits that may be kept are told to all ranks, which then know all that counts.

A cut-off, what is kept and its normalizer depend on those logits and on nothing below them, unless `top_p` is to reach
a share of the whole row's mass; that is refused. So the op itself gives, on rows that hold those logits and −inf
elsewhere, what it gives on the whole ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..backends.reference.law import SMALLEST_TEMPERATURE, clean, make_params
from ..ops.row_stats import row_stats
from ..ops.verify_chain import verify_chain
from ..ops.warp_probs import warp_probs
from ..sampling import SamplingParams
from ..types import RowStats, Status, VerifyOutput
from .exchange import OP
from .rows import Rows, Shard, read_rows
from .rules import Step, asked_of_draft, verify_whole

MOST_TOP_K = 1024
MOST_BY_MASS = 4096  # ids among which top-p looks: kernels list so many, and among more their sums could end elsewhere


@dataclass(frozen=True)
class Cut:
    """One sequence's parameters, 0 (`top_p`: 1) where they are off."""

    top_k: int
    top_p: float
    min_p: float
    greedy: bool

    @property
    def any(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def cuts_of(argument: str, params: SamplingParams, batch: int, vocab: int) -> list[Cut]:
    """Of each sequence; ValueError where the vocabulary may not be sharded with them. Tensors in `params` are waited
    for.
    """
    flat = params._flat

    def each(number: float, tensor: Tensor | None) -> list[float]:
        return [number] * batch if tensor is None else tensor.tolist()

    cuts = []
    for t, k, p, m in zip(
        each(flat.temperature, flat.temperatures), each(flat.top_k, flat.top_ks), each(flat.top_p, flat.top_ps),
        each(flat.min_p, flat.min_ps), strict=True,
    ):  # fmt: skip
        cut = Cut(
            int(k) if 0 < k < vocab else 0, p if 0 < p < 1 else 1.0, m if 0 < m <= 1 else 0.0,
            0 <= t < SMALLEST_TEMPERATURE,
        )  # fmt: skip
        cuts.append(cut)
        if cut.greedy:
            continue
        if cut.top_k > MOST_TOP_K:
            raise ValueError(f"{OP}: {argument}.top_k must be at most {MOST_TOP_K}, got {cut.top_k}")
        if cut.top_p < 1 and cut.top_k == 0 and not (cut.min_p > 0 and params.min_p_first):
            raise ValueError(
                f"{OP}: {argument}.top_p needs a top_k of at most {MOST_TOP_K} beside it, or a min_p with min_p_first, "
                f"got top_p={cut.top_p:g} alone"
            )
    return cuts


@dataclass(frozen=True)
class Candidates:
    """The logits of rows ``[batch, n]`` that may be kept."""

    ids: Tensor  # [batch, n, most] of each rank in turn; the vocabulary's size where there are fewer
    logits: Tensor  # the same
    also: Tensor | None  # what another tensor has there, whose rows may be fewer
    nan: Tensor  # [batch, n, ranks]: an id that is NaN, the vocabulary's size where there is none

    def rows(self, vocab: int) -> Tensor:
        """``[batch, n, vocab]``: −inf where nothing may be kept."""
        out = spread(self.logits, self.ids, vocab, -math.inf)
        return out.scatter_(-1, self.nan, math.nan)[..., :vocab]


def spread(numbers: Tensor, ids: Tensor, vocab: int, elsewhere: float) -> Tensor:
    """``[batch, n, vocab + 1]`` with `numbers` at `ids`; the last column takes what is at no id."""
    return numbers.new_full((*ids.shape[:2], vocab + 1), elsewhere).scatter_(-1, ids, numbers)


def candidates(
    shard: Shard, own: Tensor, params: SamplingParams, cuts: list[Cut], also: Tensor | None = None
) -> Candidates:
    """Of the sequences that are cut; of the others none. `also` has rows for the first of `own`'s."""
    batch, n, width = own.shape
    device, vocab = own.device, shard.layout.vocab
    x = clean(own)
    most = max([1, *(cut.top_k for cut in cuts)])
    largest = x.topk(min(most, width)).values if width else x
    largest = torch.nn.functional.pad(largest, (0, most - largest.shape[-1]), value=-math.inf)
    told = torch.cat([of[0] for of in shard.exchange.gather("largest logits", largest)], -1)
    told = told.topk(most).values
    maximum = told[..., 0]
    column = torch.tensor([[cut.top_k, cut.min_p, cut.any] for cut in cuts], device=device)[:, None]
    top_k, min_p, is_cut = column[..., 0].long(), column[..., 1], column[..., 2] > 0
    kth = told.gather(-1, (top_k.clamp_min(1) - 1)[..., None].expand(-1, n, 1))[..., 0]
    t = make_params(batch, x, params._flat).temperature
    # a little below where any backend puts it, which each finds in its own way
    likely = maximum + min_p.log() * t * (1 + 1e-5) - 1e-5 * (1 + maximum.abs())
    bound = torch.where(top_k > 0, kth, torch.where(maximum.isinf(), maximum, likely))
    here = (x >= bound[..., None]) & (x > -math.inf) & is_cut[..., None]
    missing = own.isnan() & is_cut[..., None]
    nan = torch.full((batch, n), vocab, device=device)
    if width:
        nan = torch.where(missing.any(-1), shard.first + missing.int().argmax(-1), vocab)
    counts = shard.exchange.gather("numbers of candidates", here.sum(-1), nan)
    most = max(1, int(torch.stack([of[0] for of in counts]).amax()))
    in_all = int(torch.stack([of[0] for of in counts]).sum(0).amax())
    if in_all > MOST_BY_MASS and any(cut.top_p < 1 for cut in cuts):
        raise ValueError(
            f"{OP}: top_p looks among {MOST_BY_MASS} logits at most, got a row of which {in_all} may be kept"
        )
    taken = torch.where(here, x, -math.inf).topk(min(most, width)).indices if width else here.long()
    valid = here.gather(-1, taken)
    room = (0, most - taken.shape[-1])
    ids = torch.nn.functional.pad(torch.where(valid, taken + shard.first, vocab), room, value=vocab).to(torch.int32)
    given = [ids, torch.nn.functional.pad(own.gather(-1, taken), room)]
    if also is not None:
        given.append(torch.nn.functional.pad(also.gather(-1, taken[:, : also.shape[1]]), room))
    answers = shard.exchange.gather("candidates", *given)
    lists = [torch.cat([of[i] for of in answers], -1) for i in range(len(given))]
    return Candidates(
        lists[0].long(), lists[1], lists[2] if also is not None else None, torch.stack([of[1] for of in counts], -1)
    )


def with_cuts(step: Step, draft: Rows, cuts: list[Cut]) -> Rows:
    """The draft's rows, of whose logits some may be cut."""
    if not any(cut.any for cut in cuts):
        return draft
    found = candidates(step.shard, draft.own, step.draft_params, cuts)
    rows, backend = found.rows(step.shard.layout.vocab), step.shard.backend
    is_cut = torch.tensor([cut.any for cut in cuts], device=rows.device)[:, None]
    stats = row_stats(rows, step.draft_params, backend=backend)
    prob = warp_probs(rows, step.draft_params, backend=backend).gather(-1, step.ids[..., None])[..., 0]
    chosen = [
        torch.where(is_cut if a.dim() == 2 else is_cut[..., None], a, b)
        for a, b in zip(stats, draft.stats, strict=True)
    ]
    return replace(draft, stats=RowStats(*chosen), prob=torch.where(is_cut, prob, draft.prob))


def verify_cut(step: Step, cuts: list[Cut], draft_cuts: list[Cut]) -> VerifyOutput:
    """Of sequences whose target rows are cut."""
    vocab, num_draft = step.shard.layout.vocab, step.draft_tokens.shape[1]
    also = step.drafted
    found = candidates(step.shard, step.target_logits, step.params, cuts, also)
    given: dict[str, Any] = {}
    if also is not None:
        assert found.also is not None
        (draft,) = read_rows(step.shard, asked_of_draft(step))
        if step.draft_logits is not None:
            draft = with_cuts(step, draft, draft_cuts)
        at = draft.at.to(also.dtype)[..., None]
        ids = torch.cat([found.ids[:, :num_draft], step.ids[..., None]], -1)
        numbers = torch.cat([found.also, at], -1)
        if step.draft_logits is not None:
            given = {
                "draft_logits": spread(numbers, ids, vocab, -math.inf)[..., :vocab], "draft_stats": draft.stats,
                "draft_params": step.draft_params,
            }  # fmt: skip
        else:
            given = {"draft_probs": some_probs(numbers, ids, vocab, draft.stats.status)}
    by_match = step.acceptance in ("match", "greedy")
    return verify_chain(
        found.rows(vocab), step.draft_tokens, params=step.params, acceptance=step.acceptance,
        uniform_samples=None if by_match else step.uniform_samples,
        noise_keys=step.noise_keys, num_draft_tokens=step.num_draft_tokens, eos_token_ids=step.eos_token_ids,
        backend=step.shard.backend, **given,
    )  # fmt: skip


def some_probs(numbers: Tensor, ids: Tensor, vocab: int, status: Tensor) -> Tensor:
    """``[batch, n, vocab]``: probabilities at `ids`, and all others at one id that is none of those; where the whole
    row is no distribution that is none either.
    """
    taken = spread(torch.ones_like(numbers), ids, vocab, 0.0)
    out = spread(numbers, ids, vocab, 0.0)[..., :vocab].contiguous()
    other = taken[..., :vocab].argmin(-1, keepdim=True)
    rest = (1 - out.clamp_min(0.0).nan_to_num(0.0, 0.0, 0.0).sum(-1, keepdim=True)).clamp_min(0.0)
    rest = torch.where(taken.gather(-1, other) == 0, rest, out.gather(-1, other))  # else all of them are given
    is_bad, is_nan = (((status & int(flag)) != 0)[..., None] for flag in (Status.BAD_DRAFT, Status.NAN))
    return out.scatter_(-1, other, torch.where(is_bad, torch.where(is_nan, math.nan, -1.0), rest))


def verify_step(step: Step, cuts: list[Cut], draft_cuts: list[Cut]) -> VerifyOutput:
    """Sequences whose target rows are cut, and the others: each in its way."""
    is_cut = [cut.any and step.acceptance != "greedy" for cut in cuts]
    if all(is_cut) and is_cut:
        return verify_cut(step, cuts, draft_cuts)
    if not any(is_cut):
        return verify_whole(step, lambda draft: with_cuts(step, draft, draft_cuts))
    groups = [[i for i, cut in enumerate(is_cut) if cut is wanted] for wanted in (False, True)]
    parts = [verify_step(step.some(of), [cuts[i] for i in of], [draft_cuts[i] for i in of]) for of in groups]
    order = torch.tensor(sum(groups, []), device=step.draft_tokens.device).argsort()
    tokens, num_accepted, num_tokens, status = (
        torch.cat(of)[order] for of in zip(*(part[:4] for part in parts), strict=True)
    )
    return VerifyOutput(tokens, num_accepted, num_tokens, status)
