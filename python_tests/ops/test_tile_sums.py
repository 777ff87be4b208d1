"""The order in which a row's tiles are added (csrc/common/tile_sums.h), and the draws that go down those sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from python_tests.ops.inputs import logits
from python_tests.support import Backend

OP = "row_stats"
TILE, TREE = 1024, 256


def tree_sum(shares: np.ndarray) -> np.float32:
    """Neighbours first, over 256 of them; the trees' sums in index order. All in float32."""
    total = np.float32(0)
    for first in range(0, len(shares), TREE):
        level = np.zeros(TREE, np.float32)
        level[: len(shares[first : first + TREE])] = shares[first : first + TREE]
        while len(level) > 1:
            level = level[0::2] + level[1::2]
        total += level[0]
    return total


@pytest.mark.parametrize("tiles", [3, 6, 45, 149, 500])
def test_the_normaliser_is_summed_in_trees(backend: Backend, tiles: int, rng: torch.Generator) -> None:
    if backend.name == "triton":
        pytest.skip("Triton's reductions have an order of their own")
    x = logits(rng, tiles, TILE, spread=1.0)
    x[:, 0] = 7.0  # every tile has the row's maximum, so that its share is its own normaliser
    shares = backend.row_stats(backend(x)).normalizer.cpu().numpy()
    whole = backend.row_stats(backend(x.flatten())).normalizer.item()
    expected = tree_sum(shares)
    in_index_order = np.float32(0)
    for share in shares:
        in_index_order += share
    assert whole == expected
    assert tiles < 45 or expected != in_index_order  # the test can tell


@pytest.mark.parametrize("tiles", [1, 2, 7, 33, 260])
def test_each_id_is_drawn_by_its_own_uniforms(backend: Backend, tiles: int, rng: torch.Generator) -> None:
    """Of 2^k equally likely ids number j is drawn by j / 2^k: in any order of adding, every sum is exact."""
    if backend.name == "triton":
        tiles = min(tiles, 33)
    k = 9
    possible = torch.randperm(tiles * TILE - 5, generator=rng)[: 2**k].sort().values
    x = torch.full((tiles * TILE - 5,), -math.inf)
    x[possible] = 1.5
    ends = torch.nonzero(possible.div(TILE, rounding_mode="floor").diff())[:, 0]  # the last possible ids of tiles
    some = torch.cat([torch.tensor([0, 2**k - 1]), ends[:20], ends[:20] + 1, torch.arange(3, 2**k, 37)])
    u = some.float() / 2**k
    draw = backend.sample(backend(x).expand(len(u), -1), uniform_samples=backend(u))
    assert draw.token.tolist() == possible[some].tolist()
    last = backend.sample(backend(x[None]), uniform_samples=backend(torch.tensor([1 - 2.0**-24])))
    assert last.token.item() == possible[-1].item()
