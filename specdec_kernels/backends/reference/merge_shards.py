"""Reference of `merge_shards`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import MergeShardsArguments
from .law import exp, make_params, merge_tiles, sum_of


def merge_shards(args: MergeShardsArguments) -> tuple[Tensor, Tensor]:
    """``[batch, n, tiles]`` to values ``[batch, n, 6]`` and the probability of `logits_at` ``[batch, n]``."""
    tile_max, tile_mass, logits_at, params, probs = args
    valid = make_params(tile_max.shape[0], tile_max, params)
    maximum, inverse_t = tile_max.amax(-1), valid.inverse_temperature
    one_hot = (valid.greedy | maximum.isinf()) & (not probs)
    masses = tile_mass if probs else merge_tiles(tile_max, tile_mass, maximum, inverse_t)
    normalizer = torch.where(one_hot, 1.0, sum_of(masses))
    x = logits_at.masked_fill(logits_at.isnan(), -math.inf)
    weight = exp((x - torch.where(maximum.isinf(), 0.0, maximum)) * inverse_t)
    missing = torch.full_like(maximum, -math.inf)
    log_normalizer = maximum * inverse_t + normalizer.log()
    values = torch.stack([maximum, missing, log_normalizer, normalizer, missing, missing], -1)
    return values, torch.zeros_like(maximum) if probs else torch.where(one_hot, 0.0, weight / normalizer)
