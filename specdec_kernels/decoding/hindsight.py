"""What drafts would have yielded that were never verified."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import Drafter
from .schedule import AutoSchedule
from .state import DecodingState, StepResult


class Hindsight:
    """Judges a drafter by plain steps: as far as what it would have proposed is what was emitted.

    A token of a one-hot draft is accepted with the probability that the target gives it, which is also the one with
    which a plain step emits it: what is learned is the same, and no step is spent on it.

    Parameters
    ----------
    drafter : Drafter
    schedule : AutoSchedule
        Is told what came of it.
    """

    def __init__(self, drafter: Drafter, schedule: AutoSchedule) -> None:
        self._drafter, self._schedule = drafter, schedule
        self._foreseen: NDArray[np.int64] | None = None  # [batch, width], -1 where there is nothing
        self._met = np.empty(0, dtype=np.int64)  # [batch]: how much of it came true
        self._open = self._failed = np.empty(0, dtype=bool)  # [batch]: not judged yet; and then another token came

    def look(self, state: DecodingState) -> None:
        """Before a step: what would be proposed, if the last proposal has been judged."""
        if self._foreseen is not None or self._schedule.next() > 0:
            return
        longest = self._schedule.max_draft_tokens
        at_step = state.at_step(state.draft_limits(longest), state.longest)
        foreseen = self._drafter.foresee(at_step, longest)
        if foreseen is None or not (foreseen >= 0).any():
            return
        self._foreseen = np.pad(foreseen, ((0, 0), (0, 1)), constant_values=-1)
        self._met = np.zeros(state.batch_size, dtype=np.int64)
        self._open = state.host_active
        self._failed = np.zeros_like(self._open)

    def judge(self, result: StepResult) -> None:
        """After a step: how much of it has come true; what is judged in every sequence goes to the schedule."""
        if self._foreseen is None:
            return
        if result.tokens.shape[1] > 1:  # it was verified
            self._foreseen = None
            return
        same = self._foreseen[np.arange(len(self._met)), self._met] == result.tokens[:, 0]
        self._met = self._met + (self._open & same)
        self._failed = self._failed | (self._open & ~same)
        self._open = self._open & same & result.active
        if not self._open.any():
            self._schedule.judge(self._met, self._failed)
            self._foreseen = None
