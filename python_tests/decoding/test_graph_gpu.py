"""Captured steps on a real GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from bench.gpu import strategy
from python_tests.decoding.models import RepeatLast, prompts, texts, tiny
from python_tests.ops import chains
from specdec_kernels.decoding import GenerationOutput, graph
from specdec_kernels.decoding.graph import CapturedSteps
from specdec_kernels.drafters import Drafter
from specdec_kernels.integrations.transformers.decoder import DecoderRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DRAFTERS = {
    "none": lambda draft: sk.NoDrafter(),
    "ngram": lambda draft: sk.NgramDrafter(2),
    "ngram_lm": lambda draft: sk.NgramLMDrafter(),
    "model": sk.ModelDrafter,
    "repeat last": lambda draft: RepeatLast(),
}


def on_gpu(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    return tiny(family, seed).to("cuda", dtype)


def run(target: Any, drafter: Drafter, **kw: Any) -> GenerationOutput:
    ids, mask = prompts(3, 9, 6)
    arguments: dict[str, Any] = {
        "seeds": torch.tensor([5, -1, 2**62]).cuda(), "max_new_tokens": 50, "num_speculative_tokens": 4,
        "sampling": sk.SamplingParams(0.9, top_k=20), "eos_token_id": [], **kw,
    }  # fmt: skip
    return sk.generate(target, ids.cuda(), attention_mask=mask.cuda(), drafter=drafter, **arguments)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt at a capture so far went well."""
    plain, seen = CapturedSteps._capture, list[bool]()

    def watched(self: CapturedSteps, *args: Any) -> Any:
        out = plain(self, *args)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(CapturedSteps, "_capture", watched)
    monkeypatch.setattr(graph, "_refusals", set())
    return seen


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_replay_does_what_the_step_does(
    name: str, acceptance: str, captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = on_gpu("llama", 1), on_gpu("llama", 2)
    captured = run(target, DRAFTERS[name](draft), acceptance=acceptance)
    assert captures and all(captures)
    monkeypatch.setattr(graph, "WARM_UP_STEPS", 1 << 30)  # the same steps, never captured
    ordinary = run(target, DRAFTERS[name](draft), acceptance=acceptance)
    assert texts(captured) == texts(ordinary)
    assert torch.equal(captured.provenance, ordinary.provenance) and torch.equal(captured.status, ordinary.status)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_families(family: str, dtype: torch.dtype, captures: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = on_gpu(family, 1, dtype), on_gpu(family, 2, dtype)
    captured = run(target, sk.ModelDrafter(draft), acceptance="match", max_new_tokens=100)
    assert all(captures) and (captures or family == "mixtral")  # experts may be run one by one
    monkeypatch.setattr(graph, "WARM_UP_STEPS", 1 << 30)
    assert texts(captured) == texts(run(target, sk.ModelDrafter(draft), acceptance="match", max_new_tokens=100))


def test_greedy_equals_the_models_own_generate(captures: list[bool]) -> None:
    target, (ids, mask) = on_gpu("llama", 1), prompts(3, 9, 6)
    own = target.generate(ids.cuda(), attention_mask=mask.cuda(), do_sample=False, max_new_tokens=24)
    for make in DRAFTERS.values():
        for num_speculative_tokens in (1, 5, "auto"):
            out = run(
                target, make(on_gpu("llama", 2)), sampling=sk.SamplingParams(0.0), eos_token_id=None, max_new_tokens=24,
                num_speculative_tokens=num_speculative_tokens,
            )  # fmt: skip
            assert torch.equal(out.sequences, own)
    assert captures and all(captures)


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_step_waits_for_the_device(name: str, captures: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, draft = CapturedSteps._launch, on_gpu("llama", 2)

    def watched(self: CapturedSteps, *args: Any) -> Any:
        if not self._graphs:  # what is set up at first use may wait
            return plain(self, *args)
        with graph._sync_debug_mode("error"):
            return plain(self, *args)

    monkeypatch.setattr(CapturedSteps, "_launch", watched)
    assert run(on_gpu("llama", 1), DRAFTERS[name](draft)).num_tokens.tolist() == [50, 50, 50]
    assert captures and all(captures)


def test_a_model_that_waits_runs_op_by_op(captures: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    class Waits(DecoderRunner):
        def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
            assert int(starts.max()) <= bound
            return super().forward(tokens, starts, bound, need_logits)

    model = on_gpu("llama", 1)
    plain = run(model, sk.NoDrafter(), acceptance="match")
    captures.clear()
    with caplog.at_level(logging.WARNING, logger="specdec_kernels"):
        out = run(Waits(model), sk.ModelDrafter(on_gpu("llama", 2)), acceptance="match")
    assert texts(out) == texts(plain) and captures == []
    assert "run op by op, not as a CUDA graph: LlamaForCausalLM: " in caplog.text


def test_nothing_is_left_behind(captures: list[bool]) -> None:
    target, draft = on_gpu("llama", 1), on_gpu("llama", 2)
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    run(target, sk.ModelDrafter(draft))
    torch.cuda.empty_cache()  # without a gc.collect(): nothing may lie in a reference cycle
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        run(target, sk.ModelDrafter(draft))
        torch.randn(3, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == mode
    assert captures and all(captures)


@pytest.mark.parametrize("layout", strategy.STRATEGIES)
def test_every_layout_of_a_verify_step_can_be_captured(layout: str) -> None:
    """Of rows so long that the layout of one launch asks for much shared memory."""
    made = chains.make(torch.Generator().manual_seed(5), 1, 5, 128256, dtype=torch.bfloat16)
    arguments = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in made.items()}
    expected = sk.verify_chain(**arguments, backend="cuda")
    with strategy.forced(layout):
        sk.verify_chain(**arguments, backend="cuda")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = sk.verify_chain(**arguments, backend="cuda")
    captured.replay()
    assert torch.equal(out.tokens, expected.tokens)
