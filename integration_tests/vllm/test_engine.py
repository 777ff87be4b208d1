"""vLLM's engine with the plug-in, on a real model, against vLLM without plug-in and without speculation."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from .engine import BUILD, DRAFTS, LAW_SAMPLES, LAW_TOKENS, LAWS

ROOT = BUILD.parents[1]
SPECULATING = DRAFTS[1:]
LEVEL = 1e-6  # of all the tests of distributions together
WINDOWS: dict[str, Callable[[list[int]], tuple[int, ...]]] = {
    "tokens 1 and 2": lambda row: tuple(row[:2]),
    "tokens 2 and 3": lambda row: tuple(row[1:3]),
    "tokens 3 and 4": lambda row: tuple(row[2:4]),
    "all": tuple,
}


@functools.cache
def said(name: str) -> dict[str, Any]:
    """The answers of the engine of one of `DRAFTS`; without speculation it runs without the plug-in."""
    out = BUILD / f"answers-{name}.json"
    given = os.environ | {"SPECDEC_VLLM": "0" if name == "none" else "1"}
    command = [sys.executable, "-m", "integration_tests.vllm.engine", name, str(out)]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(out.read_text())
    return answers


@pytest.mark.parametrize("name", SPECULATING)
def test_drafts_are_accepted_and_rejected(name: str) -> None:
    counts = said(name)["metrics"]
    drafted, accepted = (counts[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert 0.05 * drafted < accepted < 0.95 * drafted, counts


@pytest.mark.parametrize("name", SPECULATING)
@pytest.mark.parametrize("asked", ["greedy", "penalties", "min tokens, bad words", "allowed ids"])
def test_greedy_is_that_of_no_speculation(name: str, asked: str) -> None:
    assert said(name)[asked] == said("none")[asked]


@pytest.mark.parametrize("name", SPECULATING)
def test_min_p_of_one_leaves_the_likeliest_token(name: str) -> None:
    assert said(name)["min-p 1"] == said("none")["greedy"]


@pytest.mark.parametrize("name", SPECULATING)
def test_logprobs_are_those_of_no_speculation(name: str) -> None:
    for ours, plain in zip(said(name)["logprobs"], said("none")["logprobs"], strict=True):
        assert {token: rank for token, (rank, _) in ours.items()} == {token: rank for token, (rank, _) in plain.items()}
        np.testing.assert_allclose([ours[t][1] for t in plain], [plain[t][1] for t in plain], atol=1e-3)


@pytest.mark.parametrize("name", SPECULATING)
def test_a_seed_reproduces_in_any_slot_and_beside_anyone(name: str) -> None:
    ours = said(name)
    assert ours["mixed"] == ours["mixed, other slots"] == ours["alone"]
    assert ours["mixed"][0] == said("none")["greedy"][0]
    assert ours["mixed"][1] != ours["greedy"][1] and ours["mixed"][2] != ours["greedy"][2]


@pytest.mark.parametrize("name", SPECULATING)
def test_logit_bias_is_refused(name: str) -> None:
    assert "logit_bias" in said(name)["logit bias"]


def p_value(ours: list[tuple[int, ...]], plain: list[tuple[int, ...]]) -> float:
    """Of the two-sample G-test; outcomes seen fewer than 20 times are one."""
    counts = [Counter(ours), Counter(plain)]
    often = [outcome for outcome, n in (counts[0] + counts[1]).items() if n >= 20]
    table = np.array([[*(c[o] for o in often), c.total() - sum(c[o] for o in often)] for c in counts])
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] >= 3, "outcomes are too few or too many for a test"
    return float(chi2_contingency(table, lambda_="log-likelihood", correction=False).pvalue)


@pytest.mark.parametrize("name", SPECULATING)
@pytest.mark.parametrize("law", LAWS)
def test_the_joint_distribution_is_that_of_no_speculation(name: str, law: str) -> None:
    ours, plain = said(name)[law], said("none")[law]
    assert {(len(rows), len(rows[0])) for rows in (ours, plain)} == {(LAW_SAMPLES, LAW_TOKENS)}
    p_values = {window: p_value([*map(of, ours)], [*map(of, plain)]) for window, of in WINDOWS.items()}
    print(name, law, p_values)
    assert min(p_values.values()) > LEVEL / (len(SPECULATING) * len(LAWS) * len(WINDOWS)), p_values


def test_the_test_of_distributions_sees_another_distribution() -> None:
    plain = said("none")
    assert p_value([tuple(row[:2]) for row in plain["T=1"]], [tuple(row[:2]) for row in plain["cut"]]) < LEVEL
