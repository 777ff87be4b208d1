"""Reference of `token_logprobs`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import TokenLogprobsArguments
from ...types import Status
from .law import clean, make_law, make_params, raw_entropies, row_status
from .rows import slots_upto


def token_logprobs(args: TokenLogprobsArguments) -> tuple[Tensor, ...]:
    """What `TokenLogprobs` holds, in its order."""
    logits, tokens, rows, num_tokens, num_top, params = args
    (batch, n, vocab), slots = logits.shape, slots_upto(tokens.shape[1], tokens).expand_as(tokens)
    rows = slots if rows is None else rows
    is_token = tokens != -1
    if num_tokens is not None:
        is_token = is_token & (slots < num_tokens[:, None])
    bad = torch.where((tokens < 0) | (tokens >= vocab), int(Status.BAD_TOKEN), 0)
    bad = torch.where(is_token, bad | torch.where((rows < 0) | (rows >= n), int(Status.BAD_PARAM), 0), 0)
    is_token = is_token & (bad == 0)

    x = logits.gather(1, rows.clamp(0, n - 1)[..., None].expand(-1, -1, vocab))
    valid = make_params(batch, x, params)
    law, (raw_log_normalizer, _), status = make_law(x, valid), raw_entropies(x), row_status(x, valid)
    x = clean(x)

    def log_probs(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Raw and processed, of ids ``[batch, width, any]``."""
        at = x.gather(-1, ids)
        all_or_none = torch.where(ids == law.argmax[..., None], 0.0, -math.inf)
        raw = torch.where(law.maximum.isinf()[..., None], all_or_none, at - raw_log_normalizer[..., None])
        scores = (at - law.maximum[..., None]) * valid.inverse_temperature[..., None]
        scores = torch.where(at >= law.cutoff[..., None], scores - law.normalizer.log()[..., None], -math.inf)
        return raw.float(), torch.where(law.one_hot[..., None], all_or_none, scores).float()

    token = tokens.clamp(0, vocab - 1)[..., None]
    own, ids = x.gather(-1, token), slots_upto(vocab, x)
    rank = 1 + ((x > own) | ((x == own) & (ids < token))).sum(-1)
    order = x.sort(dim=-1, descending=True, stable=True).indices[..., :num_top]
    beyond = (0, num_top - order.shape[-1])

    def top(values: Tensor, none: float) -> Tensor:
        return torch.nn.functional.pad(values, beyond, value=none).masked_fill(~is_token[..., None], none)

    raw, processed = (v[..., 0].masked_fill(~is_token, -math.inf) for v in log_probs(token))
    top_raw, top_processed = (top(v, -math.inf) for v in log_probs(order))
    return (
        raw, processed, rank.masked_fill(~is_token, 0).to(torch.int32),
        torch.where(is_token, status, bad.to(torch.int32)), top(order, -1), top_raw, top_processed,
    )  # fmt: skip
