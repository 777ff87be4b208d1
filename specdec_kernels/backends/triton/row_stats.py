"""`row_stats` as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from ...ops.arguments import RowStatsArguments
from .bundles import rows_of
from .law import find_laws


def row_stats(args: RowStatsArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to values ``[batch, n, 6]``, argmax and status ``[batch, n]``."""
    logits, params = args
    batch, n, _ = logits.shape
    found = find_laws(rows_of(logits), batch, n, params, values=True, raw=True)
    assert found.values is not None and found.target.laws.argmax is not None
    return found.values, found.target.laws.argmax, found.target.laws.status
