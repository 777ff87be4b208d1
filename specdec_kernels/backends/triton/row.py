"""Device functions on one row of logits: values, weights, coins, and draws that walk tile masses, then ids."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import (
    BAD_PARAM,
    INFINITY,
    LAST_ID,
    SMALLEST_EXPONENT,
    TILE,
    exp_nonpositive,
    noise_at,
    noise_of_groups,
)
from .bundles import LOGITS, RowLaw
from .processors import process


@triton.jit
def tile_ids(first_tile, TILES: tl.constexpr):
    """Ids of TILES tiles, ``[TILES, TILE]`` int32."""
    return (tl.arange(0, TILES)[:, None] + first_tile) * TILE + tl.arange(0, TILE)[None, :]


@triton.jit
def start_of(rows, b, i):
    """Where row i of sequence b starts."""
    if rows.starts is not None:
        b = tl.load(rows.starts + b)
    return rows.data + b * rows.stride_batch + tl.cast(i, tl.int64) * rows.stride_row


@triton.jit
def load_as_given(rows, b, i, ids):
    """Logits of row i of sequence b, or of a vector of rows, as processors make them: float32, -inf past the end."""
    inside = (ids >= 0) & (ids < rows.vocab)
    x = tl.load(start_of(rows, b, i) + ids, mask=inside, other=-INFINITY).to(tl.float32)
    if rows.overlay.flags is not None:
        x = process(rows.overlay, b, i, ids, inside, x)
    return x


@triton.jit
def load_parts(start, vocab, ids, STEP: tl.constexpr, PARTS: tl.constexpr):
    """PARTS values, STEP ids apart, from each of ids ``[n, m]`` on, ``[n, m, 2, 2, …]`` with the nearest last; -inf
    past the end.
    """
    if PARTS == 1:
        x = tl.load(start + ids, mask=(ids >= 0) & (ids < vocab), other=-INFINITY)
    else:
        even = load_parts(start, vocab, ids, 2 * STEP, PARTS // 2)
        x = tl.join(even, load_parts(start, vocab, ids + STEP, 2 * STEP, PARTS // 2))
    return x


@triton.jit
def load_tiles(rows, b, i, first_tile, TILES: tl.constexpr):
    """Tiles of row i of sequence b as `load_as_given` has them, ``[TILES, WIDTH, parts]``: WIDTH ids are what a warp
    loads at once.

    With as many warps as tiles, a tile of an aligned row belongs to one warp, whose sums and maxima need no other, and
    have the same order whatever TILES is. For every version of Triton to lay it out like that, the parts are loaded
    one by one and joined in registers: of three axes not every version gives its warps to the first.
    """
    WIDTH: tl.constexpr = 512 // (rows.data.dtype.element_ty.primitive_bitwidth // 8)
    PARTS: tl.constexpr = TILE // WIDTH
    first = (first_tile + tl.arange(0, TILES)[:, None]) * TILE + tl.arange(0, WIDTH)[None, :]
    x = tl.reshape(load_parts(start_of(rows, b, i), rows.vocab, first, WIDTH, PARTS), (TILES, WIDTH, PARTS))
    x = x.to(tl.float32)
    if rows.overlay.flags is not None:
        ids = first[:, :, None] + tl.arange(0, PARTS)[None, None, :] * WIDTH
        x = process(rows.overlay, b, i, ids, (ids >= 0) & (ids < rows.vocab), x)
    return x


@triton.jit
def load_logits(rows, b, i, ids):
    """The same, with -inf for NaN, and for what is no weight."""
    x = load_as_given(rows, b, i, ids)
    return tl.where(x == x if rows.kind == LOGITS else x > 0.0, x, -INFINITY)


@triton.jit
def weigh(x, law, cutoff, KIND: tl.constexpr):
    """exp((x - max) / T) where x >= cutoff, else 0; of a weight itself over max."""
    if KIND == LOGITS:
        weight = exp_nonpositive((x - law.max) * law.inverse_temperature)
    else:
        weight = tl.maximum(x, 0.0) * law.inverse_temperature
    return tl.where(x >= cutoff, weight, 0.0)


@triton.jit
def load_law(laws, row, mask=None):
    """The law of a row, or of a vector of rows."""
    at = laws.numbers + row * 4
    if mask is None:
        argmax = tl.load(laws.argmax + row).to(tl.int32)
        law = RowLaw(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), argmax)
    else:
        maximum, cutoff = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
        inverse_temperature = tl.load(at + 2, mask=mask, other=-1.0)
        inverse_normalizer = tl.load(at + 3, mask=mask, other=0.0)
        argmax = tl.load(laws.argmax + row, mask=mask, other=-1).to(tl.int32)
        law = RowLaw(maximum, cutoff, inverse_temperature, inverse_normalizer, argmax)
    return law


@triton.jit
def load_values(row, groups, noise, SIZE: tl.constexpr):
    """What is selected from: the logits of some groups of SIZE ids, or the scores (logit - max) / T + G of what the law
    keeps of them.
    """
    ids = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = load_logits(row.rows, row.b, row.i, ids)
    if noise.key0 is not None:
        score = (x - row.law.max) * row.law.inverse_temperature
        if noise.to_target is None:
            drawn = noise_of_groups(noise.key0, noise.key1, groups, SIZE)
        else:
            drawn = noise_at(noise.key0, noise.key1, tl.load(noise.to_target + ids, mask=ids < row.rows.vocab, other=0))
        x = tl.where((x >= row.law.cutoff) & (score >= SMALLEST_EXPONENT), score + drawn, -INFINITY)
    return x


@triton.jit
def coin_at(uniforms, at):
    """(the uniform there, flags); 0 where there are none, which only point masses may do without."""
    coin = tl.zeros((), tl.float64)
    if uniforms is not None:
        coin = tl.load(uniforms + at).to(tl.float64)
    good = (coin >= 0.0) & (coin < 1.0)
    return tl.where(good, coin, 0.0), tl.where(good, 0, BAD_PARAM)


@triton.jit
def total_mass(masses, tiles, TILES: tl.constexpr):
    """Sum of the masses of a row's tiles."""
    total = tl.zeros((), tl.float32)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        total += tl.sum(tl.load(masses + t, mask=t < tiles, other=0.0), 0)
    return total


@triton.jit
def walk_tiles(masses, tiles, uniform, without, mass_without, TILES: tl.constexpr):
    """The tile where the running mass first exceeds ``uniform * total``, and what is left of the goal there, in
    float64.

    An overrun lands on the last tile of positive mass, with an infinite rest. The mass of tile `without` (-1: none) is
    read as `mass_without`. Returns (tile, rest, mass of the tile); tile is -1 where nothing has mass.
    """
    total = tl.zeros((), tl.float64)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        mass = tl.load(masses + t, mask=t < tiles, other=0.0)
        total += tl.sum(tl.where(t == without, mass_without, mass).to(tl.float64), 0)
    goal = uniform.to(tl.float64) * total
    before = tl.zeros((), tl.float64)
    found = tl.full((), LAST_ID, tl.int32)
    last = tl.full((), -1, tl.int32)
    rest = tl.full((), INFINITY, tl.float64)
    mass_there = tl.full((), 1.0, tl.float64)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        mass = tl.load(masses + t, mask=t < tiles, other=0.0)
        mass = tl.where(t == without, mass_without, mass).to(tl.float64)
        ends = before + tl.cumsum(mass, 0)
        hit = tl.min(tl.where((ends > goal) & (mass > 0.0), t, LAST_ID), 0)
        if (found == LAST_ID) & (hit < LAST_ID):
            found = hit
            rest = goal - tl.sum(tl.where(t == hit, ends - mass, 0.0), 0)
            mass_there = tl.sum(tl.where(t == hit, mass, 0.0), 0)
        last = tl.maximum(last, tl.max(tl.where(mass > 0.0, t, -1), 0))
        before += tl.sum(mass, 0)
    return tl.where(found < LAST_ID, found, last), rest, mass_there


@triton.jit
def walk_ids(weight, ids, rest, mass):
    """The id where a draw ends that has `rest` left in a tile of some mass, by the float64 sums of the tile's weights:
    see csrc/common/tile_sums.h. On an overrun the last id of positive weight.
    """
    possible = weight > 0.0
    fine = weight.to(tl.float64)
    goal = rest * (tl.sum(fine, 0) / mass)
    hit = tl.min(tl.where(possible & (tl.cumsum(fine, 0) > goal), ids, LAST_ID), 0)
    return tl.where(hit < LAST_ID, hit, tl.max(tl.where(possible, ids, 0), 0))


@triton.jit
def draw_from_law(row, masses, uniform, without, TILES: tl.constexpr):
    """An id from P by inverse CDF, `masses` being those of its tiles; or from P without the id `without`, if that is
    given (-1: none) and anything else is possible.
    """
    tiles = row.tiles
    lane = tl.arange(0, TILE)
    if without is None:
        tile, rest, mass = walk_tiles(masses, tiles, uniform, -1, 0.0, TILES)
    else:
        hole = without // TILE
        ids = tl.maximum(hole, 0) * TILE + lane
        weight = weigh(load_logits(row.rows, row.b, row.i, ids), row.law, row.law.cutoff, row.rows.kind)
        left = tl.sum(tl.where(ids == without, 0.0, weight), 0)
        tile, rest, mass = walk_tiles(masses, tiles, uniform, tl.where(without < 0, -1, hole), left, TILES)
        if tile < 0:  # all mass is on it
            without = tl.full((), -1, tl.int32)
            tile, rest, mass = walk_tiles(masses, tiles, uniform, -1, 0.0, TILES)
    ids = tl.maximum(tile, 0) * TILE + lane
    weight = weigh(load_logits(row.rows, row.b, row.i, ids), row.law, row.law.cutoff, row.rows.kind)
    if without is not None:
        weight = tl.where(ids == without, 0.0, weight)
    return walk_ids(weight, ids, rest, mass)
