"""What steps teach of costs, and which say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from python_tests.decoding.schedules import result
from specdec_kernels.decoding.costs import LearnedCosts
from specdec_kernels.decoding.schedule import AutoSchedule


def test_the_second_step_of_a_first_try_tells_its_cost() -> None:
    """In the first one a draft model also catches up on plain steps, and what is compiled for it is compiled there."""
    costs = LearnedCosts.assumed(True, 8, None, 1, on_gpu=False)
    auto, nothing = AutoSchedule(8, 64, costs), np.zeros(8, np.int64)
    for width, seconds in ((0, 1.0), (0, 1.0), (1, 9.0), (1, 1.1)):
        auto.note(result(width, nothing), seconds)
    assert costs.at(4)[1] / costs.at(4)[0] == pytest.approx(1.1, rel=0.05)


def test_a_first_draft_after_another_draft_says_nothing() -> None:
    costs = LearnedCosts.assumed(True, 8, None, 1, on_gpu=False)
    auto, nothing = AutoSchedule(8, 64, costs), np.zeros(8, np.int64)
    before = costs.at(0)
    for width in (1, 0):
        auto.note(result(width, nothing), 9.0)
    assert (costs.at(2) == before).all()
