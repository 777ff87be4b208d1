"""Kernels of the ratio rules: where blocks end, the walk over coins, and the masses of the residuals."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import BAD_PARAM, BAD_TOKEN, INFINITY, LAST_ID, any_flags
from .draft import draft_probabilities
from .law import temperature_of
from .mixture import NO_ROW, is_kept, load_mixtures, pair, weights
from .row import load_law, load_laws, probabilities, tile_ids, weigh

# blocks: [batch, 3] int64: first row of the draft, length (-1: idle), whether its last token is an EOS
# state: [batch, 3] int32: status so far, accepted, whether the block rule decides


@triton.jit(do_not_specialize=["token_stride", "num_eos", "total", "num_draft"])
def block(
    tokens, token_stride, cu, num_draft_tokens, eos, num_eos, total, num_draft, vocab, blocks, state,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """A program a sequence: its block ends before the first placeholder or invalid id, and after the first EOS, cut
    there before any rule looks at it: a stopping rule that looked at a token and then dropped it would bias the output.
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
        first = tl.where(broken, 0, first)
        flags |= tl.where(broken | (stop - first > room), BAD_PARAM, 0)
        room = tl.minimum(room, tl.where(broken, 0, stop - first))
    given = room
    if num_draft_tokens is not None:
        given = tl.load(num_draft_tokens + b).to(tl.int64)
    flags |= tl.where(((given > room) | (given < -1)) & (broken == 0), BAD_PARAM, 0)
    idle = broken | (given < 0)
    limit = tl.where(idle, 0, tl.minimum(given, room)).to(tl.int32)
    length = limit
    ends_in_eos = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    while start < length:
        slot = start + tl.arange(0, SLOTS)
        inside = slot < limit
        id = tl.load(tokens + b * token_stride + first + slot, mask=inside, other=0).to(tl.int64)
        unusable = tl.min(tl.where(inside & ((id < 0) | (id >= vocab)), slot, LAST_ID), 0)
        is_eos = slot < 0
        if eos is not None:
            for i in range(num_eos):
                is_eos = is_eos | (id == tl.load(eos + i))
        first_eos = tl.min(tl.where(inside & is_eos, slot, LAST_ID), 0)
        if first_eos < unusable:
            length = first_eos + 1
            ends_in_eos = tl.full((), 1, tl.int32)
        elif unusable < LAST_ID:
            length = unusable
            placeholder = tl.max(tl.where(inside & (slot == unusable) & (id == -1), 1, 0), 0)
            flags |= tl.where(placeholder > 0, 0, BAD_TOKEN)
        start += SLOTS
    tl.store(blocks + b * 3, first)
    tl.store(blocks + b * 3 + 1, tl.where(idle, -1, length.to(tl.int64)))
    tl.store(blocks + b * 3 + 2, ends_in_eos.to(tl.int64))
    tl.store(state + b * 3, flags)


@triton.jit(do_not_specialize=["token_stride", "uniform_stride", "width", "temperature"])
def walk(
    target, target_stride_batch, target_stride_row, tokens, token_stride, blocks, state, width,
    laws, argmax, status, draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax,
    draft_status, map_to, map_size, PROBS: tl.constexpr, BONUS: tl.constexpr, mixture, KEPT_BY: tl.constexpr,
    vocab, uniforms, uniform_stride, temperature, temperatures, scales, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program a sequence. Token rule: accept x iff ``u * Q(x) < law(x)`` until the first rejection. Block rule: the
    weights ``w_i = min(1, w_{i-1} law(x_i) / Q(x_i))``; what they accept, `finish` decides. The law is P, or what a
    target law makes of it.

    ``scales[b, i]`` becomes the factor on the law in the residual at position i, 0 where none is needed.
    """
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(blocks + b * 3)
    length = tl.load(blocks + b * 3 + 1).to(tl.int32)
    flags = tl.load(state + b * 3)
    by_block = length < -1
    if BLOCK:  # a greedy draft is a point mass, where both rules have one law: the token rule is taken
        _, _, greedy, _ = temperature_of(b, temperature, temperatures, False)
        by_block = greedy == 0
    accepted = tl.maximum(length, 0)
    read = tl.zeros((), tl.int32)  # rows before it were read
    weight = tl.full((), 1.0, tl.float32)
    start = tl.zeros((), tl.int32)
    walking = length > 0
    while walking:
        slot = start + tl.arange(0, SLOTS)
        inside = slot < length
        id = tl.load(tokens + b * token_stride + first + slot, mask=inside, other=0).to(tl.int32)
        row = b * (width + 1) + slot
        maximum, cutoff, inverse_temperature, inverse_normalizer = load_laws(laws, row, inside)
        at = target + b * target_stride_batch + (first + slot) * target_stride_row
        x = tl.load(at + id, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(x == x, x, -INFINITY)
        best = tl.load(argmax + row, mask=inside, other=-1).to(tl.int32)
        one_hot = inverse_temperature < 0
        p = weigh(x, maximum, cutoff, inverse_temperature) * inverse_normalizer
        p = tl.where(one_hot, (id == best).to(tl.float32), p)
        q = tl.full((SLOTS,), 1.0, tl.float32)
        row_flags = tl.load(status + row, mask=inside, other=0)
        draft_flags = tl.zeros((SLOTS,), tl.int32)
        draft_row = b * (width + BONUS) + slot
        if draft is not None:
            q_maximum, q_cutoff, q_inverse_temperature, q_inverse_normalizer = load_laws(draft_laws, draft_row, inside)
            q = draft_probabilities(
                draft, b * draft_stride_batch + (first + slot) * draft_stride_row, draft_vocab, map_to, map_size,
                tl.where(inside, id, -1), q_maximum, q_cutoff, q_inverse_temperature, q_inverse_normalizer,
                tl.load(draft_argmax + draft_row, mask=inside, other=-1).to(tl.int32), PROBS,
            )  # fmt: skip
            draft_flags = tl.load(draft_status + draft_row, mask=inside, other=0)
        coin = tl.zeros((SLOTS,), tl.float32)
        if uniforms is not None:
            coin = tl.load(uniforms + b * uniform_stride + first + slot + 1, mask=inside, other=0.0)
        bad_coin = ((coin >= 0.0) & (coin < 1.0)) == 0
        law, bar = p, p  # the law at x, and what u * Q(x) must stay below
        if mixture is not None:
            accept_scale, scale, bound, kept_id = load_mixtures(mixture, draft_row, inside)
            bar = accept_scale * p
            law = tl.maximum(tl.minimum(q, bar), scale * p)
        if KEPT_BY != NO_ROW:
            kept = is_kept(
                at, draft + b * draft_stride_batch + (first + slot) * draft_stride_row, draft_vocab, map_to, map_size,
                tl.where(inside, id, -1), vocab, bound, kept_id, KEPT_BY,
            )  # fmt: skip
            law = tl.where(kept, q, 0.0) + scale * p
            certain = kept & (q > 0.0) & (by_block == 0)  # then nobody looks at the coin
            bad_coin = bad_coin & (certain == 0)
        coin = tl.where(bad_coin, 0.0, coin)
        draft_flags |= tl.where(bad_coin, BAD_PARAM, 0)
        if by_block:
            stop = start
            for i in range(SLOTS):
                if (start + i < length) & (weight > 0.0):
                    here = slot == start + i
                    p_here = tl.sum(tl.where(here, law, 0.0), 0)
                    q_here = tl.sum(tl.where(here, q, 0.0), 0)
                    tl.store(scales + b * (width + 1) + start + i, weight)
                    ratio = tl.div_rn(weight * p_here, tl.where(q_here > 0.0, q_here, 1.0))
                    weight = tl.where(q_here > 0.0, tl.minimum(ratio, 1.0), 1.0)
                    weight = tl.where(p_here > 0.0, weight, 0.0)
                    stop = start + i + 1
            read = stop
            seen = slot < read
            flags |= any_flags(tl.where(seen, row_flags | draft_flags, 0))
            walking = (read == start + SLOTS) & (read < length) & (weight > 0.0)
        else:
            if KEPT_BY == NO_ROW:  # a point mass needs neither coin nor draft
                accept = tl.where(one_hot, id == best, coin * q < bar)
                draft_flags = tl.where(one_hot, 0, draft_flags)
            else:
                accept = certain | (coin * q < bar)
            rejected = tl.min(tl.where(inside & (accept == 0), slot, LAST_ID), 0)
            seen = slot <= rejected
            flags |= any_flags(tl.where(seen, row_flags | draft_flags, 0))
            walking = (rejected == LAST_ID) & (start + SLOTS < length)
            if rejected < LAST_ID:
                accepted = rejected
        start += SLOTS
    if by_block:
        i = read
        while i < length:  # the rows that no longer matter
            tl.store(scales + b * (width + 1) + i, 0.0)
            i += 1
        tl.store(scales + b * (width + 1) + tl.maximum(length, 0), tl.where(read == length, weight, 0.0))
    elif BLOCK:
        i = tl.zeros((), tl.int32)
        while i < length + BONUS:
            tl.store(scales + b * (width + 1) + i, tl.where(i == accepted, 1.0, 0.0))
            i += 1
    tl.store(state + b * 3, flags)
    tl.store(state + b * 3 + 1, accepted)
    tl.store(state + b * 3 + 2, by_block.to(tl.int32))


@triton.jit(do_not_specialize=["token_stride", "tiles", "width"])
def residual(
    target, target_stride_batch, target_stride_row, tiles, tokens, token_stride, blocks, state, width,
    laws, argmax, status, draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax,
    draft_status, map_to, map_size, PROBS: tl.constexpr, BONUS: tl.constexpr, mixture, KEPT_BY: tl.constexpr,
    vocab, scales, masses, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program for TILES tiles of a row: the mass of ``(scale * law - Q)+`` in each, or of the law where the bonus has
    it. Rows are the one of each sequence that the token rule stops at, or every one that the block rule may stop at.
    """
    programs = (tiles + TILES - 1) // TILES
    out_row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    if BLOCK:
        b = out_row // (width + BONUS)
        i = (out_row % (width + BONUS)).to(tl.int32)
    else:
        b = out_row
        i = tl.load(state + b * 3 + 1)
    length = tl.load(blocks + b * 3 + 1).to(tl.int32)
    wanted = i < length + BONUS
    scale = tl.full((), 1.0, tl.float32)
    if BLOCK:
        scale = tl.load(scales + b * (width + 1) + i, mask=wanted, other=0.0)
    if wanted & (scale > 0.0):
        first = tl.load(blocks + b * 3)
        ids = tile_ids(first_tile, TILES)
        left = weights(
            target + b * target_stride_batch + (first + i) * target_stride_row, b * (width + 1) + i, laws, argmax,
            scale, i == length, draft, b * draft_stride_batch + (first + i) * draft_stride_row,
            b * (width + BONUS) + i, draft_vocab, draft_laws, draft_argmax, map_to, map_size, ids, vocab, PROBS,
            mixture, KEPT_BY,
        )  # fmt: skip
        tile = first_tile + tl.arange(0, TILES)
        tl.store(masses + out_row * tiles + tile, tl.sum(left, 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["token_stride", "tiles", "width", "num_draft"])
def overlap(
    target, target_stride_batch, target_stride_row, tiles, tokens, token_stride, blocks, state, width,
    laws, argmax, status, draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax,
    draft_status, map_to, map_size, PROBS: tl.constexpr, BONUS: tl.constexpr, vocab, num_draft, out,
    TILES: tl.constexpr,
):  # fmt: skip
    """A program a position: ``sum min(P, Q)``; -1 past the block's end."""
    b = tl.program_id(0).to(tl.int64) // num_draft
    i = (tl.program_id(0) % num_draft).to(tl.int32)
    total = tl.full((), -1.0, tl.float32)
    if i < tl.load(blocks + b * 3 + 1):
        first = tl.load(blocks + b * 3)
        start = target + b * target_stride_batch + (first + i) * target_stride_row
        row = b * (width + 1) + i
        if draft is None:
            id = tl.load(tokens + b * token_stride + first + i).to(tl.int32)
            maximum, cutoff, inverse_temperature, inverse_normalizer = load_law(laws, row)
            x = tl.load(start + id).to(tl.float32)
            x = tl.where(x == x, x, -INFINITY)
            best = tl.load(argmax + row).to(tl.int32)
            total = probabilities(x, id, maximum, cutoff, inverse_temperature, inverse_normalizer, best)
        else:
            total = tl.zeros((), tl.float32)
            for first_tile in range(0, tiles, TILES):
                ids = tile_ids(first_tile, TILES)
                p, q = pair(
                    start, row, laws, argmax, 1.0, draft, b * draft_stride_batch + (first + i) * draft_stride_row,
                    b * (width + BONUS) + i, draft_vocab, draft_laws, draft_argmax, map_to, map_size, ids, vocab, PROBS,
                )  # fmt: skip
                total += tl.sum(tl.sum(tl.minimum(p, q), 1), 0)
    tl.store(out + tl.program_id(0), total)
