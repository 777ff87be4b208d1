"""The law of each row: `scan` reads all tiles of all rows at once, `law` combines a row's and finds its cut-off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import tiles_of
from .arithmetic import (
    BAD_PARAM,
    EMPTY_ROW,
    GROUP,
    INF,
    INFINITY,
    LAST_ID,
    LOG2_E,
    LOWEST_KEY,
    NAN,
    SLACK,
    SMALLEST_TEMPERATURE,
    SMALLEST_WEIGHT,
    TILE,
    TOP_P_REACHED,
    exp_nonpositive,
    fast_exp2,
    from_ordered,
    max_or_nan,
    ordered,
)
from .bundles import (
    EVERY_ROW,
    LOGITS,
    NOTHING_LISTED,
    PROBS,
    Cut,
    Groups,
    Listed,
    Noise,
    Range,
    Row,
    RowLaw,
    RowLaws,
    Rows,
    Span,
    Target,
    Temperature,
    TileStats,
    Wanted,
)
from .launch import run, tiles_at_once, tiles_of_rows
from .row import load_as_given, load_logits, load_tiles, tile_ids, weigh
from .search import CANDIDATES, list_values, listed_of, load_listed, load_maxima, nth_maximum, select, select_listed

LARGEST_INT32 = 2**31 - 1
MASSES_AT_ONCE = tl.constexpr(128)  # tiles whose masses are summed side by side


@triton.jit
def load_span(spans, b):
    at = spans + b * 4
    return Span(tl.load(at), tl.load(at + 1).to(tl.int32), tl.load(at + 2) > 0, tl.load(at + 3))


@triton.jit
def store_span(spans, b, first, length, end, token_index):
    at = spans + b * 4
    tl.store(at, first)
    tl.store(at + 1, length.to(tl.int64))
    tl.store(at + 2, end.to(tl.int64))
    tl.store(at + 3, token_index)


@triton.jit
def needed(spans, b, i, DRAFT_ONLY: tl.constexpr):
    """Whether row i of sequence b is read, and the sequence's first row; without `spans` every row is."""
    if spans is None:
        first = tl.zeros((), tl.int64)
        wanted = i >= 0
    else:
        first = tl.load(spans + b * 4)
        length = tl.load(spans + b * 4 + 1)
        # target rows 0 … length (none of an idle row, whose length is -1), draft rows 0 … length - 1
        wanted = i < length if DRAFT_ONLY else i <= length
    return wanted, first


@triton.jit
def temperature_of(temperature, b):
    """(T, 1 / T, greedy, flags) of a sequence."""
    given = tl.full((), temperature.number, tl.float32) if temperature.each is None else tl.load(temperature.each + b)
    good = (given >= 0.0) & (given < INFINITY)
    t = tl.where(good, given, 1.0)
    greedy = t < (INFINITY if temperature.greedy else SMALLEST_TEMPERATURE)
    t = tl.where(greedy, 1.0, t)
    return t, tl.div_rn(tl.full((), 1.0, tl.float32), t), greedy, tl.where(good, 0, BAD_PARAM)


@triton.jit
def maxima_of(x, OF_GROUPS: tl.constexpr):
    """Of tiles ``[tiles, ids, parts]`` their maxima and, if wanted, their groups'; NaN where there is one."""
    if OF_GROUPS:
        groups: tl.constexpr = TILE // GROUP
        if x.shape[2] > groups:  # several parts of each
            x = max_or_nan(tl.reshape(x, (x.shape[0], x.shape[1], groups, x.shape[2] // groups)), 3)
        of_groups = max_or_nan(x, 1)
        maximum = max_or_nan(of_groups, 1)
    else:
        maximum = max_or_nan(max_or_nan(x, 2), 1)
        of_groups = maximum
    return maximum, of_groups


@triton.jit
def sum_of_tile(x):
    """The sums over tiles ``[tiles, ids, parts]``."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit(do_not_specialize=["n", "tiles"])
def scan(
    rows,
    n,
    tiles,
    wanted,
    temperature,
    stats,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of one row: their `TileStats`."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    b = row // n
    is_wanted, first = needed(wanted.spans, b, row % n, wanted.draft_only)
    if is_wanted:
        x = load_tiles(rows, b, first + row % n, first_tile, TILES)
        has_groups: tl.constexpr = stats.of_groups is not None
        maximum, of_groups = maxima_of(x, has_groups)
        nan = (maximum != maximum).to(tl.int32)
        if tl.max(nan, 0) > 0:
            x = tl.where(x == x, x, -INFINITY)
            maximum, of_groups = maxima_of(x, has_groups)
        tile = first_tile + tl.arange(0, TILES)
        out = row * tiles + tile
        inside = tile < tiles
        if has_groups:
            at = out[:, None] * (TILE // GROUP) + tl.arange(0, TILE // GROUP)[None, :]
            tl.store(stats.of_groups + at, of_groups, mask=inside[:, None])
        finite = tl.abs(maximum) < INFINITY
        _, inverse_temperature, _, _ = temperature_of(temperature, b)
        shifted = x - tl.where(finite, maximum, 0.0)[:, None, None]
        tl.store(stats.maximum + out, maximum, mask=inside)
        tl.store(stats.nan + out, nan, mask=inside)
        if stats.mass is not None:
            if rows.kind == LOGITS:
                mass = sum_of_tile(fast_exp2(shifted * (inverse_temperature * LOG2_E)))
            else:  # infinite where one is negative; a -inf counts as 0
                mass = sum_of_tile(tl.where((x < 0.0) & (x > -INFINITY), INFINITY, tl.maximum(x, 0.0)))
            tl.store(stats.mass + out, tl.where(finite, mass, 0.0), mask=inside)
        if stats.raw_mass is not None:
            if stats.tempered:
                shifted *= inverse_temperature
            raw = exp_nonpositive(shifted)
            moment = sum_of_tile(raw * tl.where(raw > 0.0, shifted, 0.0))  # 0 log 0 = 0
            tl.store(stats.raw_mass + out, tl.where(finite, sum_of_tile(raw), 0.0), mask=inside)
            tl.store(stats.raw_moment + out, tl.where(finite, moment, 0.0), mask=inside)


@triton.jit
def raw_of_tiles(stats, row, tiles, maximum, inverse_temperature, TILES: tl.constexpr):
    """Raw normaliser and entropy of a row from its tiles', as `find_laws` has them."""
    mass = tl.full((), 1.0, tl.float32)
    entropy = tl.zeros((), tl.float32)
    if tl.abs(maximum) < INFINITY:
        mass = tl.zeros((), tl.float32)
        moment = tl.zeros((), tl.float32)
        for first in range(0, tiles, TILES):
            t = first + tl.arange(0, TILES)
            at = row * tiles + t
            shift = tl.load(stats.maximum + at, mask=t < tiles, other=-INFINITY) - maximum
            if stats.tempered:
                shift *= inverse_temperature
            share = exp_nonpositive(shift)
            tile_sum = tl.load(stats.raw_mass + at, mask=t < tiles, other=0.0) * share
            tile_first = tl.load(stats.raw_moment + at, mask=t < tiles, other=0.0) * share
            mass += tl.sum(tile_sum, 0)
            moment += tl.sum(tile_first + tl.where(share > 0.0, shift, 0.0) * tile_sum, 0)
        entropy = tl.log(mass) - tl.div_rn(moment, mass)
    return maximum + tl.log(mass) if stats.logarithm else mass, entropy


@triton.jit
def lowest_possible(row, share, total):
    """A lower bound, as a key, of the cut-off for a share of the row's whole mass: all lower values together are only
    half of what may be cut.
    """
    rest = 0.5 * (1.0 - share) * total / row.rows.vocab
    if row.rows.kind == LOGITS:
        bound = row.law.max + tl.div_rn(tl.log(rest), row.law.inverse_temperature)
    else:
        bound = row.law.max * rest
    return tl.maximum(ordered(bound), LOWEST_KEY).to(tl.int64)


@triton.jit
def masses_of_listed(keys_from, count, row, listed, tile_mass, TILES: tl.constexpr):
    """Stores the masses of a row's tiles, of the listed keys from one on; their sum."""
    FEW: tl.constexpr = 16
    kept_mass = tl.zeros((), tl.float32)
    for first in range(0, row.tiles, TILES):
        t = first + tl.arange(0, TILES)
        mass = tl.zeros((TILES,), tl.float32)
        for first_slot in range(0, count, FEW):
            slot = first_slot + tl.arange(0, FEW)
            key = tl.load(listed.key + slot, mask=slot < count, other=LOWEST_KEY - 1)
            tile = tl.load(listed.id + slot, mask=slot < count, other=0) // TILE
            weight = weigh(from_ordered(key), row.law, -INFINITY, row.rows.kind)
            here = (tile[None, :] == t[:, None]) & (key >= keys_from)[None, :]
            mass += tl.sum(tl.where(here, weight[None, :], 0.0), 1)
        tl.store(tile_mass + t, mass, mask=t < row.tiles)
        kept_mass += tl.sum(mass, 0)
    return kept_mass


@triton.jit
def masses_of_row(keys_from, row, groups, tile_mass, TILES: tl.constexpr):
    """The same of all keys of the row from one on; also the smallest logit that has one."""
    kept_mass = tl.zeros((), tl.float32)
    cutoff = tl.full((), INFINITY, tl.float32)
    for first in range(0, row.tiles, TILES):
        t = first + tl.arange(0, TILES)
        mass = tl.zeros((TILES,), tl.float32)
        group = first * (TILE // GROUP) + tl.arange(0, TILES * (TILE // GROUP))
        if tl.max(load_maxima(groups, group), 0) >= keys_from:
            x = load_logits(row.rows, row.b, row.i, tile_ids(first, TILES))
            kept = ordered(x) >= keys_from
            mass = tl.sum(tl.where(kept, weigh(x, row.law, -INFINITY, row.rows.kind), 0.0), 1)
            cutoff = tl.minimum(cutoff, tl.min(tl.min(tl.where(kept, x, INFINITY), 1), 0))
        tl.store(tile_mass + t, mass, mask=t < row.tiles)
        kept_mass += tl.sum(mass, 0)
    return cutoff, kept_mass


@triton.jit
def find_cutoff(
    row,
    top_k,
    top_p,
    min_p,
    temperature,
    normalizer,
    groups,
    listed,
    tile_mass,
    MIN_P_FIRST: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """The smallest logit that top-k, top-p and min-p keep, and the mass of what is kept; stores the tiles' masses.

    Lists what can be kept, as far as the maxima of groups tell, and looks for the cut-off in the list; only where that
    is too long, or does not have enough of the mass, in the row.
    """
    AT_ONCE: tl.constexpr = TILES * (TILE // GROUP)
    CHUNK: tl.constexpr = ROW_TILES * (TILE // GROUP)
    maximum, silent = row.law.max, Noise(None, None, None)
    lowest = tl.full((), LOWEST_KEY, tl.int64)
    end = ordered(maximum).to(tl.int64) + 1
    likely = lowest
    if min_p > 0.0:
        bound = maximum + tl.log(min_p) * temperature if row.rows.kind == LOGITS else maximum * min_p
        likely = tl.maximum(ordered(bound).to(tl.int64), lowest)
    floor = likely if MIN_P_FIRST else lowest
    whole = (top_k == 0) & (floor == lowest)  # top-p looks at all of the row's mass
    begin = tl.where((top_k == 0) & (top_p >= 1.0), likely, floor)  # what is listed
    if ((top_k > 0) | (whole & (top_p < 1.0))) & (row.rows.vocab > CANDIDATES):
        # so many groups hold 1.2 k ids that are spread evenly, and k hold k in any case; top-p: what often is enough
        number = groups.number.to(tl.float32)
        spread = number * (1.0 - tl.exp(-1.2 * top_k.to(tl.float32) / number))
        n = tl.where(top_k > 0, tl.minimum(top_k, spread.to(tl.int64) + 1), groups.number // 4)
        begin = tl.maximum(begin, nth_maximum(groups, n, end - 1, CHUNK))
        if row.rows.kind != LOGITS:
            begin = tl.where(begin <= 0, floor, begin)  # what is no weight counts in maxima
    count = list_values(begin, end, row, groups, silent, listed, GROUP, AT_ONCE, CHUNK)
    for stage in range(2):  # top-k, then top-p of what it left; a loop so that the search is compiled once
        by_mass = tl.full((), stage, tl.int32) > 0
        active = tl.where(by_mass, (top_p < 1.0).to(tl.int32), (top_k > 0).to(tl.int32))
        if active > 0:
            keys = load_listed(tl.where(count <= CANDIDATES, count, 0), listed)  # of too many there is no list
            weight = weigh(from_ordered(keys), row.law, -INFINITY, row.rows.kind)
            kept = keys >= floor.to(tl.int32)
            seen = tl.sum(tl.where(kept, weight, 0.0), 0)
            total = tl.where(whole, normalizer, tl.where(count <= CANDIDATES, seen, -1.0))
            too_little = tl.where(by_mass, whole & (seen < top_p * total), count < top_k) & (begin > floor)
            if (count > CANDIDATES) | too_little:
                low, high, above, mass_above = floor, end, count * 0, tl.zeros((), tl.float32)
                if by_mass & whole:
                    low = lowest_possible(row, top_p, total)
                if count <= CANDIDATES:
                    low, high, above, mass_above = tl.minimum(low, begin - 1), begin, count, seen
                elif (by_mass == 0) & (top_k <= CANDIDATES):
                    low = begin
                floor = select(
                    Range(low, high, above, mass_above), tl.where(by_mass, 0, top_k), top_p, total, row, groups, silent,
                    listed, GROUP, AT_ONCE, CHUNK,
                )  # fmt: skip
                count = tl.full((), CANDIDATES + 1, tl.int32)
            else:
                amount = tl.where(by_mass, weight, kept.to(tl.float32))
                goal = tl.where(by_mass, top_p * total, top_k.to(tl.float32))
                floor = select_listed(keys, amount, goal, tl.maximum(floor, begin), end)
    floor = tl.maximum(floor, likely).to(tl.int32)
    if count <= CANDIDATES:
        keys = load_listed(count, listed)
        cutoff = from_ordered(tl.min(tl.where(keys >= floor, keys, LAST_ID), 0))
        kept_mass = masses_of_listed(
            floor, count, row, listed, tile_mass, MASSES_AT_ONCE if ROW_TILES > MASSES_AT_ONCE else ROW_TILES
        )
    else:
        cutoff, kept_mass = masses_of_row(floor, row, groups, tile_mass, TILES)
    return cutoff, kept_mass


@triton.jit(do_not_specialize=["n", "tiles", "top_k"])
def law(
    target,
    n,
    tiles,
    wanted,
    temperature,
    top_k,
    cut,
    stats,
    listed,
    values,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """A program a row: its maximum, argmax, flags and normaliser from its tiles; where truncation asks for it (there is
    a place to list ids) the cut-off, by reading a part of it again. The tiles' mass becomes that of what is kept of
    each, relative to the maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    b = row // n
    vocab = target.rows.vocab
    is_wanted, first_row = needed(wanted.spans, b, row % n, wanted.draft_only)
    if is_wanted:
        tile_max = stats.maximum + row * tiles
        maximum = tl.full((), -INFINITY, tl.float32)
        arg = tl.zeros((), tl.int32)
        nan = tl.zeros((), tl.int32)
        for first in range(0, tiles, ROW_TILES):
            t = first + tl.arange(0, ROW_TILES)
            of_tile = tl.load(tile_max + t, mask=t < tiles, other=-INFINITY)
            nan |= tl.max(tl.load(stats.nan + row * tiles + t, mask=t < tiles, other=0), 0)
            top = tl.max(of_tile, 0)
            if top > maximum:
                maximum = top
                arg = tl.min(tl.where(of_tile == top, t, LAST_ID), 0)
        ids = arg * TILE + tl.arange(0, TILE)  # of the first tile that has it
        x = load_as_given(target.rows, b, first_row + row % n, ids)
        arg = tl.where(maximum > -INFINITY, tl.min(tl.where(x == maximum, ids, LAST_ID), 0), 0)
        t_value, inverse_temperature, greedy, flags = temperature_of(temperature, b)
        if target.rows.kind != LOGITS:
            none = (maximum >= SMALLEST_WEIGHT) == 0
            maximum = tl.where(none, -INFINITY, maximum)
            arg = tl.where(none, 0, arg)
            inverse_temperature = tl.div_rn(tl.full((), 1.0, tl.float32), maximum)
        p = tl.full((), cut.top_p, tl.float32) if cut.top_ps is None else tl.load(cut.top_ps + b)
        m = tl.full((), cut.min_p, tl.float32) if cut.min_ps is None else tl.load(cut.min_ps + b)
        good_p, good_m = p >= 0.0, (m >= 0.0) & (m <= 1.0)
        flags |= tl.where(good_p & good_m, 0, BAD_PARAM) | tl.where(nan > 0, NAN, 0)
        flags |= tl.where(maximum == INFINITY, INF, 0) | tl.where(maximum == -INFINITY, EMPTY_ROW, 0)
        if target.rows.overlay.flags is not None:
            flags |= tl.load(target.rows.overlay.flags + b)
        one_hot = greedy | (tl.abs(maximum) == INFINITY)
        cutoff = tl.full((), -INFINITY, tl.float32)
        normalizer = tl.full((), 1.0, tl.float32)
        if stats.mass is not None:
            if one_hot == 0:
                tile_mass = stats.mass + row * tiles
                k = top_k.to(tl.int64) if cut.top_ks is None else tl.load(cut.top_ks + b)
                k = tl.where((k > 0) & (k < vocab), k, 0)
                p = tl.where(good_p & (p > 0.0) & (p < 1.0), p * TOP_P_REACHED, 1.0)
                m = tl.where(good_m, m, 0.0)
                is_cut = (k > 0) | (p < 1.0) | (m > 0.0)
                normalizer = tl.zeros((), tl.float32)
                total = tl.zeros((), tl.float32)  # of weights themselves
                final = tl.where(is_cut, 0, tiles)  # else find_cutoff stores the masses
                for first in range(0, tiles, ROW_TILES):
                    t = first + tl.arange(0, ROW_TILES)
                    of_tile = tl.load(tile_max + t, mask=t < tiles, other=-INFINITY)
                    mass = tl.load(tile_mass + t, mask=t < tiles, other=0.0)
                    if target.rows.kind == LOGITS:
                        mass *= exp_nonpositive((of_tile - maximum) * inverse_temperature)
                    else:
                        total += tl.sum(mass, 0)
                        # as each id is multiplied: if the tile's largest comes to 0 there is nothing to draw
                        mass = tl.where(of_tile * inverse_temperature > 0.0, mass * inverse_temperature, 0.0)
                    tl.debug_barrier()  # several threads hold the same tile: none may load what another has stored
                    tl.store(tile_mass + t, mass, mask=t < final)
                    normalizer += tl.sum(mass, 0)
                if target.rows.kind != LOGITS:
                    one_hot = total == INFINITY
                    bad = one_hot
                    if target.rows.kind == PROBS:
                        bad = (tl.abs(total - 1.0) <= SLACK) == 0
                    flags |= tl.where(bad, BAD_PARAM, 0)
                    normalizer = tl.where(one_hot, 1.0, normalizer)
                    is_cut = is_cut & (one_hot == 0)
                if listed.key is not None:
                    if is_cut:
                        uncut = RowLaw(maximum, -INFINITY, inverse_temperature, 1.0, arg)
                        at = Row(target.rows, b, first_row + row % n, tiles, uncut)
                        number = tiles * (TILE // GROUP)
                        groups = Groups(stats.of_groups + row * number, number)
                        own = listed_of(row, number, listed)
                        cutoff, normalizer = find_cutoff(
                            at, k, p, m, t_value, normalizer, groups, own, tile_mass, cut.min_p_first, TILES, ROW_TILES
                        )
        numbers = target.laws.numbers + row * 4
        tl.store(numbers, maximum)
        tl.store(numbers + 1, cutoff)
        tl.store(numbers + 2, tl.where(one_hot, -1.0, inverse_temperature))
        tl.store(numbers + 3, tl.div_rn(tl.full((), 1.0, tl.float32), normalizer))
        tl.store(target.laws.argmax + row, arg.to(tl.int64))
        tl.store(target.laws.status + row, flags)
        if values is not None:
            values += row * 6
            tl.store(values, maximum)
            tl.store(values + 1, cutoff)
            if target.rows.kind == LOGITS:
                tl.store(values + 2, maximum * inverse_temperature + tl.log(normalizer))
            else:
                tl.store(values + 2, tl.log(tl.maximum(maximum, 0.0) * normalizer))
            tl.store(values + 3, normalizer)
            if stats.raw_mass is None:
                tl.store(values + 4, -INFINITY)
                tl.store(values + 5, -INFINITY)
            else:
                raw, entropy = raw_of_tiles(stats, row, tiles, maximum, inverse_temperature, ROW_TILES)
                tl.store(values + 4, raw)
                tl.store(values + 5, entropy)


@dataclass
class Found:
    """What `find_laws` leaves behind for rows ``[batch, n]``; entries of rows that nobody needs are not written."""

    target: Target  # the rows, and their laws
    values: Tensor | None  # [batch, n, 6] float32, as RowStats has them, except the last two: see `find_laws`
    tile_max: Tensor  # [batch, n, tiles] float32
    tile_mass: Tensor | None  # [batch, n, tiles] float32: mass of the kept ids; not written where argmax has all


def make_temperature(params: tuple[Any, ...], greedy: bool = False) -> Temperature:
    """The temperatures among flat sampling parameters; `greedy`: whatever they say."""
    return Temperature(float(params[0]), params[5], tl.constexpr(greedy))


def find_laws(
    rows: Rows, batch: int, n: int, params: tuple[Any, ...], *, values: bool = False, raw: bool = False,
    logarithm: bool = False, tempered: bool = False, greedy: bool = False, wanted: Wanted = EVERY_ROW,
) -> Found:  # fmt: skip
    """The law of every row ``[batch, n]`` of logits that is wanted.

    Parameters
    ----------
    params : tuple
        Flat sampling parameters.
    values, raw : bool
        Also return `Found.values`, and in its last two fields the raw normaliser, of exp(logit - max), and entropy in
        nats.
    logarithm : bool
        In the place of that normaliser the logarithm of exp(logit)'s, as RowStats has it: of large logits it keeps few
        digits.
    tempered : bool
        Both at the temperature with nothing cut.
    greedy : bool
        Whatever the temperature.
    """
    temperature, top_k, top_p, min_p, min_p_first, temperatures, top_ks, top_ps, min_ps = params
    device, tiles = rows.data.device, tiles_of(rows.vocab)
    certain = greedy or (temperatures is None and temperature == 0)  # then no mass is needed

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, n, *shape, dtype=dtype, device=device)

    stats = TileStats(
        empty(tiles), empty(tiles, dtype=torch.int32), None if certain else empty(tiles),
        empty(tiles) if raw else None, empty(tiles) if raw else None, None, tl.constexpr(tempered),
        tl.constexpr(logarithm),
    )  # fmt: skip
    cut = not certain and (
        top_ks is not None or top_ps is not None or min_ps is not None
        or 0 < top_k < rows.vocab or 0 < top_p < 1 or min_p > 0
    )  # fmt: skip
    listed = NOTHING_LISTED
    if cut:
        groups = tiles * (TILE.value // GROUP.value)
        stats = stats._replace(of_groups=empty(groups))
        listed = Listed(*(empty(most, dtype=torch.int32) for most in (CANDIDATES.value, CANDIDATES.value, groups)))
    target = Target(rows, RowLaws(empty(4), empty(dtype=torch.int64), empty(dtype=torch.int32)))
    out = Found(target, empty(6) if values else None, stats.maximum, stats.mass)
    by_temperature = make_temperature(params, greedy)
    a_program = tiles_of_rows(rows, 4)
    run(
        scan, (batch * n * triton.cdiv(tiles, a_program),), rows, n, tiles, wanted, by_temperature, stats,
        TILES=a_program, warps=min(4, a_program), registers=168 if rows.overlay.flags is None else 255,
    )  # fmt: skip
    run(
        law, (batch * n,), target, n, tiles, wanted, by_temperature, min(top_k, LARGEST_INT32),
        Cut(float(top_p), float(min_p), top_ks, top_ps, min_ps, tl.constexpr(min_p_first)), stats, listed, out.values,
        TILES=tiles_of_rows(rows, 4), ROW_TILES=tiles_at_once(rows.vocab), warps=8 if cut else 4,
        registers=None if not cut else 255 if rows.overlay.flags is None else 240,
    )  # fmt: skip
    return out
