"""What Medusa's training refuses: models, features and weights that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from python_tests.decoding.models import tiny
from python_tests.medusa.models import HIDDEN, patterned
from specdec_kernels.medusa import (
    Document,
    Features,
    MedusaHeads,
    Recipe,
    acceptance_of,
    choose_vocabulary,
    extract,
    linear_cross_entropy,
    train_draft,
    train_heads,
    train_jointly,
)


def refused(model: Any, must: str) -> None:
    """By all that read a model's logits as those of its LM head."""
    head, missing = tiny("llama").get_output_embeddings().weight, cast(Any, None)
    for call, argument in (
        (lambda: acceptance_of(model, head, missing), "acceptance_of: draft"),
        (lambda: train_draft(model, head, missing, Recipe()), "train_draft: draft"),
        (lambda: train_jointly(model, missing, missing, Recipe()), "train_jointly: model"),
    ):
        with pytest.raises(ValueError, match=f"{argument} must have {must}"):
            call()


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("cohere", {}, "logit_scale"), ("granite", {"logits_scaling": 8.0}, "logits_scaling"),
        ("gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"), ("phi", {}, "a bias of the LM head"),
    ],
)  # fmt: skip
def test_logits_that_are_not_the_heads_alone_are_refused(name: str, config: dict[str, Any], why: str) -> None:
    """The loss and the acceptance would be of other distributions than the model's."""
    refused(tiny(name, **config), f"logits that are its LM head's alone, got {why}")


def test_a_model_without_a_head_is_refused() -> None:
    refused(tiny("llama").base_model, "an LM head, got a LlamaModel, which has none")


def test_features_of_another_hidden_size_or_without_a_token_to_predict_are_refused() -> None:
    """Before a step is made: without distillation the hidden states of joint training's features are not even read."""
    model = tiny("llama")
    features = extract(model, patterned(6))
    heads = MedusaHeads.of_model(model, 2, choose_vocabulary(features, 12))
    head = model.get_output_embeddings().weight
    narrow = replace(features, hidden=features.hidden[:, :16])
    prompts = replace(features, firsts=torch.full_like(features.firsts, 20))
    calls: dict[str, Callable[[Features, Recipe], Any]] = {
        "train_heads": lambda given, recipe: train_heads(heads, given, recipe),
        "train_jointly": lambda given, recipe: train_jointly(model, heads, given, recipe),
        "train_draft": lambda given, recipe: train_draft(model, head, given, recipe),
    }
    for name, call in calls.items():
        for distilled in (True, False):
            recipe = Recipe(steps=1, batch_size=2, distilled=distilled)
            with pytest.raises(ValueError, match=f"{name}: features must have text to learn from, got none"):
                call(prompts, recipe)
            if name != "train_draft":  # whose `head` says how wide they are
                message = rf"{name}: features.hidden must be \[n, hidden={HIDDEN}\], got \[120, 16\]"
                with pytest.raises(ValueError, match=message):
                    call(narrow, recipe)
            call(features, recipe)


def test_inputs_and_weight_have_one_dtype(rng: torch.Generator) -> None:
    inputs, labels = torch.randn(3, 4, generator=rng), torch.tensor([1, -100, 0])
    with pytest.raises(TypeError, match="linear_cross_entropy: weight must be float32, got float64"):
        linear_cross_entropy(inputs, torch.randn(9, 4, generator=rng).double(), labels)


def test_parts_of_several_kinds_are_not_joined() -> None:
    part = extract(tiny("llama"), patterned(2))
    for other, kind in (
        (replace(part, hidden=part.hidden[:, :16]), "16 float16 on cpu"),
        (replace(part, hidden=part.hidden.float()), f"{HIDDEN} float32 on cpu"),
        (Features(*(getattr(part, name).to("meta") for name in vars(part))), f"{HIDDEN} float16 on meta"),
    ):
        message = f"Features: parts must be of one hidden size, dtype and device, got {HIDDEN} float16 on cpu, {kind}"
        with pytest.raises(ValueError, match=message):
            Features.join([part, part, other])


def test_a_vocabulary_has_two_ids_or_more() -> None:
    features = extract(tiny("llama"), patterned(2))
    with pytest.raises(ValueError, match="choose_vocabulary: size must be >= 2, got 1"):
        choose_vocabulary(features, 1)
    for text, different in (([4, 7, 7], 1), ([4], 0)):
        alone = extract(tiny("llama"), [Document(np.array(text))])
        message = f"choose_vocabulary: features must have two different tokens to predict or more, got {different}"
        with pytest.raises(ValueError, match=message):
            choose_vocabulary(alone, 8)
