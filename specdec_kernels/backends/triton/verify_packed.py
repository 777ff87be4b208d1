"""`verify_packed` as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from .verify import Layout, verify


def verify_packed(
    target_logits: Tensor, draft_tokens: Tensor, cu_num_draft_tokens: Tensor, max_num_draft_tokens: int,
    draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, acceptance: int, return_acceptance: bool,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `verify_chain`; acceptance comes back as ``[batch, max_num_draft_tokens]``."""
    total = draft_tokens.shape[0]
    cu = cu_num_draft_tokens.contiguous()
    # no segment is longer than all of them: what is kept for each row is as wide as that, whatever the bound says
    layout = Layout(cu.numel() - 1, min(max_num_draft_tokens, total), cu, total)
    return verify(
        layout, max_num_draft_tokens, target_logits, draft_tokens, draft_logits, draft_probs, draft_values,
        draft_argmax, draft_status, uniform_samples, noise_keys, target_to_draft, num_draft_tokens, eos_token_ids,
        acceptance, return_acceptance, law, law_variant, law_alpha, law_beta, cascade_bonus, *params,
    )  # fmt: skip
