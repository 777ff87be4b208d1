"""How many tokens are drafted where the drafter says beforehand what speaks for its draft."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import Foresight
from .costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from .schedule import AdaptiveSchedule, failed_drafts
from .state import StepResult


class ForesightSchedule(AdaptiveSchedule):
    """At each step the batch drafts as many tokens a sequence as gain the most time, or none.

    How much of the text's end was found again tells how likely a lookup's tokens are right. As that is known before
    the step, drafts are made where they are worth their rows and nowhere else, also in a text's first steps and where
    it changes. A token is worth the time that the batch has taken for one so far, and counts the more, the likelier its
    sequence is the last to be done, which the batch waits for.

    A token of a one-hot draft is accepted with the probability that the target gives it, which is also the one with
    which a plain step emits it: so a plain step judges the drafter as well, without a row more.
    """

    _MARGIN = 0.04  # a gain below this, in plain steps, does not pay for the risk of a wrong estimate
    _ALLOWANCE, _TRUST = 0.15, 0.3  # see `Account`
    _SPREAD = 0.5  # steps by which the sequences' ends come to differ, over the root of the tokens that are left
    _ASSUMED = 8.0  # tokens before the first one, each by a plain step

    def __init__(self, batch_size: int, max_new_tokens: int, costs: CostTable | LearnedCosts) -> None:
        super().__init__(batch_size, max_new_tokens, costs)
        self._yield = MatchYield()
        self._spent = self._made = self._ASSUMED  # plain steps' time, and tokens of the last sequence, so far
        self._foresight = Foresight(np.full(batch_size, -1), np.zeros(batch_size, np.int64))
        self._best = self._choice = 0  # by place in `AUTO_DRAFT_LENGTHS`; another than the best for comparison alone

    def look(self, foresight: Foresight) -> None:
        """Before each step: choose by what is about to be proposed."""
        self._foresight = foresight
        self._best = self._choice = 0
        found = foresight.tokens >= 0
        if not found.any():
            return
        longest = int(foresight.matched.max(where=found, initial=0))
        if self._best_of(self._yield.at_most(longest))[0] == 0:  # so it is in most steps of texts that repeat little
            return
        left = self._account.left
        more = self._yield.expected(np.where(found, foresight.matched, 0))
        more = np.minimum(more, np.maximum(left - 1, 0)[:, None])
        nearness = np.exp((left - left.max()) / (self._SPREAD * np.sqrt(max(left.max(), 1)))) * (left > 0)
        self._best, affordable = self._best_of(((nearness / nearness.sum()) @ more).tolist())
        self._choice = self._comparisons.choice(self._best, affordable)

    def _best_of(self, gains: list[float]) -> tuple[int, list[bool]]:
        """The length that gains the most time if drafts bring so many tokens, and the lengths that can be afforded."""
        costs = self._account.costs()
        affordable = self._account.affordable(costs, gains)
        worth = min(self._spent / self._made, 1.0)
        ahead = [gain * worth - (cost - 1) - self._MARGIN for cost, gain in zip(costs, gains, strict=True)]
        ahead[0] = 0.0
        return max((i for i in range(len(ahead)) if affordable[i]), key=ahead.__getitem__), affordable

    def next(self) -> int:
        return AUTO_DRAFT_LENGTHS[self._choice]

    def note(self, result: StepResult, seconds: float | None) -> None:
        made, spent = self._account.note(result, seconds)
        self._made, self._spent = self._made + made, self._spent + spent
        self._comparisons.note(self._best, result.tokens.shape[1] > 1)
        tokens = self._foresight.tokens
        if result.tokens.shape[1] > 1:
            accepted, failed = result.num_accepted, failed_drafts(result)
        else:
            accepted = result.tokens[:, 0] == tokens
            failed = ~accepted
        self._yield.add(np.where((tokens >= 0) & (result.num_tokens > 0), self._foresight.matched, 0), accepted, failed)


class MatchYield:
    """How often a lookup's tokens are accepted, by how many tokens were found again: the first, and those after it.

    A few tokens' worth are assumed before the first step. In plain floats: a step has microseconds for it.
    """

    LEAST = (1, 2, 3, 4, 5, 8)  # of tokens found again, in each kind
    # Somewhat below what `python -m bench.replay --n 16` counts in answers of SmolLM2-135M, as caution costs little. A
    # lookup of up to three tokens does better, as its longest matches are longer than that (without --n).
    _FIRST, _LATER = (0.17, 0.42, 0.57, 0.68, 0.78, 0.88), (0.50, 0.60, 0.68, 0.75, 0.82, 0.90)
    _WEIGHT = 6.0  # judged tokens that these count as
    _MEMORY = 0.985  # weight left to a token by the next one of its kind: about the last 70 count

    def __init__(self) -> None:
        self._counts = [[0.0] * 4 for _ in self.LEAST]  # of first tokens those accepted and judged; of later ones
        self._expected = [[0.0] * len(AUTO_DRAFT_LENGTHS) for _ in (None, *self.LEAST)]  # the first: nothing found
        for kind in range(len(self.LEAST)):
            self._estimate(kind)

    def expected(self, matched: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[batch, lengths]``: draft tokens accepted in the mean, by tokens found again and number of draft tokens."""
        return np.array(self._expected)[np.searchsorted(self.LEAST, matched, side="right")]

    def at_most(self, matched: int) -> list[float]:
        """``[lengths]``: no draft after so many tokens found again, or fewer, is expected to bring more."""
        kinds = bisect.bisect_right(self.LEAST, matched) + 1
        return [max(each) for each in zip(*self._expected[:kinds], strict=True)]

    def add(self, matched: NDArray[np.int64], accepted: NDArray[np.int64], failed: NDArray[np.bool_]) -> None:
        """Take in the sequences' drafts, ``[batch]`` each: so many tokens were accepted, and the next one was not.

        Where none were found again, it says nothing.
        """
        changed = set()
        for found, good, bad in zip(matched.tolist(), accepted.tolist(), failed.tolist(), strict=True):
            kind = bisect.bisect_right(self.LEAST, found) - 1
            judged = good + bad
            if kind < 0 or judged == 0:
                continue
            counts = self._counts[kind]
            for at, kept_good, seen in ((0, min(good, 1), 1), (2, max(good - 1, 0), judged - 1)):
                kept = self._MEMORY**seen
                counts[at], counts[at + 1] = counts[at] * kept + kept_good, counts[at + 1] * kept + seen
            changed.add(kind)
        for kind in changed:
            self._estimate(kind)

    def _estimate(self, kind: int) -> None:
        counts, weight = self._counts[kind], self._WEIGHT
        reached = (counts[0] + weight * self._FIRST[kind]) / (counts[1] + weight)
        later = (counts[2] + weight * self._LATER[kind]) / (counts[3] + weight)
        expected = [0.0]
        for _ in range(AUTO_DRAFT_LENGTHS[-1]):
            expected.append(expected[-1] + reached)
            reached *= later
        self._expected[kind + 1] = [expected[length] for length in AUTO_DRAFT_LENGTHS]
