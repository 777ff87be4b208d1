"""What logits processors cost on a GPU, counted by the emulator: bytes and loads that wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench.gpu import model
from bench.inputs import BIAS, Case, Request
from python_tests import emulated
from python_tests.ops import chains, trees

VOCAB = 128256
TILES = 126

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))


def all_on(batch: int, rows: int, vocab: int) -> tuple[Request, sk.Processors]:
    """A history of 1200 tokens, 300 biases, a mask for each row."""
    case = Case("verify_chain", "processors", vocab, batch, num_draft=rows - 1, processed=True)
    request = Request.random(case, torch.Generator().manual_seed(0))
    return request, request.processors()


def launches(call: Callable[[], object], strategy: str = "walk") -> list[model.Launch]:
    with emulated.running(strategy):
        return model.counted(call)


def of_a_row(params: sk.SamplingParams, given: sk.Processors | None, strategy: str = "walk") -> dict[str, float]:
    row = 2.5 * torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(3))
    found = launches(lambda: sk.row_stats(row, params, processors=given, backend=emulated.NAME), strategy)
    return {name: sum(x.counts[name] for x in found) for name in ("bytes", "rounds", "atomics", "barriers")}


def test_a_row_is_read_as_often_as_without() -> None:
    """A mask costs a bit an id; a list a search and its entries, once a tile of 1024 ids, whatever the row's dtype."""
    (request, every), params = all_on(1, 1, VOCAB), sk.SamplingParams()
    without = of_a_row(params, None)
    mask = of_a_row(params, sk.Processors(token_bitmask=every.token_bitmask))
    bias = of_a_row(params, sk.Processors(logit_bias=(request.biased, torch.full(request.biased.shape, BIAS))))
    together = of_a_row(params, every)
    assert mask["bytes"] - without["bytes"] == pytest.approx(VOCAB / 8, rel=0.1)
    assert mask["rounds"] == without["rounds"]
    of_list = 128 + 2 * 128  # a step of a search, 32 ids and their values
    assert bias["bytes"] - without["bytes"] == pytest.approx(TILES * of_list, rel=0.1)
    assert together["bytes"] - without["bytes"] < VOCAB / 8 + TILES * 2.5 * of_list
    assert together["rounds"] - without["rounds"] < 10 * TILES / 8  # of one warp of 8
    assert together["atomics"] == 0 and together["barriers"] - without["barriers"] <= 6
    cut = sk.SamplingParams(0.8, top_k=50, top_p=0.9)
    assert of_a_row(cut, every)["bytes"] - together["bytes"] < 0.1 * 4 * VOCAB


def test_split_rows_are_read_by_many_blocks() -> None:
    _, every = all_on(1, 1, VOCAB)
    split, walked = (of_a_row(sk.SamplingParams(), every, strategy) for strategy in ("split", "walk"))
    assert split["rounds"] * 4 < walked["rounds"]


def scratch() -> int:
    found: Any = emulated.library().specdec_emulated_allocations
    return int(found())


@pytest.mark.parametrize("form", ["chain", "tree"])
def test_one_launch_writes_no_row(form: str) -> None:
    """Without scratch memory there is no place for one; without processors the kernels are others."""
    rng, params, vocab = torch.Generator().manual_seed(1), sk.SamplingParams(0.8, top_k=50), 9000
    if form == "chain":
        verify, step = sk.verify_chain, chains.make(rng, 2, 3, vocab, params=params, draft_params=params)
    else:
        verify, step = sk.verify_tree, trees.make(1, 2, 4, vocab, params=params, draft_params=params)
    _, every = all_on(2, 4, vocab)
    call = chains.Arguments(step, backend=emulated.NAME)
    before = scratch()
    with_them = launches(lambda: verify(**call, processors=every))
    assert scratch() == before and len(with_them) == 1
    nothing = launches(lambda: verify(**call, processors=sk.Processors()))
    assert [x.counts for x in nothing] == [x.counts for x in launches(lambda: verify(**call))]
    assert replace(with_them[0], counts={}) == replace(nothing[0], counts={})  # of the same name
    assert with_them[0].counts["bytes"] > nothing[0].counts["bytes"]
