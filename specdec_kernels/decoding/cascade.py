"""Cascades without speculation, to compare speculative ones with: a draft, a target, and a rule that says whose token.

The algorithms are those that Narasimhan et al. ("Faster Cascades via Speculative Decoding", arXiv 2405.19261) compare
with in section 6. They run op by op.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
from ..types import PLACEHOLDER_TOKEN_ID, RowStats
from .arguments import check_draft, check_number, check_text, end_ids, make_prompt, make_seeds
from .generate import generate, make_output
from .output import GenerationOutput, Recorder
from .runner import Runner, as_runner
from .schedule import synchronize
from .state import DecodingState, StepResult
from .step import take_in, verify_step

MAX_LOGIT_ROWS = 64
"""Rows of a sequence whose logits one forward gives at most, where only the last are wanted."""


class TwoModels:
    """A target and a draft at work on the same texts, and the record of what they write.

    Parameters
    ----------
    caller : str
        Begins error messages.
    model, draft_model, input_ids, attention_mask, sampling, draft_sampling, seeds, max_new_tokens, eos_token_id
        As given to `caller`.
    max_draft_tokens : int
        Draft tokens that a step puts to the test at most.

    Attributes
    ----------
    target_forwards, draft_steps : int
        For the statistics; the loop counts.
    """

    def __init__(
        self,
        caller: str,
        model: Any,
        draft_model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        sampling: SamplingParams,
        draft_sampling: SamplingParams | None,
        seeds: Tensor | None,
        max_new_tokens: int,
        max_draft_tokens: int,
        eos_token_id: int | Iterable[int] | None,
    ) -> None:
        self._model, self._input_ids = model, input_ids
        self.target, self.draft = as_runner(model, caller), as_runner(draft_model, caller)
        check_text(caller, self.target, input_ids, attention_mask, sampling, seeds, max_new_tokens)
        if self.draft is self.target:
            raise ValueError(f"{caller}: draft_model must be a Runner of its own, got the target's")
        self.ends = end_ids(caller, model, self.target, eos_token_id)
        self.draft_sampling = sampling if draft_sampling is None else draft_sampling
        prompt = make_prompt(self.target, input_ids, attention_mask)
        seeds = make_seeds(seeds, self.target, input_ids.shape[0])
        self.state = DecodingState.begin(
            prompt, self.target, "token", sampling, seeds, max_new_tokens, max_draft_tokens
        )
        check_draft(caller, self.draft, self.state, "draft_sampling", draft_sampling)
        self.recorder = Recorder(self.state.batch_size, max_new_tokens, max_draft_tokens)
        self.target_forwards = self.draft_steps = 0

    @contextmanager
    def at_work(self) -> Iterator[TwoModels]:
        """Both have read the prompts within."""
        with torch.inference_mode(), ExitStack() as cleanup:
            began = time.perf_counter()
            for runner in (self.target, self.draft):
                cleanup.callback(runner.finish)
                runner.start(self.state.prompt, self.state.capacity)
                runner.prefill(self.state.prompt)
            synchronize(self.state.device)
            self._started = time.perf_counter()
            self._seconds_prefill = self._started - began
            yield self

    def record(self, outcome: Tensor) -> StepResult:
        """Take in a step of the batch: the one transfer to the host."""
        result = take_in(self.state, outcome.cpu().numpy())
        self.recorder.add(result)
        return result

    def output(self) -> GenerationOutput:
        """What was recorded."""
        seconds = (self._seconds_prefill, time.perf_counter() - self._started)
        stats = self.recorder.stats(self.target_forwards, self.draft_steps, seconds)
        return make_output(self._model, self.target, self._input_ids, self.recorder, stats)


def last_row(runner: Runner, state: DecodingState, unseen: int) -> Tensor:
    """``[batch, 1, vocab]``: the logits of each sequence's next token, from a model that has not seen the last `unseen`
    tokens of any active one. Where it has seen some of them, it is fed the same rows again.
    """
    starts = (state.lengths - unseen).clamp(min=0)  # < 0: only where a sequence idles
    text = state.tokens.gather(1, starts[:, None] + torch.arange(unseen, device=state.device))
    if (head := unseen - MAX_LOGIT_ROWS) > 0:  # logits of a long text might not fit into memory
        runner.forward(text[:, :head], starts, state.longest, need_logits=False)
        starts, text = starts + head, text[:, head:]
    logits = runner.forward(text, starts, state.longest)
    assert logits is not None
    return logits[:, -1:]


def append(
    state: DecodingState,
    tokens: Tensor,
    num_tokens: Tensor,
    num_drafted: Tensor,
    num_accepted: Tensor,
    status: Tensor,
    ends: Tensor | None,
) -> Tensor:
    """Append the first `num_tokens` ``[batch]`` of `tokens` ``[batch, width + 1]`` to every active sequence; the
    outcome, for `take_in`.
    """
    slots = torch.arange(tokens.shape[1], device=state.device)
    num_tokens = torch.where(state.active, num_tokens, 0)
    tokens = tokens.masked_fill(slots >= num_tokens[:, None], PLACEHOLDER_TOKEN_ID)
    num_drafted = torch.where(state.active, num_drafted, -1)
    num_accepted, status = torch.where(state.active, num_accepted, 0), torch.where(state.active, status, 0)
    state.tokens.scatter_(1, state.lengths[:, None] + slots, tokens.clamp(min=0))
    state.lengths += num_tokens
    state.remaining -= num_tokens
    state.step += 1
    state.active &= state.remaining > 0
    if ends is not None:
        state.active &= ~(tokens[:, :, None] == ends).flatten(1).any(1)
    counts = (num_tokens, num_drafted, num_accepted, state.active, status)
    return torch.cat([tokens, *(count[:, None].long() for count in counts)], dim=1)


def raw_log_probs(logits: Tensor, stats: RowStats, tokens: Tensor) -> Tensor:
    """``[batch, n]`` float32: log-probabilities of `tokens` in the rows `logits` as they are (temperature 1, nothing
    cut), in nats.
    """
    log_probs = logits.gather(2, tokens[..., None])[..., 0].float() - stats.raw_log_normalizer
    # a NaN or an infinity: the token, or the whole row, is one whose law is all mass on the argmax or elsewhere
    hot = torch.where(tokens == stats.argmax, 0.0, -math.inf)
    return torch.where(log_probs.isfinite(), log_probs, hot)


def max_prob(stats: RowStats) -> Tensor:
    """The largest probability of rows, from their stats at temperature 1 with nothing cut."""
    return 1 / stats.normalizer


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

    The target runs only in steps in which some sequence of the batch defers, and then first reads what it has missed;
    both have read the prompt. A token of the draft's counts as drafted and accepted, a deferred one as drafted and
    rejected.

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
    state, unseen = models.state, 1  # tokens of every active sequence that the target has not read
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
            tokens = torch.nn.functional.pad(token, (0, 1), value=PLACEHOLDER_TOKEN_ID)
            models.record(append(state, tokens, one, one, ~deferred[:, 0], status[:, 0], models.ends))
        return models.output()


def _is_unsure(rule: Chow, rows: Tensor) -> Tensor:
    """``[batch, n]`` bool: whether `rule` defers where the draft's logits are `rows`."""
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
    """Every token drawn from the law π that `law` makes of both models' at it (algorithm 3): for analysis, it saves
    nothing.

    This is `generate` without draft tokens, which cascades its bonus: the tokens' provenance is `Provenance.BONUS`, and
    none count as drafted.

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
    because what it draws decides whether the target writes. The tokens of an answer kept count as drafted and accepted,
    of one deferred as drafted and rejected.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, seeds, max_new_tokens, eos_token_id
        See `generate`. A sequence's tokens depend on its seed, not on the batch.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    alpha : float
        Finite; 0 defers all answers but certain ones, 1 none.
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
        caller, model, draft_model, input_ids, attention_mask, sampling, draft_sampling, seeds, max_new_tokens,
        max_new_tokens, eos_token_id,
    )  # fmt: skip
    state = models.state
    with models.at_work():
        tokens, log_probs, status = _drafted_answers(models)
        num_tokens = (tokens != PLACEHOLDER_TOKEN_ID).sum(1)
        kept = np.exp(log_probs / num_tokens if confidence == "mean" else log_probs) >= 1 - alpha
        answers = np.where(kept[:, None], tokens, PLACEHOLDER_TOKEN_ID)
        accepted = np.where(kept, num_tokens, 0)
        models.recorder.add(StepResult(answers, accepted, num_tokens, accepted, ~kept, status))
        models.recorder.rejected += int(num_tokens[~kept].sum())

        state.host_active = ~kept
        state.active &= torch.from_numpy(~kept).to(state.device)
        while state.host_active.any():
            models.target_forwards += 1
            models.record(verify_step(state, models.target, Draft(state.tokens[:, :0]), None, models.ends))
        return models.output()


def _drafted_answers(models: TwoModels) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the draft writes by itself: tokens ``[batch, longest + 1]`` int64, −1 after them; the sums of their raw
    log-probabilities ``[batch]`` float64; flags ``[batch]`` int64.
    """
    prompt, seeds = models.state.prompt, models.state.seeds
    most = int(models.state.host_remaining[0])
    state = DecodingState.begin(prompt, models.draft, "token", models.draft_sampling, seeds, most, 0)
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
        outcome = append(state, draw.token, one, one, one, draw.stats.status[:, 0], models.ends)
        results.append(take_in(state, outcome.cpu().numpy()))
    tokens = np.concatenate([result.tokens for result in results], axis=1)
    tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=PLACEHOLDER_TOKEN_ID)
    return tokens, log_probs.cpu().numpy(), np.bitwise_or.reduce([result.status for result in results])
