"""transformers: its models as `Runner`, and this package's loop as its assisted generation.

`assisted_generation`, `generate` and `speculative_sampling` are what users of transformers call. Nothing here imports
transformers before it is needed.
"""

from __future__ import annotations

import importlib
from typing import Any

_FILES = {"assisted_generation": "patch", "generate": "assisted", "speculative_sampling": "verification"}
__all__ = ["assisted_generation", "generate", "speculative_sampling"]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not an import statement: these files stand above the loop, and the runners here below it.
    value = getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
    globals()[name] = value
    return value
