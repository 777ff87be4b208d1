"""What speculation gains: in theory, as measured, and planned for a model, drafters and prompts.

The functions of `theory` are here; `measured`, `planner` and `plots`, which need more than numpy, are imported when
they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from . import theory
from .theory import (
    best_draft_length,
    best_gamma,
    break_even_acceptance,
    expected_tokens,
    expected_tokens_by_position,
    least_improvement,
    memory_factor,
    operations_factor,
    walltime_improvement,
)

_LAZY = ("measured", "planner", "plots")

__all__ = [
    *_LAZY,
    "best_draft_length",
    "best_gamma",
    "break_even_acceptance",
    "expected_tokens",
    "expected_tokens_by_position",
    "least_improvement",
    "memory_factor",
    "operations_factor",
    "theory",
    "walltime_improvement",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
