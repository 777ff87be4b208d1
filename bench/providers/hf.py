"""transformers' own way: its logits warpers row by row, then its verify function, one sequence at a time.

What `GenerationMixin._assisted_decoding` does between the forward and the cache (it refuses batches): with draft
logits, its speculative sampling; without, or if greedy, one token is drawn per row and the draft is kept while it
agrees. It has no block verification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import specdec_kernels as sk

from ..inputs import Case, ChainInputs, PackedInputs, RowInputs
from ..timing import Call


def warpers(params: sk.SamplingParams) -> Callable[[Tensor], Tensor] | None:
    """``[rows, vocab]`` to warped scores, with warpers chosen and ordered as in `generate`; None if there are none."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain = LogitsProcessorList()
    if params.temperature not in (0, 1):
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    no_ids = torch.empty(1, 0, dtype=torch.int64)
    return (lambda scores: chain(no_ids, scores)) if chain else None


def prepare(logits: Tensor, warp: Callable[[Tensor], Tensor] | None) -> Tensor:
    """One sequence's rows ``[1, n, vocab]`` as float32 scores, warped a row at a time."""
    scores = logits.float()
    if warp is None:
        return scores
    if scores is logits:
        scores = logits.clone()
    for i in range(scores.shape[1]):
        scores[:, i] = warp(scores[:, i])
    return scores


def verify_one(
    target_logits: Tensor, draft_tokens: Tensor, draft_scores: Tensor | None, warp: Callable[[Tensor], Tensor] | None,
    greedy: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: the new tokens ``[1, num_accepted + 1]`` and num_accepted. The draft's rows are processed."""
    from transformers.generation.utils import _speculative_sampling

    scores = prepare(target_logits, warp)
    num_draft = draft_tokens.shape[1]
    if draft_scores is not None and not greedy:
        tokens, accepted = _speculative_sampling(draft_tokens, draft_scores, num_draft, scores)
        return tokens, accepted
    chosen = scores.argmax(-1) if greedy else torch.multinomial(scores.softmax(-1)[0], 1).T
    accepted = ((draft_tokens != chosen[:, :-1]).cumsum(-1) < 1).sum()
    return chosen[:, : accepted + 1], accepted


def _stack(results: list[tuple[Tensor, Tensor]], width: int) -> tuple[Tensor, Tensor]:
    tokens = results[0][0].new_full((len(results), width), -1)
    for row, (found, _) in zip(tokens, results, strict=True):
        row[: found.shape[1]] = found[0]
    return tokens, torch.stack([accepted for _, accepted in results])


def verify_chain(case: Case) -> Call | None:
    if case.acceptance == "block":
        return None
    warp = warpers(case.params)

    def call(step: ChainInputs) -> object:
        results = []
        for b in range(case.batch):
            draft_scores = None if step.draft_scores is None else step.draft_scores[b : b + 1]
            args = step.target_logits[b : b + 1], step.draft_tokens[b : b + 1], draft_scores
            results.append(verify_one(*args, warp, case.greedy))
        return _stack(results, case.num_draft + 1)

    return call


def verify_packed(case: Case) -> Call | None:
    warp = warpers(case.params)

    def call(step: PackedInputs) -> object:
        results = []
        cu = step.cu_num_draft_tokens.tolist()
        for b, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
            target = step.target_logits[None, start + b : end + b + 1]
            args = target, step.draft_tokens[None, start:end], step.draft_scores[None, start:end]
            results.append(verify_one(*args, warp, False))
        return _stack(results, case.num_draft + 1)

    return call


def warp_probs(case: Case) -> Call | None:
    warp = warpers(case.params) or (lambda scores: scores)
    return lambda rows: warp(rows.logits.float().flatten(0, 1)).softmax(-1).view(rows.logits.shape)


def sample(case: Case) -> Call | None:
    warp = warpers(case.params) or (lambda scores: scores)

    def call(rows: RowInputs) -> object:
        probs = warp(rows.named().float().flatten(0, 1)).softmax(-1)
        return torch.multinomial(probs, 1)

    return call


BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {
    "verify_chain": verify_chain,
    "verify_packed": verify_packed,
    "warp_probs": warp_probs,
    "sample": sample,
}
