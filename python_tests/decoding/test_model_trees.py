"""A draft model's tree: the likeliest continuations, and the tokens and the distribution of plain decoding."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, near, prompts, tiny
from python_tests.decoding.test_trees import FAMILIES, TreeTable, exact_law, frequencies, target
from specdec_kernels.decoding import DecodingState
from specdec_kernels.decoding.request import Request
from specdec_kernels.decoding.state import Speculation


def begun(runner: TableRunner, texts: Tensor, sampling: sk.SamplingParams, acceptance: str = "token") -> DecodingState:
    prompt = Request(texts, None, sampling, None, 9, []).prompt(runner)
    how = Speculation(acceptance, 16)
    return DecodingState.begin(prompt, runner, sampling, torch.arange(len(texts)), 9, how)


def paths_of(draft: Any, row: int) -> set[tuple[int, ...]]:
    """The paths of tokens from the root to each node that a sequence has."""
    tokens, parents = draft.tokens[row].tolist(), draft.tree.parents[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return {path for path, token in zip(paths[1:], tokens, strict=True) if token >= 0}


def likeliest(
    table: Tensor, before: int, last: int, temperature: float, nodes: int, depth: int
) -> set[tuple[int, ...]]:
    """The definition: of all paths up to `depth` long the `nodes` likeliest, best first."""
    laws = (table.double() / temperature).softmax(-1)
    found: set[tuple[int, ...]] = set()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while len(found) <= nodes:
        chance, path = heapq.heappop(waiting)
        found.add(path)
        if len(path) < depth:
            a, b = ([before, last, *path])[-2:]
            for token, p in enumerate(laws[a, b].tolist()):
                heapq.heappush(waiting, (chance * p, (*path, token)))
    return found - {()}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_tree_holds_the_likeliest_continuations(temperature: float) -> None:
    draft = TreeTable(TableRunner.random(11, seed=3).table)
    texts = torch.tensor([[1, 4, 9, 2], [3, 3, 0, 7]])
    drafter = sk.ModelTreeDrafter(draft, num_nodes=13, max_depth=4, width=12)
    with torch.inference_mode():
        state = begun(draft, texts, sk.SamplingParams(temperature))
        drafter.start(state)
        for depth in (4, 2, 1):
            found = drafter.propose(state, depth)
            assert not found.tree.status.any() and found.tree.depth.max() <= depth
            for row, text in enumerate(texts.tolist()):
                nodes = min(12, 11 if depth == 1 else 12)
                assert paths_of(found, row) == likeliest(draft.table, *text[-2:], temperature or 1.0, nodes, depth)


def test_beams_are_as_wide_as_asked_and_nodes_that_nothing_fits_are_missing() -> None:
    """Two nodes of a depth have children; of three ids there are few continuations."""
    draft = TreeTable(TableRunner.random(3, seed=1).table)
    drafter = sk.ModelTreeDrafter(draft, num_nodes=24, max_depth=3, width=2)
    with torch.inference_mode():
        state = begun(draft, torch.tensor([[0, 1, 2]]), sk.SamplingParams())
        drafter.start(state)
        found = drafter.propose(state, 3)
    depth = found.tree.depth[0][1:][found.tokens[0] >= 0].tolist()
    assert [depth.count(d) for d in (1, 2, 3)] == [3, 6, 6]
    assert found.tokens.shape == (1, 23) and int((found.tokens >= 0).sum()) == 15


@pytest.mark.parametrize("acceptance", ["greedy", "match"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_decoding(family: str, acceptance: str) -> None:
    """Also where the draft is the target itself: then nearly all is accepted greedily, unless its cache is wrong."""
    model = target(family)
    ids, mask = prompts(5, 9, 1)
    sampling = sk.SamplingParams(0.0 if acceptance == "greedy" else 0.9, top_k=30)
    kw: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 25, "acceptance": acceptance, "seeds": torch.arange(3),
        "sampling": sampling, "eos_token_id": [],
    }  # fmt: skip
    plain = sk.generate(model, ids, drafter=sk.NoDrafter(), **kw)
    some = sk.TokenMap(torch.arange(50, 2, -1))
    for drafter in (
        sk.ModelTreeDrafter(model, 16, 4, 4), sk.ModelTreeDrafter(near(family, 0, 0.1), 6, 4, 8),
        sk.ModelTreeDrafter(model, token_map=some), sk.ModelTreeDrafter(tiny(family, 5), 2, 1, 1),
    ):  # fmt: skip
        out = sk.generate(model, ids, drafter=drafter, **kw)
        assert torch.equal(out.tokens, plain.tokens)
        assert not out.status.any()
        if acceptance == "greedy" and drafter.max_depth == 4 and drafter.num_nodes == 16:
            assert out.stats.num_accepted > 0.9 * out.stats.num_drafted > 40


@pytest.mark.parametrize("acceptance", ["token", "match"])
def test_texts_have_the_targets_distribution(acceptance: str) -> None:
    runner, batch, length = TreeTable(TableRunner.random(4, seed=2, spread=1.2).table), 40_000, 4
    draft = TreeTable(runner.table + torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1)))
    out = sk.generate(
        runner, torch.tensor([[1, 3]]).expand(batch, -1), drafter=sk.ModelTreeDrafter(draft, 6, 3, 2),
        seeds=torch.arange(batch), max_new_tokens=length, acceptance=acceptance, eos_token_id=[],
    )  # fmt: skip
    law = exact_law(runner.table, [1, 3], length)
    assert out.stats.mean_acceptance_length > 1.6
    # The largest |seen − law| in standard deviations, of 256 cells.
    assert float((np.abs(frequencies(out.tokens, 4) - law) / np.sqrt(law / batch)).max()) < 4.5


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="^ModelTreeDrafter: draft_model must be a model that takes trees, got T5"):
        sk.ModelTreeDrafter(tiny("t5"))
    for name, value, most in (("num_nodes", 1, 1024), ("max_depth", 65, 64), ("width", 0, 1023)):
        with pytest.raises(ValueError, match=f"^ModelTreeDrafter: {name} must be in .*{most}], got {value}"):
            sk.ModelTreeDrafter(tiny("llama"), **{name: value})
    with pytest.raises(ValueError, match="share one tokenizer"):
        sk.generate(tiny("llama"), torch.tensor([[4, 9]]), drafter=sk.ModelTreeDrafter(tiny("llama", vocab_size=50)))
