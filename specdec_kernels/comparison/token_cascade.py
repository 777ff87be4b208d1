"""A cascade token by token: a draft, a target, and a rule that says which of them emits the token.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..decoding.output import GenerationOutput, Recorder
from ..decoding.request import Request
from ..laws import Chow
from ..ops.row_stats import row_stats
from ..ops.sample import sample
from ..ops.uniform_samples import uniform_samples
from ..sampling import SamplingParams
from ..types import PLACEHOLDER_TOKEN_ID
from .two_models import TwoModels, append, last_row, max_prob


def token_cascade(
    model: Any,
    input_ids: Tensor,
    *,
    draft_model: Any,
    target_law: Chow,
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    draft_sampling: SamplingParams | None = None,
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Iterable[int] | None = None,
) -> GenerationOutput:
    """Token by token, the draft writes where it is sure and the target where it is not (algorithm 2).

    The target runs only in steps in which some sequence of the batch defers, and then reads what it has missed as well;
    that counts as one forward. In the statistics a token of the draft's counts as drafted and accepted, one of the
    target's as one in place of a rejected one. Runs op by op, also on a GPU.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, seeds, max_new_tokens, eos_token_id
        See `generate`. A sequence's tokens depend on its seed, not on the batch.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    target_law : sk.laws.Chow
        When to defer; its `bonus` has no effect here.
    sampling, draft_sampling : SamplingParams
        Of target and draft; None: the draft's as the target's.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError, ValueError
        As `generate`, or another target law than Chow.
    """
    caller = "token_cascade"
    if not isinstance(target_law, Chow):
        got = type(target_law).__name__
        raise TypeError(f"{caller}: target_law must be sk.laws.Chow (others need both models), got {got}")
    request = Request(input_ids, attention_mask, sampling, seeds, max_new_tokens, eos_token_id)
    models = TwoModels.begin(caller, model, draft_model, request, draft_sampling, 1)
    state, unseen = models.state, 1  # tokens of every active sequence that the target has not seen
    recorder = Recorder(state.batch_size, max_new_tokens, 1)
    one = torch.ones_like(state.lengths)
    with models.at_work(caller) as seconds:
        while state.host_active.any():
            recorder.draft_steps += 1
            row = last_row(models.draft, state, 1)
            noise = uniform_samples(state.seeds, state.step, 1)
            draw = sample(row, models.draft_sampling, uniform_samples=noise)
            token, status = draw.token, draw.stats.status
            deferred = state.active[:, None] & _is_unsure(target_law, row)
            if bool(deferred.any()):
                recorder.target_forwards += 1
                draw = sample(last_row(models.target, state, unseen), sampling, uniform_samples=noise)
                token = torch.where(deferred, draw.token, token)
                status = torch.where(deferred, status | draw.stats.status, status)
                unseen = 0
            unseen += 1
            tokens = torch.nn.functional.pad(token, (0, 1), value=PLACEHOLDER_TOKEN_ID)  # what would follow a draft
            outcome = append(state, tokens, one, ~deferred[:, 0], status[:, 0], models.ends)
            recorder.add(state.take_in(outcome.cpu().numpy()))
        times = seconds()
    return recorder.output(models.target, input_ids, times)


def _is_unsure(target_law: Chow, rows: Tensor) -> Tensor:
    """``[batch, n]`` bool: whether `target_law` defers where the draft's logits are `rows` ``[batch, n, vocab]``."""
    stats = row_stats(rows)
    if target_law.loss == "log":
        return stats.raw_entropy > target_law.alpha
    return max_prob(stats) < 1 - target_law.alpha
