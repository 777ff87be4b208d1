"""The random numbers of a verify step that has seeds: a launch before the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import PURPOSES, VerifyArguments
from .arithmetic import key_at, uniforms_at
from .launch import numbers_a_program, run

ACCEPT = tl.constexpr(PURPOSES["accept"])
SAMPLE = tl.constexpr(PURPOSES["sample"])


@triton.jit(do_not_specialize=["step", "rows", "total"])
def kernel(
    seeds,
    steps,
    step,
    positions,
    cu,
    total,
    rows,
    out,
    NUMBERS: tl.constexpr,
):
    """A program a sequence: the uniforms of its target rows, or where there are positions their noise keys."""
    b = tl.program_id(0).to(tl.int64)
    first = b * rows
    count = rows.to(tl.int64)
    first_position = first
    if cu is not None:
        start, stop = tl.load(cu + b).to(tl.int64), tl.load(cu + b + 1).to(tl.int64)
        first_position = start + b
        broken = (start < 0) | (stop < start) | (stop > total)
        count = tl.where(broken, 0, tl.minimum(stop - start + 1, count))
    seed = tl.load(seeds + b)
    at_step = tl.zeros((), tl.int64) + step if steps is None else tl.load(steps + b)
    begin = tl.zeros((), tl.int64)
    while begin < count:
        index = begin + tl.arange(0, NUMBERS)
        inside = index < count
        if positions is None:
            even, odd = uniforms_at(seed, at_step, ACCEPT, index // 2)
            tl.store(out + first + index, tl.where(index % 2 == 0, even, odd), mask=inside)
        else:
            at = tl.load(positions + first_position + index, mask=inside, other=0).to(tl.int64)
            tl.store(out + first + index, key_at(seed, at_step, SAMPLE, at), mask=inside)
        begin += NUMBERS


def with_numbers(args: VerifyArguments, rows: int, cu: Tensor | None = None, total: int = 0) -> VerifyArguments:
    """The same arguments with the numbers ``[batch, rows]``; also of `total` tokens cut at `cu`, where sequences of a
    malformed batch may overlap.
    """
    seeds, steps, positions = args.seeds, args.steps, args.positions
    if seeds is None:
        return args
    batch = seeds.shape[0]
    dtype = torch.float64 if positions is None else torch.int64
    out = torch.empty(batch, rows, dtype=dtype, device=seeds.device)
    run(
        kernel, (batch,), seeds.contiguous(), None if steps is None else steps.contiguous(), args.step,
        None if positions is None else positions.contiguous(), cu, total, rows, out,
        NUMBERS=numbers_a_program(rows), warps=1,
    )  # fmt: skip
    args = args._replace(seeds=None, steps=None, positions=None)
    return args._replace(uniform_samples=out) if positions is None else args._replace(noise_keys=out)
