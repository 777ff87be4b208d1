"""The prompt sets that are made here."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels.assets import corpus, prompts


class NoChat:
    chat_template = None


@pytest.mark.parametrize("name", ["code-edit", "quote", "summarise"])
def test_enough_texts_for_ten_rounds_of_eight(name: str) -> None:
    tokenizer: Any = NoChat()
    texts = prompts.load_prompts(name, tokenizer)
    assert len(set(texts)) == len(texts) == 80
    assert all(390 < len(text) < 1100 for text in texts)
    assert prompts.load_prompts(name, tokenizer, 3) == texts[:3]


def test_functions_are_of_no_source_that_drafters_have_read() -> None:
    tokenizer: Any = NoChat()
    texts = prompts.load_prompts("code-edit", tokenizer)
    counted = set(corpus.sources())
    assert not any(Path(inspect.getfile(module)) in counted for module in prompts._MODULES)
    read = "\n".join(textwrap.dedent(inspect.getsource(module)) for module in prompts._MODULES)
    assert all(text.split("```python\n")[1].partition("\n")[0].strip() in read for text in texts)
    assert inspect.getsource(shutil.copyfileobj) in texts[0] and any("def zscore(self" in text for text in texts)
