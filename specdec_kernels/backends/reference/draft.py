"""The draft's laws Q, over target ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import VerifyArguments
from ...types import Status
from .law import SLACK, Params, exp, make_law, row_status, tile_sum
from .rows import slots_upto


def draft_probs(args: VerifyArguments, params: Params) -> Tensor:
    """Q ``[batch, n, vocab]``: the given probabilities, or from logits with the stats kept from drafting, or anew; 0 in
    rows that are no distribution.
    """
    if args.draft_probs is not None:
        probs = args.draft_probs
    elif args.draft_values is not None and args.draft_argmax is not None:
        assert args.draft_logits is not None
        probs = probs_from_stats(args.draft_logits, args.draft_values, args.draft_argmax, params)
    else:
        assert args.draft_logits is not None
        probs = make_law(args.draft_logits, params).probs
    bad = bad_rows(args, params)
    if bad is not None:
        probs = probs.masked_fill(bad[..., None], 0.0).clamp_min(0.0)
    return onto_target(probs, args.target_to_draft, args.target_logits.shape[-1])


def can_give(q: Tensor) -> Tensor:
    """Whether a token of probability `q` can have been drawn."""
    return (q > 0) & (q <= 1 + SLACK)


def bad_rows(args: VerifyArguments, params: Params) -> Tensor | None:
    """Rows of probabilities, or of stats, that are no distribution ``[batch, n]`` bool; None: they are made here."""
    if args.draft_probs is not None:
        probs = args.draft_probs
        negative = ((probs < 0) & (probs > -math.inf)).any(-1)  # −inf counts as 0, which the kernels cannot tell apart
        total = tile_sum(probs.clamp_min(0.0))
        return negative | ~((total - 1).abs() <= SLACK)
    values, argmax = args.draft_values, args.draft_argmax
    if values is None or argmax is None:
        return None
    assert args.draft_logits is not None
    vocab = args.draft_logits.shape[-1]
    maximum, cutoff, normalizer = values[..., 0], values[..., 1], values[..., 3]
    certain = ~maximum.isnan() & (argmax >= 0) & (argmax < vocab)
    spread = (cutoff <= maximum) & (normalizer >= 1 - SLACK) & (normalizer <= (1 + SLACK) * vocab)
    return ~torch.where(params.greedy | maximum.isinf(), certain, spread)


def draft_status(args: VerifyArguments, params: Params) -> Tensor | None:
    """The flags of the draft's rows ``[batch, n]``; None: it has none."""
    bad = bad_rows(args, params)
    if bad is None:
        return None if args.draft_logits is None else row_status(args.draft_logits, params)
    of_rows = args.draft_status
    if args.draft_probs is not None:
        of_rows = torch.where(args.draft_probs.isnan().any(-1), int(Status.NAN), 0)
    assert of_rows is not None
    return of_rows | torch.where(bad, int(Status.BAD_DRAFT), 0)


def probs_from_stats(logits: Tensor, values: Tensor, argmax: Tensor, params: Params) -> Tensor:
    """The law that `values` and `argmax` describe, by the formula in `RowStats`."""
    maximum, cutoff, normalizer = values[..., 0:1], values[..., 1:2], values[..., 3:4]
    x = logits.to(values.dtype)
    # Stats of another row may claim a max that is too small: infinite weights would make NaN of all that follows.
    weights = exp(((x - maximum) * params.inverse_temperature[..., None]).clamp_max(88.0))
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
