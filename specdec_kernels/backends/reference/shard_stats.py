"""Reference of `shard_stats`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import ShardStatsArguments
from ...types import Status
from .law import clean, in_tiles, lowest_argmax, make_params, tile_stats


def shard_stats(args: ShardStatsArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[batch, n, width]`` to the tiles' maxima and masses ``[batch, n, tiles]``, argmax and status ``[batch, n]``."""
    x = clean(args.logits)
    valid = make_params(x.shape[0], x, args.params)
    tile_max, tile_mass = tile_stats(x, valid.inverse_temperature[..., None])
    tile_mass = torch.where(valid.greedy[..., None], 0.0, tile_mass)
    if args.probs:
        tiles = in_tiles(x, 0.0)
        negative = ((tiles < 0) & (tiles > -math.inf)).any(-1)  # −inf counts as 0
        tile_mass = torch.where(negative, math.inf, tiles.clamp_min(0.0).sum(-1))
    argmax, _ = lowest_argmax(x, x.amax(-1))
    status = torch.where(args.logits.isnan().any(-1), int(Status.NAN), 0).to(torch.int32)
    return tile_max, tile_mass, argmax, status
