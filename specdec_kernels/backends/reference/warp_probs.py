"""Reference of `warp_probs`."""

from __future__ import annotations

from torch import Tensor

from ...ops.arguments import WarpProbsArguments
from .law import make_law, make_params


def warp_probs(args: WarpProbsArguments) -> Tensor:
    """``[batch, n, vocab]`` to probabilities of the same shape."""
    return make_law(args.logits, make_params(args.logits.shape[0], args.logits, args.params)).probs
