"""Reference of `token_logprobs`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...flat import FlatProcessors
from ...ops.arguments import Processing, TokenLogprobsArguments
from ...types import Status
from .law import clean, lowest_argmax, make_law, make_params, raw_entropies, row_status
from .processors import processed
from .rows import slots_upto


def token_logprobs(args: TokenLogprobsArguments) -> tuple[Tensor, ...]:
    """What `TokenLogprobs` holds, in its order."""
    logits, tokens, rows, num_tokens, num_top, params, processors = args
    (batch, n, vocab), slots = logits.shape, slots_upto(tokens.shape[1], tokens).expand_as(tokens)
    rows = slots if rows is None else rows
    is_token = tokens != -1
    if num_tokens is not None:
        is_token = is_token & (slots < num_tokens[:, None])
    bad = torch.where((tokens < 0) | (tokens >= vocab), int(Status.BAD_TOKEN), 0)
    bad = torch.where(is_token, bad | torch.where((rows < 0) | (rows >= n), int(Status.BAD_PARAM), 0), 0)
    is_token = is_token & (bad == 0)

    rows = rows.clamp(0, n - 1)
    x = of_rows(logits, rows)
    before = torch.where(slots_upto(tokens.shape[1], tokens) < slots[..., None], tokens[:, None], -1)
    y, flags = processed(x, with_rows(processors, n, rows), before)
    valid = make_params(batch, y, params, flags)
    law, (raw_log_normalizer, _) = make_law(y, valid), raw_entropies(x)
    status = row_status(y, valid) | row_status(x, valid)
    x, y = clean(x), clean(y)
    raw_maximum = x.amax(-1)
    raw_argmax, _ = lowest_argmax(x, raw_maximum)

    def log_probs(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Raw and processed, of ids ``[batch, width, any]``."""
        all_or_none = torch.where(ids == raw_argmax[..., None], 0.0, -math.inf)
        raw = x.gather(-1, ids) - raw_log_normalizer[..., None]
        raw = torch.where(raw_maximum.isinf()[..., None], all_or_none, raw)
        at, all_or_none = y.gather(-1, ids), torch.where(ids == law.argmax[..., None], 0.0, -math.inf)
        scores = (at - law.maximum[..., None]) * valid.inverse_temperature[..., None]
        scores = torch.where(at >= law.cutoff[..., None], scores - law.normalizer.log()[..., None], -math.inf)
        return raw.float(), torch.where(law.one_hot[..., None], all_or_none, scores).float()

    token = tokens.clamp(0, vocab - 1)[..., None]
    at, ids = x.gather(-1, token), slots_upto(vocab, x)
    rank = 1 + ((x > at) | ((x == at) & (ids < token))).sum(-1)
    order = x.sort(dim=-1, descending=True, stable=True).indices[..., :num_top]
    beyond = (0, num_top - order.shape[-1])

    def top(values: Tensor, none: float) -> Tensor:
        return torch.nn.functional.pad(values, beyond, value=none).masked_fill(~is_token[..., None], none)

    raw, own = (v[..., 0].masked_fill(~is_token, -math.inf) for v in log_probs(token))
    top_raw, top_processed = (top(v, -math.inf) for v in log_probs(order))
    return (
        raw, own, rank.masked_fill(~is_token, 0).to(torch.int32),
        torch.where(is_token, status, bad.to(torch.int32)), top(order, -1), top_raw, top_processed,
    )  # fmt: skip


def of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """``[batch, n, any]`` and ``[batch, width]`` to ``[batch, width, any]``."""
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[-1]))


def with_rows(given: Processing, n: int, rows: Tensor) -> Processing:
    """Processors of `n` rows a sequence as those of `rows`, whose masks they have."""
    mask = None if given is None else FlatProcessors(*given).token_bitmask
    if given is None or mask is None:
        return given
    words = of_rows(mask.view(len(rows), n, mask.shape[-1]), rows)
    return list(FlatProcessors(*given)._replace(token_bitmask=words))
