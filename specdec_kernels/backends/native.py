"""Loads the compiled libraries, which register their kernels with torch's dispatcher, and says what they hold."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ..config import settings

_FOLDER = Path(__file__).resolve().parent.parent
_LIBRARIES = {"CPU": "_C_cpu.so", "CUDA": "_C_cuda.so"}
_CAPABILITIES = ("default", "avx2", "avx512")  # as csrc/cpu/isa/kernels.h numbers them
_problems: dict[str, str] = {}
_symbols: list[ctypes.CDLL] = []


def load() -> None:
    """Load what was built; a missing or unloadable library is remembered with its reason, never fatal."""
    for key, name in _LIBRARIES.items():
        path = _FOLDER / name
        if not path.exists():
            _problems[key] = f"{name} was not built (see `specdec env`)"
            continue
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            _problems[key] = f"{name} does not load: {error}"
            continue
        if key == "CPU":
            _symbols.append(ctypes.CDLL(str(path)))
            wanted = settings().cpu_capability
            _symbols[0].specdec_limit_cpu_capability(_CAPABILITIES.index(wanted or _CAPABILITIES[-1]))


def why_missing(op: str, key: str) -> str | None:
    """None if the library for dispatch key `key` (CPU or CUDA) registered `op`, else the reason."""
    if key in _problems:
        return _problems[key]
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{op}", key):
        return None
    return f"{_LIBRARIES[key]} has no kernel for {op}"


def cpu_capability() -> str:
    """The instruction set the CPU kernels run with: "avx512", "avx2" or "default"."""
    return _CAPABILITIES[_symbols[0].specdec_cpu_capability()]
