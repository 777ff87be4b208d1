"""Kernels of the ratio rules: where spans end, the walk over coins, and the masses of the remainders."""

from __future__ import annotations

import triton
import triton.language as tl

from ...ops.arguments import ACCEPTANCES
from .arithmetic import BAD_DRAFT, BAD_PARAM, BAD_TOKEN, LAST_ID, any_flags
from .bundles import CLOSED, OPEN, TAKES_BONUS, Position
from .draft import accept_token, can_give, next_block_weight, q_at
from .law import load_span, store_span, temperature_of
from .mixture import NO_ROW, is_kept, law_remainder, load_mixture
from .remainder import pair, probabilities
from .row import load_law, load_logits, tile_ids, weigh

TOKEN, BLOCK, MATCH, GREEDY = (tl.constexpr(number) for number in ACCEPTANCES.values())


@triton.jit(do_not_specialize=["vocab", "token_stride", "num_eos", "total", "num_draft", "requests"])
def find_spans(
    chains,
    vocab,
    token_stride,
    cu,
    num_draft_tokens,
    eos,
    num_eos,
    total,
    num_draft,
    draft_index,
    requests,
    SLOTS: tl.constexpr,
):
    """A program a sequence: its span ends before the first placeholder or invalid id, and after the first EOS, cut
    there before any rule looks at it: a stopping rule that looked at a token and then dropped it would bias the output.
    Where bonus tokens are given the target's spans are up to the last row that there is.
    """
    b = tl.program_id(0).to(tl.int64)
    room = num_draft.to(tl.int64)
    first = tl.zeros((), tl.int64)
    flags = tl.zeros((), tl.int32)
    broken = first > 0
    if cu is not None:
        first = tl.load(cu + b).to(tl.int64)
        stop = tl.load(cu + b + 1).to(tl.int64)
        broken = (first < 0) | (stop < first) | (stop > total)
        loose = ((b == 0) & (first != 0)) | ((b + 1 == tl.num_programs(0)) & (stop != total))  # tokens of no sequence
        first = tl.where(broken, 0, first)
        flags |= tl.where(broken | loose | (stop - first > room), BAD_PARAM, 0)
        room = tl.minimum(room, tl.where(broken, 0, stop - first))
    if draft_index is not None:
        request = tl.load(draft_index + b).to(tl.int64)
        outside = (request < 0) | (request >= requests)
        flags |= tl.where(outside, BAD_PARAM, 0)
        broken = broken | outside
    given = room
    if num_draft_tokens is not None:
        given = tl.load(num_draft_tokens + b).to(tl.int64)
    flags |= tl.where(((given > room) | (given < -1)) & (broken == 0), BAD_PARAM, 0)
    idle = broken | (given < 0)
    limit = tl.where(idle, 0, tl.minimum(given, room)).to(tl.int32)
    length = limit
    end = OPEN + tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    token_index = b * token_stride + first
    while start < length:
        slot = start + tl.arange(0, SLOTS)
        inside = slot < limit
        id = tl.load(chains.tokens + token_index + slot, mask=inside, other=0).to(tl.int64)
        unusable = tl.min(tl.where(inside & ((id < 0) | (id >= vocab)), slot, LAST_ID), 0)
        is_eos = slot < 0
        if eos is not None:
            for i in range(num_eos):
                is_eos = is_eos | (id == tl.load(eos + i))
        first_eos = tl.min(tl.where(inside & is_eos, slot, LAST_ID), 0)
        if first_eos < unusable:
            length = first_eos + 1
            end = CLOSED + tl.zeros((), tl.int32)
        elif unusable < LAST_ID:
            length = unusable
            placeholder = tl.max(tl.where(inside & (slot == unusable) & (id == -1), 1, 0), 0)
            flags |= tl.where(placeholder > 0, 0, BAD_TOKEN)
        start += SLOTS
    length = tl.where(idle, -1, length)
    if chains.bonus_tokens is not None:
        end = tl.where((length == limit) & (end == OPEN), TAKES_BONUS, end)
        store_span(chains.target_spans, b, first, tl.where(end == OPEN, length, length - 1), end, token_index)
    store_span(chains.spans, b, first, length, end, token_index)
    tl.store(chains.state + b * 3, flags)


@triton.jit
def first_number(chains, span, b, width):
    """Where the uniform of a sequence's first target row stands."""
    return span.token_index + b if chains.ragged_numbers else b * (width + 1)


@triton.jit(do_not_specialize=["width"])
def walk(
    target,
    chains,
    width,
    draft,
    mixtures,
    uniforms,
    temperature,
    walked,
    SLOTS: tl.constexpr,
):
    """A program a sequence. Token rule: accept x iff ``u * Q(x) < law(x)`` until the first rejection. Block rule: the
    weights ``w_i = min(1, w_{i-1} law(x_i) / Q(x_i))``; what they accept, `finish` decides. The law is P, or what a
    target law makes of it. The span ends before an x that Q cannot have given, if the rule comes there.
    """
    b = tl.program_id(0).to(tl.int64)
    span = load_span(chains.spans, b)
    length = span.length
    flags = tl.load(chains.state + b * 3)
    by_block = length < -1
    if walked.rule == BLOCK:  # a greedy draft is a point mass, where both rules have one law: the token rule is taken
        _, _, greedy, _ = temperature_of(temperature, b)
        by_block = greedy == 0
    accepted = tl.maximum(length, 0)
    read = tl.zeros((), tl.int32)  # rows before it were read
    weight = tl.full((), 1.0, tl.float32)
    start = tl.zeros((), tl.int32)
    number = first_number(chains, span, b, width)
    walking = length > 0
    while walking:
        slot = start + tl.arange(0, SLOTS)
        inside = slot < length
        id = tl.load(chains.tokens + span.token_index + slot, mask=inside, other=-1).to(tl.int32)
        row = b * (width + 1) + slot
        draft_row = b * (width + draft.bonus) + slot
        at = Position(b, span.first + slot, row, draft_row)
        law = load_law(target.laws, row, inside)
        one_hot = law.inverse_temperature < 0
        x = load_logits(target.rows, b, at.i, id)
        p = weigh(x, law, law.cutoff, target.rows.kind) * law.inverse_normalizer
        p = tl.where(one_hot, (id == law.argmax).to(tl.float32), p)
        q = tl.full((SLOTS,), 1.0, tl.float32)
        row_flags = tl.load(target.laws.status + row, mask=inside, other=0)
        draft_flags = tl.zeros((SLOTS,), tl.int32)
        if draft.given:
            q = q_at(draft, at, id, inside)
            draft_flags = tl.load(draft.laws.status + draft_row, mask=inside, other=0)
        coin = tl.zeros((SLOTS,), tl.float64)
        if uniforms is not None:
            coin = tl.load(uniforms + number + slot + 1, mask=inside, other=0.0).to(tl.float64)
        given = can_give(q)
        bad_coin = (((coin >= 0.0) & (coin < 1.0)) == 0) & given
        pi, bar = p, p  # the law at x, and what u * Q(x) must stay below
        if mixtures.numbers is not None:
            mixture = load_mixture(mixtures, draft_row, inside)
            bar = mixture.accept * p
            pi = tl.maximum(tl.minimum(q, bar), mixture.scale * p)
        if mixtures.kept_by != NO_ROW:
            kept = is_kept(target, draft, at, mixture, id, mixtures.kept_by)
            pi = tl.where(kept, q, 0.0) + mixture.scale * p
            certain = kept & (by_block == 0)  # then nobody looks at the coin
            bad_coin = bad_coin & (certain == 0)
        coin = tl.where(bad_coin, 0.0, coin)
        draft_flags |= tl.where(bad_coin, BAD_PARAM, 0)
        if by_block:
            stop = start
            for i in range(SLOTS):
                if (start + i < length) & (weight > 0.0):
                    here = slot == start + i
                    p_here = tl.sum(tl.where(here, pi, 0.0), 0)
                    q_here = tl.sum(tl.where(here, q, 0.0), 0)
                    if can_give(q_here):
                        tl.store(walked.scales + b * (width + 1) + start + i, weight)
                        weight = next_block_weight(weight, p_here, q_here)
                    else:
                        length = start + i
                    stop = start + i + 1
            read = stop
            seen = slot < read
            flags |= any_flags(tl.where(seen, row_flags | draft_flags, 0))
            walking = (read == start + SLOTS) & (read < length) & (weight > 0.0)
        else:
            if mixtures.kept_by == NO_ROW:  # a point mass needs neither coin nor draft
                given = given | one_hot
                accept = tl.where(one_hot, id == law.argmax, given & accept_token(coin, bar, q))
                draft_flags = tl.where(one_hot, 0, draft_flags)
            else:
                accept = given & (certain | accept_token(coin, bar, q))
            rejected = tl.min(tl.where(inside & (accept == 0), slot, LAST_ID), 0)
            seen = slot <= rejected
            flags |= any_flags(tl.where(seen, row_flags | draft_flags, 0))
            walking = (rejected == LAST_ID) & (start + SLOTS < length)
            if rejected < LAST_ID:
                accepted = rejected
                if tl.max(((slot == rejected) & (given == 0)).to(tl.int32), 0) > 0:
                    length = rejected
        start += SLOTS
    if length < span.length:
        flags |= BAD_DRAFT
        tl.store(chains.spans + b * 4 + 1, length.to(tl.int64))
        tl.store(chains.spans + b * 4 + 2, tl.zeros((), tl.int64))
    if by_block:
        i = read
        while i < length:  # the rows that no longer matter
            tl.store(walked.scales + b * (width + 1) + i, 0.0)
            i += 1
        tl.store(walked.scales + b * (width + 1) + tl.maximum(length, 0), tl.where(read >= length, weight, 0.0))
    elif walked.rule == BLOCK:
        i = tl.zeros((), tl.int32)
        while i < length + draft.bonus:
            tl.store(walked.scales + b * (width + 1) + i, tl.where(i == accepted, 1.0, 0.0))
            i += 1
    tl.store(chains.state + b * 3, flags)
    tl.store(chains.state + b * 3 + 1, accepted)
    tl.store(chains.state + b * 3 + 2, by_block.to(tl.int32))


@triton.jit(do_not_specialize=["width", "tiles"])
def remainder_masses(
    target,
    chains,
    width,
    tiles,
    draft,
    mixtures,
    walked,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of a row: the mass of ``(scale * law - Q)+`` in each, or of the law where the bonus has
    it. Rows are the one of each sequence that the token rule stops at, or every one that the block rule may stop at.
    """
    programs = (tiles + TILES - 1) // TILES
    out_row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    if walked.rule == BLOCK:
        b = out_row // (width + draft.bonus)
        i = (out_row % (width + draft.bonus)).to(tl.int32)
    else:
        b = out_row
        i = tl.load(chains.state + b * 3 + 1)
    span = load_span(chains.spans, b)
    wanted = i < span.length + draft.bonus
    scale = tl.full((), 1.0, tl.float32)
    if walked.rule == BLOCK:
        scale = tl.load(walked.scales + b * (width + 1) + i, mask=wanted, other=0.0)
    if wanted & (scale > 0.0):
        draft_row = b * (width + draft.bonus) + i
        at = Position(b, span.first + i, b * (width + 1) + i, draft_row)
        ids = tile_ids(first_tile, TILES)
        left = law_remainder(target, draft, mixtures, at, scale, i == span.length, ids)
        tile = first_tile + tl.arange(0, TILES)
        tl.store(walked.masses + out_row * tiles + tile, tl.sum(left, 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["width", "tiles", "num_draft"])
def overlap(
    target,
    chains,
    width,
    tiles,
    draft,
    num_draft,
    out,
    TILES: tl.constexpr,
):
    """A program a position: ``sum min(P, Q)``; -1 past the span's end."""
    b = tl.program_id(0).to(tl.int64) // num_draft
    i = (tl.program_id(0) % num_draft).to(tl.int32)
    span = load_span(chains.spans, b)
    total = tl.full((), -1.0, tl.float32)
    if i < span.length:
        at = Position(b, span.first + i, b * (width + 1) + i, b * (width + draft.bonus) + i)
        if not draft.given:
            id = tl.load(chains.tokens + span.token_index + i).to(tl.int32)
            total = probabilities(target, at, 1.0, id)
        else:
            total = tl.zeros((), tl.float32)
            for first_tile in range(0, tiles, TILES):
                p, q = pair(target, draft, at, 1.0, tile_ids(first_tile, TILES))
                total += tl.sum(tl.sum(tl.minimum(p, q), 1), 0)
    tl.store(out + tl.program_id(0), total)
