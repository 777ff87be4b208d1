"""Reference of `verify_chain`: every rule for all sequences of the batch at once.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the token rule, Sun et al.
2024 (arXiv 2403.10444) for the block rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.arguments import ACCEPTANCES, VerifyChainArguments
from ...types import PLACEHOLDER_TOKEN_ID, Status
from .coins import with_numbers
from .draft import can_give, draft_probs
from .law import (
    Params,
    Remainder,
    RowLaws,
    accept_token,
    block_threshold,
    make_law,
    make_params,
    next_block_weight,
    rows_of_target,
    tile_sum,
)  # fmt: skip
from .packed import indexed, padded, widened, with_bonus_rows
from .processors import processed
from .reads import Reads, clean_uniforms, flags_of
from .rows import at, laid_out, slots_upto
from .sample import perturbed
from .target_law import Mixtures, make_mixtures

TOKEN, BLOCK, MATCH, GREEDY = ACCEPTANCES.values()


def verify_chain(args: VerifyChainArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens ``[batch, num_draft + 1]``, num_accepted, num_tokens, status ``[batch]``, acceptance ``[batch,
    num_draft]``.
    """
    if args.cu_num_draft_tokens is not None or args.draft_index is not None:
        laid_out, bad = padded(args) if args.cu_num_draft_tokens is not None else indexed(args)
        tokens, num_accepted, num_tokens, status, overlap = verify_chain(laid_out)
        overlap = widened(overlap, args.num_draft) if args.return_acceptance else overlap
        return widened(tokens, args.num_draft + 1), num_accepted, num_tokens, status | bad, overlap

    args, flags = prepared(args)
    return finished(args, *decide(args, flags))


def prepared(args: VerifyChainArguments) -> tuple[VerifyChainArguments, Tensor | int]:
    """The same step with random numbers and logits as the rules see them, and the flags of its processors."""
    args = with_bonus_rows(args._replace(shared=with_numbers(args.shared, args.num_draft + 1)))
    before = None if args.shared.processors is None else draft_before(args.draft_tokens)
    logits, flags = processed(args.shared.target_logits, args.shared.processors, before)
    return args._replace(shared=args.shared._replace(target_logits=logits, processors=None)), flags


def decide(args: VerifyChainArguments, flags: Tensor | int) -> tuple[Chain, Walk, Remainder]:
    """What a prepared step looks at, where the rule stopped, and what the final token is drawn from."""
    chain = make_chain(args, flags)
    if args.acceptance in (MATCH, GREEDY):
        walk, rest = match_rule(chain, args.shared.noise_keys)
    else:
        walk = token_rule(chain)
        if args.acceptance == BLOCK:
            walk = walk.where(~chain.sampled, block_rule(chain))
        chain = replace(chain, span=chain.span.before(walk.length))
        rest = remainder_after(chain, walk)
    return chain, walk, rest


def finished(
    args: VerifyChainArguments, chain: Chain, walk: Walk, rest: Remainder
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the op gives."""
    final = rest.draw(chain.uniforms[:, 0])
    follows, status = draws_final(chain, walk), chain.span.status
    if args.bonus_tokens is not None:
        given, bonus = whole_with_bonus(chain.span, walk.accepted), args.bonus_tokens.to(torch.int64)
        good = (bonus >= 0) & (bonus < chain.Q.shape[-1])
        final, follows = torch.where(given, bonus, final), torch.where(given, good, follows)
        bad = given & ~good & (bonus != PLACEHOLDER_TOKEN_ID)
        status = status | torch.where(bad, int(Status.BAD_TOKEN), 0)
    num_tokens = walk.accepted + follows.int()
    tokens = laid_out(chain.tokens, walk.accepted, final, num_tokens)
    overlap = torch.empty(0, dtype=torch.float32, device=tokens.device)
    if args.return_acceptance:
        overlap = tile_sum(torch.minimum(chain.target.probs, chain.Q))[:, :-1].to(torch.float32)
        slots, span = slots_upto(args.num_draft, tokens), make_span(args, chain.Q.shape[-1])
        overlap = torch.where(slots < span.length[:, None], overlap, -1.0)
    reads = what_was_read(args, chain, walk, rest)
    status = status | flags_of(reads, args.shared, chain.params, chain.draft_params)
    int32 = torch.int32
    return tokens, walk.accepted.to(int32), num_tokens.to(int32), status.to(int32), overlap


@dataclass
class Span:
    """The drafted extent of each sequence that the rules look at, ``[batch]``."""

    length: Tensor  # int64, draft tokens; 0 where idle
    idle: Tensor  # bool
    closed: Tensor  # bool: nothing is drawn after them
    takes_bonus: Tensor  # bool: because a given token follows
    status: Tensor

    def before(self, length: Tensor) -> Span:
        """Ended before a token that its own distribution cannot have given, where `length` ``[batch]`` is shorter."""
        ended = length < self.length
        status = self.status | torch.where(ended, int(Status.BAD_DRAFT), 0)
        return Span(length, self.idle, self.closed & ~ended, self.takes_bonus & ~ended, status)


def make_span(args: VerifyChainArguments, vocab: int) -> Span:
    """A span ends before the first placeholder or invalid id, and after the first EOS: cut there before any rule looks
    at it, because a stopping rule that looked at a token and then dropped it would bias the output.
    """
    draft_tokens, eos_token_ids = args.draft_tokens, args.shared.eos_token_ids
    batch, num_draft = draft_tokens.shape
    full = torch.full((batch,), num_draft, device=draft_tokens.device)
    given = full if args.num_draft_tokens is None else args.num_draft_tokens.to(torch.int64)
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
    takes_bonus = torch.full_like(idle, args.bonus_tokens is not None) & ~idle & ~ends_in_eos & (length == limit)
    if num_draft:
        stop = at(torch.nn.functional.pad(draft_tokens, (0, 1)), length)
        stopped = (length < limit) & (stop != PLACEHOLDER_TOKEN_ID) & ~ends_in_eos & ~idle
        status = status | torch.where(stopped, int(Status.BAD_TOKEN), 0)
    return Span(torch.where(idle, 0, length), idle, ends_in_eos & ~idle | takes_bonus, takes_bonus, status)


@dataclass
class Chain:
    """What the rules look at: the draft tokens x, and at every position P, Q and what the target law makes of them."""

    span: Span
    params: Params
    draft_params: Params
    target: RowLaws  # P: [batch, num_draft + 1, vocab]
    Q: Tensor  # [batch, num_draft + 1, vocab]; 0 at the bonus, unless a cascade's
    mixtures: Mixtures  # [batch, num_draft + 1]; lossless at the bonus, unless a cascade's
    sampled: Tensor  # [batch] bool: the draft tokens were drawn from laws, not from point masses
    uniforms: Tensor  # [batch, num_draft + 1]: the final token's, then the coins u
    tokens: Tensor  # [batch, num_draft] int64: x, clamped into the vocabulary
    p: Tensor  # [batch, num_draft]: P(x), Q(x), π(x)
    q: Tensor
    pi: Tensor
    needs_coin: Tensor  # [batch, num_draft] bool: not where x is kept, nor where P is a point mass and π = P
    reads_draft: Tensor  # [batch, num_draft] bool, for the token rule: not where P is a point mass and π = P

    def remainder(self, row: Tensor, w: Tensor) -> Tensor:
        """``(w π − Q)+`` ``[batch, vocab]`` at one row of each sequence."""
        return self.mixtures.at(row).remainder(at(self.target.probs, row), at(self.Q, row), w)

    def left(self, i: int, w: Tensor) -> Tensor:
        """The sum of ``(w π − Q)+`` at row i, ``[batch]``."""
        return tile_sum(self.remainder(torch.full_like(self.span.length, i), w))


def draft_before(tokens: Tensor) -> Tensor:
    """The draft tokens before each row ``[batch, num_draft + 1, num_draft]``, −1 elsewhere."""
    slots = slots_upto(tokens.shape[1] + 1, tokens)
    return torch.where(slots[:-1] < slots[:, None], tokens[:, None].to(torch.int64), PLACEHOLDER_TOKEN_ID)


def make_chain(args: VerifyChainArguments, flags: Tensor | int) -> Chain:
    shared = args.shared
    batch, rows, vocab = shared.target_logits.shape
    params = make_params(batch, shared.target_logits, shared.params, flags, rows_of_target(shared))
    draft_params = make_params(batch, shared.target_logits, shared.draft_params)
    if args.acceptance == GREEDY:
        params.temperature = torch.zeros_like(params.temperature)
    tokens = args.draft_tokens.to(torch.int64).clamp(0, vocab - 1)
    target = make_law(shared.target_logits, params)
    P = target.probs
    sampled = torch.ones_like(params.greedy[:, 0])
    if shared.draft_probs is None and shared.draft_logits is None:
        Q, sampled = (slots_upto(vocab, tokens) == tokens[..., None]).to(P.dtype), ~sampled
    else:
        Q = draft_probs(shared, draft_params)
        sampled = sampled if shared.draft_logits is None else ~draft_params.greedy[:, 0]
    mixtures = make_mixtures(shared, P, Q)
    Q = torch.nn.functional.pad(Q, (0, 0, 0, rows - Q.shape[1]))
    x, of_x = tokens[..., None], mixtures.of(tokens)
    p, q = P[:, :-1].gather(-1, x), Q[:, :-1].gather(-1, x)
    certain = target.one_hot[:, :-1]
    needs_coin = ~of_x.kept[..., 0] if mixtures.is_cascade else ~certain
    uniforms = torch.zeros(batch, rows, device=tokens.device)  # where every sequence is greedy nothing is drawn
    if shared.uniform_samples is not None:
        uniforms = clean_uniforms(shared.uniform_samples)
    span = make_span(args, vocab)
    return Chain(
        span, params, draft_params, target, Q, mixtures, sampled, uniforms, tokens,
        p[..., 0], q[..., 0], of_x.probs(p, q)[..., 0], needs_coin, ~certain | mixtures.is_cascade,
    )  # fmt: skip


# --- the rules --------------------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """Where a rule stopped, ``[batch]`` each."""

    accepted: Tensor  # draft tokens
    reached: Tensor  # how many leading positions of the span the rule had to look at
    weight: Tensor  # w: a rejected token's place is filled from (w π − Q)+
    length: Tensor  # draft tokens: all of the span, or those before one that Q cannot have given

    def where(self, here: Tensor, other: Walk) -> Walk:
        """The sequences that are `here`, the rest from `other`."""
        return Walk(*(torch.where(here, *both) for both in zip(self, other, strict=True)))


def accept_while(agrees: Tensor, chain: Chain) -> Walk:
    """Accepts the longest prefix of the span that `agrees` ``[batch, num_draft]``."""
    length = chain.span.length
    inside = slots_upto(agrees.shape[1], agrees) < length[:, None]
    accepted = (agrees & inside).int().cumprod(-1).sum(-1)
    return Walk(accepted, (accepted + 1).minimum(length), torch.ones_like(chain.target.maximum[:, 0]), length)


def match_rule(chain: Chain, noise_keys: Tensor | None) -> tuple[Walk, Remainder]:
    """Accept x iff it is what plain sampling with this noise draws, ``argmax (log P + G)``, or plain greedy decoding,
    ``argmax P``; the final token is what that draws next.
    """
    # without noise the scores of a greedy row are 0 at the argmax and −inf elsewhere: its "draw" is the argmax
    wanted = chain.target.argmax
    if noise_keys is not None:
        wanted = perturbed(chain.target, noise_keys, None).argmax(-1)
    walk = accept_while(chain.tokens == wanted[:, :-1], chain)
    P = chain.target.at(walk.accepted)
    return walk, Remainder(P.weights, torch.ones_like(P.certain), at(wanted, walk.accepted))


def token_rule(chain: Chain) -> Walk:
    """Accept x iff ``u Q(x) < π(x)``, strictly; without a coin iff ``π(x) > 0``. The span ends before an x that Q
    cannot have given, once the rule has come there.
    """
    by_coin = accept_token(chain.uniforms[:, 1:], chain.mixtures.accept[:, :-1] * chain.p, chain.q)
    agrees = torch.where(chain.needs_coin, by_coin, chain.pi > 0)
    impossible = chain.reads_draft & ~can_give(chain.q)
    walk = accept_while(agrees & ~impossible, chain)
    stopped = (walk.accepted < walk.length) & at(torch.nn.functional.pad(impossible, (0, 1)), walk.accepted)
    return walk._replace(length=torch.where(stopped, walk.accepted, walk.length))


def block_rule(chain: Chain) -> Walk:
    """Accept up to the last i with ``u_i < h_i`` (Sun et al., algorithm 2, π for P): ``w_i = min(1, w_{i−1} π(x_i) /
    Q(x_i))``, ``h_i = R_i / (R_i + 1 − w_i)`` with ``R_i = Σ (w_i π − Q)+`` at the next position, at the end ``h_i =
    w_i``. The span ends before an x that Q cannot have given, if its weight is not 0 by then.
    """
    slots = slots_upto(chain.tokens.shape[1], chain.tokens)
    impossible = torch.where(can_give(chain.q), slots.numel(), slots)
    length = torch.nn.functional.pad(impossible, (0, 1), value=slots.numel()).amin(-1).minimum(chain.span.length)
    w = torch.ones_like(chain.target.maximum[:, 0])
    walk = Walk(torch.zeros_like(length), torch.zeros_like(length), w, length)
    for i in range(1, chain.tokens.shape[1] + 1):
        inside = (i <= length) & (w > 0)  # once w is 0 no later token can be accepted
        w = torch.where(inside, next_block_weight(w, chain.pi[:, i - 1], chain.q[:, i - 1]), w)
        h = torch.where(i < length, block_threshold(w, chain.left(i, w)), w)
        success = inside & (w > 0) & (chain.uniforms[:, i] < h)
        reached = walk.reached + inside
        walk = Walk(torch.full_like(length, i), reached, w, length).where(success, walk._replace(reached=reached))
    ended = (length < chain.span.length) & (w > 0)
    return walk._replace(reached=walk.reached + ended, length=torch.where(ended, length, chain.span.length))


def remainder_after(chain: Chain, walk: Walk) -> Remainder:
    """What the final token is drawn from.

    After a rejection that is ``(w π − Q)+``. Where that is empty, and after a span accepted whole, it is the law there:
    π of a cascade (of the bonus only if that is the cascade's), unless that is 0 as Q is, else P.
    """
    row = walk.accepted
    P, rejected = chain.target.at(row), row < chain.span.length
    mixtures = chain.mixtures.at(row)
    mixed = rejected & mixtures.is_cascade | mixtures.at_bonus
    left = chain.remainder(row, walk.weight)
    pi = mixtures.probs(P.weights, at(chain.Q, row))
    weights = torch.where((mixed & (tile_sum(pi) > 0))[:, None], pi, P.weights)
    weights = torch.where((rejected & (tile_sum(left) > 0))[:, None], left, weights)
    return Remainder(weights, P.certain & ~mixed, P.argmax)


# --- what was read ----------------------------------------------------------------------------------------------------


def draws_final(chain: Chain, walk: Walk) -> Tensor:
    """Whether a token is drawn after the accepted ones ``[batch]``: not in an idle sequence, nor after an accepted EOS
    or where the bonus is given.
    """
    span = chain.span
    return ~span.idle & ~(span.closed & (walk.accepted == span.length))


def whole_with_bonus(span: Span, accepted: Tensor | int) -> Tensor:
    """Whether a given bonus follows so many accepted tokens ``[batch]``."""
    return span.takes_bonus & (span.length == accepted)


def what_was_read(args: VerifyChainArguments, chain: Chain, walk: Walk, rest: Remainder) -> Reads:
    """A rule reads P where it came to a position and where the final token is drawn, and Q and the coin of a position
    where they can matter; column 0 of the coins draws the final token.
    """
    slots = slots_upto(args.num_draft + 1, walk.accepted)
    reached, final = slots < walk.reached[:, None], draws_final(chain, walk)
    drawn = (slots == walk.accepted[:, None]) & final[:, None]
    draft, coins = torch.zeros_like(drawn), torch.zeros_like(drawn)
    if args.acceptance not in (MATCH, GREEDY):
        by_block = (chain.sampled if args.acceptance == BLOCK else torch.zeros_like(final))[:, None]
        mixtures, whole = chain.mixtures, walk.accepted == chain.span.length
        draft = reached & (by_block | mixtures.is_cascade | ~chain.target.one_hot)
        draft = draft | drawn & (whole & mixtures.at_bonus)[:, None]
        judged = reached[:, :-1] & (slots[:-1] < walk.length[:, None])
        coins = torch.cat([(final & ~rest.certain)[:, None], judged & (by_block | chain.needs_coin)], 1)
    return Reads(reached | drawn, draft, coins)
