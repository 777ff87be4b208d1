"""The draft's laws: found from its logits, taken from the stats kept from drafting, or given as probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import INFINITY, NAN
from .launch import run, tiles_a_program, tiles_of
from .law import Rows, find_laws, needed, temperature_of
from .row import load_logits, tile_ids, weigh

if TYPE_CHECKING:
    from .verify import Layout


@triton.jit(do_not_specialize=["n", "flat_stride", "temperature"])
def laws_from_stats(
    values, given_argmax, given_status, flat_stride, n, vocab, blocks, temperature, temperatures, laws, argmax, status,
    SKIP_LAST: tl.constexpr,
):  # fmt: skip
    """A program a row: the law that a row's stats describe. A foreign argmax (no id of the row) becomes -1."""
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    wanted, first = needed(b, row % n, blocks, SKIP_LAST)
    if wanted:
        at = b * flat_stride + first + row % n
        maximum = tl.load(values + at * 6)
        _, inverse_temperature, greedy, _ = temperature_of(b, temperature, temperatures, False)
        one_hot = greedy | (tl.abs(maximum) == INFINITY)
        id = tl.load(given_argmax + at)
        tl.store(laws + row * 4, maximum)
        tl.store(laws + row * 4 + 1, tl.load(values + at * 6 + 1))
        tl.store(laws + row * 4 + 2, tl.where(one_hot, -1.0, inverse_temperature))
        tl.store(laws + row * 4 + 3, tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(values + at * 6 + 3)))
        tl.store(argmax + row, tl.where((id >= 0) & (id < vocab), id, -1))
        tl.store(status + row, tl.load(given_status + at))


@triton.jit(do_not_specialize=["n", "tiles"])
def nan_flags(
    probs, stride_batch, stride_row, vocab, n, tiles, blocks, status, SKIP_LAST: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program a row of probabilities: flags a NaN."""
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    wanted, first_row = needed(b, row % n, blocks, SKIP_LAST)
    if wanted:
        start = probs + b * stride_batch + (first_row + row % n) * stride_row
        found = tl.zeros((), tl.int32)
        for first in range(0, tiles, TILES):
            ids = tile_ids(first, TILES)
            p = tl.load(start + ids, mask=ids < vocab, other=0.0)
            found |= tl.max(tl.max((p != p).to(tl.int32), 1), 0)
        tl.store(status + row, tl.where(found > 0, NAN, 0))


@triton.jit
def draft_ids_of(ids, map_to, map_size):
    """The draft's ids of target ids; -1 for those that its vocabulary lacks."""
    if map_to is not None:
        ids = tl.load(map_to + ids, mask=(ids >= 0) & (ids < map_size), other=-1).to(tl.int32)
    return ids


@triton.jit
def draft_probabilities(
    draft, start, draft_vocab, map_to, map_size, ids, maximum, cutoff, inverse_temperature, inverse_normalizer, argmax,
    PROBS: tl.constexpr,
):  # fmt: skip
    """Q of target ids from the draft's row at `start`; 0 for ids that its vocabulary lacks."""
    draft_ids = draft_ids_of(ids, map_to, map_size)
    inside = (draft_ids >= 0) & (draft_ids < draft_vocab)
    if PROBS:
        q = tl.load(draft + start + draft_ids, mask=inside, other=0.0)
        q = tl.where(q >= 0.0, q, 0.0)  # NaN and negative ones count as 0
    else:
        x = load_logits(draft + start, draft_ids, draft_vocab)
        weight = weigh(x, maximum, cutoff, inverse_temperature) * inverse_normalizer
        one_hot = (draft_ids == argmax).to(tl.float32)
        q = tl.where(inside, tl.where(inverse_temperature < 0, one_hot, weight), 0.0)
    return q


@dataclass
class DraftLaws:
    """The draft's rows, and the law of each."""

    rows: Rows
    laws: Tensor  # [batch, n, 4] float32; unused if rows are probabilities
    argmax: Tensor  # [batch, n] int64
    status: Tensor  # [batch, n] int32
    target_to_draft: Tensor | None
    probs: bool
    bonus: int  # 1 where there are as many rows as of the target, because the bonus is a cascade's; else 0
    values: Tensor | None = None  # [batch, n, 6] float32, with the raw fields; only if asked for and rows were read

    NONE: ClassVar[tuple[object, ...]] = (None, 0, 0, 0, None, None, None, None, 0, False, 0)

    @property
    def arguments(self) -> tuple[object, ...]:
        """What kernels take of the draft."""
        size = 0 if self.target_to_draft is None else self.target_to_draft.numel()
        rows = (*self.rows.address, self.rows.vocab)
        return (*rows, self.laws, self.argmax, self.status, self.target_to_draft, size, self.probs, self.bonus)


def draft_laws(
    layout: Layout, blocks: Tensor, logits: Tensor | None, probs: Tensor | None,
    given: tuple[Tensor | None, Tensor | None, Tensor | None], target_to_draft: Tensor | None,
    params: tuple[object, ...], *, bonus: int, raw: bool,
) -> DraftLaws:  # fmt: skip
    """The laws of the draft's rows that the sequences' blocks need; `raw`: also `DraftLaws.values`."""
    data = probs if logits is None else logits
    assert data is not None
    rows = layout.rows(data, bonus)
    values, argmax, status = given
    if logits is not None and values is None:
        found = find_laws(rows, params, values=raw, raw=raw, blocks=blocks, draft=not bonus)
        made = (found.laws, found.argmax, found.status)
        return DraftLaws(rows, *made, target_to_draft, False, bonus, found.values)
    laws = torch.empty(rows.batch, rows.n, 4, dtype=torch.float32, device=data.device)
    out_argmax = torch.empty(rows.batch, rows.n, dtype=torch.int64, device=data.device)
    out_status = torch.empty(rows.batch, rows.n, dtype=torch.int32, device=data.device)
    grid = (rows.batch * rows.n,)
    if probs is not None:
        tiles = tiles_of(rows.vocab)
        run(
            nan_flags, grid, *rows.address, rows.vocab, rows.n, tiles, blocks, out_status,
            SKIP_LAST=not bonus, TILES=tiles_a_program(rows.vocab, 4),
        )  # fmt: skip
    else:
        assert values is not None and argmax is not None and status is not None
        run(
            laws_from_stats, grid, values.contiguous(), argmax.contiguous(), status.contiguous(), layout.stride(bonus),
            rows.n, rows.vocab, blocks, params[0], params[5], laws, out_argmax, out_status, SKIP_LAST=not bonus,
            warps=1,
        )  # fmt: skip
    return DraftLaws(rows, laws, out_argmax, out_status, target_to_draft, probs is not None, bonus)
