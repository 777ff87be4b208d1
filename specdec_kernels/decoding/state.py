"""What a decoding loop keeps between steps, on the device, and the little of it that the host knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..laws import TargetLaw
from ..ops.verify_tree import DELTA, EPSILON
from ..processors import Processors
from ..sampling import GREEDY, SamplingParams
from ..types import TokenCounts, TokenLogprobs
from .grammar import Masks
from .logprobs import split
from .runner import Prompt, Runner

OUTCOME_COLUMNS = 5
"""Columns of a step's outcome beside the tokens."""


@dataclass(frozen=True)
class Speculation:
    """How a loop speculates.

    Attributes
    ----------
    acceptance : str
        See `generate`.
    max_draft_tokens : int
        The most draft tokens of a sequence that a step puts to the test.
    target_law : TargetLaw or None
        What verification is to produce; None: the target's distribution.
    hidden_size : int or None
        Width of the target's hidden states that drafting reads; None: it reads none.
    epsilon, delta : float
        Of acceptance "typical".
    """

    acceptance: str = "token"
    max_draft_tokens: int = 0
    target_law: TargetLaw | None = None
    hidden_size: int | None = None
    epsilon: float = EPSILON
    delta: float = DELTA


@dataclass(eq=False)
class DecodingState:
    """The state of one `generate` call. Drafters read it; only the loop writes it.

    Its tensors are changed in place and never replaced: a captured step reads and writes them. What the host knows may
    be a step behind them.

    Attributes
    ----------
    prompt : Prompt
    acceptance : str
    sampling : SamplingParams
        The target's.
    target_law : TargetLaw or None
        What verification is to produce; None: the target's distribution.
    seeds : Tensor
        ``[batch]`` int64.
    vocab_size : int
        The target's.
    max_length : int
        Length of the longest text that this call can reach.
    capacity : int
        Rows of a cache that each sequence needs: `max_length` and one whole step past it.
    tokens : Tensor
        ``[batch, capacity]`` int64: prompt and emitted tokens, left-aligned; defined ids past the length.
    lengths : Tensor
        ``[batch]`` int64. The last of these tokens is in no cache yet: the next forward feeds it.
    remaining : Tensor
        ``[batch]`` int64, tokens that may still be emitted.
    active : Tensor
        ``[batch]`` bool; a finished sequence idles.
    step : Tensor
        ``[batch]`` int64, verify steps done.
    longest : int
        No sequence is longer than this when the coming step begins; known without looking at the device.
    hidden : Tensor or None
        ``[batch, hidden]`` float32, the LM head's input at the token before the last one, from which it predicted the
        last; undefined before the first step. None unless the drafter reads it.
    host_lengths : ndarray
        ``[batch]`` int64, `lengths` as of the last stop check.
    host_remaining : ndarray
        ``[batch]`` int64, `remaining` as of the last stop check.
    host_active : ndarray
        ``[batch]`` bool, `active` as of the last stop check.
    host_limits : ndarray
        ``[batch]`` int64, how many draft tokens of each sequence the coming step puts to the test at most.
    processors : Processors or None
        Of the target's logits; what is emitted is added to their `token_counts`.
    num_top : int or None
        How many ids are listed beside each emitted token, with log-probabilities; None: there are none.
    epsilon, delta : float
        Of acceptance "typical".
    unread_from : int or None
        Until the first step is launched: it reads the prompts from this position on, which nobody has read yet. None:
        all but their last tokens have been read.
    masks : Masks or None
        Of a grammar: ``masks.after(drafts)`` says what it lets follow a draft. None: there is none.

    A step begins with what `at_step` returns, which has its own `longest` and `host_limits`; a drafter is given that.
    """

    prompt: Prompt
    acceptance: str
    sampling: SamplingParams
    target_law: TargetLaw | None
    seeds: Tensor
    vocab_size: int
    max_length: int
    capacity: int
    tokens: Tensor
    lengths: Tensor
    remaining: Tensor
    active: Tensor
    step: Tensor
    longest: int
    hidden: Tensor | None
    host_lengths: np.ndarray
    host_remaining: np.ndarray
    host_active: np.ndarray
    host_limits: np.ndarray
    epsilon: float
    delta: float
    processors: Processors | None = None
    num_top: int | None = None
    masks: Masks | None = None
    unread_from: int | None = None

    @staticmethod
    def begin(
        prompt: Prompt,
        runner: Runner,
        sampling: SamplingParams,
        seeds: Tensor,
        max_new_tokens: int,
        how: Speculation,
        processors: Processors | None = None,
        num_top: int | None = None,
        masks: Masks | None = None,
    ) -> DecodingState:
        """The state before the first step."""
        batch, device = prompt.lengths.numel(), runner.device
        max_length = prompt.longest + max_new_tokens
        capacity = max_length + how.max_draft_tokens + 1
        tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        tokens[:, : prompt.longest] = prompt.tokens
        hidden = None
        if how.hidden_size is not None:
            hidden = torch.zeros(batch, how.hidden_size, dtype=torch.float32, device=device)
        return DecodingState(
            prompt, how.acceptance, sampling, how.target_law, seeds, runner.vocab_size, max_length, capacity, tokens,
            lengths=prompt.lengths.clone(),
            remaining=torch.full_like(prompt.lengths, max_new_tokens),
            active=torch.ones(batch, dtype=torch.bool, device=device),
            step=torch.zeros_like(prompt.lengths),
            longest=prompt.longest,
            hidden=hidden,
            host_lengths=np.array([len(p) for p in prompt.host_tokens], dtype=np.int64),
            host_remaining=np.full(batch, max_new_tokens, dtype=np.int64),
            host_active=np.ones(batch, dtype=bool),
            host_limits=np.full(batch, how.max_draft_tokens, dtype=np.int64),
            epsilon=how.epsilon,
            delta=how.delta,
            processors=processors,
            num_top=num_top,
            masks=masks,
        )  # fmt: skip

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.tokens.device

    @property
    def token_counts(self) -> TokenCounts | None:
        """What the processors count."""
        return None if self.processors is None else self.processors.token_counts

    @property
    def cascade_bonus(self) -> bool:
        """Whether the token after an accepted draft has a mixed distribution too: a draft then needs one row more."""
        return self.target_law is not None and self.target_law.cascade_bonus

    @property
    def effective_sampling(self) -> SamplingParams:
        """How the target's tokens are drawn: acceptance "greedy" overrides `sampling`."""
        return GREEDY if self.acceptance == "greedy" else self.sampling

    def asks_drafter(self, num_tokens: int) -> bool:
        """Whether a step of `num_tokens` draft tokens needs the drafter."""
        return num_tokens > 0 or self.cascade_bonus

    def last_tokens(self) -> Tensor:
        """``[batch, 1]`` int64, the token that the next forward feeds first."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)

    def next_positions(self, num: int) -> Tensor:
        """``[batch, num]`` int64, where the next `num` tokens of each text will stand."""
        return self.lengths[:, None] + torch.arange(num, device=self.device)

    def draft_limits(self, wanted: int) -> np.ndarray:
        """``[batch]`` int64: what is left of `wanted` draft tokens in each sequence, as far as the host knows."""
        return np.where(self.host_active, np.minimum(wanted, self.host_remaining - 1), 0)

    def at_step(self, host_limits: np.ndarray, longest: int) -> DecodingState:
        """The same state as seen by a step that is launched with these; the tensors are shared."""
        return replace(self, host_limits=host_limits, longest=longest)

    def append(
        self, tokens: Tensor, num_tokens: Tensor, num_drafted: Tensor, num_accepted: Tensor, status: Tensor,
        eos_token_ids: Tensor | None, about: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Append what a step yields to the texts; `tokens` is ``[batch, width + 1]``, the others are as in
        `StepResult`; `about` is what `num_top` asks for, in one piece.

        Waits for nothing. Returns the outcome, ``[batch, width + 6]`` int64 and wider with `about`: a `StepResult` in
        one piece, for `take_in`.
        """
        self.tokens.scatter_(1, self.next_positions(tokens.shape[1]), tokens.clamp(min=0))
        if self.token_counts is not None:
            self.token_counts.add_(tokens)
        self.lengths += num_tokens
        self.remaining -= num_tokens
        self.step += 1
        self.active &= self.remaining > 0
        if eos_token_ids is not None:
            self.active &= ~(tokens[:, :, None] == eos_token_ids).flatten(1).any(1)
        counts = (num_tokens, num_drafted, num_accepted, self.active, status)
        said = () if about is None else (about,)
        return torch.cat([tokens, *said, *(count[:, None].long() for count in counts)], dim=1)

    def take_in(self, outcome: np.ndarray) -> StepResult:
        """The result of the oldest step that the host has not seen; from now on the host knows of it."""
        num_tokens, drafted, accepted, active, status = outcome[:, -OUTCOME_COLUMNS:].T
        tokens, logprobs = outcome[:, :-OUTCOME_COLUMNS], None
        if self.num_top is not None:
            tokens, logprobs = split(tokens, self.num_top)
        result = StepResult(tokens, num_tokens, drafted, accepted, active.astype(bool), status, logprobs)
        self.host_lengths = self.host_lengths + result.num_tokens
        self.host_remaining = self.host_remaining - result.num_tokens
        self.host_active = result.active
        self.longest = int(self.host_lengths.max())
        return result


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one step did, on the host.

    Attributes
    ----------
    tokens : ndarray
        ``[batch, width + 1]`` int64: the tokens emitted, −1 after them.
    num_tokens : ndarray
        ``[batch]`` int64 of them.
    num_drafted : ndarray
        ``[batch]`` int64, draft tokens that were put to the test; −1 in an idle row.
    num_accepted : ndarray
        ``[batch]`` int64.
    active : ndarray
        ``[batch]`` bool: goes on after this step.
    status : ndarray
        ``[batch]`` int64, flags of `specdec_kernels.Status`.
    logprobs : TokenLogprobs or None
        ``[batch, width + 1]`` each, on the CPU, where they are asked for.
    """

    tokens: np.ndarray
    num_tokens: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    active: np.ndarray
    status: np.ndarray
    logprobs: TokenLogprobs | None = None
