"""Reference of `row_stats`."""

from __future__ import annotations

import math

from torch import Tensor

from .law import make_law, make_params


def row_stats(logits: Tensor, raw: bool, *params: object) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to values ``[batch, n, 6]``, argmax and status ``[batch, n]``."""
    law = make_law(logits, make_params(logits.shape[0], logits, *params))  # type: ignore[arg-type]
    if not raw:
        law.values[..., 4:] = -math.inf
    return law.values, law.argmax, law.status
