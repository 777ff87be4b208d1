"""Answers that drafters were asked about: what each draft within one comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from bench import answers
from bench.answers import Answer
from python_tests.decoding.models import Letters, TableRunner, near_table, tiny
from specdec_kernels import assets
from specdec_kernels.assets import prompts
from specdec_kernels.decoding import DecodingState, StepResult

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
        ((found,),) = answers.asked(follow(*answer), prompt, [sk.NgramDrafter(n)], max_new_tokens=8, **GREEDY)
        assert found.matched is not None and found.matched[:-1].tolist() == matched[:-1]
        assert found.right.tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
        assert found.drafted.tolist() == [7, 6, 5, 0, 3, 0, 1, 0]
    ((found,),) = answers.asked(follow(*answer), prompt, [Repeats()], max_new_tokens=8, **GREEDY)
    assert found.matched is None and found.right.tolist() == [0] * 8 and found.drafted.tolist() == [1] * 7 + [0]


class Repeats(sk.Drafter):
    """Proposes the last token again."""

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
        return sk.Draft(state.last_tokens())

    def commit(self, state: DecodingState, result: StepResult) -> None: ...


def test_asking_a_draft_model_takes_the_forwards_that_drafting_takes() -> None:
    """Two rows of the text, then a row for each token: nothing is fed again."""
    draft = near_table(TableRunner.random(12, seed=4))
    answers.asked(
        TableRunner.random(12, seed=4), torch.tensor([[1, 2, 3]]), [sk.ModelDrafter(draft)], max_new_tokens=9, **GREEDY
    )
    drafts = (7, 7, 6, 5, 4, 3, 2, 1)
    assert draft.forwards == [2, *(rows for length in drafts for rows in [2, *[1] * (length - 1)])]


def test_a_lone_token_is_written_without_a_draft() -> None:
    ((answer,),) = answers.asked(
        TableRunner.random(12), torch.tensor([[1, 2]]), [sk.NgramDrafter()], max_new_tokens=1, **GREEDY
    )
    assert answer.matched is None and answer.right.tolist() == answer.drafted.tolist() == [0]


def test_several_drafters_are_asked_about_one_answer() -> None:
    """Each hears of its own drafts alone, and says what it would say by itself."""
    model = TableRunner.random(12, seed=4)
    texts = torch.tensor([[4, 9, 3, 4, 9], [7, 7, 7, 7, 7]])
    kw: dict[str, Any] = {"sampling": sk.SamplingParams(1.0), "seeds": torch.arange(2), "max_new_tokens": 30}

    def of(name: str) -> sk.Drafter:
        astray = sk.ModelDrafter(near_table(model))
        made = {"lookup": sk.NgramDrafter(), "n-grams": sk.NgramLMDrafter(), "model": astray}
        return made[name]

    names = ["lookup", "model", "n-grams"]
    together = answers.asked(model, texts, [of(name) for name in names], eos_token_id=[], **kw)
    for name, found in zip(names, together, strict=True):
        (alone,) = answers.asked(model, texts, [of(name)], eos_token_id=[], **kw)
        assert all(same(a, b) for a, b in zip(found, alone, strict=True))
        assert any(answer.right.any() for answer in found)


def same(one: Answer, other: Answer) -> bool:
    parts = [(getattr(one, of), getattr(other, of)) for of in ("drafted", "right", "matched")]
    return all(np.array_equal(a, b) if a is not None and b is not None else a is b for a, b in parts)


def test_they_can_be_kept(tmp_path: Path) -> None:
    def answer(n: int, foresees: bool) -> Answer:
        return Answer(np.arange(n), np.arange(n) // 2, np.arange(n) + 1 if foresees else None)

    kept = {
        ("chat", 0.0, "lookup"): [answer(3, True), answer(1, True), answer(5, True)],
        ("chat", 0.7, "model"): [answer(4, False)],
        ("code-edit", 0.0, "lookup"): [answer(2, True)] * 2,
    }
    answers.save(tmp_path / "kept.npz", kept)
    found = answers.load(tmp_path / "kept.npz")
    assert list(found) == list(kept)
    assert all(same(a, b) for of in kept for a, b in zip(found[of], kept[of], strict=True))


def test_answers_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while they are written, as the whole program is told it."""
    old = {name: f"the old {name}" for name in ("answers.npz", "answers.json")}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    real = np.savez_compressed

    def interrupted(file: Any, **arrays: Any) -> None:
        real(file, half=np.arange(9))
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be"])
    arguments = "--sets chat --prompts 1 --max-new-tokens 4 --temperatures 0 --drafter lookup --threads".split()
    assert answers.main([*arguments, str(torch.get_num_threads()), "--output", str(tmp_path)]) == 130
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == old


def test_the_first_tokens_of_an_answer_are_an_answer() -> None:
    whole = Answer(np.full(6, 7), np.array([6, 5, 1, 3, 2, 1]), np.arange(6))
    assert same(whole.first(4), Answer(np.full(4, 7), np.array([4, 3, 1, 1]), np.arange(4)))
    assert same(whole.first(9), whole)


@pytest.mark.parametrize("of", ["lookup", "model"])
def test_all_of_it(of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama", 1), None))
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"] * 5)
    arguments = ["--sets", "chat", "--prompts", "9", "--max-new-tokens", "20", "--output", str(tmp_path)]
    arguments += ["--threads", str(torch.get_num_threads()), "--drafter", of, "lookup-16"]
    with pytest.raises(SystemExit):
        answers.main([*arguments, *(["--draft-model", str(tmp_path)] if of == "lookup" else [])])
    arguments += ["--draft-model", str(tmp_path)] if of == "model" else []
    assert answers.main(arguments) == 0
    found = answers.load(tmp_path / "answers.npz")
    assert list(found) == [("chat", temperature, name) for temperature in (0.0, 1.0) for name in (of, "lookup-16")]
    assert all(len(each) == 9 and any(answer.drafted.any() for answer in each) for each in found.values())
    rows = json.loads((tmp_path / "answers.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [sum(len(a.right) for a in each) for each in found.values()]
