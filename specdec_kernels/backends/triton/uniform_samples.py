"""`uniform_samples` as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import high_word, low_word, philox
from .launch import power_of_2, run


@triton.jit(do_not_specialize=["step", "purpose"])
def kernel(seeds, steps, step, num, purpose, out, GROUPS: tl.constexpr):
    """A program a sequence and GROUPS counters: four uniforms each."""
    b = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + b)
    at_step = step.to(tl.int64) if steps is None else tl.load(steps + b)
    index = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    group = index.to(tl.uint32)
    zero = group * 0
    words = philox(
        zero + low_word(seed),
        zero + high_word(seed),
        group,
        zero + purpose.to(tl.uint32),
        zero + low_word(at_step),
        zero + high_word(at_step),
    )
    for i in tl.static_range(4):
        slot = index.to(tl.int64) * 4 + i
        tl.store(out + b * num + slot, (words[i] >> 8).to(tl.float32) * 2.0**-24, mask=slot < num)


def uniform_samples(seeds: Tensor, steps: Tensor | None, step: int, num: int, purpose: int) -> Tensor:
    """``[batch, num]`` float32: word ``i mod 4`` of philox(seed; i div 4, purpose, step), its top 24 bits."""
    out = torch.empty(seeds.shape[0], num, dtype=torch.float32, device=seeds.device)
    groups = min(power_of_2(triton.cdiv(num, 4)), 1024)
    steps = None if steps is None else steps.contiguous()
    grid = (seeds.shape[0], triton.cdiv(num, 4 * groups))
    run(kernel, grid, seeds.contiguous(), steps, step, num, purpose, out, GROUPS=groups)
    return out
