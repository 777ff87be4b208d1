"""`warp_probs` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import WarpProbsArguments
from .bundles import rows_of
from .launch import run, tiles_a_program, tiles_of
from .law import find_laws
from .row import load_row, num_tiles, probabilities, tile_ids


@triton.jit(do_not_specialize=["n"])
def kernel(
    target,
    n,
    out,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of one row."""
    programs = (num_tiles(target.rows.vocab) + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    ids = tile_ids(tl.program_id(0) % programs * TILES, TILES)
    p = probabilities(load_row(target, row // n, row % n, row), ids, 1.0)
    tl.store(out + row * target.rows.vocab + ids, p, mask=ids < target.rows.vocab)


def warp_probs(args: WarpProbsArguments) -> Tensor:
    """``[batch, n, vocab]`` to probabilities of the same shape."""
    logits, params = args
    batch, n, vocab = logits.shape
    found = find_laws(rows_of(logits), batch, n, params)
    out = torch.empty(batch, n, vocab, dtype=torch.float32, device=logits.device)
    a_program = tiles_a_program(vocab, 4)
    run(kernel, (batch * n * triton.cdiv(tiles_of(vocab), a_program),), found.target, n, out, TILES=a_program)
    return out
