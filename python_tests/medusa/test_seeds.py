"""Beginnings of the text that a target writes for its heads' training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import tiny
from python_tests.medusa.models import Letters
from specdec_kernels.assets import prompts
from specdec_kernels.medusa import command, data


@pytest.mark.long
def test_self_talk_begins_as_the_template_does() -> None:
    """With the padding id, as some templates do: that is a token there."""

    class Template(Letters):
        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return f"`ab{turns[0]['content']}c"  # "`" is before "a"

        def encode(self, text: str, **kw: Any) -> list[int]:
            return [one - 2 if one == 2 else one for one in super().encode(text)]

        def decode(self, ids: list[int], **_: Any) -> str:
            return str(ids)

    model, seeds = tiny("llama"), data.Seeds(Template())  # type: ignore[arg-type]
    assert Template().encode("`ab") == [0, 3, 4] and model.config.pad_token_id == 0
    written = seeds._self_talk(model, 2)
    ids = torch.tensor([[0, 3, 4]] * 32)
    expected = sk.generate(
        model, ids, attention_mask=torch.ones_like(ids), drafter=sk.NoDrafter(), max_new_tokens=64,
        seeds=torch.arange(32) + 1_000_003 + 64,
    )  # fmt: skip
    texts = zip(expected.tokens, expected.num_tokens, strict=True)
    assert written == [str(row[:n].tolist()) for row, n in texts] and len(set(written)) > 20


def test_what_is_held_out_has_every_question_and_temperature() -> None:
    """And both kinds of text occur in all their combinations: none is always greedy."""
    held_out, every = set(), set()
    for shard in range(120):
        turn, kind = divmod(shard, data._SOURCE_EVERY)
        number = turn * (data._SOURCE_EVERY - 1) + kind
        if kind == data._SOURCE_EVERY - 1 or number % 3 != 1:  # source code, or no questions
            continue
        for i in range(data._DOCUMENTS):
            what = data.question_of(number // 3, i), data.temperature_of(i)
            every.add(what)
            if (shard * data._DOCUMENTS + i) % command.HELD_OUT_EVERY == command.HELD_OUT_EVERY - 1:
                held_out.add(what)
    assert len(every) == 4 * 3, "two of the four temperatures are 0"
    for part in (0, 1):
        assert {what[part] for what in held_out} == {what[part] for what in every}


@pytest.mark.long
def test_questions_are_about_functions_that_are_not_continued() -> None:
    class Template(Letters):
        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return str(turns[0]["content"])

    seeds = data.Seeds(Template())  # type: ignore[arg-type]
    begun = [seeds.prompts(None, shard) for shard in (0, 3)]
    asked = "".join(text for shard in (1, 4) for text in seeds.prompts(None, shard))
    assert not any(beginning in asked for shard in begun for beginning in shard)


def test_what_it_needs_is_looked_at_before_text_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Base(Letters):
        chat_template = None

    with pytest.raises(ValueError, match="tokenizer must have a chat template"):
        data.prepare(tiny("llama"), Base(), tmp_path, 1)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(data, "sources", list)
    with pytest.raises(ValueError, match="must come with its library's source code"):
        data.prepare(tiny("llama"), Letters(), tmp_path, 1)  # type: ignore[arg-type]


def test_no_question_is_a_benchmarks() -> None:
    assert not any(question in prompt for question in data._QUESTIONS for prompt in prompts._code_edit())
