"""A target that gives logits of some rows alone reads the last part of the prompts in the first step."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.fake_cuda import FakeCuda, both, same
from python_tests.decoding.models import CapturableTable, ReadingTable, RepeatLast, TableRunner, near_table, prompts
from python_tests.decoding.tree_models import Fixed, TreeTable
from specdec_kernels.decoding import schedule
from specdec_kernels.decoding.costs import LearnedCosts
from specdec_kernels.drafters import Drafter

LOOP = importlib.import_module("specdec_kernels.decoding.generate")  # the name is also the function's
TABLE = TableRunner.random().table
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": sk.NoDrafter,
    "ngram": lambda: sk.NgramDrafter(2),
    "model": lambda: sk.ModelDrafter(near_table(TableRunner(TABLE))),
    "repeat last": RepeatLast,
}


def run(target: TableRunner, *lengths: int, drafter: Drafter | None = None, **more: Any) -> sk.GenerationOutput:
    ids, mask = prompts(*lengths, vocab=23)
    given: dict[str, Any] = {"num_speculative_tokens": 3, "max_new_tokens": 20, "eos_token_id": [5], **more}
    return sk.generate(
        target, ids, attention_mask=mask, drafter=drafter or sk.NoDrafter(), seeds=torch.arange(len(lengths)), **given
    )


def equal(reads: sk.GenerationOutput, apart: sk.GenerationOutput) -> None:
    """In all but what counts as prefill."""
    same(replace(reads, stats=replace(reads.stats, num_tokens_decode=apart.stats.num_tokens_decode)), apart)


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("lengths", [(7,), (1,), (6, 6), (2, 9, 1, 4)], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_it_is_one_forward_less_and_the_same_tokens(name: str, lengths: tuple[int, ...], acceptance: str) -> None:
    reads, apart = ReadingTable(TABLE), TableRunner(TABLE)
    found = run(reads, *lengths, drafter=DRAFTERS[name](), acceptance=acceptance)
    expected = run(apart, *lengths, drafter=DRAFTERS[name](), acceptance=acceptance)
    equal(found, expected)
    if lengths == (1,):  # there is nothing to read
        assert reads.forwards == apart.forwards
    else:
        (prompt, first), rest = apart.forwards[:2], apart.forwards[2:]
        assert reads.forwards == [prompt + first, *rest]


@pytest.mark.parametrize(
    ("lengths", "pieces", "first"),
    [
        ((5,), [], 5), ((6,), [4], 2), ((9,), [4], 5), ((10, 9), [4, 4], 2), ((10, 8), [4, 4, 1], 1),
        ((3, 14), [4, 4, 4, 1], 1),
    ],
)  # fmt: skip
def test_of_long_prompts_it_is_the_last_piece(
    lengths: tuple[int, ...], pieces: list[int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all of them reach into it."""
    monkeypatch.setattr("specdec_kernels.decoding.runner.PREFILL_ROWS", 4)
    reads = ReadingTable(TABLE)
    equal(run(reads, *lengths), run(TableRunner(TABLE), *lengths))
    assert reads.forwards[: len(pieces) + 2] == [*pieces, first, 1]


def test_a_tree_is_verified_apart() -> None:
    class Reading(TreeTable, ReadingTable):
        pass

    reads, apart = Reading(TABLE), TreeTable(TABLE)
    tree = sk.DraftTree.cartesian([2])
    found, expected = (run(each, 7, drafter=Fixed(tree, [1, 2])) for each in (reads, apart))
    same(found, expected)
    assert reads.forwards == apart.forwards


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_steps_that_are_captured(cuda: FakeCuda, drafter: str) -> None:
    target = CapturableTable(TABLE)
    options: dict[str, Any] = {
        "drafter": DRAFTERS[drafter]() if drafter != "model" else sk.ModelDrafter(CapturableTable(TABLE)),
        "seeds": torch.arange(2), "max_new_tokens": 40, "num_speculative_tokens": 3, "eos_token_id": [],
    }  # fmt: skip
    ids, mask = prompts(8, 5, vocab=23)
    captured, ordinary = both(target, ids, attention_mask=mask, **options)
    same(captured, ordinary)
    assert target.forwards[0] == 8 + (0 if drafter == "none" else 3) and cuda.captures() > 0


def test_times_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that a forward moves on by its rows, and each look at it by next to nothing."""
    reads, notes = ReadingTable(TABLE), list[float | None]()

    class Noting(schedule.FixedSchedule):
        def note(self, result: Any, seconds: float | None) -> None:
            notes.append(seconds)

    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(sum(reads.forwards)) + 2.0**-20 * next(looks))
    monkeypatch.setattr(LOOP, "time", clock)
    monkeypatch.setattr(LOOP, "FixedSchedule", Noting)
    stats = run(reads, 6, 6, drafter=RepeatLast(), max_new_tokens=9, eos_token_id=[]).stats
    steps = reads.forwards[1:]
    assert (round(stats.seconds_prefill, 3), round(stats.seconds_decode, 3)) == (6 + 3, sum(steps))
    assert [note and round(note, 3) for note in notes] == [None, *steps]
    assert stats.target_forwards == len(notes)  # a step with the prompts teaches nothing
    assert stats.num_tokens == 18 and 2 <= stats.num_tokens - stats.num_tokens_decode <= 8
    assert stats.tokens_per_second == stats.num_tokens_decode / stats.seconds_decode
    once = run(reads, 6, max_new_tokens=1).stats
    assert once.num_tokens == 1 and once.num_tokens_decode == 0 and once.tokens_per_second != once.tokens_per_second


def test_it_is_told_which_tokens_are_a_sequence_s_own() -> None:
    class Told(ReadingTable):
        def expect(self, real: Callable[[], Tensor]) -> None:
            told.append(real())

    told = list[Tensor]()
    run(Told(TABLE), 2, 4, drafter=RepeatLast(), max_new_tokens=3)
    assert told[0].int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
    ]  # two draft tokens after each prompt


def test_a_step_that_teaches_nothing_is_no_first_one() -> None:
    """The first timed step of a length is not learned from, and a step with the prompts is not timed."""
    costs = LearnedCosts.assumed(False, 1, None, 1, False)
    for step, (choice, seconds) in enumerate([(1, None), (0, 1.0), (1, 5.0), (0, 1.0)]):
        costs.learn(step, choice, seconds)
    assert len(costs.table.steps) == 1
    costs.learn(4, 1, 5.0)
    assert len(costs.table.steps) == 2


def test_no_runner_needs_it() -> None:
    with pytest.raises(NotImplementedError, match="table gives no logits of some rows alone"):
        TableRunner(TABLE).forward_rows(Tensor(), Tensor(), 0, Tensor())
