"""A cascade of whole answers: the draft's, or where it is unsure the target's.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import check_number, check_one_of
from ..decoding.output import GenerationOutput, Recorder
from ..decoding.request import Request
from ..decoding.state import DecodingState, Speculation, StepResult
from ..decoding.step import verify_step
from ..drafters import Draft
from ..ops.row_stats import row_stats
from ..ops.sample import sample
from ..ops.uniform_samples import uniform_samples
from ..sampling import SamplingParams
from ..types import PLACEHOLDER_TOKEN_ID
from .two_models import TwoModels, append, last_row, raw_log_probs


def seq_cascade(
    model: Any,
    input_ids: Tensor,
    *,
    draft_model: Any,
    alpha: float,
    confidence: str = "mean",
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    draft_sampling: SamplingParams | None = None,
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Iterable[int] | None = None,
) -> GenerationOutput:
    """The draft writes the whole answer; where its confidence is below ``1 − alpha``, the target rewrites it (section
    2).

    What the target writes is what plain decoding would, with the same seeds. The draft draws from another stream,
    because what it draws decides whether the target writes. In the statistics the tokens of a kept answer are drafted
    and accepted, those of a discarded one drafted and rejected. Runs op by op, also on a GPU.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, seeds, max_new_tokens, eos_token_id
        See `generate`. A sequence's tokens depend on its seed, not on the batch.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    alpha : float
        0 keeps only answers that are certain, 1 all.
    confidence : {"mean", "sum"}
        exp of the mean, or the sum, of the log-probabilities of the answer's tokens (temperature 1, nothing cut).
    sampling, draft_sampling : SamplingParams
        Of target and draft; None: the draft's as the target's.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError, ValueError
        As `generate`, or a bad `alpha` or `confidence`.
    """
    caller = "seq_cascade"
    check_number(caller, "alpha", alpha, -math.inf, math.inf)
    check_one_of(caller, "confidence", confidence, ("mean", "sum"))
    request = Request(input_ids, attention_mask, sampling, seeds, max_new_tokens, eos_token_id)
    models = TwoModels.begin(caller, model, draft_model, request, draft_sampling, 0)
    state = models.state
    recorder = Recorder(state.batch_size, max_new_tokens, max_new_tokens)  # for drafts that are whole answers
    with models.at_work(caller) as seconds:
        tokens, log_probs, status = _drafted_answers(models, max_new_tokens)
        recorder.draft_steps = tokens.shape[1] - 1
        num_drafted = (tokens != PLACEHOLDER_TOKEN_ID).sum(1)
        kept = np.exp(log_probs / num_drafted if confidence == "mean" else log_probs) >= 1 - alpha
        num_kept = np.where(kept, num_drafted, 0)
        tokens[~kept] = PLACEHOLDER_TOKEN_ID
        recorder.add(StepResult(tokens, num_kept, num_drafted, num_kept, ~kept, status))
        recorder.rejected += int(num_drafted[~kept].sum())  # nothing stands in their places yet

        state.host_active = ~kept
        state.active &= torch.from_numpy(~kept).to(state.device)
        while state.host_active.any():
            recorder.target_forwards += 1
            outcome = verify_step(state, models.target, Draft(state.tokens[:, :0]), state.longest, None, models.ends)
            recorder.add(state.take_in(outcome.cpu().numpy()))
        times = seconds()
    return recorder.output(models.target, input_ids, times)


def _drafted_answers(models: TwoModels, max_new_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the draft writes by itself: tokens ``[batch, longest + 1]`` int64, −1 after each answer; the sums of their
    raw log-probabilities ``[batch]`` float64, in nats; flags ``[batch]`` int64.
    """
    prompt, seeds = models.state.prompt, models.state.seeds
    state = DecodingState.begin(prompt, models.draft, models.draft_sampling, seeds, max_new_tokens, Speculation())
    log_probs = torch.zeros_like(seeds, dtype=torch.float64)
    one = torch.ones_like(seeds)
    results: list[StepResult] = []
    while state.host_active.any():
        row = last_row(models.draft, state, 1)
        noise = uniform_samples(seeds, state.step, 1, purpose="draft")
        draw = sample(row, models.draft_sampling, uniform_samples=noise)
        log_prob = raw_log_probs(row, row_stats(row), draw.token)[:, 0]
        log_probs += torch.where(state.active, log_prob, 0.0)
        outcome = append(state, draw.token, one, one, draw.stats.status[:, 0], models.ends)
        results.append(state.take_in(outcome.cpu().numpy()))
    tokens = np.concatenate([result.tokens for result in results], axis=1)
    tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=PLACEHOLDER_TOKEN_ID)
    return tokens, log_probs.cpu().numpy(), np.bitwise_or.reduce([result.status for result in results])
