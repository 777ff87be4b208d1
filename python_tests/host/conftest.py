"""Both implementations of the n-gram index, as fixtures."""

from __future__ import annotations

from typing import Any

import pytest

from python_tests.host.indexes import IMPLEMENTATIONS


@pytest.fixture(params=["python", "compiled"])
def implementation(request: pytest.FixtureRequest) -> Any:
    if request.param not in IMPLEMENTATIONS:
        pytest.skip("specdec_kernels._host is not built")
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def new_index(implementation: Any) -> Any:
    return implementation.NgramIndex
