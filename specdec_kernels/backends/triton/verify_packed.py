"""`verify_packed` as Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .verify import Call, Layout, verify


def verify_packed(
    target_logits: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, max_num_draft_tokens: int, *flat: Any
) -> tuple[Tensor, ...]:
    """As `verify_chain`; acceptance comes back as ``[batch, max_num_draft_tokens]``."""
    total = draft_tokens.shape[0]
    cu = cu_num_draft_tokens.contiguous()
    # no segment is longer than all of them: what is kept for each row is as wide as that, whatever the bound says
    layout = Layout(cu.numel() - 1, min(max_num_draft_tokens, total), cu, total)
    return verify(layout, max_num_draft_tokens, target_logits, draft_tokens, Call.of(flat))
