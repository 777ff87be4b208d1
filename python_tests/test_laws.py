"""What `sk.laws` refuses, and what the ops receive from them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from python_tests.ops.chains import LAWS
from specdec_kernels import laws

REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: laws.Lossy(1.0), ValueError, "Lossy: alpha must be in [0, 1), got 1.0"),
    (lambda: laws.Lossy(-0.1), ValueError, "Lossy: alpha must be in [0, 1), got -0.1"),
    (lambda: laws.Lossy(0.2, beta=0.79), ValueError, "Lossy: beta must be in [1 - alpha = 0.8, 1e+30], got 0.79"),
    (lambda: laws.Lossy(0.2, beta=1e39), ValueError, "Lossy: beta must be in [1 - alpha = 0.8, 1e+30], got 1e+39"),
    (
        lambda: laws.Lossy(0.9999, beta="exact"),
        ValueError,
        "Lossy: alpha must be at most 0.999 beside beta",
    ),
    (lambda: laws.Lossy(0.2, beta="tuned"), ValueError, "Lossy: beta must be a number or 'exact', got 'tuned'"),
    (lambda: laws.Lossy(0.2, beta=None), TypeError, "Lossy: beta must be a number or 'exact', got NoneType"),  # type: ignore[arg-type]
    (lambda: laws.Chow("0.5"), TypeError, "Chow: alpha must be a number, got str"),  # type: ignore[arg-type]
    (lambda: laws.Diff(math.nan), ValueError, "Diff: alpha must be finite, got nan"),
    (lambda: laws.Opt(0.1, loss="l2"), ValueError, "Opt: loss must be one of 0-1, log, got 'l2'"),
    (
        lambda: laws.TokenV1(0.1, bonus="draft"),
        ValueError,
        "TokenV1: bonus must be one of target, cascade, got 'draft'",
    ),
    (lambda: laws.BiLD(1, distance="kl"), ValueError, "BiLD: distance must be one of cross-entropy, argmax, got 'kl'"),
    (lambda: laws.Chow(1, loss=np.array(["0-1", "log"])), ValueError, "Chow: loss must be one of 0-1, log, got array"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refuses(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert message in str(raised.value)


def test_every_law_has_a_number_of_its_own_and_its_fields_reach_the_ops() -> None:
    kinds = {kind for kind in vars(laws).values() if isinstance(kind, type) and issubclass(kind, laws.TargetLaw)}
    public = {kind for kind in kinds if "number" in vars(kind)}
    assert public == {type(law) for law in LAWS}, "a law without an example in specdec_kernels/testing/laws.py"
    assert sorted(law.number for law in public) == list(range(1, len(public) + 1))
    assert laws.Lossy(0.2, beta=0.9).flat() == (1, False, 0.2, 0.9, False)
    assert laws.Lossy(0.2, beta="exact").flat() == (1, True, 0.2, 1.0, False)
    assert laws.Opt(0.3, loss="log", bonus="cascade").flat() == (4, True, 0.3, 1.0, True)
    assert laws.BiLD(2, distance="argmax").flat() == (8, True, 2.0, 1.0, False)
    assert laws.TokenV3(0.5).flat() == (7, False, 0.5, 1.0, False)
