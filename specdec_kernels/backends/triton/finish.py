"""The last kernels of a verify step: how many draft tokens stay, and the one token after them."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import BAD_TOKEN, TILE
from .bundles import TAKES_BONUS, Position, Row
from .draft import block_threshold
from .law import load_span
from .mixture import NO_ROW, law_remainder
from .noise import best_of_row
from .row import coin_at, draw_from_law, load_law, total_mass, walk_ids, walk_tiles
from .rules import BLOCK, first_number


@triton.jit
def store_outcome(b, chains, vocab, token_index, accepted, final, flags, out, num_draft):
    """Accepted tokens, then the final one (-1: none) or a bonus token that is given, then -1."""
    if chains.bonus_tokens is not None:
        span = chains.spans + b * 4
        if (tl.load(span + 2) == TAKES_BONUS) & (accepted == tl.load(span + 1)):
            given = tl.load(chains.bonus_tokens + b).to(tl.int64)
            good = (given >= -1) & (given < vocab)
            flags |= tl.where(good, 0, BAD_TOKEN)
            final = tl.where(good, given, -1)
    for start in range(0, num_draft + 1, out.slots):
        slot = start + tl.arange(0, out.slots)
        token = tl.load(chains.tokens + token_index + slot, mask=slot < accepted, other=-1).to(tl.int64)
        token = tl.where(slot == accepted, final, token)
        tl.store(out.tokens + b * (num_draft + 1) + slot, token, mask=slot <= num_draft)
    tl.store(out.num_accepted + b, accepted)
    tl.store(out.num_tokens + b, accepted + (final >= 0).to(tl.int32))
    tl.store(out.status + b, flags)


@triton.jit
def accepted_by_block(b, span, width, draft, uniforms, number, walked, tiles, TILES: tl.constexpr):
    """Block rule: the last i with ``u_i < h_i`` counts. Returns it and its weight, the factor on the law."""
    accepted = tl.zeros((), tl.int32)
    scale = tl.full((), 1.0, tl.float32)
    i = tl.full((), 1, tl.int32)
    while i <= span.length:
        weight = tl.load(walked.scales + b * (width + 1) + i)
        if weight > 0.0:
            coin, _ = coin_at(uniforms, number + i)  # `walk` has looked at its flags
            threshold = weight
            if i < span.length:
                left = total_mass(walked.masses + (b * (width + draft.bonus) + i) * tiles, tiles, TILES)
                threshold = block_threshold(weight, left)
            if coin < threshold:
                accepted = i
                scale = weight
        i += 1
    return accepted, scale


@triton.jit
def draw_remainder(target, draft, mixtures, at, scale, whole, masses, uniform, tiles, TILES: tl.constexpr):
    """An id from the `law_remainder` of a position, whose tiles have `masses`. Where that is nothing, from the law of a
    cascade, whose masses then take their place; -1 where that is nothing, as Q is, and without a cascade.
    """
    tile, rest, mass = walk_tiles(masses, tiles, uniform, -1, 0.0, TILES)
    if mixtures.kept_by != NO_ROW:
        if tile < 0:
            whole = tile < 0
            for other in range(tiles):
                ids = other * TILE + tl.arange(0, TILE)
                law = law_remainder(target, draft, mixtures, at, 1.0, whole, ids)
                tl.store(masses + other, tl.sum(law, 0))
            tl.debug_barrier()
            tile, rest, mass = walk_tiles(masses, tiles, uniform, -1, 0.0, TILES)
    id = tl.full((), -1, tl.int32)
    if tile >= 0:
        ids = tile * TILE + tl.arange(0, TILE)
        id = walk_ids(law_remainder(target, draft, mixtures, at, scale, whole, ids), ids, rest, mass)
    return id.to(tl.int64)


@triton.jit(do_not_specialize=["width", "tiles", "num_draft"])
def finish(
    target,
    chains,
    width,
    tiles,
    tile_mass,
    draft,
    mixtures,
    uniforms,
    walked,
    out,
    num_draft,
    TILES: tl.constexpr,
):
    """A program a sequence: how many tokens are accepted, then the recovered token, drawn from what the law has and Q
    has not (if that is nothing, from P or a cascade's law), or the bonus token, from P or a cascade's law; none after
    an accepted EOS.
    """
    b = tl.program_id(0).to(tl.int64)
    span = load_span(chains.spans, b)
    length = span.length
    flags = tl.load(chains.state + b * 3)
    accepted = tl.load(chains.state + b * 3 + 1)
    scale = tl.full((), 1.0, tl.float32)
    number = first_number(chains, span, b, width)
    if walked.rule == BLOCK:
        if tl.load(chains.state + b * 3 + 2) > 0:
            accepted, scale = accepted_by_block(b, span, width, draft, uniforms, number, walked, tiles, TILES)
    final = tl.full((), -1, tl.int64)
    ended = span.closed & (accepted == length)
    if (length >= 0) & (ended == 0):
        row = b * (width + 1) + accepted
        draft_row = b * (width + draft.bonus) + accepted
        if accepted == length:  # the walk has not come to this row
            flags |= tl.load(target.laws.status + row)
            if draft.bonus:
                flags |= tl.load(draft.laws.status + draft_row)
        at_row = Row(target.rows, b, span.first + accepted, tiles, load_law(target.laws, row))
        final = tl.load(target.laws.argmax + row)
        drawn = at_row.law.inverse_temperature > 0
        if mixtures.kept_by != NO_ROW:  # a cascade's law is no point mass where P is
            drawn = drawn | (accepted < length + draft.bonus)
        if tile_mass is not None or mixtures.kept_by != NO_ROW:
            if drawn:
                uniform, uniform_flags = coin_at(uniforms, number)
                flags |= uniform_flags
                if not draft.given:
                    without = tl.full((), -1, tl.int32)
                    if accepted < length:
                        without = tl.load(chains.tokens + span.token_index + accepted).to(tl.int32)
                    final = draw_from_law(at_row, tile_mass + row * tiles, uniform, without, TILES).to(tl.int64)
                else:
                    recovered = tl.full((), -1, tl.int64)
                    if accepted < length + draft.bonus:
                        at = Position(b, span.first + accepted, row, draft_row)
                        masses = walked.masses + (draft_row if walked.rule == BLOCK else b) * tiles
                        recovered = draw_remainder(
                            target, draft, mixtures, at, scale, accepted == length, masses, uniform, tiles, TILES
                        )
                    if recovered >= 0:
                        final = recovered
                    elif tile_mass is not None:
                        if at_row.law.inverse_temperature > 0:
                            final = draw_from_law(at_row, tile_mass + row * tiles, uniform, None, TILES).to(tl.int64)
    store_outcome(b, chains, target.rows.vocab, span.token_index, accepted, final, flags, out, num_draft)


@triton.jit(do_not_specialize=["vocab", "width", "tiles", "num_draft"])
def match(
    laws,
    vocab,
    chains,
    width,
    best,
    tiles,
    out,
    num_draft,
    TILES: tl.constexpr,
):
    """A program a sequence: accept while the draft token has the best score (or is the argmax), then emit what has."""
    b = tl.program_id(0).to(tl.int64)
    span = load_span(chains.spans, b)
    length = span.length
    flags = tl.load(chains.state + b * 3)
    accepted = tl.zeros((), tl.int32)
    final = tl.full((), -1, tl.int64)
    walking = length >= 0
    while walking:
        if span.closed & (accepted == length):
            walking = length < 0
        else:
            row = b * (width + 1) + accepted
            flags |= tl.load(laws.status + row)
            wanted = tl.load(laws.argmax + row)
            if best.id is not None:
                if tl.load(laws.numbers + row * 4 + 2) > 0:
                    wanted = best_of_row(best, row, tiles, TILES).to(tl.int64)
            drafted = tl.load(chains.tokens + span.token_index + accepted, mask=accepted < length, other=-1)
            if drafted.to(tl.int64) == wanted:
                accepted += 1
            else:
                final = wanted
                walking = length < 0
    store_outcome(b, chains, vocab, span.token_index, accepted, final, flags, out, num_draft)
