"""Both implementations of the n-gram index, and what it is to find, written down naively."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from specdec_kernels import _host_py

IMPLEMENTATIONS: dict[str, Any] = {"python": _host_py}
try:
    IMPLEMENTATIONS["compiled"] = importlib.import_module("specdec_kernels._host")
except ModuleNotFoundError:  # a reduced install; any other failure to load is one
    pass


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def naive_match(text: list[int], documents: list[list[int]], lengths: range) -> int:
    """Length of the longest suffix that stood before, with a token after it."""
    for length in reversed(lengths):
        for source in (text, *documents):
            if length <= len(text) and any(
                source[end - length : end] == text[len(text) - length :] for end in range(length, len(source))
            ):
                return length
    return 0
