"""SGLang's verify step: softmax, sgl_kernel's renormalisation, then its chain kernel, or its tree kernels.

Greedy steps use sgl_kernel's tree kernel, for the chain too. The draft's probabilities were kept from drafting; a
one-hot draft gets rows of zeros and a one. Block verification is left out; of the tree rules, it has those that do not
need the distribution that children were drawn from.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..inputs import Case, ChainInputs, TreeInputs
from ..timing import Call

MODULES = ("sglang.kernels.ops.speculative.reject_sampling", "sglang.srt.speculative.reject_sampling")
KERNELS = "sgl_kernel"


def chain_kernel() -> Any:
    """``chain_speculative_sampling_triton``, wherever this version has it."""
    for name in MODULES:
        try:
            return importlib.import_module(name).chain_speculative_sampling_triton
        except ImportError:
            continue
    raise ImportError(f"chain_speculative_sampling_triton is in none of {', '.join(MODULES)}")


def probabilities(logits: Tensor, case: Case, kernels: Any) -> Tensor:
    """``[batch, n, vocab]`` logits to their distribution."""
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
        draft = step.dense_draft_probs(target)
        chain(
            **tree, uniform_samples=torch.rand(batch, slots, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device), target_probs=target,
            draft_probs=draft, threshold_single=1.0, threshold_acc=1.0, deterministic=True,
        )  # fmt: skip
        return predicted.view(batch, slots), accepted

    return call


def verify_tree(case: Case) -> Call | None:
    """Its "target only" rule, which draws a token after each node as "sample" does, and the greedy rule."""
    if case.acceptance not in ("sample", "greedy"):
        return None
    kernels = importlib.import_module(KERNELS)
    batch, slots, device = case.batch, case.num_draft + 1, case.device
    index = torch.arange(batch * slots, device=device).view(batch, slots)

    def call(step: TreeInputs) -> object:
        tree, predicted = step.tree, torch.full((batch * slots,), -1, dtype=torch.int32, device=device)
        accepted_at = torch.full((batch, tree.max_depth + 1), -1, dtype=torch.int32, device=device)
        accepted = torch.empty(batch, dtype=torch.int32, device=device)
        given = {
            "predicts": predicted, "accept_index": accepted_at, "accept_token_num": accepted,
            "candidates": step.node_tokens, "retrive_index": index,
            "retrive_next_token": tree.first_child.repeat(batch, 1),
            "retrive_next_sibling": tree.next_sibling.repeat(batch, 1),
        }  # fmt: skip
        if case.greedy:
            kernels.verify_tree_greedy(**given, target_predict=step.target_logits.argmax(-1))
        else:
            target = probabilities(step.target_logits, case, kernels)
            kernels.tree_speculative_sampling_target_only(
                **given, uniform_samples=torch.rand(batch, slots, device=device),
                uniform_samples_for_final_sampling=torch.rand(batch, device=device), target_probs=target,
                draft_probs=torch.zeros_like(target), threshold_single=1.0, threshold_acc=1.0, deterministic=True,
            )  # fmt: skip
        tokens = predicted[accepted_at.clamp_min(0).long()]
        return tokens.masked_fill(accepted_at < 0, -1), accepted

    return call


BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {"verify_chain": verify_chain, "verify_tree": verify_tree}
