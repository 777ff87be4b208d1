"""Trees with "auto": a step drafts the tree or nothing, whichever pays, and what is emitted keeps its distribution."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.fake_cuda import both, same
from python_tests.decoding.models import TableRunner, prompts, tiny
from python_tests.decoding.schedules import result
from python_tests.decoding.tree_models import TOKENS, TREE, Fixed, TreeTable, exact_law, frequencies, medusa, target
from specdec_kernels.decoding import DecodingState, known_costs
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS
from specdec_kernels.decoding.schedule import AutoSchedule, FixedSchedule
from specdec_kernels.drafters import Draft, Foresight
from specdec_kernels.integrations.transformers.decoder import DecoderRunner

DEAR, FREE = [1.0, 99.0], [1.0, 1.0]
IN_TURNS = sk.CostTable(np.array([0, 2, 6, 8, 12, 14, 18, 20]), np.array([FREE, DEAR] * 4))
"""Of every six steps the first two draft the tree, whose rows cost nothing; the others do not."""


def once(seconds: list[float]) -> sk.CostTable:
    return sk.CostTable(np.zeros(1, np.int64), np.array([seconds]))


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "pays"), [(1.2, True), (1.6, False), (7.0, False)])
def test_a_tree_is_drafted_where_it_pays(cost: float, pays: bool) -> None:
    """Half of the trees bring one token: 1.5 tokens a step."""
    auto, drafted = AutoSchedule(4, 900, once([1.0, cost]), (0, 3)), []
    assert auto.max_draft_tokens == 3
    for step in range(200):
        drafted.append(auto.next())
        auto.note(result(drafted[-1], np.full(4, step % 2 if drafted[-1] else 0)), None)
    assert set(drafted) <= {0, 3}
    assert (sum(drafted[50:]) > 3 * 130) if pays else (sum(drafted[50:]) < 3 * 20)


def test_a_tree_that_is_never_right_costs_little() -> None:
    for cost in (1.3, 2.0, 6.5):
        spent, auto = 0.0, AutoSchedule(8, 96, once([1.0, cost]), (0, 4))
        for _ in range(96):
            width = auto.next()
            spent += cost if width else 1.0
            auto.note(result(width, np.zeros(8, np.int64)), None)
        assert spent < 96 / 0.97


def test_a_smaller_tree_than_the_largest_counts_as_one() -> None:
    auto = AutoSchedule(1, 99, once([1.0, 1.5]), (0, 4))
    before = auto._account.credit
    auto.note(result(2, np.array([2])), None)
    assert auto._account.credit == pytest.approx(before + 3 * 1.0075 - 1.5)


@pytest.mark.parametrize(("reads_late", "more"), [(False, 0.0), (True, 0.25)])
def test_only_a_drafter_with_a_model_catches_up(reads_late: bool, more: float) -> None:
    """The heads of Medusa read the target's hidden states, and so all that plain steps wrote."""
    auto = AutoSchedule(1, 99, once([1.0, 1.5]), (0, 4), reads_late=reads_late)
    auto.note(result(0, np.zeros(1, np.int64)), None)
    before = auto._account.credit
    auto.note(result(4, np.array([4])), None)
    assert auto._account.credit == pytest.approx(before + 5 * 1.0075 - 1.5 - more)


def test_a_first_step_that_cannot_draft_says_nothing_of_drafts() -> None:
    auto = AutoSchedule(3, 99, once([1.0, 1.5]), (0, 4), first_plain=True)
    fixed, (expected, _) = FixedSchedule(4, first_plain=True), auto._yield.tokens()
    for schedule in (auto, fixed):
        assert schedule.next() == 0
        schedule.note(result(0, np.zeros(3, np.int64)), None)
        assert schedule.next() == 4
    assert np.array_equal(auto._yield.tokens()[0], expected)
    before = auto._account.credit
    auto.note(result(4, np.full(3, 4)), None)  # there was nothing to catch up with
    assert auto._account.credit == pytest.approx(before + 5 * 1.0075 - 1.5)


# --- the tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_are_those_of_plain_decoding(family: str) -> None:
    model = target(family)
    ids, mask = prompts(5, 9, 1)
    for acceptance in ("greedy", "match"):
        how: dict[str, Any] = {
            "attention_mask": mask, "max_new_tokens": 25, "acceptance": acceptance, "seeds": torch.arange(3),
            "sampling": sk.SamplingParams(0.9, top_k=30), "eos_token_id": [],
        }  # fmt: skip
        plain = sk.generate(model, ids, drafter=sk.NoDrafter(), **how)
        for drafter in (medusa(model), sk.NgramTreeDrafter(num_nodes=24), sk.ModelTreeDrafter(model, 16, 4, 4)):
            for costs in (IN_TURNS, "auto"):
                out = sk.generate(model, ids, drafter=drafter, num_speculative_tokens=costs, **how)
                assert torch.equal(out.tokens, plain.tokens) and not out.status.any()
                assert out.stats.costs is not None and out.stats.costs.seconds.shape[1] == 2
                if costs is IN_TURNS:
                    assert 2 < out.stats.draft_steps < out.stats.target_forwards - 2, "steps of both kinds"


def test_hidden_states_are_kept_by_plain_steps() -> None:
    """What Medusa's heads read after them is the model's state at the text's end, as after steps with a tree."""
    model = tiny("llama")
    drafter = medusa(model, sk.DraftTree.from_choices([[0], [2], [0, 1], [2, 0], [0, 1, 3]]))
    seen: list[tuple[Tensor, Tensor]] = []
    propose = drafter.propose

    def spy(state: DecodingState, num_tokens: int) -> Draft:
        assert state.hidden is not None
        seen.append((state.hidden.clone(), state.tokens[0, : int(state.lengths[0])].clone()))
        return propose(state, num_tokens)

    drafter.propose = spy  # type: ignore[method-assign]
    out = sk.generate(
        model, torch.tensor([[4, 9, 30]]), drafter=drafter, num_speculative_tokens=IN_TURNS, max_new_tokens=18,
        eos_token_id=[], seeds=torch.tensor([3]),
    )  # fmt: skip
    assert 3 < len(seen) == out.stats.draft_steps < out.stats.target_forwards
    for hidden, text in seen:
        with torch.inference_mode():
            states = model(text[None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(hidden[0], states[-2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("foresees", [False, True])
@pytest.mark.parametrize("tokens", [1, "auto", once(FREE)], ids=["1", "auto", "table"])
def test_heads_are_not_asked_before_they_have_something_to_read(
    tokens: Any, foresees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step verifies the root alone, and the one after it drafts the tree."""
    model, rows, asked = tiny("llama"), list[int](), list[int]()
    drafter = medusa(model)
    propose, forward_tree = drafter.propose, DecoderRunner.forward_tree

    def proposed(state: DecodingState, num_tokens: int) -> Draft:
        asked.append(int(state.step[0]))
        return propose(state, num_tokens)

    def forwarded(self: Any, tokens: Tensor, starts: Tensor, tree: sk.DraftTree, bound: int) -> Any:
        rows.append(tree.num_nodes)
        return forward_tree(self, tokens, starts, tree, bound)

    monkeypatch.setattr(drafter, "propose", proposed)
    if foresees:
        monkeypatch.setattr(drafter, "foresee", lambda state: Foresight(np.array([5, 5]), np.array([64, 64])))
    monkeypatch.setattr(DecoderRunner, "forward_tree", forwarded)
    monkeypatch.setattr("specdec_kernels.decoding.costs._ROWS_OF_WEIGHTS", 1e9)  # so that "auto" drafts
    out = sk.generate(
        model, torch.tensor([[4, 9, 30]] * 2), drafter=drafter, num_speculative_tokens=tokens, max_new_tokens=12,
        eos_token_id=[], acceptance="greedy",
    )  # fmt: skip
    assert rows[:2] == [1, drafter.num_nodes] and asked[0] == 1
    assert out.stats.draft_steps == len(asked) < out.stats.target_forwards


def test_a_draft_model_reads_what_plain_steps_wrote() -> None:
    """The same model as draft and target: greedily its trees are right, unless its cache lacks a part of the text."""
    model = tiny("llama")
    ids, mask = prompts(5, 9, 1)
    drafter = sk.ModelTreeDrafter(model, 5, 4, 1)
    out = sk.generate(
        model, ids, attention_mask=mask, drafter=drafter, acceptance="greedy", max_new_tokens=50, eos_token_id=[],
        num_speculative_tokens=sk.CostTable(np.array([0, 2, 10, 12, 20]), np.array([FREE, DEAR, FREE, DEAR, FREE])),
    )  # fmt: skip
    assert 3 < out.stats.draft_steps < out.stats.target_forwards - 5
    assert out.stats.num_accepted > 0.95 * out.stats.num_drafted > 40


def test_a_number_drafts_the_tree_at_every_step_or_at_none() -> None:
    table, ids = TableRunner.random(23).table, torch.tensor([[5, 6]])
    how: dict[str, Any] = {"drafter": Fixed(TREE, TOKENS), "max_new_tokens": 20, "eos_token_id": []}
    for number in (0, 1, 9):
        stats = sk.generate(TreeTable(table), ids, num_speculative_tokens=number, **how).stats
        assert stats.costs is None and stats.draft_steps == (stats.target_forwards - 1 if number else 0)


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["token", "match"])
def test_texts_have_the_targets_distribution(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step drafts the tree, the others nothing."""
    monkeypatch.setattr(AutoSchedule, "_UNIT", 1e-6)  # the last of so many texts ends far behind the others
    runner, batch, length = TreeTable(TableRunner.random(4, seed=2, spread=1.2).table), 40_000, 4
    out = sk.generate(
        runner, torch.tensor([[1, 3]]).expand(batch, -1), drafter=Fixed(TREE, TOKENS), seeds=torch.arange(batch),
        max_new_tokens=length, acceptance=acceptance, eos_token_id=[],
        num_speculative_tokens=sk.CostTable(np.arange(2), np.array([FREE, DEAR])),
    )  # fmt: skip
    assert out.stats.draft_steps == 1 < out.stats.target_forwards - 1 and out.stats.num_accepted > batch / 10
    law = exact_law(runner.table, [1, 3], length)
    seen = frequencies(out.tokens, 4)
    # The largest |seen − law| in standard deviations, of 256 cells.
    assert float((np.abs(seen - law) / np.sqrt(law / batch)).max()) < 4.5


def test_seeds_reproduce_and_typical_drafts_at_every_step() -> None:
    table, ids = TableRunner.random(23).table, torch.tensor([[5, 6]] * 2)
    how: dict[str, Any] = {"drafter": Fixed(TREE, TOKENS), "max_new_tokens": 30, "eos_token_id": []}
    seeds = torch.tensor([5, 6])
    first, second = (sk.generate(TreeTable(table), ids, seeds=seeds, **how) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert first.stats.costs is not None
    assert first.stats.costs.at(0) == pytest.approx([1.0, 1 + 0.05 * 2 * (TREE.num_nodes - 1)])
    again = sk.generate(TreeTable(table), ids, seeds=seeds, num_speculative_tokens=first.stats.costs, **how)
    assert torch.equal(again.tokens, first.tokens)
    typical = sk.generate(TreeTable(table), ids, seeds=seeds, acceptance="typical", **how).stats
    assert typical.costs is None and typical.draft_steps >= typical.target_forwards - 1


def test_nominal_costs_of_a_tree() -> None:
    assert sk.CostTable.nominal(False, 2, 8, 3).at(0) == pytest.approx([1, 1.7])
    assert sk.CostTable.nominal(True, 1, 4, 3).at(0) == pytest.approx(sk.CostTable.nominal(True).at(0)[[0, 2]])


def test_trees_of_another_size_have_costs_of_their_own() -> None:
    target = TreeTable(TableRunner.random(23).table)
    for number, nodes in enumerate((4, 4, 8, 4), 1):
        drafter = sk.NgramTreeDrafter(num_nodes=nodes, max_depth=3)
        out = sk.generate(target, torch.tensor([[5, 6, 7]]), drafter=drafter, max_new_tokens=9, eos_token_id=[])
        assert len(known_costs._known[known_costs.Identity(target)].costs) == (1 if number < 3 else 2)
        assert out.stats.costs is not None and (out.stats.costs.ahead == 0) == (number in (1, 3)), "begun anew"


@pytest.mark.parametrize("lasting", ["target", "draft"])
def test_nothing_is_left_of_a_model_that_is_gone(lasting: str) -> None:
    """Neither costs nor what would remove them, with the other model of the pair still there."""
    tables = {"target": TableRunner.random(23), "draft": TableRunner.random(23, seed=1)}
    ids, kept = torch.tensor([[5, 6, 7]]), []
    for _ in range(4):
        pair = tables | {name: TableRunner(one.table) for name, one in tables.items() if name != lasting}
        draft = sk.ModelDrafter(pair["draft"])
        sk.generate(pair["target"], ids, drafter=draft, max_new_tokens=4, eos_token_id=[])
        del pair, draft
        gc.collect()
        kept.append((sum(len(of.costs) + len(of.removers) for of in known_costs._known.values()), removers()))
    assert len(set(kept[1:])) == 1, kept


def removers() -> int:
    """Functions that wait for an object's end."""
    return len(weakref.finalize._registry)  # type: ignore[attr-defined]


# --- on a GPU, and refusals -------------------------------------------------------------------------------------------


def test_captured_steps_do_what_ordinary_ones_do(cuda: Any) -> None:
    model = tiny("llama")
    ids, mask = prompts(5, 9, 1)
    for drafter in (medusa(model), sk.NgramTreeDrafter(num_nodes=8), sk.ModelTreeDrafter(model, 8, 3, 3)):
        for costs in (IN_TURNS, once(FREE), once(DEAR)):
            captured, ordinary = both(
                model, ids, attention_mask=mask, drafter=drafter, num_speculative_tokens=costs, max_new_tokens=40,
                seeds=torch.arange(3), eos_token_id=[],
            )  # fmt: skip
            same(captured, ordinary)
    assert cuda.captures() > 0


def test_a_table_of_another_kind_of_drafter_is_refused() -> None:
    ids, chains = torch.tensor([[5, 6]]), once([1.0] * len(AUTO_DRAFT_LENGTHS))
    table = TreeTable(TableRunner.random(23).table)
    with pytest.raises(ValueError, match=r"be a CostTable with seconds \[revisions, 2\] beside Fixed, got \[1, 4\]"):
        sk.generate(table, ids, drafter=Fixed(TREE, TOKENS), num_speculative_tokens=chains)
    with pytest.raises(ValueError, match=r"seconds \[revisions, 4\] beside NgramDrafter, got \[1, 2\]"):
        sk.generate(table, ids, drafter=sk.NgramDrafter(), num_speculative_tokens=once(FREE))
