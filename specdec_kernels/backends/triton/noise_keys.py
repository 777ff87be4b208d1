"""`noise_keys` as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import NoiseKeysArguments
from .arithmetic import key_at
from .launch import numbers_a_program, run


@triton.jit(do_not_specialize=["step", "purpose", "count", "n"])
def kernel(
    seeds,
    positions,
    steps,
    step,
    count,
    n,
    purpose,
    out,
    NUMBERS: tl.constexpr,
):
    """A program for NUMBERS positions of any sequences."""
    index = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = index < count
    b = index // n
    seed = tl.load(seeds + b, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.int64)
    at_step = tl.zeros_like(index) + step if steps is None else tl.load(steps + b, mask=inside, other=0)
    tl.store(out + index, key_at(seed, at_step, purpose, position), mask=inside)


def noise_keys(args: NoiseKeysArguments) -> Tensor:
    """``[batch, n]`` int64: two words of philox keyed by a philox of (seed, step, purpose) at the position."""
    seeds, positions, steps, step, purpose = args
    out = torch.empty(positions.shape, dtype=torch.int64, device=seeds.device)
    count, n = out.numel(), positions.shape[1]
    a_program = numbers_a_program(count)
    steps = None if steps is None else steps.contiguous()
    grid = (triton.cdiv(count, a_program),)
    run(
        kernel, grid, seeds.contiguous(), positions.contiguous(), steps, step, count, n, purpose, out,
        NUMBERS=a_program,
    )  # fmt: skip
    return out
