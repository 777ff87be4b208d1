"""Joint laws over several verify steps with the production generator, tested with one family-wise level."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from python_tests.law.steps import BATCH, CASES, check_steps, g_test
from python_tests.support import Backend

OP = "verify_chain"


@pytest.mark.parametrize("name", CASES)
def test_joint_law_over_steps(backend: Backend, name: str) -> None:
    if backend.interpreted and backend.name == "triton":
        pytest.skip("thousands of sequences take Triton's interpreter minutes")
    check_steps(backend.verify_chain, CASES[name], backend.device, BATCH if not backend.interpreted else 320)


def test_the_test_statistic_itself() -> None:
    """Under the law p-values are uniform; off by TV 3 % it rejects."""
    rng, law = np.random.default_rng(1), np.random.default_rng(0).dirichlet(np.ones(27))
    p_values = [g_test(rng.multinomial(20000, law).astype(float), law) for _ in range(500)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    off = law + 0.03 * np.sign(law - np.median(law)) / 26
    off = np.clip(off, 0, None) / np.clip(off, 0, None).sum()
    assert g_test(rng.multinomial(20000, off).astype(float), law) < 1e-9
