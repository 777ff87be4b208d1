"""Which backends exist, what each can run and why not, and how an op reaches one.

A backend is one row of `BACKENDS` and a folder (or, for the compiled libraries, ``native.py``).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..checks import check_device
from . import native
from . import triton as triton_backend
from .native import has_kernel

logger = logging.getLogger("specdec_kernels")

OPS: dict[str, Any] = {}  # each op's `ops.arguments.Definition`, by the op's name; filled as the ops are defined
FUNCTIONS: dict[str, str] = {}  # public functions, and the ops that they call


@cache
def in_python(backend: str, op: str) -> Callable[..., Any]:
    """The op as the dispatcher calls it, run by a backend in Python."""

    def run(*given: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in given):
            raise RuntimeError(f"specdec: {op} takes strided tensors")
        module = importlib.import_module(f"{__name__}.{backend}.{op}")
        with torch.no_grad():  # as the compiled ones, which autograd does not see into
            return getattr(module, op)(OPS[op].unpack(*given))

    return run


def _reference(op: str, overload: Any) -> Callable[..., Any]:
    return in_python("reference", op)


def _triton(op: str, overload: Any) -> Callable[..., Any]:
    return in_python("triton", op)


def _registered(op: str, overload: Any) -> Callable[..., Any]:
    return overload


def _reason_reference(op: str, device: torch.device) -> str | None:
    return "torch has no float64 on it" if device.type == "mps" else None


def _reason_cpu(op: str, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"tensors are on {device}"
    return native.why_missing(op, "CPU")


def _reason_cuda(op: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"tensors are on {device}"
    return native.why_missing(op, "CUDA") or native.why_no_code(device)


def _reason_triton(op: str, device: torch.device) -> str | None:
    if importlib.util.find_spec(f"{__name__}.triton.{op}") is None:
        return f"there is no Triton kernel for {op}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch finds no GPU"
    return triton_backend.why_not(device)


BACKENDS: dict[str, tuple[Callable[[str, torch.device], str | None], Callable[[str, Any], Callable[..., Any]]]] = {
    # name: (why it cannot run this op on this device, or None; how the op is reached)
    "cuda": (_reason_cuda, _registered),
    "triton": (_reason_triton, _triton),
    "cpu": (_reason_cpu, _registered),
    "reference": (_reason_reference, _reference),
}


def register_triton(library: torch.library.Library) -> None:
    """Let torch's dispatcher take Triton for CUDA tensors where the compiled library, loaded before, has no kernel."""
    if triton_backend.why_not(torch.device("cuda")) is not None:
        return
    for op in OPS:
        if native.why_missing(op, "CUDA") is not None and not has_kernel(op, "CUDA"):
            library.impl(op, in_python("triton", op), "CUDA")


def check_backend(caller: str, backend: object) -> None:
    """ValueError unless the name of a backend."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"{caller}: backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")


def implementation(
    op: str, overload: Any, backend: str, device: torch.device, caller: str | None = None
) -> Callable[..., Any]:
    """The callable of `op` on a backend asked for by name; it never falls back. `caller` is named in messages.

    Raises
    ------
    ValueError
        An unknown backend, or one that cannot run this op on this device, with the reason.
    """
    check_backend(caller or op, backend)
    why_not, reach = BACKENDS[backend]
    reason = why_not(op, device)
    if reason is not None:
        raise ValueError(f"{caller or op}: backend={backend!r} cannot run here: {reason}")
    return reach(op, overload)


def _candidates(device: torch.device) -> list[str]:
    """What may be chosen automatically, best first: every backend but Triton's interpreter."""
    return [name for name in BACKENDS if (name, device.type) != ("triton", "cpu")]


def automatic(op: str, device: torch.device) -> str:
    """The name of the backend that ``backend=None`` takes on `device`: the first candidate that can run the op.

    Raises
    ------
    ValueError
        None can.
    """
    reasons = {}
    for name in _candidates(device):
        reasons[name] = BACKENDS[name][0](op, device)
        if reasons[name] is None:
            return name
    raise ValueError(f"{op}: tensors must be on a device that a backend runs on, got {device}: {reasons['reference']}")


class BackendTable(dict[str, dict[str, str]]):
    """``table[op][backend]`` is "yes" or the reason why not; printing it gives an aligned table."""

    def __str__(self) -> str:
        names = list(BACKENDS)
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

    Raises
    ------
    ValueError
        A device that torch does not know.
    """
    device = check_device("backends", "device", device)
    return BackendTable(
        {name: {n: why(op, device) or "yes" for n, (why, _) in BACKENDS.items()} for name, op in FUNCTIONS.items()}
    )


def route(op: str, device: torch.device) -> str | None:
    """The backend that `op` must be asked for by name on `device`; None where torch's dispatcher takes the right one.

    The dispatcher knows only which kernels are registered: on a GPU that the compiled library has no code for it would
    still take that library.
    """
    if device.type != "cuda" or native.why_missing(op, "CUDA") is not None or not torch.cuda.is_available():
        return None
    chosen = automatic(op, device)
    return None if chosen == "cuda" else chosen


_routes: dict[tuple[str, torch.device], str | None] = {}
_announced: set[torch.device] = set()
_warned: set[torch.device] = set()


def routed(op: str, device: torch.device) -> str | None:
    """`route`, looked up once per op and device, except after an error that may pass; the first op on a device is
    logged.

    Compiled code keeps what it was compiled with.
    """
    try:
        return _routes[op, device]
    except KeyError:
        if device not in _announced:
            announce(op, device)  # raises for a device that no backend runs on
            _announced.add(device)
        chosen = route(op, device)
        if chosen is not None and native.may_pass(device):
            if device not in _warned:
                _warned.add(device)
                logger.warning("%s takes %s on %s for now: %s", op, chosen, device, native.why_no_code(device))
            return chosen
        return _routes.setdefault((op, device), route(op, device))  # anew: an error may have passed since


# Sets what `torch.compiler.assume_constant_result` would set, which imports the compiler: a compiled call is routed
# while it is compiled.
routed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def announce(op: str, device: torch.device) -> None:
    """Log what ``backend=None`` takes for `op` on `device` and why nothing faster."""
    chosen = automatic(op, device)
    candidates = _candidates(device)
    better = candidates[: candidates.index(chosen)]
    passed_over = "".join(f", not {name} ({BACKENDS[name][0](op, device)})" for name in better)
    capability = f" ({native.cpu_capability()})" if chosen == "cpu" else ""
    logger.info("%s takes %s%s on %s%s", op, chosen, capability, device.type, passed_over)
