"""The ways in which the CUDA kernels lay out their work, chosen by hand."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import specdec_kernels as sk

STRATEGIES = (0, 1, 2, 3)  # as csrc/cuda/strategy.h numbers them; 0: by shape


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(sk.__file__).with_name("_C_cuda.so")))


@contextlib.contextmanager
def forced(number: int) -> Iterator[None]:
    """Within: the CUDA kernels lay out their work in this way."""
    _library().specdec_cuda_force_strategy(number)
    try:
        yield
    finally:
        _library().specdec_cuda_force_strategy(0)
