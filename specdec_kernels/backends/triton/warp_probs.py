"""`warp_probs` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import run, tiles_a_program, tiles_of
from .law import Rows, find_laws
from .row import load_law, load_logits, probabilities, tile_ids


@triton.jit(do_not_specialize=["n", "tiles"])
def kernel(logits, stride_batch, stride_row, vocab, n, tiles, laws, argmax, out, TILES: tl.constexpr):
    """A program for TILES tiles of one row."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    ids = tile_ids(tl.program_id(0) % programs * TILES, TILES)
    maximum, cutoff, inverse_temperature, inverse_normalizer = load_law(laws, row)
    x = load_logits(logits + row // n * stride_batch + row % n * stride_row, ids, vocab)
    best = tl.load(argmax + row).to(tl.int32)
    p = probabilities(x, ids, maximum, cutoff, inverse_temperature, inverse_normalizer, best)
    tl.store(out + row * vocab + ids, p, mask=ids < vocab)


def warp_probs(logits: Tensor, *params: object) -> Tensor:
    """``[batch, n, vocab]`` to probabilities of the same shape."""
    batch, n, vocab = logits.shape
    rows = Rows(logits, batch, n, *logits.stride()[:2])
    found = find_laws(rows, params)
    out = torch.empty(batch, n, vocab, dtype=torch.float32, device=logits.device)
    tiles, a_program = tiles_of(vocab), tiles_a_program(vocab, 4)
    grid = (batch * n * triton.cdiv(tiles, a_program),)
    run(kernel, grid, *rows.address, vocab, n, tiles, found.laws, found.argmax, out, TILES=a_program)
    return out
