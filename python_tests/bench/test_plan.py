"""Predictions held against decoding, on a model that is instant and a clock that only forwards move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench import plan as bench_plan
from python_tests.analysis.slow_models import SlowRunner, Ticking
from python_tests.decoding.models import Letters, TableRunner
from specdec_kernels import assets
from specdec_kernels.analysis import drafters
from specdec_kernels.assets import prompts

ARGUMENTS = ["--sets", "chat", "--prompts", "2", "--lengths", "1", "3", "--max-new-tokens", "40", "--rounds", "1",
             "--batch", "1", "2", "--drafter", "lookup"]  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """The bench on a table instead of the model, and a draft of the same table in the place of lookups."""
    clock, target = Ticking(), SlowRunner(TableRunner.random(53, spread=1.5).table)
    target.clock = clock
    draft = TableRunner(target.table + 0.5 * torch.randn(53, 53, 53, generator=torch.Generator().manual_seed(1)))
    monkeypatch.setattr(bench_plan.time, "process_time", clock)
    monkeypatch.setattr(bench_plan, "pack_linear_weights", lambda model: None)
    monkeypatch.setattr(assets, "load_model", lambda: (target, Letters()))
    monkeypatch.setattr(drafters, "make", lambda names, *of, **how: {n: sk.ModelDrafter(draft) for n in names})
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"] * 2)
    return clock


def test_without_drafters_it_compares_what_a_plan_does(clock: Ticking, tmp_path: Path) -> None:
    few = ["--sets", "chat", "--prompts", "1", "--lengths", "1", "--temperatures", "0", "--max-new-tokens", "8"]
    threads = torch.get_num_threads()
    try:
        assert bench_plan.main([*few, "--rounds", "1", "--batch", "1", "--output", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert [row["drafter"] for row in rows] == list(drafters.COMPARED)


def test_what_is_predicted_is_what_comes(clock: Ticking, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert bench_plan.main([*ARGUMENTS, "--output", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.png").stat().st_size > 10_000 and "within 10% of the measured" in capsys.readouterr().out
    rows = result["rows"]
    assert [(r["temperature"], r["num_speculative_tokens"]) for r in rows] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert {(c["batch_size"], c["rows"]): c["seconds"] for c in result["settings"]["costs"]} == {
        (b, str(rows)): 10.0 + rows for b in (1, 2) for rows in (1, 2, 4)
    }
    assert {c["prompts"] for c in result["settings"]["costs"]} == {"chat"}
    for row in rows:
        length, steps = row["num_speculative_tokens"], row["measured_tokens_per_step"]
        assert steps > 1.2 and row["c"] == 0
        # by the clock a step of k drafts takes (11 + k) / 11 plain ones; the last of an answer may be a plain one
        assert row["measured"]["mean"] == pytest.approx(steps * 11 / (11 + length), rel=0.03)
        if row["temperature"] == 0:  # the very same answers
            assert row["simulated"]["mean"] == pytest.approx(row["measured"]["mean"], rel=0.1)
            assert row["tokens_per_step"]["mean"] == pytest.approx(steps, rel=0.1)
    good = [abs(r["simulated"]["mean"] / r["measured"]["mean"] - 1) <= 0.1 for r in rows]
    assert [r["within_tolerance"] for r in rows] == good
    assert result["targets"][0]["measured"] == sum(good) / 4


def test_what_is_measured_is_the_rule_that_is_predicted(
    clock: Ticking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, str]] = []
    real = bench_plan.by_process_time

    def noted(*of: Any, **how: Any) -> Any:
        asked.append((how["sampling"].temperature, how["acceptance"]))
        return real(*of, **how)

    monkeypatch.setattr(bench_plan, "by_process_time", noted)
    plan, draws = bench_plan.planner.plan, []
    monkeypatch.setattr(bench_plan.planner, "plan", lambda *of, **how: draws.append(how["draws"]) or plan(*of, **how))
    threads = torch.get_num_threads()
    try:
        bench_plan.main([*ARGUMENTS, "--draws", "3", "--output", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert draws == [3] and set(asked) == {(0.0, "greedy"), (1.0, "token")} and len(asked) == 2 * 2 * 3


def test_batch_1_is_needed(clock: Ticking, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_plan.main([*ARGUMENTS, *drafters.PLANNED, "--batch", "2"])
    assert capsys.readouterr().err.endswith("error: --batch must have 1, at which is decoded\n")
