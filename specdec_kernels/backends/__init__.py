"""Which backends exist, what each can run and why not, and how an op reaches one.

A backend is one row of `_BACKENDS` and a folder (or, for the compiled libraries, ``native.py``).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from . import native
from . import triton as triton_backend

logger = logging.getLogger("specdec_kernels")

OPS = (
    "row_stats",
    "warp_probs",
    "uniform_samples",
    "noise_keys",
    "sample",
    "verify_chain",
    "verify_packed",
    "verify_tree",
    "gather_kv_",
)


def _reference(op: str, overload: Any) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{__name__}.reference.{op}"), op)


def _triton(op: str, overload: Any) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{__name__}.triton.{op}"), op)


def _registered(op: str, overload: Any) -> Callable[..., Any]:
    return overload


def _reason_reference(op: str, device: torch.device) -> str | None:
    return None


def _reason_cpu(op: str, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"tensors are on {device}"
    return native.why_missing(op, "CPU")


def _reason_cuda(op: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"tensors are on {device}"
    return native.why_missing(op, "CUDA") or _triton_serves.get(op) or native.why_no_code(device)


def _reason_triton(op: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(f"{__name__}.triton.{op}") is None:
        return f"there is no Triton kernel for {op}"
    return triton_backend.why_not(device)


_BACKENDS: dict[str, tuple[Callable[[str, torch.device], str | None], Callable[[str, Any], Callable[..., Any]]]] = {
    # name: (why it cannot run this op on this device, or None; how the op is reached)
    "cuda": (_reason_cuda, _registered),
    "triton": (_reason_triton, _triton),
    "cpu": (_reason_cpu, _registered),
    "reference": (_reason_reference, _reference),
}
_triton_serves: dict[str, str] = {}  # ops that CUDA tensors reach Triton by, and why no CUDA kernel does


def register_triton(library: torch.library.Library) -> None:
    """Let torch's dispatcher take Triton for CUDA tensors where the compiled library, loaded before, has no kernel."""
    if triton_backend.why_not(torch.device("cuda")) is not None:
        return
    for op in OPS:
        reason = native.why_missing(op, "CUDA")
        if reason is not None:
            _triton_serves[op] = reason
            library.impl(op, lambda *args, op=op: _triton(op, None)(*args), "CUDA")


def implementation(op: str, overload: Any, backend: str, device: torch.device) -> Callable[..., Any]:
    """The callable of `op` on a backend asked for by name; it never falls back.

    Raises
    ------
    ValueError
        An unknown backend, or one that cannot run this op on this device, with the reason.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(_BACKENDS)} or None, got {backend!r}")
    why_not, reach = _BACKENDS[backend]
    reason = why_not(op, device)
    if reason is not None:
        raise ValueError(f"{op}: backend={backend!r} cannot run here: {reason}")
    return reach(op, overload)


def _candidates(device: torch.device) -> list[str]:
    """What may be taken unasked, best first: every backend but Triton's interpreter."""
    return [name for name in _BACKENDS if (name, device.type) != ("triton", "cpu")]


def automatic(op: str, device: torch.device) -> str:
    """The name of the backend that ``backend=None`` takes on `device`: the first candidate that can run the op."""
    return next(name for name in _candidates(device) if _BACKENDS[name][0](op, device) is None)


class BackendTable(dict[str, dict[str, str]]):
    """``table[op][backend]`` is "yes" or the reason why not; printing it gives an aligned table."""

    def __str__(self) -> str:
        names = list(_BACKENDS)
        lines = [f"{'op':16}" + "".join(f"{n:>11}" for n in names)]
        notes: dict[str, None] = {}
        for op, row in self.items():
            lines.append(f"{op:16}" + "".join(f"{'yes' if row[n] == 'yes' else '-':>11}" for n in names))
            notes.update({f"{n}: {row[n]}": None for n in names if row[n] != "yes"})
        return "\n".join([*lines, *notes])

    __repr__ = __str__


def backends(device: torch.device | str = "cpu") -> BackendTable:
    """The op × backend table for tensors on `device`: "yes", or the reason why not.

    Parameters
    ----------
    device : torch.device or str
        Where the tensors would be.

    Returns
    -------
    BackendTable
        A dict ``{op: {backend: "yes" or reason}}`` that prints as a table.
    """
    device = torch.device(device)
    return BackendTable({op: {n: why(op, device) or "yes" for n, (why, _) in _BACKENDS.items()} for op in OPS})


redirected: dict[torch.device, str] = {}  # GPUs that the compiled library has no code for, and what serves them
_announced: set[torch.device] = set()


def announce(op: str, device: torch.device) -> None:
    """Log, at the first call on a device, what ``backend=None`` takes there and why nothing faster."""
    if device in _announced or torch.compiler.is_compiling():
        return
    _announced.add(device)
    chosen = automatic(op, device)
    if device.type == "cuda" and not native.why_missing(op, "CUDA") and chosen != "cuda" and torch.cuda.is_available():
        redirected[device] = chosen
    candidates = _candidates(device)
    better = candidates[: candidates.index(chosen)]
    passed_over = "".join(f", not {name} ({_BACKENDS[name][0](op, device)})" for name in better)
    capability = f" ({native.cpu_capability()})" if chosen == "cpu" else ""
    logger.info("%s takes %s%s on %s%s", op, chosen, capability, device.type, passed_over)
