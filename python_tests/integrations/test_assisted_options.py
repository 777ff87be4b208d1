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
from specdec_kernels.integrations.transformers import assisted_generation, generate
from specdec_kernels.ops.verify_chain import ACCEPTANCES


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


def test_the_length_of_a_lookup_counts_beside_a_drafter() -> None:
    model = tiny("llama")
    asked = []

    class Seen(sk.NgramDrafter):
        def propose(self, state: Any, num_tokens: int) -> Any:
            asked.append(num_tokens)
            return super().propose(state, num_tokens)

    options = {"custom_generate": generate, "drafter": Seen(), "do_sample": False, "max_new_tokens": 9}
    model.generate(prompts(4)[0], prompt_lookup_num_tokens=2, **options)
    assert max(asked) == 2


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
