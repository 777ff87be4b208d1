"""Ragged drafts laid end to end, and drafts of requests, laid out as a padded batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.arguments import VerifyChainArguments
from ...types import PLACEHOLDER_TOKEN_ID, Status
from .rows import named, slots_upto, with_rows


def padded(args: VerifyChainArguments) -> tuple[VerifyChainArguments, Tensor]:
    """The same step with one row for each segment, and the flags of bad segments. No segment is longer than all
    together, so rows are no wider than that, whatever the bound says; `widened` makes results as wide as the bound.

    Segment b's draft rows start at ``cu[b]`` and its target rows at ``cu[b] + b``, where its draft rows start too if
    there is one for the bonus. With bonus tokens its target rows start at ``cu[b]``.
    """
    cu, total = args.cu_num_draft_tokens, args.draft_tokens.shape[0]
    assert cu is not None
    width = min(args.num_draft, total)
    start, stop = cu[:-1].to(torch.int64), cu[1:].to(torch.int64)
    broken = (start < 0) | (stop < start) | (stop > total)  # no memory is read for such a segment
    loose = torch.zeros_like(broken)  # next to it are tokens of no sequence
    loose[:1] |= start[:1] != 0
    loose[-1:] |= stop[-1:] != total
    start, counts = torch.where(broken, 0, start), torch.where(broken, -1, stop - start)
    too_long = counts > args.num_draft
    counts = counts.clamp_max(width)
    given = counts if args.num_draft_tokens is None else args.num_draft_tokens.to(torch.int64)
    bad = broken | loose | too_long | (given < -1) | (given > counts)
    counts = torch.where(given < 0, -1, given.minimum(counts))
    order = slots_upto(counts.numel(), counts)

    def rows(packed: Tensor, first: Tensor, width: int) -> Tensor:
        if packed.shape[0] == 0:
            return packed.new_zeros(counts.numel(), width, *packed.shape[1:])
        return packed[(first[:, None] + slots_upto(width, first)).clamp(0, packed.shape[0] - 1)]

    extra, bonus = int(args.shared.law.cascade_bonus), int(args.bonus_tokens is None)
    shared = with_rows(
        args.shared,
        of_target=lambda packed: rows(packed, start + bonus * order, width + bonus),
        of_numbers=lambda packed: rows(packed, start + order, width + 1),
        of_draft=lambda packed: (
            rows(packed, start + extra * order, width + extra) if args.draft_index is None else packed
        ),
    )
    tokens = torch.where(
        slots_upto(width, start) < counts[:, None], rows(args.draft_tokens, start, width), PLACEHOLDER_TOKEN_ID
    )
    laid_out = args._replace(
        shared=shared, draft_tokens=tokens, num_draft_tokens=counts, cu_num_draft_tokens=None, num_draft=width
    )
    return laid_out, torch.where(bad, int(Status.BAD_PARAM), 0).to(torch.int32)


def widened(per_token: Tensor, width: int, value: float = PLACEHOLDER_TOKEN_ID) -> Tensor:
    """Results ``[batch, n]`` of a step that was `padded` as ``[batch, width]``, with `value` behind them."""
    return torch.nn.functional.pad(per_token, (0, width - per_token.shape[1]), value=value)


def indexed(args: VerifyChainArguments) -> tuple[VerifyChainArguments, Tensor]:
    """The same step with each sequence's own draft rows, and the flags of those with an invalid index: idle rows."""
    index, width = args.draft_index, args.num_draft + int(args.shared.law.cascade_bonus)
    given = args.shared.draft_logits if args.shared.draft_probs is None else args.shared.draft_probs
    assert index is not None and given is not None
    own, bad = named(given[:, :width], index)
    counts = torch.full_like(index, args.num_draft) if args.num_draft_tokens is None else args.num_draft_tokens
    shared = args.shared
    shared = shared._replace(draft_logits=own) if shared.draft_probs is None else shared._replace(draft_probs=own)
    laid_out = args._replace(shared=shared, draft_index=None, num_draft_tokens=torch.where(bad, -1, counts))
    return laid_out, torch.where(bad, int(Status.BAD_PARAM), 0).to(torch.int32)


def with_bonus_rows(args: VerifyChainArguments) -> VerifyChainArguments:
    """The same padded step with a row of the target for each bonus, where that is given: nothing looks at it."""
    if args.bonus_tokens is None:
        return args
    shared = args.shared
    logits = torch.nn.functional.pad(shared.target_logits, (0, 0, 0, 1))
    processors = shared.processors
    if processors is not None and processors[0] is not None:
        processors = [torch.nn.functional.pad(processors[0], (0, 0, 0, 1)), *processors[1:]]
    return args._replace(shared=shared._replace(target_logits=logits, processors=processors))
