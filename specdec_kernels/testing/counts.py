"""Whether counts are those of a distribution. It needs scipy, the rest of this package does not."""

from __future__ import annotations

import numpy as np
from scipy import stats

from .laws import Float64


def g_test(counts: Float64, law: Float64, merged: float = 10.0) -> float:
    """The p-value of counts under a distribution; 0 where something impossible was counted.

    Cells that expect fewer than `merged` are one.
    """
    seen, expected = counts.ravel(), law.ravel() * counts.sum()
    if (seen[expected <= 0] > 0).any():
        return 0.0
    seen, expected = seen[expected > 0], expected[expected > 0]
    few = expected < merged
    if few.any():
        seen, expected = np.append(seen[~few], seen[few].sum()), np.append(expected[~few], expected[few].sum())
        if len(expected) > 1 and expected[-1] < merged:  # the rest is itself too rare
            least = expected[:-1].argmin()
            seen[least] += seen[-1]
            expected[least] += expected[-1]
            seen, expected = seen[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0
    return float(stats.power_divergence(seen, expected * seen.sum() / expected.sum(), lambda_="log-likelihood").pvalue)
