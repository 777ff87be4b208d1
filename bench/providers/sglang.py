"""SGLang's verify step on a chain: softmax, sgl_kernel's renormalisation, then its chain kernel.

Greedy steps take sgl_kernel's tree kernel on the chain. The draft's probabilities were kept from drafting; a one-hot
draft gets rows of zeros and a one. Block verification is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..inputs import Case, ChainInputs
from ..timing import Call

MODULES = ("sglang.kernels.ops.speculative.reject_sampling", "sglang.srt.speculative.reject_sampling")
KERNELS = "sgl_kernel"


def chain_kernel() -> Any:
    """``chain_speculative_sampling_triton``, wherever this version keeps it."""
    for name in MODULES:
        try:
            return importlib.import_module(name).chain_speculative_sampling_triton
        except ImportError:
            continue
    raise ImportError(f"chain_speculative_sampling_triton is in none of {', '.join(MODULES)}")


def probabilities(logits: Tensor, case: Case, kernels: Any) -> Tensor:
    """``[batch, n, vocab]`` logits to their law."""
    params = case.params
    rows = torch.softmax(logits.float().flatten(0, 1) / params.temperature, -1)
    if params.top_k > 0:
        top_k = torch.full((rows.shape[0],), int(params.top_k), dtype=torch.int32, device=rows.device)
        rows = kernels.top_k_renorm_prob(rows, top_k)
    if params.top_p < 1:
        rows = kernels.top_p_renorm_prob(rows, torch.full((rows.shape[0],), float(params.top_p), device=rows.device))
    return rows.view(logits.shape)


def verify_chain(case: Case) -> Call | None:
    if case.acceptance == "block":
        return None
    cut = case.params.top_k > 0 or case.params.top_p < 1
    kernels = importlib.import_module(KERNELS) if case.greedy or cut else None
    batch, slots, device = case.batch, case.num_draft + 1, case.device
    index = torch.arange(batch * slots, device=device).view(batch, slots)
    following = torch.arange(1, slots + 1, device=device).repeat(batch, 1)
    following[:, -1] = -1
    sibling = torch.full_like(following, -1)
    chain = None if case.greedy else chain_kernel()

    def call(step: ChainInputs) -> object:
        candidates = torch.nn.functional.pad(step.draft_tokens, (1, 0))
        predicted = torch.full((batch * slots,), -1, dtype=torch.int32, device=device)
        accepted_at = torch.full((batch, slots), -1, dtype=torch.int32, device=device)
        accepted = torch.empty(batch, dtype=torch.int32, device=device)
        tree = {
            "predicts": predicted, "accept_index": accepted_at, "accept_token_num": accepted, "candidates": candidates,
            "retrive_index": index, "retrive_next_token": following, "retrive_next_sibling": sibling,
        }  # fmt: skip
        if chain is None:
            assert kernels is not None
            kernels.verify_tree_greedy(**tree, target_predict=step.target_logits.argmax(-1))
            return predicted.view(batch, slots), accepted
        target = probabilities(step.target_logits, case, kernels)
        draft = step.draft_probs
        if draft is None:
            draft = torch.zeros_like(target[:, :-1]).scatter_(-1, step.draft_tokens[..., None], 1.0)
        chain(
            **tree, uniform_samples=torch.rand(batch, slots, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device), target_probs=target,
            draft_probs=draft, threshold_single=1.0, threshold_acc=1.0, deterministic=True,
        )  # fmt: skip
        return predicted.view(batch, slots), accepted

    return call


BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {"verify_chain": verify_chain}
