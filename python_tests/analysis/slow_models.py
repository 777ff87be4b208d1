"""Models and drafters that take a time of their own on a clock that is told how late it is."""

from __future__ import annotations

from typing import Any

import torch

from python_tests.decoding.models import TableRunner
from specdec_kernels.analysis.watching import Unlikely
from specdec_kernels.decoding import DecodingState, StepResult
from specdec_kernels.drafters import Draft


class Ticking:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class SlowRunner(TableRunner):
    """A forward takes 10 seconds and one more a row."""

    clock: Ticking

    def forward(self, tokens: torch.Tensor, *rest: Any, **named: Any) -> Any:
        self.clock.time += 10 + tokens.shape[1]
        return super().forward(tokens, *rest, **named)


class SlowDrafter(Unlikely):
    """Drafting takes 3 seconds, taking note of a step one."""

    clock: Ticking

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        self.clock.time += 3
        return super().propose(state, num_tokens)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        self.clock.time += 1
