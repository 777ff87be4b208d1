"""Gumbel noise on the laws of rows: the best score of every tile, which the Gumbel-max rules combine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import INFINITY, LAST_ID, TILE, high_word, low_word
from .bundles import Best, Noise, Row
from .launch import run, tiles_of_rows
from .law import Found, load_span, needed
from .row import load_law, load_values, tile_ids


@triton.jit(do_not_specialize=["n", "tiles"])
def kernel(
    target,
    n,
    tiles,
    spans,
    tile_max,
    keys,
    to_target,
    best,
    RAGGED: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of one row: the best score of each, and the lowest id that has it."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    b = row // n
    wanted, first = needed(spans, b, row % n, False)
    if wanted:
        at = Row(target.rows, b, first + row % n, tiles, load_law(target.laws, row))
        tile = first_tile + tl.arange(0, TILES)
        inside = tile < tiles
        out = row * tiles + tile
        top = tl.max(tl.load(tile_max + out, mask=inside, other=-INFINITY), 0)
        if at.law.inverse_temperature > 0:
            score = tl.full((TILES,), -INFINITY, tl.float32)
            score_id = tl.zeros((TILES,), tl.int32)
            if top >= at.law.cutoff:
                if RAGGED:
                    key = tl.load(keys + load_span(spans, b).token_index + b + row % n)
                else:
                    key = tl.load(keys + row)
                scores = load_values(at, tile, Noise(low_word(key), high_word(key), to_target), TILE)
                score = tl.max(scores, 1)
                ids = tile_ids(first_tile, TILES)
                score_id = tl.min(tl.where(scores == score[:, None], ids, LAST_ID), 1)
            tl.store(best.score + out, score, mask=inside)
            tl.store(best.id + out, score_id, mask=inside)


@triton.jit
def best_of_row(best, row, tiles, TILES: tl.constexpr):
    """The id of the best score of a row, the lowest on ties."""
    top = tl.full((), -INFINITY, tl.float32)
    found = tl.zeros((), tl.int32)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        score = tl.load(best.score + row * tiles + t, mask=t < tiles, other=-INFINITY)
        of_tiles = tl.max(score, 0)
        if of_tiles > top:
            top = of_tiles
            found = tl.load(best.id + row * tiles + tl.min(tl.where(score == of_tiles, t, LAST_ID), 0))
    return found


def best_scores(
    found: Found, keys: Tensor, *, to_target: Tensor | None = None, spans: Tensor | None = None, ragged: bool = False
) -> Best:
    """The best scores of rows; not written where an argmax has all. `ragged`: keys lie end to end, at `spans`."""
    batch, n, tiles = found.tile_max.shape
    a_program = tiles_of_rows(found.target.rows, 2)
    best = Best(torch.empty_like(found.tile_max), torch.empty_like(found.tile_max, dtype=torch.int32))
    run(
        kernel, (batch * n * triton.cdiv(tiles, a_program),), found.target, n, tiles, spans, found.tile_max,
        keys, to_target, best, RAGGED=ragged, TILES=a_program,
    )  # fmt: skip
    return best
