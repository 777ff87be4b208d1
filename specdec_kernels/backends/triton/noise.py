"""Gumbel noise on the laws of rows: the best score of every tile, which the Gumbel-max rules combine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import INFINITY, LAST_ID, high_word, low_word
from .launch import run, tiles_a_program, tiles_of
from .law import Laws, Rows, needed
from .row import load_law, load_values, tile_ids


@triton.jit(do_not_specialize=["n", "tiles", "key_stride"])
def kernel(
    logits, stride_batch, stride_row, vocab, n, tiles, blocks, laws, tile_max, keys, key_stride, ids_of,
    best, best_id, TILES: tl.constexpr,
):  # fmt: skip
    """A program for TILES tiles of one row: the best score of each, and the lowest id that has it."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    b = row // n
    wanted, first = needed(b, row % n, blocks, False)
    if wanted:
        maximum, cutoff, inverse_temperature, _ = load_law(laws, row)
        tile = first_tile + tl.arange(0, TILES)
        inside = tile < tiles
        out = row * tiles + tile
        top = tl.max(tl.load(tile_max + out, mask=inside, other=-INFINITY), 0)
        if inverse_temperature > 0:
            score = tl.full((TILES,), -INFINITY, tl.float32)
            score_id = tl.zeros((TILES,), tl.int32)
            if top >= cutoff:
                key = tl.load(keys + b * key_stride + first + row % n)
                scores = load_values(
                    logits + b * stride_batch + (first + row % n) * stride_row, first_tile, vocab, maximum, cutoff,
                    inverse_temperature, low_word(key), high_word(key), ids_of, True, TILES,
                )  # fmt: skip
                score = tl.max(scores, 1)
                ids = tile_ids(first_tile, TILES)
                score_id = tl.min(tl.where(scores == score[:, None], ids, LAST_ID), 1)
            tl.store(best + out, score, mask=inside)
            tl.store(best_id + out, score_id, mask=inside)


@triton.jit
def best_of_row(best, best_id, tiles, TILES: tl.constexpr):
    """The id of the best score of a row, the lowest on ties."""
    top = tl.full((), -INFINITY, tl.float32)
    found = tl.zeros((), tl.int32)
    for first in range(0, tiles, TILES):
        t = first + tl.arange(0, TILES)
        score = tl.load(best + t, mask=t < tiles, other=-INFINITY)
        of_tiles = tl.max(score, 0)
        if of_tiles > top:
            top = of_tiles
            found = tl.load(best_id + tl.min(tl.where(score == of_tiles, t, LAST_ID), 0))
    return found


def best_scores(
    rows: Rows, found: Laws, keys: Tensor, ids_of: Tensor | None = None,
    blocks: Tensor | None = None, key_stride: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of every tile of every row the best ``(logit - max) / T + G``, -inf where nothing is kept, and its id.

    Key (b, i) stands at ``b * key_stride + (first of b + i)``. Nothing is written for rows whose argmax has all.
    """
    tiles, a_program = tiles_of(rows.vocab), tiles_a_program(rows.vocab, 2)
    best = torch.empty(rows.batch, rows.n, tiles, dtype=torch.float32, device=rows.data.device)
    best_id = torch.empty(rows.batch, rows.n, tiles, dtype=torch.int32, device=rows.data.device)
    run(
        kernel, (rows.batch * rows.n * triton.cdiv(tiles, a_program),), *rows.address, rows.vocab, rows.n, tiles,
        blocks, found.laws, found.tile_max, keys, rows.n if key_stride is None else key_stride, ids_of, best, best_id,
        TILES=a_program,
    )  # fmt: skip
    return best, best_id
