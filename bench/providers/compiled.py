"""The eager functions through `torch.compile`, specialised to the case's shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from ..inputs import Case
from ..timing import Call
from . import eager

DYNAMIC = ("verify_packed",)  # its number of rows changes from step to step


def _builder(op: str, case: Case) -> Call | None:
    torch._dynamo.reset()  # each case is compiled on its own: none may fall back because others filled the cache
    builder, function = eager.FUNCTIONS[op]
    return builder(case, torch.compile(function, dynamic=op in DYNAMIC))


BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {op: functools.partial(_builder, op) for op in eager.FUNCTIONS}
