"""Every backend present, as a fixture: tests name no backend, so a new one is tested the day it registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from python_tests.support import Backend, present

torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        op = getattr(metafunc.module, "OP", "verify_chain")
        metafunc.parametrize("backend", present(op), ids=str, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend present (all of them in turn) for the op that the module names in ``OP``."""
    chosen: Backend = request.param
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills torch.empty with NaN: unwritten outputs show
    with chosen.limited():
        yield chosen
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20240229)
