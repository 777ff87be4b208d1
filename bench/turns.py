"""Calls of `generate` that take their steps in turn, so that a slowdown of the machine affects all of them alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from specdec_kernels import GenerationOutput


@dataclass(frozen=True)
class Timed:
    """The output of a call, and the seconds that its decoding took."""

    output: GenerationOutput
    seconds: float


Call = Callable[..., GenerationOutput]
"""To be called with the ``streamer`` that `generate` is to have."""


def one_by_one(calls: Sequence[Call]) -> list[Timed]:
    """One call after the other."""
    outputs = [call(streamer=None) for call in calls]
    return [Timed(output, output.stats.seconds_decode) for output in outputs]


class InTurns(AbstractContextManager["InTurns"]):
    """The same calls side by side: each in a thread of its own, but never two at once.

    After each step the call with the fewest tokens goes on, so that they go through the text together. Time spent
    waiting for the others is not counted. Calls must not share a drafter or a `Runner`. One that fails stops no other;
    its error is raised when all are over.

    Parameters
    ----------
    most : int
        The most calls: each must have a thread, or the turn would go to one that is still waiting for a thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads = ThreadPoolExecutor(most, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))

    def __call__(self, calls: Sequence[Call]) -> list[Timed]:
        if len(calls) > self._most:
            raise ValueError(f"InTurns: calls must be at most {self._most}, got {len(calls)}")
        turns = _Turns(len(calls))
        futures = [self._threads.submit(turns.take, number, call) for number, call in enumerate(calls)]
        wait(futures)
        return [future.result() for future in futures]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()


class _Turns:
    """Whose turn it is."""

    def __init__(self, calls: int) -> None:
        self._tokens = dict.fromkeys(range(calls), 0)  # of calls that are not over
        self._go = [threading.Semaphore(0) for _ in range(calls)]
        self._go[0].release()

    def take(self, number: int, call: Call) -> Timed:
        """Make a call in turns with the others."""
        waited = 0.0

        def step(tokens: list[Any]) -> None:
            nonlocal waited
            self._tokens[number] += sum(map(len, tokens))
            began = time.perf_counter()
            self._pass_on()
            self._go[number].acquire()
            waited += time.perf_counter() - began

        self._go[number].acquire()
        try:
            output = call(streamer=step)
        finally:
            del self._tokens[number]
            self._pass_on()
        return Timed(output, output.stats.seconds_decode - waited)

    def _pass_on(self) -> None:
        if self._tokens:
            self._go[min(self._tokens, key=self._tokens.__getitem__)].release()
