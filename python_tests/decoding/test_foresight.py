"""Adaptive lengths where drafters foresee: how much of a text was found again decides, and what came of that before."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, prompts, tiny
from python_tests.decoding.schedules import DEAR, PACKED, learned, result, table
from specdec_kernels.decoding import StepResult
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, CostTable
from specdec_kernels.decoding.foresight import ForesightSchedule, MatchYield

ROWS = {1: [1.0, 1.02, 1.05, 1.13], 4: [1.0, 1.2, 1.33, 1.75], 8: [1.0, 1.3, 1.68, 2.6]}
"""What steps with 0, 1, 3 and 7 draft tokens took in the loop of examples/own_loop.py, by batch size."""


def schedule(seconds: np.ndarray | list[float], batch: int = 1, tokens: int = 99) -> ForesightSchedule:
    """One that is ahead, and can afford what seems worth it."""
    auto = ForesightSchedule(batch, tokens, table(np.asarray(seconds)))
    auto._account.credit = 2.0
    return auto


def foreseen(*matched: int, token: int = 5) -> sk.Foresight:
    """Of each sequence so much was found again, and is followed by `token`; 0: nothing was."""
    found = np.array(matched)
    return sk.Foresight(np.where(found > 0, token, -1), found)


def plain_step(tokens: list[int]) -> StepResult:
    step = result(0, np.zeros(len(tokens), np.int64))
    step.tokens[:, 0] = tokens
    return step


def test_a_long_match_is_drafted_from_at_once_and_a_short_one_is_not() -> None:
    auto, chosen = schedule([1.0, 1.2, 1.4, 1.9]), []
    for matched in (0, 1, 8, 0):
        auto.look(foreseen(matched))
        chosen.append(auto.next())
    assert chosen == [0, 0, 7, 0]
    cheap = schedule(ROWS[1])
    cheap.look(foreseen(1))
    assert cheap.next() > 0
    two = schedule([1.0, 1.2, 1.4, 1.9], batch=2)
    two.look(sk.Foresight(np.array([5, -1]), np.array([1, 8])))
    assert two.next() == 0, "what was found may not follow"


def test_a_gain_too_small_to_be_sure_of_is_left() -> None:
    """The first token after a match of two is taken to be right 0.34 of the time."""
    for cost, wanted in ((1.33, 0), (1.31, 1)):
        auto = schedule([1.0, cost, 9.0, 9.0])
        auto.look(foreseen(2))
        assert auto.next() == wanted


@pytest.mark.parametrize("right", [False, True])
def test_plain_steps_judge_the_lookup(right: bool) -> None:
    auto = schedule([1.0, 1.4, 9.0, 9.0])
    for _ in range(12):
        auto.look(foreseen(2))
        auto.note(plain_step([5 if right else 6]), None)
    auto.look(foreseen(2))
    assert auto.next() == right
    auto.look(foreseen(1))
    assert auto.next() == 0, "of other matches nothing was learned"


def test_an_outcome_counts_once() -> None:
    """Of a draft that was verified: what was accepted, and that the next token was not; of what ended, no failure."""

    def learned(step: StepResult, matched: int) -> list[list[float]]:
        auto = schedule(PACKED)
        auto.look(foreseen(matched))
        auto._yield._counts = [[0.0] * 4 for _ in MatchYield.LEAST]  # without what is assumed
        auto.note(step, None)
        others = [counts for kind, counts in enumerate(auto._yield._counts) if kind != matched]
        assert not np.any(others)
        first, first_judged, later, judged = auto._yield._counts[3]  # of matches of three
        return [[first, later], [first_judged, judged]]

    assert learned(result(7, np.array([2])), 3) == [[1, 1], [1, 2]]
    assert learned(result(7, np.array([0])), 3) == [[0, 0], [1, 0]]
    assert learned(result(3, np.array([3])), 3) == [[1, 2], [1, 2]]
    assert learned(plain_step([5]), 3) == [[1, 0], [1, 0]]
    assert learned(plain_step([6]), 3) == [[0, 0], [1, 0]]
    assert learned(plain_step([5]), 2) == learned(plain_step([5]), 0) == [[0, 0], [0, 0]]
    ended = replace(result(3, np.array([2])), num_drafted=np.array([2]), active=np.array([False]))
    assert learned(ended, 3) == [[1, 1], [1, 1]]
    idle = replace(plain_step([6]), num_tokens=np.array([0]))
    assert learned(idle, 3) == [[0, 0], [0, 0]]


def test_what_is_long_past_is_forgotten() -> None:
    drafts = MatchYield()

    def add(matched: int, accepted: int) -> None:
        drafts.add(matched, accepted, accepted == 0)

    for accepted in (0,) * 300 + (7,) * 20:
        add(8, accepted)
    assert drafts.expected(np.array([8]))[0, 1] > 0.26
    assert max(drafts._counts[-1]) < 1 / (1 - 0.985)
    for _ in range(300):
        add(1, 7)
    assert drafts.expected(np.array([1]))[0, 1] > 0.98, "nor does what was assumed at first count for ever"


def test_a_draft_is_worth_what_it_brings_the_last_sequence() -> None:
    """Rows for all four are paid for by the one that is behind."""
    chosen = []
    for matched in ((8, 0, 0, 0), (0, 8, 8, 8)):
        auto = schedule(PACKED, batch=4)
        auto._account.left = np.array([40, 4, 4, 4])
        auto.look(foreseen(*matched))
        chosen.append(auto.next())
    assert chosen == [7, 0]


def test_the_sequence_of_which_little_was_foreseen_is_taken_for_the_last() -> None:
    chosen = []
    for matched in ((8, 0), (0, 8)):
        auto = schedule([1.0, 1.5, 2.2, 2.9], batch=2)
        for _ in range(20):
            auto.look(foreseen(1, 1))
            auto.note(plain_step([5, 6]), None)
        auto.look(foreseen(*matched))
        chosen.append(auto.next())
    assert chosen[0] == 0 < chosen[1]


def test_trust_is_earned_and_does_not_last_to_the_end() -> None:
    """What is worth its rows, but cannot be paid for by what the batch is ahead, is drafted once enough were judged,
    and not shortly before the end, where it could not be earned again.
    """

    def drafted(steps: int, right: bool, left: int) -> bool:
        auto = ForesightSchedule(1, 99, table(np.array([1.0, 1.3, 1.5, 1.8])))
        for _ in range(steps):
            auto.look(foreseen(8))
            auto.note(plain_step([5 if right else 6]), None)
        auto._account.credit = 0.1
        auto._account.left[:] = left
        auto.look(foreseen(8))
        return auto.next() > 0

    assert not drafted(0, True, 99) and drafted(20, True, 99)
    assert not drafted(20, False, 99) and not drafted(20, True, 4)


def test_what_no_match_would_be_worth_is_seen_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on all matches together, by which most looks end early, changes no choice."""
    random = np.random.default_rng(0)
    chosen = []
    for _ in range(400):
        auto = schedule([1.0, 1.1, 1.4, 2.0], batch=4)
        for _ in range(random.integers(9)):
            auto.look(foreseen(*random.integers(9, size=4)))
            auto.note(result(auto.next(), random.integers(auto.next() + 1, size=4)), None)
        auto._account.credit = random.uniform(-1, 2)
        auto._account.left = random.integers(1, 40, size=4)
        found, choices = foreseen(*random.integers(-1, 9, size=4)), []
        for bound in (MatchYield.at_most, lambda yields, matched: [99.0] * len(AUTO_DRAFT_LENGTHS)):
            with monkeypatch.context() as patch:
                patch.setattr(MatchYield, "at_most", bound)
                auto.look(found)
            choices.append(auto.next())
        assert choices[0] == choices[1]
        chosen.append(choices[0])
    assert set(chosen) == {0, 1, 3, 7} and chosen.count(0) > 100


def test_no_more_counts_than_is_left() -> None:
    auto = schedule([1.0, 1.9, 2.2, 2.5])
    for left, wanted in ((99, 7), (2, 0)):  # a lone token is not worth its row
        auto._account.left[:] = left
        auto.look(foreseen(8))
        assert auto.next() == wanted


def rate(
    auto: ForesightSchedule | int, seconds: np.ndarray, first: np.ndarray, later: float, batch: int, tokens: int,
    seed: int,
) -> float:  # fmt: skip
    """Tokens a second of a batch, by plain decoding's: matches come in runs, of 0 to 7 tokens found again, and the
    tokens read on from them are accepted with probability ``first[matched]``, those that follow with `later`.
    """
    rng, left, spent = np.random.default_rng(seed), np.full(batch, tokens), 0.0
    matched = np.zeros(batch, np.int64)
    while left.any():
        right = np.cumprod(rng.random((batch, 7)) < np.hstack([first[matched, None], np.full((batch, 6), later)]), 1)
        limits = np.where(matched > 0, np.maximum(left - 1, 0), 0)
        if isinstance(auto, ForesightSchedule):
            auto.look(sk.Foresight(np.where(limits > 0, 5, -1), matched))
            wanted = auto.next()
        else:
            wanted = auto
        drafted = np.minimum(limits, wanted)
        width = wanted if drafted.any() else 0
        accepted = np.minimum(right.sum(1), drafted)
        emitted = np.where(left > 0, accepted + 1, 0)
        time = float(seconds[AUTO_DRAFT_LENGTHS.index(width)])
        time *= float(np.exp(0.03 * rng.standard_normal()))
        spent, active = spent + time, left > emitted
        step = np.where(right[:, :1] > 0, 5, 6) * np.ones((1, width + 1), np.int64)
        if isinstance(auto, ForesightSchedule):
            none = np.zeros(batch, np.int64)
            auto.note(StepResult(step, emitted, np.where(left > 0, drafted, -1), accepted, active, none), time)
        # where the token was right, the match grows by what was emitted; else it begins anew, or there is none
        fresh = (rng.random(batch) < 0.6) * (1 + rng.geometric(0.7, batch)).clip(max=7)
        matched = np.where(right[:, 0] > 0, np.minimum(matched + emitted, 7), fresh)
        left = left - emitted
    return tokens / spent


TEXTS = {
    "assumed": (np.array([0, 0.17, 0.42, 0.57, 0.68, 0.78, 0.78, 0.78]), 0.7),
    "copied": (np.array([0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.96, 0.97]), 0.93),
    "never right": (np.zeros(8), 0.5),
    "long matches mislead": (np.array([0, 0.3, 0.3, 0.3, 0.2, 0.1, 0.05, 0.05]), 0.3),
}


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", ROWS)
def test_near_the_best_fixed_length_and_never_much_below_plain(batch: int, text: str) -> None:
    seconds, seeds = np.array(ROWS[batch]), range(30)
    got = [
        rate(ForesightSchedule(batch, 48, learned(seconds)), seconds, *TEXTS[text], batch, 48, seed) for seed in seeds
    ]
    fixed = [
        np.mean([rate(length, seconds, *TEXTS[text], batch, 48, seed) for seed in seeds])
        for length in AUTO_DRAFT_LENGTHS
    ]
    alone = 0.95 if text == "long matches mislead" else 0.96  # trust must first be lost there
    assert np.mean(got) > (alone if batch == 1 else 0.8) * max(fixed)
    assert np.mean(got) > 0.975 * fixed[0] and np.quantile(got, 0.1) > 0.94


@pytest.mark.long
def test_wrong_costs_are_found_out() -> None:
    """Begun as if rows were dear, although they cost little, and the other way round."""
    for start, truth in ((DEAR, PACKED), (PACKED, DEAR)):
        got, best = [], []
        for seed in range(8):
            auto = ForesightSchedule(1, 2000, learned(start))
            got.append(rate(auto, truth, *TEXTS["copied"], 1, 2000, seed))
            best.append(max(rate(length, truth, *TEXTS["copied"], 1, 2000, seed) for length in AUTO_DRAFT_LENGTHS))
        assert np.mean(got) > 0.9 * np.mean(best)


def test_a_lookup_is_judged_without_being_verified() -> None:
    """Rows are so dear that no step drafts; that the text repeats itself is seen all the same, and used when they are
    not.
    """
    cycle = torch.arange(23).roll(-1)
    logits = torch.full((23, 23, 23), -30.0)
    logits[:, torch.arange(23), cycle] = 30.0
    target = TableRunner(logits)
    ids = torch.arange(23).repeat(2)[None, :30]
    dear = CostTable(np.array([0, 40]), np.array([[1.0, 50, 50, 50], [1.0, 1.62, 50, 50]]))
    seen: list[int] = []
    sk.generate(
        target, ids, drafter=sk.NgramDrafter(2), num_speculative_tokens=dear, max_new_tokens=60, acceptance="greedy",
        eos_token_id=[], streamer=lambda rows: seen.append(len(rows[0])),
    )  # fmt: skip
    assert seen[:40] == [1] * 40, "nothing was verified while it was dear"
    assert seen[40] == 2, "with the acceptance that is assumed at first, a token would not pay"


def test_a_drafter_that_foresees_is_asked_before_every_step() -> None:
    asked = 0

    class Counted(sk.NgramDrafter):
        def foresee(self, state: sk.decoding.DecodingState) -> sk.Foresight:
            nonlocal asked
            asked += 1
            return super().foresee(state)

    class Short(sk.NgramDrafter):
        def foresee(self, state: sk.decoding.DecodingState) -> sk.Foresight:
            return foreseen(1)

    class Silent(sk.NgramDrafter):
        def foresee(self, state: sk.decoding.DecodingState) -> sk.Foresight | None:  # type: ignore[override]
            return super().foresee(state) if state.host_lengths.max() < 25 else None

    target, ids = TableRunner.random(), torch.cat([prompts(9, 9, vocab=23)[0]] * 2, 1)
    out = sk.generate(target, ids, drafter=Counted(2), max_new_tokens=30, seeds=torch.tensor([1, 2]))
    assert asked == out.stats.target_forwards + 1
    asked = 0
    sk.generate(target, ids, drafter=Counted(2), max_new_tokens=30, num_speculative_tokens=3)
    assert asked == 0
    with pytest.raises(ValueError, match=r"^generate: Short.foresee must give \[batch=2\] tokens, got \[1\]"):
        sk.generate(target, ids, drafter=Short(2), max_new_tokens=30)
    with pytest.raises(TypeError, match=r"^generate: Silent.foresee must give a Foresight at every step .* NoneType"):
        sk.generate(target, ids, drafter=Silent(2), max_new_tokens=30)
    # What a law accepts is not what a plain step emits.
    sk.generate(
        target, ids, drafter=Counted(2), max_new_tokens=30, target_law=sk.laws.Lossy(0.4),
        num_speculative_tokens=table(np.array([1.0, 1.1, 1.2, 1.4])),
    )  # fmt: skip
    assert asked == 0

    class Tree(sk.NgramTreeDrafter):
        foresee = Mock(side_effect=AssertionError)

    sk.generate(
        tiny("llama"), ids, drafter=Tree(), max_new_tokens=9, acceptance="typical",
        num_speculative_tokens=table(np.array([1.0, 2.0])),
    )  # fmt: skip
