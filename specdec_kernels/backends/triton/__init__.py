"""Triton kernels: every op on GPUs that torch calls "cuda", without nvcc (Triton itself wants gcc or clang), and on the
CPU under Triton's interpreter.

Rows are read in tiles of 1024 ids, several to a program; a kernel leaves the next one of its op a few numbers a tile,
for a row that is cut also a list of at most 2048 values, and the next one combines them. So a result does not depend on
how many rows there are, and any vocabulary goes through the same loops. Kernels are compiled without fused multiply-add
(``launch.run``): a probability has the same bits in each of them, and the remainder of equal laws is exactly 0. Their
arguments are described in ``bundles.py``.

``row_stats`` takes two launches: ``scan`` (all tiles at once) and ``law`` (a program a row: combines its tiles, finds
the cut-off). ``sample`` adds one that draws, and before it one for noise and one for a `row_index`; ``verify_chain``
those in its file, and ``verify_tree`` those in ``tree.py`` and ``tree_walk.py`` or ``siblings.py``; processors add a
few small ones.

This module imports no triton: it is optional.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import torch

from ...config import settings

__all__ = ["why_not"]


def why_not(device: torch.device) -> str | None:
    """None if the Triton kernels can run on tensors of `device`, else the reason."""
    if device.type not in ("cpu", "cuda"):
        return f"tensors are on {device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and not _interpreted():
        return "tensors are on cpu, and Triton's interpreter is off (TRITON_INTERPRET=1 before triton is imported)"
    if device.type == "cuda":
        try:
            named = settings().c_compiler
        except ValueError:  # of another variable: an op says so when it is called
            named = None
        return _why_no_launcher(named)
    return None


@cache
def _why_no_launcher(named: str | None) -> str | None:
    """Why Triton cannot compile the C code that starts its kernels; it would raise an error at the first call.

    `named` is what CC says. Triton (runtime/build.py) takes that, else gcc or clang, and Python's headers.
    """
    found = [shutil.which(name) for name in ((named,) if named is not None else ("gcc", "clang"))]
    compiler = next((path for path in found if path), None)
    if compiler is None:
        what = "gcc and clang are" if named is None else f"CC={named} is"
        return f"Triton needs a C compiler, and {what} not found"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own has another folder
    include = sysconfig.get_path("include", scheme)
    if Path(include, "Python.h").exists():
        return None
    look = [compiler, f"-I{include}", "-E", "-x", "c", "-"]  # CPATH, say, may name another folder
    try:
        if subprocess.run(look, input=b"#include <Python.h>\n", capture_output=True).returncode == 0:
            return None
    except OSError:
        return f"Triton needs a C compiler, and {compiler} does not run"
    return f"Triton needs Python.h, which is not in {include} (Debian: python3-dev)"


def _interpreted() -> bool:
    """Whether kernels are interpreted; Triton decides that when it is imported."""
    from triton.runtime.interpreter import InterpretedFunction

    from .arithmetic import exp_nonpositive

    return isinstance(exp_nonpositive, InterpretedFunction)
