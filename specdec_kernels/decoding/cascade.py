"""Cascades without speculation, to compare speculative ones with: a draft, a target, and a rule that says whose token.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), section 2 and algorithms 2, 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Draft
from ..drafters.model import ModelDrafter
from ..laws import Chow, Lossy, TargetLaw
from ..ops.row_stats import row_stats
from ..ops.sample import sample
from ..ops.uniform_samples import uniform_samples
from ..sampling import SamplingParams
from ..types import PLACEHOLDER_TOKEN_ID
from .arguments import check_number
from .generate import generate
from .output import GenerationOutput, Recorder
from .state import DecodingState, StepResult
from .step import take_in, verify_step
from .two_models import TwoModels, append, last_row, max_prob, raw_log_probs


def token_cascade(
    model: Any,
    input_ids: Tensor,
    *,
    draft_model: Any,
    rule: Chow,
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    draft_sampling: SamplingParams | None = None,
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Iterable[int] | None = None,
) -> GenerationOutput:
    """Token by token, the draft writes where it is sure and the target where it is not (algorithm 2).

    The target runs only in steps in which some sequence of the batch defers, and then reads what it has missed as well;
    that counts as one forward. In the statistics a token of the draft's is one drafted and accepted, one of the
    target's stands for a rejected one. Runs op by op, also on a GPU.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, seeds, max_new_tokens, eos_token_id
        See `generate`. A sequence's tokens depend on its seed, not on the batch.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    rule : sk.laws.Chow
        When to defer; its `bonus` counts for nothing here.
    sampling, draft_sampling : SamplingParams
        Of target and draft; None: the draft's as the target's.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError, ValueError
        As `generate`, or another rule than Chow.
    """
    caller = "token_cascade"
    if not isinstance(rule, Chow):
        raise TypeError(f"{caller}: rule must be sk.laws.Chow (others need both models), got {type(rule).__name__}")
    models = TwoModels(
        caller, model, draft_model, input_ids, attention_mask, sampling, draft_sampling, seeds, max_new_tokens, 1,
        eos_token_id,
    )  # fmt: skip
    state, unseen = models.state, 1  # tokens of every active sequence that the target has not seen
    one = torch.ones_like(state.lengths)
    with models.at_work():
        while state.host_active.any():
            models.draft_steps += 1
            row = last_row(models.draft, state, 1)
            noise = uniform_samples(state.seeds, state.step, 1)
            draw = sample(row, models.draft_sampling, uniform_samples=noise)
            token, status = draw.token, draw.stats.status
            deferred = state.active[:, None] & _is_unsure(rule, row)
            if bool(deferred.any()):
                models.target_forwards += 1
                draw = sample(last_row(models.target, state, unseen), sampling, uniform_samples=noise)
                token = torch.where(deferred, draw.token, token)
                status = torch.where(deferred, status | draw.stats.status, status)
                unseen = 0
            unseen += 1
            tokens = torch.nn.functional.pad(token, (0, 1), value=PLACEHOLDER_TOKEN_ID)  # what would follow a block
            models.record(append(state, tokens, one, ~deferred[:, 0], status[:, 0], models.ends))
        return models.output()


def _is_unsure(rule: Chow, rows: Tensor) -> Tensor:
    """``[batch, n]`` bool: whether `rule` defers where the draft's logits are `rows` ``[batch, n, vocab]``."""
    stats = row_stats(rows)
    if rule.loss == "log":
        return stats.raw_entropy > rule.alpha
    return max_prob(stats) < 1 - rule.alpha


def oracle_cascade(
    model: Any,
    input_ids: Tensor,
    *,
    draft_model: Any,
    law: TargetLaw,
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    draft_sampling: SamplingParams | None = None,
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Iterable[int] | None = None,
) -> GenerationOutput:
    """Every token drawn from the law π that `law` makes of both models' at it (algorithm 3): for analysis, since it
    saves nothing.

    This is `generate` without draft tokens and with a cascaded bonus: each token is a bonus one, none is drafted.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, seeds, max_new_tokens, eos_token_id
        See `generate`.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    law : one of `sk.laws`
        Any but `Lossy`; its `bonus` counts for nothing here.
    sampling, draft_sampling : SamplingParams
        Of target and draft; None: the draft's as the target's.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError, ValueError
        As `generate` with a `ModelDrafter`, or a law that is not a cascade's.
    """
    if not isinstance(law, TargetLaw) or isinstance(law, Lossy):
        raise TypeError(f"oracle_cascade: law must be one of sk.laws but Lossy, got {type(law).__name__}")
    return generate(
        model, input_ids, drafter=ModelDrafter(draft_model, draft_sampling), attention_mask=attention_mask,
        sampling=sampling, seeds=seeds, max_new_tokens=max_new_tokens, num_speculative_tokens=0,
        target_law=replace(law, bonus="cascade"), eos_token_id=eos_token_id,  # type: ignore[call-arg]
    )  # fmt: skip


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
    """The draft writes the whole answer; where its confidence is below ``1 − alpha``, the target writes it anew
    (section 2).

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
    if confidence not in ("mean", "sum"):
        raise ValueError(f"{caller}: confidence must be 'mean' or 'sum', got {confidence!r}")
    models = TwoModels(
        caller, model, draft_model, input_ids, attention_mask, sampling, draft_sampling, seeds, max_new_tokens, 0,
        eos_token_id,
    )  # fmt: skip
    state = models.state
    models.recorder = Recorder(state.batch_size, max_new_tokens, max_new_tokens)  # for drafts that are whole answers
    with models.at_work():
        tokens, log_probs, status = _drafted_answers(models, max_new_tokens)
        num_drafted = (tokens != PLACEHOLDER_TOKEN_ID).sum(1)
        kept = np.exp(log_probs / num_drafted if confidence == "mean" else log_probs) >= 1 - alpha
        num_kept = np.where(kept, num_drafted, 0)
        tokens[~kept] = PLACEHOLDER_TOKEN_ID
        models.recorder.add(StepResult(tokens, num_kept, num_drafted, num_kept, ~kept, status))
        models.recorder.rejected += int(num_drafted[~kept].sum())  # nothing stands in their places yet

        state.host_active = ~kept
        state.active &= torch.from_numpy(~kept).to(state.device)
        while state.host_active.any():
            models.target_forwards += 1
            models.record(verify_step(state, models.target, Draft(state.tokens[:, :0]), None, models.ends))
        return models.output()


def _drafted_answers(models: TwoModels, max_new_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the draft writes by itself: tokens ``[batch, longest + 1]`` int64, −1 after each answer; the sums of their
    raw log-probabilities ``[batch]`` float64, in nats; flags ``[batch]`` int64.
    """
    prompt, seeds = models.state.prompt, models.state.seeds
    state = DecodingState.begin(prompt, models.draft, "token", models.draft_sampling, seeds, max_new_tokens, 0)
    log_probs = torch.zeros_like(seeds, dtype=torch.float64)
    one = torch.ones_like(seeds)
    results: list[StepResult] = []
    while state.host_active.any():
        models.draft_steps += 1
        row = last_row(models.draft, state, 1)
        noise = uniform_samples(seeds, state.step, 1, purpose="draft")
        draw = sample(row, models.draft_sampling, uniform_samples=noise)
        log_prob = raw_log_probs(row, row_stats(row), draw.token)[:, 0]
        log_probs += torch.where(state.active, log_prob, 0.0)
        outcome = append(state, draw.token, one, one, draw.stats.status[:, 0], models.ends)
        results.append(take_in(state, outcome.cpu().numpy()))
    tokens = np.concatenate([result.tokens for result in results], axis=1)
    tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=PLACEHOLDER_TOKEN_ID)
    return tokens, log_probs.cpu().numpy(), np.bitwise_or.reduce([result.status for result in results])
