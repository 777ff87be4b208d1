"""Reference of `mask_logits_`."""

from __future__ import annotations

import math

from torch import Tensor

from ...ops.arguments import MaskLogitsArguments
from ...types import writing_to
from .law import make_law, make_params, row_status


def mask_logits_(args: MaskLogitsArguments) -> Tensor:
    """The status ``[batch, n]``."""
    logits, params = args
    valid = make_params(logits.shape[0], logits, params)
    status = row_status(logits, valid)
    with writing_to(logits):
        logits.masked_fill_(logits < make_law(logits, valid).cutoff[..., None], -math.inf)
    return status
