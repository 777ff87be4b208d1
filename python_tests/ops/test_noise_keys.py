"""noise_keys on every backend: against an independent Philox, and the noise made from the keys is Gumbel noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import specdec_kernels as sk
from python_tests.ops.inputs import PURPOSES, SEEDS, refuses
from python_tests.support import Backend
from specdec_kernels.testing import float64_gumbel, philox4x32, words32

OP = "noise_keys"
TREE = sk.DraftTree.from_parents([-1, 0, 0, 1])
SIGNATURE = (["seeds", "positions", "purpose", "step"], ["backend"])
CALLS = {
    "": lambda: {"seeds": torch.arange(5), "positions": torch.arange(15).view(5, 3)},
}


def random_call(rng: torch.Generator) -> dict[str, Any]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=rng)
    return {"seeds": seeds, "positions": torch.randint(0, 2**62, (5, 3), generator=rng), "purpose": "sample"}


def expected(seeds: torch.Tensor, positions: torch.Tensor, purpose: str, steps: torch.Tensor) -> np.ndarray:
    """A Philox of the position under a key that is a Philox of (seed; purpose, step)."""
    counter = np.zeros((len(seeds), 4), np.uint64)
    counter[:, 1], counter[:, 2:] = PURPOSES[purpose], words32(steps.numpy())
    stream = philox4x32(words32(seeds.numpy()), counter)[:, None, :2]
    inner = np.ones((*positions.shape, 4), np.uint64)
    inner[..., :2] = words32(positions.long().numpy())
    bits = philox4x32(stream, inner)
    return (bits[..., 0] | (bits[..., 1] << np.uint64(32))).view(np.int64)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_is_philox(backend: Backend, purpose: str) -> None:
    positions = torch.arange(len(SEEDS) * 5).view(-1, 5) * 1_000_003
    for step, steps in [
        (None, torch.full_like(SEEDS, -1)),
        (0, torch.zeros_like(SEEDS)),
        (2**40, torch.full_like(SEEDS, 2**40)),
        (torch.arange(len(SEEDS)) * 12345, torch.arange(len(SEEDS)) * 12345),
    ]:
        step = backend(step) if isinstance(step, torch.Tensor) else step
        keys = backend.noise_keys(*backend(SEEDS, positions), purpose, step)
        assert keys.dtype == torch.int64
        np.testing.assert_array_equal(keys.cpu(), expected(SEEDS, positions, purpose, steps))
    narrow = backend.noise_keys(*backend(SEEDS, positions.int()), purpose)
    np.testing.assert_array_equal(narrow.cpu(), backend.noise_keys(*backend(SEEDS, positions), purpose).cpu())


@pytest.mark.parametrize("parents", [[-1, 0, 0, 1], [[-1, 0, 0, 1]] * len(SEEDS)], ids=["one tree", "each its own"])
def test_a_tree_has_a_key_for_each_node(backend: Backend, parents: list[Any]) -> None:
    tree, step = backend(sk.DraftTree.from_parents(parents), torch.arange(len(SEEDS)))
    keys = backend.noise_keys(backend(SEEDS), tree, step=step)
    nodes = torch.arange(4).expand(len(SEEDS), 4)
    np.testing.assert_array_equal(keys.cpu(), expected(SEEDS, nodes, "draft", torch.arange(len(SEEDS))))
    assert torch.equal(keys, backend.noise_keys(backend(SEEDS), tree, "draft", step))


def test_depends_on_nothing_but_seed_and_position(backend: Backend) -> None:
    positions = torch.arange(64).expand(len(SEEDS), 64)
    whole = backend.noise_keys(*backend(SEEDS, positions))
    for i in range(len(SEEDS)):
        one = backend.noise_keys(*backend(SEEDS[i : i + 1], positions[:1, 7:9]))
        assert torch.equal(one[0], whole[i, 7:9])
    assert backend.noise_keys(*backend(SEEDS, positions[:, :0])).shape == (len(SEEDS), 0)


def test_keys_are_distinct(backend: Backend) -> None:
    seeds, positions = backend(torch.arange(300), torch.arange(100).expand(300, 100))
    keys = [backend.noise_keys(seeds, positions, p, s) for p in PURPOSES for s in (None, 0, 1)]
    assert torch.cat([k.flatten() for k in keys]).unique().numel() == 300 * 100 * 12


def test_noise_is_gumbel_and_independent_over_positions_seeds_and_ids() -> None:
    """Kolmogorov-Smirnov on 2 · 10^5 values with fixed keys, and no correlation between neighbours."""
    keys = sk.noise_keys(torch.arange(100), torch.arange(40).expand(100, 40))
    noise = float64_gumbel(keys, 53)
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-6
    for axis in range(3):
        a, b = np.take(noise, range(noise.shape[axis] - 1), axis), np.take(noise, range(1, noise.shape[axis]), axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.012  # 5.5 standard deviations


def test_float32_noise_is_the_float64_noise() -> None:
    from specdec_kernels.backends.reference.random import gumbel

    keys = sk.noise_keys(torch.arange(50), torch.arange(20).expand(50, 20))
    ours = gumbel(keys[..., None], torch.arange(101).expand(50, 20, 101), torch.float32)
    exact = float64_gumbel(keys, 101)
    assert (np.abs(ours.double().numpy() - exact) < 3e-6).all()


@pytest.mark.parametrize("p", [1e-8, 1e-10, 1e-12])
def test_an_unlikely_id_wins_as_often_as_it_should(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the lattice of its own bits, against others whose noise is anything: then it wins with the probability
    exp(-(1 - p) E / p), E = exp(-G) its own exponential variable.
    """
    from specdec_kernels.backends.reference import random

    reach, steps = 30 * p * 2**64, 1 << 12  # beyond 30 p it has lost
    bits, inside = torch.arange(int(reach / 2**32) + 1)[:, None], min(reach, 2.0**32)
    further, cell = ((torch.arange(steps)[None] + 0.5) * inside / steps).long(), inside / steps * 2.0**-64
    lattice = bits, further
    monkeypatch.setattr(random, "_noise_bits", lambda keys, ids, which: lattice[which].expand(len(bits), -1))
    nothing = torch.zeros(len(bits), further.shape[1], dtype=torch.int64)
    E = torch.exp(-random.gumbel(nothing, nothing, torch.float32).double())
    np.testing.assert_allclose((torch.exp(-(1 - p) * E / p) * cell).sum().item(), p, rtol=1e-5)


def test_few_bits_of_noise_have_further_ones_behind_them(backend: Backend) -> None:
    """Races of two ids that lie between what the bits alone and what all bits say."""
    keys, vocab = torch.arange(3000) + 2**33, 900
    counter = np.zeros((vocab // 4, 4), np.uint64)
    counter[:, 0], counter[:, 3] = np.arange(vocab // 4), 0x47554D42
    bits = philox4x32(words32(keys.numpy())[:, None], counter).reshape(len(keys), vocab)
    row, id = np.nonzero(bits < 12000)
    row, id = row[:12], id[:12]
    assert len(row) >= 6
    fine = float64_gumbel(keys[row], vocab)[np.arange(len(row)), id]
    coarse = -np.log(-np.log1p(-(bits[row, id] + 0.5) * 2.0**-32))
    told = np.abs(fine - coarse) > 1e-5
    assert told.sum() >= 5
    row, id, fine, coarse = row[told], id[told], fine[told], coarse[told]
    other = (id + 5) % vocab
    x = np.full((len(row), vocab), -np.inf, np.float32)
    x[np.arange(len(row)), other] = 0
    x[np.arange(len(row)), id] = float64_gumbel(keys[row], vocab)[np.arange(len(row)), other] - (fine + coarse) / 2
    drawn = backend.sample(backend(torch.from_numpy(x)), noise_keys=backend(keys[row])).token.cpu().numpy()
    np.testing.assert_array_equal(drawn, np.where(fine > coarse, id, other))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": [1, 2]}, TypeError, "noise_keys: seeds must be a tensor, got list"),
        ({"seeds": torch.zeros(4)}, TypeError, "noise_keys: seeds must be int64, got float32"),
        ({"seeds": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "noise_keys: seeds must be [batch], got [2, 2]"),
        ({"positions": torch.zeros(4, 2)}, TypeError, "noise_keys: positions must be int64 or int32, got float32"),
        (
            {"positions": torch.zeros(4, dtype=torch.int64)},
            ValueError,
            "noise_keys: positions must be [batch=4, n], got [4]",
        ),
        ({"positions": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, "noise_keys: positions must be [batch=4, n]"),
        (
            {"positions": torch.zeros(4, 2, dtype=torch.int64, device="meta")},
            ValueError,
            "noise_keys: positions must be on",
        ),
        ({"purpose": "noise"}, ValueError, "noise_keys: purpose must be one of"),
        ({"step": -3}, ValueError, "noise_keys: step must be >= 0, got -3"),
        ({"step": "first"}, TypeError, "noise_keys: step must be an integer or a [batch] int64 tensor, got str"),
        ({"step": torch.zeros(5, dtype=torch.int64)}, ValueError, "noise_keys: step must be [batch=4], got [5]"),
        ({"backend": "gpu"}, ValueError, "noise_keys: backend must be one of"),
        ({"positions": TREE}, ValueError, "noise_keys: step must be given for a tree"),
        (
            {"positions": TREE, "purpose": "sample", "step": 1},
            ValueError,
            "noise_keys: purpose must be 'draft' for a tree (\"match\" verifies by position), got 'sample'",
        ),
        (
            {"positions": sk.DraftTree.from_parents([[-1, 0]] * 3), "step": 1},
            ValueError,
            "noise_keys: seeds must be [batch=3], got [4]",
        ),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(
        sk.noise_keys,
        {"seeds": torch.arange(4), "positions": torch.zeros(4, 2, dtype=torch.int64)},
        change,
        error,
        message,
    )
