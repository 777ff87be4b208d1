"""A step: feed the draft to the target, verify it, keep what was accepted; all on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..drafters.base import Draft
from ..ops.token_logprobs import token_logprobs
from ..ops.verify_chain import verify_chain
from ..ops.verify_tree import verify_tree
from ..tree import DraftTree
from ..types import PLACEHOLDER_TOKEN_ID, Status, VerifyOutput
from .logprobs import packed
from .runner import Runner, checked_logits, forward_logits, forward_tree
from .state import DecodingState

TREE_RULES = {"token": "sample", "block": "sample", "match": "match", "greedy": "greedy", "typical": "typical"}
"""What `verify_tree` calls the rules of `generate`; for one-hot drafts the block rule is the token rule."""


def verify_step(
    state: DecodingState, runner: Runner, draft: Draft, longest: int, limits: Tensor | None, ends: Tensor | None
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
        Of any width, 0 included; or a tree. Of a tree, the nodes of the deepest path that continues the accepted one
        count as drafted.
    longest : int
        No sequence is longer: attention is computed over so many rows of the cache and those of the draft.
    limits : Tensor, optional
        ``[batch]`` int64: no more draft tokens than that are put to the test.
    ends : Tensor, optional
        ``[num_eos]`` int64 ids that end a sequence.

    Returns
    -------
    Tensor
        ``[batch, width + 6]`` int64 (wider with log-probabilities), for `DecodingState.take_in`; a tree's width is its
        greatest depth.
    """
    most = state.remaining - 1 if limits is None else torch.minimum(state.remaining - 1, limits)
    verify = _verify_chain if draft.tree is None else _verify_tree
    out, num_drafted, logits = verify(state, runner, draft, longest, most, ends)
    about = None if state.num_top is None else _log_probs(state, state.num_top, logits, out)
    return state.append(out.tokens, out.num_tokens, num_drafted, out.num_accepted, out.status, ends, about)


def _log_probs(state: DecodingState, num_top: int, logits: Tensor, out: VerifyOutput) -> Tensor:
    """Log-probabilities of the emitted tokens, in one piece; `state` is not yet the next step's."""
    # a tree's tokens come from its root's row and its accepted nodes' rows
    rows = None if out.accepted_nodes is None else torch.nn.functional.pad(out.accepted_nodes, (1, 0))
    return packed(
        token_logprobs(
            logits, out.tokens, state.effective_sampling, processors=state.processors, rows=rows,
            num_tokens=out.num_tokens, num_top=num_top,
        )
    )  # fmt: skip


def _verify_chain(
    state: DecodingState, runner: Runner, draft: Draft, longest: int, most: Tensor, ends: Tensor | None
) -> tuple[VerifyOutput, Tensor, Tensor]:
    """The outcome, ``[batch]`` int64 tokens that were put to the test, and the target's logits."""
    width = draft.tokens.shape[1]
    num_drafted = (draft.tokens != PLACEHOLDER_TOKEN_ID).long().cumprod(1).sum(1)
    for bound in (most, draft.num_draft_tokens):
        if bound is not None:
            num_drafted = torch.minimum(num_drafted, bound)
    num_drafted = num_drafted.masked_fill(~state.active, -1)

    # The op finds and flags tokens that are no ids; the model is not asked about them.
    logits = _forward(state, runner, draft.tokens.clamp(0, state.vocab_size - 1), num_drafted, longest)
    # a step without a draft draws a token, even where trees are verified by another rule
    rule = "token" if state.acceptance == "typical" else state.acceptance
    out = verify_chain(
        logits,
        draft.tokens,
        draft.logits,
        **_randomness(state, rule, width + 1),
        params=state.sampling,
        draft_params=draft.params,
        processors=state.processors,
        acceptance=rule,
        # without a draft there is nothing to mix the target's distribution with
        target_law=state.target_law if state.asks_drafter(width) else None,
        draft_probs=draft.probs,
        draft_stats=draft.stats,
        draft_token_map=draft.token_map,
        num_draft_tokens=num_drafted,
        eos_token_ids=ends,
    )
    # A draft ends, without a rejection, before a token that is no id or that its distribution cannot have produced.
    num_drafted = torch.minimum(num_drafted, _is_id(draft.tokens, state).long().cumprod(1).sum(1))
    ended = ((out.status & int(Status.BAD_DRAFT)) != 0) & state.active
    return out, torch.where(ended, out.num_accepted.long(), num_drafted), logits


def _forward(state: DecodingState, runner: Runner, drafted: Tensor, num_drafted: Tensor, longest: int) -> Tensor:
    """``[batch, width + 1, vocab]``: the target's logits at the texts' last tokens and at `drafted`, once it has read
    what is unread of the prompts.
    """
    width = drafted.shape[1]
    if state.unread_from is None:
        tokens, starts = torch.cat([state.last_tokens(), drafted], dim=1), state.lengths - 1
        runner.expect(lambda: torch.arange(width + 1, device=tokens.device) <= num_drafted[:, None])
        return forward_logits(runner, tokens, starts, longest + width)
    rows = state.next_positions(width + 1) - 1 - state.unread_from
    tokens = state.tokens[:, state.unread_from : state.prompt.longest + width].scatter(1, rows[:, 1:], drafted)
    last = rows[:, :1] + num_drafted[:, None]
    runner.expect(lambda: torch.arange(tokens.shape[1], device=tokens.device) <= last)
    starts = torch.full_like(state.lengths, state.unread_from)
    logits = runner.forward_rows(tokens, starts, longest + width, rows)
    return checked_logits(runner, "forward_rows", logits, rows.shape)


def _verify_tree(
    state: DecodingState, runner: Runner, draft: Draft, longest: int, most: Tensor, ends: Tensor | None
) -> tuple[VerifyOutput, Tensor, Tensor]:
    """As `_verify_chain`; brings the cache, and the hidden state, to the accepted path."""
    tree = draft.tree
    assert tree is not None
    root, starts = state.last_tokens(), state.lengths - 1
    tokens = torch.cat([root, draft.tokens], dim=1).masked_fill(tree.depth > most[:, None], PLACEHOLDER_TOKEN_ID)
    runner.expect(lambda: _is_id(tokens, state))
    logits, hidden = forward_tree(
        runner, tokens.clamp(0, state.vocab_size - 1), starts, tree, longest + tree.num_nodes - 1
    )

    rule = TREE_RULES[state.acceptance]
    out = verify_tree(
        logits,
        tree,
        tokens.masked_fill(~state.active[:, None], PLACEHOLDER_TOKEN_ID),
        acceptance=rule,
        epsilon=state.epsilon,
        delta=state.delta,
        params=state.sampling,
        processors=state.processors,
        eos_token_ids=ends,
        **_randomness(state, rule, tree.num_nodes, tree),
    )
    accepted = out.accepted_nodes
    assert accepted is not None
    runner.keep_path(accepted, starts)
    num_accepted = out.num_accepted[:, None].long()
    final = torch.cat([torch.zeros_like(root), accepted], dim=1).gather(1, num_accepted)
    # The nodes from the last accepted one on; `tree.paths` would do, too, with more kernels.
    nodes, is_id = torch.arange(tree.num_nodes, device=root.device), _is_id(tokens, state)
    goes_on = nodes == final
    above = torch.where(is_id, tree.parents.clamp(min=0), nodes)  # nothing goes on through a node that is missing
    for _ in range(tree.max_depth):
        goes_on = goes_on | goes_on.gather(1, above)
    num_drafted = torch.where(goes_on & is_id, tree.depth, 0).amax(1).masked_fill(~state.active, -1)
    if state.hidden is not None:
        assert hidden is not None  # the target gives them where a drafter reads them
        state.hidden.copy_(hidden.gather(1, final[..., None].expand(-1, 1, hidden.shape[2]))[:, 0])
    return out, num_drafted, logits


def _is_id(tokens: Tensor, state: DecodingState) -> Tensor:
    """Where there is a valid id; a draft ends before a placeholder or anything else that is no id."""
    return (tokens >= 0) & (tokens < state.vocab_size)


def _randomness(state: DecodingState, rule: str, num_rows: int, tree: DraftTree | None = None) -> dict[str, Any]:
    """What `rule` makes its random numbers of."""
    if rule == "greedy":
        return {}
    if rule == "match":
        positions = state.next_positions(num_rows) if tree is None else state.lengths[:, None] + tree.position_ids
        return {"seeds": state.seeds, "positions": positions}
    return {"seeds": state.seeds, "step": state.step}
