"""A short run of the fuzzer without sanitizers, and that it sees what it exists to see."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from python_tests import fuzz
from python_tests.fuzz import __main__ as runner
from python_tests.fuzz import calls, index
from python_tests.fuzz.__main__ import ROOT, supervise
from specdec_kernels.backends import OPS

FIRST = 16 << 32


def test_the_table_of_good_calls_has_every_op() -> None:
    assert set(calls.GOOD) == set(OPS)


@pytest.mark.long
def test_random_calls_crash_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    failed = supervise(FIRST, 4000, 0, environment)
    assert not failed, capfd.readouterr()


ENDS = {
    "crash": ("os.abort()", ["exit status -6", "Fatal Python error: Aborted"]),
    "kill": ("os.kill(os.getpid(), 9)", ["exit status -9"]),
    "hang": ("time.sleep(100)", ["it takes more than 5 seconds", "in run_case"]),
    "failure": ("return 'not in range'", ["exit status 1", "not in range"]),
}


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_what_is_known_of_a_failure_is_kept(
    end: str, capfd: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the cases, some of which the third fails or never ends."""
    monkeypatch.setattr(runner, "HANGS", 5)  # seconds, which a busy machine may take for a case that ends
    monkeypatch.setattr(runner, "STARTS", 60)
    monkeypatch.setattr(runner, "FAILURES", tmp_path / "failures")
    ending, said = ENDS[end]
    folder = tmp_path / "python_tests" / "fuzz"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import os, time\n"
        "def run_case(number, tell):\n"
        "    tell(f'the call of {number}')\n"
        "    if number == 102:\n"
        f"        {ending}\n"
    )
    (folder / "__main__.py").write_text(f"import runpy\nrunpy.run_path({runner.__file__!r}, run_name='__main__')\n")
    assert supervise(100, 5, 0, os.environ | {"PYTHONPATH": str(tmp_path)})
    (kept,) = (tmp_path / "failures").iterdir()
    printed, text = capfd.readouterr().out, kept.read_text()
    assert text in printed and str(kept) in printed and "again: python -m python_tests.fuzz --replay 102" in printed
    assert "5 cases" in printed and "1 failed" in printed
    for words in ("case 102 failed", "the call of 102", *said):
        assert words in text
    assert "by itself: it does not fail" not in text and "the call of 101" not in text


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
def test_a_case_that_the_time_ends_in_is_waited_for(
    hangs: bool, capfd: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first one, before which a worker takes its time to start."""
    monkeypatch.setattr(runner, "HANGS", 5)
    monkeypatch.setattr(runner, "FAILURES", tmp_path / "failures")
    folder = tmp_path / "python_tests" / "fuzz"
    folder.mkdir(parents=True)
    wait = "time.sleep(600)" if hangs else "pass"
    (folder / "__init__.py").write_text(f"import time\ndef run_case(number, tell):\n    time.sleep(0.05)\n    {wait}\n")
    (folder / "__main__.py").write_text(f"import runpy\nrunpy.run_path({runner.__file__!r}, run_name='__main__')\n")
    assert supervise(100, None, 0.01, os.environ | {"PYTHONPATH": str(tmp_path)}) == hangs
    printed = capfd.readouterr().out
    assert "fuzz: 0 cases" not in printed and ("it takes more than 5 seconds" in printed) is hangs


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
