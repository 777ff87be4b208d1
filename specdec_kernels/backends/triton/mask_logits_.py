"""`mask_logits_` as Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import MaskLogitsArguments, tiles_of
from .arithmetic import INFINITY
from .bundles import rows_of
from .launch import run, tiles_a_program
from .law import find_laws
from .row import load_as_given, load_law, start_of, tile_ids


@triton.jit(do_not_specialize=["n", "tiles"])
def kernel(
    target,
    n,
    tiles,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of one row."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    cutoff = load_law(target.laws, row).cutoff
    if cutoff > -INFINITY:
        ids = tile_ids(tl.program_id(0) % programs * TILES, TILES)
        x = load_as_given(target.rows, row // n, row % n, ids)
        cut = (x < cutoff) & (ids < target.rows.vocab)  # NaN is not
        tl.store(start_of(target.rows, row // n, row % n) + ids, -INFINITY, mask=cut)


def mask_logits_(args: MaskLogitsArguments) -> Tensor:
    """The status ``[batch, n]``."""
    logits, params = args
    batch, n, vocab = logits.shape
    found = find_laws(rows_of(logits), batch, n, params)
    tiles, a_program = tiles_of(vocab), tiles_a_program(vocab, 4)
    run(kernel, (batch * n * triton.cdiv(tiles, a_program),), found.target, n, tiles, TILES=a_program)
    return found.target.laws.status
