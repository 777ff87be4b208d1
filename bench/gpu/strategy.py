"""The ways in which the CUDA kernels lay out their work, forced by hand."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import specdec_kernels as sk

from .process import ROOT

AUTO = "auto"
HEADER = ROOT / "csrc/cuda/strategy.h"


def numbered(header: str) -> Mapping[str, int]:
    """Names and numbers of ``enum class Strategy``, as in ``kWalk = 2``; 0 chooses by shape."""
    body = re.search(r"enum class Strategy[^{]*\{(.*?)\};", header, re.DOTALL)
    assert body is not None, f"{HEADER} has no enum class Strategy"
    return {name.lower(): int(number) for name, number in re.findall(r"\bk(\w+) = (\d+)", body[1])}


STRATEGIES = numbered(HEADER.read_text())
LAYOUTS = tuple(name for name in STRATEGIES if name != AUTO)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(sk.__file__).with_name("_C_cuda.so")))


@contextlib.contextmanager
def forced(name: str, overlap: bool = True) -> Iterator[None]:
    """Within: the CUDA kernels lay out their work in this way; without `overlap` each waits for the last one's end."""
    _library().specdec_cuda_force_strategy(STRATEGIES[name])
    _library().specdec_cuda_allow_overlap(int(overlap))
    try:
        yield
    finally:
        _library().specdec_cuda_force_strategy(STRATEGIES[AUTO])
        _library().specdec_cuda_allow_overlap(1)
