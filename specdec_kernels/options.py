"""Numbers among the options of commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MOST_THREADS = 1024
LARGEST_SEED = 2**63 - 1


def integer(lowest: int, highest: int) -> Callable[[str], int]:
    """What argparse makes an integer in ``[lowest, highest]`` with, or a sentence that it is none."""

    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) < 100 else highest + 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be in [{lowest}, {highest}], got {text[:30]}")
        return value

    return parse


def draft_length(text: str) -> int | str:
    """What argparse makes draft tokens a step with: an integer in [1, 64], or "auto"."""
    return text if text == "auto" else integer(1, 64)(text)
