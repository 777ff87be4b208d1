"""A call of every op, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import specdec_kernels as sk
from python_tests.ops.inputs import OPS, op_tests


def made(op: str, make: Callable[[], dict[str, Any]]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of the package, and arguments for it."""
    return getattr(sk, op), make()


CALLS = {
    f"{op}-{name}" if name else op: partial(made, op, make) for op in OPS for name, make in op_tests(op).CALLS.items()
}
