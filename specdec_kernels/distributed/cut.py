"""Rows that sampling truncates: the logits that may be kept are told to all ranks, which then know all that counts.

A cut-off, what is kept and its normalizer depend on those logits and on nothing below them, but for `top_p` of a whole
row's mass, whose cut-off is found first (mass.py). So the op itself gives, on rows that hold those logits and −inf
elsewhere, what it gives on the whole ones. Where they are too many for that, and where the op alone can tell a cut-off,
the whole row is told.
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
from .mass import TopP, bounds
from .rows import Rows, Shard, read_rows
from .rules import Step, asked_of_draft, read, some_params, verify_whole

MOST = 4096  # ids that top-k may ask for and top-p look among: kernels list so many, and add more in other ways
LEAST_MIN_P = 2.0**-126  # cuts nothing of any weight


@dataclass(frozen=True)
class Cut:
    """One sequence's parameters, 0 (`top_p`: 1) where they are off."""

    top_k: int
    top_p: float
    min_p: float
    greedy: bool
    min_p_first: bool
    bad: bool  # its min_p is none

    @property
    def any(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def of_whole_mass(self) -> bool:
        """Whether top-p looks at a whole row."""
        bounded = self.top_k > 0 or (self.min_p_first and self.min_p > 0)
        return self.any and self.top_p < 1 and not bounded

    @property
    def told_whole(self) -> bool:
        """Whether nothing bounds what is told of its rows."""
        return self.any and (self.top_k > MOST or (self.of_whole_mass and self.bad))

    @property
    def by_mass(self) -> bool:
        """Whether cut-offs are searched for by masses."""
        return self.of_whole_mass and not self.told_whole


def numbers_of(params: SamplingParams, batch: int) -> list[tuple[float, ...]]:
    """Temperature, top_k, top_p and min_p of each sequence, as kernels take them. Tensors are waited for."""
    flat = params._flat
    given = (flat.temperatures, flat.top_ks, flat.top_ps, flat.min_ps)
    columns = [
        (torch.full((batch,), number) if tensor is None else tensor).tolist()
        for number, tensor in zip(flat[:4], given, strict=True)
    ]
    return list(zip(*columns, strict=True))


def cuts_of(params: SamplingParams, batch: int, vocab: int) -> list[Cut]:
    """Of each sequence."""
    return [
        Cut(
            int(k) if 0 < k < vocab else 0, p if 0 < p < 1 else 1.0, m if 0 < m <= 1 else 0.0,
            0 <= t < SMALLEST_TEMPERATURE, params.min_p_first, not 0 <= m <= 1,
        )
        for t, k, p, m in numbers_of(params, batch)
    ]  # fmt: skip


def of_kept(params: SamplingParams, cuts: list[Cut], device: torch.device) -> SamplingParams:
    """Parameters for rows that hold what top-p keeps of a whole row's mass, and −inf elsewhere. They are cut still, as
    the mass of a cut row is added in another way than that of a whole one.
    """
    if not any(cut.by_mass for cut in cuts):
        return params
    top_p, min_p = [], []
    for cut, (_, _, p, m) in zip(cuts, numbers_of(params, len(cuts)), strict=True):
        top_p.append(1.0 if cut.by_mass else p)
        min_p.append(max(m, LEAST_MIN_P) if cut.by_mass else m)
    return replace(params, top_p=torch.tensor(top_p, device=device), min_p=torch.tensor(min_p, device=device))


@dataclass(frozen=True)
class Candidates:
    """The logits of rows ``[batch, n]`` that may be kept."""

    ids: Tensor  # [batch, n, most] of each rank in turn; the vocabulary's size where there are fewer
    logits: Tensor  # the same
    also: Tensor | None  # what another tensor has there, whose rows may be fewer
    nan: Tensor  # [batch, n, ranks]: an id that is NaN, the vocabulary's size where there is none
    wide: Tensor  # [batch, n] bool: too many to be told

    def rows(self, vocab: int) -> Tensor:
        """``[batch, n, vocab]``: −inf where nothing may be kept."""
        out = spread(self.logits, self.ids, vocab, -math.inf)
        return out.scatter_(-1, self.nan, math.nan)[..., :vocab]


def spread(numbers: Tensor, ids: Tensor, vocab: int, elsewhere: float) -> Tensor:
    """``[batch, n, vocab + 1]`` with `numbers` at `ids`; the last column takes what is at no id."""
    return numbers.new_full((*ids.shape[:2], vocab + 1), elsewhere).scatter_(-1, ids, numbers)


def bounds_of(shard: Shard, x: Tensor, params: SamplingParams, cuts: list[Cut]) -> Tensor:
    """Bounds ``[batch, n]`` below which top-k or min-p keep nothing."""
    batch, n, width = x.shape
    most = max([1, *(cut.top_k for cut in cuts if not cut.told_whole)])
    largest = x.topk(min(most, width)).values if width else x
    largest = torch.nn.functional.pad(largest, (0, most - largest.shape[-1]), value=-math.inf)
    told = torch.cat([of[0] for of in shard.exchange.gather("largest logits", largest)], -1)
    told = told.topk(most).values
    maximum = told[..., 0]
    column = torch.tensor([[cut.top_k, cut.min_p] for cut in cuts], device=x.device)[:, None]
    top_k, min_p = column[..., 0].long(), column[..., 1]
    kth = told.gather(-1, (top_k.clamp(1, most) - 1)[..., None].expand(-1, n, 1))[..., 0]
    t = make_params(batch, x, params._flat).temperature
    # a little below where any backend puts it, which each finds in its own way
    likely = maximum + min_p.log() * t * (1 + 1e-5) - 1e-5 * (1 + maximum.abs())
    return torch.where(top_k > 0, kth, torch.where(maximum.isinf(), maximum, likely))


def candidates(
    shard: Shard, own: Tensor, params: SamplingParams, cuts: list[Cut], uncut: Tensor | None, also: Tensor | None = None
) -> Candidates:
    """Of the sequences that are cut; of the others none. `uncut [batch, n, 6]`: values of the rows' stats, where top-p
    looks at a whole row's mass. `also` has rows for the first of `own`'s.
    """
    batch, n, width = own.shape
    device, vocab = own.device, shard.layout.vocab
    x = clean(own)
    is_cut, told_whole, has_top_p, by_mass = torch.tensor(
        [[cut.any, cut.told_whole, cut.any and cut.top_p < 1, cut.by_mass] for cut in cuts], device=device
    ).T[..., None]
    top_p, bound = None, torch.full((batch, n), math.inf, device=device)
    if not all(cut.by_mass for cut in cuts):
        bound = bounds_of(shard, x, params, cuts)
    if by_mass.any():
        assert uncut is not None
        top_p = TopP.of(uncut, params, [cut.by_mass for cut in cuts], vocab)
        found = torch.where(top_p.looked, bounds(shard, x, top_p, MOST), uncut[..., 0])  # one that is infinite has all
        bound = torch.where(by_mass, found, bound)
    here = (x >= bound[..., None]) & (x > -math.inf) & (is_cut & ~told_whole)[..., None]
    missing = own.isnan() & is_cut[..., None]
    nan = torch.full((batch, n), vocab, device=device)
    if width:
        nan = torch.where(missing.any(-1), shard.first + missing.int().argmax(-1), vocab)
    counts = shard.exchange.gather("numbers of candidates", here.sum(-1), nan)
    count = torch.stack([of[0] for of in counts])
    wide = told_whole | (has_top_p & (count.sum(0) > MOST))
    here = here & ~wide[..., None]
    most = max(1, int(torch.where(wide, 0, count).amax()))
    taken = torch.where(here, x, -math.inf).topk(min(most, width)).indices if width else here.long()
    valid = here.gather(-1, taken)
    room = (0, most - taken.shape[-1])
    ids = torch.nn.functional.pad(torch.where(valid, taken + shard.first, vocab), room, value=vocab).to(torch.int32)
    given = [ids, torch.nn.functional.pad(own.gather(-1, taken), room)]
    if also is not None:
        given.append(torch.nn.functional.pad(also.gather(-1, taken[:, : also.shape[1]]), room))
    answers = shard.exchange.gather("candidates", *given)
    lists = [torch.cat([of[i] for of in answers], -1) for i in range(len(given))]
    ids, logits = lists[0].long(), lists[1]
    if top_p is not None:
        told = torch.where(ids < vocab, logits.float(), -math.inf)
        cutoff, doubtful = top_p.cutoff(told)
        doubtful = doubtful & ~wide
        if doubtful.any():  # the op itself decides
            of, _ = doubtful.nonzero(as_tuple=True)
            (whole,) = shard.whole(own[doubtful])
            cutoff[doubtful] = row_stats(whole[:, None], some_params(params, of), backend=shard.backend).values[:, 0, 1]
        ids = torch.where(by_mass[..., None] & (told < cutoff[..., None]), vocab, ids)
    return Candidates(
        ids, logits, lists[2] if also is not None else None, torch.stack([of[1] for of in counts], -1), wide
    )


def with_cuts(step: Step, draft: Rows, cuts: list[Cut]) -> Rows:
    """The draft's rows, of whose logits some may be cut."""
    if not any(cut.any for cut in cuts):
        return draft
    found = candidates(step.shard, draft.own, step.draft_params, cuts, draft.stats.values)
    rows, backend = found.rows(step.shard.layout.vocab), step.shard.backend
    is_cut = torch.tensor([cut.any for cut in cuts], device=rows.device)[:, None]
    stats, prob = stats_and_prob(rows, step.ids, of_kept(step.draft_params, cuts, rows.device), backend)
    if found.wide.any():
        of, _ = found.wide.nonzero(as_tuple=True)
        (whole,) = step.shard.whole(draft.own[found.wide])
        of_whole = stats_and_prob(
            whole[:, None], step.ids[found.wide][:, None], some_params(step.draft_params, of), backend
        )
        for into, told in zip((*stats, prob), (*of_whole[0], of_whole[1]), strict=True):
            into[found.wide] = told[:, 0]
    chosen = [
        torch.where(is_cut if a.dim() == 2 else is_cut[..., None], a, b)
        for a, b in zip(stats, draft.stats, strict=True)
    ]
    return replace(draft, stats=RowStats(*chosen), prob=torch.where(is_cut, prob, draft.prob))


def stats_and_prob(rows: Tensor, ids: Tensor, params: SamplingParams, backend: str | None) -> tuple[RowStats, Tensor]:
    """Of rows ``[batch, n, vocab]``, and the probability of one id of each."""
    prob = warp_probs(rows, params, backend=backend).gather(-1, ids[..., None])[..., 0]
    return row_stats(rows, params, backend=backend), prob


def verify_cut(step: Step, cuts: list[Cut], draft_cuts: list[Cut]) -> VerifyOutput:
    """Of sequences whose target rows are cut."""
    vocab, num_draft = step.shard.layout.vocab, step.draft_tokens.shape[1]
    also, uncut, draft = step.drafted, None, None
    if any(cut.by_mass for cut in cuts):
        target, draft = read(step)
        uncut = target.stats.values
    elif also is not None:
        (draft,) = read_rows(step.shard, asked_of_draft(step))
    found = candidates(step.shard, step.target_logits, step.params, cuts, uncut, also)
    given: dict[str, Any] = {}
    if also is not None:
        assert found.also is not None and draft is not None
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
    out = as_one(step, found.rows(vocab), of_kept(step.params, cuts, found.ids.device), **given)
    if found.wide.any():
        (wide,) = found.wide.any(1).nonzero(as_tuple=True)
        told = verify_told(step.some(wide.tolist()))
        out = VerifyOutput(*(a.index_copy(0, wide, b) for a, b in zip(out[:4], told[:4], strict=True)))
    return out


def verify_told(step: Step) -> VerifyOutput:
    """Of sequences whose rows are told whole."""
    drafted = step.drafted
    target, *draft = step.shard.whole(step.target_logits, *([] if drafted is None else [drafted]))
    given: dict[str, Any] = {}
    if draft and step.draft_logits is not None:
        given = {"draft_logits": draft[0], "draft_params": step.draft_params}
    elif draft:
        given = {"draft_probs": draft[0]}
    return as_one(step, target, step.params, **given)


def as_one(step: Step, rows: Tensor, params: SamplingParams, **of_draft: Any) -> VerifyOutput:
    """The op on whole target rows, with the rest of a step."""
    by_match = step.acceptance in ("match", "greedy")
    return verify_chain(
        rows, step.draft_tokens, params=params, acceptance=step.acceptance,
        uniform_samples=None if by_match else step.uniform_samples,
        noise_keys=step.noise_keys, num_draft_tokens=step.num_draft_tokens, eos_token_ids=step.eos_token_ids,
        backend=step.shard.backend, **of_draft,
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
