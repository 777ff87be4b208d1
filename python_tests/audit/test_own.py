"""``specdec check``: the package's own verifiers, each backend's exact distribution."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.support import Terminal
from specdec_kernels import cli
from specdec_kernels.audit import own
from specdec_kernels.audit.cases import chains


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    every = own.rules()
    assert len(every) == 5 and all(len(cases) >= 3 for cases in every.values())
    few = {
        key: tuple(case for case in cases if case.name in ("two ids", "two siblings")) for key, cases in every.items()
    }
    monkeypatch.setattr(own, "rules", lambda: few)


def test_every_backend_here_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    able = {name for name, answer in sk.backends()["verify_chain"].items() if answer == "yes"} - {"triton"}
    assert {row["backend"] for row in rows} == able and len(rows) == 5 * len(able)
    assert all(row["exact"] and row["distance"] < 1e-6 for row in rows)


@pytest.mark.parametrize("wrong", ["temperature", "tokens", "between"])
def test_a_backend_that_is_not_is_named(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its target a little warmer; or what it emits, but not how much of it, left out; or id 0 at a tenth of all coins,
    which lie between two points of the grid that bisection begins with.
    """
    real = sk.verify_chain

    def verify_chain(*rows: Any, backend: str, **given: Any) -> Any:
        if backend == "reference":
            given["params"] = sk.SamplingParams(0.9) if wrong == "temperature" else given["params"]
        out = real(*rows, backend=backend, **given)
        if backend == "reference" and wrong == "tokens":
            out.tokens.fill_(-1)
        if backend == "reference" and wrong == "between":
            coin = given["uniform_samples"][:, 1]
            out.tokens[(coin > 0.26) & (coin < 0.37), 0] = 0
        return out

    monkeypatch.setattr("specdec_kernels.ops.verify_chain.verify_chain", verify_chain)
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    bad = [line for line in printed.splitlines() if "WRONG in 'two ids" in line]
    assert len(bad) == 2 and all(line.startswith("reference") and "verify_chain" in line for line in bad)
    assert printed.splitlines()[-1].startswith("2 of ") and ("as many tokens as" in printed) == (wrong == "tokens")
    assert ("within a piece" in printed) == (wrong == "between")


def test_a_backend_that_emits_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not emitted counts as drawn from the target, all of it where nothing is."""
    real = sk.verify_chain

    def verify_chain(*rows: Any, backend: str, **given: Any) -> Any:
        out = real(*rows, backend=backend, **given)
        if backend == "reference":
            out.tokens.fill_(-1)
            out.num_tokens.fill_(0)
        return out

    monkeypatch.setattr("specdec_kernels.ops.verify_chain.verify_chain", verify_chain)
    assert cli.main(["check"]) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if "a token or more of each step" in line]
    assert len(bad) == 2 and all(line.startswith("reference") for line in bad)


def test_cases_beside_others_are_batched_with_these(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One backend here takes the temperature of the batch's first sequence, another no more rows than it has."""
    beside = tuple(case for case in chains() if case.beside is not None)
    assert {"beside a shorter draft", "beside a greedy sequence"} <= {case.name for case in beside}
    rules = {("verify_chain", rule): beside for rule in ("token", "block")}
    monkeypatch.setattr(own, "rules", lambda: rules)
    assert cli.main(["check", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(row["exact"] and row["cases"] == len(beside) and row["distance"] < 1e-6 for row in rows)

    real = sk.verify_chain

    def verify_chain(target: Any, *rows: Any, backend: str, **given: Any) -> Any:
        temperature, lengths = given["params"].temperature, given.get("num_draft_tokens")
        if backend == "reference" and isinstance(temperature, Tensor):
            given["params"] = sk.SamplingParams(temperature[:1].expand(len(temperature)))
        if backend == "cpu" and lengths is not None:
            at = int(lengths[0])
            target = torch.cat([target[:, :at], target[:, at:].clone().copy_(target[:, at : at + 1])], 1)
        return real(target, *rows, backend=backend, **given)

    monkeypatch.setattr("specdec_kernels.ops.verify_chain.verify_chain", verify_chain)
    assert cli.main(["check"]) == 1
    *lines, _ = capsys.readouterr().out.splitlines()
    wrong = {line.split()[0]: line.partition("WRONG in ")[2] for line in lines}
    assert "greedy" in wrong["reference"] and "beside a" in wrong["cpu"]


def test_a_backend_that_emits_what_the_target_cannot_give_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of probability 2**-24: where the coin of a draft token is 0."""
    zeros = {("verify_chain", "token"): tuple(case for case in chains() if case.name.startswith("zeros in"))}
    monkeypatch.setattr(own, "rules", lambda: zeros)
    real = sk.verify_chain

    def verify_chain(target: Any, drafts: Any, *rows: Any, backend: str, **given: Any) -> Any:
        out = real(target, drafts, *rows, backend=backend, **given)
        if backend == "cpu":
            at = (given["uniform_samples"][:, 1] == 0) & (out.num_tokens == 1)
            out.tokens[at, 0] = drafts[at, 0]
        return out

    monkeypatch.setattr("specdec_kernels.ops.verify_chain.verify_chain", verify_chain)
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    (bad,) = [line for line in printed.splitlines() if "WRONG" in line]
    assert bad.startswith("cpu") and "emits what the target cannot give" in bad


def test_a_backend_that_cannot_run_is_named_beside_those_that_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says no verdict, which would be status 1."""
    few = {("verify_chain", "token"): chains()[:2]}
    monkeypatch.setattr(own, "rules", lambda: few)
    real = sk.verify_chain

    def verify_chain(*rows: Any, backend: str, **given: Any) -> Any:
        if backend == "reference":
            raise RuntimeError("no C compiler")
        return real(*rows, backend=backend, **given)

    monkeypatch.setattr("specdec_kernels.ops.verify_chain.verify_chain", verify_chain)
    assert cli.main(["check"]) == 2
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("cpu") and first.endswith("exact")
    assert second.startswith("reference") and second.endswith(": RuntimeError: no C compiler")
    assert last == "every distribution is the target's, of the 1 that could be computed"
    assert cli.main(["check", "--json"]) == 2
    rows = json.loads(capsys.readouterr().out)
    assert [row["failed"] for row in rows] == [False, True] and rows[1]["distance"] is None


def test_the_distance_is_that_of_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another case emits what the target cannot give, and so is the one that is named."""
    off, impossible = (case for case in chains() if case.name in ("two ids", "zeros in the target"))
    monkeypatch.setattr(own, "rules", lambda: {("verify_chain", "token"): (off, impossible)})

    def law(verify: Any, problem: Any, rule: str, device: str) -> np.ndarray[Any, Any]:
        (expected,) = (case.expected[0] for case in (off, impossible) if case.problem is problem)
        share, aim = (0.4, expected > 0) if problem is off.problem else (1e-6, expected == 0)
        assert aim.any()
        return ((1 - share) * expected + share * aim / aim.sum())[None]

    monkeypatch.setattr(own, "exact_law", law)
    (found,) = own.check({"verify_chain": sk.verify_chain}, {"verify_chain": ["reference"]}, "cpu")
    assert found.distance > 0.01 and found.case == impossible.name and found.impossible == pytest.approx(1e-6)


@pytest.mark.parametrize("wrong", [False, True])
def test_where_a_backend_fails_the_last_line_says_how_many_did_not(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none could be computed, or one of two in each of two rules and one of these is wrong."""
    rules = {("verify_chain", rule): chains()[:1] for rule in ("token", "block")}
    monkeypatch.setattr(own, "rules", lambda: rules)
    real = sk.verify_chain

    def verify_chain(*rows: Any, backend: str, **given: Any) -> Any:
        if not wrong or backend == "reference":
            raise RuntimeError("no C compiler")
        out = real(*rows, backend=backend, **given)
        if given["acceptance"] == "block":
            out.tokens.fill_(-1)
        return out

    monkeypatch.setattr("specdec_kernels.ops.verify_chain.verify_chain", verify_chain)
    assert cli.main(["check"]) == (1 if wrong else 2)
    *lines, last = capsys.readouterr().out.splitlines()
    failed = sum(line.endswith("RuntimeError: no C compiler") for line in lines)
    assert failed == len(lines) - (2 if wrong else 0) and len(lines) > 2
    expected = "1 of the 2 that could be computed is not the target's" if wrong else "none could be computed"
    assert last == expected


def test_json_is_no_minute_of_silence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a person looks, each line that is printed without it comes on stderr; elsewhere nothing does."""
    monkeypatch.setattr(own, "rules", lambda: {("verify_chain", "token"): chains()[:1]})
    assert cli.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines(keepends=True)[:-1]
    assert cli.main(["check", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and lines
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["check", "--json"]) == 0
    assert capsys.readouterr().out == printed.out and terminal.getvalue() == "".join(lines)


def test_a_device_that_no_backend_runs_on_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "reach", lambda device: None)  # as where torch has it
    assert cli.main(["check", "--device", "mps"]) == 2
    assert capsys.readouterr() == ("", "check: --device must be one that a backend runs on, got mps\n")


def test_no_interpreter_is_asked_on_a_cpu_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    """It would take hours."""
    assert cli.main(["check", "--device", "cpu:0", "--json"]) == 0
    assert "triton" not in {row["backend"] for row in json.loads(capsys.readouterr().out)}


def test_a_device_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", "--device", "abacus"])
    assert "must be a device" in capsys.readouterr().err
