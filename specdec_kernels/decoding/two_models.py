"""What the loops without speculation share: a target and a draft, and the record of what they write."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..sampling import SamplingParams
from ..types import PLACEHOLDER_TOKEN_ID, RowStats
from .arguments import check_draft, check_text, end_ids, make_prompt, make_seeds
from .generate import make_output
from .output import GenerationOutput, Recorder
from .runner import Runner, as_runner
from .schedule import synchronize
from .state import DecodingState
from .step import advance, take_in

MAX_ROWS = 64
"""Rows of a sequence that one forward is fed, where only the last one's logits are wanted: all of them are made."""


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
    target, draft : Runner
    draft_sampling : SamplingParams
    ends : Tensor
        ``[num_eos]`` int64, perhaps none.
    state : DecodingState
        Of the texts, with the target's sampling parameters.
    recorder : Recorder
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
        ends = end_ids(caller, model, self.target, eos_token_id)
        self.ends = input_ids.new_empty(0, dtype=torch.int64) if ends is None else ends
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
    def at_work(self) -> Iterator[None]:
        """Within, both have read the prompts."""
        with torch.inference_mode(), ExitStack() as cleanup:
            began = time.perf_counter()
            for runner in (self.target, self.draft):
                cleanup.callback(runner.finish)
                runner.start(self.state.prompt, self.state.capacity)
                runner.prefill(self.state.prompt)
            synchronize(self.state.device)
            self._started = time.perf_counter()
            self._seconds_prefill = self._started - began
            yield

    def record(self, outcome: Tensor) -> None:
        """Take in a step of the batch: the one transfer of its outcome to the host."""
        self.recorder.add(take_in(self.state, outcome.cpu().numpy()))

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
    for first in range(0, unseen, MAX_ROWS):
        rows = text[:, first : first + MAX_ROWS]
        logits = runner.forward(rows, starts + first, state.longest, need_logits=first + MAX_ROWS >= unseen)
    assert logits is not None
    return logits[:, -1:]


def append(
    state: DecodingState, tokens: Tensor, num_drafted: Tensor, num_accepted: Tensor, status: Tensor, ends: Tensor
) -> Tensor:
    """Append `tokens` ``[batch, width + 1]``, −1 after those of a sequence, to every active one.

    The counts and flags are ``[batch]``, and those of idle sequences do not matter. Returns the outcome, for `take_in`.
    """
    idle = ~state.active
    tokens = tokens.masked_fill(idle[:, None], PLACEHOLDER_TOKEN_ID)
    num_tokens = (tokens != PLACEHOLDER_TOKEN_ID).sum(1)
    num_drafted, num_accepted = num_drafted.masked_fill(idle, -1), num_accepted.masked_fill(idle, 0)
    return advance(state, tokens, num_tokens, num_drafted, num_accepted, status.masked_fill(idle, 0), ends)


def raw_log_probs(logits: Tensor, stats: RowStats, tokens: Tensor) -> Tensor:
    """``[batch, n]`` float32: log-probabilities in nats of `tokens` ``[batch, n]`` in the rows `logits` ``[batch, n,
    vocab]`` as they are (temperature 1, nothing cut), whose `stats` are given.
    """
    log_probs = logits.gather(2, tokens[..., None])[..., 0].float() - stats.raw_log_normalizer
    # a NaN or an infinity: the token, or the whole row, is one whose law is all mass on the argmax or elsewhere
    hot = torch.where(tokens == stats.argmax, 0.0, -math.inf)
    return torch.where(log_probs.isfinite(), log_probs, hot)


def max_prob(stats: RowStats) -> Tensor:
    """The largest probability of each row, from its `stats` at temperature 1 with nothing cut."""
    return 1 / stats.normalizer
