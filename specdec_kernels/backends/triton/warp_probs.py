"""`warp_probs` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import WarpProbsArguments, tiles_of
from .bundles import Layout, Position, rows_of
from .launch import run, tiles_of_rows
from .law import find_laws
from .processors import with_processors
from .remainder import probabilities
from .row import tile_ids


@triton.jit(do_not_specialize=["n", "tiles"])
def kernel(
    target,
    n,
    tiles,
    out,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of one row."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    ids = tile_ids(tl.program_id(0) % programs * TILES, TILES)
    p = probabilities(target, Position(row // n, row % n, row, None), 1.0, ids)
    tl.store(out + row * target.rows.vocab + ids, p, mask=ids < target.rows.vocab)


def warp_probs(args: WarpProbsArguments) -> Tensor:
    """``[batch, n, vocab]`` to probabilities of the same shape."""
    logits, params, processors = args
    batch, n, vocab = logits.shape
    rows = with_processors(rows_of(logits), Layout(batch, 0, None, 0), n, processors)
    found = find_laws(rows, batch, n, params)
    out = torch.empty(batch, n, vocab, dtype=torch.float32, device=logits.device)
    tiles, a_program = tiles_of(vocab), tiles_of_rows(rows, 4)
    run(kernel, (batch * n * triton.cdiv(tiles, a_program),), found.target, n, tiles, out, TILES=a_program)
    return out
