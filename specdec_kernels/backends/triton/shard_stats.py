"""`shard_stats` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...flat import FlatParams
from ...ops.arguments import ShardStatsArguments, tiles_of
from ...sampling import SMALLEST_TEMPERATURE
from ...types import Status
from .arithmetic import INFINITY, TILE
from .bundles import EVERY_ROW, Rows, Temperature, TileStats, rows_of
from .launch import run, tiles_a_program
from .law import make_temperature, scan
from .row import start_of, tile_ids


@triton.jit(do_not_specialize=["n", "tiles"])
def sums_of_probs(rows, n, tiles, mass, TILES: tl.constexpr):
    """A program for TILES tiles of one row of probabilities: their sums, infinite where one is negative."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    ids = tile_ids(first_tile, TILES)
    p = tl.load(start_of(rows, row // n, row % n) + ids, mask=ids < rows.vocab, other=0.0)
    bad = (p < 0.0) & (p > -INFINITY)  # a -inf counts as 0, and so does a NaN
    tile = first_tile + tl.arange(0, TILES)
    sums = tl.sum(tl.where(bad, INFINITY, tl.maximum(p, 0.0)), 1)
    tl.store(mass + row * tiles + tile, sums, mask=tile < tiles)


def scan_shard(rows: Rows, batch: int, n: int, temperature: Temperature) -> TileStats:
    """One pass over rows ``[batch, n]``."""
    tiles, a_program = tiles_of(rows.vocab), tiles_a_program(rows.vocab, 4)

    def empty(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, n, tiles, dtype=dtype, device=rows.data.device)

    stats = TileStats(empty(), empty(torch.int32), empty(), None, None, None, *[tl.constexpr(False)] * 2)
    run(
        scan, (batch * n * triton.cdiv(tiles, a_program),), rows, n, tiles, EVERY_ROW, temperature, stats,
        TILES=a_program, warps=min(4, a_program),
    )  # fmt: skip
    return stats


def shard_stats(args: ShardStatsArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[batch, n, width]`` to the tiles' maxima and masses ``[batch, n, tiles]``, argmax and status ``[batch, n]``."""
    logits, params, probs = args
    batch, n, _ = logits.shape
    rows, temperature = rows_of(logits), make_temperature(params)
    stats = scan_shard(rows, batch, n, temperature)
    mass = stats.mass
    assert mass is not None
    if probs:
        tiles, a_program = stats.maximum.shape[2], tiles_a_program(rows.vocab, 4)
        run(sums_of_probs, (batch * n * triton.cdiv(tiles, a_program),), rows, n, tiles, mass, TILES=a_program)
    else:
        greedy = inverse_temperatures(params, mass) < 0
        mass = mass.masked_fill(greedy[..., None], 0.0)
    maximum = stats.maximum.amax(-1, keepdim=True)
    first = (stats.maximum == maximum).int().argmax(-1, keepdim=True)
    ids = (first * TILE.value + torch.arange(TILE.value, device=first.device)).clamp_max(rows.vocab - 1)
    here = (logits.gather(-1, ids) == maximum).int().argmax(-1, keepdim=True)
    argmax = torch.where(maximum > -torch.inf, ids.gather(-1, here), 0)[..., 0]  # a NaN is not found again as -inf
    status = torch.where((stats.nan > 0).any(-1), int(Status.NAN), 0).to(torch.int32)
    return stats.maximum, mass, argmax, status


def inverse_temperatures(params: FlatParams, like: Tensor) -> Tensor:
    """1 / T of each sequence ``[batch, 1]``; −1 where it is greedy."""
    if params.temperatures is None:
        t = torch.full((like.shape[0], 1), params.temperature, dtype=torch.float32, device=like.device)
    else:
        t = params.temperatures[:, None]
    t = torch.where((t >= 0) & (t < torch.inf), t, 1.0)
    greedy = t < SMALLEST_TEMPERATURE
    return torch.where(greedy, -1.0, 1.0 / torch.where(greedy, 1.0, t))
