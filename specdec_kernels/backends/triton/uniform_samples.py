"""`uniform_samples` as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import UniformSamplesArguments
from .arithmetic import uniforms_at
from .launch import numbers_a_program, run


@triton.jit(do_not_specialize=["step", "num", "groups", "count", "purpose"])
def kernel(
    seeds,
    steps,
    step,
    num,
    groups,
    count,
    purpose,
    out,
    NUMBERS: tl.constexpr,
):
    """A program for NUMBERS counters of any sequences: two uniforms each."""
    index = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = index < count
    b = index // groups
    group = index % groups
    seed = tl.load(seeds + b, mask=inside, other=0)
    at_step = tl.zeros_like(index) + step if steps is None else tl.load(steps + b, mask=inside, other=0)
    even, odd = uniforms_at(seed, at_step, purpose, group)
    slot = group * 2
    tl.store(out + b * num + slot, even, mask=inside)
    tl.store(out + b * num + slot + 1, odd, mask=inside & (slot + 1 < num))


def uniform_samples(args: UniformSamplesArguments) -> Tensor:
    """``[batch, num]`` float64: the top 53 bits of words ``2 (i mod 2)`` and the next of philox(seed; i div 2, purpose,
    step).
    """
    seeds, steps, step, num, purpose = args
    out = torch.empty(seeds.shape[0], num, dtype=torch.float64, device=seeds.device)
    groups = triton.cdiv(num, 2)
    count = seeds.shape[0] * groups
    a_program = numbers_a_program(count)
    steps = None if steps is None else steps.contiguous()
    grid = (triton.cdiv(count, a_program),)
    run(kernel, grid, seeds.contiguous(), steps, step, num, groups, count, purpose, out, NUMBERS=a_program)
    return out
