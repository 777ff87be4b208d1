"""Theory against simulation, closed forms, limits and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from python_tests.support import in_fresh_process
from specdec_kernels import analysis

ALPHAS = np.array([0.0, 0.1, 0.5, 0.77, 0.95, 1.0])
GAMMAS = np.array([0, 1, 2, 5, 10, 64])

# α, γ, factor of operations and of speed, for a draft that costs nothing: table 1 of arXiv 2211.17192
PAPER = [
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]  # fmt: skip


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), PAPER)
def test_the_papers_table(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert round(float(analysis.operations_factor(alpha, gamma, 0.0)), 2) == operations
    assert round(float(analysis.walltime_improvement(alpha, gamma, 0.0)), 2) == speed


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "speed"), [(0.7, 0.05, 6, 2.35), (0.8, 0.02, 11, 3.82), (0.7, 0.29, 2, 1.39)]
)
def test_the_best_gamma(alpha: float, c: float, gamma: int, speed: float) -> None:
    assert analysis.best_gamma(alpha, c) == gamma
    assert round(float(analysis.walltime_improvement(alpha, gamma, c)), 2) == speed


def test_expected_tokens_are_the_sum_of_powers() -> None:
    """Exactly: the sum in rational numbers, also where α is all but 1, where the quotient would lose its digits."""
    for alpha in (*ALPHAS, 1 - 2.0**-40, 1 - 2.0**-53):
        for gamma in GAMMAS:
            exact = sum(Fraction(float(alpha)) ** k for k in range(int(gamma) + 1))
            assert float(analysis.expected_tokens(alpha, gamma)) == pytest.approx(float(exact), rel=1e-14)


def test_equal_acceptances_by_position_are_equation_1() -> None:
    for gamma in GAMMAS:
        rows = np.repeat(ALPHAS[:, None], gamma, axis=1)
        np.testing.assert_allclose(
            analysis.expected_tokens_by_position(rows), analysis.expected_tokens(ALPHAS, gamma), rtol=1e-13
        )


@pytest.mark.parametrize("acceptances", [[0.7] * 5, [0.9, 0.2, 0.6], [1.0, 0.0, 1.0]])
def test_expected_tokens_are_those_of_a_simulation(acceptances: list[float]) -> None:
    steps = 200_000
    accepted = np.random.default_rng(0).random((steps, len(acceptances))) < acceptances
    tokens = 1 + accepted.cumprod(1).sum(1)
    expected = float(analysis.expected_tokens_by_position(acceptances))
    assert abs(tokens.mean() - expected) <= 5 * tokens.std() / np.sqrt(steps)
    if len(set(acceptances)) == 1:
        assert expected == pytest.approx(float(analysis.expected_tokens(acceptances[0], len(acceptances))))


def test_limits() -> None:
    assert (analysis.expected_tokens(0.0, GAMMAS) == 1).all()
    assert (analysis.expected_tokens(1.0, GAMMAS) == GAMMAS + 1).all()
    assert (analysis.walltime_improvement(ALPHAS, 0, 0.3) == 1).all()
    assert float(analysis.walltime_improvement(0.5, 0, 0.3, 1.25)) == 0.8  # as its documentation warns
    np.testing.assert_allclose(analysis.walltime_improvement(0.0, GAMMAS, 0.1), 1 / (0.1 * GAMMAS + 1))
    assert (analysis.operations_factor(1.0, GAMMAS, 0.0) == 1).all()
    assert (analysis.operations_factor(0.0, GAMMAS, 0.0) == GAMMAS + 1).all()
    np.testing.assert_allclose(analysis.operations_factor(1.0, GAMMAS, 0.5), 1 + 0.5 * GAMMAS / (GAMMAS + 1))
    np.testing.assert_allclose(analysis.memory_factor(1.0, GAMMAS), 1 / (GAMMAS + 1))
    np.testing.assert_allclose(analysis.memory_factor(0.0, GAMMAS, 0.25), 1 + 0.25 * GAMMAS)


def test_dearer_verification_divides_the_gain() -> None:
    gain = analysis.walltime_improvement(0.8, 5, 0.1)
    np.testing.assert_allclose(analysis.walltime_improvement(0.8, 5, 0.1, 1.9), gain * 1.5 / 2.4)


def test_the_best_gamma_is_the_best_and_none_where_nothing_is_gained() -> None:
    alphas, costs = np.linspace(0.001, 0.951, 20)[:, None], np.array([0.02, 0.1, 0.3, 0.7, 1.0, 2.0])
    best = analysis.best_gamma(alphas, costs)
    assert best.shape == (20, 6) and best.dtype == np.int64
    gains = analysis.walltime_improvement(alphas[..., None], np.arange(65), costs[:, None])
    np.testing.assert_array_equal(best, gains.argmax(-1))
    np.testing.assert_array_equal(best > 0, alphas > costs)  # corollary 3.9
    reached = analysis.walltime_improvement(alphas, best, costs)
    assert (reached >= analysis.least_improvement(alphas, costs) - 1e-12).all()
    assert analysis.best_gamma(1.0, 0.1, max_gamma=7) == 7
    shares = np.arange(1000) / 1000
    assert not analysis.best_gamma(shares, shares).any()
    assert ((tokens := analysis.expected_tokens(shares, 0)) == 1).all(), tokens.min()


def test_the_best_draft_length_is_by_measured_times() -> None:
    lengths, seconds = [0, 1, 3, 7], np.array([1.0, 1.6, 2.4, 4.0])
    chosen = analysis.best_draft_length([0.0, 0.5, 0.8, 0.95], lengths, seconds)
    rates = analysis.expected_tokens(np.array([0.0, 0.5, 0.8, 0.95])[:, None], lengths) / seconds
    assert chosen.tolist() == np.array(lengths)[rates.argmax(1)].tolist() == [0, 0, 3, 7]
    assert analysis.best_draft_length(0.65, lengths, seconds) == 1
    assert analysis.best_draft_length(0.65, lengths, seconds, margin=1.1) == 0
    with pytest.raises(ValueError, match="best_draft_length: lengths must begin with 0, got 4"):
        analysis.best_draft_length(0.9, [4, 0], [1.0, 1.1])
    per_sequence = np.stack([seconds, seconds**0.1])
    assert analysis.best_draft_length([0.5, 0.5], lengths, per_sequence).tolist() == [0, 7]


def test_break_even_is_where_the_gain_is_one() -> None:
    gammas, costs = np.array([1, 2, 5, 10])[:, None], np.array([0.01, 0.2, 0.6, 0.99])
    even = analysis.break_even_acceptance(gammas, costs)
    np.testing.assert_allclose(analysis.walltime_improvement(even, gammas, costs), 1.0, rtol=1e-12)
    np.testing.assert_allclose(even[0], costs, rtol=1e-12)  # corollary 3.9
    dear = analysis.break_even_acceptance(5, 0.1, 1.7)
    assert float(analysis.walltime_improvement(dear, 5, 0.1, 1.7)) == pytest.approx(1)
    assert analysis.break_even_acceptance(3, 0.0) == 0 and analysis.break_even_acceptance(3, 1.0) == 1
    assert np.isnan(analysis.break_even_acceptance([1, 0], [1.1, 0.5])).all()


def test_arguments_broadcast() -> None:
    three, four, five = np.full((3, 1, 1), 0.5), np.full((4, 1), 2), np.full(5, 0.1)
    for function in (analysis.walltime_improvement, analysis.operations_factor, analysis.memory_factor):
        assert function(three, four, five).shape == (3, 4, 5)
    assert analysis.break_even_acceptance(four, five).shape == (4, 5)
    assert analysis.expected_tokens_by_position(np.full((2, 3, 4), 0.5)).shape == (2, 3)


REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = [
    (analysis.expected_tokens, (1.5, 1), ValueError, "expected_tokens: alpha must be in [0, 1], got 1.5"),
    (analysis.expected_tokens, (float("nan"), 1), ValueError, "expected_tokens: alpha must be in [0, 1], got nan"),
    (analysis.expected_tokens, (0.5, 1.5), ValueError, "expected_tokens: gamma must be an integer >= 0, got 1.5"),
    (analysis.expected_tokens, (0.5, [2, -1]), ValueError, "expected_tokens: gamma must be an integer >= 0, got -1"),
    (
        analysis.expected_tokens, ("high", 1), TypeError,
        "expected_tokens: alpha must be a number or an array of numbers, got 'high'",
    ),
    (
        analysis.expected_tokens_by_position, (0.5,), ValueError,
        "expected_tokens_by_position: acceptances must be [..., gamma], got a number",
    ),
    (
        analysis.walltime_improvement, (0.5, 1, -0.1), ValueError,
        "walltime_improvement: c must be finite and >= 0, got -0.1",
    ),
    (
        analysis.walltime_improvement, (0.5, 1, 0.1, 0), ValueError,
        "walltime_improvement: verification must be finite and > 0, got 0",
    ),
    (
        analysis.operations_factor, (0.5, 1, float("inf")), ValueError,
        "operations_factor: operations_ratio must be finite and >= 0, got inf",
    ),
    (analysis.memory_factor, (0.5, 1, -1), ValueError, "memory_factor: memory_ratio must be finite and >= 0, got -1"),
    (analysis.best_gamma, (0.5, 0.1, -1), ValueError, "best_gamma: max_gamma must be an integer >= 0, got -1"),
    (analysis.least_improvement, (2, 0.1), ValueError, "least_improvement: alpha must be in [0, 1], got 2"),
    (
        analysis.break_even_acceptance, (1, -1), ValueError,
        "break_even_acceptance: c must be finite and >= 0, got -1",
    ),
    (
        analysis.best_draft_length, (0.5, [0, 1], [1.0, 1.1, 1.2]), ValueError,
        "best_draft_length: lengths must be [n >= 1] and seconds [..., n], got [2] and [3]",
    ),
    (
        analysis.best_draft_length, ([0.5] * 3, [0, 1], [[1.0, 1.1]] * 2), ValueError,
        "best_draft_length: alpha, seconds must broadcast against each other, got [3], [2]",
    ),
    *(
        (function, ([0.5] * 2, [1] * 3, *[0.1] * more), ValueError,
         f"{function.__name__}: alpha, {', '.join(rest)} must broadcast against each other, "
         f"got [2], [3]{', []' * more}{', []' * (function is analysis.walltime_improvement)}")
        for function, more, rest in (
            (analysis.expected_tokens, 0, ["gamma"]),
            (analysis.walltime_improvement, 1, ["gamma", "c", "verification"]),
            (analysis.operations_factor, 1, ["gamma", "operations_ratio"]),
            (analysis.memory_factor, 1, ["gamma", "memory_ratio"]),
            (analysis.best_gamma, 0, ["c"]), (analysis.least_improvement, 0, ["c"]),
        )
    ),
    (
        analysis.break_even_acceptance, ([1] * 2, [0.1] * 3), ValueError,
        "break_even_acceptance: gamma, c, verification must broadcast against each other, got [2], [3], []",
    ),
    (
        analysis.expected_tokens, (torch.tensor(0.5, requires_grad=True), 1), TypeError,
        "expected_tokens: alpha must be a number or an array of numbers, got tensor(0.5000, requires_grad=True)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "error", "message"), REFUSED)
def test_what_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        function(*arguments)
    assert str(refused.value) == message


def test_an_import_of_the_package_brings_neither_scipy_nor_matplotlib() -> None:
    code = """
import sys
import specdec_kernels as sk
assert sk.analysis.expected_tokens(0.5, 1) == 1.5
assert not {"scipy", "matplotlib"} & set(sys.modules)
assert sk.analysis.plots.__name__ == "specdec_kernels.analysis.plots"
"""
    in_fresh_process(code)
