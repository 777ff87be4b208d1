"""A draft model's tree: the likeliest continuations, and the tokens and the distribution of plain decoding."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from examples.own_loop import LeanLlama
from python_tests.decoding.models import TableRunner, prompts, tiny
from python_tests.decoding.tree_models import TreeTable, decode, exact_law, frequencies
from specdec_kernels.decoding import DecodingState, Runner
from specdec_kernels.decoding.request import Request
from specdec_kernels.decoding.state import Speculation
from specdec_kernels.integrations.runners import as_runner


def begun(runner: Runner, texts: Tensor, sampling: sk.SamplingParams, acceptance: str = "token") -> DecodingState:
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


def likeliest(law: Callable[[tuple[int, ...]], Tensor], nodes: int, depth: int) -> set[tuple[int, ...]]:
    """The definition: of all paths up to `depth` long the `nodes` likeliest; `law` is of the id after a path."""
    found: set[tuple[int, ...]] = set()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while len(found) <= nodes:
        chance, path = heapq.heappop(waiting)
        found.add(path)
        if len(path) < depth:
            for token, p in enumerate(law(path).tolist()):
                heapq.heappush(waiting, (chance * p, (*path, token)))
    return found - {()}


@pytest.mark.parametrize(
    ("temperature", "acceptance"), [(0.0, "token"), (1e-40, "token"), (0.7, "token"), (1.0, "match"), (0.7, "greedy")]
)
def test_the_tree_holds_the_likeliest_continuations(temperature: float, acceptance: str) -> None:
    """At the target's temperature; where it is greedy, at 1."""
    laws_at = 1.0 if temperature < 0.1 or acceptance == "greedy" else temperature
    draft = TreeTable(TableRunner.random(11, seed=3).table)
    texts = torch.tensor([[1, 4, 9, 2], [3, 3, 0, 7]])
    drafter = sk.ModelTreeDrafter(draft, num_nodes=13, max_depth=4, width=12)
    with torch.inference_mode():
        state = begun(draft, texts, sk.SamplingParams(temperature), acceptance)
        drafter.start(state)
        laws, flatter = ((draft.table.double() / t).softmax(-1) for t in (laws_at, 1.0))
        if temperature == 0.7 and acceptance == "token":  # of each sequence its own: the second is greedy
            state = replace(state, sampling=sk.SamplingParams(torch.tensor([0.7, 1e-40])))
        for depth, nodes in ((4, 12), (2, 12), (1, 11)):
            found = drafter.propose(state, depth)
            assert not found.tree.status.any() and found.tree.depth.max() <= depth
            for row, text in enumerate(texts.tolist()):
                own = flatter if row == 1 and isinstance(state.sampling.temperature, Tensor) else laws
                expected = likeliest(lambda path, t=text, own=own: own[tuple([*t, *path][-2:])], nodes, depth)
                assert paths_of(found, row) == expected


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


@pytest.mark.parametrize("some", [None, sk.TokenMap(torch.arange(50, 2, -1))], ids=["all ids", "some ids"])
def test_every_tree_is_that_of_the_text_as_it_is(some: sk.TokenMap | None) -> None:
    """Whatever was accepted before: its cache holds what the text is, and not what was drafted. Ids are barred, one of
    them until there are nine tokens.
    """
    model, ids = tiny("llama", 1), prompts(6)[0]
    drafter, compared = sk.ModelTreeDrafter(model, 9, 3, 8, token_map=some), 0
    known = torch.arange(61) if some is None else some.draft_to_target
    propose = drafter.propose

    def spied(state: DecodingState, num_tokens: int) -> Any:
        nonlocal compared
        found, text = propose(state, num_tokens), state.tokens[0, : int(state.lengths[0])].tolist()

        def law(path: tuple[int, ...]) -> Tensor:
            logits = model(torch.tensor([[*text, *path]])).logits[0, -1].double()
            barred = torch.ones(61, dtype=torch.bool).index_fill(0, known, False)
            barred[[5, 40]] = True
            barred[7] |= len(text) + len(path) - 6 < 9
            return logits.masked_fill(barred, -torch.inf).softmax(-1)

        assert paths_of(found, 0) == likeliest(law, 8, min(num_tokens, 3))
        compared += 1
        return found

    drafter.propose = spied  # type: ignore[method-assign]
    out = decode(
        model, ids, drafter=drafter, seeds=torch.tensor([3]), max_new_tokens=30, eos_token_id=[],
        processors=sk.Processors(
            banned_ids=[5, 40], stop_token_ids=[7], min_tokens=9, token_counts=sk.TokenCounts(ids, 30)
        ),
    )  # fmt: skip
    assert compared == out.stats.num_steps - (out.stats.num_steps > compared) > 10
    assert out.stats.mean_acceptance_length > 1.3


def test_a_whole_step_is_fed_again() -> None:
    """Three accepted tokens and the one after them: no row of what was drafted is left."""
    model, ids = tiny("llama", 1), prompts(6)[0]
    longer = torch.cat([ids, torch.tensor([[9, 30, 17, 8]])], 1)
    with torch.inference_mode():
        found = []
        for text, more in ((ids, longer), (longer, longer)):
            drafter = sk.ModelTreeDrafter(model, 9, 3, 8)
            state = begun(as_runner(model, "test"), text, sk.SamplingParams())
            drafter.start(state)
            drafter.propose(state, 3)
            state.tokens[:, : more.shape[1]] = more
            state.lengths.fill_(more.shape[1])
            found.append(paths_of(drafter.propose(replace(state, longest=more.shape[1]), 3), 0))
    assert found[0] == found[1]


def test_more_nodes_may_be_fed_than_are_verified() -> None:
    """Eleven of each depth are continued, and twelve rows verified: there is room for the others."""
    model, ids = tiny("llama", 1), prompts(6)[0]
    kw: dict[str, Any] = {"max_new_tokens": 20, "acceptance": "greedy", "eos_token_id": []}
    lean = LeanLlama(model)
    plain = decode(lean, ids, drafter=sk.NoDrafter(), **kw)
    out = decode(lean, ids, drafter=sk.ModelTreeDrafter(LeanLlama(model), 12, 4, 11), **kw)
    assert torch.equal(out.tokens, plain.tokens) and out.stats.num_steps <= 10


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    """Near its end there is room for less than the others have left: the nodes of a step have uniforms of their own."""
    target, draft = (TreeTable(TableRunner.random(23, seed, 3.0).table) for seed in (1, 1))
    ids, seeds = torch.tensor([[3, 4, 5]] * 8), torch.arange(8)

    class Watched(sk.ModelTreeDrafter):
        def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
            draft = super().propose(state, num_tokens)
            assert draft.tree is not None
            depth = draft.tree.depth.expand(len(draft.tokens), -1)[:, 1:]
            room = (state.remaining - 1).clamp(min=1)[:, None]  # with room for none nothing of it is put to the test
            assert not (draft.tokens[depth > room] >= 0).any()
            deep.append(bool((depth > 1).any()))
            return draft

    deep: list[bool] = []

    def run(rows: Any) -> Any:
        drafter = Watched(draft, 6, 4, 3)
        return decode(target, ids[rows], drafter=drafter, seeds=seeds[rows], max_new_tokens=7, eos_token_id=[]).tokens

    together = run(slice(None))
    assert all(torch.equal(run(slice(b, b + 1))[0], together[b]) for b in range(8)) and any(deep)


def test_a_bias_counts_at_the_targets_temperature() -> None:
    """Before the division by it: of two tokens 20 apart a bias of 3 at temperature 0.1 is 30."""
    table = torch.full((5, 5, 5), -50.0)
    table[..., 2], table[..., 4] = 2.0, 0.0
    runner = TreeTable(table)
    out = decode(
        runner, torch.tensor([[1, 3]]), drafter=sk.ModelTreeDrafter(TreeTable(table), 2, 1, 1), max_new_tokens=12,
        sampling=sk.SamplingParams(0.1), processors=sk.Processors(logit_bias={4: 3.0}), eos_token_id=[],
        seeds=torch.tensor([1]),
    )  # fmt: skip
    assert out.tokens.tolist() == [[4] * 12] and out.stats.num_rejected == 0


@pytest.mark.parametrize("acceptance", ["token", "match"])
def test_texts_have_the_targets_distribution(acceptance: str) -> None:
    runner, batch, length = TreeTable(TableRunner.random(4, seed=2, spread=1.2).table), 40_000, 4
    draft = TreeTable(runner.table + torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1)))
    out = decode(
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
    for name, value, most in (("num_nodes", 1, 1024), ("max_depth", 65, 64), ("width", 0, 1023), ("width", 1024, 1023)):
        with pytest.raises(ValueError, match=f"^ModelTreeDrafter: {name} must be in .*{most}], got {value}"):
            sk.ModelTreeDrafter(tiny("llama"), **{name: value})
    # all that are fed are one tree: the root, and so many of each depth but the last
    with pytest.raises(ValueError, match=r"^ModelTreeDrafter: width must be in \[1, 146], got 147"):
        sk.ModelTreeDrafter(tiny("llama"), 64, 8, 147)
    with pytest.raises(ValueError, match="share one tokenizer"):
        decode(tiny("llama"), torch.tensor([[4, 9]]), drafter=sk.ModelTreeDrafter(tiny("llama", vocab_size=50)))
