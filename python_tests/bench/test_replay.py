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
from bench.answers import Answer, asked, save
from python_tests.decoding.models import Letters, TableRunner, near_table, tiny
from specdec_kernels import assets
from specdec_kernels.assets import prompts
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from specdec_kernels.decoding.foresight import ForesightSchedule
from specdec_kernels.decoding.schedule import AutoSchedule, FixedSchedule

COSTS = np.array([1.0, 1.1, 1.2, 1.4])


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "NOISE", 0.0)


@pytest.mark.parametrize("ends", [[], [2]], ids=["none ends", "ends"])
@pytest.mark.parametrize("way", [0, 1, 3, 7, "auto"])
@pytest.mark.parametrize("of", ["lookup", "n-grams", "model"])
def test_a_replay_takes_the_steps_that_decoding_takes(of: str, way: int | str, ends: list[int], quiet: None) -> None:
    """Greedily, of three answers together: also where "auto" chooses, by the same costs."""
    model = TableRunner.random(12, seed=4)
    astray = sk.ModelDrafter(near_table(model))
    made = {"lookup": sk.NgramDrafter(), "n-grams": sk.NgramLMDrafter(), "model": astray}
    drafter = made[of]
    texts = torch.tensor([[4, 9, 3, 4, 9], [7, 7, 7, 7, 7], [1, 2, 3, 4, 5]])
    kw: dict[str, Any] = {"sampling": sk.SamplingParams(0.0), "max_new_tokens": 40, "eos_token_id": ends}
    answers = [answer for text in texts for answer in asked(model, text[None], [drafter], **kw)[0]]
    costs = CostTable(np.zeros(1, np.int64), COSTS[None])
    model.forwards.clear()
    sk.generate(
        model, texts, drafter=drafter, num_speculative_tokens=costs if way == "auto" else way, **kw,
    )  # fmt: skip
    taken = [COSTS[AUTO_DRAFT_LENGTHS.index(rows - 1)] for rows in model.forwards[1:]]  # the first reads the prompts
    adaptive = AutoSchedule if of == "model" else ForesightSchedule
    by = FixedSchedule(way) if isinstance(way, int) else adaptive(3, 40, costs)
    assert replay.replayed(answers, by, COSTS, np.random.default_rng(0), 40) == pytest.approx(sum(taken))
    assert len(taken) < 40 or way == 0


def test_a_draft_model_catches_up_after_plain_steps_alone(quiet: None) -> None:
    """Of three steps with drafts two follow plain ones."""
    schedule, widths = FixedSchedule(1), iter([0, 1, 0, 0, 1, 1])
    schedule.next = lambda: next(widths)  # type: ignore[method-assign]
    answer = Answer(np.full(6, 7), np.zeros(6, dtype=np.int64), None)
    spent = replay.replayed([answer], schedule, COSTS, np.random.default_rng(0), 99, catch_up=0.25)
    assert spent == pytest.approx(3 * 1.0 + 3 * 1.1 + 2 * 0.25)


def test_rows_of_all_ways(quiet: None) -> None:
    copied = Answer(np.full(120, 7), np.minimum(7, 120 - np.arange(120)), np.full(120, 3))
    rows = replay.compared([copied] * 3, 2, 4, COSTS, 120)
    assert [row["num_speculative_tokens"] for row in rows] == [0, 1, 3, 7, "auto"]
    plain, one, three, seven, auto = (row["ratio"] for row in rows)
    assert plain == 1 and one == pytest.approx(2 / 1.1) and three == pytest.approx(4 / 1.2)
    assert auto > 0.9 * seven > three


def test_a_first_call_comes_again_after_ten() -> None:
    texts = [Answer(np.full(30, 7), np.minimum(np.arange(30, 0, -1), 7), None)] * 3
    began: list[bool] = []

    class Watched(AutoSchedule):
        def __init__(self, batch_size: int, max_new_tokens: int, costs: LearnedCosts) -> None:
            began.append(np.array_equal(costs.at(0), LearnedCosts.assumed(True, 2, None, 1, on_gpu=False).at(0)))
            super().__init__(batch_size, max_new_tokens, costs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "AutoSchedule", Watched)
        replay.compared(texts, 2, 11, COSTS, 30)
    assert [i for i, first in enumerate(began) if first] == [0, 10]


def test_catching_up_counts_where_auto_tries_again(quiet: None) -> None:
    never = [Answer(np.full(120, 7), np.zeros(120, dtype=np.int64), None)] * 3
    cheap, dear = (replay.compared(never, 2, 4, COSTS, 120, catch_up)[-1]["ratio"] for catch_up in (0.0, 1.0))
    assert dear < cheap < 1


def test_how_often_a_match_is_right() -> None:
    drafted, matched, right = np.zeros((3, 12), dtype=np.int64)
    matched[[1, 2, 3, 10, 11]], right[[2, 3, 10, 11]] = [1, 1, 3, 9, 9], [2, 7, 1, 1]
    drafted[[0, 1, 2, 3, 10, 11]] = 7
    assert replay.by_match([Answer(drafted, right, matched)]) == [
        {"matched": 0, "count": 1, "first": 0.0, "later": 0.0},
        {"matched": 1, "count": 2, "first": 0.5, "later": 0.5},
        {"matched": 3, "count": 1, "first": 1.0, "later": 1.0},
        {"matched": 8, "count": 2, "first": 1.0, "later": 0.0},  # the last token has none after it
    ]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Four answers, as lookups and a draft model see them: one is right in every other text, the other never."""
    right, wrong = np.minimum(np.arange(20, 0, -1), 7), np.zeros(20, dtype=np.int64)
    lookup = [Answer(np.full(20, 7), each, np.full(20, 3)) for each in (right, wrong) * 2]
    model = [Answer(np.full(20, 7), wrong, None)] * 4
    save(path := tmp_path / "answers.npz", {("chat", 0.0, "lookup"): lookup, ("chat", 0.0, "model"): model})
    return path


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("of", ["lookup", "model"])
def test_all_of_it(
    of: str, given: bool, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama", 1), None))
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"])
    arguments = ["--answers", str(recorded), "--batch", "2", "--draws", "2", "--rounds", "1", "--drafter", of]
    arguments += ["--threads", str(torch.get_num_threads()), "--output", str(tmp_path)]
    draft_model = ["--draft-model", str(tmp_path)] if of == "model" else []
    assert replay.main([*arguments, *(["--costs", "1.2", "1.4", "2"] if given else draft_model)]) == 0
    result = json.loads((tmp_path / "replay.json").read_text())
    rows = [row for row in result["rows"] if "batch" in row]
    assert [row["num_speculative_tokens"] for row in rows] == [0, 1, 3, 7, "auto"]
    assert all(row["ratio"] > 0 and row["batch"] == 2 for row in rows)
    assert sum(row["count"] for row in result["rows"] if "matched" in row) == (80 if of == "lookup" else 0)
    of_steps, catch_up = (result["settings"][of]["2"] for of in ("costs of steps", "cost of catching up"))
    assert of_steps == [1, 1.2, 1.4, 2] if given else of_steps[0] == 1 and sorted(of_steps) == of_steps
    assert (catch_up > 0) == (of == "model" and not given)
    again = [*arguments, "--costs-of", str(tmp_path / "replay.json"), "--name", "again"]
    assert replay.main(again) == 0
    assert json.loads((tmp_path / "again.json").read_text())["rows"] == result["rows"]
    assert replay.main([*again, "--max-new-tokens", "1"]) == 0
    of_one = json.loads((tmp_path / "again.json").read_text())["rows"][:5]
    assert [row["ratio"] for row in of_one] == [1.0] * 5  # a lone token is never drafted


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--costs", "1.2"], "--costs must be three for each of 1 batch sizes, got 1"),
        (["--drafter", "model"], "--draft-model must be given with --drafter model alone, got --drafter model"),
        (["--drafter", "ngram-lm"], "--drafter must be one that was asked in --answers, lookup, model, got ngram-lm"),
        (["--batch", "5"], "--batch must be at most 4, which a set has answers, got 5"),
        (["--costs", "1", "1", "1", "--draft-model", "/"], "--draft-model must be left out where costs are given"),
        (["--costs-of", "NONE"], "--costs-of must be what a replay has written, got "),
        (["--batch", "3", "--costs-of", "COSTS"], "--batch must be of those that --costs-of has, 2, got 3"),
    ],
)
def test_wrong_options(
    wrong: list[str], message: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"settings": {"costs of steps": {"2": [1, 1, 1, 1]}, "cost of catching up": {"2": 0}}}
    (costs := tmp_path / "costs.json").write_text(json.dumps(settings))
    (other := tmp_path / "other.json").write_text('{"rows": []}')
    files = {"COSTS": str(costs), "NONE": str(other)}
    options = ["--answers", str(recorded), "--batch", "2", *(files.get(w, w) for w in wrong)]
    try:
        assert replay.main(options) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_batches_follow_each_other_as_calls_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with what the ones before have learned."""
    answer = Answer(np.full(30, 7), np.minimum(np.arange(30, 0, -1), 7), None)
    begun: list[CostTable] = []

    class Watched(AutoSchedule):
        def __init__(self, batch_size: int, max_new_tokens: int, costs: LearnedCosts) -> None:
            begun.append(costs.table)
            super().__init__(batch_size, max_new_tokens, costs)

    monkeypatch.setattr(replay, "AutoSchedule", Watched)
    replay.compared([answer] * 5, 1, 3, COSTS, 30)
    assert [table.ahead > 20 for table in begun] == [False, True, True]
    assert not np.array_equal(begun[1].seconds[0], begun[0].seconds[0])
