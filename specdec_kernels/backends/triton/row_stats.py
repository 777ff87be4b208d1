"""`row_stats` as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from .law import Rows, find_laws


def row_stats(logits: Tensor, raw: bool, *params: object) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to values ``[batch, n, 6]``, argmax and status ``[batch, n]``."""
    batch, n, _ = logits.shape
    found = find_laws(Rows(logits, batch, n, *logits.stride()[:2]), params, values=True, raw=raw)
    assert found.values is not None
    return found.values, found.argmax, found.status
