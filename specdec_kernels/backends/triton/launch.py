"""How kernels are launched, and how much a program takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import triton

from ...ops.arguments import tiles_of

MOST_TILES_AT_ONCE = 1024  # partial sums of so many tiles are combined in one go
# The interpreter pays by the operation, not by the element: there a program takes up to so many tiles, or numbers.
INTERPRETED_TILES, INTERPRETED_NUMBERS = 256, 1 << 15


def run(
    kernel: Any, grid: tuple[int, ...], *args: object, warps: int = 4, registers: int | None = None, **constants: object
) -> None:
    """Launch on the device of the first tensor among `args`; nothing if the grid is empty.

    Without fused multiply-add, which would round the same expression differently from kernel to kernel. `registers`:
    the most of a thread; left alone, ptxas spills a few where that lets more programs run at once.
    """
    if 0 in grid:
        return
    # Triton for AMD GPUs does not know the option
    options = {"maxnreg": registers} if registers is not None and torch.version.hip is None else {}
    device = next(_tensors(args)).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=False, **options)


def _tensors(args: Iterable[object]) -> Iterator[torch.Tensor]:
    """Those among arguments, and in bundles of them."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)


def empties(device: torch.device, dtype: torch.dtype = torch.int32) -> Callable[..., torch.Tensor]:
    """A function that makes tensors on `device` for a kernel to fill, by their shapes, of `dtype` unless told
    otherwise.
    """
    return partial(torch.empty, dtype=dtype, device=device)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least `n` and at least 1."""
    return int(triton.next_power_of_2(max(n, 1)))


def tiles_a_program(vocab: int, on_gpu: int) -> int:
    """Tiles that a program reads at once: at most `on_gpu` in compiled kernels."""
    whole = power_of_2(tiles_of(vocab))
    return min(whole, INTERPRETED_TILES if triton.knobs.runtime.interpret else on_gpu)


def tiles_of_rows(rows: Any, on_gpu: int) -> int:
    """The same for the target's `bundles.Rows`: a quarter where processors need registers too."""
    return tiles_a_program(rows.vocab, on_gpu if rows.overlay.flags is None else max(1, on_gpu // 4))


def tiles_at_once(vocab: int) -> int:
    """Tiles whose partial results are combined in one go."""
    return min(power_of_2(tiles_of(vocab)), MOST_TILES_AT_ONCE)


def numbers_a_program(count: int) -> int:
    """Elements of a small array that a program works on."""
    return min(power_of_2(count), INTERPRETED_NUMBERS if triton.knobs.runtime.interpret else 256)
