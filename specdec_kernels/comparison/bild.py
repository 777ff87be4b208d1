"""The big little decoder, to compare speculative cascades with.

Source: Kim et al., "Speculative Decoding with Big Little Decoder" (arXiv 2302.07863), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..checks import check_int, check_number
from ..decoding.output import GenerationOutput, Recorder
from ..decoding.request import MAX_SPECULATIVE_TOKENS, Request
from ..decoding.runner import forward_logits
from ..ops.row_stats import row_stats
from ..sampling import GREEDY
from ..types import PLACEHOLDER_TOKEN_ID
from .two_models import TwoModels, append, last_row, max_prob, raw_log_probs


def bild(
    model: Any,
    input_ids: Tensor,
    *,
    draft_model: Any,
    fallback: float = 0.6,
    rollback: float = 5.0,
    max_draft_tokens: int = 10,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Iterable[int] | None = None,
) -> GenerationOutput:
    """The draft writes greedily until it is unsure, then the target checks what it has written: greedy, not lossless.

    The draft falls back to the target before a token that it gives less than `fallback`, and after an end or
    `max_draft_tokens`. The target then keeps its tokens up to the first that it gives less than ``exp(−rollback)``, and
    writes its likeliest token there, or after them (not after an end). Probabilities are the models' own (temperature
    1, nothing cut). For a target law, at any temperature, see `sk.laws.BiLD`.

    Sequences that fall back wait for those that do not, which changes no token. Runs op by op, also on a GPU.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, max_new_tokens, eos_token_id
        See `generate`.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    fallback : float
        A probability; above 1 the target writes everything.
    rollback : float
        In nats, >= 0; infinity keeps everything.
    max_draft_tokens : int
        1 … 64.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError, ValueError
        As `generate`, or a bad `fallback`, `rollback` or `max_draft_tokens`.
    """
    caller = "bild"
    check_number(caller, "fallback", fallback, 0.0, math.inf)
    check_number(caller, "rollback", rollback, 0.0, math.inf)
    check_int(caller, "max_draft_tokens", max_draft_tokens, 1, MAX_SPECULATIVE_TOKENS)
    request = Request(input_ids, attention_mask, GREEDY, None, max_new_tokens, eos_token_id)
    models = TwoModels.begin(caller, model, draft_model, request, None, max_draft_tokens)
    state, unseen = models.state, 1
    recorder = Recorder(state.batch_size, max_new_tokens, max_draft_tokens)
    with models.at_work(caller) as seconds:
        while state.host_active.any():
            tokens, status = _draft(models, fallback, max_draft_tokens, unseen)
            recorder.draft_steps += tokens.shape[1] > 0
            recorder.target_forwards += 1
            outcome = _verify(models, tokens, status, rollback)
            recorder.add(state.take_in(outcome.cpu().numpy()))
            unseen = 2  # where a draft was kept, its last token too
        times = seconds()
    return recorder.output(models.target, input_ids, times)


def _draft(models: TwoModels, fallback: float, max_draft_tokens: int, unseen: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[batch, width]``, −1 after each sequence's draft, and flags ``[batch]`` of the rows that were looked at.

    The draft has not seen the last `unseen` tokens of the text.
    """
    state = models.state
    limits = torch.where(state.active, state.remaining - 1, 0)  # one of the target's follows
    writing = limits > 0
    tokens, status = state.tokens[:, :0], torch.zeros_like(limits)
    for i in range(max_draft_tokens):
        if not bool(writing.any()):
            break
        if i == 0:
            row = last_row(models.draft, state, unseen)
        else:
            row = forward_logits(models.draft, tokens[:, -1:].clamp(min=0), state.lengths - 1 + i, state.longest + i)
        stats = row_stats(row)
        status |= torch.where(writing, stats.status[:, 0], 0)
        writing = writing & (max_prob(stats)[:, 0] >= fallback)
        token = torch.where(writing[:, None], stats.argmax, PLACEHOLDER_TOKEN_ID)
        tokens = torch.cat([tokens, token], dim=1)
        writing = writing & (i + 1 < limits) & ~torch.isin(token[:, 0], models.ends)
    return tokens, status


def _verify(models: TwoModels, tokens: Tensor, status: Tensor, rollback: float) -> Tensor:
    """Keep what the target accepts of the draft `tokens` ``[batch, width]``, and let it write one; returns the outcome,
    for `take_in`. `status` ``[batch]`` holds the draft's flags.
    """
    state = models.state
    fed = torch.cat([state.last_tokens(), tokens.clamp(min=0)], dim=1)
    logits = forward_logits(models.target, fed, state.lengths - 1, state.longest + tokens.shape[1])
    stats = row_stats(logits)

    tokens = torch.nn.functional.pad(tokens, (0, 1), value=PLACEHOLDER_TOKEN_ID)  # as many as rows
    drafted = tokens != PLACEHOLDER_TOKEN_ID
    stays = drafted & (raw_log_probs(logits, stats, tokens.clamp(min=0)) >= -rollback)
    num_drafted, num_accepted = drafted.sum(1), stays.long().cumprod(1).sum(1)
    ended = torch.isin(tokens, models.ends).any(1) & (num_accepted == num_drafted)  # an end is the last of its draft
    num_tokens = num_accepted + (~ended).long()
    for i in range(tokens.shape[1]):
        status |= torch.where(i < num_tokens, stats.status[:, i], 0)
    slots = torch.arange(tokens.shape[1], device=state.device)
    tokens = torch.where(slots < num_accepted[:, None], tokens, stats.argmax)
    tokens = tokens.masked_fill(slots >= num_tokens[:, None], PLACEHOLDER_TOKEN_ID)
    return append(state, tokens, num_drafted, num_accepted, status, models.ends)
