"""Reference of `verify_packed`: `verify_chain` of ragged drafts."""

from __future__ import annotations

from torch import Tensor

from .arguments import chain_arguments
from .verify_chain import verify


def verify_packed(
    target_logits: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, max_num_draft_tokens: int, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `verify_chain`; acceptance comes back as ``[batch, max_num_draft_tokens]``."""
    return verify(chain_arguments(target_logits, draft_tokens, cu_num_draft_tokens, max_num_draft_tokens, *rest))
