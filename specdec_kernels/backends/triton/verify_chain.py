"""`verify_chain` as Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .verify import Call, Layout, verify


def verify_chain(target_logits: Tensor, draft_tokens: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    """tokens ``[batch, num_draft + 1]``, num_accepted, num_tokens, status ``[batch]``, acceptance ``[batch,
    num_draft]``.
    """
    batch, num_draft = draft_tokens.shape
    layout = Layout(batch, num_draft, None, draft_tokens.numel())
    return verify(layout, num_draft, target_logits, draft_tokens, Call.of(flat))
