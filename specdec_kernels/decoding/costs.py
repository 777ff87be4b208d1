"""What drafting and verifying cost here, measured."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch

from .schedule import AUTO_DRAFT_LENGTHS, CostTable
from .steps import Steps

_measured: weakref.WeakKeyDictionary[Any, dict[Any, CostTable]] = weakref.WeakKeyDictionary()


def measure_costs(steps: Steps, repeats: int = 2) -> CostTable:
    """Time drafting and verifying each of `AUTO_DRAFT_LENGTHS`, on the real models, at the batch and context at hand.

    Writes only rows that the first step writes again. Measured once for target, drafter, batch size, number of threads
    and way of launching steps (models in their present condition: `Runner.costs_as`), and kept with the target.
    """
    state, drafter = steps.state, steps.drafter
    model, condition = steps.runner.costs_as()
    draft_key = None
    if drafter.runner is not None:
        draft, draft_condition = drafter.runner.costs_as()
        draft_key = weakref.ref(draft), draft_condition  # equal for the same model, without keeping it alive
    key = (type(drafter), draft_key, state.batch_size, torch.get_num_threads(), condition, type(steps))
    tables = _measured.setdefault(model, {})
    if key in tables:
        return tables[key]
    for length in AUTO_DRAFT_LENGTHS:
        for _ in range(steps.rehearsals):
            steps.rehearse(length)
    seconds = np.full((repeats, len(AUTO_DRAFT_LENGTHS)), np.inf)
    for repeat in range(repeats):  # interleaved, so that a passing disturbance does not hit one length alone
        for i, length in enumerate(AUTO_DRAFT_LENGTHS):
            synchronize(state.device)
            began = time.perf_counter()
            steps.rehearse(length)
            synchronize(state.device)
            seconds[repeat, i] = time.perf_counter() - began
    # A longer draft never costs less: where it seems to, that is noise.
    tables[key] = CostTable(np.maximum.accumulate(seconds.min(0)))
    return tables[key]


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator to finish; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
