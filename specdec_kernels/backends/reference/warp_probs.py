"""Reference of `warp_probs`."""

from __future__ import annotations

from torch import Tensor

from ...sampling import FlatParams
from .law import make_law, make_params


def warp_probs(logits: Tensor, *params: object) -> Tensor:
    """``[batch, n, vocab]`` to probabilities of the same shape."""
    return make_law(logits, make_params(logits.shape[0], logits, FlatParams(*params))).probs  # type: ignore[arg-type]
