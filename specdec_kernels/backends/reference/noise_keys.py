"""Reference of `noise_keys`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.arguments import NoiseKeysArguments
from .random import philox, words


def noise_keys(args: NoiseKeysArguments) -> Tensor:
    """``[batch, n]`` int64: two words of philox keyed by a philox of (seed, step, purpose) at the position."""
    seeds, positions, steps, step, purpose = args
    column = seeds[:, None]
    step_low, step_high = words(torch.full_like(column, step) if steps is None else steps[:, None].to(torch.int64))
    zero = torch.zeros_like(column)
    stream = philox(*words(column), [zero, zero + purpose, step_low, step_high])
    position_low, position_high = words(positions.to(torch.int64))
    one = torch.ones_like(position_low)
    bits = philox(stream[..., 0], stream[..., 1], [position_low, position_high, one, one])
    return bits[..., 0] | (bits[..., 1] << 32)
