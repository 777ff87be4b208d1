"""What processors make of the target's logits: `sk.Processors` says in which order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...flat import FlatProcessors
from ...ops.arguments import Processing
from ...types import NO_ID, Status, TokenCounts
from .law import compute_dtype
from .rows import slots_upto


def processed(logits: Tensor, given: Processing, drafted: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
    """The logits that sampling parameters act on ``[batch, n, vocab]``, and the flags of each sequence's processors.

    `drafted` ``[batch, n, k]`` int64: the draft tokens before each row, −1 where there is none. NaN stays NaN unless it
    is masked.
    """
    if given is None:
        return logits, 0
    flat, x = FlatProcessors(*given), logits.to(compute_dtype(logits))
    batch, n, vocab = x.shape
    if drafted is None:
        drafted = torch.full((batch, n, 1), -1, device=x.device)
    if flat.token_bitmask is not None:
        x = x.masked_fill(~unpacked(flat.token_bitmask.reshape(batch, n, (vocab + 31) // 32), vocab), -math.inf)
    if flat.allowed is not None:
        x = x.masked_fill(~unpacked(flat.allowed[:, None], vocab), -math.inf)
    status = torch.zeros(batch, dtype=torch.int32, device=x.device)
    if flat.bias_ids is not None:
        bias_ids, flags = flagged_lists(flat.bias_ids)
        x, status = biased(x, flat._replace(bias_ids=bias_ids), (drafted >= 0).sum(-1)), status | flags
    if flat.penalties is None:
        return x, status
    assert flat.count_ids is not None and flat.counts is not None
    penalties, flags_of_penalties = valid_penalties(flat.penalties)
    count_ids, flags = flagged_lists(flat.count_ids)
    known = onto_vocab(count_ids, flat.counts.clamp_min(0), vocab)[:, None] + 2 * onto_vocab(
        drafted, torch.ones_like(drafted), vocab
    )
    return penalised(x, penalties[:, None], known), status | flags | flags_of_penalties


def penalised(x: Tensor, penalties: Tensor, counts: Tensor) -> Tensor:
    """Logits ``[..., n]`` after penalties ``[..., 3]``, with how often each id is there, as `TokenCounts.counts`."""
    r, frequency, presence = (p[..., None].to(x.dtype) for p in penalties.unbind(-1))
    times = counts // 2
    x = torch.where(counts > 0, torch.where(x > 0, x / r, x * r), x)
    return torch.where(times > 0, x - frequency * times - presence, x)


def counted(token_counts: TokenCounts, ids: Tensor) -> Tensor:
    """The counts of some ids ``[batch, n]`` int64, which are of the vocabulary; 0 for a negative one."""
    wanted = ids.to(torch.int32)
    at = torch.searchsorted(token_counts.ids, wanted).clamp_max(token_counts.ids.shape[1] - 1)
    return torch.where(token_counts.ids.gather(1, at) == wanted, token_counts.counts.gather(1, at), 0).clamp_min(0)


def unpacked(words: Tensor, vocab: int) -> Tensor:
    """Bits ``[..., ceil(vocab / 32)]`` int32 as bools ``[..., vocab]``."""
    bits = (words[..., None] >> slots_upto(32, words).to(torch.int32)) & 1
    return bits.flatten(-2)[..., :vocab] != 0


def biased(x: Tensor, flat: FlatProcessors, drafted: Tensor) -> Tensor:
    """One entry of the lists after the other; `drafted` ``[batch, n]`` counts the tokens after the output's."""
    assert flat.bias_ids is not None and flat.bias_values is not None
    generated = drafted if flat.num_output is None else flat.num_output[:, None] + drafted
    for entry in range(flat.bias_ids.shape[1]):
        ids = flat.bias_ids[:, entry]
        inside = ((ids >= 0) & (ids < x.shape[-1]))[:, None].expand(generated.shape)
        values = torch.where(inside, flat.bias_values[:, entry, None].to(x.dtype), 0.0)
        if flat.bias_until is not None:
            values = values.masked_fill(inside & (generated < flat.bias_until[:, entry, None]), -math.inf)
        x = x.scatter_add(-1, torch.where(inside, ids[:, None], 0)[..., None].long(), values[..., None])
    return x


def onto_vocab(ids: Tensor, values: Tensor, vocab: int) -> Tensor:
    """The sum of the values of each id, ``[..., n]`` to ``[..., vocab]``."""
    inside = (ids >= 0) & (ids < vocab)
    index = torch.where(inside, ids, vocab).long()
    return values.new_zeros(*ids.shape[:-1], vocab + 1).scatter_add(-1, index, values)[..., :vocab]


def flagged_lists(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Lists of ids ``[lists, n]``, empty where they do not ascend, and the flags ``[lists]``."""
    follows = (ids[:, 1:] > ids[:, :-1]) | (ids[:, 1:] == NO_ID)
    bad = ~follows.all(1)
    return ids.masked_fill(bad[:, None], NO_ID), torch.where(bad, int(Status.BAD_PARAM), 0).to(torch.int32)


def valid_penalties(penalties: Tensor) -> tuple[Tensor, Tensor]:
    """Repetition, frequency and presence ``[lists, 3]``, off where out of range, and the flags ``[lists]``."""
    repetition = slots_upto(3, penalties) == 0
    bad = ~penalties.isfinite() | (repetition & (penalties <= 0))
    return torch.where(bad, repetition.to(penalties.dtype), penalties), torch.where(
        bad.any(-1), int(Status.BAD_PARAM), 0
    ).to(torch.int32)
