"""From what a rule read to the status of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.arguments import VerifyArguments
from ...types import Status
from .draft import draft_status
from .law import Params, row_status


class Reads(NamedTuple):
    """Which rows and uniforms a rule could not do without, ``[batch, n]`` bool each."""

    target: Tensor
    draft: Tensor  # may have columns more than there are draft rows
    coins: Tensor  # columns of `uniform_samples`


def flags_of(reads: Reads, args: VerifyArguments, params: Params, draft_params: Params) -> Tensor:
    """The flags ``[batch]`` of what was read, and of nothing else."""
    of_target, of_draft = row_status(args.target_logits, params), draft_status(args, draft_params)
    return flags_read(reads, of_target, of_draft, args.uniform_samples)


def flags_read(reads: Reads, of_target: Tensor, of_draft: Tensor | None, uniform_samples: Tensor | None) -> Tensor:
    """The same, given the flags ``[batch, n]`` of the rows."""
    flags = any_flag(of_target, reads.target)
    if of_draft is not None:
        flags = flags | any_flag(of_draft, reads.draft[:, : of_draft.shape[1]])
    if uniform_samples is not None:
        flags = flags | any_flag(bad_uniforms(uniform_samples), reads.coins)
    return flags


def any_flag(flags: Tensor, where: Tensor) -> Tensor:
    """The OR over the last dimension of `flags` where `where`."""
    flags = torch.where(where, flags, 0)
    bits = [((flags & int(s)) != 0).any(-1) * int(s) for s in Status if s]
    return torch.stack(bits, -1).sum(-1)


def bad_uniforms(uniform_samples: Tensor) -> Tensor:
    """`Status.BAD_PARAM` for what is not in [0, 1)."""
    good = (uniform_samples >= 0) & (uniform_samples < 1)
    return torch.where(good, 0, int(Status.BAD_PARAM)).to(torch.int32)


def clean_uniforms(uniform_samples: Tensor) -> Tensor:
    """In float64, 0 for what is not in [0, 1)."""
    return uniform_samples.double().masked_fill(bad_uniforms(uniform_samples) != 0, 0.0)
