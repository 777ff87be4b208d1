"""Reference of `count_tokens_`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.arguments import CountTokensArguments
from ...types import NO_ID, Status, writing_to
from .processors import flagged_lists
from .rows import slots_upto


def count_tokens_(args: CountTokensArguments) -> Tensor:
    """Merge lists and tokens by sorting both together; the status ``[batch]``."""
    ids, counts, num_output, tokens, num_tokens = args
    capacity = ids.shape[1]
    _, status = flagged_lists(ids)
    good = (status == 0)[:, None]
    new = good & (tokens >= 0) & (tokens < NO_ID)
    if num_tokens is not None:
        new &= slots_upto(tokens.shape[1], tokens) < num_tokens[:, None]
    merged, order = torch.cat([ids, torch.where(new, tokens, NO_ID).to(torch.int32)], 1).sort(stable=True)
    times = torch.cat([counts, 2 * new.to(torch.int32)], 1).gather(1, order)
    slot = torch.nn.functional.pad(merged[:, 1:] != merged[:, :-1], (1, 0))[:, : merged.shape[1]].cumsum(1)
    distinct, left_out = torch.full_like(merged, NO_ID).scatter(1, slot, merged).tensor_split((capacity,), 1)
    total = torch.zeros_like(times).scatter_add(1, slot, times)[:, :capacity]
    total = torch.where(distinct == NO_ID, counts, total)  # what follows the last id stays
    with writing_to(ids):
        ids.copy_(torch.where(good, distinct, ids))
        counts.copy_(torch.where(good, total, counts))
        num_output += new.sum(1).to(torch.int32)
    return torch.where(good[:, 0] & (left_out != NO_ID).any(1), int(Status.BAD_PARAM), status)
