"""Triton kernels: every op on GPUs that torch calls "cuda", without nvcc (Triton itself wants gcc or clang), and on the
CPU under Triton's interpreter.

Rows are read in tiles of 1024 ids, several to a program; between the kernels of an op stand a few numbers a tile, of a
row that is cut also a list of at most 2048 values, and the next kernel combines them. So a result does not depend on
how many rows there are, and any vocabulary goes through the same loops. Kernels are compiled without fused multiply-add
(``launch.run``): a probability is the same bits in each of them, and the remainder of equal laws is exactly 0. What
kernels and device functions are given stands in ``bundles.py``.

``row_stats`` takes two launches: ``scan`` (all tiles at once) and ``law`` (a program a row: combines its tiles, finds
the cut-off). ``sample`` adds one that draws, ``verify_chain`` those in its file, and
``verify_tree`` those in ``tree.py`` and ``tree_walk.py`` or ``siblings.py``; processors add a few small ones.

This module imports no triton: it is optional.
"""

from __future__ import annotations

import importlib.util

import torch

__all__ = ["why_not"]


def why_not(device: torch.device) -> str | None:
    """None if the Triton kernels can run on tensors of `device`, else the reason."""
    if device.type not in ("cpu", "cuda"):
        return f"tensors are on {device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and not _interpreted():
        return "tensors are on cpu, and Triton's interpreter is off (TRITON_INTERPRET=1 before triton is imported)"
    return None


def _interpreted() -> bool:
    """Whether kernels are interpreted; Triton decides that when it is imported."""
    from triton.runtime.interpreter import InterpretedFunction

    from .arithmetic import exp_nonpositive

    return isinstance(exp_nonpositive, InterpretedFunction)
