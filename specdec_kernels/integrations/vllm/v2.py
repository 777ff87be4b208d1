"""vLLM's V2 model runner: `rejection_sample`, and the draft's noise.

vLLM keys a request's random numbers by its seed and the position alone. Where a block was cut short, the positions
after the cut are drafted and verified again, with the numbers that had a part in the cut. The token rule stays exact
under that; block verification does not (its output is off: by 0.027 in total variation in the case of docs/audit.md).
Here the numbers are keyed by the block's first position as well: every block emits a token, so that no two blocks of a
request begin at the same one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops.verify_packed import verify_packed
from ...sampling import SamplingParams
from ...types import TokenMap
from .replacing import is_unknown, replace

FOLDER = "vllm.v1.worker.gpu.spec_decode"
VERIFY = ("rejection_sampler_utils", "rejection_sampler")
"""The module of `rejection_sample`, and one that uses it under a name of its own."""
DRAW_DRAFTS = ("speculator", "dspark.speculator")
"""The modules whose drafts `gumbel_sample` draws."""


def patch() -> None:
    """Patch the modules of vLLM that the V2 runner verifies and drafts with."""
    for name in VERIFY:
        replace(importlib.import_module(f"{FOLDER}.{name}"), "rejection_sample", make_rejection_sample)
    for name in DRAW_DRAFTS:
        replace(importlib.import_module(f"{FOLDER}.{name}"), "gumbel_sample", make_gumbel_sample)


def make_rejection_sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``rejection_sample``: ``(sampled [batch, K + 1] int64, num_sampled [batch] int32)``, −1 after the last token.

    The target's logits have been cut and divided by the temperature; the draft's, ``[max_reqs, K, vocab_draft]``, are
    those of the draft model, and are read where they are. Synthetic acceptance, FLy, watermarks and arguments that a
    version has after these are left to `stock`.
    """

    def rejection_sample(
        target_logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
        idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor,
        seed: Tensor, num_speculative_steps: int, synthetic_conditional_rates: Tensor | None = None,
        use_fp64: bool = False, use_block_verification: bool = False, contexts: Tensor | None = None, *more: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if is_unknown((synthetic_conditional_rates, contexts, *more), options):
            return stock(
                target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
                expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates, use_fp64,
                use_block_verification, contexts, *more, **options,
            )  # fmt: skip
        batch, device = len(idx_mapping), target_logits.device
        cu = (cu_num_logits - torch.arange(batch + 1, device=device)).to(torch.int32)
        # The rows that hold a draft token are all but the first of a segment.
        drafted = torch.arange(len(target_logits) - batch, device=device, dtype=torch.int32)
        drafted = drafted + 1 + torch.searchsorted(cu[1:].contiguous(), drafted, right=True)
        drafted = drafted.clamp(max=len(target_logits) - 1)  # rows after the last segment belong to no request
        token_map = None
        if draft_logits is not None:
            vocab = target_logits.shape[1]
            draft_logits = draft_logits[..., :vocab]
            if draft_logits.shape[-1] < vocab:
                token_map = _first_ids(draft_logits.shape[-1], device)
        temperatures = temperature[idx_mapping]
        out = verify_packed(
            target_logits, draft_sampled[drafted], draft_logits, draft_token_map=token_map,
            draft_index=None if draft_logits is None else idx_mapping,
            cu_num_draft_tokens=cu, max_num_draft_tokens=num_speculative_steps,
            seeds=seed[idx_mapping], step=pos[cu_num_logits[:-1].long()].long(),
            params=SamplingParams(temperature=(temperatures != 0).float()),
            draft_params=SamplingParams(temperature=temperatures),
            acceptance="block" if use_block_verification else "token",
        )  # fmt: skip
        return out.tokens, out.num_tokens

    return rejection_sample


@lru_cache
def _first_ids(count: int, device: torch.device) -> TokenMap:
    """The ids of a draft's narrower vocabulary; made once, as that waits for the device."""
    return TokenMap(torch.arange(count, device=device))


def make_gumbel_sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``gumbel_sample``, with fresh noise for a drafted token whenever it is drafted anew.

    For a drafted token, `pos` is the position before it and `logits_cache_col` its place in the block.
    """

    def gumbel_sample(
        logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, seed: Tensor, pos: Tensor,
        apply_temperature: bool, is_drafting: bool, logits_cache: Tensor | None = None,
        logits_cache_col: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if is_drafting and logits_cache is not None and logits_cache_col is not None:
            pos = (pos - logits_cache_col) * logits_cache.shape[1] + logits_cache_col
        return stock(
            logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, logits_cache,
            logits_cache_col, **options,
        )  # fmt: skip

    return gumbel_sample
