"""What tokens are drawn from where a draft was rejected: a remainder ``(scale P - taken Q)+`` of the P and Q at a
position. Every rule, law and tree has one of this form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .draft import q_at
from .row import load_law, load_logits, weigh


@triton.jit
def probabilities(target, at, scale, ids):
    """``scale * P`` of ids at a position."""
    law = load_law(target.laws, at.row)
    x = load_logits(target.rows, at.b, at.i, ids)
    scale = law.inverse_normalizer * scale
    if law.inverse_temperature < 0:
        p = tl.where(ids == law.argmax, scale, 0.0)
    else:
        p = weigh(x, law, law.cutoff, target.rows.kind) * scale
    return p


@triton.jit
def pair(target, draft, at, scale, ids):
    """``scale * P`` and Q of target ids at a position; 0 past the end."""
    return probabilities(target, at, scale, ids), q_at(draft, at, ids)


@triton.jit
def remainder(target, draft, at, scale, taken, ids):
    """``(scale * P - taken * Q)+`` of target ids at a position."""
    p, q = pair(target, draft, at, scale, ids)
    return tl.maximum(p - taken * q, 0.0)
