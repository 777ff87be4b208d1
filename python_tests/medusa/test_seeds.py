"""Beginnings of the text that a target writes for its heads' training."""

from __future__ import annotations

from typing import Any

import torch

import specdec_kernels as sk
from python_tests.decoding.models import tiny
from python_tests.medusa.models import Letters
from specdec_kernels.medusa import data


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
