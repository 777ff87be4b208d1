"""How many kernels a verify step launches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from python_tests import interpreted
from python_tests.ops import chains
from python_tests.support import Backend, present
from specdec_kernels import laws

pytestmark = pytest.mark.skipif(interpreted.why_not() is not None, reason=str(interpreted.why_not()))


def launches(backend: Backend, kind: str, acceptance: str, law: laws.TargetLaw | None) -> int:
    from triton.runtime.interpreter import GridExecutor

    arguments = chains.make(torch.Generator().manual_seed(5), 2, 2, 40, kind=kind, acceptance=acceptance, law=law)
    with backend.limited(), mock.patch.object(GridExecutor, "__call__", autospec=True) as launch:
        chains.run(backend, arguments)  # what comes out is not looked at: nothing runs
    return int(launch.call_count)


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "stats", "reduced", "probs", "one_hot"])
def test_a_target_law_takes_one_launch_more(kind: str, acceptance: str) -> None:
    (backend,) = [b for b in present("verify_chain") if b.name == "triton"]
    without = launches(backend, kind, acceptance, None)
    assert without > 3  # they are counted
    for law in chains.LAWS:
        if chains.fits(law, acceptance, kind):
            assert launches(backend, kind, acceptance, law) <= without + 1, law
