"""A short run of the fuzzer without sanitizers, and that it sees what it exists to see."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from python_tests import fuzz
from python_tests.fuzz import calls, index
from python_tests.fuzz.__main__ import ROOT, supervise

FIRST = 16 << 32


@pytest.mark.slow
def test_random_calls_crash_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    failed = supervise(FIRST, 4000, 0, environment)
    assert not failed, capfd.readouterr()


def test_a_worker_that_dies_is_reported_with_its_case(
    capfd: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the fuzzer a program that crashes on its third case."""
    folder = tmp_path / "python_tests" / "fuzz"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(
        "import os, sys\n"
        "first, progress = int(sys.argv[2]), sys.argv[4]\n"
        "open(progress, 'r+b').write((first + 2).to_bytes(8, 'little') + (2).to_bytes(8, 'little'))\n"
        "print('the call of', first, flush=True)\n"
        "os.abort()\n"
    )
    assert supervise(100, 5, 0, os.environ | {"PYTHONPATH": str(tmp_path)})
    printed = capfd.readouterr().out
    assert (
        "case 102 failed; again: python -m python_tests.fuzz --replay 102" in printed and "the call of 102" in printed
    )


def failing(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What 100 cases of one kind report."""
    monkeypatch.setattr(fuzz, "KINDS", (kind,))
    return [problem for number in range(FIRST, FIRST + 100) if (problem := fuzz.run_case(number))]


@pytest.mark.parametrize("kind", ["verify_chain", "cu", "overlap", "index"])
def test_what_is_wrong_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing(kind, monkeypatch) == []
    if kind == "verify_chain":  # one token too many
        call = calls.direct.call

        def worse(op: str, overload: Any) -> Any:
            def run(*given: Any) -> Any:
                tokens, *rest = call(op, overload)(*given)
                return tokens + 1, *rest

            return run

        monkeypatch.setattr(calls.direct, "call", worse)
    elif kind == "cu":  # flags are lost
        verify = calls.sk.verify_packed

        def without_flags(**given: Any) -> Any:
            out = verify(**given)
            out.status.zero_()
            return out

        monkeypatch.setattr(calls.sk, "verify_packed", without_flags)
    elif kind == "overlap":
        monkeypatch.setattr(sys.modules["specdec_kernels.ops.gather_kv_"], "_check_cache", lambda *given: None)
    else:
        monkeypatch.setattr(index._host_py, "MAX_TOKEN", 1)
    assert failing(kind, monkeypatch)
