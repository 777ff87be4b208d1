"""What tokens are drawn from where a draft was rejected: a remainder ``(scale P - taken Q)+`` of the P and Q at a
position. That of every rule, law and tree is one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bundles import Position
from .draft import load_draft_row, q_of
from .row import load_row, probabilities


@triton.jit
def load_position(target, draft, b, i, row, draft_row, mask=None):
    """Row i of sequence b in target and draft, whose laws are number `row` and `draft_row`; or vectors of them."""
    return Position(load_row(target, b, i, row, mask), load_draft_row(draft, b, i, draft_row, mask))


@triton.jit
def pair(at, scale, ids):
    """``scale * P`` and Q of target ids; 0 past the end."""
    return probabilities(at.target, ids, scale), q_of(at.draft, ids, at.draft.law)


@triton.jit
def remainder(at, scale, taken, ids):
    """``(scale * P - taken * Q)+`` of target ids, and their Q."""
    p, q = pair(at, scale, ids)
    return tl.maximum(p - taken * q, 0.0), q
