"""How a function of vLLM is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `owner` have ``make(stock)`` instead of its function `name`, unless it has one already; the stock one
    stays reachable as ``__wrapped__``.
    """
    stock = getattr(owner, name)
    if getattr(stock, "__specdec__", False):
        return
    ours: Any = functools.wraps(stock)(make(stock))
    ours.__specdec__ = True
    setattr(owner, name, ours)
