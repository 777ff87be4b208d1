"""What a generation returns: tokens, where each of them came from, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import TokenLogprobs
from .costs import CostTable
from .logprobs import LogprobsRecorder
from .runner import Runner
from .state import StepResult


class Provenance(IntEnum):
    """Where a token came from."""

    PADDING = -1
    ACCEPTED = 0
    """A draft token that the target accepted."""
    RECOVERED = 1
    """Drawn by the target in place of a rejected draft token."""
    BONUS = 2
    """Drawn by the target after its whole draft was accepted; every token of a step without a draft."""


@dataclass(frozen=True, eq=False)
class GenerationStats:
    """Counts and times of one `generate` call.

    Attributes
    ----------
    num_tokens : int
        Tokens emitted, over all sequences.
    num_steps : int
        Verify steps of single sequences (a step of the batch counts once for every sequence active in it).
    num_drafted, num_accepted, num_rejected : int
        Draft tokens put to the test (those after a drafted end of sequence, or that `stop` cut off, count, too);
        accepted; rejected (at most one a step, what follows it is never judged). Of a tree, the tokens of the deepest
        path that continues the accepted one count as put to the test.
    drafted_per_position, accepted_per_position : ndarray
        ``[longest draft]`` int64: steps whose draft reached the position (from 0); steps in which it was accepted.
    target_forwards, draft_steps : int
        Forwards of the target over the batch that tokens came from; steps in which the drafter was asked.
    seconds_prefill, seconds_decode : float
        Wall clock, in seconds; the first includes starting the drafter. Where the first step reads the last part of the
        prompts (`Runner.gives_rows`), it belongs to prefill.
    num_tokens_decode : int
        Of `num_tokens`, those emitted after prefill.
    costs : CostTable or None
        What "auto" chose draft lengths by; None where it did not.
    """

    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_rejected: int
    drafted_per_position: np.ndarray
    accepted_per_position: np.ndarray
    target_forwards: int
    draft_steps: int
    seconds_prefill: float
    seconds_decode: float
    num_tokens_decode: int
    costs: CostTable | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step of a sequence, the recovered or bonus token included; 1 is plain decoding."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all draft tokens, those after a rejection included; NaN if there were none."""
        return self.num_accepted / self.num_drafted if self.num_drafted else float("nan")

    @property
    def acceptance_rate_per_position(self) -> np.ndarray:
        """``[longest draft]`` float64: share of the drafts that reached a position in which it was accepted."""
        return self.accepted_per_position / np.maximum(self.drafted_per_position, 1)

    @property
    def alpha(self) -> float:
        """Estimate of α, the probability that a draft token is accepted where all before it were; NaN without drafts.

        Accepted over judged draft tokens: the maximum-likelihood estimate if acceptances are independent.
        """
        judged = self.num_accepted + self.num_rejected
        return self.num_accepted / judged if judged else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted a second of decoding (prefill not counted), over all sequences; NaN if there were none."""
        return self.num_tokens_decode / self.seconds_decode if self.num_tokens_decode else float("nan")


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """What `generate` returns.

    Attributes
    ----------
    sequences : Tensor
        ``[batch, prompt + longest]`` int64 on the model's device: the prompts as given (for an encoder-decoder, the
        decoder's start token), then the new tokens, then padding ids.
    tokens : Tensor
        ``[batch, longest]`` int64 on the CPU: the new tokens alone, −1 after them.
    num_tokens : Tensor
        ``[batch]`` int64 on the CPU, new tokens of each sequence, EOS included.
    provenance : Tensor
        ``[batch, longest]`` int8 on the CPU, a `Provenance` for each new token.
    status : Tensor
        ``[batch]`` int64 on the CPU, flags of `specdec_kernels.Status` raised in any step (0: all went well).
    stats : GenerationStats
    logprobs : TokenLogprobs or None
        ``[batch, longest]`` each on the CPU, of `tokens`; None unless asked for.
    """

    sequences: Tensor
    tokens: Tensor
    num_tokens: Tensor
    provenance: Tensor
    status: Tensor
    stats: GenerationStats
    logprobs: TokenLogprobs | None = None


class Seconds(NamedTuple):
    """Wall clock of a call's parts; see `GenerationStats`."""

    prefill: float
    decode: float


def of_each(rows: np.ndarray, result: StepResult) -> list[np.ndarray]:
    """The entries of ``[batch, width + 1]`` that belong to the tokens that each sequence was given."""
    return [row[:n] for row, n in zip(rows, result.num_tokens, strict=True)]


def origins(result: StepResult) -> np.ndarray:
    """``[batch, width + 1]`` int64: a `Provenance` for each of a step's tokens."""
    columns = np.arange(result.tokens.shape[1])
    num_accepted, num_drafted = result.num_accepted[:, None], result.num_drafted[:, None]
    drawn = np.where(num_accepted == num_drafted, Provenance.BONUS, Provenance.RECOVERED)
    found = np.where(columns < num_accepted, Provenance.ACCEPTED, drawn)
    found[columns >= result.num_tokens[:, None]] = Provenance.PADDING
    return found


class Recorder:
    """Collects the steps' results on the host.

    Parameters
    ----------
    batch_size, max_new_tokens, max_draft_tokens : int
    num_top : int, optional
        See `DecodingState`.

    Attributes
    ----------
    target_forwards, draft_steps : int
        See `GenerationStats`; the loop counts.
    num_tokens_prefill : int
        Tokens that prefill emitted; the loop counts.
    """

    def __init__(self, batch_size: int, max_new_tokens: int, max_draft_tokens: int, num_top: int | None = None) -> None:
        # A whole draft is written at once, past the limit if need be: placeholders are overwritten or cut off.
        room = max_new_tokens + max_draft_tokens + 1
        self.tokens = np.full((batch_size, room), -1, dtype=np.int64)
        self.provenance = np.full((batch_size, room), Provenance.PADDING, dtype=np.int8)
        self.num_tokens = np.zeros(batch_size, dtype=np.int64)
        self.status = np.zeros(batch_size, dtype=np.int64)
        self.steps = self.drafted = self.accepted = self.rejected = 0
        self.target_forwards = self.draft_steps = self.num_tokens_prefill = 0
        self.drafted_per_position = np.zeros(max_draft_tokens, dtype=np.int64)
        self.accepted_per_position = np.zeros(max_draft_tokens, dtype=np.int64)
        self._rows = np.arange(batch_size)[:, None]
        self._logprobs = None if num_top is None else LogprobsRecorder(batch_size, room, num_top)

    def add(self, result: StepResult) -> None:
        """Take in one step."""
        width = result.tokens.shape[1] - 1
        columns = np.arange(width + 1)
        num_accepted, num_drafted = result.num_accepted[:, None], result.num_drafted[:, None]
        origin = origins(result)
        slots = self.num_tokens[:, None] + columns
        self.tokens[self._rows, slots] = result.tokens
        self.provenance[self._rows, slots] = origin
        if self._logprobs is not None and result.logprobs is not None:
            self._logprobs.add(slots, result.logprobs)
        self.num_tokens += result.num_tokens
        self.status |= result.status

        worked = result.num_drafted >= 0
        self.steps += int(worked.sum())
        self.drafted += int(result.num_drafted[worked].sum())
        self.accepted += int(result.num_accepted.sum())
        self.rejected += int((origin == Provenance.RECOVERED).sum())
        if width:
            self.drafted_per_position[:width] += (columns[:width] < num_drafted).sum(0)
            self.accepted_per_position[:width] += (columns[:width] < num_accepted).sum(0)

    def stats(self, seconds: Seconds, costs: CostTable | None = None) -> GenerationStats:
        """The counts so far, and the times."""
        reached = int((self.drafted_per_position > 0).sum())
        num_tokens = int(self.num_tokens.sum())
        return GenerationStats(
            num_tokens, self.steps, self.drafted, self.accepted, self.rejected,
            self.drafted_per_position[:reached], self.accepted_per_position[:reached],
            self.target_forwards, self.draft_steps, *seconds, num_tokens - self.num_tokens_prefill, costs,
        )  # fmt: skip

    def output(
        self, runner: Runner, input_ids: Tensor, seconds: Seconds, costs: CostTable | None = None
    ) -> GenerationOutput:
        """What a loop returns, from what was recorded."""
        longest = int(self.num_tokens.max())
        tokens = torch.from_numpy(self.tokens[:, :longest].copy())
        padded = tokens.masked_fill(tokens < 0, runner.padding_id).to(runner.device)
        if runner.decoder_start is None:
            head = input_ids.to(runner.device, torch.int64)
        else:
            head = padded.new_full((input_ids.shape[0], 1), runner.decoder_start)
        return GenerationOutput(
            sequences=torch.cat([head, padded], dim=1),
            tokens=tokens,
            num_tokens=torch.from_numpy(self.num_tokens),
            provenance=torch.from_numpy(self.provenance[:, :longest].copy()),
            status=torch.from_numpy(self.status),
            stats=self.stats(seconds, costs),
            logprobs=None if self._logprobs is None else self._logprobs.output(self.num_tokens),
        )
