"""`row_stats` as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from ...ops.arguments import RowStatsArguments
from .bundles import Layout, rows_of
from .law import find_laws
from .processors import with_processors


def row_stats(args: RowStatsArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to values ``[batch, n, 6]``, argmax and status ``[batch, n]``."""
    logits, params, processors = args
    batch, n, _ = logits.shape
    rows = with_processors(rows_of(logits), Layout(batch, 0, None, 0), n, processors)
    found = find_laws(rows, batch, n, params, values=True, raw=True, logarithm=True)
    assert found.values is not None and found.target.laws.argmax is not None
    return found.values, found.target.laws.argmax, found.target.laws.status
