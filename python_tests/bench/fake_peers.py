"""Stand-ins for GPU peers with those projects' own signatures and demands, so that their adapters run without them.

They compute in plain PyTorch, through the eager provider. What the real ones refuse (a dtype, a shape, a stride), these
do.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from bench.providers import eager


def module(name: str, *functions: Any) -> ModuleType:
    made = ModuleType(name)
    for function in functions:
        setattr(made, function.__name__, function)
    return made


def cut(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    return eager.warp(scores, sk.SamplingParams(1.0, top_k, top_p))


def softmax(logits: Tensor, temperature: float | None = None, enable_pdl: bool | None = None) -> Tensor:
    assert logits.ndim == 2 and logits.dtype == torch.float32 and isinstance(temperature, float)
    return (logits / temperature).softmax(-1)


def top_k_renorm_probs(probs: Tensor, top_k: int, is_deterministic: bool = False) -> Tensor:
    assert probs.ndim == 2 and isinstance(top_k, int) and 0 < top_k < probs.shape[1]
    return cut(probs.log(), top_k, 1.0).softmax(-1)


def top_p_renorm_probs(probs: Tensor, top_p: float, is_deterministic: bool = False) -> Tensor:
    assert probs.ndim == 2 and 0 < top_p < 1
    return cut(probs.log(), 0, top_p).softmax(-1)


def chain_speculative_sampling(
    draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None, maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True, generator: torch.Generator | None = None, seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert draft_probs.dtype == target_probs.dtype == torch.float32 and draft_token_ids.dtype == torch.int32
    for value in (seed, offset):  # an int would be baked into a captured graph
        assert value is not None and value.dtype == torch.int64 and value.shape == (1,)
    tokens, emitted = eager.token_rule(target_probs, draft_probs, draft_token_ids.long())
    return tokens.int(), emitted.int(), emitted.int()


def sampling_from_logits(
    logits: Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert logits.ndim == 2 and (indices is None or indices.dtype == torch.int32)
    assert seed is not None and offset is not None and seed.shape == offset.shape == (1,)
    rows = logits if indices is None else logits[indices.long()]
    return torch.multinomial(rows.float().softmax(-1), 1)[:, 0].int()


def top_k_top_p_sampling_from_probs(
    probs: Tensor, top_k: int, top_p: float, indices: Tensor | None = None, filter_apply_order: str = "top_k_first",
    deterministic: bool = True, generator: torch.Generator | None = None, check_nan: bool = False,
    seed: Tensor | None = None, offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert probs.ndim == 2 and probs.dtype == torch.float32 and filter_apply_order == "top_k_first"
    assert seed is not None and offset is not None and seed.shape == offset.shape == (1,)
    return torch.multinomial(cut(probs.log(), top_k, top_p).softmax(-1), 1)[:, 0].int()


FLASHINFER = module(
    "flashinfer.sampling", softmax, top_k_renorm_probs, top_p_renorm_probs, chain_speculative_sampling,
    sampling_from_logits, top_k_top_p_sampling_from_probs,
)  # fmt: skip


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """In place, as theirs may be."""
    assert logits.ndim == 2 and logits.dtype == torch.float32
    for value in (k, p):
        assert value is None or value.shape == logits.shape[:1]
    kept = cut(logits, 0 if k is None else int(k[0]), 1.0 if p is None else float(p[0]))
    return logits.copy_(kept)


def apply_sampling_constraints(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
    assert logits.ndim == 2 and cu_num_draft_tokens.ndim == 1
    if sampling_metadata.all_greedy:
        return logits
    count = len(logits) // len(cu_num_draft_tokens)
    wide = {n: None if (v := getattr(sampling_metadata, n)) is None else v.repeat_interleave(count)
            for n in ("temperature", "top_k", "top_p")}  # fmt: skip
    return apply_top_k_top_p(logits.div_(wide["temperature"][:, None]), wide["top_k"], wide["top_p"])


def compute_probs(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
    constrained = apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata)
    return constrained if sampling_metadata.all_greedy else constrained.softmax(-1)


def _v1(
    draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None, target: Tensor, bonus_token_ids: Tensor, sampling_metadata: Any, probs: bool,
) -> Tensor:  # fmt: skip
    batch, k = len(num_draft_tokens), max_spec_len
    assert draft_token_ids.shape == (batch * k,) and cu_num_draft_tokens.tolist() == [k * (i + 1) for i in range(batch)]
    assert target.shape[0] == batch * k and bonus_token_ids.shape == (batch, 1) and target.is_contiguous()
    assert draft_probs is None or (draft_probs.shape == target.shape and draft_probs.is_contiguous())
    assert sampling_metadata.all_greedy != sampling_metadata.all_random and sampling_metadata.generators == {}
    drafted, bonus = draft_token_ids.view(batch, k).long(), bonus_token_ids[:, 0].long()
    if sampling_metadata.all_greedy:
        wanted = target.argmax(-1).view(batch, k)
        accepted = eager.prefix(drafted == wanted)
        final = torch.cat([wanted, bonus[:, None]], 1).gather(1, accepted[:, None])[:, 0]
        return eager.assemble(drafted, accepted, final)[0].int()
    law = (target if probs else target.softmax(-1)).view(batch, k, -1)
    law = torch.cat([law, torch.nn.functional.one_hot(bonus, law.shape[-1])[:, None].float()], 1)
    if draft_probs is None:
        return eager.one_hot_rule(law, drafted)[0].int()
    return eager.token_rule(law, draft_probs.view(batch, k, -1), drafted)[0].int()


def v1(takes_probs: bool) -> ModuleType:
    """vLLM's module of the first runner, newer or older: the older takes probabilities."""
    if takes_probs:

        def rejection_sample(
            draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, cu_num_draft_tokens: Tensor,
            draft_probs: Tensor | None, target_probs: Tensor, bonus_token_ids: Tensor, sampling_metadata: Any,
        ) -> Tensor:  # fmt: skip
            return _v1(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs,
                       bonus_token_ids, sampling_metadata, True)  # fmt: skip

        return module("vllm_v1", rejection_sample, compute_probs)

    def rejection_sample(  # type: ignore[no-redef]
        draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None, target_logits: Tensor, bonus_token_ids: Tensor, sampling_metadata: Any,
    ) -> Tensor:  # fmt: skip
        return _v1(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                   bonus_token_ids, sampling_metadata, False)  # fmt: skip

    return module("vllm_v1", rejection_sample, apply_sampling_constraints)


def v2() -> ModuleType:
    """vLLM's module of the second runner: slots behind the last token are undefined."""

    def rejection_sample(
        target_logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
        idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor,
        seed: Tensor, num_speculative_steps: int, synthetic_conditional_rates: Tensor | None = None,
        use_fp64: bool = False, use_block_verification: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, slots = len(cu_num_logits) - 1, num_speculative_steps + 1
        assert cu_num_logits.tolist() == [slots * i for i in range(batch + 1)]
        assert target_logits.shape[0] == batch * slots == draft_sampled.shape[0] == pos.shape[0]
        assert idx_mapping.tolist() == list(range(batch)) and temperature.shape == seed.shape == (batch,)
        assert expanded_idx_mapping.tolist() == [b for b in range(batch) for _ in range(slots)]
        assert expanded_local_pos.tolist() == list(range(slots)) * batch
        drafted = draft_sampled.view(batch, slots)[:, 1:]
        logits = target_logits.view(batch, slots, -1).float()
        if bool((temperature == 0).all()):
            wanted = logits.argmax(-1)
            accepted = eager.prefix(drafted == wanted[:, :-1])
            tokens, _ = eager.assemble(drafted, accepted, eager.pick(wanted, accepted))
        elif draft_logits is None:
            tokens, accepted = eager.one_hot_rule(logits.softmax(-1), drafted)
        else:
            rule = eager.block_rule if use_block_verification else eager.token_rule
            tokens, accepted = rule(logits.softmax(-1), draft_logits.float().softmax(-1), drafted)
        return tokens.where(tokens >= 0, 10**9), (accepted + 1).int()

    return module("vllm_v2", rejection_sample)


TOP_K_TOP_P = module("vllm.v1.sample.ops.topk_topp_sampler", apply_top_k_top_p)


def _walk(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, retrive_index: Tensor, tokens: Tensor,
          accepted: Tensor) -> None:  # fmt: skip
    assert predicts.dtype == accept_index.dtype == accept_token_num.dtype == torch.int32
    assert accept_index.shape == retrive_index.shape and retrive_index.dtype == torch.int64
    predicts[retrive_index.flatten()] = tokens.int().flatten()
    slots = torch.arange(tokens.shape[1])
    accept_index.copy_(retrive_index.where(slots <= accepted[:, None], -1))
    accept_token_num.copy_(accepted)


def chain_speculative_sampling_triton(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, draft_probs: Tensor, threshold_single: float,
    threshold_acc: float, deterministic: bool,
) -> None:  # fmt: skip
    assert uniform_samples.shape == candidates.shape and threshold_single == threshold_acc == 1
    assert uniform_samples_for_final_sampling.shape == candidates.shape[:1]
    tokens, accepted = eager.token_rule(target_probs, draft_probs, candidates[:, 1:])
    _walk(predicts, accept_index, accept_token_num, retrive_index, tokens, accepted)


def verify_tree_greedy(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    assert all(t.dtype == torch.int64 and t.is_contiguous() and t.shape == candidates.shape for t in links)
    assert predicts.dtype == accept_index.dtype == accept_token_num.dtype == torch.int32
    accept_index.fill_(-1)
    for b, wanted in enumerate(target_predict.tolist()):
        node, count = 0, 0
        while True:
            accept_index[b, count] = retrive_index[b, node]
            predicts[retrive_index[b, node]] = wanted[node]
            child = int(retrive_next_token[b, node])
            while child >= 0 and int(candidates[b, child]) != wanted[node]:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            node, count = child, count + 1
        accept_token_num[b] = count


def tree_speculative_sampling_target_only(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, draft_probs: Tensor,
    threshold_single: float = 1.0, threshold_acc: float = 1.0, deterministic: bool = True,
) -> None:  # fmt: skip
    """A token drawn after each node is what its coin among the children comes to."""
    assert uniform_samples.shape == candidates.shape and threshold_single == threshold_acc == 1
    assert uniform_samples_for_final_sampling.shape == candidates.shape[:1]
    assert target_probs.dtype == draft_probs.dtype == torch.float32 and target_probs.shape == draft_probs.shape
    drawn = eager.one_of(target_probs.flatten(0, 1)).view(candidates.shape)
    links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    verify_tree_greedy(predicts, accept_index, accept_token_num, *links, target_predict=drawn)


def top_k_renorm_prob(probs: Tensor, top_k: Tensor) -> Tensor:
    assert top_k.dtype == torch.int32 and top_k.shape == probs.shape[:1]
    return top_k_renorm_probs(probs, int(top_k[0]))


def top_p_renorm_prob(probs: Tensor, top_p: Tensor) -> Tensor:
    assert top_p.dtype == torch.float32 and top_p.shape == probs.shape[:1]
    return top_p_renorm_probs(probs, float(top_p[0]))


SGLANG = module("sglang.kernels.ops.speculative.reject_sampling", chain_speculative_sampling_triton)
SGL_KERNEL = module(
    "sgl_kernel", verify_tree_greedy, tree_speculative_sampling_target_only, top_k_renorm_prob, top_p_renorm_prob
)
