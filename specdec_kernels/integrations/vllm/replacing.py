"""How a function of vLLM is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner`'s function `name` by ``make(stock)``, unless that has been done; the stock one stays reachable as
    ``__wrapped__``.

    Raises
    ------
    RuntimeError
        It has no such function: a vLLM that keeps it elsewhere.
    """
    stock = getattr(owner, name, None)
    if stock is None:
        raise RuntimeError(
            f"specdec_kernels: {owner.__name__} must have {name}, and has none in this version of vLLM; unset "
            "SPECDEC_VLLM for vLLM as it is"
        )
    if getattr(stock, "__specdec__", False):
        return
    ours: Any = functools.wraps(stock)(make(stock))
    ours.__specdec__ = True
    setattr(owner, name, ours)


def is_unknown(more: Iterable[Any], options: Mapping[str, Any]) -> bool:
    """Whether vLLM gives arguments, by place or by name, that ask for what is not served here. What is None or False
    asks for nothing, and so do options of FLy and watermarks without FLy's window or a watermark's contexts.
    """
    named = [value for name, value in options.items() if not name.startswith(("fly_", "watermark"))]
    asked = any(value is not None and value is not False for value in (*more, *named))
    return asked or bool(options.get("fly_window_size"))
