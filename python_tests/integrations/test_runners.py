"""Which runner serves a model, and what it takes from the model's config."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, prompts, tiny
from python_tests.support import in_fresh_process
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.integrations.transformers.decoder import DecoderRunner

IMPORTED = """
import sys
import specdec_kernels
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.integrations.transformers import models, packing

try:
    as_runner("a model", "here")
except ValueError as error:
    assert str(error).startswith("here: str cannot be served: it is neither"), error
assert "transformers" not in sys.modules
"""


def test_transformers_is_not_imported_before_a_model_of_it_is_served() -> None:
    in_fresh_process(IMPORTED)


def test_a_runner_is_served_as_it_is() -> None:
    runner = TableRunner.random()
    assert as_runner(runner, "here") is runner
    for family in ("llama", "t5"):
        model = tiny(family)
        assert as_runner(model, "here").costs_as() == (model, (False, model.config.vocab_size))


@pytest.mark.parametrize(
    ("ends", "padding", "expected"),
    [
        (None, None, ((), 0)), (5, None, ((5,), 5)), ([5, 7], None, ((5, 7), 5)), ([5, 7], 9, ((5, 7), 9)),
        (torch.tensor([5, 7]), None, ((5, 7), 5)), (np.array([5, 7]), None, ((5, 7), 5)), ([], None, ((), 0)),
    ],
)  # fmt: skip
def test_ends_and_padding_are_the_model_s(ends: Any, padding: int | None, expected: tuple[Any, int]) -> None:
    model = tiny("llama", eos_token_id=None, pad_token_id=padding)
    model.generation_config.eos_token_id = ends
    runner = as_runner(model, "here")
    assert (runner.end_ids, runner.padding_id) == expected


def test_a_runner_of_one_s_own_names_its_ends_and_padding() -> None:
    class Ending(TableRunner):
        end_ids, padding_id = (4, -1), 9  # −1: none, as some configs say

    table = TableRunner.random().table
    ids, mask = prompts(3, 5, 2, 4, vocab=23)
    kw: dict[str, Any] = {"attention_mask": mask, "drafter": sk.NoDrafter(), "seeds": torch.arange(4)}
    out = sk.generate(Ending(table), ids, **kw)
    named = sk.generate(TableRunner(table), ids, eos_token_id=4, **kw)
    assert torch.equal(out.tokens, named.tokens) and out.num_tokens.unique().numel() > 1
    assert (out.sequences[:, ids.shape[1] :][out.tokens < 0] == 9).all()


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_model_with_hooks_is_not_captured(family: str) -> None:
    """A replay would not call them. Those that transformers itself leaves behind do nothing."""
    model: Any = tiny(family)
    ids = prompts(4)[0]
    model(input_ids=ids, output_hidden_states=True, **({"decoder_input_ids": ids} if family == "t5" else {}))
    assert as_runner(model, "here").capturable
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        handle = register(lambda *given: None)
        assert not as_runner(model, "here").capturable
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert not as_runner(model, "here").capturable
    handle.remove()
    assert as_runner(model, "here").capturable


def test_a_tree_step_of_another_call_is_no_hook_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama")
    seen, run = list[bool](), DecoderRunner._run
    monkeypatch.setattr(
        DecoderRunner, "_run", lambda *given: (seen.append(as_runner(model, "here").capturable), run(*given))[1]
    )
    sk.generate(model, torch.tensor([[5, 6, 5, 6, 5]]), drafter=sk.NgramTreeDrafter(), max_new_tokens=12)
    assert len(seen) > 3 and all(seen)


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_one_window_rules_every_layer_of_mistral(kinds: list[str]) -> None:
    """Whatever its config says of the kinds of its layers: the model does not read that."""
    model: Any = tiny("mistral", sliding_window=4, layer_types=kinds, num_hidden_layers=2)
    ids = prompts(12)[0]
    expected = model.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=None, use_cache=False)
    given: dict[str, Any] = {"drafter": sk.NgramDrafter(), "max_new_tokens": 20, "eos_token_id": []}
    assert torch.equal(sk.generate(model, ids, sampling=sk.SamplingParams(0.0), **given).sequences, expected)
