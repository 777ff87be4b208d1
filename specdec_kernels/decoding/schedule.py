"""How many tokens are drafted in the next step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from .costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from .state import StepResult

_Ints = NDArray[np.int64]
_Flags = NDArray[np.bool_]
MEMORY = 0.985  # weight left to a judged token by the next one of its kind: about the last 70 count


class Schedule(ABC):
    """Chooses the number of draft tokens from what was emitted already and from what steps cost, nothing else."""

    max_draft_tokens: int
    learns: bool
    """Whether `next` depends on the steps noted so far."""

    @abstractmethod
    def next(self) -> int:
        """Draft tokens of each sequence in the next step."""

    @abstractmethod
    def round_up(self, width: int) -> int:
        """Width that a draft of `width` tokens is padded to, so that few different row counts are ever verified."""

    def note(self, result: StepResult, seconds: float | None) -> None:  # noqa: B027 - a fixed schedule learns nothing
        """Learn from a step and its time; None: that says nothing."""


class FixedSchedule(Schedule):
    """The same number every time, but for a first step without a draft where `first_plain` says so."""

    learns = False

    def __init__(self, num_tokens: int, first_plain: bool = False) -> None:
        self.max_draft_tokens = num_tokens
        self._first_plain = first_plain

    def next(self) -> int:
        if self._first_plain:
            self._first_plain = False
            return 0
        return self.max_draft_tokens

    def round_up(self, width: int) -> int:
        return self.max_draft_tokens if width else 0


class Account:
    """How far a batch is ahead of plain decoding in time, and which steps it can therefore afford.

    Estimates can be wrong, and a text can change. So a draft is made only where what the batch is ahead, a small
    allowance, a share of what the step is expected to gain and what a schedule lends cover what it costs more than a
    plain step. Near the end expectations count less and less, as what is lost there cannot be earned again.

    Parameters
    ----------
    batch_size : int
    max_new_tokens : int
        Of each sequence.
    costs : CostTable or LearnedCosts
    lengths : tuple of int
        Of the drafts among which is chosen, the first 0.
    allowance : float
        What drafts may lose, in plain steps; it grows by `_MORE` with each token emitted. What calls before
        gained or lost counts too, but for at most as much more or less.
    trust : float
        Share of an expected gain that is counted on; the attribute may be changed.
    """

    _MORE = 0.0075  # what drafts may lose besides, with each token
    _NEAR = 32  # the end: so many tokens before it
    _CATCH_UP = 0.5  # of what the shortest draft takes: reading first what plain steps wrote

    def __init__(
        self, batch_size: int, max_new_tokens: int, costs: CostTable | LearnedCosts, lengths: tuple[int, ...],
        allowance: float, trust: float,
    ) -> None:  # fmt: skip
        self.left = np.full(batch_size, max_new_tokens)  # tokens of each sequence, at most; 0 where it has ended
        self.credit = allowance + min(max(costs.ahead, -allowance), allowance)
        self._allowance = allowance
        self.trust = trust
        self._costs, self._lengths = costs, lengths
        self._step = 0

    # Lists of floats, not arrays: a step has microseconds for this.
    def costs(self) -> list[float]:
        """What a step with each of the lengths takes, in plain steps."""
        seconds = self._costs.at(self._step).tolist()
        return [each / seconds[0] for each in seconds]

    def affordable(
        self, costs: list[float], gains: list[float], steps: int = 1, lent: list[float] | None = None
    ) -> list[bool]:
        """Which are, `steps` in a row, of these costs and expected gains in plain steps; plain ones always are. `lent`
        is so much more, of each.
        """
        trust = self.trust * min(max(self.left.tolist()) / self._NEAR, 1.0)
        each = zip(costs, gains, lent or [0.0] * len(costs), strict=True)
        drafted = [steps * (cost - 1 - trust * gain) <= self.credit + more for cost, gain, more in each]
        return [True, *drafted[1:]]

    def note(self, result: StepResult, seconds: float | None, catches_up: bool = False) -> tuple[float, float]:
        """Take in a step; how many plain steps it was worth, and its cost in them.

        Plain decoding takes as many steps as the last sequence has tokens; that one has ended is no progress, as it
        would have ended there, too. `catches_up`: the draft was the first after plain steps.
        """
        width, costs = result.tokens.shape[1] - 1, self.costs()
        choice = next(i for i, length in enumerate(self._lengths) if length >= width)
        cost, before = costs[choice], max(self.left.tolist())
        if catches_up:
            cost += self._CATCH_UP * (costs[1] - 1)
            self._costs.meet(choice)
        self._costs.learn(self._step, choice, seconds)
        self._step += 1
        left = np.maximum(self.left - result.num_tokens, 0)
        progress = before - max(left.tolist())
        self.left = left * result.active
        self.credit += (1 + self._MORE) * progress - cost
        self._costs.leave(self.credit - self._allowance)
        return progress, cost


class Comparisons:
    """Where drafts pay, a step of another length is now and then made for comparison: its costs may have changed.

    Unless lengths were `compared` before, that begins soon, and with plain steps.
    """

    _SOON, _FIRST, _LAST = 2, 32, 256  # steps with drafts before one

    def __init__(self, compared: bool) -> None:
        # With drafts since the last comparison, and before the next.
        self.steps, self.after = 0, self._FIRST if compared else self._SOON
        self.made = 0

    def choice(self, choice: int, affordable: list[bool]) -> int:
        """The length to take instead of `choice`, if one is due: the next longer, the next shorter, plain decoding."""
        if choice == 0 or self.steps < self.after:
            return choice
        if self.after < self._FIRST:
            return 0
        beside = dict.fromkeys((choice + 1, choice - 1, 0))  # after the shortest draft plain decoding is both
        others = [o for o in beside if o < len(affordable) and affordable[o]]
        return others[self.made % len(others)]

    def note(self, choice: int, drafted: bool) -> None:
        """After a step, where `choice` was best."""
        if choice > 0 and self.steps >= self.after:
            self.steps, self.made, self.after = 0, self.made + 1, min(2 * self.after, self._LAST)
        self.steps += drafted


def failed_drafts(result: StepResult) -> _Flags:
    """``[batch]``: whose draft ended with a token that was not accepted, or with none where another was to come.

    What ended with its last draft token, or was left no room for more, failed at nothing.
    """
    short = result.num_accepted < result.tokens.shape[1] - 1
    ended = ~result.active & (result.num_accepted == result.num_drafted)
    return (result.num_drafted >= 0) & short & ~ended & (result.num_tokens > result.num_accepted)


class AdaptiveSchedule(Schedule):
    """What the schedules that choose have in common: lengths to choose from, an `Account` and `Comparisons`.

    No length is chosen that the batch cannot afford. Parameters are those of `Account`.
    """

    learns = True
    _ALLOWANCE: float
    _TRUST: float

    def __init__(
        self, batch_size: int, max_new_tokens: int, costs: CostTable | LearnedCosts,
        lengths: tuple[int, ...] = AUTO_DRAFT_LENGTHS,
    ) -> None:  # fmt: skip
        self.lengths, self.max_draft_tokens = lengths, lengths[-1]
        self._account = Account(batch_size, max_new_tokens, costs, lengths, self._ALLOWANCE, self._TRUST)
        self._comparisons = Comparisons(costs.compared)

    def round_up(self, width: int) -> int:
        return next(length for length in self.lengths if length >= width)


class AutoSchedule(AdaptiveSchedule):
    """The batch drafts as many tokens a sequence as let it be done soonest, or none; of trees, the tree or none.

    A forward has the same number of rows for each sequence, and the batch is done with the last of them: so the number
    is the batch's, and the sequence that needs the most steps decides. (What lets the others end sooner would be paid
    for by that one, with dearer steps.) Drafts are accepted by chance: the more sequences there are, and the more a
    step's yield varies, the later the last of them ends than each in the mean. Where no draft pays, the least bad one
    is tried again now and then, less and less often while that fails.

    Parameters are those of `Account`; `first_plain`: the first step drafts nothing, as the drafter has nothing to draft
    from, which says nothing of drafts; and `reads_late`: the drafter has a model, which reads what plain steps wrote
    only when it drafts again.
    """

    # Chosen by what `bench.replay --drafter model` makes of recorded answers, and by drafts that are right by chance.
    _FIRST_PROBE, _LAST_PROBE = 4, 64  # steps without drafts before another try
    _REVIEW = 4  # steps without drafts, in which what is known only fades
    # Steps with drafts that must be affordable after a plain one. The last of several sequences gains by drafts later
    # than the others: a small credit spent on one step at a time would never last until then.
    _RUN = 4
    # For the same reason several are lent `_TRUST` of what drafts should bring until the end, but at most so many plain
    # steps. Otherwise drafts would stop before the last sequence has gained by them.
    _DEBT = 0.25
    _ALLOWANCE, _TRUST = 1.0, 0.5  # see `Account`
    # unit * log(sum(exp(x / unit))) is about the expected largest of n <= 16 normally distributed x of one mean, with
    # this unit in standard deviations; for more that are alike it must be at most sqrt(2 log n).
    _UNIT = 0.8

    def __init__(
        self, batch_size: int, max_new_tokens: int, costs: CostTable | LearnedCosts,
        lengths: tuple[int, ...] = AUTO_DRAFT_LENGTHS, first_plain: bool = False, reads_late: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(batch_size, max_new_tokens, costs, lengths)
        self._first_plain, self._reads_late = first_plain, reads_late
        self._yield = Yield(batch_size, self.max_draft_tokens)
        self._plain_steps = 0  # since the last draft
        self._drafted: bool | None = None  # whether the last step did
        self._probe_after = self._FIRST_PROBE
        self._choose()

    def next(self) -> int:
        if self._first_plain:
            return 0
        choice = self._comparisons.choice(self._best, self._affordable)
        if choice == self._best == 0 and self._plain_steps >= self._probe_after and any(self._affordable[1:]):
            choice = 1 + int(self._seconds[1:].argmin())
        return self.lengths[choice]

    def note(self, result: StepResult, seconds: float | None) -> None:
        width = result.tokens.shape[1] - 1
        if self._first_plain:
            self._first_plain = False
            self._account.note(result, seconds)
            return
        # What a draft model takes to catch up is no cost of drafting on: drafts would look dear where few are made.
        catches_up = self._reads_late and self._drafted is False and width > 0
        self._account.note(result, None if catches_up else seconds, catches_up)
        self._drafted = width > 0
        best = self._best
        self._comparisons.note(best, width > 0)
        if not width:
            self._plain_steps += 1
            self._yield.fade()
            if self._plain_steps % self._REVIEW == 0:
                self._choose()
            return
        failed = failed_drafts(result)
        self._yield.add(np.where(result.num_drafted >= 0, result.num_accepted, 0), failed)
        self._choose()
        ended = failed.any() and not catches_up  # a try that succeeds is repeated, and one that says nothing of costs
        if self._best > 0:
            self._probe_after = self._FIRST_PROBE
        elif best == 0 and ended:
            self._probe_after = min(2 * self._probe_after, self._LAST_PROBE)
        if best > 0 or ended:
            self._plain_steps = 0

    def _choose(self) -> None:
        """Find the length by which the batch is done soonest under the present estimates, of those it can afford."""
        left = self._account.left
        if not left.any():
            return
        mean, variance = (of[:, list(self.lengths)] for of in self._yield.tokens())  # [batch, lengths]
        each, going = left[:, None] / mean, (left > 0)[:, None]
        # The steps that a text takes, each of a random number of tokens, have the variance left variance / mean^3.
        deviation = np.sqrt(left[:, None] * variance / mean**3).sum(0) / going.sum()
        scale = min(self._UNIT, (2 / math.log(max(going.sum(), 2))) ** 0.5)
        most, unit = each.max(0), np.maximum(scale * deviation, 1e-9)  # plain decoding leaves nothing to chance
        steps = most + unit * np.log((going * np.exp((each - most) / unit)).sum(0))
        costs = self._account.costs()
        gains = (steps[0] / steps - 1).tolist()
        seconds, several = steps * costs, going.sum() > 1
        run = self._RUN if several and not self._drafted else 1
        lent = np.clip(self._TRUST * (seconds[0] - seconds), 0.0, several * self._DEBT).tolist()
        self._affordable = self._account.affordable(costs, gains, run, lent)
        self._seconds = np.where(self._affordable, seconds, np.inf)
        self._best = int(self._seconds.argmin())


class Yield:
    """Estimates of what drafts yield in each sequence of a batch, from the outcomes of its own and the others' drafts.

    Acceptance is estimated by position, and the first token apart from those that follow: a lookup that found the right
    place goes on being right, and one that did not says nothing of how it would have gone on. Where a position was
    seldom reached, those beside it count, and where the sequence has drafted little, the batch's; each outcome counts
    once.

    Parameters
    ----------
    batch_size, longest : int
    """

    _FIRST, _LATER = (0.4, 16.0), (0.45, 8.0)  # acceptance assumed before the first step, as so many judged tokens
    _SEQUENCE, _POSITION = 3.0, 5.0  # judged tokens that the other sequences, and other positions, count as at most

    def __init__(self, batch_size: int, longest: int) -> None:
        self._accepted = np.zeros((batch_size, longest))
        self._judged = np.zeros((batch_size, longest))
        self._positions = np.arange(longest)

    def add(self, accepted: _Ints, failed: _Flags) -> None:
        """Take in a draft of each sequence: so many tokens were accepted, and the next one was not, or was missing."""
        good = self._positions < accepted[:, None]
        judged = self._positions < (accepted + failed)[:, None]
        kept = MEMORY ** judged.sum(1, keepdims=True)
        self._accepted = self._accepted * kept + good
        self._judged = self._judged * kept + judged

    def fade(self) -> None:
        """A step without drafts: what is known is a token older."""
        self._accepted *= MEMORY
        self._judged *= MEMORY

    def tokens(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``[batch, longest + 1]``: mean and variance of the tokens of a step, by the number of draft tokens."""
        first = self._share(slice(1), *self._FIRST)
        later = self._share(slice(1, None), np.maximum(first, self._LATER[0]), self._LATER[1])
        reached = np.hstack([np.ones_like(first), first, later]).cumprod(1)
        mean = reached.cumsum(1)
        squares = ((2 * np.arange(reached.shape[1]) + 1) * reached).cumsum(1)  # (n + 1)^2 - n^2 for one more
        return mean, np.maximum(squares - mean**2, 0.0)

    def _share(self, positions: slice, assumed: float | NDArray[np.float64], weight: float) -> NDArray[np.float64]:
        """``[batch, positions]``: how often a token at each position that is reached is accepted."""
        accepted, judged = self._accepted[:, positions], self._judged[:, positions]
        beside, judged_beside = (of.sum(1, keepdims=True) - of for of in (accepted, judged))
        others, judged_others = (of.sum() - of.sum(1, keepdims=True) for of in (accepted, judged))
        batch = (others + weight * assumed) / (judged_others + weight)
        sequence = (beside + self._SEQUENCE * batch) / (judged_beside + self._SEQUENCE)
        known = np.minimum(judged_beside + self._SEQUENCE, self._POSITION)
        return np.asarray((accepted + known * sequence) / (judged + known))
