"""A test of a decoder's distribution that needs no repeated prompts.

Where Y has the distribution P, and U is uniform and independent, Σ P(v) over all v before Y in some order, + U·P(Y),
is uniform on [0, 1) (the randomised probability integral transform). Given the text before it, that holds for every
token of every answer, whatever the model, the prompt and the parameters, so the numbers of a stream of answers are
independent and uniform: their histogram, and that of pairs of neighbours (each number in one pair, as a G-test counts
independent pairs), is all that has to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

BINS, SIDE = 32, 8
LEVEL = 1e-6  # of all tests of a run together


@dataclass
class Stream:
    """The numbers of one kind of request."""

    single: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    pairs: NDArray[np.int64] = field(default_factory=lambda: np.zeros((SIDE, SIDE), np.int64))

    def add(self, numbers: list[float]) -> None:
        """Those of one answer, in its order."""
        values = np.minimum(np.array(numbers), 1 - 2.0**-40)
        np.add.at(self.single, (values * BINS).astype(int), 1)
        cells = (values * SIDE).astype(int)
        even = len(cells) // 2 * 2
        np.add.at(self.pairs, (cells[:even:2], cells[1:even:2]), 1)

    def merge(self, other: Stream) -> None:
        self.single += other.single
        self.pairs += other.pairs

    def pvalues(self) -> list[float]:
        """Of a G-test each that has enough to go by."""
        return [
            float(stats.power_divergence(counts.ravel(), lambda_="log-likelihood").pvalue)
            for counts in (self.single, self.pairs)
            if counts.sum() >= 8 * counts.size
        ]


def transformed(law: NDArray[np.float64], token: int, noise: float) -> float:
    """A token's number. Likelier tokens come first, so that what goes wrong in the same way at every prompt (the likely
    ones too often, say) does not cancel out.
    """
    before = (law > law[token]) | ((law == law[token]) & (np.arange(law.size) < token))
    return float(law[before].sum() + noise * law[token])


def rejected(streams: dict[str, Stream]) -> dict[str, float]:
    """The kinds of request that do not have their distribution, with their p-values (Holm, together at `LEVEL`)."""
    tests = sorted((p, name) for name, stream in streams.items() for p in stream.pvalues())
    found: dict[str, float] = {}
    for rank, (p, name) in enumerate(tests):
        if p > LEVEL / (len(tests) - rank):
            break
        found.setdefault(name, p)
    return found
