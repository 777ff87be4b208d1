"""Reference of `uniform_samples`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.arguments import UniformSamplesArguments
from .random import philox, words


def uniform_samples(args: UniformSamplesArguments) -> Tensor:
    """``[batch, num]`` float32: word ``i mod 4`` of philox(seed; i div 4, purpose, step), its top 24 bits."""
    seeds, steps, step, num, purpose = args
    column = seeds[:, None]
    step_low, step_high = words(torch.full_like(column, step) if steps is None else steps[:, None].to(torch.int64))
    index = torch.arange((num + 3) // 4, device=seeds.device)[None]
    bits = philox(*words(column), [index, torch.full_like(index, purpose), step_low, step_high])
    return (bits.flatten(1)[:, :num] >> 8).to(torch.float32) * 2.0**-24
