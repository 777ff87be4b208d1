"""What calls have learned of costs, kept for those that come after."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..drafters.base import TreeDrafter
from .costs import LearnedCosts
from .launching import Steps

_known: dict[Identity, _Kept] = {}


@dataclass
class _Kept:
    """With a target: its costs, and what removes them when their draft model is gone."""

    costs: dict[Any, LearnedCosts] = field(default_factory=dict)
    removers: dict[Any, weakref.finalize[..., Any]] = field(default_factory=dict)

    def remove(self, key: Any) -> None:
        self.costs.pop(key, None)
        self.removers.pop(key, None)


class Identity:
    """Any object as a key, equal only for the same object. The object need not be hashable and is not kept alive."""

    def __init__(self, of: object) -> None:
        self._of, self._id = weakref.ref(of), id(of)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and (self is other or (self._of() is other._of() is not None))


def _forget(target: Identity) -> None:
    for remover in list(_known.pop(target, _Kept()).removers.values()):
        remover.detach()  # or it would stay as long as the draft model does


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
        weakref.finalize(model, _forget, target).atexit = False
    kept = _known.setdefault(target, _Kept())
    if draft is not None and key not in kept.removers:
        kept.removers[key] = weakref.finalize(draft, kept.remove, key)
        kept.removers[key].atexit = False
    before = kept.costs.get(key)
    if before is None:
        on_gpu = state.device.type != "cpu"
        costs = LearnedCosts.assumed(draft is not None, state.batch_size, num_nodes, max_depth, on_gpu)
    else:
        costs = before.continued()
    kept.costs[key] = costs  # a call that begins at the same time uses its own costs, and goes on with them
    return costs
