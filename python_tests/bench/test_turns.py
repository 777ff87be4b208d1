"""Calls that take their steps in turn: outputs, order, times and errors are each call's own."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench.turns import InTurns, one_by_one
from python_tests.decoding.models import TableRunner, prompts


class Watched(TableRunner):
    """Says whose forward it is, and notices another's beside it; does what else it is told to."""

    def __init__(
        self, name: str, seen: list[str], busy: threading.Lock, besides: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(TableRunner.random(5, spread=5.0).table)
        self.called, self.seen, self.busy, self.besides = name, seen, busy, besides

    def forward(self, *arguments: Any, **options: Any) -> Any:
        assert self.busy.acquire(blocking=False), "two at once"
        try:
            self.seen.append(self.called)
            self.besides()
            return super().forward(*arguments, **options)
        finally:
            self.busy.release()


def call(runner: sk.Runner, tokens: int, drafter: Any = None, width: int = 0) -> Any:
    ids, mask = prompts(4, 6, vocab=5)
    return partial(
        sk.generate, runner, ids, attention_mask=mask, drafter=drafter or sk.NoDrafter(), max_new_tokens=tokens,
        num_speculative_tokens=width, sampling=sk.SamplingParams(0.0), seeds=torch.arange(len(ids)), eos_token_id=(),
    )  # fmt: skip


def test_whoever_has_fewest_tokens_goes_on() -> None:
    seen: list[str] = []
    busy = threading.Lock()
    calls = [call(Watched(name, seen, busy), 40) for name in "ab"]
    calls.append(call(Watched("c", seen, busy), 40, sk.NgramDrafter(), 3))
    with InTurns(3) as in_turns:
        timed = in_turns(calls)
    alone = one_by_one(calls)
    for both in zip(timed, alone, strict=True):
        assert torch.equal(both[0].output.tokens, both[1].output.tokens)
    text = "".join(seen[: sum(t.output.stats.target_forwards for t in timed) + 3])  # each has a prefill
    assert text.startswith("aabbcc") and set(text) == set("abc")
    plain = [name for name in text[6:] if name != "c"]
    assert plain == ["a", "b"] * 39, "step by step, as each gives a token"
    assert text.count("c") < text.count("a")


def test_what_a_call_waits_for_the_others_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on only while the slow model works: a second in each forward, the prompt's included."""
    busy, clock = threading.Lock(), SimpleNamespace(now=0.0)
    for module in ("bench.turns", "specdec_kernels.decoding.generate"):
        reads = SimpleNamespace(perf_counter=lambda: clock.now)
        monkeypatch.setattr(importlib.import_module(module), "time", reads)

    def work() -> None:
        clock.now += 1

    with InTurns(2) as in_turns:
        quick, slow = in_turns([call(Watched("a", [], busy), 6), call(Watched("b", [], busy, work), 6)])
    assert (quick.seconds, slow.seconds) == (0, 6)
    assert quick.output.stats.seconds_decode >= 4, "it did wait"


def test_a_call_that_fails_stops_no_other_and_is_told() -> None:
    class Failing(Watched):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            if len(self.seen) > 3:
                raise RuntimeError("out of luck")
            return super().forward(*arguments, **options)

    seen: list[str] = []
    busy = threading.Lock()
    calls = [call(Failing("a", [], busy), 9), call(Watched("b", seen, busy), 9)]
    with InTurns(2) as in_turns:
        with pytest.raises(RuntimeError, match="out of luck"):
            in_turns(calls)
        assert len(seen) == 1 + 9
        (again,) = in_turns([call(Watched("c", seen, busy), 2)])
    assert again.output.stats.num_tokens == 2 * 2


def test_no_more_calls_than_threads() -> None:
    runner = TableRunner.random(5)
    with InTurns(1) as in_turns, pytest.raises(ValueError, match="^InTurns: calls must be at most 1, got 2"):
        in_turns([call(runner, 2), call(runner, 2)])
