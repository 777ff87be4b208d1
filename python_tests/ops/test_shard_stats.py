"""shard_stats on every backend: the shards' tiles, merged, are the whole row's stats bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops.inputs import DTYPES, logits, per_row, refuses, same_bits, seeded, strided
from python_tests.support import Backend, environment

OP = "shard_stats"
SIGNATURE = (["logits", "params"], ["probs", "backend"])
CALLS = {
    "": lambda: {"logits": logits(seeded(), 4, 2, 1050), "params": per_row(4)},
    "probs": lambda: {"logits": logits(seeded(), 3, 2, 1050).softmax(-1), "probs": True},
}
TILE = 1024
TEMPERATURES = {"1": sk.SamplingParams(), "0.7": sk.SamplingParams(0.7), "0": sk.SamplingParams(0.0)}


def in_shards(backend: Backend, x: torch.Tensor, borders: list[int], params: sk.SamplingParams) -> sk.ShardStats:
    """The tiles of shards that end at these tiles, joined; argmax and status of the whole."""
    ends = [0, *(TILE * b for b in borders), x.shape[-1]]
    parts = [backend.shard_stats(x[..., a:b], params) for a, b in zip(ends, ends[1:], strict=False)]
    tops = torch.stack([p.tile_max.amax(-1) for p in parts])
    first = (tops == tops.amax(0)).int().argmax(0, keepdim=True)
    argmax = torch.stack([p.argmax + a for p, a in zip(parts, ends, strict=False)]).gather(0, first)[0]
    status = torch.stack([p.status for p in parts]).amax(0)
    return sk.ShardStats(
        torch.cat([p.tile_max for p in parts], -1), torch.cat([p.tile_mass for p in parts], -1), argmax, status
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("vocab", "borders"), [(3000, [1]), (3000, [1, 2]), (4097, [2, 4]), (50257, [7, 20])])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_shards_are_the_row(
    backend: Backend, dtype: torch.dtype, vocab: int, borders: list[int], temperature: str, rng: torch.Generator
) -> None:
    vocab, params = backend.vocab(vocab), TEMPERATURES[temperature]
    borders = [b for b in borders if b * TILE < vocab]
    x = backend(logits(rng, 2, 2, vocab, dtype=dtype))
    joined, whole = in_shards(backend, x, borders, params), backend.row_stats(x, params)
    values, _ = backend.merge_shards(joined.tile_max, joined.tile_mass, x[..., 0].float(), params)
    same_bits(values[..., :4], whole.values[..., :4].contiguous())
    same_bits(joined.argmax, whole.argmax)
    assert (values[..., 4:] == -math.inf).all() and (joined.status == 0).all()


def test_a_tile_is_described(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 2, 2, 2500)
    stats = backend.shard_stats(backend(x), sk.SamplingParams(0.8))
    for tile, ids in enumerate(x.double().split(TILE, -1)):
        largest = ids.amax(-1)
        assert torch.equal(stats.tile_max[..., tile].cpu(), largest.float())
        mass = ((ids - largest[..., None]) / 0.8).exp().sum(-1)
        np.testing.assert_allclose(stats.tile_mass[..., tile].cpu(), mass, rtol=2e-6)


def test_bad_values_are_flagged_and_alone(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 5, 1, 2100)
    x[1, 0, 2050], x[2], x[3], x[4, 0, 7] = math.nan, -math.inf, math.nan, math.inf
    stats = backend.shard_stats(backend(x))
    assert stats.status[:, 0].tolist() == [0, sk.Status.NAN, 0, sk.Status.NAN, 0]
    assert stats.argmax[2:, 0].tolist() == [0, 0, 7]
    assert (stats.tile_mass[2:4] == 0).all() and (stats.tile_max[2:4] == -math.inf).all()
    assert stats.tile_max[4, 0, 0] == math.inf and stats.tile_mass[4, 0, 0] == 0
    x[1, 0, 2050] = -math.inf
    same_bits(backend.shard_stats(backend(x)).tile_mass[:2], stats.tile_mass[:2])


def test_a_bad_value_raises_in_no_shard_alone(backend: Backend, rng: torch.Generator) -> None:
    """The other ranks would wait: `sk.distributed.verify_chain` raises, on all of them."""
    x = logits(rng, 1, 1, 2100)
    x[0, 0, 7] = math.nan
    with environment(SPECDEC_CHECK="1"):
        assert backend.shard_stats(backend(x)).status.item() == sk.Status.NAN


@pytest.mark.parametrize("values", [[math.nan, -math.inf, -math.inf], [-math.inf, math.nan, -math.inf]])
def test_the_argmax_of_an_empty_row_is_0_beside_a_nan(backend: Backend, values: list[float]) -> None:
    stats = backend.shard_stats(backend(torch.tensor([[values]])))
    assert stats.argmax.tolist() == [[0]] and stats.status.tolist() == [[sk.Status.NAN]]


def test_probabilities_are_summed(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 3, 1, 2100).softmax(-1)
    x[1, 0, 1500], x[2, 0, 3] = -0.5, math.nan
    stats = backend.shard_stats(backend(x), probs=True)
    expected = [part.sum(-1)[0, 0].item() for part in x.split(TILE, -1)]
    np.testing.assert_allclose(stats.tile_mass[0, 0].cpu(), expected, rtol=2e-6)
    assert stats.tile_mass[1, 0, 1] == math.inf and stats.status[:, 0].tolist() == [0, 0, sk.Status.NAN]
    assert stats.tile_mass[1, 0, 0] < 1
    kept = x[2, 0, :TILE].nan_to_num(0.0).sum().item()
    assert stats.tile_mass[2, 0, 0].item() == pytest.approx(kept, rel=2e-6), "a NaN counts as 0"


def test_strides_do_not_matter(backend: Backend, rng: torch.Generator) -> None:
    x = backend(logits(rng, 3, 2, 1100, dtype=torch.bfloat16))
    same_bits(backend.shard_stats(x), backend.shard_stats(strided(x)))
    same_bits(backend.shard_stats(x[1:2, 1:]).tile_mass, backend.shard_stats(x).tile_mass[1:2, 1:].contiguous())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": 1}, TypeError, "shard_stats: logits must be a tensor, got int"),
        ({"logits": torch.zeros(2, 9)}, ValueError, "shard_stats: logits must be [batch, n, width], got [2, 9]"),
        ({"logits": torch.zeros(2, 1, 0)}, ValueError, "shard_stats: logits must be [..., vocab] with 1 <= vocab"),
        ({"probs": 1}, TypeError, "shard_stats: probs must be a bool, got int"),
        (
            {"logits": torch.zeros(2, 1, 9).half(), "probs": True}, TypeError,
            "shard_stats: logits must be float32 where they are probabilities",
        ),
        ({"params": 3}, TypeError, "shard_stats: params must be a SamplingParams or None, got int"),
        ({"backend": "nope"}, ValueError, "shard_stats: backend must be one of"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.shard_stats, {"logits": torch.zeros(2, 1, 9)}, change, error, message)


def test_rows_of_one_id_may_have_any_stride(backend: Backend) -> None:
    """As a dimension of one element may."""
    x = torch.arange(6.0).view(1, 2, 3)
    found = backend.shard_stats(backend(x).permute(1, 2, 0))
    same_bits(found, backend.shard_stats(backend(x.permute(1, 2, 0).contiguous())))
