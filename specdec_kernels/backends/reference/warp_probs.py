"""Reference of `warp_probs`."""

from __future__ import annotations

from torch import Tensor

from ...ops.arguments import WarpProbsArguments
from .law import make_law, make_params
from .processors import processed


def warp_probs(args: WarpProbsArguments) -> Tensor:
    """``[batch, n, vocab]`` to probabilities of the same shape."""
    logits, flags = processed(args.logits, args.processors)
    return make_law(logits, make_params(logits.shape[0], logits, args.params, flags)).probs
