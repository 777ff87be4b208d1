"""Rows that sampling truncates: the logits that may be kept are sent to all ranks, which then know all that counts.

Each rank tells its largest logits in the first round of all. Mostly they hold what may be kept, and all ranks see alike
whether they do: a logit that was not told is at most the last of its rank's list. If not, ranks are asked again.

A cut-off, what is kept and its normalizer depend on those logits and on nothing below them, except for `top_p` of a
whole row's mass, whose cut-off is found first (mass.py). So on rows that hold those logits and −inf elsewhere, the op
itself gives what it gives on the whole rows (up to rounding on Triton, whose lists also hold lower ids). Where there
are too many for that, or only the op can tell a cut-off, or nothing is possible, the whole row is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends.reference.law import clean, make_params
from ..ops.row_stats import row_stats
from ..ops.verify_chain import verify_chain
from ..ops.warp_probs import warp_probs
from ..sampling import SMALLEST_TEMPERATURE, SamplingParams
from ..types import RowStats, Status, VerifyOutput
from .mass import TopP, bounds
from .rows import Largest, Listed, Shard, ShardRows, listed_at, read_rows
from .rules import ShardedCall, asked_of_draft, asked_of_target, some_params, verify_whole, with_flags

MOST = 4096  # ids that top-k may ask for and top-p look among: kernels list that many, and add up more in other ways
LISTED = 128  # largest logits that each rank sends at once for a row that top-p or min-p cut
LEAST_MIN_P = 2.0**-126  # cuts nothing of any weight


@dataclass(frozen=True)
class Truncation:
    """One sequence's parameters, 0 (`top_p`: 1) where they are off."""

    top_k: int
    top_p: float
    min_p: float
    greedy: bool
    min_p_first: bool
    bad: bool  # its min_p is invalid

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
        """Whether nothing bounds what is sent of its rows."""
        return self.any and (self.top_k > MOST or (self.of_whole_mass and self.bad))

    @property
    def by_mass(self) -> bool:
        """Whether cut-offs are searched for by masses."""
        return self.of_whole_mass and not self.told_whole


def numbers_of(params: SamplingParams, batch: int) -> list[tuple[float, ...]]:
    """Temperature, top_k, top_p and min_p of each sequence, as kernels take them. Tensors are waited for."""
    flat = params._flat
    given = (flat.temperatures, flat.top_ks, flat.top_ps, flat.min_ps)
    # numbers as float32 has them, which kernels take
    columns = [
        [number if isinstance(number, int) else float(np.float32(number))] * batch
        if tensor is None
        else tensor.tolist()
        for number, tensor in zip(flat[:4], given, strict=True)
    ]
    return list(zip(*columns, strict=True))


def cuts_of(params: SamplingParams, batch: int, vocab: int) -> list[Truncation]:
    """Each sequence's truncation."""
    return [
        Truncation(
            int(k) if 0 < k < vocab else 0, p if 0 < p < 1 else 1.0, m if 0 < m <= 1 else 0.0,
            0 <= t < SMALLEST_TEMPERATURE, params.min_p_first, not 0 <= m <= 1,
        )
        for t, k, p, m in numbers_of(params, batch)
    ]  # fmt: skip


def of_kept(params: SamplingParams, cuts: list[Truncation], device: torch.device) -> SamplingParams:
    """Parameters for rows that hold what top-p keeps of a whole row's mass, and −inf elsewhere. They still truncate, as
    the mass of a cut row is added up in another way than that of a whole one.
    """
    if not any(cut.by_mass for cut in cuts):
        return params
    top_p, min_p = [], []
    for cut, (_, _, p, m) in zip(cuts, numbers_of(params, len(cuts)), strict=True):
        top_p.append(1.0 if cut.by_mass else p)
        min_p.append(max(m, LEAST_MIN_P) if cut.by_mass else m)
    return replace(
        params,
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
    )


def cut_ones(cuts: list[Truncation]) -> list[int]:
    """The numbers of the sequences that are cut."""
    return [i for i, cut in enumerate(cuts) if cut.any]


def listed_length(cuts: list[Truncation]) -> int:
    """How many of each rank's largest logits are sent at once: one more than top-k asks for, so that ties are seen."""
    bounded = [cut.top_k + 1 for cut in cuts if cut.any and not cut.told_whole and cut.top_k]
    others = any(cut.any and not cut.told_whole and not cut.top_k for cut in cuts)
    return max([1, *bounded, LISTED if others else 1])


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


def bounds_of(x: Tensor, params: SamplingParams, cuts: list[Truncation]) -> Tensor:
    """Bounds ``[batch, n]`` below which top-k or min-p keep nothing, by the largest logits ``[batch, n, many]``."""
    batch, n, many = x.shape
    largest = x.topk(min(many, max([1, *(cut.top_k for cut in cuts)]))).values
    maximum = largest[..., 0]
    column = torch.tensor([[cut.top_k, cut.min_p] for cut in cuts], dtype=torch.float64, device=x.device)[:, None]
    top_k, min_p = column[..., 0].long(), column[..., 1].float()
    kth = largest.gather(-1, (top_k.clamp(1, largest.shape[-1]) - 1)[..., None].expand(-1, n, 1))[..., 0]
    t = make_params(batch, x, params._flat).temperature
    # a little below where any backend puts it, which each finds in its own way
    likely = maximum + min_p.log() * t * (1 + 1e-5) - 1e-5 * (1 + maximum.abs())
    return torch.where(top_k > 0, kth, torch.where(maximum.isinf(), maximum, likely))


def candidates(
    shard: Shard, listed: Listed, told: Largest, params: SamplingParams, cuts: list[Truncation], uncut: Tensor | None
) -> Candidates:
    """The candidates of sequences that are all cut. `told` holds the largest logits of the `listed` rows: where the
    bound lies above their floor, all that counts is among them, and no rank has to be asked again.
    `uncut [batch, n, 6]`: values of the rows' stats, where top-p looks at a whole row's mass.
    """
    own, vocab = listed.own, shard.layout.vocab
    told_whole, has_top_p, by_mass = torch.tensor(
        [[cut.told_whole, cut.top_p < 1, cut.by_mass] for cut in cuts], device=own.device
    ).T[..., None]
    top_p, largest, here = None, told.values(vocab), ~told_whole
    # of a row with nothing possible the op makes id 0 certain, which is none of the candidates
    told_whole = told_whole | (here & ~(largest > -math.inf).any(-1))
    bound = bounds_of(largest, params, cuts)
    if any(cut.by_mass for cut in cuts):
        assert uncut is not None
        top_p = TopP.of(uncut, params, [cut.by_mass for cut in cuts], vocab)
        bound = torch.where(by_mass, torch.where(top_p.looked, top_p.cutoff(largest)[0], uncut[..., 0]), bound)
    if (here & (told.floor > -math.inf) & (bound <= told.floor)).any():
        x = clean(own)
        if top_p is not None:
            found = torch.where(top_p.looked, bounds(shard, x, top_p, MOST), uncut[..., 0])  # type: ignore[index]
            bound = torch.where(by_mass, found, bound)
        ids, logits, also, wide = tell(shard, listed, x, bound, here, told_whole, has_top_p)
    else:
        kept = here[..., None] & (largest >= bound[..., None]) & (largest > -math.inf)
        wide = told_whole | (has_top_p & (kept.sum(-1) > MOST))
        ids, logits, also = torch.where(kept & ~wide[..., None], told.ids, vocab), told.logits, told.also
    if top_p is not None:
        values = torch.where(ids < vocab, logits.float(), -math.inf)
        cutoff, doubtful = top_p.cutoff(values)
        doubtful = doubtful & ~wide
        if doubtful.any():  # the op itself decides
            of, _ = doubtful.nonzero(as_tuple=True)
            (whole,) = shard.whole(own[doubtful])
            cutoff[doubtful] = row_stats(whole[:, None], some_params(params, of), backend=shard.backend).values[:, 0, 1]
        ids = torch.where(by_mass[..., None] & (values < cutoff[..., None]), vocab, ids)
    return Candidates(ids, logits, also, told.nan, wide)


def tell(
    shard: Shard, listed: Listed, x: Tensor, bound: Tensor, asked: Tensor, told_whole: Tensor, has_top_p: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """All ids from a bound on, however many: the fields of `Candidates` except `nan`; in two rounds."""
    here = (x >= bound[..., None]) & (x > -math.inf) & asked[..., None]
    count = torch.stack([of[0] for of in shard.exchange.gather("numbers of candidates", here.sum(-1))])
    wide = told_whole | (has_top_p & (count.sum(0) > MOST))
    here = here & ~wide[..., None]
    most = max(1, int(torch.where(wide, 0, count).amax()))
    taken = torch.where(here, x, -math.inf).topk(min(most, x.shape[-1])).indices
    given = listed_at(shard, listed, taken, here.gather(-1, taken), most)
    answers = shard.exchange.gather("candidates", *given)
    ids, logits, *also = (torch.cat([of[i] for of in answers], -1) for i in range(len(given)))
    return ids.long(), logits, also[0] if also else None, wide


def with_cuts(step: ShardedCall, draft: ShardRows, listed: Listed, told: Largest, cuts: list[Truncation]) -> ShardRows:
    """All of the draft's rows, some sequences' of which are cut; of those are the step and the lists."""
    numbers = cut_ones(cuts)
    cuts, of_cut = [cuts[i] for i in numbers], torch.tensor(numbers, device=draft.own.device)
    cut = draft.some(of_cut)
    found = candidates(step.shard, listed, told, step.draft_params, cuts, cut.stats.values)
    rows, backend = found.rows(step.shard.layout.vocab), step.shard.backend
    stats, prob = stats_and_prob(rows, step.ids, of_kept(step.draft_params, cuts, rows.device), backend)
    if found.wide.any():
        of, _ = found.wide.nonzero(as_tuple=True)
        (whole,) = step.shard.whole(cut.own[found.wide])
        of_whole = stats_and_prob(
            whole[:, None], step.ids[found.wide][:, None], some_params(step.draft_params, of), backend
        )
        for into, of_op in zip((*stats, prob), (*of_whole[0], of_whole[1]), strict=True):
            into[found.wide] = of_op[:, 0]
    chosen = [of.index_copy(0, of_cut, new) for of, new in zip(draft.stats, stats, strict=True)]
    return replace(draft, stats=RowStats(*chosen), prob=draft.prob.index_copy(0, of_cut, prob))


def stats_and_prob(rows: Tensor, ids: Tensor, params: SamplingParams, backend: str | None) -> tuple[RowStats, Tensor]:
    """The stats of rows ``[batch, n, vocab]``, and the probability of one id of each."""
    prob = warp_probs(rows, params, backend=backend).gather(-1, ids[..., None])[..., 0]
    return row_stats(rows, params, backend=backend), prob


def verify_cut(step: ShardedCall, known: Known, cuts: list[Truncation]) -> VerifyOutput:
    """Verify sequences whose target rows are cut."""
    vocab, num_draft = step.shard.layout.vocab, step.draft_tokens.shape[1]
    assert known.largest is not None
    listed = Listed(step.target_logits, 0, step.drafted)
    uncut = None if known.target is None else known.target.stats.values
    found = candidates(step.shard, listed, known.largest, step.params, cuts, uncut)
    given: dict[str, Any] = {}
    if (draft := known.draft) is not None:
        assert found.also is not None
        at = draft.at.to(found.also.dtype)[..., None]
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


def verify_told(step: ShardedCall) -> VerifyOutput:
    """Verify sequences whose rows are sent whole."""
    drafted = step.drafted
    target, *draft = step.shard.whole(step.target_logits, *([] if drafted is None else [drafted]))
    given: dict[str, Any] = {}
    if draft and step.draft_logits is not None:
        given = {"draft_logits": draft[0], "draft_params": step.draft_params}
    elif draft:
        given = {"draft_probs": draft[0]}
    return as_one(step, target, step.params, **given)


def as_one(step: ShardedCall, rows: Tensor, params: SamplingParams, **of_draft: Any) -> VerifyOutput:
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
    row is not a distribution, this is not one either.
    """
    taken = spread(torch.ones_like(numbers), ids, vocab, 0.0)
    out = spread(numbers, ids, vocab, 0.0)[..., :vocab].contiguous()
    other = taken[..., :vocab].argmin(-1, keepdim=True)
    rest = (1 - out.clamp_min(0.0).nan_to_num(0.0, 0.0, 0.0).sum(-1, keepdim=True)).clamp_min(0.0)
    rest = torch.where(taken.gather(-1, other) == 0, rest, out.gather(-1, other))  # else all of them are given
    is_bad, is_nan = (((status & int(flag)) != 0)[..., None] for flag in (Status.BAD_DRAFT, Status.NAN))
    return out.scatter_(-1, other, torch.where(is_bad, torch.where(is_nan, math.nan, -1.0), rest))


@dataclass(frozen=True)
class Known:
    """What all ranks know of a step's rows after the first round; the draft's as truncation leaves them."""

    target: ShardRows | None
    draft: ShardRows | None
    largest: Largest | None  # of the target's rows that are cut, if some are

    def some(self, sequences: Tensor) -> Known:
        """What is known of these sequences alone; the lists stay as they are."""
        target, draft = (None if of is None else of.some(sequences) for of in (self.target, self.draft))
        return Known(target, draft, self.largest)


def know(step: ShardedCall, cuts: list[Truncation], draft_cuts: list[Truncation]) -> Known:
    """One round, of all that is needed first, and what it takes to cut the draft's rows."""
    reads_target = not all(cut.any for cut in cuts) or any(cut.by_mass for cut in cuts) or not cuts
    asked = [*([asked_of_target(step)] if reads_target else []), *asked_of_draft(step)]
    listed = []
    if numbers := cut_ones(cuts):
        of_cut = step.some(numbers)
        listed.append(Listed(of_cut.target_logits, listed_length(cuts), of_cut.drafted))
    of_draft = None
    if step.draft_logits is not None and step.drafted is not None and (numbers := cut_ones(draft_cuts)):
        of_draft = step.some(numbers)
        assert of_draft.draft_logits is not None
        listed.append(Listed(of_draft.draft_logits, listed_length(draft_cuts)))
    rows, lists = read_rows(step.shard, asked, listed)
    target = with_flags(step, rows.pop(0)) if reads_target else None
    draft = rows.pop() if rows else None
    if of_draft is not None:
        assert draft is not None
        draft = with_cuts(of_draft, draft, listed[-1], lists.pop(), draft_cuts)
    return Known(target, draft, lists.pop() if lists else None)


def verify_in_groups(step: ShardedCall, cuts: list[Truncation], draft_cuts: list[Truncation]) -> VerifyOutput:
    """Sequences whose target rows are sent whole, those whose rows are cut, and the others: each in its own way."""
    whole = [i for i, cut in enumerate(cuts) if cut.told_whole]
    others = [i for i, cut in enumerate(cuts) if not cut.told_whole]
    if whole and others:
        parts = [
            verify_in_groups(step.some(of), [cuts[i] for i in of], [draft_cuts[i] for i in of])
            for of in (whole, others)
        ]
        return joined([whole, others], parts)
    if whole:
        return verify_told(step)
    known, cut = know(step, cuts, draft_cuts), cut_ones(cuts)
    uncut = [i for i, of in enumerate(cuts) if not of.any]
    if not cut:
        return verify_uncut(step, known)
    if not uncut:
        return verify_cut(step, known, cuts)
    of_uncut, of_cut = (known.some(torch.tensor(of, device=step.draft_tokens.device)) for of in (uncut, cut))
    parts = [verify_uncut(step.some(uncut), of_uncut), verify_cut(step.some(cut), of_cut, [cuts[i] for i in cut])]
    return joined([uncut, cut], parts)


def verify_uncut(step: ShardedCall, known: Known) -> VerifyOutput:
    """Verify sequences whose target rows are not cut."""
    assert known.target is not None
    return verify_whole(step, known.target, known.draft)


def joined(groups: list[list[int]], parts: list[VerifyOutput]) -> VerifyOutput:
    """The output of all sequences; each part has those of a group, by their numbers."""
    order = torch.tensor(sum(groups, []), device=parts[0].tokens.device).argsort()
    tokens, num_accepted, num_tokens, status = (
        torch.cat(of)[order] for of in zip(*(part[:4] for part in parts), strict=True)
    )
    return VerifyOutput(tokens, num_accepted, num_tokens, status)
