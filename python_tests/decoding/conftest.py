"""A GPU that is played on the CPU, as a fixture."""

from __future__ import annotations

import pytest

from python_tests.decoding.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake
