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
from specdec_kernels.decoding import DecodingState, StepResult
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from specdec_kernels.decoding.foresight import ForesightSchedule
from specdec_kernels.decoding.schedule import AutoSchedule, FixedSchedule

COSTS = np.array([1.0, 1.1, 1.2, 1.4])


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "NOISE", 0.0)


GREEDY: dict[str, Any] = {"sampling": sk.SamplingParams(0.0), "eos_token_id": []}


def follow(*tokens: int) -> TableRunner:
    """A target that goes on with these tokens after 8 5, whatever else came before."""
    logits = torch.full((10, 10, 10), -30.0)
    for i, token in enumerate(tokens):
        logits[(8, 5, *tokens)[i], (5, *tokens)[i], token] = 30.0
    return TableRunner(logits)


def test_an_answer_tells_what_each_draft_comes_to() -> None:
    prompt, answer = torch.tensor([[5, 6, 7, 8, 5]]), [6, 7, 9, 5, 4, 5, 6, 9]
    for n, matched in ((3, [1, 2, 3, 0, 1, 0, 1, 2]), (2, [1, 2, 2, 0, 1, 0, 1, 2])):
        (found,) = replay.asked(follow(*answer), prompt, sk.NgramDrafter(n), max_new_tokens=8, **GREEDY)
        assert found.matched is not None and found.matched[:-1].tolist() == matched[:-1]
        assert found.right.tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
        assert found.drafted.tolist() == [7, 6, 5, 0, 3, 0, 1, 0]
    (found,) = replay.asked(follow(*answer), prompt, Repeats(), max_new_tokens=8, **GREEDY)
    assert found.matched is None and found.right.tolist() == [0] * 8 and found.drafted.tolist() == [1] * 7 + [0]


class Repeats(sk.Drafter):
    """Proposes the last token again."""

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
        return sk.Draft(state.last_tokens())

    def commit(self, state: DecodingState, result: StepResult) -> None: ...


@pytest.mark.parametrize("ends", [[], [2]], ids=["none ends", "ends"])
@pytest.mark.parametrize("way", [0, 1, 3, 7, "auto"])
@pytest.mark.parametrize("of", ["lookup", "n-grams", "model"])
def test_a_replay_takes_the_steps_that_decoding_takes(of: str, way: int | str, ends: list[int], quiet: None) -> None:
    """Greedily, of three answers together: also where "auto" chooses, by the same costs."""
    model = TableRunner.random(12, seed=4)
    drafter = {"lookup": sk.NgramDrafter(), "n-grams": sk.NgramLMDrafter(), "model": sk.ModelDrafter(near(model))}[of]
    texts = torch.tensor([[4, 9, 3, 4, 9], [7, 7, 7, 7, 7], [1, 2, 3, 4, 5]])
    kw: dict[str, Any] = {"sampling": sk.SamplingParams(0.0), "max_new_tokens": 40, "eos_token_id": ends}
    answers = [answer for text in texts for answer in replay.asked(model, text[None], drafter, **kw)]
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


def test_asking_a_draft_model_takes_the_forwards_that_drafting_takes() -> None:
    """Two rows of the text, then a row for each token: nothing is fed again."""
    draft = near(TableRunner.random(12, seed=4))
    replay.asked(
        TableRunner.random(12, seed=4), torch.tensor([[1, 2, 3]]), sk.ModelDrafter(draft), max_new_tokens=9, **GREEDY
    )
    drafts = (7, 7, 6, 5, 4, 3, 2, 1)
    assert draft.forwards == [2, *(rows for length in drafts for rows in [2, *[1] * (length - 1)])]


def test_a_lone_token_is_written_without_a_draft() -> None:
    (answer,) = replay.asked(
        TableRunner.random(12), torch.tensor([[1, 2]]), sk.NgramDrafter(), max_new_tokens=1, **GREEDY
    )
    assert answer.matched is None and answer.right.tolist() == answer.drafted.tolist() == [0]


def near(model: TableRunner) -> TableRunner:
    """A model that is right every other time or so."""
    return TableRunner(model.table + 2 * torch.randn(model.table.shape, generator=torch.Generator().manual_seed(1)))


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


@pytest.mark.parametrize("costs", [[], ["--costs", "1.2", "1.4", "2"]])
@pytest.mark.parametrize("of", ["lookup", "model"])
def test_all_of_it(
    of: str, costs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama", 1), None))
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"] * 2)
    arguments = ["--sets", "chat", "--prompts", "4", "--batch", "2", "--batches", "2", "--max-new-tokens", "20"]
    arguments += ["--rounds", "1", "--threads", str(torch.get_num_threads()), "--output", str(tmp_path), *costs]
    arguments += ["--n", "2"] if of == "lookup" else ["--drafter", "model", "--draft-model", str(tmp_path)]
    assert replay.main(arguments) == 0
    result = json.loads((tmp_path / "replay.json").read_text())
    rows = [row for row in result["rows"] if "batch" in row]
    assert len(rows) == 2 * 5 and all(row["ratio"] > 0 and row["batch"] == 2 for row in rows)
    assert sum(row["count"] for row in result["rows"] if "matched" in row) > 20 or of == "model"
    of_steps = result["settings"]["costs of steps"]["2"]
    assert of_steps == [1, 1.2, 1.4, 2] if costs else of_steps[0] == 1 and sorted(of_steps) == of_steps
    assert (result["settings"]["cost of catching up"]["2"] > 0) == (of == "model" and not costs)
    other = ["--drafter", "ngram-lm"] if of == "lookup" else ["--n", "2"]
    for wrong in (["--costs", "1.2"], other):
        with pytest.raises(SystemExit):
            replay.main([*arguments, *wrong])
    assert replay.main([*arguments, "--batch", "1", "5", "--costs", *["1.2"] * 6]) == 2
    assert "--batch must be at most 4, which a set has prompts, got 5" in capsys.readouterr().err


def test_batches_follow_each_other_as_calls_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with what the ones before have learned."""
    answer = replay.Answer(np.full(30, 7), np.minimum(np.arange(30, 0, -1), 7), None)
    begun: list[CostTable] = []

    class Watched(AutoSchedule):
        def __init__(self, batch_size: int, max_new_tokens: int, costs: LearnedCosts) -> None:
            begun.append(costs.table)
            super().__init__(batch_size, max_new_tokens, costs)

    monkeypatch.setattr(replay, "AutoSchedule", Watched)
    replay.compared([answer] * 5, 1, 3, COSTS, 30)
    assert [table.ahead > 20 for table in begun] == [False, True, True]
    assert not np.array_equal(begun[1].seconds[0], begun[0].seconds[0])
