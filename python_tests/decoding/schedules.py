"""Costs and steps for the tests of schedules."""

from __future__ import annotations

import numpy as np

from specdec_kernels.decoding import StepResult
from specdec_kernels.decoding.costs import CostTable, LearnedCosts

PACKED = np.array([1.0, 1.1, 1.2, 1.3])  # a step that verifies 2, 4, 8 rows, by a step of one row
DEAR = np.array([1.0, 1.6, 2.4, 4.0])


def table(seconds: np.ndarray) -> CostTable:
    return CostTable(np.zeros(1, np.int64), seconds[None])


def learned(seconds: np.ndarray, ahead: float = 0.0) -> LearnedCosts:
    """As calls before it left them, not yet sure."""
    drafts = len(seconds) - 1
    covariance = np.pad((1 + np.eye(drafts)) / 2, (1, 0))
    return LearnedCosts(seconds, covariance, ahead, range(len(seconds)))


def result(width: int, accepted: np.ndarray) -> StepResult:
    batch = len(accepted)
    tokens = np.zeros((batch, width + 1), dtype=np.int64)
    drafted = np.full(batch, width)
    return StepResult(
        tokens, accepted + 1, drafted, accepted, np.ones(batch, dtype=bool), np.zeros(batch, dtype=np.int64)
    )
