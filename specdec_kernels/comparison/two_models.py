"""What the loops without speculation share: a target and a draft at work on the same texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..decoding.claims import claimed
from ..decoding.launching import synchronize
from ..decoding.output import Seconds
from ..decoding.request import Request, check_draft
from ..decoding.runner import Runner, checked_logits
from ..decoding.state import DecodingState, Speculation
from ..integrations.runners import as_runner
from ..sampling import SamplingParams
from ..types import PLACEHOLDER_TOKEN_ID, RowStats

MAX_ROWS = 64
"""The most rows of a sequence in a forward of which only the last one's logits are wanted: those of all are made."""


@dataclass(frozen=True)
class TwoModels:
    """A target and a draft at work on the same texts.

    Attributes
    ----------
    target, draft : Runner
    draft_sampling : SamplingParams
    ends : Tensor
        ``[num_eos]`` int64, perhaps none.
    state : DecodingState
        Of the texts, with the target's sampling parameters.
    """

    target: Runner
    draft: Runner
    draft_sampling: SamplingParams
    ends: Tensor
    state: DecodingState

    @staticmethod
    def begin(
        caller: str,
        model: Any,
        draft_model: Any,
        request: Request,
        draft_sampling: SamplingParams | None,
        max_draft_tokens: int,
    ) -> TwoModels:
        """Check what `caller` was given; a step of it puts at most `max_draft_tokens` to the test."""
        target, draft = as_runner(model, caller), as_runner(draft_model, caller, "draft_model")
        request.check(caller, target)
        if draft is target:
            raise ValueError(f"{caller}: draft_model must be a Runner of its own, got the target's")
        ends = request.ends(caller, target)
        if ends is None:
            ends = request.input_ids.new_empty(0, dtype=torch.int64)
        state = DecodingState.begin(
            request.prompt(target), target, request.sampling, request.make_seeds(target), request.max_new_tokens,
            Speculation(max_draft_tokens=max_draft_tokens),
        )  # fmt: skip
        check_draft(caller, draft, state, "draft_sampling", draft_sampling)
        return TwoModels(target, draft, request.sampling if draft_sampling is None else draft_sampling, ends, state)

    @contextmanager
    def at_work(self, caller: str) -> Iterator[Callable[[], Seconds]]:
        """Within, both have read the prompts and serve no other call. The function that it yields returns the seconds
        that took, and those since.
        """
        with torch.inference_mode(), ExitStack() as cleanup:
            cleanup.enter_context(claimed(caller, model=self.target, draft_model=self.draft))
            began = time.perf_counter()
            for runner in (self.target, self.draft):
                cleanup.callback(runner.finish)
                runner.start(self.state.prompt, self.state.capacity)
                runner.prefill(self.state.prompt)
            synchronize(self.state.device)
            started = time.perf_counter()
            yield lambda: Seconds(started - began, time.perf_counter() - started)


def last_row(runner: Runner, state: DecodingState, unseen: int) -> Tensor:
    """``[batch, 1, vocab]``: the logits of each sequence's next token, from a model that has not seen the last `unseen`
    tokens of any active one. Where it has seen some of them, it is fed the same rows again.
    """
    starts = (state.lengths - unseen).clamp(min=0)  # < 0: only where a sequence idles
    text = state.tokens.gather(1, starts[:, None] + torch.arange(unseen, device=state.device))
    for first in range(0, unseen, MAX_ROWS):
        rows = text[:, first : first + MAX_ROWS]
        logits = runner.forward(rows, starts + first, state.longest, need_logits=first + MAX_ROWS >= unseen)
    return checked_logits(runner, "forward", logits, rows.shape)[:, -1:]


def append(
    state: DecodingState, tokens: Tensor, num_drafted: Tensor, num_accepted: Tensor, status: Tensor, ends: Tensor
) -> Tensor:
    """Append `tokens` ``[batch, width + 1]``, −1 after those of a sequence, to every active one.

    The counts and flags are ``[batch]``, and those of idle sequences do not matter. Returns the outcome, for
    `DecodingState.take_in`.
    """
    idle = ~state.active
    tokens = tokens.masked_fill(idle[:, None], PLACEHOLDER_TOKEN_ID)
    num_tokens = (tokens != PLACEHOLDER_TOKEN_ID).sum(1)
    num_drafted, num_accepted = num_drafted.masked_fill(idle, -1), num_accepted.masked_fill(idle, 0)
    return state.append(tokens, num_tokens, num_drafted, num_accepted, status.masked_fill(idle, 0), ends)


def raw_log_probs(logits: Tensor, stats: RowStats, tokens: Tensor) -> Tensor:
    """``[batch, n]`` float32: log-probabilities in nats of `tokens` ``[batch, n]`` in the rows `logits` ``[batch, n,
    vocab]`` as they are (temperature 1, nothing cut), whose `stats` are given.
    """
    log_probs = logits.gather(2, tokens[..., None])[..., 0].float() - stats.raw_log_normalizer
    # a NaN or an infinity: the token, or the whole row, is one with all mass on the argmax or elsewhere
    hot = torch.where(tokens == stats.argmax, 0.0, -math.inf)
    return torch.where(log_probs.isfinite(), log_probs, hot)


def max_prob(stats: RowStats) -> Tensor:
    """The largest probability of each row, from its `stats` at temperature 1 with nothing cut."""
    return 1 / stats.normalizer
