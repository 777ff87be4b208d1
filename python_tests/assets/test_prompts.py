"""The prompt sets that are made here."""

from __future__ import annotations

import inspect
import shutil
import statistics
from typing import Any

import pytest

from specdec_kernels.assets import prompts


class NoChat:
    chat_template = None


@pytest.mark.parametrize("name", ["code-edit", "quote", "summarise"])
def test_enough_texts_for_ten_rounds_of_eight(name: str) -> None:
    tokenizer: Any = NoChat()
    texts = prompts.load_prompts(name, tokenizer)
    assert len(set(texts)) == len(texts) == 80
    assert all(400 < len(text) < 1100 for text in texts)
    assert prompts.load_prompts(name, tokenizer, 3) == texts[:3]


def test_functions_that_follow_the_first_twelve_are_whole() -> None:
    tokenizer: Any = NoChat()
    texts = prompts.load_prompts("code-edit", tokenizer)
    assert inspect.getsource(shutil.copyfileobj) in texts[0]
    assert all(any(inspect.getsource(f) in text for text in texts[12:]) for f in (statistics.mode, inspect.getdoc))
