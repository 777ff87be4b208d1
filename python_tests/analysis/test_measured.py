"""Estimates and their intervals, the costs of steps, and what a plan makes of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy import stats

import specdec_kernels as sk
from python_tests.analysis.slow_models import SlowDrafter, SlowRunner, Ticking
from python_tests.decoding.models import TableRunner, prompts, tiny
from specdec_kernels import analysis
from specdec_kernels.analysis import measured, planner
from specdec_kernels.analysis.measured import Acceptance, StepCosts
from specdec_kernels.drafters.base import Draft, TreeDrafter

NAN = float("nan")


def acceptance(*steps: list[float], sequence: list[int] | None = None) -> Acceptance:
    return Acceptance(np.array(steps), np.array(sequence or [0] * len(steps)))


def test_acceptance_by_position() -> None:
    seen = acceptance([0.5, 1.0, 0.2], [1.0, 0.6, NAN], [-1.0, NAN, NAN], [0.1, NAN, NAN])
    assert [e.mean for e in seen.by_position()] == pytest.approx([0.4, 0.8, 0.2])
    assert seen.drafted_share == 0.75 and seen.alpha.mean == pytest.approx(3.4 / 6)
    tokens = 1 + 0.4 + 0.4 * 0.8 + 0.4 * 0.8 * 0.2
    assert seen.expected_tokens().mean == pytest.approx(tokens)


def test_positions_that_nothing_reached_are_no_gain() -> None:
    seen = acceptance([0.0, NAN], [0.0, NAN])
    assert np.isnan(seen.by_position()[1].mean) and seen.expected_tokens().mean == 1.0
    none = acceptance([], [])
    assert none.drafted_share == 0 and np.isnan(none.alpha.mean) and none.expected_tokens().mean == 1.0


def test_batches_join_with_answers_of_their_own() -> None:
    """However long the drafts of each got; and a batch in which nothing could be drafted."""

    def seen(*rows: list[float], sequence: list[int]) -> Any:
        nothing = np.zeros(0)
        acceptance = np.array(rows).reshape(len(rows), -1) if rows else np.zeros((0, 0))
        return measured.Watched(None, acceptance, np.array(sequence, dtype=np.int64), nothing, nothing)  # type: ignore

    joined = Acceptance.of([
        seen([0.5, 0.1], [0.7, NAN], sequence=[0, 2]), seen(sequence=[]), seen([0.2], [0.3], sequence=[1, 0]),
    ])  # fmt: skip
    assert joined.steps.shape == (4, 2) and joined.sequence.tolist() == [0, 2, 4, 3]
    assert joined.by_position()[0].mean == pytest.approx(1.7 / 4) and joined.by_position()[1].mean == 0.1
    assert Acceptance.of([]).longest == 0


@pytest.mark.parametrize(("successes", "count"), [(0, 5), (3, 5), (5, 5), (40, 90)])
def test_the_interval_of_coins_is_clopper_and_pearsons(successes: int, count: int) -> None:
    coins = [[1.0]] * successes + [[0.0]] * (count - successes)
    (estimate,) = acceptance(*coins).by_position()
    exact = stats.binomtest(successes, count).proportion_ci(0.95, method="exact")
    assert (estimate.low, estimate.high) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_the_interval_of_tokens_holds_the_truth() -> None:
    """Of answers that differ: 200 experiments of 30 answers with an acceptance each of its own."""
    random, held = np.random.default_rng(0), 0
    truth = 1 + 0.5 + 0.5 * 0.5  # in the mean over all steps; beta(2, 2) for the answer, and the second position fair
    for _ in range(200):
        rates = np.repeat(random.beta(2, 2, 30), 8)
        first = (random.random(240) < rates).astype(float)
        second = np.where(first > 0, random.random(240) < 0.5, NAN)
        found = Acceptance(np.stack([first, second], 1), np.repeat(np.arange(30), 8)).expected_tokens()
        assert found.low < found.mean < found.high
        held += found.low <= truth <= found.high
    assert 178 <= held <= 198


def test_answers_that_agree_do_not_make_the_tokens_certain() -> None:
    """Four of four first tokens rejected, or eight of eight accepted: the shares' own intervals go on."""
    none = Acceptance(np.array([[0.0, NAN]] * 4), np.array([0, 0, 1, 1])).expected_tokens()
    assert (none.low, none.mean) == (1.0, 1.0) and 1.4 < none.high < 2.0
    every = Acceptance(np.ones((4, 2)), np.array([0, 0, 1, 1])).expected_tokens()
    assert (every.mean, every.high) == (3.0, 3.0) and 1.3 < every.low < 2.0
    rounded = Acceptance(np.array([[1.0], [1.0], [0.0]] * 3), np.repeat(range(3), 3)).expected_tokens()
    assert rounded.mean == pytest.approx(5 / 3) and rounded.low < 1.4 and rounded.high > 1.9  # equal but for rounding


def test_rounding_puts_no_prompts_above_certainty() -> None:
    """Of one prompt's 1 and another's 3 · 2^-52 with 1, the sum less the first is 1 + 2^-52, of one draft token."""
    found = Acceptance(np.array([[1.0], [1.0], [3 * 2.0**-52]]), np.array([0, 1, 1])).expected_tokens()
    assert found.mean == pytest.approx(5 / 3) and 1.0 <= found.low < found.high <= 2.0


def test_one_answer_has_no_interval() -> None:
    found = acceptance([0.5], [0.7]).expected_tokens()
    assert found.mean == pytest.approx(1.6) and np.isnan(found.low) and np.isnan(found.high)


def slow(*drafters: str, alpha: str = "low") -> tuple[Any, dict[str, Any], Ticking]:
    """A target of 10 + rows seconds a forward, and drafters of 3 + 1 seconds a step."""
    clock, target = Ticking(), SlowRunner(TableRunner.random(spread=6.0).table)
    made = {name: SlowDrafter() for name in drafters}
    target.clock = clock
    for drafter in made.values():
        drafter.clock = clock
    return target, made, clock


def test_costs_are_the_clocks() -> None:
    target, drafters, clock = slow("odd")
    found = measured.measure_costs(
        target, prompts(4, 6, vocab=23)[0], drafters, lengths=[1, 3], batch_size=2, rounds=2, steps=1, clock=clock
    )
    assert found.steps == {1: 11.0, 2: 12.0, 4: 14.0}
    assert found.verification(4) == pytest.approx(14 / 11)
    for length in (1, 3):
        assert found.drafting["odd", length] == 4.0
        assert found.c("odd", length) == pytest.approx(4 / (11 * length))


def test_a_prompt_may_be_cut_at_the_padding_id() -> None:
    target, drafters, clock = slow("odd")
    target.prompt_padding = 3
    ids = torch.full((1, 200), 5)
    ids[0, -measured._CONTEXT] = 3
    found = measured.measure_costs(target, ids, drafters, lengths=[1], batch_size=1, rounds=1, steps=1, clock=clock)
    assert found.steps[1] == 11.0


class SmallTrees(TreeDrafter):
    """Trees of `nodes` nodes, all below the root, where five were announced."""

    num_nodes, max_depth = 5, 1

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def start(self, state: Any) -> None: ...

    def commit(self, state: Any, result: Any) -> None: ...

    def propose(self, state: Any, num_tokens: int) -> Draft:
        tree = sk.DraftTree.from_parents([-1, *[0] * (self.nodes - 1)])
        return Draft(torch.zeros(state.batch_size, self.nodes - 1, dtype=torch.int64), tree=tree)


def test_trees_may_be_smaller_than_announced() -> None:
    given: dict[str, Any] = {"lengths": [1], "batch_size": 2, "rounds": 1, "steps": 2}
    found = measured.measure_costs(tiny("llama", 1), prompts(4, 6)[0], {"small": SmallTrees(3)}, **given)
    assert 0 < found.steps["small"] < 60 and found.verification("small") > 0
    with pytest.raises(ValueError, match=r"^measure_costs: drafters must draft a tree after input_ids, got none from"):
        measured.measure_costs(tiny("llama", 1), prompts(4, 6)[0], {"none": SmallTrees(1)}, **given)


@pytest.mark.parametrize("distance", [0.0, 9.0])
def test_drafting_is_timed_in_whole_drafts(distance: float) -> None:
    """Whether or not they are accepted: a step near an answer's end would ask for less."""
    clock, target = Ticking(), SlowRunner(TableRunner.random().table)
    draft = SlowRunner(target.table + distance * torch.randn(23, 23, 23, generator=torch.Generator().manual_seed(1)))
    target.clock = draft.clock = clock
    found = measured.measure_costs(
        target, prompts(4, 6, vocab=23)[0], {"draft": sk.ModelDrafter(draft)}, lengths=[1, 3, 7, 15],
        batch_size=2, rounds=1, clock=clock,
    )  # fmt: skip
    for length in (1, 3, 7, 15):  # the first forward of a draft has two rows
        assert found.drafting["draft", length] == 12.0 + 11.0 * (length - 1)


@pytest.mark.parametrize(("of_target", "of_draft"), [(60, None), (None, 60), (30, 90)])
@pytest.mark.parametrize("prompt", [200, 20])
def test_costs_of_models_that_hold_few_positions(of_target: int | None, of_draft: int | None, prompt: int) -> None:
    target, draft = TableRunner.random(), TableRunner.random(seed=1)
    target.max_length, draft.max_length = of_target, of_draft
    found = measured.measure_costs(
        target, prompts(prompt, prompt, vocab=23)[0], {"draft": sk.ModelDrafter(draft)}, lengths=[3, 15],
        batch_size=2, rounds=1,
    )  # fmt: skip
    assert set(found.steps) == {1, 4, 16} and np.isfinite([*found.steps.values(), *found.drafting.values()]).all()


def test_costs_are_of_the_batch_asked_for() -> None:
    seen: list[int] = []

    class Counting(TableRunner):
        def forward(self, tokens: torch.Tensor, *rest: Any, **named: Any) -> Any:
            seen.append(tokens.shape[0])
            return super().forward(tokens, *rest, **named)

    measured.measure_costs(
        Counting(TableRunner.random().table), prompts(4, 6, vocab=23)[0], {}, lengths=[1], batch_size=5, rounds=1
    )
    assert set(seen) == {5}


@pytest.mark.parametrize(
    ("named", "message"),
    [({"batch_size": 0}, "batch_size must be in"), ({"lengths": [1, 0]}, "lengths must be in \\[1, 64\\], got 0"),
     ({"rounds": 1.5}, "rounds must be an integer, got float"),
     ({"input_ids": torch.ones(3).long()}, r"input_ids must be \[num_prompts >= 1, prompt\], got \[3\]"),
     ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be \[num_prompts=1, prompt=4\], got \[1, 3\]")],
)  # fmt: skip
def test_costs_refuse(named: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^measure_costs: {message}"):
        measured.measure_costs(
            TableRunner.random(),
            drafters={},
            **{"input_ids": prompts(4, vocab=23)[0], "lengths": [1], "batch_size": 1} | named,
        )


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_perfect_draft_and_a_useless_one() -> None:
    """A draft of the target's own distribution is always accepted; the plan then knows the gain to the second."""
    target, useless, clock = slow("useless")
    drafters = {"perfect": sk.ModelDrafter(TableRunner(target.table)), **useless}
    batches = [(prompts(5, 5, vocab=23)[0], None)]
    total = planner.count_runs(drafters, 1, [1.0], 2, 2, 1)
    advanced: list[int] = []
    found = planner.plan(
        target, batches, drafters, temperatures=[1.0], lengths=[1, 3], batch_sizes=[1, 2], max_new_tokens=24, rounds=1,
        clock=clock, advance=lambda: advanced.append(1),
    )  # fmt: skip
    assert len(advanced) == total
    for choice in found.choices:
        if choice.drafter == "perfect":
            k = choice.num_speculative_tokens
            assert choice.alpha.mean == pytest.approx(1.0, abs=1e-5) and choice.drafted_share == 1.0 and choice.c == 0.0
            assert choice.tokens_per_step.mean == pytest.approx(k + 1, abs=1e-4)
            assert choice.gain.mean == pytest.approx((k + 1) * 11 / (11 + k), rel=1e-4)
            assert choice.gain_by_alpha == pytest.approx(choice.gain.mean, rel=1e-4)
            assert choice.simulated.mean == pytest.approx(choice.gain.mean, rel=0.05)
        else:
            assert choice.gain.mean < 1 and choice.c > 0
    best = found.best(1.0, 2)
    assert best is not None and (best.drafter, best.num_speculative_tokens) == ("perfect", 3)
    report = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["drafter"] for row in report["best"]] == ["perfect", "perfect"]
    assert len(report["acceptances"]) == 4 and len(report["choices"]) == 8 and len(report["costs"]) == 6

    alone = planner.plan(target, batches, useless, temperatures=[1.0], lengths=[1, 3], costs=found.costs, clock=clock)
    assert alone.best(1.0, 1) is None and alone.costs == found.costs
    assert {row["drafter"] for row in alone.to_dict()["best"]} == {"none"}
    with pytest.raises(
        ValueError, match="plan: costs must have '.*' with 7 draft tokens for batch size 1, and have not"
    ):
        planner.plan(target, batches, useless, temperatures=[1.0], lengths=[1, 7], costs=found.costs, clock=clock)
    for steps in ({2: 0.1, 4: 0.1}, {**found.costs[1].steps, 1: 0.0}, {**found.costs[1].steps, 2: math.nan}):
        costs = {1: replace(found.costs[1], steps=steps)}
        with pytest.raises(
            ValueError, match="plan: costs must have the time of a plain step, and times > 0, for batch"
        ):
            planner.plan(target, batches, useless, temperatures=[1.0], lengths=[1, 3], costs=costs, clock=clock)


def test_draws_are_other_answers_to_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer is drawn; greedily there is only one. They belong to their prompts, as one prompt's are alike."""
    target, drafters, _ = slow("odd")
    costs = {1: StepCosts(1, {1: 1.0, 4: 1.5}, {("odd", 3): 0.1})}
    seeds: list[tuple[float, str, int]] = []
    watch, counts = measured.watch, []

    def noted(*of: Any, **how: Any) -> Any:
        seeds.append((how["sampling"].temperature, how["acceptance"], int(how["seeds"][0])))
        return watch(*of, **how)

    monkeypatch.setattr(measured, "watch", noted)
    batches = [(prompts(5, 5, vocab=23)[0], None), (prompts(4, vocab=23, seed=2)[0], None)]
    for rule, answers in (("token", 2 + 6), ("greedy", 2 + 2)):
        found = planner.plan(
            target, batches, drafters, temperatures=[0.0, 1.0], lengths=[3], draws=3, max_new_tokens=20, costs=costs,
            acceptance=rule, advance=lambda: counts.append(1),
        )  # fmt: skip
        assert len(counts) == planner.count_runs(drafters, 2, [0.0, 1.0], 1, 0, 0, 3, rule) == answers
        counts.clear()
        for acceptance in found.acceptances.values():
            assert set(acceptance.sequence) == {0, 1, 2} and len(acceptance.sequence) == len(acceptance.steps)
    assert len(set(seeds)) == len(seeds) == 12 and {seed for t, _, seed in seeds if t} == {1000 * i for i in range(6)}


def gain(a: list[float], share: float, drafting: float, verification: float, batch: int = 1, **named: Any) -> float:
    found = planner.simulate(
        np.array(a), share, drafting, verification, batch, **{"num_tokens": 3000, "answers": 60} | named
    )
    assert found.low <= found.mean + 1e-9 and found.mean <= found.high + 1e-9
    return found.mean


def test_long_simulated_answers_are_the_prediction() -> None:
    assert gain([0.7] * 5, 1.0, 0.25, 1.3) == pytest.approx(
        float(analysis.walltime_improvement(0.7, 5, 0.05, 1.3)), rel=0.01
    )
    # half of the steps draft: their share of the acceptance is in the first position
    tokens = float(analysis.expected_tokens_by_position([0.4, 0.9]))
    assert gain([0.4, 0.9], 0.5, 0.1, 1.4) == pytest.approx(tokens / (0.1 + 0.5 * 1.4 + 0.5), rel=0.01)
    assert gain([0.4, 0.9], 0.5, 0.1, 1.4, always=True) == pytest.approx(tokens / 1.5, rel=0.01)


def test_simulated_answers_end_and_batches_wait() -> None:
    assert gain([1.0] * 3, 1.0, 0.0, 1.2, num_tokens=4) == pytest.approx(4 / 1.2)
    assert gain([1.0] * 3, 1.0, 0.0, 1.2, num_tokens=5) == pytest.approx(5 / 2.2)  # the last token needs no draft
    assert gain([0.5] * 3, 1.0, 0.0, 1.2, batch=8, num_tokens=40) < gain([0.5] * 3, 1.0, 0.0, 1.2, num_tokens=40) - 0.1
    assert gain([], 0.0, 0.0, 1.0) == 1.0


def test_simulated_steps_take_time() -> None:
    with pytest.raises(ValueError, match=r"^simulate: verification must be in"):
        planner.simulate(np.array([1.0]), 1.0, 0.0, 0.0, 1, 2)


def test_a_batch_verifies_when_any_of_it_drafts() -> None:
    costs = StepCosts(8, {1: 1.0, 4: 2.0}, {("d", 3): 0.0})
    seen = acceptance(*[[1.0, 1.0, 1.0]] * 5, *[[-1.0, NAN, NAN]] * 5, sequence=[0, 1] * 5)
    choice = planner._choice((0.0, 8, "d", 3, 4), seen, costs, 4, 64)
    rare = 0.5**8
    assert choice.gain.mean == pytest.approx(2.5 / (2.0 * (1 - rare) + rare))


def small_runner(positions: int) -> TableRunner:
    runner = TableRunner.random()
    runner.max_length = positions
    return runner


@pytest.mark.parametrize(
    ("named", "message"),
    [({"drafters": {}}, "drafters must be one or more"),
     ({"drafters": {"none": sk.NgramDrafter()}}, "drafters must be one or more, none of them called 'none'"),
     ({"batches": []}, "batches must be 1 or more, got 0"),
     ({"costs": {}}, r"costs must be of one batch size or more \(None: they are measured\), got \{\}"),
     ({"acceptance": "block"}, "acceptance must be one of token, greedy, got 'block'"),
     ({"max_new_tokens": 97}, "table holds 100 positions, but prompt and max_new_tokens need 101"),
     ({"max_new_tokens": 37, "drafters": {"model": sk.ModelDrafter(small_runner(40))}},
      r"the draft \(table\) holds 40 positions, 41 are needed")],
)  # fmt: skip
def test_a_plan_refuses(named: dict[str, Any], message: str) -> None:
    """Before anything runs."""
    target, called = small_runner(100), Mock()
    given = {"batches": [(prompts(4, vocab=23)[0], None)], "drafters": {"lookup": sk.NgramDrafter()}} | named
    with pytest.raises(ValueError, match=f"^plan: {message}"):
        planner.plan(target, **given, advance=called)
    called.assert_not_called()


def test_a_plan_refuses_a_draft_by_the_targets_runner() -> None:
    target, called = small_runner(100), Mock()
    with pytest.raises(ValueError, match="^plan: drafter must have a Runner of its own, got the target's"):
        planner.plan(target, [(prompts(4, vocab=23)[0], None)], {"model": sk.ModelDrafter(target)}, advance=called)
    called.assert_not_called()


@pytest.mark.parametrize("prompts", [2, 4, 8])
def test_intervals_hold_the_truth_of_few_prompts(prompts: int) -> None:
    """Whose acceptances differ, so that the steps of one tell less than so many independent ones."""
    random, held = np.random.default_rng(0), np.zeros(2)
    truth = (1 + 2 / 3 + 10 / 21, 2 / 3)  # of beta(4, 2): the mean, and that of its square
    for _ in range(200):
        first = np.repeat(random.beta(4, 2, prompts), 18)
        second = np.where(random.random(len(first)) < first, first, NAN)
        seen = Acceptance(np.stack([first, second], 1), np.repeat(np.arange(prompts), 18))
        found = (seen.expected_tokens(), seen.by_position()[0])
        held += [one.low <= true <= one.high for one, true in zip(found, truth, strict=True)]
    assert (held >= 180).all(), held
