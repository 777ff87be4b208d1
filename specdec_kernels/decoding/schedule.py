"""How many tokens each sequence drafts in its next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ..analysis.theory import best_draft_length
from .state import StepResult

AUTO_DRAFT_LENGTHS = (0, 1, 3, 7)
"""What "auto" chooses from: 1, 2, 4 or 8 verified rows a sequence."""


class Schedule(ABC):
    """Chooses the number of draft tokens from what a sequence has already emitted, and from nothing else."""

    max_draft_tokens: int
    learns: bool
    """Whether `next` depends on the steps noted so far."""

    @abstractmethod
    def next(self) -> int | np.ndarray:
        """Draft tokens of the next step: one number, or ``[batch]`` int64."""

    @abstractmethod
    def round_up(self, width: int) -> int:
        """Width that a draft of `width` tokens is padded to, so that few different row counts are ever verified."""

    def note(self, result: StepResult) -> None:  # noqa: B027 - a fixed schedule learns nothing
        """Learn from a step."""


class FixedSchedule(Schedule):
    """The same number every time."""

    learns = False

    def __init__(self, num_tokens: int) -> None:
        self.max_draft_tokens = num_tokens

    def next(self) -> int | np.ndarray:
        return self.max_draft_tokens

    def round_up(self, width: int) -> int:
        return self.max_draft_tokens if width else 0


@dataclass(frozen=True)
class CostTable:
    """Measured times of one step of the whole batch, frozen when a generation starts.

    Attributes
    ----------
    seconds : ndarray
        ``[len(AUTO_DRAFT_LENGTHS)]`` float64: drafting and verifying so many tokens.
    """

    seconds: np.ndarray


class AutoSchedule(Schedule):
    """Each sequence drafts as many tokens as maximise its expected tokens a second, none where that does not pay.

    Its acceptance probability is estimated from the sequence's own steps, the older ones counting less, and
    `best_draft_length` chooses by it. A sequence that does not draft tries one token again now and then, less and less
    often while that fails.

    Parameters
    ----------
    batch_size : int
    costs : CostTable
    """

    max_draft_tokens = AUTO_DRAFT_LENGTHS[-1]
    learns = True
    _MEMORY = 0.97  # weight left to a judged token by the next one: about the last 33 count
    _PRIOR = (1.0, 2.0)  # accepted and judged tokens assumed before the first step
    _MARGIN = 1.02  # a gain below this does not pay for the risk of a wrong estimate
    _FIRST_PROBE, _LAST_PROBE = 8, 64  # steps without drafting before another try

    def __init__(self, batch_size: int, costs: CostTable) -> None:
        self._lengths = np.array(AUTO_DRAFT_LENGTHS, dtype=np.int64)
        self._seconds = costs.seconds
        self._accepted = np.full(batch_size, self._PRIOR[0])
        self._judged = np.full(batch_size, self._PRIOR[1])
        self._idle_steps = np.zeros(batch_size, dtype=np.int64)
        self._probe_after = np.full(batch_size, self._FIRST_PROBE, dtype=np.int64)

    def next(self) -> int | np.ndarray:
        lengths = self._best()
        lengths[(lengths == 0) & (self._idle_steps >= self._probe_after)] = 1
        return lengths

    def round_up(self, width: int) -> int:
        return int(self._lengths[np.searchsorted(self._lengths, width)])

    def note(self, result: StepResult) -> None:
        drafted = result.num_drafted > 0
        rejected = drafted & (result.num_accepted < result.num_drafted) & (result.num_tokens > result.num_accepted)
        judged = np.where(drafted, result.num_accepted, 0) + rejected
        kept = self._MEMORY**judged
        self._accepted = self._accepted * kept + np.where(drafted, result.num_accepted, 0)
        self._judged = self._judged * kept + judged

        pays = self._best() > 0
        probed = drafted & ~pays & (self._idle_steps >= self._probe_after)
        hopeful = probed & ~rejected  # goes on trying: its idle steps still count
        longer = np.minimum(2 * self._probe_after, self._LAST_PROBE)
        self._probe_after = np.where(pays, self._FIRST_PROBE, np.where(probed & rejected, longer, self._probe_after))
        self._idle_steps = np.where(drafted & ~hopeful, 0, self._idle_steps + ~drafted)

    def _best(self) -> np.ndarray:
        """``[batch]`` int64, the length of the best expected rate under the present estimate."""
        return best_draft_length(self._accepted / self._judged, self._lengths, self._seconds, self._MARGIN)
