"""`verify_chain` as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from .verify import Layout, verify


def verify_chain(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, acceptance: int, return_acceptance: bool,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """tokens ``[batch, num_draft + 1]``, num_accepted, num_tokens, status ``[batch]``, acceptance ``[batch,
    num_draft]``.
    """
    batch, num_draft = draft_tokens.shape
    return verify(
        Layout(batch, num_draft, None, draft_tokens.numel()), num_draft, target_logits, draft_tokens, draft_logits,
        draft_probs, draft_values, draft_argmax, draft_status, uniform_samples, noise_keys, target_to_draft,
        num_draft_tokens, eos_token_ids, acceptance, return_acceptance, law, law_variant, law_alpha, law_beta,
        cascade_bonus, *params,
    )  # fmt: skip
