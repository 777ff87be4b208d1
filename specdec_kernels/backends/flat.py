"""Temporary: the flat calls of the Python backends' present entries."""

from __future__ import annotations

import importlib
from typing import Any


def call(backend: str, op: str, a: Any) -> Any:
    def entry(name: str) -> Any:
        return getattr(importlib.import_module(f"specdec_kernels.backends.{backend}.{name}"), name)

    if op in ("uniform_samples", "noise_keys", "gather_kv_"):
        return entry(op)(*a)
    if op == "row_stats":
        return entry(op)(a.logits, a.raw, *a.params)
    if op == "warp_probs":
        return entry(op)(a.logits, *a.params)
    if op == "sample":
        return a.rowwise(
            lambda b: entry(op)(b.logits, b.uniform_samples, b.noise_keys, b.num_samples, b.draft_to_target, *b.params)
        )
    s = a.shared
    draft = (s.draft_logits, s.draft_probs, s.draft_values, s.draft_argmax, s.draft_status)
    noise = (s.uniform_samples, s.noise_keys, s.target_to_draft)
    rest = (*s.law, *s.params, *s.draft_params)
    if op == "verify_tree":
        return entry(op)(
            s.target_logits, a.node_tokens, a.parents, a.first_child, a.next_sibling, a.tree_status, a.max_depth,
            *draft, *noise, s.eos_token_ids, a.acceptance, a.epsilon, a.delta, *rest,
        )  # fmt: skip
    shared = (*draft, *noise, a.num_draft_tokens, s.eos_token_ids, a.acceptance, a.return_acceptance, *rest)
    if a.cu_num_draft_tokens is None:
        return entry(op)(s.target_logits, a.draft_tokens, *shared)
    return entry("verify_packed")(s.target_logits, a.draft_tokens, a.cu_num_draft_tokens, a.num_draft, *shared)
