"""Adaptive draft lengths: what drafts yielded and what steps cost decide; drafting that does not pay stops."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, prompts
from python_tests.decoding.schedules import DEAR, PACKED, learned, result, table
from specdec_kernels.decoding import StepResult, known_costs
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from specdec_kernels.decoding.foresight import ForesightSchedule
from specdec_kernels.decoding.schedule import MEMORY, AdaptiveSchedule, AutoSchedule, FixedSchedule, Schedule, Yield


def rate(
    auto: Schedule, seconds: np.ndarray, alphas: list[float], tokens: int = 1000, noise: float = 0.0, seed: int = 0,
    turn: int | None = None,
) -> float:  # fmt: skip
    """Tokens a second of sequences of so many tokens each, whose draft tokens are accepted with these probabilities;
    those of the first sequence no longer after `turn` tokens.
    """
    rng, left, spent = np.random.default_rng(seed), np.full(len(alphas), tokens), 0.0
    while left.any():
        width = auto.next()
        right = np.array(alphas)
        if turn is not None and tokens - left[0] >= turn:
            right[0] = 0
        coins = rng.random((len(alphas), width)) < right[:, None]
        accepted = np.minimum(coins.cumprod(1).sum(1), np.maximum(left - 1, 0))
        time = float(seconds[AUTO_DRAFT_LENGTHS.index(width)] * np.exp(noise * rng.standard_normal()))
        emitted = np.where(left > 0, accepted + 1, 0)
        left, spent = left - emitted, spent + time
        drafted = np.where(emitted > 0, width, -1)
        step = StepResult(
            np.zeros((len(alphas), width + 1), np.int64), emitted, drafted, accepted, left > 0, np.zeros(1)
        )
        auto.note(step, time)
    return len(alphas) * tokens / spent


def best_fixed(seconds: np.ndarray, alphas: list[float]) -> tuple[float, float]:
    """Tokens a second of plain decoding, and of the best length: of the slowest sequence's, which ends last."""
    rates = [
        len(alphas) * sum(min(alphas) ** i for i in range(k + 1)) / s
        for k, s in zip(AUTO_DRAFT_LENGTHS, seconds, strict=True)
    ]
    return rates[0], max(rates)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seconds", [PACKED, DEAR], ids=["packed", "dear"])
@pytest.mark.parametrize(
    "alphas", [[0.0], [0.05], [0.2], [0.4], [0.6], [0.8], [0.95], [0.0, 0.1, 0.2, 0.9], [0.5] * 8], ids=str
)
def test_near_the_best_fixed_length_and_never_much_below_plain(
    seconds: np.ndarray, alphas: list[float], noise: float
) -> None:
    plain, best = best_fixed(seconds, alphas)
    got = [
        rate(AutoSchedule(len(alphas), 1000, learned(seconds)), seconds, alphas, noise=noise, seed=seed)
        for seed in range(3 if noise else 1)
    ]
    assert min(got) > 0.97 * plain
    assert np.mean(got) > 0.9 * best


@pytest.mark.parametrize(("batch", "pays", "does_not"), [(1, 1.38, 1.42), (8, 1.26, 1.31)])
def test_the_more_sequences_the_less_a_draft_may_cost(batch: int, pays: float, does_not: float) -> None:
    """At first an acceptance of 0.4 is assumed, 1.4 tokens a step of one draft token, but the last of eight sequences
    that are alike ends later than one alone.
    """
    assert AutoSchedule(batch, 64, table(np.array([1.0, pays, 9.0, 9.0]))).next() == 1
    assert AutoSchedule(batch, 64, table(np.array([1.0, does_not, 9.0, 9.0]))).next() == 0


@pytest.mark.parametrize("choice", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 8, 64])
def test_the_last_of_a_batch_is_expected_when_it_ends(batch: int, choice: int) -> None:
    """In the mean of batches drawn at random, whose drafts are right as often as is assumed at first."""
    rng, tokens, length = np.random.default_rng(0), 64, AUTO_DRAFT_LENGTHS[choice]
    right = rng.random((100, batch, tokens, length)) < np.array([0.4, *[0.45] * 6])[:length]
    written = (1 + right.cumprod(-1).sum(-1)).cumsum(-1)
    steps = 1 + (written < tokens).sum(-1).max(-1)  # of the last sequence
    assert AutoSchedule(batch, tokens, table(np.ones(4)))._seconds[choice] == pytest.approx(steps.mean(), rel=0.04)


def test_sequences_that_are_far_from_the_last_do_not_count() -> None:
    """Seven of eight that have ended, or have little left, leave the choice to the other one."""
    for rest in (0, 4):
        auto = AutoSchedule(8, 64, table(np.array([1.0, 1.36, 9.0, 9.0])))
        assert auto.next() == 0
        auto._account.left[1:] = rest
        auto._choose()
        assert auto.next() == 1


def answers(
    make: Callable[[], Any], seconds: np.ndarray, first: float, later: float, drafted: float, count: int = 100
) -> float:
    """Tokens a second of `count` answers of 64 tokens, with a lookup that has a draft in so many steps, and whose first
    token is accepted with probability `first`, those after it with `later`.
    """
    emitted, spent = 0, 0.0
    for seed in range(count):
        schedule, rng, tokens = make(), np.random.default_rng(seed), 0
        while tokens < 64:
            width = schedule.next() if rng.random() < drafted else 0
            right = rng.random((1, width)) < np.where(np.arange(width), later, first)
            accepted = right.cumprod(1).sum(1)
            time = float(seconds[AUTO_DRAFT_LENGTHS.index(width)] * np.exp(0.05 * rng.standard_normal()))
            schedule.note(result(width, accepted), time)
            tokens, spent = tokens + int(accepted[0]) + 1, spent + time
        emitted += tokens
    return emitted / spent


@pytest.mark.short(cases=2)
@pytest.mark.parametrize(
    ("first", "later", "drafted"), [(0.05, 0.5, 0.5), (0.15, 0.8, 0.5), (0.3, 0.8, 0.7), (0.6, 0.9, 0.9)]
)
def test_a_short_answer_of_a_lookup_with_cheap_rows_is_near_the_best_fixed_length(
    first: float, later: float, drafted: float
) -> None:
    """Rows as in examples/own_loop.py: what seldom pays costs hardly anything, and must not be given up at once."""
    seconds = np.array([1.0, 1.02, 1.04, 1.22])
    got = answers(lambda: AutoSchedule(1, 64, learned(seconds)), seconds, first, later, drafted)
    fixed = [answers(lambda n=n: FixedSchedule(n), seconds, first, later, drafted) for n in AUTO_DRAFT_LENGTHS]
    assert got > 0.94 * max(fixed)


@pytest.mark.parametrize("seconds", [PACKED, DEAR], ids=["packed", "dear"])
def test_a_short_answer_of_a_lookup_that_is_never_right_costs_little(seconds: np.ndarray) -> None:
    got = answers(lambda: AutoSchedule(1, 64, learned(seconds)), seconds, 0.0, 0.0, 1.0)
    assert got > 0.97


def test_an_outcome_counts_once() -> None:
    """Eight rejections of a lone sequence are not evidence of its batch's or of other positions' averages as well."""
    drafts = Yield(1, 7)
    for _ in range(8):
        drafts.add(np.array([0]), np.array([True]))
    judged = sum(MEMORY**age for age in range(8))
    assert drafts.tokens()[0][0, 1] == pytest.approx(1 + 3 * 0.4 / (judged + 3)), "0.4, as three judged tokens"


def test_after_early_rejections_it_is_tried_again_soon_and_then_later_and_later() -> None:
    auto, drafted = AutoSchedule(1, 400, table(np.array([1.0, 1.25, 1.5, 2.0]))), []
    for step in range(120):
        auto._account.credit = 1.0  # can be afforded
        drafted += [step] if (width := auto.next()) else []
        auto.note(result(width, np.array([0])), None)
    apart = np.diff(drafted)
    assert drafted[0] == 0 and (apart[::2] == 1).all(), "two steps each: the first also catches up"
    assert apart[1] <= 10 and (np.diff(apart[1::2]) > 0).all() and apart[-2] > 30


def share_of_one(costs: LearnedCosts, true: np.ndarray) -> float:
    """Eight at once, 40 calls in a row: tokens a second by "auto", of those by one draft token, which pays."""
    auto = fixed = 0.0
    for call in range(40):
        of: dict[str, Any] = {"alphas": [0.6] * 8, "tokens": 32, "seed": call}
        auto += 1 / rate(AutoSchedule(8, 32, costs), true, **of)
        fixed += 1 / rate(FixedSchedule(1), true, **of)
        costs = costs.continued()
    return fixed / auto


def test_after_a_loss_what_pays_is_soon_drafted_again() -> None:
    """The last of eight gains late: a little credit, spent as soon as it is there, would always be too little."""
    true = np.array([1.0, 1.17, 1.65, 2.7])
    assert share_of_one(learned(true, ahead=-1.0), true) > 0.95


def test_a_cost_that_was_thought_too_high_is_found_by_tries() -> None:
    """A try after plain steps also catches up, which is no cost of its length: it has a second step, which tells."""
    true = np.array([1.0, 1.1, 1.65, 2.7])
    assumed = LearnedCosts.assumed(True, 8, None, 1, on_gpu=False)
    assert assumed.at(0)[1] == pytest.approx(1.295, rel=1e-3)
    assert share_of_one(assumed, true) > 0.95


def test_a_comparison_that_was_disturbed_does_not_end_drafting_for_good() -> None:
    """Its step took three times as long: a draft token looks far too dear, in that call and in some after it."""
    true, costs = np.array([1.0, 1.1, 1.65, 2.7]), LearnedCosts.assumed(True, 8, None, 1, on_gpu=False)
    for step, (choice, seconds) in enumerate([(1, true[1]), (0, true[0]), (1, 3 * true[1])]):
        costs.learn(step, choice, seconds)
    assert costs.at(3)[1] > 2 * true[1]
    for call in range(20):
        costs = costs.continued()
        rate(AutoSchedule(8, 32, costs), true, [0.6] * 8, tokens=32, seed=call)
    assert share_of_one(costs.continued(), true) > 0.95


@pytest.mark.parametrize(("batch", "credit", "drafts"), [(8, -0.2, 1), (8, -0.3, 0), (1, -0.2, 0)])
def test_several_go_on_drafting_a_little_in_debt(batch: int, credit: float, drafts: int) -> None:
    """The last of them is the last to gain by drafts, which have been paid for by then. One alone gains at once."""
    auto = AutoSchedule(batch, 64, table(np.array([1.0, 1.17, 9.0, 9.0])))
    auto._drafted, auto._account.credit = True, credit
    auto._choose()
    assert auto.next() == drafts


def test_nothing_is_lent_to_drafts_that_do_not_pay() -> None:
    """A try could otherwise be made in debt."""
    auto = AutoSchedule(8, 64, table(np.array([1.0, 1.3, 9.0, 9.0])))
    auto._drafted, auto._account.credit = True, -0.05
    auto._choose()
    assert auto._affordable == [True, False, False, False]


def test_what_is_too_dear_is_tried_again_so_seldom_that_it_costs_little() -> None:
    costs, spent = LearnedCosts.assumed(True, 4, None, 1, on_gpu=False), []
    for call in range(120):
        spent.append(4 / rate(AutoSchedule(4, 32, costs), DEAR, [0.4] * 4, tokens=32, noise=0.05, seed=call))
        costs = costs.continued()
    assert np.mean(spent[20:]) < 1.01  # of plain decoding's time


def test_it_comes_back_when_the_text_changes() -> None:
    auto = AutoSchedule(1, 500, table(DEAR))
    rate(auto, DEAR, [0.0], tokens=500)
    auto._account.left[:] = 2000
    assert rate(auto, DEAR, [0.95], tokens=2000) > 0.8 * (1 - 0.95**8) / 0.05 / 4.0


def test_the_sequence_that_needs_the_most_steps_decides() -> None:
    """Of four, one accepts all and the others nothing: rows pay where it is far behind them, and not before."""
    accepted = np.array([7, 0, 0, 0])
    for left, wanted in ((48, 0), (400, 7)):
        auto = AutoSchedule(4, 100, table(PACKED))
        for _ in range(10):
            auto.note(result(7, accepted), None)
        auto._account.left = np.array([left, 40, 40, 40])
        auto.note(result(7, accepted), None)
        assert auto.next() == wanted


@pytest.mark.parametrize("turn", [6, 12, 24])
@pytest.mark.parametrize("batch", [1, 8])
def test_what_was_gained_is_the_most_that_a_text_that_changes_can_cost(batch: int, turn: int) -> None:
    """Its drafts were right so far, and no longer are: the estimates need a while to see that, and a batch of dear rows
    has no time for it.
    """
    seconds = np.array([1.0, 1.3, 1.74, 2.65])
    ratios = [
        rate(AutoSchedule(batch, 48, table(seconds)), seconds, [0.9] * batch, 48, seed=seed, turn=turn) / batch
        for seed in range(40)
    ]
    assert np.quantile(ratios, 0.1) > 0.96  # of plain decoding, whose steps take 1


def test_what_a_draft_takes_to_catch_up_is_no_cost_of_its_length() -> None:
    """After plain steps a draft model reads what they wrote: that is paid for, and drafting on looks no dearer."""
    costs = learned(PACKED)
    auto = AutoSchedule(1, 9999, costs)
    for step in range(300):
        width, behind = int(step % 3 > 0), step % 3 == 1  # one plain step, two with a draft
        auto._account.credit = before = 5.0
        auto.note(result(width, np.zeros(1, np.int64)), PACKED[width] + 0.4 * behind)
        now = costs.at(step + 1)
        more = 0.5 * (now[1] / now[0] - 1) if behind else 0.0
        if step > 50:
            spent = now[width] / now[0] + more
            assert auto._account.credit == pytest.approx(before + 1.0075 - spent, abs=1e-3)
    assert now[1] / now[0] == pytest.approx(PACKED[1], rel=0.02)


@pytest.mark.parametrize("schedule", [AutoSchedule, ForesightSchedule])
def test_an_end_is_no_progress(schedule: type[AdaptiveSchedule]) -> None:
    """Plain decoding ends there, too: a sequence's room for more tokens is no time gained, in its batch or its call."""
    begun = learned(PACKED)
    ends, goes_on = (schedule(2, 900, begun) for _ in range(2))
    goes_on._account.left = np.array([900, 600])
    ends._account.left = np.array([900, 600])
    step = result(1, np.array([0, 1]))
    goes_on.note(step, None)
    ends.note(replace(step, active=np.array([False, True])), None)
    assert ends._account.credit == goes_on._account.credit
    assert ends._account.left.tolist() == [0, 598] and goes_on._account.left.tolist() == [899, 598]


@pytest.mark.parametrize("schedule", [AutoSchedule, ForesightSchedule])
def test_what_a_call_gained_or_lost_counts_in_the_next(schedule: type[AdaptiveSchedule]) -> None:
    """At most as much again as a first call may lose, or all of that; a table that is handed in has it."""

    def after(*steps: StepResult, of: CostTable | LearnedCosts) -> float:
        call = schedule(1, 48, of)
        for step in steps:
            call.note(step, None)
        return call._account.credit

    wrong, right = result(1, np.array([0])), result(7, np.array([7]))
    begun = learned(PACKED)
    first = after(of=begun)
    lost = after(wrong, of=begun)
    assert lost == pytest.approx(first - 0.1, abs=0.01)
    assert after(of=begun) == first, "a call's own steps do not change what it began with"
    second = begun.continued()
    assert after(of=second) == pytest.approx(lost) == after(of=second.table)
    assert after(*[wrong] * 3, of=second) == pytest.approx(first - 0.4, abs=0.04)
    assert after(of=second.continued()) == pytest.approx(first - 0.4, abs=0.04)
    assert after(*[wrong] * 30, of=second) < 0
    assert after(of=second.continued()) == pytest.approx(0)
    assert after(*[right] * 5, of=second) > 20
    assert after(of=second.continued()) == pytest.approx(2 * first)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_calls_after_one_another_do_better_than_first_calls(alpha: float) -> None:
    """Drafts that are never right cost less, and those that gain little are not given up early."""
    spent: dict[bool, list[float]] = {}
    for carried in (False, True):
        costs = learned(PACKED)
        for seed in range(200):
            costs = costs.continued() if carried else learned(PACKED)
            ratio = rate(AutoSchedule(1, 48, costs), PACKED, [alpha], tokens=48, seed=seed)
            spent.setdefault(carried, []).append(1 / ratio)
    assert np.mean(spent[True]) < 0.995 * np.mean(spent[False])


def test_no_length_is_compared_that_the_batch_cannot_afford() -> None:
    auto = AutoSchedule(1, 999, table(np.array([1.0, 1.1, 3.0, 9.0])))
    for step in range(30):
        auto.note(result(1, np.array([int(step % 5 > 1)])), None)  # three of five are accepted
    assert auto.next() == 1
    auto._comparisons.steps = auto._comparisons.after
    assert [auto.next() for auto._comparisons.made in range(4)] == [3, 0, 3, 0], "plain decoding is the next shorter"
    auto._account.credit = 0.0
    auto._choose()
    assert {auto.next() for auto._comparisons.made in range(3)} == {0}


@pytest.mark.long
def test_wrong_costs_are_found_out() -> None:
    """Begun as if rows were free, although they are dear, and the other way round."""
    for start, truth, alpha in ((PACKED, DEAR, 0.4), (DEAR, PACKED, 0.6)):
        plain, best = best_fixed(truth, [alpha])
        got = [
            rate(AutoSchedule(1, 5000, learned(start)), truth, [alpha], tokens=5000, noise=0.1, seed=seed)
            for seed in range(12)
        ]
        assert np.mean(got) > 0.9 * max(plain, best)


def test_a_busy_machine_does_not_mislead() -> None:
    """For a while all is slow, when drafts are verified more often: ratios of neighbouring steps do not show it."""
    rng, costs = np.random.default_rng(0), learned(PACKED)
    times: dict[int, list[float]] = {0: [], 7: []}
    for step in range(400):
        busy = step >= 200
        width = 7 if rng.random() < (0.8 if busy else 0.2) else 0
        choice = AUTO_DRAFT_LENGTHS.index(width)
        times[width].append((3.0 if busy else 1.0) * PACKED[choice])
        costs.learn(step, choice, times[width][-1])
    now = costs.at(400)
    assert now[3] / now[0] == pytest.approx(1.3, rel=0.03)
    assert np.mean(times[7]) / np.mean(times[0]) > 2


def learned_of_runs(unit: float, seed: int) -> float:
    """The learned cost of a draft token, of 1.1, from six runs of ten steps with and without: times vary by 13 %."""
    rng, costs = np.random.default_rng(seed), LearnedCosts.assumed(True, 1, None, 1, on_gpu=False)
    for step in range(60):
        choice = (step // 10 + 1) % 2
        costs.learn(step, choice, unit * float(PACKED[choice] * np.exp(0.13 * rng.standard_normal())))
    now = costs.at(60)
    return float(now[1] / now[0])


def test_all_steps_of_a_run_tell_what_they_cost() -> None:
    """Of pairs of neighbours there are five, whose mean is off by 0.13 * sqrt(2 / 5) = 0.08: too much to choose by."""
    errors = [np.log(learned_of_runs(1.0, seed) / 1.1) for seed in range(40)]
    assert np.std(errors) < 0.045 and abs(np.mean(errors)) < 0.02


@pytest.mark.parametrize("unit", [1e-3, 60.0])
def test_times_may_be_in_any_unit(unit: float) -> None:
    assert learned_of_runs(unit, 0) == pytest.approx(learned_of_runs(1.0, 0), rel=1e-9)


def test_a_position_that_is_never_reached_counts_as_the_average() -> None:
    drafts = Yield(1, 7)
    for _ in range(50):
        drafts.add(np.array([1]), np.array([True]))
    mean = drafts.tokens()[0]
    assert mean[0, 1] > 1.9 and mean[0, 2] < 2.2
    fresh = Yield(2, 7)
    for _ in range(50):
        fresh.add(np.array([7, 0]), np.array([False, False]))
    assert fresh.tokens()[0][1, 7] > 4, "a sequence without a history is taken for one like the others"


def test_what_cannot_go_on_has_not_failed() -> None:
    """The last draft tokens of a text: accepted, and there was no room for more."""
    auto = AutoSchedule(1, 99, table(PACKED))
    before = auto._yield.tokens()[0][0, 1]
    of_a_step = np.array([4]), np.array([3]), np.array([3]), np.array([False]), np.array([0])
    ended = StepResult(np.zeros((1, 8), np.int64), *of_a_step)
    auto.note(ended, None)
    assert auto._yield._judged[0].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert auto._yield.tokens()[0][0, 1] > before


def test_nominal_costs_are_those_of_the_rows_of_the_batch() -> None:
    """At batch 8 a draft of seven verifies 56 rows more: what pays for one sequence does not for eight."""
    assert CostTable.nominal(False).at(0) == pytest.approx([1, 1.05, 1.15, 1.35])
    assert CostTable.nominal(True, 8).at(0) == pytest.approx([1, 1.5, 2.5, 4.5])
    target, ids = TableRunner.random(), prompts(4, 4, vocab=23)[0]
    out = sk.generate(target, ids, drafter=sk.NgramDrafter(2), max_new_tokens=3, seeds=torch.tensor([1, 2]))
    assert out.stats.costs is not None
    assert out.stats.costs.at(0) == pytest.approx(CostTable.nominal(False, 2).at(0))


def test_a_runner_need_not_be_hashable_and_is_not_kept_alive() -> None:
    class Equal(TableRunner):
        def __eq__(self, other: object) -> bool:
            return True

    gc.collect()
    known = len(known_costs._known)
    target, draft = Equal(TableRunner.random().table), Equal(TableRunner.random(seed=1).table)
    for _ in range(2):
        sk.generate(target, prompts(4, vocab=23)[0], drafter=sk.ModelDrafter(draft), max_new_tokens=9)
    assert len(known_costs._known) == known + 1
    assert len(known_costs._known[known_costs.Identity(target)].costs) == 1
    sk.generate(target, prompts(4, vocab=23)[0], drafter=sk.ModelDrafter(Equal(draft.table)), max_new_tokens=9)
    assert len(known_costs._known[known_costs.Identity(target)].costs) == 1, "that draft is gone"
    del target
    gc.collect()
    assert len(known_costs._known) == known


def test_costs_are_learned_for_a_model_and_batch_and_learned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the steps alone: a first call, too, runs no others."""
    monkeypatch.setattr(LearnedCosts, "_NOTED", 0.0)  # so that all that is known is seen
    target, ids = TableRunner.random(), prompts(4, 4, vocab=23)[0]
    seen = []
    for batch in (2, 2, 1):
        target.forwards.clear()
        out = sk.generate(target, ids[:batch], drafter=sk.NgramDrafter(2), max_new_tokens=40, eos_token_id=[])
        assert len(target.forwards) == 1 + out.stats.target_forwards  # the first reads the prompts
        seen.append((out.stats.costs, len(known_costs._known[known_costs.Identity(target)].costs)))
    (first, second, alone), kept = zip(*seen, strict=True)
    assert kept == (1, 1, 2)
    assert first is not None and second is not None and alone is not None
    assert np.array_equal(first.seconds[0], LearnedCosts.assumed(False, 2, None, 1, on_gpu=False).at(0))
    assert len(first.steps) > 1 and np.allclose(second.seconds[0], first.seconds[-1])
    assert first.ahead == 0 != second.ahead
    assert [costs.compared for costs in (first, second, alone)] == [False, True, False]
    target.forwards.clear()
    plain = sk.generate(target, ids, drafter=sk.NoDrafter(), max_new_tokens=3, eos_token_id=[])
    assert plain.stats.costs is None and len(target.forwards) == 1 + 3


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("seconds", [PACKED, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("batch", [1, 4])
def test_first_calls_do_about_as_well_as_those_that_know_the_costs(batch: int, seconds: np.ndarray) -> None:
    """A little is lost at first where rows are dearer or cheaper than is assumed."""
    shares = []
    for seed in range(30):
        costs, known = LearnedCosts.assumed(True, batch, None, 1, on_gpu=False), learned(seconds)
        for call in range(3):
            got, wanted = (
                rate(AutoSchedule(batch, 64, of), seconds, [0.5] * batch, 64, noise=0.05, seed=100 * call + seed)
                for of in (costs, known)
            )
            costs, known = costs.continued(), known.continued()
            shares.append(got / wanted)
    first, second, third = np.array(shares).reshape(-1, 3).mean(0)
    assert min(first, second) > 0.93 and third > 0.97


def test_what_is_not_known_is_soon_compared_with_plain_steps() -> None:
    auto = AutoSchedule(1, 999, LearnedCosts.assumed(False, 1, None, 1, on_gpu=False))
    plain = []
    for step in range(70):
        width = auto.next()
        plain += [step] if width == 0 else []
        auto.note(result(width, np.array([width])), 1.0 + 0.05 * width)
    assert plain[:3] == [2, 7, 16], "after 2, 4 and 8 with drafts"
    assert auto._account._costs.at(70)[3] == pytest.approx(1.35, rel=0.02)
    known = AutoSchedule(1, 999, learned(PACKED))
    for _ in range(30):
        assert (width := known.next()) > 0
        known.note(result(width, np.array([width])), 1.0)


def test_one_ratio_tells_of_all_lengths_and_a_first_draft_of_none() -> None:
    """Rows that are dear are dear at every length; the first step of a length may have to compile something."""
    costs = LearnedCosts.assumed(False, 4, None, 1, on_gpu=False)
    before = costs.at(0)
    for step, (choice, seconds) in enumerate([(0, 1.0), (1, 60.0), (0, 1.0)]):
        costs.learn(step, choice, seconds)
    assert np.array_equal(costs.at(3), before)
    costs.learn(3, 1, 1.5)
    after = costs.at(4)
    assert before[1] / before[0] == pytest.approx(1 + 4 / 30) and 1.4 < after[1] / after[0] < 1.5
    assert (after[2:] / after[0] - 1 > 2.5 * (before[2:] / before[0] - 1)).all()


def test_rows_are_assumed_to_be_cheap_on_a_gpu() -> None:
    cheap, dear = (LearnedCosts.assumed(False, 64, None, 1, on_gpu=on_gpu).at(0) for on_gpu in (True, False))
    assert cheap[1] < 1.2 and 1.7 < dear[1] < 2, "twice the rows"
    assert LearnedCosts.assumed(True, 2, 8, 3, on_gpu=False).at(0) == pytest.approx([1, 1 + 14 / 28 + 0.06 * 3])


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_a_seed_reproduces(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By nominal costs, and with the tables by which a first call and the next one chose."""
    module, clock = sys.modules["specdec_kernels.decoding.generate"], np.random.default_rng(0).uniform(1, 1.1, 1000)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=iter(clock.cumsum()).__next__))
    target, ids = TableRunner.random(), torch.cat([prompts(9, 9, vocab=23)[0]] * 2, 1)
    how = {"drafter": sk.NgramDrafter(2), "acceptance": acceptance, "max_new_tokens": 60, "eos_token_id": []}
    seeds = torch.tensor([5, 6])
    first, second = (sk.generate(target, ids, seeds=seeds, **how) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert first.stats.costs is not None and len(first.stats.costs.steps) == 1

    for compared in (False, True):
        torch.manual_seed(0)
        measured = sk.generate(target, ids, **how)
        torch.manual_seed(0)
        drawn = torch.randint(2**63 - 1, (2,))
        costs = measured.stats.costs
        assert costs is not None and len(costs.steps) > 1, "costs were learned"
        assert costs.compared == compared
        again = sk.generate(target, ids, seeds=drawn, num_speculative_tokens=costs, **how)
        assert again.stats.num_steps == measured.stats.num_steps
        assert again.stats.num_drafted == measured.stats.num_drafted
        assert torch.equal(again.tokens, measured.tokens)


def test_two_calls_at_once_do_not_learn_the_same_costs() -> None:
    class Contended(dict[Any, Any]):
        """Another thread's call begins as soon as this one's costs are kept."""

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            super().__setitem__(key, learned(PACKED))

    target = TableRunner.random()
    known = Contended()
    known_costs._known[known_costs.Identity(target)] = known_costs._Kept(known)
    state = SimpleNamespace(batch_size=1, device=torch.device("cpu"))
    steps: Any = SimpleNamespace(state=state, runner=target, drafter=sk.NgramDrafter())
    for _ in range(2):  # assumed, and continued
        costs = known_costs.begin_costs(steps)
        assert costs not in known.values()


def test_few_row_counts_are_verified() -> None:
    """A draft is padded, so that weights packed for a row count are used and no kernel sees a new shape every step."""
    target = TableRunner.random()
    ids = torch.cat([prompts(9, 9, vocab=23)[0]] * 2, 1)
    sk.generate(
        target, ids, drafter=sk.NgramDrafter(3), num_speculative_tokens=5, max_new_tokens=60, acceptance="greedy"
    )
    assert set(target.forwards[1:]) <= {1, 6}
    target.forwards.clear()
    sk.generate(target, ids, drafter=sk.NgramDrafter(3), max_new_tokens=60)
    assert set(target.forwards[1:]) <= {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("steps", "seconds", "message"),
    [
        ([1], [[1.0, 1, 1, 1]], "steps must be"),
        ([0, 0], [[1.0, 1, 1, 1]] * 2, "steps must be"),
        ([0], [[1.0, 1, 1]], "seconds must be"),
        ([0], [[1.0, 1, 0.5, 1]], "seconds must be finite, > 0 and never fall"),
        ([0], [[0.0, 1, 1, 1]], "seconds must be finite, > 0 and never fall"),
    ],
)
def test_a_table_that_is_none_is_refused(steps: list[int], seconds: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^CostTable: {message}"):
        CostTable(np.array(steps), np.array(seconds))


@pytest.mark.parametrize("ahead", [np.nan, np.inf, "1", None])
def test_a_lead_that_is_no_finite_number_is_refused(ahead: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^CostTable: ahead must be"):
        CostTable(np.zeros(1, np.int64), PACKED[None], ahead)


@pytest.mark.parametrize("compared", [1, 0.0, "yes", None, np.True_])
def test_whether_steps_were_compared_is_true_or_false(compared: Any) -> None:
    with pytest.raises(TypeError, match=r"^CostTable: compared must be"):
        CostTable(np.zeros(1, np.int64), PACKED[None], 0.0, compared)
