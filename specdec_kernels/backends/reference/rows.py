"""Rows of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...ops.arguments import VerifyArguments
from ...types import PLACEHOLDER_TOKEN_ID


def slots_upto(n: int, like: Tensor) -> Tensor:
    """0 … n − 1."""
    return torch.arange(n, device=like.device)


def at(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[b, index[b]]`` for each sequence b; `rows` is ``[batch, n]`` or ``[batch, n, vocab]``."""
    index = index[:, None] if rows.dim() == 2 else index[:, None, None].expand(-1, 1, rows.shape[-1])
    return rows.gather(1, index)[:, 0]


def named(rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``rows[index[b]]`` of each sequence b, and whether its index is out of range; the rows are arbitrary then."""
    none = (index < 0) | (index >= rows.shape[0])
    if rows.shape[0] == 0:
        return rows.new_zeros(index.numel(), *rows.shape[1:]), none
    return rows[index.long().clamp(0, rows.shape[0] - 1)], none


def laid_out(draft: Tensor, accepted: Tensor, final: Tensor, num_tokens: Tensor) -> Tensor:
    """The tokens ``[batch, n + 1]`` of a step: those of `draft` ``[batch, n]`` that were accepted, then `final`, of all
    these the first `num_tokens`, then −1; ``[batch]`` each.
    """
    slots = slots_upto(draft.shape[1] + 1, draft)
    tokens = torch.where(slots == accepted[:, None], final[:, None], torch.nn.functional.pad(draft, (0, 1)))
    return torch.where(slots < num_tokens[:, None], tokens, PLACEHOLDER_TOKEN_ID)


def with_rows(
    args: VerifyArguments, of_target: Callable[[Tensor], Tensor], of_draft: Callable[[Tensor], Tensor],
    of_numbers: Callable[[Tensor], Tensor] | None = None,
) -> VerifyArguments:  # fmt: skip
    """The same arguments with other rows: `of_target` makes them of tensors that have the target's rows, `of_draft` of
    those that have the draft's, `of_numbers` of random numbers (None: as of the target's).
    """

    def target(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else of_target(rows)

    def draft(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else of_draft(rows)

    def numbers(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else (of_numbers or of_target)(rows)

    processors = args.processors
    return args._replace(
        processors=None if processors is None else [target(processors[0]), *processors[1:]],
        target_logits=of_target(args.target_logits), uniform_samples=numbers(args.uniform_samples),
        noise_keys=numbers(args.noise_keys), positions=numbers(args.positions),
        draft_logits=draft(args.draft_logits), draft_probs=draft(args.draft_probs),
        draft_values=draft(args.draft_values), draft_argmax=draft(args.draft_argmax),
        draft_status=draft(args.draft_status),
    )  # fmt: skip
