"""What top-k, top-p and min-p leave of a row, for projects that want rows of logits back."""

from __future__ import annotations

from torch import Tensor

from ..ops.row_stats import row_stats
from ..sampling import SamplingParams


def is_cut(logits: Tensor, params: SamplingParams) -> Tensor:
    """``[rows, vocab]`` bool: the ids of each row of `logits` that `params` cut."""
    return logits < row_stats(logits, params).cutoff[:, None]
