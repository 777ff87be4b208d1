"""Replayed answers: what each draft comes to is what decoding with it accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from bench import replay
from bench.replay import Answer
from python_tests.analysis.test_command import Letters
from python_tests.decoding.models import TableRunner, tiny
from specdec_kernels import assets
from specdec_kernels.assets import prompts
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, CostTable
from specdec_kernels.decoding.foresight import ForesightSchedule
from specdec_kernels.decoding.schedule import FixedSchedule

COSTS = np.array([1.0, 1.1, 1.2, 1.4])


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "NOISE", 0.0)


def test_an_answer_tells_what_each_draft_comes_to() -> None:
    prompt, answer = np.array([5, 6, 7, 8, 5]), np.array([6, 7, 9, 5, 6, 7, 9])
    found = replay.judged(prompt, answer)
    assert found.matched.tolist() == [1, 2, 3, 0, 1, 2, 3]
    assert found.right.tolist() == [2, 1, 0, 0, 3, 2, 1]
    assert replay.judged(prompt, answer, 2).matched.max() == 2


@pytest.mark.parametrize("ends", [[], [2]], ids=["none ends", "ends"])
@pytest.mark.parametrize("way", [0, 1, 3, 7, "auto"])
def test_a_replay_takes_the_steps_that_decoding_takes(way: int | str, ends: list[int], quiet: None) -> None:
    """Greedily, of three answers together: also where "auto" chooses, by the same costs."""
    model = TableRunner.random(12, seed=4)
    texts = [[4, 9, 3, 4, 9], [7, 7, 7, 7, 7], [1, 2, 3, 4, 5]]
    kw: dict[str, Any] = {"sampling": sk.SamplingParams(0.0), "max_new_tokens": 40, "eos_token_id": ends}
    answers = [
        replay.judged(np.array(text), out.tokens[0, : int(out.num_tokens[0])].numpy())
        for text in texts
        for out in [sk.generate(model, torch.tensor([text]), drafter=sk.NoDrafter(), **kw)]
    ]
    costs = CostTable(np.zeros(1, np.int64), COSTS[None])
    model.forwards.clear()
    sk.generate(
        model, torch.tensor(texts), drafter=sk.NgramDrafter(),
        num_speculative_tokens=costs if way == "auto" else way, **kw,
    )  # fmt: skip
    taken = [COSTS[AUTO_DRAFT_LENGTHS.index(rows - 1)] for rows in model.forwards[1:]]  # the first reads the prompts
    by = FixedSchedule(way) if isinstance(way, int) else ForesightSchedule(3, 40, costs)
    assert replay.replayed(answers, by, COSTS, np.random.default_rng(0), 40) == pytest.approx(sum(taken))
    assert len(taken) < 40 or way == 0


def test_rows_of_all_ways(quiet: None) -> None:
    copied = Answer(np.full(120, 3), np.minimum(7, 120 - np.arange(120)))
    rows = replay.compared([copied] * 3, 2, 4, COSTS, 120)
    assert [row["num_speculative_tokens"] for row in rows] == [0, 1, 3, 7, "auto"]
    plain, one, three, seven, auto = (row["ratio"] for row in rows)
    assert plain == 1 and one == pytest.approx(2 / 1.1) and three == pytest.approx(4 / 1.2)
    assert auto > 0.9 * seven > three


def test_how_often_a_match_is_right() -> None:
    matched, right = np.zeros((2, 12), dtype=np.int64)
    matched[[1, 2, 3, 10, 11]], right[[2, 3, 10, 11]] = [1, 1, 3, 9, 9], [2, 7, 1, 1]
    assert replay.by_match([Answer(matched, right)]) == [
        {"matched": 1, "count": 2, "first": 0.5, "later": 0.5},
        {"matched": 3, "count": 1, "first": 1.0, "later": 1.0},
        {"matched": 8, "count": 2, "first": 1.0, "later": 0.0},  # the last token has none after it
    ]


@pytest.mark.parametrize("costs", [[], ["--costs", "1.2", "1.4", "2"]])
def test_all_of_it(
    costs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"] * 2)
    arguments = ["--sets", "chat", "--prompts", "4", "--batch", "2", "--batches", "2", "--max-new-tokens", "20"]
    arguments += ["--rounds", "1", "--threads", str(torch.get_num_threads()), "--output", str(tmp_path), *costs]
    assert replay.main(arguments) == 0
    result = json.loads((tmp_path / "replay.json").read_text())
    rows = [row for row in result["rows"] if "batch" in row]
    assert len(rows) == 2 * 5 and all(row["ratio"] > 0 and row["batch"] == 2 for row in rows)
    assert sum(row["count"] for row in result["rows"] if "matched" in row) > 20
    of_steps = result["settings"]["costs of steps"]["2"]
    assert of_steps == [1, 1.2, 1.4, 2] if costs else of_steps[0] == 1 and sorted(of_steps) == of_steps
    with pytest.raises(SystemExit):
        replay.main([*arguments, "--costs", "1.2"])
    assert replay.main([*arguments, "--batch", "1", "5", "--costs", *["1.2"] * 6]) == 1
    assert "--batch must be at most 4, which a set has prompts, got 5" in capsys.readouterr().err
