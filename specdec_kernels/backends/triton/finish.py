"""The last kernels of a verify step: how many draft tokens stay, and the one token after them."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import BAD_PARAM, TILE
from .mixture import NO_ROW, weights
from .noise import best_of_row
from .row import load_law, load_logits, total_mass, walk_ids, walk_tiles, weigh


@triton.jit
def draw(
    row, vocab, tiles, masses, maximum, cutoff, inverse_temperature, uniform, without, TILES: tl.constexpr,
):  # fmt: skip
    """An id from P by inverse CDF, or from P without the id `without` (-1: none) if anything else is possible.

    `masses` are those of P's tiles.
    """
    hole = without // TILE
    lane = tl.arange(0, TILE)
    ids = tl.maximum(hole, 0) * TILE + lane
    weight = weigh(load_logits(row, ids, vocab), maximum, cutoff, inverse_temperature)
    mass = tl.sum(tl.where(ids == without, 0.0, weight), 0)
    tile, rest = walk_tiles(masses, tiles, uniform, tl.where(without < 0, -1, hole), mass, TILES)
    if tile < 0:  # all mass is on it
        without = tl.full((), -1, tl.int32)
        tile, rest = walk_tiles(masses, tiles, uniform, -1, 0.0, TILES)
    ids = tl.maximum(tile, 0) * TILE + lane
    weight = weigh(load_logits(row, ids, vocab), maximum, cutoff, inverse_temperature)
    return walk_ids(tl.where(ids == without, 0.0, weight), ids, rest)


@triton.jit
def store_outcome(
    b, tokens, at, accepted, final, flags, out_tokens, num_accepted, num_tokens, status, num_draft, SLOTS: tl.constexpr,
):  # fmt: skip
    """Accepted tokens, then the final one (-1: none), then -1."""
    for start in range(0, num_draft + 1, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        token = tl.load(tokens + at + slot, mask=slot < accepted, other=-1).to(tl.int64)
        token = tl.where(slot == accepted, final, token)
        tl.store(out_tokens + b * (num_draft + 1) + slot, token, mask=slot <= num_draft)
    tl.store(num_accepted + b, accepted)
    tl.store(num_tokens + b, accepted + (final >= 0).to(tl.int32))
    tl.store(status + b, flags)


@triton.jit(do_not_specialize=["token_stride", "tiles", "width", "uniform_stride", "num_draft"])
def finish(
    target, target_stride_batch, target_stride_row, tiles, tokens, token_stride, blocks, state, width,
    laws, argmax, row_status, tile_mass, draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws,
    draft_argmax, draft_status, map_to, map_size, PROBS: tl.constexpr, BONUS: tl.constexpr, mixture,
    KEPT_BY: tl.constexpr, vocab, uniforms, uniform_stride, scales, masses,
    out_tokens, num_accepted, num_tokens, status, num_draft,
    BLOCK: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program a sequence. Block rule: the last i with ``u_i < h_i`` counts. Then the recovered token, drawn from what
    the law has and Q has not (if that is nothing, from P or a cascade's law), or the bonus token, from P or a cascade's
    law; none after an accepted EOS.
    """
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(blocks + b * 3)
    length = tl.load(blocks + b * 3 + 1).to(tl.int32)
    flags = tl.load(state + b * 3)
    accepted = tl.load(state + b * 3 + 1)
    scale = tl.full((), 1.0, tl.float32)
    if BLOCK:
        if tl.load(state + b * 3 + 2) > 0:
            accepted = tl.zeros((), tl.int32)
            i = tl.full((), 1, tl.int32)
            while i <= length:
                weight = tl.load(scales + b * (width + 1) + i)
                if weight > 0.0:
                    coin = tl.zeros((), tl.float32)
                    if uniforms is not None:
                        coin = tl.load(uniforms + b * uniform_stride + first + i)
                    coin = tl.where((coin >= 0.0) & (coin < 1.0), coin, 0.0)
                    threshold = weight
                    if i < length:
                        left = total_mass(masses + (b * (width + BONUS) + i) * tiles, tiles, TILES)
                        below = left + 1.0 - weight
                        threshold = tl.where(below > 0.0, tl.div_rn(left, tl.where(below > 0.0, below, 1.0)), 1.0)
                    if coin < threshold:
                        accepted = i
                        scale = weight
                i += 1
    final = tl.full((), -1, tl.int64)
    ended = (tl.load(blocks + b * 3 + 2) > 0) & (accepted == length)
    if (length >= 0) & (ended == 0):
        row = b * (width + 1) + accepted
        if accepted == length:  # the walk has not come to this row
            flags |= tl.load(row_status + row)
            if BONUS:
                flags |= tl.load(draft_status + b * (width + 1) + length)
        maximum, cutoff, inverse_temperature, _ = load_law(laws, row)
        final = tl.load(argmax + row)
        drawn = inverse_temperature > 0
        if KEPT_BY != NO_ROW:  # a cascade's law is no point mass where P is
            drawn = drawn | (accepted < length + BONUS)
        if tile_mass is not None or KEPT_BY != NO_ROW:
            if drawn:
                uniform = tl.zeros((), tl.float32)
                if uniforms is not None:
                    uniform = tl.load(uniforms + b * uniform_stride + first)
                good = (uniform >= 0.0) & (uniform < 1.0)
                flags |= tl.where(good, 0, BAD_PARAM)
                uniform = tl.where(good, uniform, 0.0)
                start = target + b * target_stride_batch + (first + accepted) * target_stride_row
                without = tl.full((), -1, tl.int32)
                from_law = accepted >= 0
                if draft is None:
                    if accepted < length:
                        without = tl.load(tokens + b * token_stride + first + accepted).to(tl.int32)
                else:
                    draft_start = b * draft_stride_batch + (first + accepted) * draft_stride_row
                    draft_row = b * (width + BONUS) + accepted
                    at = masses + (draft_row if BLOCK else b) * tiles
                    from_law = accepted == length
                    if accepted < length + BONUS:
                        tile, rest = walk_tiles(at, tiles, uniform, -1, 0.0, TILES)
                        from_law = tile < 0
                        whole = accepted == length
                        if KEPT_BY != NO_ROW:
                            if from_law:
                                whole = accepted <= length
                                for other in range(tiles):
                                    ids = other * TILE + tl.arange(0, TILE)
                                    law = weights(
                                        start, row, laws, argmax, 1.0, whole, draft, draft_start, draft_row,
                                        draft_vocab, draft_laws, draft_argmax, map_to, map_size, ids, vocab, PROBS,
                                        mixture, KEPT_BY,
                                    )  # fmt: skip
                                    tl.store(at + other, tl.sum(law, 0))
                                tl.debug_barrier()
                                tile, rest = walk_tiles(at, tiles, uniform, -1, 0.0, TILES)
                                tile = tl.maximum(tile, 0)
                            from_law = accepted < 0
                        if tile >= 0:
                            ids = tile * TILE + tl.arange(0, TILE)
                            weight = weights(
                                start, row, laws, argmax, scale, whole, draft, draft_start,
                                draft_row, draft_vocab, draft_laws, draft_argmax, map_to, map_size, ids, vocab, PROBS,
                                mixture, KEPT_BY,
                            )  # fmt: skip
                            final = walk_ids(weight, ids, rest).to(tl.int64)
                if tile_mass is not None:
                    if from_law:
                        final = draw(
                            start, vocab, tiles, tile_mass + row * tiles, maximum, cutoff, inverse_temperature,
                            uniform, without, TILES,
                        ).to(tl.int64)  # fmt: skip
    store_outcome(
        b, tokens, b * token_stride + first, accepted, final, flags, out_tokens, num_accepted, num_tokens, status,
        num_draft, SLOTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["token_stride", "tiles", "width", "num_draft"])
def match(
    tiles, tokens, token_stride, blocks, state, width, laws, argmax, row_status, best, best_id,
    out_tokens, num_accepted, num_tokens, status, num_draft, TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program a sequence: accept while the draft token has the best score (or is the argmax), then emit what has."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(blocks + b * 3)
    length = tl.load(blocks + b * 3 + 1).to(tl.int32)
    ends_in_eos = tl.load(blocks + b * 3 + 2) > 0
    flags = tl.load(state + b * 3)
    accepted = tl.zeros((), tl.int32)
    final = tl.full((), -1, tl.int64)
    walking = length >= 0
    while walking:
        if ends_in_eos & (accepted == length):
            walking = length < 0
        else:
            row = b * (width + 1) + accepted
            flags |= tl.load(row_status + row)
            wanted = tl.load(argmax + row)
            if best is not None:
                if tl.load(laws + row * 4 + 2) > 0:
                    wanted = best_of_row(best + row * tiles, best_id + row * tiles, tiles, TILES).to(tl.int64)
            drafted = tl.load(tokens + b * token_stride + first + accepted, mask=accepted < length, other=-1)
            if drafted.to(tl.int64) == wanted:
                accepted += 1
            else:
                final = wanted
                walking = length < 0
    store_outcome(
        b, tokens, b * token_stride + first, accepted, final, flags, out_tokens, num_accepted, num_tokens, status,
        num_draft, SLOTS,
    )  # fmt: skip
