"""The fuzzer of what lies below the public API: see __main__.py."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from .calls import GOOD, Case, fuzz_op
from .index import fuzz_index
from .promises import fuzz_cu, fuzz_overlap

KINDS = (*GOOD, *GOOD, "verify_chain", "verify_tree", "cu", "overlap", "index")


def run_case(number: int, tell: Callable[[str], Any] = lambda call: None) -> str | None:
    """Run case `number`, which tells of each call before it is made; what went wrong."""
    case = Case(number, tell)
    kind = case.random.choice(KINDS)
    own = {"cu": fuzz_cu, "overlap": fuzz_overlap, "index": fuzz_index}
    try:
        if kind in own:
            own[kind](case)
        else:
            fuzz_op(case, kind)
    except Exception:
        return traceback.format_exc()
    return None
