"""Every window of three tokens of many texts against its joint law, by G-tests that share one family-wise level."""

from __future__ import annotations

import numpy as np

from specdec_kernels.testing import Float64
from specdec_kernels.testing.counts import g_test

FAMILY_WISE = 1e-6
WINDOW = 3  # tokens whose joint law is tested, at every offset


def windows_of(law: Float64, length: int) -> list[Float64]:
    """The joint law of tokens [i, i + WINDOW) for each offset i of a text that follows the ids 0, 0; `law`
    ``[V, V, V]`` is that of a token after two others.
    """
    context = np.zeros(law.shape[:2])
    context[0, 0] = 1.0
    windows = []
    for _ in range(length - WINDOW + 1):
        windows.append(np.einsum("ab,abc,bcd,cde->cde", context, law, law, law))
        context = np.einsum("ab,abc->bc", context, law)
    return windows


def windows_of_joint(joint: Float64) -> list[Float64]:
    """The same from the joint law of the whole text, ``[V, …]``."""
    places = range(joint.ndim)
    return [joint.sum(tuple(set(places) - set(places[i : i + WINDOW]))) for i in places[: joint.ndim - WINDOW + 1]]


def counted(tokens: np.ndarray, windows: list[Float64]) -> list[Float64]:
    """How often each window of `tokens` ``[batch, length]`` occurs, at each offset."""
    found = []
    for offset, law in enumerate(windows):
        counts = np.zeros_like(law)
        np.add.at(counts, tuple(tokens[:, offset : offset + WINDOW].T), 1)
        found.append(counts)
    return found


def check_windows(tokens: np.ndarray, windows: list[Float64], num_tests: int) -> None:
    """No window rejects its joint law.

    The level is Holm's over all `num_tests` windows of the family (for "does any reject?" Holm's first step, the
    smallest p-value against level / number of tests, decides).
    """
    for offset, (counts, law) in enumerate(zip(counted(tokens, windows), windows, strict=True)):
        p_value = g_test(counts, law)
        distance = np.abs(counts / counts.sum() - law).sum() / 2
        assert p_value > FAMILY_WISE / num_tests, (
            f"tokens {offset} … {offset + WINDOW - 1}: p = {p_value:.1e}, TV about {distance:.3f}"
        )
