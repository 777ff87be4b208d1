"""Draft models whose vocabulary is not the target's: padded differently, or a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specdec_kernels as sk
from python_tests.decoding.models import near, padded, prompts, tiny
from specdec_kernels.integrations.transformers import assisted_generation

FAMILIES = ("llama", "gpt2", "gemma2", "t5")
GREEDY = sk.SamplingParams(temperature=0.0)
SOME = sk.TokenMap(torch.arange(0, 60, 2))


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [50, 70])
def test_a_draft_whose_vocabulary_is_padded_differently(size: int, family: str) -> None:
    """It reads what it has no embedding of as another id, and goes on drafting."""
    target, draft = tiny(family, 1), padded(near(family, 1, 0.02), size)
    ids, mask = prompts(3, 9, 6)
    assert ids.max() >= 50
    plain = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.NoDrafter(), sampling=GREEDY, max_new_tokens=24, eos_token_id=[]
    )
    assert plain.tokens.max() >= 50
    token_map = sk.TokenMap(torch.arange(min(size, 61)))
    makers = [sk.ModelDrafter] if family == "t5" else [sk.ModelDrafter, sk.ModelTreeDrafter]
    for make in makers:
        out = sk.generate(
            target, ids, attention_mask=mask, drafter=make(draft, token_map=token_map), sampling=GREEDY,
            max_new_tokens=24, num_speculative_tokens=3, eos_token_id=[],
        )  # fmt: skip
        assert torch.equal(out.sequences, plain.sequences), make
        assert out.stats.num_accepted >= (3 if size == 50 else 30), make
    head = draft.get_output_embeddings().weight
    own = sk.ModelDrafter(draft, token_map=token_map).runner.model.get_output_embeddings().weight
    assert own.data_ptr() == head.data_ptr() and len(own) == len(token_map)  # the first rows, not a copy of them


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {}, "penalty": {"repetition_penalty": 1.5}, "suppress": {"suppress_tokens": [60, 5, 51]},
}  # fmt: skip


class Vocabulary:
    """A tokenizer, as far as it is looked at."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {f"token {i}": i for i in range(self.size)}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [50, 70])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_assistant_whose_vocabulary_is_padded_differently(family: str, size: int, name: str) -> None:
    """transformers then asks for both tokenizers, which say that the ids are the same."""
    model = tiny(family, 1)
    assistant, tokenizer = padded(near(family, 1, 0.02), size), Vocabulary(48)
    fed = []
    hook = model.register_forward_pre_hook(lambda *_: fed.append(1))
    drafting = {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": tokenizer}
    ids, mask = prompts(4, 9, 6)
    options: dict[str, Any] = OPTIONS[name]
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask, "eos_token_id": None, **options}
    expected = model.generate(ids, **options)
    fed.clear()
    with assisted_generation(num_speculative_tokens=4):
        found = model.generate(ids, **options, **drafting)
    hook.remove()
    assert found.tolist() == expected.tolist()
    assert len(fed) < (20 if size == 50 else 14)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_processors_of_such_an_assistant_see_the_texts_own_ids(family: str) -> None:
    """Not those that it reads instead."""
    model, assistant, tokenizer = tiny(family, 1), padded(near(family, 1, 0.02), 50), Vocabulary(48)
    ids, mask = prompts(4, 9)
    begins = 1 if family == "t5" else ids.shape[1]
    follows = {3: [55, 7], 7: [55, 58], 55: [3, 58], 58: [3, 7, 55]}

    def allowed(row: int, text: Tensor) -> list[int]:
        return follows[int(text[-1])] if len(text) > begins else list(follows)

    options: dict[str, Any] = {
        "attention_mask": mask, "do_sample": False, "max_new_tokens": 12, "eos_token_id": None,
        "prefix_allowed_tokens_fn": allowed,
    }  # fmt: skip
    expected = model.generate(ids, **options)
    with assisted_generation(num_speculative_tokens=4):
        found = model.generate(
            ids, assistant_model=assistant, tokenizer=tokenizer, assistant_tokenizer=tokenizer, **options
        )
    assert found.tolist() == expected.tolist() and {55, 58} & set(expected[:, begins:].flatten().tolist())


def test_where_such_an_assistant_knows_none_of_what_may_follow_it_drafts_nothing() -> None:
    """And its empty rows are no fault of the logits that the text is drawn from."""
    model, assistant, tokenizer = tiny("llama", 1), padded(near("llama", 1, 0.02), 50), Vocabulary(48)
    ids, mask = prompts(4, 9)
    with assisted_generation(num_speculative_tokens=4):
        found = model.generate(
            ids, assistant_model=assistant, tokenizer=tokenizer, assistant_tokenizer=tokenizer, attention_mask=mask,
            do_sample=True, max_new_tokens=12, eos_token_id=None, suppress_tokens=list(range(50)),
        )  # fmt: skip
    assert int(found[:, ids.shape[1] :].min()) >= 50


def test_an_assistant_with_other_ids_is_refused() -> None:
    other = {"assistant_model": tiny("llama", vocab_size=50), "tokenizer": Vocabulary(61)}
    message = "generate: not served by specdec_kernels: assistant_tokenizer with another vocabulary"
    with assisted_generation(), pytest.raises(ValueError, match=message):
        tiny("llama").generate(prompts(4)[0], assistant_tokenizer=Vocabulary(50), **other)


class Around(nn.Module):
    """Hands on what it does not have itself, as adapters do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


@pytest.mark.parametrize("kind", ["compiled", "around", "hooked"])
def test_some_ids_are_drafted_without_a_change_to_the_callers_model(kind: str) -> None:
    draft, ids = tiny("llama", 1), prompts(5)[0]
    before, modules = draft(ids).logits, list(draft._modules)
    given: Any = {
        "compiled": lambda: torch.compile(draft, backend="eager"),
        "around": lambda: Around(draft).eval(),
    }.get(kind, lambda: draft)()
    if kind == "hooked":
        draft.forward = draft.forward
    if kind == "compiled":
        out = sk.generate(tiny("llama"), ids, drafter=sk.ModelDrafter(given, token_map=SOME), max_new_tokens=8)
        assert out.tokens.shape[1] > 0
    else:
        message = (
            "ModelDrafter: token_map .or config.draft_token_ids. must be of a model without hooks that is no wrapper"
        )
        with pytest.raises(ValueError, match=message):
            sk.ModelDrafter(given, token_map=SOME)
    assert list(draft._modules) == modules and torch.equal(draft(ids).logits, before)
