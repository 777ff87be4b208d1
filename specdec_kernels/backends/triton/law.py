"""The law of each row: `scan` reads all tiles of all rows at once, `law` combines a row's and finds its cut-off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import (
    BAD_PARAM,
    EMPTY_ROW,
    INF,
    INFINITY,
    LAST_ID,
    NAN,
    SMALLEST_TEMPERATURE,
    exp_nonpositive,
    ordered,
)  # fmt: skip
from .launch import run, tiles_a_program, tiles_at_once, tiles_of
from .row import CANDIDATES, load_logits, measure, select, tile_ids, weigh

LARGEST_INT32 = 2**31 - 1


@triton.jit
def needed(b, i, blocks, SKIP_LAST: tl.constexpr):
    """Whether row i of sequence b is read, and its first row; without `blocks` every row is."""
    if blocks is None:
        first = tl.zeros((), tl.int64)
        wanted = i >= 0
    else:
        first = tl.load(blocks + b * 3)
        length = tl.load(blocks + b * 3 + 1)
        # target rows 0 … length (none of an idle row, whose length is -1), draft rows 0 … length - 1
        wanted = i < length if SKIP_LAST else i <= length
    return wanted, first


@triton.jit
def temperature_of(b, temperature, temperatures, GREEDY: tl.constexpr):
    """(T, 1 / T, greedy, flags)."""
    given = tl.full((), temperature, tl.float32) if temperatures is None else tl.load(temperatures + b)
    good = (given >= 0.0) & (given < INFINITY)
    t = tl.where(good, given, 1.0)
    greedy = t < (INFINITY if GREEDY else SMALLEST_TEMPERATURE)
    t = tl.where(greedy, 1.0, t)
    return t, tl.div_rn(tl.full((), 1.0, tl.float32), t), greedy, tl.where(good, 0, BAD_PARAM)


@triton.jit(do_not_specialize=["n", "tiles", "temperature"])
def scan(
    logits, stride_batch, stride_row, vocab, n, tiles, blocks, temperature, temperatures,
    tile_max, tile_argmax, tile_mass, tile_nan, tile_raw_mass, tile_raw_moment,
    SKIP_LAST: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program for TILES tiles of one row: of each its maximum, the lowest id there, whether it holds a NaN and
    ``sum exp((x - tile maximum) / T)``; if asked for, the same at temperature 1 (if TEMPERED at T) and its first
    moment.
    """
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    b = row // n
    wanted, first = needed(b, row % n, blocks, SKIP_LAST)
    if wanted:
        start = logits + b * stride_batch + (first + row % n) * stride_row
        ids = tile_ids(first_tile, TILES)
        x = tl.load(start + ids, mask=ids < vocab, other=-INFINITY).to(tl.float32)
        is_nan = x != x
        x = tl.where(is_nan, -INFINITY, x)
        maximum = tl.max(x, 1)
        argmax = tl.min(tl.where(x == maximum[:, None], ids, LAST_ID), 1)
        finite = tl.abs(maximum) < INFINITY
        _, inverse_temperature, _, _ = temperature_of(b, temperature, temperatures, GREEDY)
        shifted = x - tl.where(finite, maximum, 0.0)[:, None]
        tile = first_tile + tl.arange(0, TILES)
        out = row * tiles + tile
        inside = tile < tiles
        tl.store(tile_max + out, maximum, mask=inside)
        tl.store(tile_argmax + out, argmax, mask=inside)
        tl.store(tile_nan + out, tl.max(is_nan.to(tl.int32), 1), mask=inside)
        if tile_mass is not None:
            mass = tl.sum(exp_nonpositive(shifted * inverse_temperature), 1)
            tl.store(tile_mass + out, tl.where(finite, mass, 0.0), mask=inside)
        if tile_raw_mass is not None:
            if TEMPERED:
                shifted *= inverse_temperature
            raw = exp_nonpositive(shifted)
            moment = tl.sum(raw * tl.where(raw > 0.0, shifted, 0.0), 1)  # 0 log 0 = 0
            tl.store(tile_raw_mass + out, tl.where(finite, tl.sum(raw, 1), 0.0), mask=inside)
            tl.store(tile_raw_moment + out, tl.where(finite, moment, 0.0), mask=inside)


@triton.jit
def store_raw(
    tile_max, tile_raw_mass, tile_raw_moment, tiles, maximum, inverse_temperature, values, TEMPERED: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Raw log-normaliser and entropy of a row from its tiles'; if TEMPERED normaliser and entropy at T."""
    mass = tl.full((), 1.0, tl.float32)
    entropy = tl.zeros((), tl.float32)
    if tl.abs(maximum) < INFINITY:
        mass = tl.zeros((), tl.float32)
        moment = tl.zeros((), tl.float32)
        for first in range(0, tiles, TILES):
            t = first + tl.arange(0, TILES)
            shift = tl.load(tile_max + t, mask=t < tiles, other=-INFINITY) - maximum
            if TEMPERED:
                shift *= inverse_temperature
            share = exp_nonpositive(shift)
            tile_sum = tl.load(tile_raw_mass + t, mask=t < tiles, other=0.0) * share
            tile_first = tl.load(tile_raw_moment + t, mask=t < tiles, other=0.0) * share
            mass += tl.sum(tile_sum, 0)
            moment += tl.sum(tile_first + tl.where(share > 0.0, shift, 0.0) * tile_sum, 0)
        entropy = tl.log(mass) - tl.div_rn(moment, mass)
    tl.store(values + 4, mass if TEMPERED else maximum + tl.log(mass))
    tl.store(values + 5, entropy)


@triton.jit
def find_cutoff(
    start, vocab, tiles, tile_max, tile_mass, listed, maximum, temperature, inverse_temperature, top_k, top_p, min_p,
    normalizer, MIN_P_FIRST: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The smallest logit that top-k, top-p and min-p keep, and the mass of what is kept; stores the tiles' masses."""
    likely = tl.full((), -INFINITY, tl.float32)
    if min_p > 0.0:
        likely = maximum + tl.log(min_p) * temperature
    floor = likely if MIN_P_FIRST else tl.full((), -INFINITY, tl.float32)
    for stage in range(2):  # top-k, then top-p of what it left; a loop so that the search is compiled once
        by_mass = tl.full((), stage, tl.int32) > 0
        active = tl.where(by_mass, (top_p < 1.0).to(tl.int32), (top_k > 0).to(tl.int32))
        if active > 0:
            total = normalizer
            if by_mass & (floor > -INFINITY):
                _, total, _, _ = measure(
                    ordered(floor), start, vocab, tiles, tile_max, maximum, 0.0, inverse_temperature, 0, 0, None,
                    False, TILES,
                )  # fmt: skip
            floor = select(
                floor, top_k, top_p * total, by_mass, start, vocab, tiles, tile_max, maximum, maximum, 0.0,
                inverse_temperature, 0, 0, None, listed, False, TILES,
            )  # fmt: skip
    floor = tl.maximum(floor, likely)
    kept_mass = tl.zeros((), tl.float32)
    cutoff = tl.full((), INFINITY, tl.float32)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        mass = tl.zeros((TILES,), tl.float32)
        if tl.max(tl.load(tile_max + t, mask=t < tiles, other=-INFINITY), 0) >= floor:
            x = load_logits(start, tile_ids(first, TILES), vocab)
            mass = tl.sum(weigh(x, maximum, floor, inverse_temperature), 1)
            kept = (x >= floor) & (x > -INFINITY)
            cutoff = tl.minimum(cutoff, tl.min(tl.min(tl.where(kept, x, INFINITY), 1), 0))
        tl.store(tile_mass + t, mass, mask=t < tiles)
        kept_mass += tl.sum(mass, 0)
    return cutoff, kept_mass


@triton.jit(do_not_specialize=["n", "tiles", "temperature", "top_k", "top_p", "min_p"])
def law(
    logits, stride_batch, stride_row, vocab, n, tiles, blocks,
    temperature, top_k, top_p, min_p, temperatures, top_ks, top_ps, min_ps,
    tile_max, tile_argmax, tile_mass, tile_nan, tile_raw_mass, tile_raw_moment, listed,
    laws, values, argmax, status,
    MIN_P_FIRST: tl.constexpr, CUT: tl.constexpr, SKIP_LAST: tl.constexpr, GREEDY: tl.constexpr,
    TEMPERED: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    """A program a row: its maximum, argmax, flags and normaliser from its tiles; where truncation asks for it the
    cut-off, by further passes over the row. `tile_mass` becomes the mass of what is kept of each tile, relative to the
    maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    wanted, first_row = needed(b, row % n, blocks, SKIP_LAST)
    if wanted:
        tile_max += row * tiles
        tile_nan += row * tiles
        tile_argmax += row * tiles
        maximum = tl.full((), -INFINITY, tl.float32)
        arg = tl.zeros((), tl.int32)
        nan = tl.zeros((), tl.int32)
        for first in range(0, tiles, ROW_TILES):
            t = first + tl.arange(0, ROW_TILES)
            of_tile = tl.load(tile_max + t, mask=t < tiles, other=-INFINITY)
            nan |= tl.max(tl.load(tile_nan + t, mask=t < tiles, other=0), 0)
            top = tl.max(of_tile, 0)
            if top > maximum:
                maximum = top
                arg = tl.load(tile_argmax + tl.min(tl.where(of_tile == top, t, LAST_ID), 0))
        t_value, inverse_temperature, greedy, flags = temperature_of(b, temperature, temperatures, GREEDY)
        p = tl.full((), top_p, tl.float32) if top_ps is None else tl.load(top_ps + b)
        m = tl.full((), min_p, tl.float32) if min_ps is None else tl.load(min_ps + b)
        good_p, good_m = p >= 0.0, (m >= 0.0) & (m <= 1.0)
        flags |= tl.where(good_p & good_m, 0, BAD_PARAM) | tl.where(nan > 0, NAN, 0)
        flags |= tl.where(maximum == INFINITY, INF, 0) | tl.where(maximum == -INFINITY, EMPTY_ROW, 0)
        one_hot = greedy | (tl.abs(maximum) == INFINITY)
        cutoff = tl.full((), -INFINITY, tl.float32)
        normalizer = tl.full((), 1.0, tl.float32)
        if tile_mass is not None:
            if one_hot == 0:
                tile_mass += row * tiles
                k = top_k.to(tl.int64) if top_ks is None else tl.load(top_ks + b)
                k = tl.where((k > 0) & (k < vocab), k, 0)
                p = tl.where(good_p & (p > 0.0) & (p < 1.0), p, 1.0)
                m = tl.where(good_m, m, 0.0)
                cut = (k > 0) | (p < 1.0) | (m > 0.0)
                normalizer = tl.zeros((), tl.float32)
                final = tl.where(cut, 0, tiles)  # else find_cutoff stores the masses
                for first in range(0, tiles, ROW_TILES):
                    t = first + tl.arange(0, ROW_TILES)
                    of_tile = tl.load(tile_max + t, mask=t < tiles, other=-INFINITY)
                    mass = tl.load(tile_mass + t, mask=t < tiles, other=0.0)
                    mass *= exp_nonpositive((of_tile - maximum) * inverse_temperature)
                    tl.debug_barrier()  # several threads hold the same tile: none may load what another has stored
                    tl.store(tile_mass + t, mass, mask=t < final)
                    normalizer += tl.sum(mass, 0)
                if CUT:
                    if cut:
                        cutoff, normalizer = find_cutoff(
                            logits + b * stride_batch + (first_row + row % n) * stride_row, vocab, tiles, tile_max,
                            tile_mass, listed + row * CANDIDATES, maximum, t_value, inverse_temperature, k, p, m,
                            normalizer, MIN_P_FIRST, TILES,
                        )  # fmt: skip
        tl.store(laws + row * 4, maximum)
        tl.store(laws + row * 4 + 1, cutoff)
        tl.store(laws + row * 4 + 2, tl.where(one_hot, -1.0, inverse_temperature))
        tl.store(laws + row * 4 + 3, tl.div_rn(tl.full((), 1.0, tl.float32), normalizer))
        tl.store(argmax + row, arg.to(tl.int64))
        tl.store(status + row, flags)
        if values is not None:
            values += row * 6
            tl.store(values, maximum)
            tl.store(values + 1, cutoff)
            tl.store(values + 2, maximum * inverse_temperature + tl.log(normalizer))
            tl.store(values + 3, normalizer)
            if tile_raw_mass is None:
                tl.store(values + 4, -INFINITY)
                tl.store(values + 5, -INFINITY)
            else:
                at = row * tiles
                store_raw(
                    tile_max, tile_raw_mass + at, tile_raw_moment + at, tiles, maximum, inverse_temperature, values,
                    TEMPERED, ROW_TILES,
                )  # fmt: skip


@dataclass
class Rows:
    """Rows of logits or probabilities: row (b, i) starts at ``b * stride_batch + (first of b + i) * stride_row``."""

    data: Tensor
    batch: int
    n: int  # rows a sequence
    stride_batch: int
    stride_row: int

    @property
    def vocab(self) -> int:
        """Ids a row."""
        return int(self.data.shape[-1])

    @property
    def address(self) -> tuple[Tensor, int, int]:
        """What kernels take to find a row."""
        return self.data, self.stride_batch, self.stride_row


@dataclass
class Laws:
    """What `find_laws` leaves behind for rows ``[batch, n]``; entries of rows that nobody needs are not written."""

    laws: Tensor  # [batch, n, 4] float32, see row.load_law
    argmax: Tensor  # [batch, n] int64
    status: Tensor  # [batch, n] int32
    values: Tensor | None  # [batch, n, 6] float32, as RowStats has them; the last two see `tempered`
    tile_max: Tensor  # [batch, n, tiles] float32
    tile_mass: Tensor | None  # [batch, n, tiles] float32: mass of the kept ids; not written where argmax has all


def find_laws(
    rows: Rows, params: tuple[Any, ...], *, values: bool = False, raw: bool = False, tempered: bool = False,
    greedy: bool = False, blocks: Tensor | None = None, draft: bool = False,
) -> Laws:  # fmt: skip
    """The law of every row, or with `blocks` (see verify.py) of those rows of a sequence that its block needs.

    Parameters
    ----------
    rows : Rows
        Logits.
    params : tuple
        Flat sampling parameters.
    values, raw : bool
        Also return `Laws.values`, and with the raw fields.
    tempered : bool
        In the place of the raw fields: the normaliser, and the entropy in nats, at the temperature with nothing cut.
    greedy : bool
        Whatever the temperature.
    blocks, draft
        The sequences' blocks, and whether rows are the draft's.
    """
    temperature, top_k, top_p, min_p, min_p_first, temperatures, top_ks, top_ps, min_ps = params
    device, batch, n, tiles = rows.data.device, rows.batch, rows.n, tiles_of(rows.vocab)
    certain = greedy or (temperatures is None and temperature == 0)  # then no mass is needed

    def per_tile(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(batch, n, tiles, dtype=dtype, device=device) if wanted else None

    tile_max, tile_argmax, tile_nan = per_tile(), per_tile(dtype=torch.int32), per_tile(dtype=torch.int32)
    tile_mass, tile_raw_mass, tile_raw_moment = per_tile(not certain), per_tile(raw), per_tile(raw)
    assert tile_max is not None
    cut = not certain and (
        top_ks is not None or top_ps is not None or min_ps is not None
        or 0 < top_k < rows.vocab or 0 < top_p < 1 or min_p > 0
    )  # fmt: skip
    out = Laws(
        torch.empty(batch, n, 4, dtype=torch.float32, device=device),
        torch.empty(batch, n, dtype=torch.int64, device=device),
        torch.empty(batch, n, dtype=torch.int32, device=device),
        torch.empty(batch, n, 6, dtype=torch.float32, device=device) if values else None,
        tile_max,
        tile_mass,
    )
    listed = torch.empty(batch, n, CANDIDATES.value, dtype=torch.int32, device=device) if cut else None
    shape = (*rows.address, rows.vocab, n, tiles, blocks)
    partial = (tile_max, tile_argmax, tile_mass, tile_nan, tile_raw_mass, tile_raw_moment)
    constants = {"SKIP_LAST": draft, "GREEDY": greedy, "TEMPERED": tempered}
    a_program = tiles_a_program(rows.vocab, 4)
    run(
        scan, (batch * n * triton.cdiv(tiles, a_program),), *shape, temperature, temperatures, *partial,
        TILES=a_program, **constants,
    )  # fmt: skip
    run(
        law, (batch * n,), *shape, temperature, min(top_k, LARGEST_INT32), top_p, min_p,
        temperatures, top_ks, top_ps, min_ps, *partial, listed, out.laws, out.values, out.argmax, out.status,
        MIN_P_FIRST=min_p_first, CUT=cut, TILES=tiles_a_program(rows.vocab, 8), ROW_TILES=tiles_at_once(rows.vocab),
        warps=8 if cut else 4, **constants,
    )  # fmt: skip
    return out
