"""vLLM's two pipelines, from the step's raw logits to tokens, with what its engine keeps from drafting.

V1: the rows are split into those of draft tokens and the bonus rows, made float32 and cut by its own functions; the
bonus is drawn by exponentials; then come the rejection kernels with the draft's probabilities. V2: the rejection
kernels read logits, the target's after temperature and cuts, the draft's as they were kept; slots after the last token
are undefined.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..inputs import Case, ChainInputs
from ..timing import Call
from . import eager

V1 = "vllm.v1.sample.rejection_sampler"
V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
CUT = "vllm.v1.sample.ops.topk_topp_sampler"


def whole(case: Case, value: float, dtype: torch.dtype, length: int | None = None) -> Tensor:
    """`value` for each sequence of the batch, or `length` times."""
    return torch.full((case.batch if length is None else length,), value, dtype=dtype, device=case.device)


def cuts(case: Case, length: int) -> tuple[Tensor | None, Tensor | None]:
    """top-k and top-p for `length` rows, None if nothing is cut."""
    k = whole(case, int(case.params.top_k), torch.int32, length) if case.params.top_k > 0 else None
    p = whole(case, float(case.params.top_p), torch.float32, length) if case.params.top_p < 1 else None
    return k, p


def v1_chain(case: Case) -> Call | None:
    if case.acceptance == "block":
        return None
    module, cut = importlib.import_module(V1), importlib.import_module(CUT).apply_top_k_top_p
    batch, k, vocab = case.batch, case.num_draft, case.vocab
    lengths = [k] * batch
    cu = torch.arange(1, batch + 1, dtype=torch.int32, device=case.device) * k
    top_k, top_p = cuts(case, batch)
    metadata = SimpleNamespace(
        all_greedy=case.greedy, all_random=not case.greedy, generators={}, top_k=top_k, top_p=top_p,
        temperature=None if case.greedy else whole(case, float(case.params.temperature), torch.float32),
    )  # fmt: skip
    # Older versions take probabilities where newer ones take logits after the cuts.
    takes_probs = "target_probs" in inspect.signature(module.rejection_sample).parameters
    prepare: Any = module.compute_probs if takes_probs else module.apply_sampling_constraints

    def bonus(logits: Tensor) -> Tensor:
        if case.greedy:
            return logits.argmax(-1)
        scores = logits.float() / metadata.temperature[:, None]
        return eager.one_of(cut(scores, top_k, top_p).softmax(-1, dtype=torch.float32))

    def call(step: ChainInputs) -> object:
        # A copy, as in its engine: `prepare` and `cut` work in place.
        target = step.target_logits[:, :k].to(torch.float32, copy=True).view(batch * k, vocab)
        target = prepare(target, cu, metadata)
        draft_probs = None if step.draft_probs is None else step.draft_probs.view(batch * k, vocab)
        drafted = step.draft_tokens.int().flatten()
        last = bonus(step.target_logits[:, k])[:, None].int()
        tokens = module.rejection_sample(drafted, lengths, k, cu, draft_probs, target, last, metadata)
        return tokens, (tokens >= 0).sum(-1) - 1

    return call


def v2_chain(case: Case) -> Call | None:
    module = importlib.import_module(V2)
    batch, k, vocab, device = case.batch, case.num_draft, case.vocab, case.device
    options = {"use_block_verification": True} if case.acceptance == "block" else {}
    if options and "use_block_verification" not in inspect.signature(module.rejection_sample).parameters:
        return None
    slots = batch * (k + 1)
    top_k, top_p = cuts(case, slots)
    cut = importlib.import_module(CUT).apply_top_k_top_p if top_k is not None or top_p is not None else None
    cu = torch.arange(0, slots + 1, k + 1, dtype=torch.int32, device=device)
    requests = torch.arange(batch, dtype=torch.int32, device=device)
    expanded = requests.repeat_interleave(k + 1, output_size=slots)
    local = torch.arange(k + 1, dtype=torch.int32, device=device).repeat(batch)
    position = torch.arange(slots, dtype=torch.int64, device=device)
    temperature = whole(case, float(case.params.temperature), torch.float32)
    unscaled = case.greedy or case.params.temperature == 1
    kept: dict[int, tuple[ChainInputs, Tensor | None]] = {}

    def kept_logits(step: ChainInputs) -> Tensor | None:
        """The draft's logits as its sampler left them, made once per step: part of drafting, not of verifying."""
        if id(step) not in kept:
            probs = step.draft_probs
            kept[id(step)] = step, step.draft_logits if unscaled or probs is None else probs.log()
        return kept[id(step)][1]

    def call(step: ChainInputs) -> object:
        target = step.target_logits.view(slots, vocab)
        if not unscaled or cut is not None:
            target = target.to(torch.float32, copy=True)
        if not unscaled:
            target.div_(case.params.temperature)
        if cut is not None:
            target = cut(target, top_k, top_p)
        drafted = torch.nn.functional.pad(step.draft_tokens, (1, 0)).flatten()  # the slot of the last token comes first
        tokens, count = module.rejection_sample(
            target, kept_logits(step), drafted, cu, position, requests, expanded, local, temperature, step.seeds, k,
            **options,
        )  # fmt: skip
        return tokens, count - 1

    return call


V1_BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {"verify_chain": v1_chain}
V2_BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {"verify_chain": v2_chain}
