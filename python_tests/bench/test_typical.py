"""The bench of typical acceptance on a model that is instant."""

from __future__ import annotations

import math

import pytest

import specdec_kernels as sk
from bench import real_model
from bench import typical as bench
from python_tests.decoding.models import prompts, tiny


def test_every_way_is_a_row() -> None:
    model, done = tiny("llama", 1), []
    drafter = sk.NgramTreeDrafter(num_nodes=4)
    rows = bench.measure(
        model, [prompts(4), prompts(6)], drafter, lambda: done.append(1), max_new_tokens=12, eos_token_id=[]
    )  # fmt: skip
    assert [row["way"] for row in rows] == [bench.PLAIN, bench.LOSSLESS] + [bench.TYPICAL] * len(bench.EPSILONS)
    assert [row["epsilon"] for row in rows] == [None, None, *bench.EPSILONS] and len(done) == 2 * len(rows)
    given = [how for _, epsilon, how in bench.ways(drafter) if epsilon is not None]
    assert [(how["epsilon"], how["delta"]) for how in given] == [(x, x**0.5) for x in bench.EPSILONS]
    assert rows[0]["tokens_per_step"] == 1 and rows[2]["tokens_per_step"] >= rows[-1]["tokens_per_step"] > 1
    assert all(-math.inf < row["log_prob"] < 0 <= row["log_prob_error"] for row in rows)


def test_an_option_that_would_do_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed, so that there are no rounds."""
    monkeypatch.setattr(real_model, "run", lambda *_: 0)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--rounds", "2"])
    assert "unrecognized arguments: --rounds 2" in capsys.readouterr().err


def test_means_have_standard_errors() -> None:
    assert bench.mean("x", [1.0, 3.0]) == {"x": 2.0, "x_error": pytest.approx(1.0)}
    assert math.isnan(bench.mean("x", [1.0])["x_error"])
