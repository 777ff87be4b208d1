"""How many tokens are drafted where the drafter says beforehand how well its draft is supported."""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import Foresight
from .costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from .schedule import MEMORY, AdaptiveSchedule, failed_drafts
from .state import StepResult


class ForesightSchedule(AdaptiveSchedule):
    """At each step the batch drafts the number of tokens per sequence that gains the most time, or none.

    How much of the text's end was found again tells how likely a draft's tokens are right. As that is known before the
    step, drafts are made only where they are worth their rows, also in a text's first steps and where it changes. A
    token is worth the time that the batch has taken per token so far. It counts more the likelier its sequence is to be
    done last, as the batch waits for it: a sequence with much left, of which little has been foreseen.

    A token of a one-hot draft is accepted with the probability that the target gives it, which is also the probability
    that a plain step emits it (with acceptance "match": it is accepted if it is the one that comes). So plain steps
    judge the drafter too, without an extra row.
    """

    # All chosen with `bench.replay` on recorded answers, at batches of 1 to 8.
    _MARGIN = 0.02  # a gain below this, in plain steps, does not pay for the risk of a wrong estimate
    _ALLOWANCE, _TRUST = 0.7, 0.0  # see `Account`
    _MOST_TRUST, _EVIDENCE = 0.5, 15.0  # the limit of trust, and the judged drafts that bring half of it
    _SPARED = 0.7  # steps that a foreseen token saves a sequence in the end
    _FORESEEN, _EMITTED = 2.4, 6.0  # tokens of each sequence before the first step, as assumed
    _SPREAD = 0.5  # by how many steps the sequences' ends differ, over the root of the tokens left
    _ASSUMED = 8.0  # tokens assumed before the first one, each from a plain step

    def __init__(
        self, batch_size: int, max_new_tokens: int, costs: CostTable | LearnedCosts,
        lengths: tuple[int, ...] = AUTO_DRAFT_LENGTHS,
    ) -> None:  # fmt: skip
        super().__init__(batch_size, max_new_tokens, costs, lengths)
        self._yield = MatchYield(lengths)
        self._spent = self._made = self._ASSUMED  # plain steps' time, and tokens of the last sequence, so far
        self._judged = 0
        self._foreseen, self._emitted = [self._FORESEEN] * batch_size, [self._EMITTED] * batch_size
        self._tokens, self._matched = [-1] * batch_size, [0] * batch_size
        self._best = self._choice = 0  # indices into `lengths`; the choice is not the best only for comparison

    def look(self, foresight: Foresight) -> None:
        """Before each step: choose by what is about to be proposed."""
        self._tokens, self._matched = foresight.tokens.tolist(), foresight.matched.tolist()
        self._best = self._choice = 0
        longest = max((n for token, n in zip(self._tokens, self._matched, strict=True) if token >= 0), default=-1)
        if self._best_of(self._yield.at_most(longest))[0] == 0:  # as in most steps of texts that repeat little
            return
        left = self._account.left
        more = self._yield.expected(np.where(foresight.tokens >= 0, foresight.matched, -1))
        more = np.minimum(more, np.maximum(left - 1, 0)[:, None])
        steps = left * (1 - self._SPARED * np.divide(self._foreseen, self._emitted))
        spread = self._SPREAD * math.sqrt(max(left.max(), 1))
        last = np.exp((steps - steps.max()) / spread) * (left > 0)
        self._best, affordable = self._best_of(((last / last.sum()) @ more).tolist())
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
        return self.lengths[self._choice]

    def note(self, result: StepResult, seconds: float | None) -> None:
        made, spent = self._account.note(result, seconds)
        self._made, self._spent = self._made + made, self._spent + spent
        self._comparisons.note(self._best, result.tokens.shape[1] > 1)
        if result.tokens.shape[1] > 1:
            accepted, failed = result.num_accepted.tolist(), failed_drafts(result).tolist()
        else:
            emitted = result.tokens[:, 0].tolist()
            accepted = [came == token for came, token in zip(emitted, self._tokens, strict=True)]
            failed = [not right for right in accepted]
        counts = result.num_tokens.tolist()
        each = zip(self._tokens, self._matched, counts, accepted, failed, strict=True)
        for sequence, (token, matched, count, right, wrong) in enumerate(each):
            self._emitted[sequence] += count
            if token >= 0 and count > 0:
                self._judged += 1
                self._foreseen[sequence] += right
                self._yield.add(matched, right, wrong)
        self._account.trust = self._MOST_TRUST * self._judged / (self._judged + self._EVIDENCE)


class MatchYield:
    """How often a draft's first token, and those after it, are accepted, by how many tokens were found again.

    Some tokens of each kind are assumed to have been judged before the first step. Plain floats, because a step has
    only microseconds for this.
    """

    LEAST = (0, 1, 2, 3, 4, 5, 8)  # tokens found again, at least, in each kind
    # Well below what `python -m bench.replay` counts in answers of SmolLM2-135M: this loses least in its replays, as
    # what looks best in a step is more often overrated than underrated.
    _FIRST = (0.11, 0.13, 0.34, 0.47, 0.58, 0.70, 0.82)
    _LATER = (0.20, 0.40, 0.50, 0.58, 0.66, 0.75, 0.85)
    _WEIGHT = 24.0  # judged tokens that these values count as

    def __init__(self, lengths: tuple[int, ...] = AUTO_DRAFT_LENGTHS) -> None:
        self._lengths = lengths
        assumed, each = self._WEIGHT, zip(self._FIRST, self._LATER, strict=True)
        # Accepted and judged first tokens, then accepted and judged later ones.
        self._counts = [[assumed * first, assumed, assumed * later, assumed] for first, later in each]
        self._expected = [[0.0] * len(lengths) for _ in (None, *self.LEAST)]  # the first: nothing found
        self._changed = set(range(len(self.LEAST)))

    def expected(self, matched: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[batch, lengths]``: draft tokens accepted in the mean, by tokens found again and number of draft tokens."""
        self._revise()
        return np.array(self._expected)[np.searchsorted(self.LEAST, matched, side="right")]

    def at_most(self, matched: int) -> list[float]:
        """``[lengths]``: the most that a draft is expected to bring after `matched` tokens found again, or fewer."""
        self._revise()
        kinds = bisect.bisect_right(self.LEAST, matched) + 1
        return [max(each) for each in zip(*self._expected[:kinds], strict=True)]

    def add(self, matched: int, accepted: int, failed: bool) -> None:
        """Take in a draft: so many tokens were accepted, and the next one was not."""
        kind = bisect.bisect_right(self.LEAST, matched) - 1
        judged = accepted + failed
        if kind < 0 or judged == 0:
            return
        counts = self._counts[kind]
        for at, good, seen in ((0, min(accepted, 1), 1), (2, max(accepted - 1, 0), judged - 1)):
            kept = MEMORY**seen
            counts[at], counts[at + 1] = counts[at] * kept + good, counts[at + 1] * kept + seen
        self._changed.add(kind)

    def _revise(self) -> None:
        for kind in self._changed:
            self._estimate(kind)
        self._changed.clear()

    def _estimate(self, kind: int) -> None:
        counts = self._counts[kind]
        reached, later = counts[0] / counts[1], counts[2] / counts[3]
        expected = [0.0]
        for _ in range(self._lengths[-1]):
            expected.append(expected[-1] + reached)
            reached *= later
        self._expected[kind + 1] = [expected[length] for length in self._lengths]
