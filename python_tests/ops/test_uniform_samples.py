"""uniform_samples on every backend: the published Philox vectors, an independent Philox, streams, ranges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import specdec_kernels as sk
from python_tests.ops.inputs import PURPOSES, SEEDS, refuses
from python_tests.support import Backend
from specdec_kernels.testing import philox4x32, words32

OP = "uniform_samples"
SIGNATURE = (["seeds", "step", "num", "purpose"], ["backend"])
CALLS = {
    "": lambda: {"seeds": torch.arange(5), "step": 3, "num": 7},
    "steps": lambda: {"seeds": torch.arange(5), "step": torch.arange(5), "num": 7, "purpose": "draft"},
}
# Random123's kat_vectors, philox4x32-10: counter, key, result
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def random_call(rng: torch.Generator) -> dict[str, Any]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=rng)
    return {"seeds": seeds, "step": torch.randint(0, 2**63 - 1, (5,), generator=rng), "num": 6, "purpose": "draft"}


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """Of the independent Philox that the other tests rely on, and of the reference's."""
    from specdec_kernels.backends.reference.random import philox

    assert philox4x32(np.array(key, np.uint64), np.array(counter, np.uint64)).tolist() == words
    assert philox(*torch.tensor(key), list(torch.tensor(counter))).tolist() == words


def test_known_answer_through_the_op(backend: Backend) -> None:
    """Seed 0, step 0, purpose "draft" is counter 0 under key 0."""
    u = backend.uniform_samples(backend(torch.tensor([0])), 0, 2, purpose="draft")
    words = KNOWN[0][2]
    assert (u[0] * 2**53).tolist() == [words[i] << 21 | words[i + 1] >> 11 for i in (0, 2)]


def expected(seeds: torch.Tensor, steps: torch.Tensor, num: int, purpose: str) -> np.ndarray:
    counter = np.zeros((len(seeds), (num + 1) // 2, 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1] = PURPOSES[purpose]
    counter[..., 2:] = words32(steps.numpy())[:, None]
    words = philox4x32(words32(seeds.numpy())[:, None], counter).reshape(len(seeds), -1, 2)[:, :num]
    bits = words[..., 0] << np.uint64(21) | words[..., 1] >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("num", [0, 1, 3, 4, 5, 65])
def test_is_philox(backend: Backend, num: int, purpose: str) -> None:
    for step in (0, 1, 2**32 + 5, 2**63 - 1):
        u = backend.uniform_samples(backend(SEEDS), step, num, purpose)
        assert u.dtype == torch.float64 and u.shape == (len(SEEDS), num)
        np.testing.assert_array_equal(u.cpu(), expected(SEEDS, torch.full_like(SEEDS, step), num, purpose))
    steps = torch.arange(len(SEEDS)) * 1_000_000_007
    u = backend.uniform_samples(*backend(SEEDS, steps), num, purpose)
    np.testing.assert_array_equal(u.cpu(), expected(SEEDS, steps, num, purpose))


def test_depends_on_nothing_but_seed_step_purpose_and_index(backend: Backend) -> None:
    whole = backend.uniform_samples(backend(SEEDS), 3, 65)
    for i in range(len(SEEDS)):
        assert torch.equal(backend.uniform_samples(backend(SEEDS[i : i + 1]), 3, 9)[0], whole[i, :9])
    big = backend.uniform_samples(backend(torch.arange(1024)), 3, 5)
    assert torch.equal(backend.uniform_samples(backend(torch.tensor([777])), 3, 5)[0], big[777])


def test_streams_are_disjoint_and_uniform(backend: Backend) -> None:
    seeds = backend(torch.arange(500))
    drawn = {
        (purpose, step): backend.uniform_samples(seeds, step, 8, purpose).flatten().cpu()
        for purpose, step in itertools.product(PURPOSES, (0, 1, 2))
    }
    for u in drawn.values():
        assert 0 <= u.min() and u.max() < 1 and stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    for (a, u), (b, v) in itertools.combinations(drawn.items(), 2):
        assert (u == v).float().mean() < 1e-3, (a, b)
        assert abs(np.corrcoef(u, v)[0, 1]) < 0.09, (a, b)  # 5.7 standard deviations


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": 3}, TypeError, "uniform_samples: seeds must be a tensor, got int"),
        ({"seeds": torch.zeros(4)}, TypeError, "uniform_samples: seeds must be int64, got float32"),
        ({"seeds": torch.zeros(4, dtype=torch.int32)}, TypeError, "uniform_samples: seeds must be int64"),
        (
            {"seeds": torch.zeros(4, 1, dtype=torch.int64)},
            ValueError,
            "uniform_samples: seeds must be [batch], got [4, 1]",
        ),
        ({"step": -1}, ValueError, "uniform_samples: step must be >= 0, got -1"),
        ({"step": 1.0}, TypeError, "uniform_samples: step must be an integer or a [batch] int64 tensor, got float"),
        ({"step": True}, TypeError, "uniform_samples: step must be an integer or a [batch] int64 tensor, got bool"),
        (
            {"step": np.int64(1)},
            TypeError,
            "uniform_samples: step must be an integer or a [batch] int64 tensor, got NumPy's int64 (int() converts it)",
        ),
        ({"step": torch.zeros(3, dtype=torch.int64)}, ValueError, "uniform_samples: step must be [batch=4], got [3]"),
        ({"step": torch.zeros(4)}, TypeError, "uniform_samples: step must be int64, got float32"),
        ({"step": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "uniform_samples: step must be on"),
        ({"num": -1}, ValueError, "uniform_samples: num must be in [0, 2147483647], got -1"),
        ({"num": 2**31}, ValueError, "uniform_samples: num must be in [0, 2147483647]"),
        ({"num": 2.0}, TypeError, "uniform_samples: num must be an integer, got float"),
        (
            {"purpose": "coin"},
            ValueError,
            "uniform_samples: purpose must be one of draft, accept, final, sample, got 'coin'",
        ),
        ({"backend": "gpu"}, ValueError, "uniform_samples: backend must be one of"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.uniform_samples, {"seeds": torch.arange(4), "step": 0, "num": 3}, change, error, message)
