"""warp_probs on every backend: against float64 and against transformers' own warpers."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops.inputs import DTYPES, PARAMS, SCALARS, VOCABS, logits, refuses, same_bits, seeded, strided
from python_tests.support import Backend
from specdec_kernels.testing import float64_law

OP = "warp_probs"
SIGNATURE = (["logits", "params"], ["processors", "backend"])
CALLS = {
    "": lambda: {"logits": logits(seeded(), 4, 50), "params": SCALARS},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_float64_law(backend: Backend, dtype: torch.dtype, vocab: int, name: str, rng: torch.Generator) -> None:
    x = logits(rng, 2, 2, backend.vocab(vocab), dtype=dtype)
    probs = backend.warp_probs(backend(x), PARAMS[name]).cpu()
    expected = float64_law(x, PARAMS[name])
    assert probs.dtype == torch.float32 and probs.is_contiguous()
    np.testing.assert_allclose(probs, expected, rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(probs > 0, expected > 0)


@pytest.mark.parametrize("top_p", [1e-300, 2.0**-126, 1e-37])
def test_the_smallest_top_p_keeps_the_likeliest_even_where_denormals_are_flushed(
    backend: Backend, top_p: float
) -> None:
    x = backend(torch.tensor([[0.0, 1.0, 2.0]]))
    torch.set_flush_denormal(True)
    try:
        probs = backend.warp_probs(x, sk.SamplingParams(top_p=top_p))
    finally:
        torch.set_flush_denormal(False)
    assert probs.tolist() == [[0, 0, 1]]


def test_a_temperature_below_the_normal_numbers_is_greedy_in_a_tensor_too(backend: Backend) -> None:
    """1 / T would be infinite."""
    x, params = torch.tensor([[0.5, 2.0, 1.0]] * 4), sk.SamplingParams(torch.tensor([0.0, 1e-39, 1.1e-38, 0.7]))
    probs = backend.warp_probs(*backend(x, params)).cpu()
    assert probs[:3].tolist() == [[0, 1, 0]] * 3
    np.testing.assert_allclose(probs[3], float64_law(x[3], sk.SamplingParams(0.7)), rtol=1e-5)
    stats = sk.row_stats(*backend(x, params), backend=backend.name)
    assert stats.normalizer[:3].tolist() == [1.0] * 3 and not stats.status.any()
    masses = sk.shard_stats(*backend(x[:, None], params), backend=backend.name).tile_mass[:3, 0].sum(-1)
    assert masses.isfinite().all()


def test_no_gradient_comes_back(backend: Backend) -> None:
    x = backend(torch.randn(2, 5)).requires_grad_()
    probs = backend.warp_probs(x)
    if probs.requires_grad:
        with warnings.catch_warnings(action="ignore"):  # torch warns that nothing comes back
            probs[..., 0].sum().backward()
    assert x.grad is None


def test_widest_vocabulary(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 1, backend.vocab(262144))
    np.testing.assert_allclose(
        backend.warp_probs(backend(x), PARAMS["all"]).cpu(), float64_law(x, PARAMS["all"]), rtol=2e-5, atol=1e-9
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, 0, 1.0, 0.0),
        (1.3, 50, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (0.9, 0, 1.0, 0.08),
        (0.8, 50, 0.9, 0.05),
        (1.5, 1, 0.5, 0.5),
    ],
)
@pytest.mark.parametrize("vocab", [64, 5000])
def test_is_what_transformers_warpers_make(
    backend: Backend, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, rng: torch.Generator
) -> None:
    """Away from ties and borders (random float32 logits have none closer than float error here)."""
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )  # fmt: skip

    x = logits(rng, 16, vocab)
    warpers = [TemperatureLogitsWarper(temperature)]
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    scores = x.clone()
    for warper in warpers:
        scores = warper(None, scores)
    probs = backend.warp_probs(backend(x), sk.SamplingParams(temperature, top_k, top_p, min_p)).cpu()
    torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-5, atol=1e-9)
    assert torch.equal(probs > 0, scores > -math.inf)


def test_the_least_logit_that_min_p_keeps_is_one_number_everywhere(backend: Backend) -> None:
    """``max + T log min_p`` in float32: not a quotient by 1 / T, which may round to another."""
    t = torch.linspace(0.1, 2.0, 39)
    lowest = t * torch.tensor(0.1).log()
    x = torch.stack([torch.zeros_like(t), lowest, lowest.nextafter(torch.tensor(-math.inf))], -1)
    probs = backend.warp_probs(*backend(x, sk.SamplingParams(t, min_p=0.1))).cpu()
    assert (probs[:, 1] > 0).all() and (probs[:, 2] == 0).all()


def test_bad_rows_are_defined(backend: Backend) -> None:
    x = torch.zeros(4, 5)
    x[0], x[1], x[2, 3], x[3, 1] = math.nan, -math.inf, math.inf, math.nan
    probs = backend.warp_probs(backend(x)).cpu()
    expected = torch.tensor([[1.0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0.25, 0, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(probs, expected)


def test_strides_and_leading_dimensions_do_not_matter(backend: Backend, rng: torch.Generator) -> None:
    x = backend(logits(rng, 3, 2, 1100))
    dense = backend.warp_probs(x, PARAMS["all"])
    same_bits(dense, backend.warp_probs(strided(x), PARAMS["all"]))
    same_bits(dense[1, 1], backend.warp_probs(x[1, 1], PARAMS["all"]))
    same_bits(dense[1:2], backend.warp_probs(x[1:2], PARAMS["all"]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": None}, TypeError, "warp_probs: logits must be a tensor, got NoneType"),
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, TypeError, "warp_probs: logits must be float32"),
        ({"logits": torch.zeros(9, 4).T}, ValueError, "warp_probs: logits must be contiguous"),
        ({"logits": torch.zeros(4, 1)}, ValueError, "warp_probs: logits must be [..., vocab]"),
        ({"params": {"top_k": 3}}, TypeError, "warp_probs: params must be a SamplingParams or None"),
        (
            {"params": sk.SamplingParams(min_p=torch.ones(3))},
            ValueError,
            "warp_probs: params.min_p must be [batch=4], got [3]",
        ),
        ({"backend": ""}, ValueError, "warp_probs: backend must be one of"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.warp_probs, {"logits": torch.zeros(4, 9)}, change, error, message)


@pytest.mark.parametrize(
    "params",
    [
        sk.SamplingParams(torch.tensor([-1.0])), sk.SamplingParams(torch.tensor([torch.nan])), sk.SamplingParams(1e-39),
        sk.SamplingParams(min_p=torch.tensor([2.0])), sk.SamplingParams(top_p=torch.tensor([-0.5])),
        sk.SamplingParams(min_p=torch.tensor([2.0]), min_p_first=True, top_p=0.5),
    ],
    ids=str,
)  # fmt: skip
def test_the_oracle_reads_bad_parameters_as_the_ops_do(params: sk.SamplingParams) -> None:
    x = torch.tensor([[1.0, 1.0, 0.0]])
    np.testing.assert_allclose(sk.warp_probs(x, params, backend="reference").numpy(), float64_law(x, params), atol=1e-6)
