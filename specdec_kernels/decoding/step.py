"""A step: draft, feed the block, verify it, keep what was accepted; all on the device but for the stop check."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Draft, Drafter
from ..ops.noise_keys import noise_keys
from ..ops.uniform_samples import uniform_samples
from ..ops.verify_chain import verify_chain
from ..ops.verify_tree import verify_tree
from ..types import PLACEHOLDER_TOKEN_ID
from .runner import Runner
from .schedule import Schedule
from .state import DecodingState, StepResult

OUTCOME_COLUMNS = 5
"""Columns of an outcome beside the tokens."""
TREE_RULES = {"token": "sample", "block": "sample", "match": "match", "greedy": "greedy", "typical": "typical"}
"""What `verify_tree` calls the rules of `generate`; for one-hot drafts the block rule is the token rule."""


def verify_step(
    state: DecodingState,
    runner: Runner,
    draft: Draft,
    limits: Tensor | None,
    eos_token_ids: Tensor | None,
) -> Tensor:
    """Verify `draft` with one forward of the target and append what it yields to every active sequence.

    Waits for nothing and makes no tensor from a value of the host, so that it can be captured in a CUDA graph.

    Parameters
    ----------
    state : DecodingState
        Its tensors are updated in place.
    runner : Runner
        The target.
    draft : Draft
        Of any width, 0 included.
    limits : Tensor, optional
        ``[batch]`` int64: no more draft tokens than that are put to the test.
    eos_token_ids : Tensor, optional
        ``[num_eos]`` int64.

    Returns
    -------
    Tensor
        ``[batch, width + 6]`` int64, for `take_in`: a `StepResult` in one piece.
    """
    width = draft.tokens.shape[1]
    num_drafted = (draft.tokens != PLACEHOLDER_TOKEN_ID).long().cumprod(1).sum(1)
    for bound in (state.remaining - 1, limits, draft.num_draft_tokens):
        if bound is not None:
            num_drafted = torch.minimum(num_drafted, bound)
    num_drafted = num_drafted.masked_fill(~state.active, -1)

    block = torch.cat([state.last_tokens(), draft.tokens.clamp(min=0)], dim=1)
    logits = runner.forward(block, state.lengths - 1, state.longest + width)
    assert logits is not None

    noise = keys = None
    if state.acceptance == "match":
        keys = noise_keys(state.seeds, state.next_positions(width + 1))
    elif state.acceptance != "greedy":
        noise = uniform_samples(state.seeds, state.step, width + 1)
    out = verify_chain(
        logits,
        draft.tokens,
        draft.logits,
        uniform_samples=noise,
        noise_keys=keys,
        params=state.sampling,
        draft_params=draft.params,
        # a step without a draft draws a token, also where trees are verified by another rule
        acceptance="token" if state.acceptance == "typical" else state.acceptance,
        # without a draft there is nothing to mix the target's law with
        target_law=state.target_law if state.asks_drafter(width) else None,
        draft_probs=draft.probs,
        draft_stats=draft.stats,
        draft_token_map=draft.token_map,
        num_draft_tokens=num_drafted,
        eos_token_ids=eos_token_ids,
    )

    return advance(state, out.tokens, out.num_tokens, num_drafted, out.num_accepted, out.status, eos_token_ids)


def verify_tree_step(
    state: DecodingState,
    runner: Runner,
    draft: Draft,
    limits: Tensor | None,
    eos_token_ids: Tensor | None,
) -> Tensor:
    """`verify_step` for a draft with a tree; as drafted tokens count the nodes of its deepest path.

    Parameters and result as there; the outcome has ``tree.max_depth + 1`` columns of tokens.
    """
    tree = draft.tree
    assert tree is not None
    root, starts = state.last_tokens(), state.lengths - 1
    deepest = state.remaining - 1 if limits is None else torch.minimum(state.remaining - 1, limits)
    tokens = torch.cat([root, draft.tokens], dim=1).masked_fill(tree.depth > deepest[:, None], PLACEHOLDER_TOKEN_ID)
    num_drafted = torch.where(tokens >= 0, tree.depth, 0).amax(1).masked_fill(~state.active, -1)
    logits = runner.forward_tree(tokens.clamp(min=0), starts, tree, state.longest + tree.num_nodes - 1)

    rule = TREE_RULES[state.acceptance]
    noise = keys = None
    if rule == "match":
        keys = noise_keys(state.seeds, state.lengths[:, None] + tree.position_ids)
    elif rule != "greedy":
        noise = uniform_samples(state.seeds, state.step, tree.num_nodes)
    out = verify_tree(
        logits,
        tree,
        tokens.masked_fill(~state.active[:, None], PLACEHOLDER_TOKEN_ID),
        acceptance=rule,
        params=state.sampling,
        eos_token_ids=eos_token_ids,
        uniform_samples=noise,
        noise_keys=keys,
    )
    accepted = out.accepted_nodes
    assert accepted is not None
    runner.keep_path(accepted, starts)
    if state.hidden is not None:
        final = torch.cat([torch.zeros_like(root), accepted], dim=1).gather(1, out.num_accepted[:, None].long())
        rows = final[..., None].expand(-1, 1, runner.hidden.shape[2])
        state.hidden.copy_(runner.hidden.gather(1, rows)[:, 0])
    return advance(state, out.tokens, out.num_tokens, num_drafted, out.num_accepted, out.status, eos_token_ids)


def advance(
    state: DecodingState,
    tokens: Tensor,
    num_tokens: Tensor,
    num_drafted: Tensor,
    num_accepted: Tensor,
    status: Tensor,
    eos_token_ids: Tensor | None,
) -> Tensor:
    """Append what a step yields to the texts; `tokens` is ``[batch, width + 1]``, the others are as in `StepResult`.

    Waits for nothing. Returns the outcome, ``[batch, width + 6]`` int64, for `take_in`.
    """
    state.tokens.scatter_(1, state.next_positions(tokens.shape[1]), tokens.clamp(min=0))
    state.lengths += num_tokens
    state.remaining -= num_tokens
    state.step += 1
    state.active &= state.remaining > 0
    if eos_token_ids is not None:
        state.active &= ~(tokens[:, :, None] == eos_token_ids).flatten(1).any(1)
    counts = (num_tokens, num_drafted, num_accepted, state.active, status)
    return torch.cat([tokens, *(count[:, None].long() for count in counts)], dim=1)


def take_in(state: DecodingState, outcome: np.ndarray) -> StepResult:
    """The result of the oldest step that the host has not seen; `state.host_*` then know of it."""
    num_tokens, drafted, accepted, active, status = outcome[:, -OUTCOME_COLUMNS:].T
    result = StepResult(outcome[:, :-OUTCOME_COLUMNS], num_tokens, drafted, accepted, active.astype(bool), status)
    state.host_lengths = state.host_lengths + result.num_tokens
    state.host_remaining = state.host_remaining - result.num_tokens
    state.host_active = result.active
    state.longest = int(state.host_lengths.max())
    return result


class Steps:
    """Launches steps and brings their results to the host: op by op, each one over before the next begins.

    Parameters
    ----------
    state : DecodingState
    runner : Runner
        The target.
    drafter : Drafter
    eos_token_ids : Tensor, optional
        ``[num_eos]`` int64.
    """

    rehearsals = 0
    """Times that a draft length must have been rehearsed before it runs at its own speed."""

    def __init__(
        self,
        state: DecodingState,
        runner: Runner,
        drafter: Drafter,
        eos_token_ids: Tensor | None,
    ) -> None:
        self.state, self.runner, self.drafter = state, runner, drafter
        self._eos_token_ids = eos_token_ids
        self._under_way: deque[tuple[int | np.ndarray, Any]] = deque()

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
            self.state.host_limits = self.state.draft_limits(wanted)
            self._under_way.append((wanted, self._launch(wanted, schedule)))
        wanted, outcome = self._under_way.popleft()
        asked = bool(self.state.draft_limits(wanted).any())
        return take_in(self.state, self._fetch(outcome)), asked

    def rehearse(self, num_tokens: int) -> None:
        """Launch drafting and verifying `num_tokens` tokens, without a result and without an effect."""
        state = self.state
        if state.asks_drafter(num_tokens):
            self.drafter.propose(state, num_tokens)
        block = state.last_tokens().expand(-1, num_tokens + 1)
        self.runner.forward(block, state.lengths - 1, state.longest + num_tokens)

    def _something_left(self) -> bool:
        """Whether, for all the host knows, a sequence may go on after the steps under way: each gives it a token."""
        left = self.state.host_remaining > len(self._under_way)
        return bool((left & self.state.host_active).any())

    def _lag(self, schedule: Schedule) -> int:
        """Steps that are launched before the host has looked at the one before them."""
        return 0

    def _launch(self, wanted: int | np.ndarray, schedule: Schedule) -> Any:
        """Enqueue a step; what `_fetch` needs to get at its outcome."""
        num_tokens = int(self.state.host_limits.max())
        if self.state.asks_drafter(num_tokens):
            self.drafter.prepare(self.state)
        limits = None
        if num_tokens and isinstance(wanted, np.ndarray):
            limits = torch.from_numpy(wanted).to(self.state.device, non_blocking=True)
        return self._verify(self._propose(num_tokens, schedule.round_up), limits)

    def _fetch(self, launched: Any) -> np.ndarray:
        """The stop check: the one transfer of a step, and the only point that waits for the device."""
        outcome: np.ndarray = launched.cpu().numpy()
        return outcome

    def _propose(self, num_tokens: int, round_up: Callable[[int], int]) -> Draft:
        """A draft of at most `num_tokens` tokens, padded to the width that `round_up` makes of its own."""
        state, drafter = self.state, self.drafter
        if not state.asks_drafter(num_tokens):
            return Draft(state.tokens[:, :0])
        draft = drafter.propose(state, num_tokens)
        if draft.tree is not None:
            return draft
        batch, width = draft.tokens.shape
        if batch != state.batch_size or width > num_tokens:
            raise ValueError(
                f"generate: {type(drafter).__name__}.propose must give [batch={state.batch_size}, at most "
                f"{num_tokens}] tokens, got {list(draft.tokens.shape)}"
            )
        return draft.widened(round_up(width))

    def _verify(self, draft: Draft, limits: Tensor | None) -> Tensor:
        verify = verify_step if draft.tree is None else verify_tree_step
        return verify(self.state, self.runner, draft, limits, self._eos_token_ids)
