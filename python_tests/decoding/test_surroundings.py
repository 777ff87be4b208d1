"""A call is the same whatever dtype and device new tensors have by default, and whatever other threads run."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.grammars import DRAFTERS, END, NEW, Residues
from python_tests.decoding.models import TableRunner, near, prompts, tiny
from python_tests.decoding.tree_models import medusa
from python_tests.ops.inputs import same_bits

RULES = ("token", "match")


def call(name: str, acceptance: str = "token", drafter: Any = None, **more: Any) -> sk.GenerationOutput:
    """With everything that makes tensors on the way."""
    ids, mask = prompts(3, 9, 6)
    target = tiny("llama", 1)
    given = sk.Processors(
        logit_bias={5: 1.0}, presence_penalty=0.4, banned_ids=[7], stop_token_ids=[END], min_tokens=4,
        token_counts=sk.TokenCounts(ids, NEW, mask),
    )  # fmt: skip
    options = {
        "grammar": Residues(3, target.config.vocab_size), "processors": given, "return_logprobs": 2,
        "sampling": sk.SamplingParams(torch.tensor([0.0, 0.9, 1.2]), top_p=0.95), "seeds": torch.arange(3),
        "num_speculative_tokens": 3,
    }  # fmt: skip
    return sk.generate(
        target, ids, attention_mask=mask, drafter=drafter or DRAFTERS[name](near("llama", 1, 0.05)),
        acceptance=acceptance, max_new_tokens=NEW, eos_token_id=END, **{**options, **more},
    )  # fmt: skip


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_defaults_of_torch_change_nothing(name: str, acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models aside, which are made and run as their owners like."""
    expected = call(name, acceptance)
    forward = torch.nn.Module.__call__

    def with_usual_defaults(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        monkeypatch.setattr(torch.nn.Module, "__call__", forward)  # for the modules within
        try:
            with torch.device("cpu"):
                return forward(self, *args, **kwargs)
        finally:
            monkeypatch.setattr(torch.nn.Module, "__call__", with_usual_defaults)
            torch.set_default_dtype(before)

    drafter, target = DRAFTERS[name](near("llama", 1, 0.05)), tiny("llama", 1)
    ids, mask = prompts(3, 9, 6)
    sampling = sk.SamplingParams(torch.tensor([0.0, 0.9, 1.2]), top_p=0.95)
    counts, seeds = sk.TokenCounts(ids, NEW, mask), torch.arange(3)
    monkeypatch.setattr(torch.nn.Module, "__call__", with_usual_defaults)
    for dtype, device in ((torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")):
        grammar = Unready(3, 61)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                found = sk.generate(
                    target, ids, attention_mask=mask, drafter=drafter, acceptance=acceptance, max_new_tokens=NEW,
                    eos_token_id=END, grammar=grammar, sampling=sampling, seeds=seeds, return_logprobs=2,
                    num_speculative_tokens=3, processors=sk.Processors(
                        logit_bias={5: 1.0}, presence_penalty=0.4, banned_ids=[7], stop_token_ids=[END], min_tokens=4,
                        token_counts=counts.clone(),
                    ),
                )  # fmt: skip
        finally:
            torch.set_default_dtype(torch.float32)
        same_bits(found.tokens, expected.tokens)
        assert found.logprobs is not None and expected.logprobs is not None
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, equal_nan=True)


class Unready(Residues):
    """Makes its own tensors on the CPU, as an engine does."""

    def fill(self, rows: Any, drafts: Any) -> None:
        with torch.device("cpu"):
            super().fill(rows, drafts)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in ("plain", "any")])
def test_a_drafter_keeps_nothing_of_a_call_that_is_over(name: str) -> None:
    drafter = DRAFTERS[name](near("llama", 1, 0.05))
    grammar = Residues(3, 61)
    gone = weakref.ref(grammar)
    call(name, drafter=drafter, grammar=grammar)
    del grammar
    gc.collect()
    assert gone() is None


def test_another_threads_forward_leaves_a_step_its_hidden_states() -> None:
    """Both run one model, as transformers' models are shared."""
    model = tiny("llama", 1)
    ids = torch.tensor([[5, 9, 4]])
    options: dict[str, Any] = {
        "max_new_tokens": 24, "acceptance": "greedy", "eos_token_id": [], "num_speculative_tokens": 1,
    }  # fmt: skip
    expected = sk.generate(model, ids, drafter=medusa(model), **options)
    mine = threading.get_ident()

    def meddle(module: Any, inputs: Any, output: Any) -> None:
        if threading.get_ident() == mine:
            other = threading.Thread(target=lambda: model(torch.tensor([[7, 7]])))
            other.start()
            other.join()

    for when in ("register_forward_hook", "register_forward_pre_hook"):
        head = model.get_output_embeddings()
        watch = getattr(head, when)(meddle if when == "register_forward_hook" else lambda m, i: meddle(m, i, None))
        try:
            found = sk.generate(model, ids, drafter=medusa(model), **options)
        finally:
            watch.remove()
        same_bits(found.tokens, expected.tokens)
        assert found.stats.num_accepted == expected.stats.num_accepted > 0


@pytest.mark.parametrize("greedy", [torch.zeros(2), torch.tensor([0.0, 1e-40])], ids=["zero", "tiny"])
def test_confidence_is_that_at_temperature_1_where_a_sequence_is_greedy(greedy: torch.Tensor) -> None:
    """Whether a number or a tensor says so."""
    drafted = []
    for temperature in (0.0, greedy):
        out = sk.generate(
            TableRunner.random(), torch.tensor([[4, 9], [3, 8]]), sampling=sk.SamplingParams(temperature),
            drafter=sk.ModelDrafter(TableRunner.random(seed=1), min_confidence=0.5), max_new_tokens=20,
            num_speculative_tokens=4, eos_token_id=[],
        )  # fmt: skip
        drafted.append((out.stats.num_drafted, out.tokens.tolist()))
    assert drafted[0] == drafted[1]
    sure = sk.generate(
        TableRunner.random(), torch.tensor([[4, 9], [3, 8]]), sampling=sk.SamplingParams(0.0),
        drafter=sk.ModelDrafter(TableRunner.random(seed=1)), max_new_tokens=20, num_speculative_tokens=4,
        eos_token_id=[],
    )  # fmt: skip
    assert drafted[0][0] < sure.stats.num_drafted
