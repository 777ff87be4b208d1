"""The kernels in the shapes that a GPU runs: several programs a row, and lists that take several rounds.

Interpreted kernels take whole rows elsewhere, as the interpreter pays by the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import specdec_kernels as sk
from python_tests import interpreted
from python_tests.ops import chains, trees
from python_tests.ops.calls import CALLS
from python_tests.ops.inputs import logits, outcome, uniforms
from python_tests.ops.wide_calls import WIDE
from specdec_kernels import laws
from specdec_kernels.backends.triton import launch

if reason := interpreted.why_not():
    pytest.skip(reason, allow_module_level=True)

Call = tuple[Callable[..., Any], dict[str, Any]]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(23)


def chain(**how: Any) -> Call:
    return sk.verify_chain, {**chains.make(rng(), 2, 2, 4200, **how), "return_acceptance": True}


def shard(drawn: bool) -> Call:
    """A shard of five tiles, the last of them short."""
    x = logits(rng(), 2, 2, 4200)
    given: dict[str, Any] = {"logits": x, "stats": sk.row_stats(x), "weights": torch.full((2, 2), 0.9)}
    given |= {"draft_logits": x.flip(-1), "draft_stats": sk.row_stats(x.flip(-1))}
    if drawn:
        masses = sk.shard_draw(**given, backend="reference").masses
        given |= {"masses": masses, "uniform_samples": uniforms(rng(), 2, 2)}
    return sk.shard_draw, given


def counted() -> Call:
    """Two texts with lists of several hundred ids, in which new ones come to stand before, among and behind them."""
    history = torch.stack([torch.randperm(3000, generator=rng())[:500] for _ in range(2)])
    counts = sk.TokenCounts(history, 400)
    return sk.count_tokens_, {"token_counts": counts, "tokens": torch.randint(0, 3000, (2, 300), generator=rng())}


MORE: dict[str, Callable[[], Call]] = {
    "probs-token": lambda: chain(kind="probs"),
    "probs-block": lambda: chain(kind="probs", acceptance="block"),
    "one-hot": lambda: chain(kind="one_hot"),
    "lossy": lambda: chain(kind="probs", law=laws.Lossy(0.3, beta="exact")),
    "cross-entropy": lambda: chain(law=laws.BiLD(1.0, bonus="cascade")),
    "recursive-probs": lambda: (sk.verify_tree, trees.make(5, 2, 6, 4200, acceptance="recursive", kind="probs")),
    "shard": lambda: shard(False),
    "shard-drawn": lambda: shard(True),
    "shard_stats": lambda: (sk.shard_stats, {"logits": logits(rng(), 2, 2, 4200)}),
    "counts": counted,
}


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("name", [*MORE, *WIDE, *CALLS])
def test_parts_of_rows_give_what_whole_rows_give(name: str) -> None:
    """Tokens, statuses and all other integers the same, numbers up to the order of their sums."""
    call, arguments = (CALLS | WIDE | MORE)[name]()
    with interpreted.checked():
        expected = outcome(call, **arguments, backend="triton")
    with (
        interpreted.checked(seed=1),
        mock.patch.multiple(launch, INTERPRETED_TILES=2, INTERPRETED_NUMBERS=64),
    ):
        found = outcome(call, **arguments, backend="triton")
    assert len(expected) == len(found) > 0
    for whole, parts in zip(expected, found, strict=True):
        if whole.is_floating_point():
            torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(parts, whole)


def test_rows_are_read_in_parts() -> None:
    """Else the test above compares nothing."""
    assert launch.tiles_a_program(5200, 2) == 8
    with mock.patch.multiple(launch, INTERPRETED_TILES=2, INTERPRETED_NUMBERS=64):
        assert launch.tiles_a_program(5200, 2) == 2 and launch.numbers_a_program(500) == 64
