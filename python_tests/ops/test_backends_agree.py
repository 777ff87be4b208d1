"""One law, one noise: random cases of every kind give the same tokens on every backend, the interpreted ones included.

Where a border lies within float32 error a token may differ: test_properties.py says how those cases are predicted. Here
each backend runs ``--cases=N`` random cases of each op that draws (others with another ``--seed``), sizes, parameters,
ties, −inf, NaN and +inf mixed, and the other ops on some of the same rows.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.borderline import ERROR, borderline, build, close_scores, counted, in_float64, moved
from python_tests.ops.borderline import compare as compare_chains
from python_tests.ops.chains import KINDS, spoil
from python_tests.ops.inputs import DTYPES, OPS, op_tests, same_bits, strided, tensors, uniforms
from python_tests.support import Backend
from specdec_kernels.ops.arguments import ACCEPTANCES, RowStatsArguments, SampleArguments

OP = "verify_chain"
CELLS = 250_000  # logits of an example
SAME_BITS = [op for op in OPS if hasattr(op_tests(op), "random_call")]
reference_sample = importlib.import_module("specdec_kernels.backends.reference.sample").sample
reference_stats = importlib.import_module("specdec_kernels.backends.reference.row_stats").row_stats


def examples(seed: int) -> Iterator[dict[str, Any]]:
    """Endless random examples for borderline.build, of the choices in test_properties.py, and rows to spoil."""
    choose = random.Random(seed)

    def parameters() -> dict[str, Any]:
        return {
            "temperature": choose.choice([1.0, 0.7, 1.3, 0.3, 2.5, 0.0]),
            "top_k": choose.choice([0, 0, 1, 2, 7, 40, 5000]),
            "top_p": choose.choice([0.95, 0.8, 0.3, 1.0, 1.0, 0.0]),
            "min_p": choose.choice([0.0, 0.0, 0.02, 0.2, 1.0]),
        }

    while True:
        sizes = [choose.randint(2, 40), choose.randint(41, 300), choose.choice([1023, 1024, 1025, 2047, 2048])]
        yield {
            "vocab": choose.choice(sizes), "num_draft": choose.choice([3, 2, 1, 4, 5, 0]),
            "dtype": choose.choice(DTYPES), "kind": choose.choice(KINDS),
            "acceptance": choose.choice(["token", "block", *ACCEPTANCES]),
            "params": [parameters() for _ in range(choose.randint(1, 4))],
            "draft_params": [parameters() for _ in range(choose.randint(1, 4))],
            "min_p_first": choose.random() < 0.5, "spread": choose.choice([1.0, 3.0, 0.1, 10.0]),
            "rounded": choose.random() < 0.4, "holes": choose.random() < 0.3, "ragged": choose.random() < 0.4,
            "turned": choose.random() < 0.3, "spoiled": choose.random() < 0.2, "seed": choose.randint(0, 2**31),
            "law": choose.choice([*[None] * len(chains.LAWS), *chains.LAWS]), "given": choose.random() < 0.2,
        }  # fmt: skip


def batch_of(example: dict[str, Any], cases: int) -> int:
    return max(8, min(512, cases // 200, CELLS // (example["vocab"] * (example["num_draft"] + 1))))


def make(example: dict[str, Any], cases: int) -> chains.Arguments:
    arguments = build(example, batch_of(example, cases))
    if example["spoiled"]:
        rng = torch.Generator().manual_seed(example["seed"])
        for name in ("target_logits", "draft_logits"):
            if name in arguments and (name == "target_logits" or example["kind"] != "stats"):
                arguments[name] = spoil(arguments[name], rng)
    law = arguments.get("target_law")
    if example["given"] and example["num_draft"] and not (law and law.cascade_bonus):
        bonus = torch.arange(len(arguments["draft_tokens"])) % (example["vocab"] + 2) - 1  # some are none
        arguments = chains.with_bonus(arguments, bonus)
    return arguments


class Example:
    """The `number`-th example, and what the reference says of it: computed once, as every backend gets the same."""

    known: ClassVar[dict[Any, Any]] = {}  # by function, number and size of the batch

    def __init__(self, number: int, e: dict[str, Any], cases: int) -> None:
        self.e = e
        self.key = number, batch_of(self.e, cases)
        self.arguments = make(self.e, cases)

    def expected(self, say: Callable[[dict[str, Any], chains.Arguments], Any]) -> Any:
        key = say, *self.key
        if key not in self.known:
            self.known[key] = say(self.e, self.arguments)
        return self.known[key]


def expected_chain(e: dict[str, Any], arguments: chains.Arguments) -> tuple[sk.VerifyOutput, Tensor]:
    """The output of `verify_chain`, and which sequences are excepted."""
    return sk.verify_chain(**arguments, backend="reference"), borderline(arguments)


def expected_sample(e: dict[str, Any], arguments: chains.Arguments) -> tuple[dict[str, Tensor], sk.Draw, Tensor]:
    """Uniforms or keys for `sample` on the target rows, its output, and which draws are excepted."""
    x, params, rng = arguments["target_logits"], arguments["params"], torch.Generator().manual_seed(e["seed"] + 1)
    given: dict[str, Any] = {}
    if e["seed"] % 2:
        given["uniform_samples"] = uniforms(rng, *x.shape[:2])
    else:
        given["noise_keys"] = torch.randint(-(2**63), 2**63 - 1, x.shape[:2], generator=rng)
    expected = sk.sample(x, params, **given, backend="reference")
    low, high = (sample_in_float64(x, params, given, by) for by in (-ERROR, ERROR))
    excepted = (low[0] != high[0]) | (low[2][..., 1] != high[2][..., 1])
    if "noise_keys" in given:
        excepted |= close_scores({"target_logits": x, "params": params, **given})[:, None]
    return given, expected, excepted


def compare_sample(backend: Backend, one: Example, counts: Counter[str]) -> None:
    """`sample` on the target rows, by uniforms or by keys: the reference's ids, or a predicted exception."""
    e, x, params = one.e, one.arguments["target_logits"], one.arguments["params"]
    given, expected, excepted = one.expected(expected_sample)
    draw = backend.sample(
        *backend(strided(x) if e["turned"] else x, params), **{k: backend(v) for k, v in given.items()}
    )
    token = draw.token.cpu()
    different = token != expected.token
    assert ((token >= 0) & (token < e["vocab"])).all() and torch.equal(draw.stats.status.cpu(), expected.stats.status)
    assert not (different & ~excepted).any(), f"{backend}: sample differs where no border is near: {e}"
    same = ~(different | excepted)
    np.testing.assert_allclose(draw.log_prob.cpu()[same], expected.log_prob[same], rtol=2e-5, atol=2e-5)
    counts.update(cases=token.numel(), borderline=int(excepted.sum()), different=int(different.sum()))


def sample_in_float64(x: Tensor, params: sk.SamplingParams, given: dict[str, Tensor], by: float) -> tuple[Tensor, ...]:
    u = given.get("uniform_samples")
    if u is not None:
        u = (u.double() * (1 + 2 * by) + by).clamp(0, 1 - 1e-15)
    keys = given.get("noise_keys")
    out: tuple[Tensor, ...] = reference_sample(SampleArguments(x.double(), u, keys, None, 1, moved(params, by)))
    return out


def few_rows(arguments: chains.Arguments) -> tuple[Tensor, sk.SamplingParams]:
    few = chains.select({k: arguments[k] for k in ("target_logits", "params")}, slice(0, 4))
    return few["target_logits"], few["params"]


def expected_rows(e: dict[str, Any], arguments: chains.Arguments) -> tuple[sk.RowStats, Tensor, Tensor]:
    """Of a few rows `row_stats`, whether a cut-off lies near a border, and `warp_probs`."""
    x, params = few_rows(arguments)
    stats = (reference_stats(RowStatsArguments(x.double(), moved(params, by))) for by in (-ERROR, ERROR))
    low, high = (values[..., 1] for values, *_ in stats)
    probs = sk.warp_probs(x, params, backend="reference")
    return sk.row_stats(x, params, backend="reference"), low != high, probs


def compare_rows(backend: Backend, one: Example) -> None:
    """`row_stats` and `warp_probs` of a few rows: numbers within float error, cut-offs but for predicted exceptions."""
    x, params = few_rows(one.arguments)
    expected, near, expected_probs = one.expected(expected_rows)
    stats = backend.row_stats(*backend(x, params))
    assert torch.equal(stats.argmax.cpu(), expected.argmax) and torch.equal(stats.status.cpu(), expected.status)
    got, want = stats.values.cpu(), expected.values
    assert torch.equal(got[..., 1][~near], want[..., 1][~near]), f"{backend}: cut-off differs: {one.e}"
    agree = got[..., 1] == want[..., 1]
    np.testing.assert_allclose(got[agree], want[agree], rtol=3e-5, atol=3e-5)
    probs = backend.warp_probs(*backend(x, params)).cpu()[agree]
    np.testing.assert_allclose(probs, expected_probs[agree], rtol=3e-5, atol=1e-7)


def compare_bits(backend: Backend, op: str, seed: int) -> None:
    """The same bits for a random call."""
    given = op_tests(op).random_call(torch.Generator().manual_seed(seed))
    got = getattr(backend, op)(**chains.on(backend, given))
    same_bits([t.cpu() for t in tensors(got)], tensors(getattr(sk, op)(**given, backend="reference")))


def test_every_backend_agrees_with_the_reference(backend: Backend, pytestconfig: pytest.Config) -> None:
    wanted = backend.cases(pytestconfig.getoption("cases"))
    counts: Counter[str] = Counter()
    counted.pop(str(backend), None)
    for number, e in enumerate(examples(7 + pytestconfig.getoption("seed"))):
        one = Example(number, e, wanted)
        compare_chains(backend, one.e, one.arguments, *one.expected(expected_chain))
        compare_rows(backend, one)
        if counts["cases"] < wanted:
            compare_sample(backend, one, counts)
        if number % 8 == 0:
            for op in SAME_BITS:
                compare_bits(backend, op, one.e["seed"])
        if min(counts["cases"], counted[str(backend)]["cases"]) >= wanted:
            break
    for op, c in (("verify_chain", counted.pop(str(backend))), ("sample", counts)):
        print(f"\n{backend} {op}: {c['cases']} cases, {c['borderline']} borderline, {c['different']} different", end="")
        assert c["different"] <= c["cases"] * 1e-4 and c["borderline"] <= 1 + c["cases"] * 2e-3, f"{op}: {dict(c)}"


@pytest.mark.short(cases=1)
@pytest.mark.xdist_group("large vocabularies")  # one process computes what is expected
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("vocab", [32000, pytest.param(128256, marks=pytest.mark.long)])
def test_large_vocabularies_lie_within_the_borders(backend: Backend, vocab: int, acceptance: str) -> None:
    """With so many ids some border is always near: each token lies between those of float64 with all uniforms and
    bounds moved down and up by the error.
    """
    arguments, low, high, near = large(vocab, acceptance, 1 if backend.interpreted else 3)
    out = backend.verify_chain(**chains.on(backend, arguments)).tokens.tolist()
    for got, one, other, close in zip(out, low, high, near, strict=True):
        for token, a, b in zip(got, one, other, strict=True):
            assert close or min(a, b) <= token <= max(a, b), f"{got} is not between {one} and {other}"
            if a != b:
                break


@functools.cache
def large(vocab: int, acceptance: str, num_draft: int) -> tuple[chains.Arguments, list[Any], list[Any], list[bool]]:
    """Four sequences, the float64 tokens that bound theirs, and which have scores too close to be bounded."""
    rng = torch.Generator().manual_seed(vocab)
    column = [torch.tensor(v).repeat(2) for v in ([1.0, 0.8], [0, 0], [1.0, 0.9], [0.0, 0.0])]
    arguments = chains.make(
        rng, 4, num_draft, vocab, acceptance=acceptance, dtype=torch.bfloat16,
        params=sk.SamplingParams(*column), draft_params=sk.SamplingParams(*column),
    )  # fmt: skip
    low, high = (in_float64(arguments, by)[0].tolist() for by in (-ERROR, ERROR))
    return arguments, low, high, close_scores(arguments).tolist() if acceptance == "match" else [False] * 4
