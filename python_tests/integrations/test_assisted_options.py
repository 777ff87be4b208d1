"""Options of `model.generate` that this package looks at itself, and what it says of wrong ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin

import specdec_kernels as sk
from python_tests.decoding.models import prompts, tiny
from specdec_kernels.integrations.transformers import assisted, assisted_generation, generate
from specdec_kernels.ops.arguments import ACCEPTANCES


@pytest.mark.parametrize("width", [3, 5])
def test_a_mask_of_another_width_is_refused(width: int) -> None:
    model = tiny("llama")
    mask = torch.ones(1, width).long()
    mask[:, 0] = 0
    with pytest.raises(ValueError, match=rf"^generate: attention_mask must be \[1, 4\], got \[1, {width}\]"):
        model.generate(prompts(4)[0], attention_mask=mask, custom_generate=generate, drafter=sk.NgramDrafter())


def test_a_wrong_rule_is_refused_greedily_too() -> None:
    model = tiny("llama")
    options = {"custom_generate": generate, "drafter": sk.NgramDrafter(), "do_sample": False, "max_new_tokens": 2}
    with pytest.raises(ValueError, match=f"^generate: acceptance must be one of {', '.join(ACCEPTANCES)}, got 'blok'"):
        model.generate(prompts(4)[0], acceptance="blok", **options)


def test_a_drafter_stands_instead_of_a_lookup() -> None:
    """Whose length does not count then."""
    model = tiny("llama")
    asked = []

    class Seen(sk.NgramDrafter):
        def propose(self, state: Any, num_tokens: int) -> Any:
            asked.append(num_tokens)
            return super().propose(state, num_tokens)

    options = {"custom_generate": generate, "drafter": Seen(), "do_sample": False, "max_new_tokens": 9}
    model.generate(prompts(4)[0], prompt_lookup_num_tokens=2, **options)
    assert max(asked) == 5


@pytest.mark.parametrize(("given", "longest"), [(None, 2), (0, 2), (1, 1), (64, 64), (65, 64), (2**40, 64)])
def test_how_long_a_lookup_s_matches_are(given: int | None, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers, which takes 0 as none given, up to what an index holds."""
    model = tiny("llama")
    made = []

    def noted(n: int) -> sk.NgramDrafter:
        made.append(n)
        return sk.NgramDrafter(n)

    monkeypatch.setattr(assisted, "NgramDrafter", noted)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 4, "do_sample": False}
    plain = model.generate(prompts(4)[0], **options)
    with assisted_generation():
        assert torch.equal(model.generate(prompts(4)[0], max_matching_ngram_size=given, **options), plain)
    assert made == [longest]


@pytest.mark.long
def test_an_assistant_may_draft_nothing_or_more_than_a_step_holds() -> None:
    """What transformers makes of such lengths, too."""
    model, assistant = tiny("llama"), tiny("llama", 1)
    run = functools.partial(model.generate, prompts(4)[0], max_new_tokens=70, do_sample=False, eos_token_id=None)
    plain = run()
    for most in (0, 100):
        assistant.generation_config.update(num_assistant_tokens=most, assistant_confidence_threshold=0.0)
        assert torch.equal(run(assistant_model=assistant), plain)
        with assisted_generation():
            assert torch.equal(run(assistant_model=assistant), plain)


def test_an_assistant_s_schedule_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own "heuristic" the next draft would have two tokens more, and so would the next call's."""
    model, asked = tiny("llama"), []
    propose = sk.ModelDrafter.propose

    def noted(drafter: sk.ModelDrafter, state: Any, num_tokens: int) -> Any:
        asked.append(num_tokens)
        return propose(drafter, state, num_tokens)

    monkeypatch.setattr(sk.ModelDrafter, "propose", noted)
    assistant = tiny("llama")  # the same weights: every draft is accepted
    given = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}
    assistant.generation_config.update(**given, assistant_confidence_threshold=0.0)
    with assisted_generation():
        model.generate(prompts(4)[0], assistant_model=assistant, max_new_tokens=17, do_sample=False, eos_token_id=None)
    assert len(asked) >= 4 and max(asked) == 3
    assert given.items() <= assistant.generation_config.to_dict().items()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_assistant_tokens", -1, "must be >= 0, got -1"),
        ("num_assistant_tokens", "5", "must be an integer, got str"),
        ("num_assistant_tokens", float("nan"), "must be an integer, got float"),
        ("assistant_confidence_threshold", "0.4", "must be a number, got str"),
    ],
)
def test_wrong_options_of_an_assistant_are_refused(option: str, value: Any, message: str) -> None:
    model, assistant = tiny("llama"), tiny("llama", 1)
    setattr(assistant.generation_config, option, value)
    with assisted_generation(), pytest.raises((TypeError, ValueError), match=f"^generate: {option} {message}"):
        model.generate(prompts(4)[0], assistant_model=assistant, max_new_tokens=2, do_sample=False)


def test_weights_on_meta_are_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM must have its weights, got them on meta"):
        sk.generate(tiny("llama").to("meta"), prompts(4)[0], drafter=sk.NoDrafter())


@pytest.mark.parametrize("option", [{"use_mtp": True}, {"assistant_early_exit": 1}, {"speculation_type": "dflash"}])
def test_other_ways_of_drafting_are_transformers_own(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside an assistant, of which they make something else."""
    handed_on = []

    @functools.wraps(GenerationMixin._assisted_decoding)
    def stock(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        handed_on.append(prepared["generation_config"].to_dict())
        return input_ids

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", stock)
    model, ids = tiny("llama"), prompts(4)[0]
    for assistant in ({}, {"assistant_model": tiny("llama", 1)}):
        if assistant or "speculation_type" not in option:  # that alone is no assisted generation
            with assisted_generation():
                assert model.generate(ids, max_new_tokens=3, do_sample=False, **option, **assistant) is ids
            assert option.items() <= handed_on.pop().items()
    assert GenerationMixin._assisted_decoding is stock


@pytest.mark.parametrize("name, handed_on", [("Gemma4AssistantForCausalLM", True), ("Gemma4ForCausalLM", False)])
def test_assistants_that_read_the_targets_cache_are_transformers_own(
    name: str, handed_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known by the names that transformers knows them by."""
    assistant, ids = tiny("llama", 1), prompts(4)[0]
    assistant.__class__ = type(name, (type(assistant),), {})

    @functools.wraps(GenerationMixin._assisted_decoding)
    def stock(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        return input_ids

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", stock)
    with assisted_generation():
        out = tiny("llama").generate(ids, assistant_model=assistant, max_new_tokens=3, do_sample=False)
    assert (out is ids) == handed_on
