"""One verify step: feed the block, verify it, keep what was accepted; all on the device but for the stop check."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Draft
from ..ops.noise_keys import noise_keys
from ..ops.uniform_samples import uniform_samples
from ..ops.verify_chain import verify_chain
from ..types import PLACEHOLDER_TOKEN_ID
from .runner import Runner
from .state import DecodingState, StepResult


def verify_step(
    state: DecodingState,
    runner: Runner,
    draft: Draft,
    limits: Tensor | None,
    eos_token_ids: Tensor | None,
    target_law: object | None = None,
) -> StepResult:
    """Verify `draft` with one forward of the target and append what it yields to every active sequence.

    Parameters
    ----------
    state : DecodingState
        Updated in place.
    runner : Runner
        The target.
    draft : Draft
        Of any width, 0 included.
    limits : Tensor, optional
        ``[batch]`` int64: no more draft tokens than that are put to the test.
    eos_token_ids : Tensor, optional
        ``[num_eos]`` int64.
    target_law : optional
        Passed to `verify_chain`.

    Returns
    -------
    StepResult
        On the host: this transfer is the only point of the step that waits for the device.
    """
    width = draft.tokens.shape[1]
    offsets = torch.arange(width + 1, device=state.device)
    positions = state.lengths[:, None] + offsets  # where the tokens that this step draws will stand

    num_drafted = (draft.tokens != PLACEHOLDER_TOKEN_ID).long().cumprod(1).sum(1)
    for bound in (state.remaining - 1, limits, draft.num_draft_tokens):
        if bound is not None:
            num_drafted = torch.minimum(num_drafted, bound)
    num_drafted = torch.where(state.active, num_drafted, -1)

    block = torch.cat([state.last_tokens(), draft.tokens.clamp(min=0)], dim=1)
    logits = runner.forward(block, state.lengths - 1, state.longest + width)
    assert logits is not None

    noise = keys = None
    if state.acceptance == "match":
        keys = noise_keys(state.seeds, positions)
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
        acceptance=state.acceptance,
        target_law=target_law,
        draft_probs=draft.probs,
        draft_stats=draft.stats,
        draft_token_map=draft.token_map,
        num_draft_tokens=num_drafted,
        eos_token_ids=eos_token_ids,
    )

    state.tokens.scatter_(1, positions, out.tokens.clamp(min=0))
    state.lengths += out.num_tokens
    state.remaining -= out.num_tokens
    state.step += 1
    state.active &= state.remaining > 0
    if eos_token_ids is not None:
        state.active &= ~(out.tokens[:, :, None] == eos_token_ids).flatten(1).any(1)

    columns = (out.num_tokens, num_drafted, out.num_accepted, state.active, out.status)
    host = _to_host(torch.cat([out.tokens, *(column[:, None].long() for column in columns)], dim=1))
    num_tokens, drafted, accepted, active, status = host[:, width + 1 :].T
    result = StepResult(host[:, : width + 1], num_tokens, drafted, accepted, active.astype(bool), status)
    state.host_lengths = state.host_lengths + result.num_tokens
    state.host_remaining = state.host_remaining - result.num_tokens
    state.host_active = result.active
    return result


def _to_host(outcome: Tensor) -> np.ndarray:
    """The stop check: the one transfer of a step."""
    return outcome.cpu().numpy()
