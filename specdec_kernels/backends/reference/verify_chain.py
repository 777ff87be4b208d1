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
from .target_law import LOSSY, Mixture, make_mixture, onto_target

TOKEN, BLOCK, MATCH, GREEDY = range(4)


@dataclass
class DraftLaw:
    """The draft's laws over target ids; ``probs is None``: all mass on the draft token."""

    probs: Tensor | None  # [batch, n, vocab], n = num_draft, or one more where the bonus is a cascade's
    status: Tensor  # [batch, n] int32


@dataclass
class Walk:
    """Where a rule stopped, ``[batch]`` each."""

    accepted: Tensor
    target_rows: Tensor  # how many leading target rows the rule had to read
    draft_rows: Tensor  # how many leading draft rows
    weight: Tensor  # what is recovered is drawn from (weight · π − Q)+


def verify_chain(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, acceptance: int, return_acceptance: bool,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
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
        mixture = make_mixture(
            law, law_variant, law_alpha, law_beta, target_logits, draft_logits, target, draft.probs, target_to_draft
        )
        walk = token_rule(target, draft, mixture, tokens, length, uniform_samples)
        coins_drawn = draws_coin(target, draft, mixture, tokens)
        draft_read = torch.ones_like(coins_drawn) if law > LOSSY else ~target.one_hot[:, :-1]
        if acceptance == BLOCK and draft.probs is not None:
            block = block_rule(target, draft, mixture, tokens, length, uniform_samples)
            by_block = torch.ones_like(idle) if draft_probs is not None else ~draft_params.greedy[:, 0]
            walk = Walk(*(torch.where(by_block, getattr(block, f), getattr(walk, f)) for f in vars(walk)))
            coins_drawn, draft_read = coins_drawn | by_block[:, None], draft_read | by_block[:, None]
        final, drawn = final_token(target, draft, mixture, tokens, length, walk, uniform_samples[:, 0])
        ended = ends_in_eos & (walk.accepted == length)
        walked = rows < walk.draft_rows[:, None]
        status = status | any_flag(draft.status[:, :num_draft], walked & draft_read)
        if cascade_bonus:
            bonus = (walk.accepted == length) & ~idle & ~ended
            status = status | torch.where(bonus, at(draft.status, length), 0)
        read = torch.cat([(drawn & ~idle & ~ended)[:, None], walked & coins_drawn], 1)
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
        q = torch.nn.functional.one_hot(tokens, vocab) if draft.probs is None else draft.probs[:, :num_draft]
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
        return DraftLaw(None, torch.zeros(1, 1, dtype=torch.int32, device=params.status.device))
    elif values is None or argmax is None or status is None:
        made = make_law(logits, params)
        law = DraftLaw(made.probs, made.status)
    else:
        law = DraftLaw(probs_from_stats(logits, values, argmax, params), status)
    assert law.probs is not None
    law.probs = onto_target(law.probs, target_to_draft, vocab)
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


def token_rule(
    target: Law, draft: DraftLaw, mixture: Mixture, tokens: Tensor, length: Tensor, uniforms: Tensor
) -> Walk:
    """Accept x iff ``u · Q(x) < π(x)``, strictly, until the first rejection; a point mass P = π accepts only its id."""
    accepted = torch.zeros_like(length)
    for i in range(tokens.shape[1]):
        x = tokens[:, i : i + 1]
        p, q = probs_of(target, draft, i, x)
        accept = mixture.accepts(i, x, uniforms[:, i + 1], p, q)
        if mixture.kept is None:
            accept = torch.where(target.one_hot[:, i], x[:, 0] == target.argmax[:, i], accept)
        accepted += (accepted == i) & (i < length) & accept
    return Walk(accepted, accepted + 1, (accepted + 1).minimum(length), torch.ones_like(target.probs[:, 0, 0]))


def draws_coin(target: Law, draft: DraftLaw, mixture: Mixture, tokens: Tensor) -> Tensor:
    """Whether the token rule would look at a position's coin ``[batch, num_draft]``."""
    if mixture.kept is None:
        return ~target.one_hot[:, :-1]
    needed = torch.zeros_like(tokens, dtype=torch.bool)
    for i in range(tokens.shape[1]):
        x = tokens[:, i : i + 1]
        needed[:, i] = ~mixture.needs_no_coin(i, x, probs_of(target, draft, i, x)[1])
    return needed


def probs_of(target: Law, draft: DraftLaw, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """P and Q ``[batch]`` of tokens `x` ``[batch, 1]`` at position i."""
    p = target.probs[:, i].gather(-1, x)[:, 0]
    return p, torch.ones_like(p) if draft.probs is None else draft.probs[:, i].gather(-1, x)[:, 0]


def block_rule(
    target: Law, draft: DraftLaw, mixture: Mixture, tokens: Tensor, length: Tensor, uniforms: Tensor
) -> Walk:
    """Block verification: the last i with ``u_i < h_i`` counts (w, R and h of Sun et al., algorithm 2, π for P)."""
    assert draft.probs is not None
    w = torch.ones_like(target.probs[:, 0, 0])
    accepted, weight, needed = torch.zeros_like(length), w.clone(), torch.zeros_like(length)
    for i in range(1, tokens.shape[1] + 1):
        x = tokens[:, i - 1 : i]
        p, q = probs_of(target, draft, i - 1, x)
        pi = mixture.prob(i - 1, x, p, q)
        in_block = (i <= length) & (w > 0)
        needed += in_block  # draft rows; once w is 0 no later token can be accepted
        ratio = torch.where(pi <= 0, 0.0, torch.where(q <= 0, math.inf, w * pi / q))
        w = torch.where(in_block, ratio.clamp_max(1.0), w)
        inner = i < length
        following = torch.full_like(length, min(i, tokens.shape[1] - 1))
        residual = tile_sum(residual_at(target, draft, mixture, tokens, following, w))
        below = residual + 1 - w
        h = torch.where(inner, torch.where(below > 0, residual / below, 1.0), w)
        success = in_block & (w > 0) & (uniforms[:, i] < h)
        accepted = torch.where(success, i, accepted)
        weight = torch.where(success, w, weight)
    return Walk(accepted, torch.where(accepted == length, length + 1, needed), needed, weight)


def residual_at(
    target: Law, draft: DraftLaw, mixture: Mixture, tokens: Tensor, position: Tensor, weight: Tensor
) -> Tensor:
    """``(weight π − Q)+`` ``[batch, vocab]`` at one position of each sequence."""
    p = at(target.probs, position)
    kept = None if mixture.kept is None else at(mixture.kept, position)
    q = draft_row(draft, tokens, position, p.shape[-1])
    return mixture.residual(at(mixture.scale, position), kept, weight, p, q)


def final_token(
    target: Law, draft: DraftLaw, mixture: Mixture, tokens: Tensor, length: Tensor, walk: Walk, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Recovered from ``norm((weight · π − Q)+)`` (from π, or P if not a cascade, if that is empty), or bonus after a
    fully accepted block: from P, or π if the bonus is a cascade's. And whether it took a uniform.
    """
    p = at(target.probs, walk.accepted)
    weights, drawn = p, ~at(target.one_hot, walk.accepted)
    rows = mixture.scale.shape[1]  # those that have a π
    if rows:
        position = walk.accepted.clamp_max(rows - 1)
        if mixture.kept is not None:
            mixed = (walk.accepted < length) | (rows > tokens.shape[1])  # the bonus is a cascade's
            pi = at(mixture.scale, position)[:, None] * p
            pi = pi + torch.where(at(mixture.kept, position), draft_row(draft, tokens, position, p.shape[-1]), 0.0)
            weights, drawn = torch.where(mixed[:, None], pi, p), drawn | mixed
        residual = residual_at(target, draft, mixture, tokens, position, walk.weight)
        use = (walk.accepted < length) & (tile_sum(residual) > 0)
        weights = torch.where(use[:, None], residual, weights)
    by_uniform = draw(weights, uniform)
    return torch.where(drawn, by_uniform, at(target.argmax, walk.accepted)), drawn
