"""The CUDA kernels executed on the CPU (csrc/emulator), as a backend of the tests named "cuda-emulated".

A library for tests only: it registers the kernels as the CPU implementation of the ops in a namespace of its own, whose
schemas are copied here from the real one. It is built at first use, and again whenever a source has changed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdec_kernels.backends import BACKENDS, OPS  # importing the package defines the ops whose schemas are copied

NAME = "cuda-emulated"
NAMESPACE = "specdec_emulated"  # also in csrc/bind_emulated.cpp
STRATEGIES = ("auto", "split", "walk", "cluster", "resident", "early")  # as csrc/cuda/strategy.h numbers them
ROOT = Path(__file__).resolve().parents[1]
FORWARD, RANDOM = 0, 2  # orders of specdec_emulator_schedule
CASES = 20  # per test and strategy, unless its module has EMULATED_CASES or pytest is given --every-case
MULTIPROCESSORS = 8  # what the emulated device has unless told otherwise


def strategies(op: str) -> list[str]:
    """The strategies that lay out an op's work in ways of their own: `verify_tree` has one kernel, which walks, and
    only chains can be kept in shared memory, or left at a rejected token.
    """
    chains = op.startswith(("verify_chain", "verify_packed"))
    of_chains = ("resident", "early")
    return [s for s in STRATEGIES if (op, s) != ("verify_tree", "split") and (s not in of_chains or chains)]


def unavailable() -> str | None:
    """Why the library cannot be built here; None if it can."""
    if not (ROOT / "setup.py").exists():
        return "an installed package has no kernel sources"
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "there is no C++ compiler to build the emulated CUDA kernels with"
    return None


@cache
def _built() -> Path | str:
    """The library, or the compiler's output. (A failure is kept too: thousands of tests would each repeat it.)"""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_emulated"], cwd=ROOT, capture_output=True, text=True
    )
    return ROOT / "build/emulated/_C_emulated.so" if done.returncode == 0 else done.stdout + done.stderr


@cache
def _load(path: Path) -> ctypes.CDLL:
    library = torch.library.Library(NAMESPACE, "DEF")
    for op in OPS:
        original = getattr(torch.ops.specdec, op).default
        library.define(str(original._schema).partition("::")[2], tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{op}", original, lib=library)  # the original's own fake
    torch.ops.load_library(str(path))
    symbols = ctypes.CDLL(str(path))
    symbols.specdec_emulator_schedule.argtypes = (ctypes.c_int, ctypes.c_uint64)
    symbols.library = library  # type: ignore[attr-defined]  # the definitions live as long as this object
    return symbols


def library() -> ctypes.CDLL:
    """The library, built and loaded.

    Raises
    ------
    RuntimeError
        It does not compile; the message is the compiler's.
    """
    known = _built.cache_info().currsize > 0
    built = _built()
    if isinstance(built, str):
        why = "see the first failure" if known else unavailable() or built
        raise RuntimeError(f"the emulated CUDA kernels were not built: {why}")
    return _load(built)


def overload(op: str) -> Callable[..., Any]:
    """The emulated op, once the library is loaded; it takes what ``torch.ops.specdec.<op>`` takes."""
    found: Callable[..., Any] = getattr(torch.ops.specdec_emulated, op).default
    return found


@contextmanager
def running(
    strategy: str = "auto", schedule: int | None = None, multiprocessors: int = MULTIPROCESSORS
) -> Iterator[None]:
    """Within: ``backend="cuda-emulated"`` runs the kernels with `strategy` on a device with so many multiprocessors.

    Threads, warps and blocks take their turns in index order, or at random from the seed `schedule`.
    """
    symbols = library()
    symbols.specdec_cuda_force_strategy(STRATEGIES.index(strategy))
    symbols.specdec_emulator_schedule(FORWARD if schedule is None else RANDOM, schedule or 0)
    symbols.specdec_emulator_multiprocessors(multiprocessors)
    BACKENDS[NAME] = (lambda op, device: None, lambda op, original: overload(op))
    try:
        yield
    finally:
        del BACKENDS[NAME]
        symbols.specdec_cuda_force_strategy(0)
        symbols.specdec_emulator_schedule(FORWARD, 0)
        symbols.specdec_emulator_multiprocessors(MULTIPROCESSORS)
