"""merge_shards on every backend: a row's stats and an id's probability from the masses of its tiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops.inputs import logits, per_row, refuses, same_bits, seeded
from python_tests.support import Backend
from specdec_kernels.ops.merge_shards import total_mass

OP = "merge_shards"
SIGNATURE = (["tile_max", "tile_mass", "logits_at", "params"], ["probs", "backend"])


def tiles() -> dict[str, torch.Tensor]:
    return {
        "tile_max": torch.randn(4, 2, 5, generator=seeded()), "tile_mass": torch.rand(4, 2, 5, generator=seeded()),
        "logits_at": torch.full((4, 2), -2.0),
    }  # fmt: skip


CALLS = {
    "": lambda: {**tiles(), "params": per_row(4)},
    "probs": lambda: {**tiles(), "probs": True},
}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("vocab", [1025, 4097, 300_000])
def test_an_ids_probability_is_that_of_warp_probs(
    backend: Backend, vocab: int, temperature: float, rng: torch.Generator
) -> None:
    x, params = logits(rng, 2, 2, backend.vocab(vocab)), sk.SamplingParams(temperature)
    x, id = backend(x), 1024
    stats = backend.shard_stats(x, params)
    values, prob = backend.merge_shards(stats.tile_max, stats.tile_mass, x[..., id].contiguous(), params)
    same_bits(values[..., :4], backend.row_stats(x, params).values[..., :4].contiguous())
    expected = backend.warp_probs(x, params)[..., id]
    same_bits(prob, torch.zeros_like(prob) if temperature == 0 else expected.contiguous())


def test_rows_that_have_all_on_one_id(backend: Backend) -> None:
    """Greedy rows, infinite maxima: normalizer 1, and nothing said of the id."""
    tile_max = torch.tensor([[[1.0, math.inf]], [[-math.inf, -math.inf]], [[0.0, 1.0]]])
    params = sk.SamplingParams(torch.tensor([1.0, 1.0, 0.0]))
    values, prob = backend.merge_shards(*backend(tile_max, torch.ones(3, 1, 2), torch.zeros(3, 1), params))
    assert (values[..., 3] == 1).all() and (prob == 0).all()
    assert values[:, 0, 0].tolist() == [math.inf, -math.inf, 1.0]


def test_sums(backend: Backend, rng: torch.Generator) -> None:
    masses = torch.rand(2, 3, 700, generator=rng)
    expected = masses.double().sum(-1)
    np.testing.assert_allclose(total_mass(backend(masses), backend.name).cpu(), expected, rtol=1e-6)
    values, prob = backend.merge_shards(
        *backend(torch.zeros_like(masses), masses, masses[..., 0].contiguous()), probs=True
    )
    np.testing.assert_allclose(values[..., 3].cpu(), expected, rtol=1e-5)
    assert (prob == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tile_max": torch.zeros(2, 3)}, ValueError, "merge_shards: tile_max must be [batch, n, tiles] with tiles >="),
        ({"tile_max": 3}, ValueError, "merge_shards: tile_max must be [batch, n, tiles] with tiles >="),
        (
            {"tile_mass": torch.zeros(4, 2, 4)},
            ValueError,
            "merge_shards: tile_mass must be [batch=4, n=2, tiles=5], got",
        ),
        ({"logits_at": torch.zeros(4, 3)}, ValueError, "merge_shards: logits_at must be [batch=4, n=2], got [4, 3]"),
        ({"logits_at": torch.zeros(4, 2).half()}, TypeError, "merge_shards: logits_at must be float32, got float16"),
        ({"probs": None}, TypeError, "merge_shards: probs must be a bool, got NoneType"),
        ({"params": 3}, TypeError, "merge_shards: params must be a SamplingParams or None, got int"),
        ({"backend": "nope"}, ValueError, "merge_shards: backend must be one of"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.merge_shards, tiles(), change, error, message)
