"""Options of `model.generate` that this package looks at itself, and what it says of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import prompts, tiny
from specdec_kernels.integrations.transformers import generate
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
