"""Adaptive draft lengths: a sequence's own history and frozen costs decide; drafting that does not pay stops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, prompts
from specdec_kernels.decoding import StepResult, costs
from specdec_kernels.decoding.schedule import AUTO_DRAFT_LENGTHS, AutoSchedule, CostTable

PACKED = np.array([1.0, 1.1, 1.2, 1.3])  # a step that verifies 2, 4, 8 rows, by a step of one row
DEAR = np.array([1.0, 1.6, 2.4, 4.0])


def result(drafted: np.ndarray, accepted: np.ndarray) -> StepResult:
    batch = len(drafted)
    tokens = np.zeros((batch, int(drafted.max()) + 1), dtype=np.int64)
    return StepResult(
        tokens, accepted + 1, drafted, accepted, np.ones(batch, dtype=bool), np.zeros(batch, dtype=np.int64)
    )


def rate(auto: AutoSchedule, seconds: np.ndarray, alpha: float, steps: int = 4000, seed: int = 0) -> float:
    """Tokens a second of one sequence whose draft tokens are accepted with probability `alpha` each."""
    rng, emitted, spent = np.random.default_rng(seed), 0, 0.0
    for _ in range(steps):
        drafted = np.asarray(auto.next())
        coins = rng.random(int(drafted[0])) < alpha
        accepted = np.array([int(coins.cumprod().sum())])
        emitted += int(accepted[0]) + 1
        spent += seconds[AUTO_DRAFT_LENGTHS.index(int(drafted[0]))]
        auto.note(result(drafted, accepted))
    return emitted / spent


@pytest.mark.parametrize("seconds", [PACKED, DEAR], ids=["packed", "dear"])
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_near_the_best_fixed_length_and_never_much_below_plain(seconds: np.ndarray, alpha: float) -> None:
    fixed = [(1 - alpha ** (k + 1)) / (1 - alpha) / s for k, s in zip(AUTO_DRAFT_LENGTHS, seconds, strict=True)]
    got = rate(AutoSchedule(1, CostTable(seconds)), seconds, alpha)
    assert got > 0.97 * fixed[0]
    assert got > 0.9 * max(fixed)


def test_a_gain_too_small_to_be_sure_of_is_left() -> None:
    """At first an acceptance of a half is assumed: 1.5 tokens a step of one draft token."""
    assert AutoSchedule(1, CostTable(np.array([1.0, 1.49, 9.0, 9.0]))).next() == 0
    assert AutoSchedule(1, CostTable(np.array([1.0, 1.45, 9.0, 9.0]))).next() == 1


def test_it_comes_back_when_the_text_changes() -> None:
    auto = AutoSchedule(1, CostTable(DEAR))
    rate(auto, DEAR, 0.0, steps=500)
    assert rate(auto, DEAR, 0.95, steps=500) > 0.8 * (1 - 0.95**8) / 0.05 / 4.0


def test_sequences_decide_by_themselves() -> None:
    """In a batch each sequence gets the lengths that it would get alone."""
    rng = np.random.default_rng(1)
    together, alone = AutoSchedule(3, CostTable(DEAR)), [AutoSchedule(1, CostTable(DEAR)) for _ in range(3)]
    for _ in range(300):
        drafted = np.asarray(together.next())
        assert drafted.tolist() == [int(np.asarray(one.next())[0]) for one in alone]
        accepted = np.array(
            [int((rng.random(k) < a).cumprod().sum()) for k, a in zip(drafted, (0.1, 0.6, 0.9), strict=True)]
        )
        together.note(result(drafted, accepted))
        for i, one in enumerate(alone):
            one.note(result(drafted[i : i + 1], accepted[i : i + 1]))
    assert set(drafted) > {0}


def test_costs_are_measured_once_for_a_model_and_batch() -> None:
    target, ids = TableRunner.random(), prompts(4, 4, vocab=23)[0]
    for _ in range(2):
        sk.generate(target, ids, drafter=sk.NgramDrafter(2), num_speculative_tokens="auto", max_new_tokens=3)
    assert list(map(len, (costs._measured[target],))) == [1]
    sk.generate(target, ids[:1], drafter=sk.NgramDrafter(2), num_speculative_tokens="auto", max_new_tokens=3)
    (table, other) = costs._measured[target].values()
    assert table.seconds.shape == (4,) and (np.diff(table.seconds) >= 0).all() and table is not other


def test_few_row_counts_are_verified() -> None:
    """A draft is padded, so that weights packed for a row count are used and no kernel sees a new shape every step."""
    target = TableRunner.random()
    ids = torch.cat([prompts(9, 9, vocab=23)[0]] * 2, 1)
    sk.generate(
        target, ids, drafter=sk.NgramDrafter(3), num_speculative_tokens=5, max_new_tokens=60, acceptance="greedy"
    )
    assert set(target.forwards[1:]) <= {1, 6}
    target.forwards.clear()
    sk.generate(target, ids, drafter=sk.NgramDrafter(3), num_speculative_tokens="auto", max_new_tokens=60)
    assert set(target.forwards[1:]) <= {1, 2, 4, 8}
