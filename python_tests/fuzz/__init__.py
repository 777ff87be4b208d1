"""The fuzzer of what lies below the public API: see __main__.py."""

from __future__ import annotations

import traceback

from .calls import GOOD, Case, fuzz_cu, fuzz_op, fuzz_overlap
from .index import fuzz_index

KINDS = (*GOOD, *GOOD, "verify_chain", "verify_tree", "cu", "overlap", "index")


def run_case(number: int, aloud: bool = False) -> str | None:
    """Run case `number`; what went wrong, with the call in words. `aloud`: it is printed before it is made."""
    case = Case(number, aloud)
    kind = case.random.choice(KINDS)
    own = {"cu": fuzz_cu, "overlap": fuzz_overlap, "index": fuzz_index}
    try:
        if kind in own:
            own[kind](case)
        else:
            fuzz_op(case, kind)
    except Exception:
        return f"{case.described()}\n{traceback.format_exc()}"
    return None
