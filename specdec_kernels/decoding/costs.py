"""What a step costs by its number of draft tokens, as learned from the steps or as handed in; and what drafts have
gained at these costs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..checks import check_flag, check_int, check_number
from ..tree import MAX_DEPTH, MAX_NODES

AUTO_DRAFT_LENGTHS = (0, 1, 3, 7)
"""What "auto" chooses from: 1, 2, 4 or 8 verified rows a sequence."""

_NOMINAL_ROW, _NOMINAL_DRAFT = 0.05, 0.1  # of a plain step: each row more of the batch, and a token of a draft model
# What a first call assumes is less, as what seems cheap is tried and then known: a step takes as long as its rows and
# so many more, which stand for reading the weights.
_ROWS_OF_WEIGHTS, _ROWS_OF_WEIGHTS_ON_GPU, _ASSUMED_DRAFT = 26.0, 300.0, 0.06


@dataclass(frozen=True, eq=False)
class CostTable:
    """What ``num_speculative_tokens="auto"`` took a step of the batch to cost; handed in again, it decides the same.

    A table is revised while a call goes on, so it has a row for each revision.

    Attributes
    ----------
    steps : ndarray
        ``[revisions]`` int64, increasing, the first 0: the step of the call from which a revision counts.
    seconds : ndarray
        ``[revisions, 4]`` float64, > 0 and never falling along a row: of a step with 0, 1, 3 and 7 draft tokens a
        sequence, drafting and verifying, in any unit. Of drafters of trees ``[revisions, 2]``: of a plain step and of
        one with the tree.
    ahead : float
        Plain steps by which the calls before it were ahead of plain decoding, or < 0: behind. What drafts may lose at
        first is so much more, at most twice as much as with 0, or less, at least nothing.
    compared : bool
        False: no call before it had compared steps of different lengths, so that this one did so sooner.

    Raises
    ------
    ValueError, TypeError
        Other shapes, steps or times; no numpy arrays of numbers; `ahead` no finite number; `compared` no bool.
    """

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    ahead: float = 0.0
    compared: bool = True

    def __post_init__(self) -> None:
        for name, value, kinds, kind in (
            ("steps", self.steps, "iu", "integer"),
            ("seconds", self.seconds, "iuf", "real"),
        ):
            if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
                got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise TypeError(f"CostTable: {name} must be a numpy array of {kind} numbers, got {got}")
        steps, seconds = self.steps.astype(np.int64), self.seconds.astype(np.float64)
        if steps.ndim != 1 or len(steps) == 0 or steps[0] != 0 or (np.diff(steps) <= 0).any():
            raise ValueError(f"CostTable: steps must be [revisions >= 1], increasing from 0, got {steps}")
        if seconds.shape not in ((len(steps), len(AUTO_DRAFT_LENGTHS)), (len(steps), 2)):
            raise ValueError(
                f"CostTable: seconds must be [revisions={len(steps)}, {len(AUTO_DRAFT_LENGTHS)}], of trees 2, "
                f"got {list(seconds.shape)}"
            )
        if not (np.isfinite(seconds) & (seconds > 0)).all() or (np.diff(seconds, axis=1) < 0).any():
            raise ValueError("CostTable: seconds must be finite, > 0 and never fall along a row, got others")
        check_number("CostTable", "ahead", self.ahead, -sys.float_info.max, sys.float_info.max)
        check_flag("CostTable", "compared", self.compared)
        object.__setattr__(self, "ahead", float(self.ahead))
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "seconds", seconds)

    @staticmethod
    def nominal(draft_model: bool, batch_size: int = 1, num_nodes: int | None = None, max_depth: int = 1) -> CostTable:
        """The same on every machine: a row verified beside a sequence's first costs a twentieth of a plain step.

        On a GPU with rows to spare that is too much: hand in a table that was measured there.

        Parameters
        ----------
        draft_model : bool
            Drafting a token takes a tenth of a plain step, not nothing.
        batch_size : int
            Sequences, >= 1.
        num_nodes : int, optional
            Of a drafter's trees, the root included, 1 … 1024. None: it drafts chains.
        max_depth : int
            Of those trees, 1 … 64.

        Raises
        ------
        ValueError, TypeError
            A number out of its range, or something else.
        """
        check_flag("CostTable", "draft_model", draft_model)
        check_int("CostTable", "batch_size", batch_size, 1, None)
        check_int("CostTable", "max_depth", max_depth, 1, MAX_DEPTH)
        if num_nodes is not None:
            check_int("CostTable", "num_nodes", num_nodes, 1, MAX_NODES)
        seconds = _of_work(_NOMINAL_ROW * batch_size, _NOMINAL_DRAFT * draft_model, num_nodes, max_depth)
        return CostTable(np.zeros(1, np.int64), seconds[None])

    def at(self, step: int) -> NDArray[np.float64]:
        """``[4]``, of trees ``[2]``: what counts in this step of the call."""
        check_int("CostTable", "step", step, 0, None)
        return self.seconds[np.searchsorted(self.steps, step, side="right") - 1]

    def learn(self, step: int, choice: int, seconds: float | None) -> None:
        """Do nothing: a table that was handed in does not change."""

    def meet(self, choice: int) -> None:
        """Do nothing: a table that was handed in does not change."""

    def leave(self, ahead: float) -> None:
        """Do nothing: a table that was handed in does not change."""

    @property
    def table(self) -> CostTable:
        """This table."""
        return self


def _of_work(row: float, draft: float, num_nodes: int | None, max_depth: int) -> NDArray[np.float64]:
    """``[4]``, of trees ``[2]``, in plain steps, of which a row of each sequence and a drafted token take these."""
    rows = depths = np.array(AUTO_DRAFT_LENGTHS)
    if num_nodes is not None:
        rows, depths = np.array([0, num_nodes - 1]), np.array([0, max_depth])
    return np.asarray(1 + row * rows + draft * depths)


class LearnedCosts:
    """Learns from the times of all steps, by a Kalman filter on their logarithms.

    The time of a step is taken as the product of three: what its number of draft tokens costs, how slow the machine is
    just then, which wanders, and chance. So a machine that slows down for a while does not look as if one length had
    become dearer, and chance is averaged over the steps before and after a change of lengths, the nearest above all.
    The first step with a draft of some length says nothing: there may be something to compile, or to read for a draft
    model.

    Parameters
    ----------
    seconds : ndarray
        ``[4]``, of trees ``[2]``, float64 to start from.
    covariance : ndarray
        ``[4, 4]``, of trees ``[2, 2]``, float64: of their logarithms, in units of the variance by chance of a time; 0
        for plain steps, by which the others are measured.
    ahead : float
        See `CostTable`.
    before : iterable of int
        Places in the table of the lengths that calls before it have drafted.
    compared : bool
        See `CostTable`.
    guess : ndarray, optional
        Like `seconds`, what the first call assumed; None: `seconds`.
    """

    # What the variances grow by with each step, so that what changes is noticed: about the last 7 steps tell how slow
    # the machine is, and the last 100 with and without drafts what these cost.
    _WANDERS, _CHANGE = 0.02, 0.0001
    _NOTED = 0.002  # changes below this share are not, and nothing is decided by them
    # In natural logarithm: a step that was interrupted says no more than that. Perhaps the machine has become slower or
    # faster at once: that is then so much less certain.
    _LARGEST_SURPRISE, _JUMP = 0.7, 2.0
    # A call that compares nothing moves the costs at most this share of the way back to the guess, and less the more
    # comparisons there have been: otherwise a length that once looked too expensive, perhaps because a step was
    # interrupted, would never be tried again.
    _FADING = 0.12
    # Standard deviations before anything was measured, in those of a step's time: of the work beside a plain step's,
    # which is dear or cheap at all lengths alike, and of each length alone.
    _ALIKE, _ALONE = 30.0, 1.0

    def __init__(
        self, seconds: NDArray[np.float64], covariance: NDArray[np.float64], ahead: float = 0.0,
        before: Iterable[int] = (), compared: bool = True, guess: NDArray[np.float64] | None = None,
    ) -> None:  # fmt: skip
        self.ahead = self._left = ahead
        self.compared = compared
        self._guess = seconds if guess is None else guess
        self._log = np.log(np.append(seconds, 1.0))  # and the machine's slowness, of which nothing is known yet
        self._covariance = np.pad(covariance, (0, 1))
        self._change = np.append(np.where(covariance.diagonal() > 0, self._CHANGE, 0.0), self._WANDERS)
        self._met = {0, *before}
        self._learned: set[int] = set()  # places in the table, of lengths whose steps were timed
        self._revisions: list[tuple[int, NDArray[np.float64]]] = [(0, self._now())]

    @staticmethod
    def assumed(
        draft_model: bool, batch_size: int, num_nodes: int | None, max_depth: int, on_gpu: bool
    ) -> LearnedCosts:
        """What a first call assumes; parameters are those of `CostTable.nominal`, and whether steps run on a GPU."""
        weights = _ROWS_OF_WEIGHTS_ON_GPU if on_gpu else _ROWS_OF_WEIGHTS
        row = batch_size / (weights + batch_size)
        seconds = _of_work(row, _ASSUMED_DRAFT * draft_model, num_nodes, max_depth)
        more = LearnedCosts._ALIKE * (1 - 1 / seconds)
        alone = LearnedCosts._ALONE**2 * np.diag((more > 0).astype(np.float64))
        return LearnedCosts(seconds, np.outer(more, more) + alone, compared=False)

    def _now(self) -> NDArray[np.float64]:
        # A longer draft never costs less: where it seems to, that is noise.
        return np.asarray(np.maximum.accumulate(np.exp(self._log[:-1])))

    def at(self, step: int) -> NDArray[np.float64]:
        """``[4]``, of trees ``[2]``: what is known before this step, the next one."""
        return self._revisions[-1][1]

    def learn(self, step: int, choice: int, seconds: float | None) -> None:
        """Take in the time of this step, whose draft was of that place in the table; None, or 0 on a coarse clock: that
        says nothing.
        """
        if not seconds:
            return
        if choice not in self._met:
            self._met.add(choice)
            return
        surprise = math.log(seconds) - self._log[choice] - self._log[-1]
        if not self._learned:  # all of it is the machine's slowness, then as uncertain as this cost
            self._log[-1] += surprise
            self._covariance[-1] = self._covariance[:, -1] = -self._covariance[choice]
            self._covariance[-1, -1] = self._covariance[choice, choice] + 1
        else:
            if abs(surprise) > self._LARGEST_SURPRISE:
                surprise = math.copysign(self._LARGEST_SURPRISE, surprise)
                self._covariance[-1, -1] += self._JUMP
            along = self._covariance[choice] + self._covariance[-1]  # of each with the time
            gain = along / (along[choice] + along[-1] + 1)
            self._log = self._log + gain * surprise
            self._covariance = self._covariance - np.outer(gain, along)
        self._covariance.flat[:: len(self._change) + 1] += self._change
        self._learned.add(choice)
        now = self._now()
        if len(self._learned) > 1 and np.abs(now / self._revisions[-1][1] - 1).max() > self._NOTED:
            self._revisions.append((step + 1, now))

    def meet(self, choice: int) -> None:
        """Take in that a step with a draft of that place in the table was made; its time says nothing, the next one's
        does.
        """
        self._met.add(choice)

    def leave(self, ahead: float) -> None:
        """Take in how far the call is ahead of plain decoding by now, for the next one."""
        self._left = ahead

    @property
    def table(self) -> CostTable:
        """All that was known, step by step."""
        steps, seconds = zip(*self._revisions, strict=True)
        return CostTable(np.array(steps), np.array(seconds), self.ahead, self.compared)

    def continued(self) -> LearnedCosts:
        """For the next call: what is known now."""
        compares = len(self._learned) > 1
        log, covariance = self._log[:-1], self._covariance[:-1, :-1]
        if not compares:
            variance = covariance.diagonal()
            log = log + self._FADING * variance / (variance + 2) * (np.log(self._guess) - log)
        compared = self.compared or compares
        return LearnedCosts(np.exp(log), covariance, self._left, self._met, compared, self._guess)
