"""How often a row is loaded until its law is found, truncated in each way."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import specdec_kernels as sk
from python_tests import interpreted
from specdec_kernels.backends.triton.arithmetic import TILE

pytestmark = pytest.mark.skipif(interpreted.why_not() is not None, reason=str(interpreted.why_not()))

VOCAB = 128256
TOP_K_TOP_P, TOP_K = sk.SamplingParams(0.8, top_k=50, top_p=0.9), sk.SamplingParams(1.0, top_k=1000)
TOP_P, MIN_P = sk.SamplingParams(1.0, top_p=0.9), sk.SamplingParams(1.0, min_p=0.05)
CASES = {  # whether a row is peaked, how it is cut, how often it is read at most and on average: docs/benchmarks.md
    "peaked, top-k and top-p": (True, TOP_K_TOP_P, 2, 1.13),
    "peaked, top-k": (True, TOP_K, 2, 1.93),
    "peaked, top-p": (True, TOP_P, 2, 1.26),
    "peaked, min-p": (True, MIN_P, 2, 1.01),
    "peaked, min-p first": (True, sk.SamplingParams(1.0, top_k=50, top_p=0.9, min_p=0.01, min_p_first=True), 2, 1.01),
    "flat, top-k and top-p": (False, TOP_K_TOP_P, 2, 1.10),
    "flat, top-k": (False, TOP_K, 2, 1.91),
    # thousands are kept: a part of the list, ranges of keys, a list, masses
    "flat, top-p": (False, TOP_P, 8, 7.28),
    "flat, min-p": (False, MIN_P, 3, 2.42),
    "flat, top-p of top-k": (False, sk.SamplingParams(1.0, top_k=5000, top_p=0.9), 11, 10.0),
}


def row(peaked: bool) -> torch.Tensor:
    """Normal logits; `peaked`: wider, with a few tokens above that have nearly all of the mass, as a model's are."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(1, VOCAB, generator=rng)
    if peaked:
        x *= 3
        x[:, torch.randint(VOCAB, (6,), generator=rng)] += 18
    return x.bfloat16()


def loads(x: torch.Tensor, params: sk.SamplingParams) -> torch.Tensor:
    """Of each element, where programs read as much at once as compiled ones; the law is the reference's."""
    compiled = mock.patch("specdec_kernels.backends.triton.law.tiles_of_rows", lambda rows, on_gpu: on_gpu)
    with compiled, interpreted.checked(), interpreted.reads_of(x) as reads:
        found = sk.row_stats(x, params, backend="triton")
    expected = sk.row_stats(x, params, backend="reference")
    assert torch.equal(found.cutoff, expected.cutoff)
    torch.testing.assert_close(found.normalizer, expected.normalizer, rtol=1e-5, atol=0)
    counts = torch.from_numpy(reads.counts)
    first = int(x.argmax()) // TILE.value * TILE.value
    counts[:, first : first + TILE.value] -= 1  # this tile alone is looked at for the argmax
    assert counts.min() >= 1  # every element is seen
    return counts


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_read_so_often(name: str) -> None:
    peaked, params, most, mean = CASES[name]
    counts = loads(row(peaked), params)
    assert counts.max() <= most
    assert counts.double().mean().item() == pytest.approx(mean, abs=0.006 if mean < 9 else 0.06)


def hard_row(kind: str) -> torch.Tensor:
    """Rows of which more values can be kept than a list holds, or fewer than top-k asks for."""
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(1, 5000, generator=rng)
    if kind == "of few values":
        return (2 * x).round().bfloat16()
    if kind == "equal":
        return torch.ones_like(x)
    if kind == "masked by the lowest":
        x[:, 300:] = torch.finfo(torch.float32).min
    if kind == "one in each group":  # so that fewer than top-k stand above what the maxima of groups tell
        x[:, ::256] += 10 + torch.arange(20) / 20
    if kind == "in one place":  # the groups that hold the largest tell little
        x[:, 1000:1500] += 5
    return x


@pytest.mark.parametrize(
    "kind", ["flat", "of few values", "equal", "masked by the lowest", "in one place", "one in each group"]
)
def test_cut_offs_that_a_list_does_not_tell(kind: str) -> None:
    x = hard_row(kind)
    for params in (
        sk.SamplingParams(1.0, top_k=2500, top_p=0.9),
        sk.SamplingParams(1.0, top_k=400),
        sk.SamplingParams(1.0, top_k=18),
        sk.SamplingParams(1.0, top_k=18, top_p=0.9),
        sk.SamplingParams(1.0, top_p=0.95),
        sk.SamplingParams(1.0, top_p=0.03),
        sk.SamplingParams(1.0, top_p=0.9, min_p=1e-6, min_p_first=True),
        sk.SamplingParams(1.0, top_k=4500, min_p=0.001),
    ):
        with interpreted.checked():
            found = sk.row_stats(x, params, backend="triton")
            (token,) = sk.sample(x, params, uniform_samples=torch.tensor([0.7]), backend="triton").token.tolist()
        expected = sk.row_stats(x, params, backend="reference")
        assert torch.equal(found.cutoff, expected.cutoff), params
        torch.testing.assert_close(found.normalizer, expected.normalizer, rtol=1e-5, atol=0)
        assert x[0, token] >= found.cutoff


@pytest.mark.parametrize("seed", [3, 5, 11])
def test_a_list_that_falls_short_tells_nothing(seed: int) -> None:
    """Of fewer values than top-k asks for: what stands behind them in memory is another call's."""
    x = 3 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed))
    params = sk.SamplingParams(0.3, top_k=60, top_p=0.9)
    with interpreted.checked():
        found = sk.row_stats(x, params, backend="triton")
    assert torch.equal(found.cutoff, sk.row_stats(x, params, backend="reference").cutoff)
