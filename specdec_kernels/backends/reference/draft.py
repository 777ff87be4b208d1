"""The draft's laws Q, over target ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import VerifyArguments
from ...types import Status
from .law import Params, exp, make_law, row_status
from .rows import slots_upto


def draft_probs(args: VerifyArguments, params: Params) -> Tensor:
    """Q ``[batch, n, vocab]``: the given probabilities, or from logits with the stats kept from drafting, or anew."""
    vocab = args.target_logits.shape[-1]
    if args.draft_probs is not None:
        return onto_target(args.draft_probs.masked_fill(~(args.draft_probs >= 0), 0.0), args.target_to_draft, vocab)
    assert args.draft_logits is not None
    if args.draft_values is None or args.draft_argmax is None:
        return onto_target(make_law(args.draft_logits, params).probs, args.target_to_draft, vocab)
    probs = probs_from_stats(args.draft_logits, args.draft_values, args.draft_argmax, params)
    return onto_target(probs, args.target_to_draft, vocab)


def draft_status(args: VerifyArguments, params: Params) -> Tensor | None:
    """The flags of the draft's rows ``[batch, n]``; None: it has none."""
    if args.draft_probs is not None:
        return torch.where(args.draft_probs.isnan().any(-1), int(Status.NAN), 0)
    if args.draft_logits is None or args.draft_status is not None:
        return args.draft_status
    return row_status(args.draft_logits, params)


def probs_from_stats(logits: Tensor, values: Tensor, argmax: Tensor, params: Params) -> Tensor:
    """The law that `values` and `argmax` describe, by the formula in `RowStats`."""
    maximum, cutoff, normalizer = values[..., 0:1], values[..., 1:2], values[..., 3:4]
    x = logits.to(values.dtype)
    weights = exp((x - maximum) * params.inverse_temperature[..., None])
    kept = (x >= cutoff) & (x > -math.inf)
    hot = slots_upto(x.shape[-1], x) == argmax[..., None]
    one_hot = params.greedy[..., None] | maximum.isinf()
    return torch.where(one_hot, hot.to(x.dtype), torch.where(kept, weights / normalizer, 0.0))


def onto_target(probs: Tensor, target_to_draft: Tensor | None, vocab: int) -> Tensor:
    """Draft probabilities over target ids: 0 where an id is not in the draft's vocabulary."""
    if target_to_draft is None:
        return probs
    index = torch.nn.functional.pad(target_to_draft, (0, vocab - target_to_draft.numel()), value=-1)
    return torch.where(index >= 0, probs[..., index.clamp_min(0)], 0.0)
