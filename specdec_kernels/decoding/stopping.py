"""Ending sequences where the caller's `stop` says so."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..types import PLACEHOLDER_TOKEN_ID
from .state import DecodingState, StepResult


class Stopper:
    """Cuts what steps emitted where the caller's `stop` says that a sequence ends.

    Parameters
    ----------
    stop : callable or None
        See `generate`; None: nothing is cut.
    batch_size : int
    """

    def __init__(self, stop: Callable[[list[np.ndarray]], Sequence[int | None]] | None, batch_size: int) -> None:
        self._stop = stop
        self._ended = np.zeros(batch_size, dtype=bool)

    def cut(self, state: DecodingState, result: StepResult) -> StepResult:
        """`result` without the tokens past an end; the sequences of `state` that have ended go idle.

        Raises
        ------
        ValueError, TypeError
            `stop` keeps more tokens than there are, answers for another number of sequences, or with something else.
        """
        if self._stop is None:
            return result
        # A step that was launched before the host knew of an end has gone on past it.
        given = np.where(self._ended, 0, result.num_tokens)
        said = self._stop([row[:n] for row, n in zip(result.tokens, given, strict=True)])
        of_numpy = isinstance(said, np.ndarray) and said.ndim > 0
        if not of_numpy and (not isinstance(said, Sequence) or isinstance(said, (str, bytes))):
            raise TypeError(f"generate: stop must give a list of answers, got {type(said).__name__}")
        answers = [None if answer is None else _count(answer) for answer in said]
        if len(answers) != len(given):
            raise ValueError(f"generate: stop must answer for {len(given)} sequences, got {len(answers)} answers")
        kept = given.copy()
        for b, answer in enumerate(answers):
            if answer is not None and not self._ended[b]:
                if not 0 <= answer <= given[b]:
                    raise ValueError(f"generate: stop must keep 0 … {given[b]} tokens of sequence {b}, got {answer}")
                kept[b], self._ended[b] = answer, True
        tokens = np.where(np.arange(result.tokens.shape[1]) < kept[:, None], result.tokens, PLACEHOLDER_TOKEN_ID)
        idle = self._ended & (given == 0)
        active = result.active & ~self._ended
        if (active != result.active).any():
            state.active &= torch.from_numpy(~self._ended).to(state.device, non_blocking=True)
            state.host_active = active
        return replace(
            result,
            tokens=tokens,
            num_tokens=kept,
            num_drafted=np.where(idle, -1, result.num_drafted),
            num_accepted=np.minimum(result.num_accepted, kept),
            active=active,
            status=np.where(idle, 0, result.status),
        )


def _count(answer: Any) -> int:
    try:
        if not isinstance(answer, (bool, np.bool_)):
            return operator.index(answer)
    except TypeError:
        pass
    raise TypeError(f"generate: stop must answer with integers or None, got {type(answer).__name__}")
