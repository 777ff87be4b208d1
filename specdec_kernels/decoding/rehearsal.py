"""Measures what drafting and verifying cost on this machine, before the first step."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch

from ..drafters.base import TreeDrafter
from .costs import LearnedCosts
from .launching import Steps

_known: dict[Identity, dict[Any, LearnedCosts]] = {}
_REPEATS = 2


class Identity:
    """Any object as a key, equal only for the same object. The object need not be hashable and is not kept alive."""

    def __init__(self, of: object) -> None:
        self._of, self._id = weakref.ref(of), id(of)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (self is other or (self._of() is other._of() is not None))


def begin_costs(steps: Steps, lengths: tuple[int, ...]) -> LearnedCosts:
    """The costs of drafts of `lengths` that a call begins with: as the last of its kind left them, or as rehearsed.

    Kept with the target, for each drafter, batch size, number of threads and way of launching steps (models in their
    present condition: `Runner.costs_as`).
    """
    state, drafter = steps.state, steps.drafter
    model, condition = steps.runner.costs_as()
    draft = draft_key = None
    if drafter.runner is not None:
        draft, draft_condition = drafter.runner.costs_as()
        draft_key = Identity(draft), draft_condition
    size = (lengths, drafter.num_nodes if isinstance(drafter, TreeDrafter) else None)
    key = (type(drafter), size, draft_key, state.batch_size, torch.get_num_threads(), condition, type(steps))
    target = Identity(model)
    if target not in _known:
        weakref.finalize(model, _known.pop, target, None)
    known = _known.setdefault(target, {})
    if draft is not None and key not in known:
        weakref.finalize(draft, known.pop, key, None)
    before = known.get(key)
    costs = LearnedCosts(_rehearse(steps, lengths), 1 / _REPEATS) if before is None else before.continued()
    known[key] = costs  # a call that begins at the same time uses its own costs, and goes on with them
    return costs


def _rehearse(steps: Steps, lengths: tuple[int, ...]) -> np.ndarray:
    """Time drafting and verifying each of `lengths`, on the real models, at the batch and context at hand.

    Writes only rows that the first step writes again.
    """
    for length in lengths:
        for _ in range(steps.rehearsals):
            steps.rehearse(length)
    seconds = np.full((_REPEATS, len(lengths)), np.inf)
    for repeat in range(_REPEATS):  # interleaved, so that a passing disturbance does not hit one length alone
        for i, length in enumerate(lengths):
            synchronize(steps.state.device)
            began = time.perf_counter()
            steps.rehearse(length)
            synchronize(steps.state.device)
            seconds[repeat, i] = time.perf_counter() - began
    return np.asarray(seconds.min(0))


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator to finish; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
