"""The draft's laws: found from its logits, taken from the stats kept from drafting, or given as probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import INFINITY, NAN
from .bundles import DraftLaws, DraftRow, RowLaws, Wanted
from .launch import run, tiles_a_program
from .law import find_laws, load_span, make_temperature, needed, temperature_of
from .row import load_law, load_logits, num_tiles, start_of, tile_ids, weigh

if TYPE_CHECKING:
    from .verify_chain import Layout


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
    """A program a row: the law that a row's stats describe. A foreign argmax (no id of the row) becomes -1."""
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
        numbers = laws.numbers + row * 4
        tl.store(numbers, maximum)
        tl.store(numbers + 1, tl.load(values + at * 6 + 1))
        tl.store(numbers + 2, tl.where(one_hot, -1.0, inverse_temperature))
        tl.store(numbers + 3, tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(values + at * 6 + 3)))
        tl.store(laws.argmax + row, tl.where((id >= 0) & (id < vocab), id, -1))
        tl.store(laws.status + row, tl.load(given_status + at))


@triton.jit(do_not_specialize=["n"])
def nan_flags(
    probs,
    n,
    wanted,
    status,
    TILES: tl.constexpr,
):
    """A program a row of probabilities: flags a NaN."""
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    is_wanted, first_row = needed(wanted.spans, b, row % n, wanted.draft_only)
    if is_wanted:
        start = start_of(probs, b, first_row + row % n)
        found = tl.zeros((), tl.int32)
        for first in range(0, num_tiles(probs.vocab), TILES):
            ids = tile_ids(first, TILES)
            p = tl.load(start + ids, mask=ids < probs.vocab, other=0.0)
            found |= tl.max(tl.max((p != p).to(tl.int32), 1), 0)
        tl.store(status + row, tl.where(found > 0, NAN, 0))


@triton.jit
def load_draft_row(draft, b, i, row, mask=None):
    """Row i of sequence b, whose law is number `row`; or vectors of them; nothing where tokens are point masses."""
    if draft.rows is None:
        found = DraftRow(None, None, None, None, None)
    elif draft.laws.numbers is None:
        found = DraftRow(start_of(draft.rows, b, i), draft.rows.vocab, None, draft.to_draft, draft.map_size)
    else:
        law = load_law(draft.laws, row, mask)
        found = DraftRow(start_of(draft.rows, b, i), draft.rows.vocab, law, draft.to_draft, draft.map_size)
    return found


@triton.jit
def draft_ids_of(row, ids):
    """The draft's ids of target ids; -1 for those that its vocabulary lacks."""
    if row.to_draft is not None:
        ids = tl.load(row.to_draft + ids, mask=(ids >= 0) & (ids < row.map_size), other=-1).to(tl.int32)
    return ids


@triton.jit
def q_of(row, ids, law):
    """Q of target ids by `law`, or by a raw one; 0 for ids that the draft's vocabulary lacks."""
    draft_ids = draft_ids_of(row, ids)
    inside = (draft_ids >= 0) & (draft_ids < row.vocab)
    if law is None:
        q = tl.load(row.start + draft_ids, mask=inside, other=0.0)
        q = tl.where(q >= 0.0, q, 0.0)  # NaN and negative ones count as 0
    else:
        x = load_logits(row.start, draft_ids, row.vocab)
        weight = weigh(x, law, law.cutoff) * law.inverse_normalizer
        one_hot = (draft_ids == law.argmax).to(tl.float32)
        q = tl.where(inside, tl.where(law.inverse_temperature < 0, one_hot, weight), 0.0)
    return q


@dataclass
class Draft:
    """What `draft_laws` leaves behind."""

    laws: DraftLaws
    values: Tensor | None = None  # [batch, n, 6] float32, with the raw fields; only if asked for and rows were read


def draft_laws(
    layout: Layout, wanted: Wanted, logits: Tensor | None, probs: Tensor | None,
    given: tuple[Tensor | None, Tensor | None, Tensor | None], target_to_draft: Tensor | None,
    params: tuple[object, ...], *, bonus: int, raw: bool,
) -> Draft:  # fmt: skip
    """The laws of the draft's rows that are wanted; `raw`: also `Draft.values`."""
    data = probs if logits is None else logits
    assert data is not None
    rows, batch, n = layout.rows(data, bonus), layout.batch, layout.width + bonus
    values, argmax, status = given
    map_size = None if target_to_draft is None else target_to_draft.numel()

    def of(laws: RowLaws) -> DraftLaws:
        return DraftLaws(rows, laws, target_to_draft, map_size, tl.constexpr(bonus))

    if logits is not None and values is None:
        found = find_laws(rows, batch, n, params, values=raw, raw=raw, wanted=wanted)
        return Draft(of(found.target.laws), found.values)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, n, *shape, dtype=dtype, device=data.device)

    out_status = empty(dtype=torch.int32)
    if probs is not None:
        run(nan_flags, (batch * n,), rows, n, wanted, out_status, TILES=tiles_a_program(rows.vocab, 4))
        return Draft(of(RowLaws(None, None, out_status)))
    assert values is not None and argmax is not None and status is not None
    laws = RowLaws(empty(4, dtype=torch.float32), empty(dtype=torch.int64), out_status)
    run(
        laws_from_stats, (batch * n,), values.contiguous(), argmax.contiguous(), status.contiguous(), n, rows.vocab,
        wanted, make_temperature(params), laws, warps=1,
    )  # fmt: skip
    return Draft(of(laws))
