"""FlashInfer: its softmax, its top-k and top-p renormalisation, its chain kernel; its own samplers.

As in an engine built on it, the draft's probabilities were kept from drafting. Seed and offset are tensors: an int
would come from the host's generator and be baked into a captured graph. It has no block verification and always needs
the draft's probabilities; for a one-hot draft these are rows of zeros and a one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..inputs import Case, ChainInputs, RowInputs
from ..timing import Call

MODULE = "flashinfer.sampling"


def probabilities(sampling: Any, logits: Tensor, case: Case) -> Tensor:
    """``[batch, n, vocab]`` logits to their distribution, float32, by the kernels of module `sampling`."""
    params = case.params
    rows = sampling.softmax(logits.float().flatten(0, 1), temperature=float(params.temperature))
    if 0 < params.top_k < case.vocab:
        rows = sampling.top_k_renorm_probs(rows, int(params.top_k))
    if params.top_p < 1:
        rows = sampling.top_p_renorm_probs(rows, float(params.top_p))
    return rows.view(logits.shape)


def verify_chain(case: Case) -> Call | None:
    if case.acceptance == "block" or case.greedy:
        return None
    sampling = importlib.import_module(MODULE)
    offset = torch.zeros(1, dtype=torch.int64, device=case.device)

    def call(step: ChainInputs) -> object:
        target = probabilities(sampling, step.target_logits, case)
        draft = step.dense_draft_probs(target)
        tokens, _, emitted = sampling.chain_speculative_sampling(
            draft, step.draft_tokens.int(), target, seed=step.seeds[:1], offset=offset
        )
        return tokens, emitted

    return call


def sample(case: Case) -> Call | None:
    if case.greedy:
        return None
    sampling, params = importlib.import_module(MODULE), case.params
    offset = torch.zeros(1, dtype=torch.int64, device=case.device)

    def call(rows: RowInputs) -> object:
        numbers = {"seed": rows.seeds[:1], "offset": offset}
        if params.top_k > 0 or params.top_p < 1:
            scores = rows.named().float().flatten(0, 1)
            probs = sampling.softmax(scores, temperature=float(params.temperature))
            return sampling.top_k_top_p_sampling_from_probs(probs, int(params.top_k), float(params.top_p), **numbers)
        index = None if rows.row_index is None else rows.row_index.int()
        return sampling.sampling_from_logits(rows.logits.flatten(0, 1), indices=index, **numbers)

    return call


def warp_probs(case: Case) -> Call | None:
    sampling = importlib.import_module(MODULE)
    return lambda rows: probabilities(sampling, rows.logits, case)


BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {
    "verify_chain": verify_chain,
    "sample": sample,
    "warp_probs": warp_probs,
}
