"""Reference of `uniform_samples`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.arguments import UniformSamplesArguments
from .random import philox, words


def uniform_samples(args: UniformSamplesArguments) -> Tensor:
    """``[batch, num]`` float64: the top 53 bits of words ``2 (i mod 2)`` and the next of philox(seed; i div 2, purpose,
    step).
    """
    seeds, steps, step, num, purpose = args
    column = seeds[:, None]
    step_low, step_high = words(torch.full_like(column, step) if steps is None else steps[:, None].to(torch.int64))
    index = torch.arange((num + 1) // 2, device=seeds.device)[None]
    bits = philox(*words(column), [index, torch.full_like(index, purpose), step_low, step_high])
    high, low = bits.unflatten(-1, (2, 2)).flatten(1, 2)[:, :num].unbind(-1)
    return ((high << 21) | (low >> 11)).to(torch.float64) * 2.0**-53
