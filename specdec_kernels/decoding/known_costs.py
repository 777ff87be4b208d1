"""What calls have learned of costs, kept for those that come after."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..drafters.base import TreeDrafter
from .costs import LearnedCosts
from .launching import Steps

_known: dict[Identity, dict[Any, LearnedCosts]] = {}


class Identity:
    """Any object as a key, equal only for the same object. The object need not be hashable and is not kept alive."""

    def __init__(self, of: object) -> None:
        self._of, self._id = weakref.ref(of), id(of)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (self is other or (self._of() is other._of() is not None))


def begin_costs(steps: Steps) -> LearnedCosts:
    """The costs that a call begins with: as the last of its kind left them, or as assumed.

    Kept with the target, for each drafter, batch size, number of threads and way of launching steps (models in their
    present condition: `Runner.costs_as`).
    """
    state, drafter = steps.state, steps.drafter
    model, condition = steps.runner.costs_as()
    draft = draft_key = None
    if drafter.runner is not None:
        draft, draft_condition = drafter.runner.costs_as()
        draft_key = Identity(draft), draft_condition
    num_nodes, max_depth = (drafter.num_nodes, drafter.max_depth) if isinstance(drafter, TreeDrafter) else (None, 1)
    size = num_nodes, max_depth, state.batch_size
    key = (type(drafter), size, draft_key, torch.get_num_threads(), condition, type(steps))
    target = Identity(model)
    if target not in _known:
        weakref.finalize(model, _known.pop, target, None)
    known = _known.setdefault(target, {})
    if draft is not None and key not in known:
        weakref.finalize(draft, known.pop, key, None)
    before = known.get(key)
    if before is None:
        on_gpu = state.device.type != "cpu"
        costs = LearnedCosts.assumed(draft is not None, state.batch_size, num_nodes, max_depth, on_gpu)
    else:
        costs = before.continued()
    known[key] = costs  # a call that begins at the same time uses its own costs, and goes on with them
    return costs
