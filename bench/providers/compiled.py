"""The eager functions through `torch.compile`, specialised to the case's shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..inputs import Case
from ..timing import Call
from . import eager


def _compile(function: Callable[..., object]) -> Callable[..., object]:
    torch._dynamo.reset()  # each case is compiled for itself: none may fall back because others used up the cache
    return torch.compile(function, dynamic=False)


def _verify_packed(case: Case) -> Call | None:
    torch._dynamo.reset()
    # dynamic shapes: the number of rows changes from step to step
    return eager.packed_builder(case, torch.compile(eager.verify_packed_rows, dynamic=True))


def _rows(function: Callable[..., object]) -> Callable[[Case], Call | None]:
    return lambda case: eager.rows_builder(case, _compile(function))


BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {
    "verify_chain": lambda case: eager.chain_builder(case, _compile(eager.verify)),
    "verify_packed": _verify_packed,
    **{op: _rows(function) for op, function in eager.ROW_FUNCTIONS.items()},
}
