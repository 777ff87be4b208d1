"""Reference of `verify_chain`: every rule as one loop over positions, all sequences of the batch at once.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the token rule, Sun et al.
2024 (arXiv 2403.10444) for the block rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import PLACEHOLDER_TOKEN_ID, Status
from .law import Law, Params, draw, exp, make_law, make_params, tile_sum
from .sample import perturbed

TOKEN, BLOCK, MATCH, GREEDY = range(4)


@dataclass
class DraftLaw:
    """The draft's laws over target ids; ``probs is None``: all mass on the draft token."""

    probs: Tensor | None  # [batch, num_draft, vocab]
    status: Tensor  # [batch, num_draft] int32


@dataclass
class Walk:
    """Where a rule stopped, ``[batch]`` each."""

    accepted: Tensor
    target_rows: Tensor  # how many leading target rows the rule had to read
    draft_rows: Tensor  # how many leading draft rows
    scale: Tensor  # residual weights are (scale · P − Q)+


def verify_chain(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, acceptance: int, return_acceptance: bool,
    *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """tokens ``[batch, num_draft + 1]``, num_accepted, num_tokens, status ``[batch]``, acceptance ``[batch,
    num_draft]``.
    """
    batch, num_draft = draft_tokens.shape
    vocab = target_logits.shape[-1]
    target_params = make_params(batch, target_logits, *params[:9])  # type: ignore[arg-type]
    draft_params = make_params(batch, target_logits, *params[9:])  # type: ignore[arg-type]
    if acceptance == GREEDY:
        target_params.temperature = torch.zeros_like(target_params.temperature)
    length, idle, ends_in_eos, status = block_lengths(draft_tokens, num_draft_tokens, eos_token_ids, vocab)
    tokens = draft_tokens.to(torch.int64).clamp(0, vocab - 1)
    target = make_law(target_logits, target_params)
    draft = make_draft(
        draft_logits, draft_probs, draft_values, draft_argmax, draft_status, draft_params, target_to_draft, vocab
    )
    rows, slots = slots_upto(num_draft, tokens), slots_upto(num_draft + 1, tokens)

    if acceptance in (MATCH, GREEDY):
        # without noise the scores of a greedy row are 0 at the argmax and −inf elsewhere: its "draw" is the argmax
        wanted = target.argmax if noise_keys is None else perturbed(target, noise_keys, None).argmax(-1)
        agree = (tokens == wanted[:, :-1]) & (rows < length[:, None])
        accepted = agree.int().cumprod(-1).sum(-1)
        walk = Walk(accepted, accepted + 1, torch.zeros_like(accepted), torch.ones_like(accepted))
        final = at(wanted, accepted)
    else:
        if uniform_samples is None:  # every sequence is greedy: nothing is drawn
            uniform_samples = torch.zeros(batch, num_draft + 1, device=tokens.device)
        bad_uniform = ~((uniform_samples >= 0) & (uniform_samples < 1))
        uniform_samples = uniform_samples.masked_fill(bad_uniform, 0.0)
        walk = token_rule(target, draft, tokens, length, uniform_samples)
        coins_drawn = ~target.one_hot[:, :-1]
        if acceptance == BLOCK and draft.probs is not None:
            block = block_rule(target, draft, tokens, length, uniform_samples)
            by_block = torch.ones_like(idle) if draft_probs is not None else ~draft_params.greedy[:, 0]
            walk = Walk(*(torch.where(by_block, getattr(block, f), getattr(walk, f)) for f in vars(walk)))
            coins_drawn = coins_drawn | by_block[:, None]
        final = final_token(target, draft, tokens, length, walk, uniform_samples[:, 0])
        read = (rows < walk.draft_rows[:, None]) & coins_drawn
        status = status | any_flag(draft.status, read)
        read = torch.cat([~at(target.one_hot, walk.accepted)[:, None], read], 1)
        bad_uniform[:, 0] &= ~(idle | (ends_in_eos & (walk.accepted == length)))
        status = status | any_flag(bad_uniform * int(Status.BAD_PARAM), read)

    ended = ends_in_eos & (walk.accepted == length)
    target_rows = torch.where(ends_in_eos, walk.target_rows.minimum(length), walk.target_rows)
    status = torch.where(idle, status, status | any_flag(target.status, slots < target_rows[:, None]))
    num_tokens = torch.where(idle, 0, walk.accepted + (~ended).int())
    out = torch.nn.functional.pad(tokens, (0, 1))
    out = torch.where(slots == walk.accepted[:, None], final[:, None], out)
    out = torch.where(slots < num_tokens[:, None], out, PLACEHOLDER_TOKEN_ID)
    overlap = torch.empty(0, dtype=torch.float32, device=tokens.device)
    if return_acceptance:
        q = torch.nn.functional.one_hot(tokens, vocab) if draft.probs is None else draft.probs
        overlap = tile_sum(torch.minimum(target.probs[:, :-1], q.to(target.probs.dtype))).to(torch.float32)
        overlap = torch.where(rows < length[:, None], overlap, -1.0)
    int32 = torch.int32
    return out, walk.accepted.to(int32), num_tokens.to(int32), status.to(int32), overlap


def slots_upto(n: int, like: Tensor) -> Tensor:
    """0 … n − 1."""
    return torch.arange(n, device=like.device)


def at(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[b, index[b]]`` for each sequence b; `rows` is ``[batch, n]`` or ``[batch, n, vocab]``."""
    index = index[:, None] if rows.dim() == 2 else index[:, None, None].expand(-1, 1, rows.shape[-1])
    return rows.gather(1, index)[:, 0]


def any_flag(flags: Tensor, where: Tensor) -> Tensor:
    """The OR over the last dimension of `flags` where `where`."""
    flags = torch.where(where, flags, 0)
    bits = [((flags & int(s)) != 0).any(-1) * int(s) for s in Status if s]
    return torch.stack(bits, -1).sum(-1)


def block_lengths(
    draft_tokens: Tensor, num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many draft tokens each sequence's block holds, whether it idles, whether its last draft token is an EOS;
    flags.

    A block ends before the first placeholder or invalid id, and after the first EOS: cut there before any rule looks at
    it, because a stopping rule that looked at a token and then dropped it would bias the output.
    """
    batch, num_draft = draft_tokens.shape
    full = torch.full((batch,), num_draft, device=draft_tokens.device)
    given = full if num_draft_tokens is None else num_draft_tokens.to(torch.int64)
    status = torch.where((given > num_draft) | (given < -1), int(Status.BAD_PARAM), 0)
    idle, limit = given < 0, given.clamp(0, num_draft)
    slots = slots_upto(num_draft, draft_tokens)
    unusable = (draft_tokens < 0) | (draft_tokens >= vocab)
    length = torch.where(unusable, slots, num_draft).amin(-1).minimum(limit) if num_draft else limit
    ends_in_eos = torch.zeros_like(idle)
    if eos_token_ids is not None and num_draft:
        is_eos = (draft_tokens[..., None] == eos_token_ids).any(-1) & (slots < length[:, None])
        first = torch.where(is_eos, slots, num_draft).amin(-1)
        ends_in_eos = first < num_draft
        length = length.minimum(first + 1)
    if num_draft:
        stop = at(torch.nn.functional.pad(draft_tokens, (0, 1)), length)
        stopped = (length < limit) & (stop != PLACEHOLDER_TOKEN_ID) & ~ends_in_eos & ~idle
        status = status | torch.where(stopped, int(Status.BAD_TOKEN), 0)
    return torch.where(idle, 0, length), idle, ends_in_eos & ~idle, status


def make_draft(
    logits: Tensor | None, probs: Tensor | None, values: Tensor | None, argmax: Tensor | None, status: Tensor | None,
    params: Params, target_to_draft: Tensor | None, vocab: int,
) -> DraftLaw:  # fmt: skip
    """The draft's laws, from its logits (with the stats kept from drafting, or anew) or its probabilities."""
    if probs is not None:
        bad = ~(probs >= 0)
        flags = torch.where(probs.isnan().any(-1), int(Status.NAN), 0)
        law = DraftLaw(probs.masked_fill(bad, 0.0), flags)
    elif logits is None:
        return DraftLaw(None, torch.zeros(1, dtype=torch.int32, device=params.status.device))
    elif values is None or argmax is None or status is None:
        made = make_law(logits, params)
        law = DraftLaw(made.probs, made.status)
    else:
        law = DraftLaw(probs_from_stats(logits, values, argmax, params), status)
    if target_to_draft is not None and law.probs is not None:
        index = torch.nn.functional.pad(target_to_draft, (0, vocab - target_to_draft.numel()), value=-1)
        law.probs = torch.where(index >= 0, law.probs[..., index.clamp_min(0)], 0.0)
    return law


def probs_from_stats(logits: Tensor, values: Tensor, argmax: Tensor, params: Params) -> Tensor:
    """The law that `values` and `argmax` describe, by the formula in `RowStats`."""
    maximum, cutoff, normalizer = values[..., 0:1], values[..., 1:2], values[..., 3:4]
    x = logits.to(values.dtype)
    weights = exp((x - maximum) * params.inverse_temperature[..., None])
    kept = (x >= cutoff) & (x > -math.inf)
    hot = slots_upto(x.shape[-1], x) == argmax[..., None]
    one_hot = params.greedy[..., None] | maximum.isinf()
    return torch.where(one_hot, hot.to(x.dtype), torch.where(kept, weights / normalizer, 0.0))


def draft_row(draft: DraftLaw, tokens: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The draft's law ``[batch, vocab]`` at one position of each sequence."""
    if draft.probs is None:
        return torch.nn.functional.one_hot(at(tokens, position), vocab)
    return at(draft.probs, position)


def token_rule(target: Law, draft: DraftLaw, tokens: Tensor, length: Tensor, uniforms: Tensor) -> Walk:
    """Accept x iff ``u · Q(x) < P(x)``, strictly, until the first rejection; a point mass P accepts only its id."""
    accepted = torch.zeros_like(length)
    for i in range(tokens.shape[1]):
        x = tokens[:, i : i + 1]
        p = target.probs[:, i].gather(-1, x)[:, 0]
        q = 1.0 if draft.probs is None else draft.probs[:, i].gather(-1, x)[:, 0]
        accept = torch.where(target.one_hot[:, i], x[:, 0] == target.argmax[:, i], uniforms[:, i + 1] * q < p)
        accepted += (accepted == i) & (i < length) & accept
    return Walk(accepted, accepted + 1, (accepted + 1).minimum(length), torch.ones_like(target.probs[:, 0, 0]))


def block_rule(target: Law, draft: DraftLaw, tokens: Tensor, length: Tensor, uniforms: Tensor) -> Walk:
    """Block verification: the last i with ``u_i < h_i`` counts (spec: w, R and h of Sun et al., algorithm 2)."""
    assert draft.probs is not None
    w = torch.ones_like(target.probs[:, 0, 0])
    accepted, scale, needed = torch.zeros_like(length), w.clone(), torch.zeros_like(length)
    for i in range(1, tokens.shape[1] + 1):
        x = tokens[:, i - 1 : i]
        p, q = target.probs[:, i - 1].gather(-1, x)[:, 0], draft.probs[:, i - 1].gather(-1, x)[:, 0]
        in_block = (i <= length) & (w > 0)
        needed += in_block  # draft rows; once w is 0 no later token can be accepted
        ratio = torch.where(p <= 0, 0.0, torch.where(q <= 0, math.inf, w * p / q))
        w = torch.where(in_block, ratio.clamp_max(1.0), w)
        inner = i < length
        next_draft = draft.probs[:, min(i, tokens.shape[1] - 1)]
        residual = tile_sum((w[:, None] * target.probs[:, i] - next_draft).clamp_min(0.0))
        below = residual + 1 - w
        h = torch.where(inner, torch.where(below > 0, residual / below, 1.0), w)
        success = in_block & (w > 0) & (uniforms[:, i] < h)
        accepted = torch.where(success, i, accepted)
        scale = torch.where(success, w, scale)
    return Walk(accepted, torch.where(accepted == length, length + 1, needed), needed, scale)


def final_token(target: Law, draft: DraftLaw, tokens: Tensor, length: Tensor, walk: Walk, uniform: Tensor) -> Tensor:
    """Recovered from ``norm((scale · P − Q)+)`` (from P if that is empty), or bonus from P after a fully accepted
    block.
    """
    p = at(target.probs, walk.accepted)
    weights = p
    if tokens.shape[1]:
        q = draft_row(draft, tokens, walk.accepted.clamp_max(tokens.shape[1] - 1), p.shape[-1])
        residual = (walk.scale[:, None] * p - q).clamp_min(0.0)
        use = (walk.accepted < length) & (tile_sum(residual) > 0)
        weights = torch.where(use[:, None], residual, p)
    drawn = draw(weights, uniform)
    return torch.where(at(target.one_hot, walk.accepted), at(target.argmax, walk.accepted), drawn)
