"""What the tests of ops have in common: inputs on a backend's device, and the choice of cases in random schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.ops.processing import of_any_kind
from python_tests.support import Backend


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    parts = value if isinstance(value, (list, tuple)) else named.values()
    return [tensor for part in parts for tensor in tensors_in(part)]


GIVEN = {
    "tensor": torch.zeros(2),
    "params": sk.SamplingParams(torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2), torch.ones(2)),
    "counts": sk.TokenCounts(torch.ones(2, 1, dtype=torch.int64), 3),
    "stats": sk.row_stats(torch.zeros(2, 2, 5)),
    "processors": of_any_kind(torch.Generator().manual_seed(0), 2, (2,), 50),
    "token map": sk.TokenMap(torch.tensor([1, 3])),
    "tree": sk.DraftTree.from_parents([-1, 0, 0]),
    "list": [torch.zeros(1), (torch.zeros(2), None)],
    "arguments": {"logits": torch.zeros(1, 2), "num_samples": 3},
}


@pytest.mark.parametrize("kind", GIVEN)
def test_all_that_ops_take_is_moved(kind: str) -> None:
    given = GIVEN[kind]
    moved = Backend("reference", "meta")(given)
    assert type(moved) is type(given)
    found, expected = tensors_in(moved), tensors_in(given)
    assert len(found) == len(expected) > 0
    assert {tensor.device.type for tensor in found} == {"meta"}


def test_what_has_no_tensors_stays_and_what_is_unknown_is_refused() -> None:
    given = (None, 3, 0.5, "token", sk.laws.Chow(0.1))
    assert Backend("reference", "meta")(*given) == given
    with pytest.raises(TypeError, match="set must be something that an op takes"):
        Backend("reference", "meta")({3})


@pytest.mark.parametrize("count", [1, 5, 8, 32])
def test_every_layout_gets_some_of_a_tests_cases(count: int) -> None:
    """In random schedules these are an eighth, or at least one, and not those with one value of a parameter."""
    items = [
        SimpleNamespace(callspec=SimpleNamespace(params={"size": i % 8, "kind": i // 8, "name": i}))
        for i in range(count)
    ]
    chosen = [Backend("cuda-emulated", "cpu", strategy="walk", schedule=i).some_cases(items, None) for i in range(1, 6)]
    assert {len(some) for some in chosen} == {-(-count // 8)}
    if count > 8:
        assert all(len({item.callspec.params["size"] for item in some}) > 1 for some in chosen)
        assert len({tuple(map(id, some)) for some in chosen}) == 5
