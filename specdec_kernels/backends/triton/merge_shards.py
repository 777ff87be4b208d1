"""`merge_shards` as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import MergeShardsArguments
from .arithmetic import INFINITY, TILE, exp_nonpositive
from .bundles import LOGITS, RowLaw
from .launch import run, tiles_a_program, tiles_at_once
from .law import make_temperature, temperature_of
from .row import weigh


@triton.jit(do_not_specialize=["n", "tiles"])
def merge(
    tile_max,
    tile_mass,
    logits_at,
    n,
    tiles,
    temperature,
    values,
    prob,
    PROBS: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """A program a row: its maximum and normaliser from its tiles', as `law.law` makes them; of probabilities their sum,
    as `draft.probs_status` makes it.
    """
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.full((), -INFINITY, tl.float32)
    for first in range(0, tiles, ROW_TILES):
        t = first + tl.arange(0, ROW_TILES)
        of_tile = tl.load(tile_max + row * tiles + t, mask=t < tiles, other=-INFINITY)
        maximum = tl.maximum(maximum, tl.max(of_tile, 0))
    _, inverse_temperature, greedy, _ = temperature_of(temperature, row // n)
    normalizer = tl.zeros((), tl.float32)
    if PROBS:
        for first in range(0, tiles, TILES):
            t = first + tl.arange(0, TILES)
            normalizer += tl.sum(tl.load(tile_mass + row * tiles + t, mask=t < tiles, other=0.0), 0)
    else:
        for first in range(0, tiles, ROW_TILES):
            t = first + tl.arange(0, ROW_TILES)
            of_tile = tl.load(tile_max + row * tiles + t, mask=t < tiles, other=-INFINITY)
            mass = tl.load(tile_mass + row * tiles + t, mask=t < tiles, other=0.0)
            normalizer += tl.sum(mass * exp_nonpositive((of_tile - maximum) * inverse_temperature), 0)
    one_hot = greedy | (tl.abs(maximum) == INFINITY)
    x = tl.load(logits_at + row)
    probability = tl.zeros((), tl.float32)
    if not PROBS:
        normalizer = tl.where(one_hot, 1.0, normalizer)
        x = tl.where(x == x, x, -INFINITY)
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), normalizer)
        law = RowLaw(maximum, -INFINITY, inverse_temperature, inverse, 0)
        probability = tl.where(one_hot, 0.0, weigh(x, law, -INFINITY, LOGITS) * inverse)
    tl.store(prob + row, probability)
    values += row * 6
    tl.store(values, maximum)
    tl.store(values + 1, -INFINITY)
    tl.store(values + 2, maximum * inverse_temperature + tl.log(normalizer))
    tl.store(values + 3, normalizer)
    tl.store(values + 4, -INFINITY)
    tl.store(values + 5, -INFINITY)


def merge_shards(args: MergeShardsArguments) -> tuple[Tensor, Tensor]:
    """``[batch, n, tiles]`` to values ``[batch, n, 6]`` and the probability of `logits_at` ``[batch, n]``."""
    batch, n, tiles = args.tile_max.shape
    vocab = tiles * TILE.value
    values = torch.empty(batch, n, 6, dtype=torch.float32, device=args.tile_max.device)
    prob = torch.empty(batch, n, dtype=torch.float32, device=args.tile_max.device)
    run(
        merge, (batch * n,), args.tile_max.contiguous(), args.tile_mass.contiguous(), args.logits_at.contiguous(), n,
        tiles, make_temperature(args.params), values, prob, PROBS=args.probs, TILES=tiles_a_program(vocab, 4),
        ROW_TILES=tiles_at_once(vocab),
    )  # fmt: skip
    return values, prob
