"""Joint laws over several verify steps with the production generator, tested with one family-wise level."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy import stats

import specdec_kernels as sk
from python_tests.law.steps import CASES, check_steps, run_steps
from python_tests.support import Backend
from specdec_kernels.testing.counts import g_test

OP = "verify_chain"
reference = partial(sk.verify_chain, backend="reference")


@pytest.mark.short(cases=2, emulated=1)
@pytest.mark.parametrize("name", CASES)
def test_joint_law_over_steps(backend: Backend, name: str) -> None:
    if backend.by_interpreter:
        pytest.skip("dozens of sequences take Triton's interpreter minutes")
    case = CASES[name]
    if backend.interpreted:  # no batch that it can afford shows a law: the tokens of one whose law is tested do
        tokens, expected = (run_steps(verify, case, batch=64) for verify in (backend.verify_chain, reference))
        np.testing.assert_array_equal(tokens, expected)
    else:
        check_steps(backend.verify_chain, case, backend.device)


def test_the_test_statistic_itself() -> None:
    """Under the law p-values are uniform; off by TV 3 % it rejects."""
    rng, law = np.random.default_rng(1), np.random.default_rng(0).dirichlet(np.ones(27))
    p_values = [g_test(rng.multinomial(20000, law).astype(float), law) for _ in range(500)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    off = law + 0.03 * np.sign(law - np.median(law)) / 26
    off = np.clip(off, 0, None) / np.clip(off, 0, None).sum()
    assert g_test(rng.multinomial(20000, off).astype(float), law) < 1e-9
