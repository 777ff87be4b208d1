"""vLLM's V1 model runner: `RejectionSampler`, the functions below it, the drafts' draw, and the sampler of other
steps.

``make_x(stock)`` makes what takes the place of vLLM's function ``x``; each one hands what it does not serve to `stock`.
The stand-ins have vLLM's signatures. ``SamplingMetadata`` is `sampling` here: temperature, top_k and top_p are
``[batch]`` tensors or None (off), `generators` has those of the seeded requests by their place in the batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import LOGIT_DTYPES
from ...ops.mask_logits_ import mask_logits_
from ...ops.sample import sample
from ...ops.verify_packed import verify_packed
from ...ops.warp_probs import warp_probs
from ...sampling import GREEDY, SamplingParams
from .replacing import is_unknown, replace

Function = Callable[..., Any]


def patch() -> None:
    """Patch the modules of vLLM that the V1 runner samples with."""
    import vllm.v1.sample.logits_processor as logits_processor
    import vllm.v1.sample.rejection_sampler as rejection_sampler
    from vllm import SamplingParams as Asked
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    replace(rejection_sampler.RejectionSampler, "forward", lambda stock: make_forward(stock, SamplerOutput))
    replace(rejection_sampler, "rejection_sample", make_rejection_sample)
    replace(rejection_sampler, "apply_sampling_constraints", make_apply_sampling_constraints)
    replace(rejection_sampler, "expand_batch_to_tokens", lambda stock: expand_batch_to_tokens)
    replace(rejection_sampler, "apply_top_k_top_p", lambda stock: apply_top_k_top_p)
    for name in ("forward_native", "forward_cpu", "forward_cuda", "forward_hip"):
        if hasattr(TopKTopPSampler, name):
            replace(TopKTopPSampler, name, make_sampler_forward)
    replace(SpecDecodeBaseProposer, "_sample_from_logits", make_sample_from_logits)
    replace(Asked, "_validate_spec_decode", make_validate_spec_decode)
    replace(logits_processor, "build_logitsprocs", make_build_logitsprocs)
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")  # if imported before, it has a name of its own for it
    if runner is not None:
        replace(runner, "build_logitsprocs", make_build_logitsprocs)


# ---------------------------------------------------------------- the whole sampler, from raw logits


def make_forward(stock: Function, output: Function) -> Function:
    """``RejectionSampler.forward``; `output` is vLLM's ``SamplerOutput``.

    The rows of `logits` are those of each request's draft tokens and then its bonus row, request after request: what
    `verify_packed` takes. They are read as they are, whatever the dtype, unless a request has penalties or the like.
    """

    def forward(self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        sampling, num_logprobs = sampling_metadata, sampling_metadata.max_num_logprobs
        packed = len(logits) == len(metadata.draft_token_ids) + len(metadata.num_draft_tokens)
        lossy = self.synthetic_mode or getattr(self, "use_fly", False)
        if lossy or self.is_processed_logprobs_mode or not packed:
            return stock(self, metadata, draft_probs, logits, sampling)
        rows = logits if logits.dtype in LOGIT_DTYPES else logits.float()
        if changes_logits(sampling):
            rows = changed_logits(self, metadata, logits, sampling)
        uniforms = None
        if not sampling.all_greedy:
            uniforms = coins(metadata.num_draft_tokens, sampling.generators, logits.device)
        tokens = verify_packed(
            rows, metadata.draft_token_ids, draft_probs=as_float32(draft_probs),
            cu_num_draft_tokens=from_zero(metadata.cu_num_draft_tokens),
            max_num_draft_tokens=metadata.max_spec_len, uniform_samples=uniforms, params=params_of(sampling),
        ).tokens.to(torch.int32)  # fmt: skip
        if num_logprobs is None:
            return output(sampled_token_ids=tokens, logprobs_tensors=None)
        raw = logits.float()
        targets, bonus = raw[metadata.target_logits_indices], raw[metadata.bonus_logits_indices]
        logprobs = self._get_logprobs_tensors(num_logprobs, metadata, raw, targets, bonus, tokens)
        return output(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    return forward


def from_zero(cumulative: Tensor) -> Tensor:
    """Cumulative lengths ``[batch + 1]`` int32 from vLLM's, which lack the 0 they start at."""
    return torch.nn.functional.pad(cumulative, (1, 0)).to(torch.int32)


def changes_logits(sampling: Any) -> bool:
    """Whether something besides temperature, top-k, top-p and min-p touches a row."""
    budget = sampling.thinking_budget_state_holder
    return (
        not sampling.no_penalties
        or bool(sampling.bad_words_token_ids)
        or sampling.allowed_token_ids_mask is not None
        # the min-tokens processor mostly has no requests in `min_toks`; of others nothing is known
        or any(getattr(processor, "min_toks", True) for processor in sampling.logitsprocs.non_argmax_invariant)
        or (budget is not None and budget.has_tracked_requests())
    )


def changed_logits(self: Any, metadata: Any, logits: Tensor, sampling: Any) -> Tensor:
    """The rows in float32 after penalties, bad words and the like, by vLLM's own code: draft rows, then bonus rows."""
    rows = logits.to(torch.float32, copy=True)
    drafted, bonus = metadata.target_logits_indices, metadata.bonus_logits_indices
    # As in vLLM, the bonus rows first: a thinking budget keeps count from one call to the next.
    bonus_rows = self.sampler.apply_logits_processors(rows[bonus], sampling, True)
    rows[drafted] = self.apply_logits_processors(rows[drafted], sampling, metadata)
    rows[bonus] = bonus_rows
    return rows


def params_of(sampling: Any) -> SamplingParams:
    """Temperature and truncation of each request, in vLLM's order: min-p before top-k and top-p."""
    if sampling.all_greedy:
        return GREEDY
    min_p = min_p_of(sampling)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=0 if sampling.top_k is None else sampling.top_k,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=0.0 if min_p is None else min_p,
        min_p_first=True,
    )


def min_p_of(sampling: Any) -> Tensor | None:
    """``[batch]`` min-p, or None where no request has one: vLLM keeps it in a logits processor."""
    for processor in sampling.logitsprocs.argmax_invariant:
        if getattr(processor, "min_p_count", 0):
            return processor.min_p.flatten()
    return None


def coins(lengths: Sequence[int], generators: Mapping[int, torch.Generator], device: torch.device) -> Tensor:
    """``[total + batch]`` uniforms, ``length + 1`` a request; a seeded request's come from its own generator."""
    uniforms = torch.rand(sum(lengths) + len(lengths), dtype=torch.float64, device=device)
    draw_seeded(uniforms.split([length + 1 for length in lengths]), generators)
    return uniforms


def draw_seeded(parts: Sequence[Tensor], generators: Mapping[int, torch.Generator]) -> None:
    """Fill the uniforms of each seeded request anew, from its own generator."""
    for index, generator in generators.items():
        parts[index].uniform_(generator=generator)


# ---------------------------------------------------------------- the functions below it


def make_rejection_sample(stock: Function) -> Function:
    """``rejection_sample``, whose logits have been cut and divided by the temperature, and whose bonus tokens are drawn
    already. No row is copied. Synthetic acceptance, FLy and arguments that a version has after these are left to
    `stock`.
    """

    def rejection_sample(
        draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None, target_logits: Tensor, bonus_token_ids: Tensor, sampling_metadata: Any,
        synthetic_mode: bool = False, synthetic_conditional_rates: Tensor | None = None, use_fp64_gumbel: bool = False,
        *more: Any, **options: Any,
    ) -> Tensor:  # fmt: skip
        if synthetic_mode or is_unknown(more, options):
            return stock(
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                bonus_token_ids, sampling_metadata, synthetic_mode, synthetic_conditional_rates, use_fp64_gumbel,
                *more, **options,
            )  # fmt: skip
        sampling, greedy = sampling_metadata, sampling_metadata.all_greedy
        # Without drafts nothing is drawn here: a generator's state must not depend on whether others have drafts.
        seeded = {index: g for index, g in sampling.generators.items() if num_draft_tokens[index]}
        return verify_packed(
            target_logits, draft_token_ids, draft_probs=as_float32(draft_probs), bonus_tokens=bonus_token_ids.flatten(),
            cu_num_draft_tokens=from_zero(cu_num_draft_tokens), max_num_draft_tokens=max_spec_len,
            params=GREEDY if greedy else SamplingParams(temperature=(sampling.temperature != 0).float()),
            uniform_samples=None if greedy else coins(num_draft_tokens, seeded, target_logits.device),
        ).tokens.to(torch.int32)  # fmt: skip

    return rejection_sample


def as_float32(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs.float()


def make_apply_sampling_constraints(stock: Function) -> Function:
    """``apply_sampling_constraints``, with min-p before the rest: vLLM's own leaves it out under speculation."""

    def apply_sampling_constraints(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        min_p = None if sampling_metadata.all_greedy else min_p_of(sampling_metadata)
        if min_p is not None:
            temperature, min_p = (
                expand_batch_to_tokens(values, cu_num_draft_tokens, len(logits))
                for values in (sampling_metadata.temperature, min_p)
            )
            mask_logits_(logits, SamplingParams(temperature=temperature, min_p=min_p))
        return stock(logits, cu_num_draft_tokens, sampling_metadata)

    return apply_sampling_constraints


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """``[batch]`` to ``[num_tokens]``: each value for each token of its request, `replace_from` as `replace_to`."""
    lengths = cu_num_tokens.long().diff(prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(lengths, output_size=num_tokens)


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """``[rows, vocab]`` logits with −inf, in place, where each row's top-k and top-p cut; without sorting."""
    if k is not None or p is not None:
        mask_logits_(logits, SamplingParams(top_k=0 if k is None else k, top_p=1.0 if p is None else p))
    return logits


# ---------------------------------------------------------------- drafts, steps without drafts, what requests may ask


def make_sample_from_logits(stock: Function) -> Function:
    """``SpecDecodeBaseProposer._sample_from_logits``, of draft models: (tokens, probabilities or None).

    vLLM's own draws a seeded request's drafts without its generator, so its tokens do not reproduce. `logits` has the
    same number of rows for each request, request after request.
    """

    def sample_from_logits(self: Any, logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return stock(self, logits, sampling_metadata)
        params = SamplingParams(temperature=sampling_metadata.temperature)
        rows = logits.unflatten(0, (len(sampling_metadata.temperature), -1))
        uniforms = torch.rand(rows.shape[:2], dtype=torch.float64, device=logits.device)
        draw_seeded(uniforms.unbind(), sampling_metadata.generators)
        tokens = sample(rows, params, uniform_samples=uniforms).token
        return tokens.flatten(), warp_probs(rows, params).flatten(0, 1)

    return sample_from_logits


def make_sampler_forward(stock: Function) -> Function:
    """``TopKTopPSampler.forward_native``, ``forward_cpu`` and so on: their logits have been divided by the temperature.

    A seeded request takes as many of its generator's numbers here as where others have drafts.
    """

    def forward(
        self: Any, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.logprobs_mode.startswith("processed"):
            return stock(self, logits, generators, k, p)
        uniforms = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
        draw_seeded(uniforms.split(1), generators)
        params = SamplingParams(top_k=0 if k is None else k, top_p=1.0 if p is None else p)
        return sample(logits, params, uniform_samples=uniforms).token, None

    return forward


def make_validate_spec_decode(stock: Function) -> Function:
    """``SamplingParams._validate_spec_decode``, which lets min-p pass where it is served."""

    def validate(self: Any, speculative_config: Any) -> None:
        asked = self
        if getattr(speculative_config, "rejection_sample_method", None) in ("standard", "block"):
            asked = copy.copy(self)
            asked.min_p = 0.0
        stock(asked, speculative_config)

    return validate


def make_build_logitsprocs(stock: Function) -> Function:
    """``build_logitsprocs``, with min-p under speculation too, where vLLM's own leaves it out."""

    def build_logitsprocs(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, *custom: Any, **named: Any
    ) -> Any:
        built = stock(vllm_config, device, is_pin_memory, is_pooling_model, *custom, **named)
        if vllm_config.speculative_config and not is_pooling_model:
            from vllm.v1.sample.logits_processor import MinPLogitsProcessor

            built.argmax_invariant.append(MinPLogitsProcessor(vllm_config, device, is_pin_memory))
        return built

    return build_logitsprocs
