"""Reference of `row_stats`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import RowStatsArguments
from .law import RowLaws, make_law, make_params, raw_entropies, row_status
from .processors import processed


def row_stats(args: RowStatsArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to values ``[batch, n, 6]``, argmax and status ``[batch, n]``."""
    logits, flags = processed(args.logits, args.processors)
    valid = make_params(logits.shape[0], logits, args.params, flags)
    law = make_law(logits, valid)
    return stat_values(law, raw_entropies(logits)), law.argmax, row_status(logits, valid)


def stat_values(law: RowLaws, raw: tuple[Tensor, Tensor] | None) -> Tensor:
    """``[batch, n, 6]``, as `RowStats` has them; −inf where the raw laws' are not asked for."""
    missing = torch.full_like(law.maximum, -math.inf)
    return torch.stack([
        law.maximum, law.cutoff, law.log_normalizer, law.normalizer, *(raw or (missing, missing)),
    ], -1)  # fmt: skip
