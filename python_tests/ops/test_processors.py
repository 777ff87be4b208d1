"""Processors: what they make of logits is what transformers and vLLM make of them, on every backend."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import tiny
from python_tests.ops.inputs import DTYPES, logits, same_bits, uniforms
from python_tests.ops.processing import EACH, Request, bits, moved, of_any_kind, processors
from python_tests.ops.test_compile import tensors_of
from python_tests.support import Backend
from specdec_kernels.backends import PROCESSING
from specdec_kernels.testing import float64_law

OP = "warp_probs"
backends = importlib.import_module("specdec_kernels.backends")  # the package has a function of this name


@pytest.fixture
def taking(backend: Backend) -> Backend:
    """A backend that takes processors; the others refuse them, and drop none of them silently."""
    if backend.name not in PROCESSING:
        with pytest.raises((ValueError, RuntimeError), match="no processors"):
            backend.warp_probs(backend(torch.zeros(1, 9)), processors=sk.Processors(banned_ids=[1]))
        pytest.skip("takes no processors")
    return backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [2, 31, 33, 1024, 1025, 4097])
@pytest.mark.parametrize("params", [sk.SamplingParams(), sk.SamplingParams(0.8, 9, 0.9, 0.01), sk.SamplingParams(0.0)])
def test_is_the_reference(taking: Backend, dtype: torch.dtype, vocab: int, params: sk.SamplingParams) -> None:
    rng = torch.Generator().manual_seed(vocab)
    batch, n = 3, 2
    x = logits(rng, batch, n, taking.vocab(vocab), dtype=dtype)
    x[0, 0, 0], x[1, 1, 1], x[2, 0, 1] = math.nan, math.inf, -math.inf
    given = of_any_kind(rng, batch, (batch, n), x.shape[-1])
    expected = sk.warp_probs(x, params, processors=given, backend="reference")
    probs = taking.warp_probs(taking(x), params, processors=moved(given, taking)).cpu()
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-9)
    stats = [
        sk.row_stats(x, params, processors=given, backend="reference"),
        taking.row_stats(taking(x), params, processors=moved(given, taking)),
    ]
    torch.testing.assert_close(stats[0].values, stats[1].values.cpu(), rtol=1e-5, atol=1e-5)
    assert torch.equal(stats[0].argmax, stats[1].argmax.cpu()) and torch.equal(stats[0].status, stats[1].status.cpu())
    u = uniforms(rng, batch, n)
    drawn = [
        sk.sample(x, params, uniform_samples=u, processors=given, backend="reference"),
        taking.sample(taking(x), params, uniform_samples=taking(u), processors=moved(given, taking)),
    ]
    assert torch.equal(drawn[0].token, drawn[1].token.cpu())
    torch.testing.assert_close(drawn[0].log_prob, drawn[1].log_prob.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EACH)
def test_is_the_float64_formula(taking: Backend, name: str) -> None:
    """Sequences with other histories and other requests side by side."""
    rng = torch.Generator().manual_seed(5)
    vocab, one = 40, EACH[name]
    ids = range(vocab)
    requests = [
        replace(one, allowed=None if one.allowed is None else [*ids][3:], prompt=[3, 9, 3]),
        replace(one, output=[], prompt=[], repetition=1.0, presence=0.0),
        replace(
            one, allowed=None, output=[5, 5, 7, 1, 0], prompt=[39], min_tokens=0, frequency=-0.3, logit_bias={39: 2.0}
        ),
    ]
    x = logits(rng, 3, vocab)
    rows = [[one.grammar([b], vocab)[v] if one.grammar else True for v in ids] for b in range(3)]
    given = processors(requests, bits(rows))
    probs = taking.warp_probs(taking(x), sk.SamplingParams(0.7), processors=moved(given, taking)).cpu()
    for b, request in enumerate(requests):
        made = replace(request, grammar=None).row(x[b], [])
        expected = float64_law(torch.from_numpy(np.where(rows[b], made, -math.inf)), sk.SamplingParams(0.7))
        np.testing.assert_allclose(probs[b], expected, rtol=1e-5, atol=1e-9)


def as_transformers_has_it(request: Request, x: Tensor) -> Tensor:
    """One row through transformers' own processors, in the order in which `generate` applies them."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        TemperatureLogitsWarper,
    )  # fmt: skip

    ids = torch.tensor([[*request.prompt, *request.output]])
    chain = LogitsProcessorList([
        SequenceBiasLogitsProcessor({(v,): bias for v, bias in request.logit_bias.items()}),
        RepetitionPenaltyLogitsProcessor(request.repetition),
        SequenceBiasLogitsProcessor({(v,): -math.inf for v in request.banned}),
        MinNewTokensLengthLogitsProcessor(len(request.prompt), request.min_tokens, request.stop),
        TemperatureLogitsWarper(0.7),
    ])  # fmt: skip
    return chain(ids, x[None])[0]


@cache
def generating() -> Any:
    return tiny("llama", vocab_size=60)


def as_generate_has_it(request: Request, x: Tensor) -> Tensor:
    """One row through the list that transformers' `generate` makes of its own arguments, in its own order."""
    from transformers import GenerationConfig, LogitsProcessorList

    model, length = generating(), len(request.prompt)
    config = GenerationConfig(
        repetition_penalty=request.repetition, sequence_bias={(v,): bias for v, bias in request.logit_bias.items()},
        bad_words_ids=[[v] for v in request.banned], min_new_tokens=request.min_tokens, eos_token_id=request.stop,
        do_sample=True, temperature=0.7, top_k=0, top_p=1.0, num_beams=1,
    )  # fmt: skip
    model._prepare_special_tokens(config, device="cpu")
    chain = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=length, device="cpu", logits_processor=LogitsProcessorList(),
        prefix_allowed_tokens_fn=lambda b, ids: request.allowed,
    )  # fmt: skip
    assert len(chain) >= 6
    return chain(torch.tensor([[*request.prompt, *request.output]]), x[None])[0]


def as_vllm_has_it(request: Request, x: Tensor) -> Tensor:
    """One row by the formulae of vLLM 0.11 (v1/sample/sampler.py, model_executor/layers/utils.py)."""
    x, vocab = x.clone(), len(x)
    prompt = torch.bincount(torch.tensor(request.prompt), minlength=vocab) > 0
    output = torch.bincount(torch.tensor(request.output, dtype=torch.int64), minlength=vocab)
    if request.allowed is not None:
        x[[v for v in range(vocab) if v not in request.allowed]] = -math.inf
    x[request.banned] = -math.inf
    for v, bias in request.logit_bias.items():
        x[v] += bias
    if len(request.output) < request.min_tokens:
        x[request.stop] = -math.inf
    penalties = torch.where(prompt | (output > 0), request.repetition, 1.0)
    x *= torch.where(x > 0, 1.0 / penalties, penalties)
    x -= request.frequency * output
    x -= request.presence * (output > 0)
    return x / 0.7


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("engine", [as_transformers_has_it, as_generate_has_it, as_vllm_has_it])
def test_is_what_engines_make(taking: Backend, engine: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = 60

    def some(n: int) -> list[int]:
        return [int(v) for v in rng.choice(vocab, n, replace=False)]

    request = Request(
        logit_bias={v: float(rng.normal()) for v in some(5)}, banned=some(4), stop=some(2), min_tokens=4,
        repetition=1.4, prompt=some(9), output=[*some(3), *some(2)][: 3 + seed % 3],
    )  # fmt: skip
    if engine is not as_transformers_has_it:
        request = replace(request, allowed=some(50))
    if engine is as_vllm_has_it:
        request = replace(request, frequency=0.6, presence=-0.4)
    x = logits(torch.Generator().manual_seed(seed), vocab)
    probs = taking.warp_probs(taking(x[None]), sk.SamplingParams(0.7), processors=moved(processors([request]), taking))
    torch.testing.assert_close(probs[0].cpu(), engine(request, x).softmax(-1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("what", ["token_bitmask", "allowed_ids", "banned_ids", "presence_penalty", "drafted"])
def test_one_id_alone_is_changed(taking: Backend, what: str, rng: torch.Generator) -> None:
    """Wherever it stands: most of a row may be as it was, and that is as true of its neighbours."""
    vocab = taking.vocab(3 * 1024 + 40)
    ids = [0, 31, 32, 1023, 1024, 2050, vocab - 33, vocab - 8, vocab - 1]
    x = logits(rng, 1, vocab).expand(len(ids), -1).contiguous()
    counts = sk.TokenCounts(torch.full((len(ids), 1), 2), 4)
    expected, change = x.clone(), -2.0 if what in ("presence_penalty", "drafted") else -math.inf
    expected[range(len(ids)), ids] += change
    if what == "token_bitmask":
        rows = [[v != one for v in range(vocab)] for one in ids]
        given = sk.Processors(token_bitmask=bits(rows))
    elif what == "allowed_ids":
        given = sk.Processors(allowed_ids=[[v for v in range(vocab) if v != one] for one in ids])
    elif what == "banned_ids":
        given = sk.Processors(banned_ids=[[one] for one in ids])
    else:
        given = sk.Processors(presence_penalty=2.0, token_counts=counts)
    if what == "presence_penalty":
        counts.add_(torch.tensor(ids)[:, None])
    if what != "drafted":
        stats = taking.row_stats(taking(x), processors=moved(given, taking))
        plain = taking.row_stats(taking(expected))
        same_bits(stats, plain)
        same_bits(taking.warp_probs(taking(x), processors=moved(given, taking)), taking.warp_probs(taking(expected)))
        return
    given = sk.Processors(presence_penalty=99.0, token_counts=sk.TokenCounts(torch.tensor([[2]]), 4))
    for one in ids:
        best = torch.stack([x[0].index_fill(0, torch.tensor([one]), x.max() + 1.0)] * 2)[None]
        out = taking.verify_chain(
            taking(best), taking(torch.tensor([[one]])), acceptance="greedy",
            processors=moved(given, taking),
        )  # fmt: skip
        assert out.tokens[0].tolist() == [one, int(best[0, 1].topk(2).indices[1])]


def test_a_row_that_allows_nothing_is_flagged(taking: Backend) -> None:
    x = taking(torch.zeros(2, 3, 40))
    mask = taking(torch.full((2, 3, 2), -1, dtype=torch.int32))
    mask[1, 0] = 0
    given = sk.Processors(token_bitmask=mask)
    stats = taking.row_stats(x, processors=given)
    assert stats.status.tolist() == [[0, 0, 0], [int(sk.Status.EMPTY_ROW), 0, 0]]
    out = taking.verify_chain(
        x, taking(torch.full((2, 2), 7)), uniform_samples=taking(torch.full((2, 3), 0.5)), processors=given
    )
    assert out.status.tolist() == [0, int(sk.Status.EMPTY_ROW)] and out.tokens[1].tolist() == [0, -1, -1]
    nothing = sk.Processors(allowed_ids=[[], None])
    assert taking.row_stats(x, processors=nothing).status.tolist() == [[4, 4, 4], [0, 0, 0]]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_penalty_out_of_range_is_off_and_flagged(taking: Backend, value: float, rng: torch.Generator) -> None:
    x = taking(logits(rng, 2, 20))
    counts = sk.TokenCounts(taking(torch.arange(8).view(2, 4)), 4)
    bad, good = taking(torch.tensor([1.5, value])), taking(torch.tensor([1.5, 1.0]))
    given = [sk.Processors(repetition_penalty=r, token_counts=counts) for r in (bad, good)]
    same_bits(*(taking.warp_probs(x, processors=each) for each in given))
    assert taking.row_stats(x, processors=given[0]).status.tolist() == [0, int(sk.Status.BAD_PARAM)]


def test_nothing_on_is_nothing(taking: Backend, rng: torch.Generator) -> None:
    x = taking(logits(rng, 2, 20))
    same_bits(taking.row_stats(x), taking.row_stats(x, processors=sk.Processors()))


def test_lists_in_any_form_are_the_same(taking: Backend, rng: torch.Generator) -> None:
    x = taking(logits(rng, 2, 50))
    forms = [
        sk.Processors(logit_bias={9: 1.0, 4: -2.0, 30: -math.inf}, banned_ids=[3, 3], allowed_ids=range(40)),
        sk.Processors(logit_bias=[{4: -2.0, 9: 1.0}] * 2, banned_ids=[[3], [30, 3]], allowed_ids=[range(40)] * 2),
        sk.Processors(
            logit_bias=(taking(torch.tensor([4, -1, 9, 77])), taking(torch.tensor([-2.0, math.nan, 1.0, 5.0]))),
            banned_ids=taking(torch.tensor([[30, 3], [3, 30]])), allowed_ids=taking(torch.arange(40)),
        ),
    ]  # fmt: skip
    forms[1] = replace(forms[1], banned_ids=[[30, 3], [3, 30]])
    for form in forms[1:]:
        same_bits(taking.warp_probs(x, processors=forms[0]), taking.warp_probs(x, processors=form))


def test_lists_that_are_none_are_safe(taking: Backend, rng: torch.Generator) -> None:
    """Below validation: ids in no order, negative or beyond all vocabularies."""
    x = taking(logits(rng, 2, 3000))
    counts = sk.TokenCounts(taking(torch.arange(8).view(2, 4)), 40)
    for _ in range(20):
        wild = torch.randint(-(2**31), 2**31, counts.ids.shape, generator=rng).int()
        near = torch.randint(-9, 3009, counts.ids.shape, generator=rng).int()
        counts.ids.copy_(torch.where(torch.rand(wild.shape, generator=rng) < 0.3, wild, near))
        given = sk.Processors(repetition_penalty=1.5, frequency_penalty=0.5, token_counts=counts)
        for params in (None, sk.SamplingParams(top_k=50, top_p=0.7), sk.SamplingParams(top_p=0.5, min_p=0.2)):
            assert torch.isfinite(taking.warp_probs(x, params, processors=given)).all()


def test_a_mask_of_another_step(taking: Backend, rng: torch.Generator) -> None:
    """`with_bitmask` changes the mask alone."""
    x = taking(logits(rng, 2, 40))
    masks = [taking(torch.randint(1, 2**31, (2, 2), generator=rng).int()) for _ in range(2)]
    first = sk.Processors(logit_bias={3: 1.0}, token_bitmask=masks[0])
    taking.warp_probs(x, processors=first)
    for mask in (masks[1], None):
        other = sk.Processors(logit_bias={3: 1.0}, token_bitmask=mask)
        same_bits(taking.warp_probs(x, processors=first.with_bitmask(mask)), taking.warp_probs(x, processors=other))


def test_a_gpu_takes_the_best_backend_that_takes_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unasked it is Triton, not the compiled library, which would be taken without them; and asked that refuses."""
    anywhere = {name: (lambda op, device: None, reach) for name, (_, reach) in backends._BACKENDS.items()}
    monkeypatch.setattr(backends, "_BACKENDS", anywhere)
    monkeypatch.setattr(backends, "_processing_routes", {})
    gpu = torch.device("cuda")
    assert backends.automatic("verify_chain", gpu) == "cuda"
    assert backends.processing("verify_chain", None, None, gpu, "f") is backends.in_python("triton", "verify_chain")
    with pytest.raises(ValueError, match="^f: backend='cuda' cannot run here: its kernels take no processors"):
        backends.processing("verify_chain", None, "cuda", gpu, "f")


@pytest.mark.parametrize(
    "op", ["row_stats", "warp_probs", "sample", "token_logprobs", "verify_chain", "verify_packed", "verify_tree"]
)
def test_opcheck_and_compiled_whole(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(2)
    call, arguments = steps(op, rng)
    x = logits(rng, *(4, 40) if op == "verify_packed" else (2, 2, 40))

    def function(x: Tensor) -> list[Tensor]:
        return tensors_of(call(x, **arguments))

    torch._dynamo.reset()
    same_bits(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))

    caught: list[tuple[Any, ...]] = []
    name = op.replace("packed", "chain")
    module = importlib.import_module(f"specdec_kernels.ops.{name}")
    overload = getattr(torch.ops.specdec, name).default
    monkeypatch.setattr(module, "dispatch", lambda *_: lambda *given: (caught.append(given), overload(*given))[1])
    call(x, **arguments)
    assert set(torch.library.opcheck(overload, caught[0]).values()) == {"SUCCESS"}


def steps(op: str, rng: torch.Generator) -> tuple[Any, dict[str, Any]]:
    """A function, and arguments beside logits ``[2, 2, 40]`` (packed: ``[4, 40]``)."""
    given = of_any_kind(rng, 2, (4,) if op == "verify_packed" else (2, 2), 40)
    more: dict[str, dict[str, Any]] = {
        "sample": {"uniform_samples": uniforms(rng, 2, 2)},
        "token_logprobs": {"tokens": torch.tensor([[3, 9], [4, -1]]), "num_top": 2},
        "verify_chain": {"draft_tokens": torch.tensor([[3], [9]]), "uniform_samples": uniforms(rng, 2, 2)},
        "verify_packed": {
            "draft_tokens": torch.tensor([3, 9]), "uniform_samples": uniforms(rng, 4), "max_num_draft_tokens": 1,
            "cu_num_draft_tokens": torch.tensor([0, 1, 2], dtype=torch.int32),
        },
        "verify_tree": {
            "tree": sk.DraftTree.from_parents([-1, 0]), "node_tokens": torch.tensor([[0, 3], [0, 9]]),
            "uniform_samples": uniforms(rng, 2, 2),
        },
    }  # fmt: skip
    return getattr(sk, op), {**more.get(op, {}), "processors": given}
