"""Reference of `verify_packed`: the segments laid out as a padded batch, then the chain's reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types import PLACEHOLDER_TOKEN_ID, Status
from .verify_chain import verify_chain


def verify_packed(
    target_logits: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, max_num_draft_tokens: int,
    draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, acceptance: int, return_acceptance: bool,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `verify_chain`; acceptance comes back as ``[batch, max_num_draft_tokens]``."""
    width, total = max_num_draft_tokens, draft_tokens.shape[0]
    start, stop = cu_num_draft_tokens[:-1].to(torch.int64), cu_num_draft_tokens[1:].to(torch.int64)
    broken = (start < 0) | (stop < start) | (stop > total)  # no memory is read for such a segment
    start, counts = torch.where(broken, 0, start), torch.where(broken, -1, stop - start)
    too_long = counts > width
    counts = counts.clamp_max(width)
    given = counts if num_draft_tokens is None else num_draft_tokens.to(torch.int64)
    bad = broken | too_long | (given < -1) | (given > counts)
    counts = torch.where(given < 0, -1, given.minimum(counts))
    order = torch.arange(counts.numel(), device=start.device)

    def padded(
        rows: Tensor | None, start: Tensor, width: int, counts: Tensor, fill: int | None = None
    ) -> Tensor | None:
        if rows is None:
            return None
        columns = torch.arange(width, device=start.device)
        index = (start[:, None] + columns).clamp(0, max(rows.shape[0] - 1, 0))
        if rows.shape[0] == 0:
            return rows.new_zeros(counts.numel(), width, *rows.shape[1:])
        out = rows[index]
        return out if fill is None else torch.where(columns < counts[:, None], out, fill)

    tokens = padded(draft_tokens, start, width, counts, PLACEHOLDER_TOKEN_ID)
    draft = (draft_logits, draft_probs, draft_values, draft_argmax, draft_status)
    extra = int(cascade_bonus)
    drafted = [padded(t, start + extra * order, width + extra, counts) for t in draft]
    scored = [padded(t, start + order, width + 1, counts) for t in (target_logits, uniform_samples, noise_keys)]
    out = verify_chain(
        scored[0], tokens, *drafted, scored[1], scored[2], target_to_draft, counts, eos_token_ids,  # type: ignore[arg-type]
        acceptance, return_acceptance, law, law_variant, law_alpha, law_beta, cascade_bonus, *params,
    )  # fmt: skip
    status = out[3] | torch.where(bad, int(Status.BAD_PARAM), 0).to(torch.int32)
    return out[0], out[1], out[2], status, out[4]
