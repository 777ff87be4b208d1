"""Processors: what they make of logits is what transformers and vLLM make of them, on every backend."""

from __future__ import annotations

import importlib
import inspect
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
from python_tests.ops import chains, trees
from python_tests.ops.inputs import DTYPES, TRUNCATED, logits, outcome, same_bits, uniforms
from python_tests.ops.processing import EACH, Request, bits, holds_no_list, of_any_kind, processors
from python_tests.support import ONE_TREE_KERNEL, Backend
from specdec_kernels import laws
from specdec_kernels.backends import FUNCTIONS
from specdec_kernels.testing import float64_law

OP = "warp_probs"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [2, 31, 33, 1024, 1025, 4097])
@pytest.mark.parametrize("params", [sk.SamplingParams(), sk.SamplingParams(0.8, 9, 0.9, 0.01), sk.SamplingParams(0.0)])
def test_is_the_reference(backend: Backend, dtype: torch.dtype, vocab: int, params: sk.SamplingParams) -> None:
    rng = torch.Generator().manual_seed(vocab)
    batch, n = 3, 2
    x = logits(rng, batch, n, backend.vocab(vocab), dtype=dtype)
    x[0, 0, 0], x[1, 1, 1], x[2, 0, 1] = math.nan, math.inf, -math.inf
    given = of_any_kind(rng, batch, (batch, n), x.shape[-1])
    expected = sk.warp_probs(x, params, processors=given, backend="reference")
    probs = backend.warp_probs(backend(x), params, processors=backend(given)).cpu()
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-9)
    stats = [
        sk.row_stats(x, params, processors=given, backend="reference"),
        backend.row_stats(backend(x), params, processors=backend(given)),
    ]
    torch.testing.assert_close(stats[0].values, stats[1].values.cpu(), rtol=1e-5, atol=1e-5)
    assert torch.equal(stats[0].argmax, stats[1].argmax.cpu()) and torch.equal(stats[0].status, stats[1].status.cpu())
    u = uniforms(rng, batch, n)
    drawn = [
        sk.sample(x, params, uniform_samples=u, processors=given, backend="reference"),
        backend.sample(backend(x), params, uniform_samples=backend(u), processors=backend(given)),
    ]
    assert torch.equal(drawn[0].token, drawn[1].token.cpu())
    torch.testing.assert_close(drawn[0].log_prob, drawn[1].log_prob.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cut_parts_what_only_processors_tell_apart(backend: Backend, dtype: torch.dtype) -> None:
    """Logits that are alike, with biases nearer to each other than half precision tells."""
    rng = torch.Generator().manual_seed(6)
    vocab, kept = backend.vocab(5200), 200
    ids, added = torch.randperm(vocab, generator=rng)[:600], torch.arange(1, 601) * 1.5e-6
    given = sk.Processors(logit_bias=(backend(ids), backend(added)))
    x = backend(torch.ones(1, vocab, dtype=dtype))
    probs = backend.warp_probs(x, sk.SamplingParams(top_k=kept), processors=given)[0].cpu()
    assert probs.nonzero().flatten().tolist() == ids[-kept:].sort().values.tolist()


def test_a_token_drafted_twice_counts_twice(backend: Backend) -> None:
    """One that the history does not have."""
    x = torch.zeros(1, 4, 40)
    x[..., 7] = 2.0
    counts = sk.TokenCounts(backend(torch.tensor([[3]])), 8)
    given = sk.Processors(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, token_counts=counts)
    out = backend.verify_chain(
        backend(x), backend(torch.full((1, 3), 7)), uniform_samples=backend(torch.full((1, 4), 1e-6)),
        processors=given, return_acceptance=True,
    )  # fmt: skip
    made = torch.tensor([2.0, 2 / 1.3 - 0.6, 2 / 1.3 - 1.0])
    torch.testing.assert_close(out.acceptance[0].cpu(), made.exp() / (made.exp() + 39), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", EACH)
def test_is_the_float64_formula(backend: Backend, name: str) -> None:
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
    probs = backend.warp_probs(backend(x), sk.SamplingParams(0.7), processors=backend(given)).cpu()
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
def test_is_what_engines_make(backend: Backend, engine: Any, seed: int) -> None:
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
    probs = backend.warp_probs(backend(x[None]), sk.SamplingParams(0.7), processors=backend(processors([request])))
    torch.testing.assert_close(probs[0].cpu(), engine(request, x).softmax(-1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("what", ["token_bitmask", "allowed_ids", "banned_ids", "presence_penalty", "drafted"])
def test_one_id_alone_is_changed(backend: Backend, what: str, rng: torch.Generator) -> None:
    """Wherever it stands: most of a row may be as it was, and that is as true of its neighbours."""
    vocab = backend.vocab(3 * 1024 + 40)
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
        stats = backend.row_stats(backend(x), processors=backend(given))
        plain = backend.row_stats(backend(expected))
        same_bits(stats, plain)
        same_bits(backend.warp_probs(backend(x), processors=backend(given)), backend.warp_probs(backend(expected)))
        return
    given = sk.Processors(presence_penalty=99.0, token_counts=sk.TokenCounts(torch.tensor([[2]]), 4))
    for one in ids:
        best = torch.stack([x[0].index_fill(0, torch.tensor([one]), x.max() + 1.0)] * 2)[None]
        out = backend.verify_chain(
            backend(best), backend(torch.tensor([[one]])), acceptance="greedy",
            processors=backend(given),
        )  # fmt: skip
        assert out.tokens[0].tolist() == [one, int(best[0, 1].topk(2).indices[1])]


def test_a_row_that_allows_nothing_is_flagged(backend: Backend) -> None:
    x = backend(torch.zeros(2, 3, 40))
    mask = backend(torch.full((2, 3, 2), -1, dtype=torch.int32))
    mask[1, 0] = 0
    given = sk.Processors(token_bitmask=mask)
    stats = backend.row_stats(x, processors=given)
    assert stats.status.tolist() == [[0, 0, 0], [int(sk.Status.EMPTY_ROW), 0, 0]]
    out = backend.verify_chain(
        x, backend(torch.full((2, 2), 7)), uniform_samples=backend(torch.full((2, 3), 0.5)), processors=given
    )
    assert out.status.tolist() == [0, int(sk.Status.EMPTY_ROW)] and out.tokens[1].tolist() == [0, -1, -1]
    nothing = sk.Processors(allowed_ids=[[], None])
    assert backend.row_stats(x, processors=nothing).status.tolist() == [[4, 4, 4], [0, 0, 0]]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_penalty_out_of_range_is_off_and_flagged(backend: Backend, value: float, rng: torch.Generator) -> None:
    x = backend(logits(rng, 2, 20))
    counts = sk.TokenCounts(backend(torch.arange(8).view(2, 4)), 4)
    bad, good = backend(torch.tensor([1.5, value])), backend(torch.tensor([1.5, 1.0]))
    given = [sk.Processors(repetition_penalty=r, token_counts=counts) for r in (bad, good)]
    same_bits(*(backend.warp_probs(x, processors=each) for each in given))
    assert backend.row_stats(x, processors=given[0]).status.tolist() == [0, int(sk.Status.BAD_PARAM)]


def test_nothing_on_is_nothing(backend: Backend, rng: torch.Generator) -> None:
    x = backend(logits(rng, 2, 20))
    same_bits(backend.row_stats(x), backend.row_stats(x, processors=sk.Processors()))


def test_lists_in_any_form_are_the_same(backend: Backend, rng: torch.Generator) -> None:
    x = backend(logits(rng, 2, 50))
    forms = [
        sk.Processors(logit_bias={9: 1.0, 4: -2.0, 30: -math.inf}, banned_ids=[3, 3], allowed_ids=range(40)),
        sk.Processors(logit_bias=[{4: -2.0, 9: 1.0}] * 2, banned_ids=[[3], [30, 3]], allowed_ids=[range(40)] * 2),
        sk.Processors(
            logit_bias=(backend(torch.tensor([4, -1, 9, 77])), backend(torch.tensor([-2.0, math.nan, 1.0, 5.0]))),
            banned_ids=backend(torch.tensor([[30, 3], [3, 30]])), allowed_ids=backend(torch.arange(40)),
        ),
    ]  # fmt: skip
    forms[1] = replace(forms[1], banned_ids=[[30, 3], [3, 30]])
    for form in forms[1:]:
        same_bits(backend.warp_probs(x, processors=forms[0]), backend.warp_probs(x, processors=form))


def test_a_bias_of_an_id_beyond_the_vocabulary_is_none(backend: Backend, rng: torch.Generator) -> None:
    """Whatever it is: -inf and +inf would be a NaN."""
    x = backend(logits(rng, 2, 40))
    beyond = torch.tensor([40, 45, 63, 1023, 1024])
    for value in (math.inf, -math.inf, math.nan):
        given = sk.Processors(logit_bias=(backend(beyond), backend(torch.full((5,), value))))
        same_bits(backend.row_stats(x, processors=given), backend.row_stats(x))
        same_bits(backend.warp_probs(x, processors=given), backend.warp_probs(x))


def test_lists_that_are_none_are_safe(backend: Backend, rng: torch.Generator) -> None:
    """Below validation: ids in no order, negative or beyond all vocabularies."""
    x = backend(logits(rng, 2, 3000))
    counts = sk.TokenCounts(backend(torch.arange(8).view(2, 4)), 40)
    for _ in range(20):
        wild = torch.randint(-(2**31), 2**31, counts.ids.shape, generator=rng).int()
        near = torch.randint(-9, 3009, counts.ids.shape, generator=rng).int()
        counts.ids.copy_(torch.where(torch.rand(wild.shape, generator=rng) < 0.3, wild, near))
        given = sk.Processors(repetition_penalty=1.5, frequency_penalty=0.5, token_counts=counts)
        for params in (None, sk.SamplingParams(top_k=50, top_p=0.7), sk.SamplingParams(top_p=0.5, min_p=0.2)):
            assert torch.isfinite(backend.warp_probs(x, params, processors=given)).all()


@pytest.mark.parametrize("name", ["bias_ids", "count_ids"])
def test_a_list_that_does_not_ascend_is_empty_and_flagged(backend: Backend, name: str) -> None:
    holds_no_list(backend, name)


@pytest.mark.parametrize("what", ["bias", "repetition", "frequency", "presence", "NaN"])
def test_what_processors_lift_is_the_largest(backend: Backend, what: str, rng: torch.Generator) -> None:
    """Whichever tile it is in: no bound on what a tile can become passes it over."""
    vocab = backend.vocab(5200)
    ids = [0, 1023, 1024, 2050, vocab - 1]
    negative = what == "repetition"  # what is below 0 it raises
    x = logits(rng, vocab).clamp(-9, -1.5 if negative else 8.0).expand(len(ids), vocab).contiguous()
    x[range(len(ids)), ids] = -1.0 if negative else 8.9
    x[:, 1500] = -0.9 if negative else 9.5
    prompt = sk.TokenCounts(torch.tensor(ids)[:, None], 4)
    counts = prompt if negative else prompt.clone().add_(torch.tensor(ids)[:, None])
    fields: dict[str, Any] = {
        "bias": {"logit_bias": [{one: 0.75, 7: -1.0} for one in ids]}, "repetition": {"repetition_penalty": 0.5},
        "frequency": {"frequency_penalty": -0.75}, "presence": {"presence_penalty": -0.75},
        "NaN": {"logit_bias": (torch.tensor([[7, 1024]]), torch.tensor([[0.5, torch.nan]]))},
    }[what]  # fmt: skip
    given = backend(sk.Processors(**fields, token_counts=counts))
    stats = backend.row_stats(backend(x), sk.SamplingParams(0.0), processors=given)
    assert stats.argmax.tolist() == ([1500] * len(ids) if what == "NaN" else ids)
    assert stats.status.tolist() == [int(sk.Status.NAN) if what == "NaN" else 0] * len(ids)


def test_a_mask_of_another_step(backend: Backend, rng: torch.Generator) -> None:
    """`with_bitmask` changes the mask alone."""
    x = backend(logits(rng, 2, 40))
    masks = [backend(torch.randint(1, 2**31, (2, 2), generator=rng).int()) for _ in range(2)]
    first = sk.Processors(logit_bias={3: 1.0}, token_bitmask=masks[0])
    backend.warp_probs(x, processors=first)
    for mask in (masks[1], None):
        other = sk.Processors(logit_bias={3: 1.0}, token_bitmask=mask)
        same_bits(backend.warp_probs(x, processors=first.with_bitmask(mask)), backend.warp_probs(x, processors=other))


CHAINS: list[tuple[str, str, sk.SamplingParams, laws.TargetLaw | None]] = [
    ("token", "full", TRUNCATED, None), ("token", "reduced", sk.SamplingParams(), None),
    ("token", "full", sk.SamplingParams(0.8, top_p=0.9), None), ("block", "full", TRUNCATED, None),
    ("block", "probs", sk.SamplingParams(), None), ("match", "one_hot", sk.SamplingParams(top_k=9), None),
    ("greedy", "one_hot", sk.SamplingParams(0.0), None), ("token", "stats", TRUNCATED, laws.Lossy(0.3, beta="exact")),
    ("block", "full", sk.SamplingParams(), laws.Opt(0.3, bonus="cascade")),
    ("token", "full", TRUNCATED, laws.BiLD(1.0)),
]  # fmt: skip


@pytest.mark.short(cases=6, emulated=3, triton=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("acceptance", "kind", "params", "law"), CHAINS)
def test_chains_are_those_of_the_rows_that_are_made(
    backend: Backend, acceptance: str, kind: str, params: sk.SamplingParams, law: laws.TargetLaw | None, packed: bool,
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bit for bit, on long rows, many of whose ids compete."""
    rng, batch, vocab = torch.Generator().manual_seed(5), 2 if backend.name == "triton" else 12, backend.vocab(5200)
    step = chains.make(
        rng, batch, 3, vocab, acceptance=acceptance, kind=kind, params=params, draft_params=params, law=law, dtype=dtype
    )
    op, rows = "verify_chain", (batch, 4)
    if packed:
        op, step = "verify_packed", chains.packed(step, torch.arange(batch) % 4)
        rows = step["target_logits"].shape[:-1]
    if not packed and kind != "one_hot":
        step["return_acceptance"] = True
    agrees_with_made_rows(backend, op, step, of_any_kind(rng, batch, rows, vocab), monkeypatch)


@pytest.mark.short(cases=1, emulated=1, triton=1)
@pytest.mark.parametrize("params", [TRUNCATED, sk.SamplingParams()], ids=["truncated", "plain"])
@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_trees_are_those_of_the_rows_that_are_made(
    backend: Backend, acceptance: str, params: sk.SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.strategy == "split":
        pytest.skip(ONE_TREE_KERNEL)
    rng, batch, vocab = torch.Generator().manual_seed(4), 2 if backend.name == "triton" else 12, backend.vocab(5200)
    step = trees.make(5, batch, 9, vocab, acceptance=acceptance, params=params, draft_params=params, spread=4.0)
    agrees_with_made_rows(backend, "verify_tree", step, of_any_kind(rng, batch, (batch, 9), vocab), monkeypatch)


def agrees_with_made_rows(
    backend: Backend, op: str, step: dict[str, Any], given: sk.Processors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processors, whose masks allow every draft token, and of the rows that these make (as the reference has them)
    without.
    """
    mask = given.token_bitmask
    assert mask is not None
    for id in step.get("draft_tokens", step.get("node_tokens")).flatten().tolist():
        mask[..., id // 32] |= torch.tensor(1 << id % 32).int()
    module = importlib.import_module(f"specdec_kernels.backends.reference.{op.replace('packed', 'chain')}")
    made: list[Tensor] = []

    def processed(*arguments: Any) -> Any:
        found = module_processed(*arguments)
        made.append(found[0])
        return found

    module_processed = module.processed
    with monkeypatch.context() as patched:
        patched.setattr(module, "processed", processed)
        getattr(sk, op)(**step, processors=given, backend="reference")
    rows = made[0]
    if op == "verify_packed":
        rows = torch.cat([rows[b, : n + 1] for b, n in enumerate(step["cu_num_draft_tokens"].diff().tolist())])
    assert rows.dtype == torch.float32 and not torch.equal(rows, step["target_logits"].float())
    run = getattr(backend, op)
    with_processors = run(**chains.on(backend, step), processors=backend(given))
    same_bits(with_processors, run(**chains.on(backend, {**step, "target_logits": rows})))
    assert (with_processors.num_accepted > 0).any() or backend.name == "triton"


@pytest.mark.parametrize(
    "op", [name for name in FUNCTIONS if "processors" in inspect.signature(getattr(sk, name)).parameters]
)
def test_opcheck_and_compiled_whole(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(2)
    call, arguments = steps(op, rng)
    x = logits(rng, *(4, 40) if op == "verify_packed" else (2, 2, 40))

    def function(x: Tensor) -> Any:
        return call(x, **arguments)

    torch._dynamo.reset()
    same_bits(outcome(torch.compile(function, fullgraph=True, backend="aot_eager"), x=x), outcome(function, x=x))

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


def test_a_bitmask_of_no_rows_and_of_any_strides(backend: Backend) -> None:
    none = sk.Processors(token_bitmask=torch.zeros(0, 2, dtype=torch.int32))
    assert backend.warp_probs(backend(torch.zeros(0, 40)), processors=backend(none)).shape == (0, 40)
    rows = torch.randint(1, 2**31, (3, 2, 4, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    x, turned = torch.randn(2, 3, 4, 40, generator=torch.Generator().manual_seed(2)), rows.transpose(0, 1)
    given, plain = sk.Processors(token_bitmask=turned), sk.Processors(token_bitmask=turned.contiguous())
    found, expected = (backend.warp_probs(backend(x), processors=backend(each)).cpu() for each in (given, plain))
    assert torch.equal(found, expected)


def test_a_negative_count_is_0(backend: Backend) -> None:
    """Written by hand; also of an id that is drafted, with which it would be counted together."""
    x = torch.randn(1, 4, 40, generator=torch.Generator().manual_seed(1))
    x[0, :, [7, 8, 9]] = torch.tensor([1.5, -0.5, 0.7])
    drafted = torch.tensor([[7, 8, 7]])
    arguments = {"draft_tokens": drafted, "uniform_samples": torch.full((1, 4), 1e-6), "return_acceptance": True}
    found = []
    for numbers in ([0, 0, 0], [-1, -2, -3], [-4, -(2**31), -5]):
        counts = sk.TokenCounts(torch.tensor([[3, 7, 8, 9]]), 4)
        counts.counts[0, 1:4] = torch.tensor(numbers)
        given = sk.Processors(
            repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.3, token_counts=backend(counts)
        )
        out = backend.verify_chain(backend(x), **chains.on(backend, arguments), processors=given)
        told = backend.token_logprobs(backend(x), backend(drafted), num_top=5, processors=given)
        alone = backend.warp_probs(backend(x), processors=given)
        found.append([out.acceptance, out.tokens, out.status, told.log_prob, alone])
    same_bits(found[1], found[0])
    same_bits(found[2], found[0])
    request = Request(repetition=1.7, frequency=0.5, presence=0.3, prompt=[3])
    rows = torch.stack([torch.from_numpy(request.row(x[0, i], drafted[0, :i].tolist())) for i in range(3)])
    expected = rows.softmax(-1)[torch.arange(3), drafted[0]].float()
    torch.testing.assert_close(found[1][0][0].cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("op", ["token_logprobs", "verify_chain", "verify_tree", "typical"])
def test_penalties_count_drafted_tokens_where_nothing_else_is_counted(backend: Backend, op: str) -> None:
    """Lists of counts may be empty: without a prompt, and where no token is to come."""
    given = sk.Processors(frequency_penalty=4.0, token_counts=sk.TokenCounts(torch.zeros(1, 0, dtype=torch.int64), 0))
    x, coins = torch.zeros(1, 4, 5), torch.full((1, 4), 0.45)
    tree = {
        "tree": sk.DraftTree.from_parents([-1, 0, 1, 2]), "node_tokens": torch.tensor([[0, 2, 2, 2]]),
        "uniform_samples": coins,
    }  # fmt: skip
    more: dict[str, Any] = {
        "token_logprobs": {"tokens": torch.tensor([[2, 2, 2]])},
        "verify_chain": {"draft_tokens": torch.tensor([[2, 2, 2]]), "uniform_samples": coins},
        "verify_tree": tree,
        "typical": {**tree, "acceptance": "typical"},
    }[op]
    op = "verify_tree" if op == "typical" else op
    name = "logits" if op == "token_logprobs" else "target_logits"
    arguments = chains.on(backend, {name: x, **more})
    found = getattr(backend, op)(**arguments, processors=backend(given))
    expected = getattr(sk, op)(**{name: x, **more}, processors=given, backend="reference")
    if op != "token_logprobs":
        same_bits(found.tokens.cpu(), expected.tokens)
    else:
        torch.testing.assert_close(found.log_prob.cpu(), expected.log_prob)
        assert expected.log_prob[0, 0] > expected.log_prob[0, 1] + 2 > expected.log_prob[0, 2]
