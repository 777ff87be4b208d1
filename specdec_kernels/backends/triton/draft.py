"""The draft's laws: found from its logits, taken from the stats kept from drafting, or given as probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import VerifyArguments, tiles_of
from .arithmetic import BAD_DRAFT, INFINITY, NAN, SLACK
from .bundles import LOGITS, DraftLaws, RowLaws, Rows, Wanted
from .launch import run, tiles_a_program
from .law import find_laws, load_span, make_temperature, needed, temperature_of
from .row import load_law, load_logits, start_of, tile_ids, weigh


@triton.jit(do_not_specialize=["n"])
def laws_from_stats(
    values,
    given_argmax,
    given_status,
    n,
    vocab,
    wanted,
    temperature,
    laws,
):
    """A program a row: the law that a row's stats describe; 0 everywhere if no row has such stats."""
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    i = row % n
    if needed(wanted.spans, b, i, wanted.draft_only)[0]:
        at = load_span(wanted.spans, b).token_index + i
        if not wanted.draft_only:
            at += b
        maximum = tl.load(values + at * 6)
        _, inverse_temperature, greedy, _ = temperature_of(temperature, b)
        one_hot = greedy | (tl.abs(maximum) == INFINITY)
        id = tl.load(given_argmax + at)
        cutoff, normalizer = tl.load(values + at * 6 + 1), tl.load(values + at * 6 + 3)
        certain = (maximum == maximum) & (id >= 0) & (id < vocab)
        spread = (cutoff <= maximum) & (normalizer >= 1.0 - SLACK) & (normalizer <= (1.0 + SLACK) * vocab)
        good = tl.where(one_hot, certain, spread)
        numbers = laws.numbers + row * 4
        tl.store(numbers, maximum)
        tl.store(numbers + 1, cutoff)
        tl.store(numbers + 2, tl.where(one_hot | (good == 0), -1.0, inverse_temperature))
        tl.store(numbers + 3, tl.div_rn(tl.full((), 1.0, tl.float32), normalizer))
        tl.store(laws.argmax + row, tl.where(good & (id >= 0) & (id < vocab), id, -1))
        tl.store(laws.status + row, tl.load(given_status + at) | tl.where(good, 0, BAD_DRAFT))


@triton.jit(do_not_specialize=["n", "tiles"])
def probs_status(
    probs,
    n,
    tiles,
    wanted,
    status,
    TILES: tl.constexpr,
):
    """A program a row of probabilities: whether it is a distribution."""
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    is_wanted, first_row = needed(wanted.spans, b, row % n, wanted.draft_only)
    if is_wanted:
        start = start_of(probs, b, first_row + row % n)
        nan = tl.zeros((), tl.int32)
        total = tl.zeros((), tl.float32)
        for first in range(0, tiles, TILES):
            ids = tile_ids(first, TILES)
            p = tl.load(start + ids, mask=ids < probs.vocab, other=0.0)
            nan |= tl.max(tl.max((p != p).to(tl.int32), 1), 0)
            bad = (p != p) | ((p < 0.0) & (p > -INFINITY))  # a -inf counts as 0
            total += tl.sum(tl.sum(tl.where(bad, INFINITY, tl.maximum(p, 0.0)), 1), 0)
        good = tl.abs(total - 1.0) <= SLACK
        tl.store(status + row, tl.where(nan > 0, NAN, 0) | tl.where(good, 0, BAD_DRAFT))


@triton.jit
def can_give(q):
    """Whether a token of probability q can have been drawn."""
    return (q > 0.0) & (q <= 1.0 + SLACK)


@triton.jit
def accept_token(coin, p, q):
    """Whether a coin accepts a token that Q can have given. What its probability exceeds 1 by is rounding."""
    return coin * tl.minimum(q, 1.0) < p


@triton.jit
def next_block_weight(w, p, q):
    """The weight with which a path goes on with such a token, w before it."""
    return tl.where(p > 0.0, tl.minimum(tl.div_rn(w * p, tl.minimum(q, 1.0)), 1.0), 0.0)


@triton.jit
def block_threshold(w, residual):
    """What of a path's weight is left without its next token: ``R / (R + 1 - w)``, R the sum of its remainder."""
    below = residual + 1.0 - w
    return tl.where(below > 0.0, tl.div_rn(residual, tl.where(below > 0.0, below, 1.0)), 1.0)


@triton.jit
def draft_ids_of(draft, ids):
    """The draft's ids of target ids; -1 for those that its vocabulary lacks."""
    if draft.to_draft is not None:
        ids = tl.load(draft.to_draft + ids, mask=(ids >= 0) & (ids < draft.map_size), other=-1).to(tl.int32)
    return ids


@triton.jit
def q_by(law, draft, at, ids):
    """Q of target ids by a law of the draft's row at a position; 0 for ids that its vocabulary lacks."""
    draft_ids = draft_ids_of(draft, ids)
    inside = (draft_ids >= 0) & (draft_ids < draft.rows.vocab)
    weight = weigh(load_logits(draft.rows, at.b, at.i, draft_ids), law, law.cutoff, LOGITS) * law.inverse_normalizer
    one_hot = (draft_ids == law.argmax).to(tl.float32)
    return tl.where(inside, tl.where(law.inverse_temperature < 0, one_hot, weight), 0.0)


@triton.jit
def q_at(draft, at, ids, mask=None):
    """Q of target ids at a position, or at a vector of positions."""
    if draft.laws.numbers is None:
        draft_ids = draft_ids_of(draft, ids)
        start = start_of(draft.rows, at.b, at.i)
        q = tl.load(start + draft_ids, mask=(draft_ids >= 0) & (draft_ids < draft.rows.vocab), other=0.0)
        bad = tl.load(draft.laws.status + at.draft_row, mask=mask) & BAD_DRAFT
        q = tl.where((bad == 0) & (q >= 0.0), q, 0.0)
    else:
        q = q_by(load_law(draft.laws, at.draft_row, mask), draft, at, ids)
    return q


@dataclass
class Draft:
    """What `draft_laws` leaves behind."""

    laws: DraftLaws
    values: Tensor | None = None  # [batch, n, 6] float32, with the raw fields; only if asked for and rows were read


def draft_laws(
    rows: Rows, wanted: Wanted, batch: int, width: int, args: VerifyArguments, *, bonus: int, raw: bool
) -> Draft:
    """The laws of the draft's rows that are wanted, of logits or probabilities; `raw`: also `Draft.values`."""
    n, probs, target_to_draft = width + bonus, args.draft_logits is None, args.target_to_draft
    values, argmax, status = args.draft_values, args.draft_argmax, args.draft_status
    map_size = None if target_to_draft is None else target_to_draft.numel()

    def of(laws: RowLaws) -> DraftLaws:
        return DraftLaws(rows, laws, target_to_draft, map_size, tl.constexpr(True), tl.constexpr(bonus))

    if not probs and values is None:
        found = find_laws(rows, batch, n, args.draft_params, values=raw, raw=raw, wanted=wanted)
        return Draft(of(found.target.laws), found.values)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, n, *shape, dtype=dtype, device=rows.data.device)

    out_status = empty(dtype=torch.int32)
    if probs:
        tiles = tiles_of(rows.vocab)
        run(probs_status, (batch * n,), rows, n, tiles, wanted, out_status, TILES=tiles_a_program(rows.vocab, 4))
        return Draft(of(RowLaws(None, None, out_status)))
    assert values is not None and argmax is not None and status is not None
    laws = RowLaws(empty(4, dtype=torch.float32), empty(dtype=torch.int64), out_status)
    run(
        laws_from_stats, (batch * n,), values.contiguous(), argmax.contiguous(), status.contiguous(), n, rows.vocab,
        wanted, make_temperature(args.draft_params), laws, warps=1,
    )  # fmt: skip
    return Draft(of(laws))
