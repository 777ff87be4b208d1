"""Launching steps, and bringing their results to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Draft, Drafter, TreeDrafter
from ..processors import Processors
from ..tree import DraftTree
from ..types import PLACEHOLDER_TOKEN_ID
from .runner import Runner
from .schedule import Schedule
from .state import DecodingState, StepResult
from .step import verify_step


class Steps:
    """Launches steps and brings their results to the host: op by op, each one over before the next begins.

    Parameters
    ----------
    state : DecodingState
    runner : Runner
        The target.
    drafter : Drafter
    ends : Tensor, optional
        ``[num_eos]`` int64 ids that end a sequence.
    """

    steady = True
    """Whether the last step ran at its own speed."""

    def __init__(self, state: DecodingState, runner: Runner, drafter: Drafter, ends: Tensor | None) -> None:
        self.state, self.runner, self.drafter, self.ends = state, runner, drafter, ends
        self._under_way: deque[tuple[int, Any]] = deque()
        # What a step without a draft verifies: only a root if the drafter reads hidden states, as only the verification
        # of a tree keeps those.
        keeps_hidden = isinstance(drafter, TreeDrafter) and drafter.reads_hidden
        root = DraftTree.from_parents([-1]).to(state.device) if keeps_hidden else None
        self._nothing = Draft(state.tokens[:, :0], tree=root)

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing under way."""

    def next_result(self, schedule: Schedule) -> tuple[StepResult, bool]:
        """Launch steps as far ahead as is allowed; the oldest one's result, and whether it asked the drafter."""
        while len(self._under_way) <= self._lag(schedule) and self._something_left():
            wanted = schedule.next()
            self._under_way.append((wanted, self._launch(wanted, schedule)))
            self.state.unread_from = None
        wanted, outcome = self._under_way.popleft()
        asked = self.state.asks_drafter(int(self.state.draft_limits(wanted).max()))
        return self.state.take_in(self._fetch(outcome)), asked

    def _something_left(self) -> bool:
        """Whether, for all the host knows, a sequence may go on after the steps under way: each gives it a token."""
        left = self.state.host_remaining > len(self._under_way)
        return bool((left & self.state.host_active).any())

    def _lag(self, schedule: Schedule) -> int:
        """Steps that are launched before the host has looked at the one before them."""
        return 0

    def _launch(self, wanted: int, schedule: Schedule) -> Any:
        """Enqueue a step; returns what `_fetch` needs to get its outcome."""
        state = self.state
        at_step = state.at_step(state.draft_limits(wanted), state.longest)
        num_tokens = int(at_step.host_limits.max())
        if state.asks_drafter(num_tokens):
            self.drafter.prepare(at_step)
        draft = self._propose(at_step, num_tokens, schedule.round_up)
        at_step, draft = masked(at_step, draft)
        return verify_step(at_step, self.runner, draft, state.longest, None, self.ends)

    def _fetch(self, launched: Any) -> np.ndarray:
        """The stop check: the one transfer of a step, and the only point that waits for the device."""
        outcome: np.ndarray = launched.cpu().numpy()
        return outcome

    def _propose(self, at_step: DecodingState, num_tokens: int, round_up: Callable[[int], int]) -> Draft:
        """A draft of at most `num_tokens` tokens, padded to the width that `round_up` makes of its own."""
        if not at_step.asks_drafter(num_tokens):
            return self._nothing
        draft = self.drafter.propose(at_step, num_tokens)
        caller = f"generate: {type(self.drafter).__name__}.propose"
        if not isinstance(draft, Draft):
            raise TypeError(f"{caller} must give a Draft, got {type(draft).__name__}")
        tokens = draft.tokens
        for name in ("tokens", "num_draft_tokens"):
            if (given := getattr(draft, name)) is not None and given.device != at_step.device:
                raise ValueError(f"{caller} must give {name} on {at_step.device}, got {given.device}")
        if draft.tree is not None:
            _check_tree(caller, self.drafter, draft, draft.tree, at_step.batch_size)
            return draft
        if tokens.dim() != 2 or tokens.shape[0] != at_step.batch_size or tokens.shape[1] > num_tokens:
            expected = f"[batch={at_step.batch_size}, at most {num_tokens}]"
            raise ValueError(f"{caller} must give {expected} tokens, got {list(tokens.shape)}")
        if isinstance(self.drafter, TreeDrafter):
            if tokens.shape[1]:
                raise ValueError(f"{caller} must give a tree with its tokens, as it is a TreeDrafter, got a chain")
            if self.drafter.reads_hidden:  # which only the verification of a tree keeps
                raise ValueError(f"{caller} must give a tree, of the root alone at least, as it reads hidden states")
        if draft.num_draft_tokens is not None:  # to `verify_chain` −1 is an idle row: its sequence would never end
            if draft.num_draft_tokens.shape != (at_step.batch_size,):
                got = list(draft.num_draft_tokens.shape)
                raise ValueError(f"{caller} must give num_draft_tokens [batch={at_step.batch_size}], got {got}")
            draft = replace(draft, num_draft_tokens=draft.num_draft_tokens.clamp(min=0))
        return draft.widened(round_up(tokens.shape[1]))


def _check_tree(caller: str, drafter: Drafter, draft: Draft, tree: DraftTree, batch: int) -> None:
    """Raise unless the tree is one that `drafter` may propose: cache and buffers have no room for a larger one."""
    if not isinstance(drafter, TreeDrafter):
        raise ValueError(f"{caller} must give no tree, as it is no TreeDrafter, got one of {tree.num_nodes} nodes")
    if tree.num_nodes > drafter.num_nodes or tree.max_depth > drafter.max_depth:
        raise ValueError(
            f"{caller} must give a tree of at most num_nodes={drafter.num_nodes}, max_depth={drafter.max_depth} deep, "
            f"got {tree.num_nodes} nodes, {tree.max_depth} deep"
        )
    if tree.parents.device != draft.tokens.device:
        raise ValueError(f"{caller} must give its tree on {draft.tokens.device}, got {tree.parents.device}")
    if tree.parents.dim() > 1 and tree.parents.shape[0] != batch:
        raise ValueError(f"{caller} must give one tree or batch={batch}, got {tree.parents.shape[0]}")
    if draft.num_draft_tokens is not None:
        raise ValueError(f"{caller} must give a tree without num_draft_tokens: a −1 is a node that is missing")
    if draft.tokens.shape != (batch, tree.num_nodes - 1):
        expected = f"[batch={batch}, num_nodes - 1={tree.num_nodes - 1}]"
        raise ValueError(f"{caller} must give {expected} tokens, got {list(draft.tokens.shape)}")


def masked(state: DecodingState, draft: Draft) -> tuple[DecodingState, Draft]:
    """The state with the mask that its grammar, if it has one, makes for `draft`; waits for the draft, which ends where
    the grammar bars every id: such a row emits id 0 by itself.
    """
    if state.masks is None:
        return state, draft
    limits = state.host_limits
    if draft.num_draft_tokens is not None:
        limits = np.minimum(limits, draft.num_draft_tokens.cpu().numpy())
    parents = None
    if draft.tree is not None:
        parents = draft.tree.parents.expand(state.batch_size, -1).cpu().numpy()
    tokens = draft.tokens.cpu().numpy()
    rows, _, behind = state.masks.along(tokens, np.where(state.host_active, limits, -1), parents)
    if behind.any():  # which the tokens before it tell, and not the token itself: this biases nothing
        lost = torch.from_numpy(behind[:, 1:]).to(state.device)
        draft = replace(draft, tokens=draft.tokens.masked_fill(lost, PLACEHOLDER_TOKEN_ID))
    processors = state.processors or Processors()
    return replace(state, processors=processors.with_bitmask(rows.to(state.device))), draft


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator to finish; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
