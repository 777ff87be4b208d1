"""The kernel of the tree rules whose children were drawn without replacement: "recursive" and "traversal".

P and Q at a node some of whose children were rejected are ``(scale P - taken Q)+`` and ``rest Q`` of the row's own P
and Q, and 0 at those children: a chain of "P becomes norm((w P - Q)+)" never needs more, as the inner (.)+ is in the
outer one, and as a child where w P > Q is never rejected. So nothing as wide as the vocabulary is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import BAD_TOKEN, LAST_ID, TILE
from .mixture import pair
from .row import tile_ids, total_mass, walk_ids, walk_tiles
from .tree import coin_at, next_child, store_path, token_of


@triton.jit
def remaining(
    first_id, ids, target, row, laws, argmax, draft, draft_start, draft_vocab, draft_laws, draft_argmax, map_to,
    map_size, vocab, PROBS: tl.constexpr, scale, taken, removed, begin, end, WIDTH: tl.constexpr,
):  # fmt: skip
    """``(scale P - taken Q)+`` and Q of the WIDTH `ids` from `first_id` on; 0 at the children that were removed."""
    p, q = pair(
        target, row, laws, argmax, scale, draft, draft_start, row, draft_vocab, draft_laws, draft_argmax, map_to,
        map_size, ids, vocab, PROBS,
    )  # fmt: skip
    left = tl.maximum(p - taken * q, 0.0)
    for i in range(begin, end):
        id = tl.load(removed + i)
        if (id >= first_id) & (id < first_id + WIDTH):
            left = tl.where(ids == id, 0.0, left)
            q = tl.where(ids == id, 0.0, q)
    return left, q


@triton.jit(do_not_specialize=["num_nodes", "max_depth", "tiles"])
def try_siblings(
    target, stride_batch, stride_row, tiles, vocab, laws, argmax, row_status, tile_mass,
    draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax, draft_status, map_to, map_size,
    PROBS: tl.constexpr, BONUS: tl.constexpr, uniforms,
    tokens, above, ends, blocks, state, num_nodes, masses, removed, levels,
    out_tokens, num_accepted, num_tokens, status, out_nodes, max_depth, TRAVERSAL: tl.constexpr,
    SLOTS: tl.constexpr, DEPTHS: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    """A program a sequence. "recursive": a child that its coin accepts is the next node. "traversal": every child is,
    with the weight ``min(1, w P / Q)``; a node without further children ends the walk if its coin is below what has
    become of its weight, else it is a rejected child of the node above.

    ``masses[b]`` are those of what P becomes in the row's tiles; ``removed`` ``[batch, num_nodes]`` the rejected tokens
    at the nodes of the path, each node's behind its parent's; ``levels`` ``[batch, max_depth + 1, 5]`` what the nodes
    above are left with.
    """
    b = tl.program_id(0).to(tl.int64)
    at = b * num_nodes
    tokens += at
    ends += at
    removed += at
    masses += b * tiles
    levels += b * (max_depth + 1) * 5
    slot = tl.arange(0, SLOTS)
    parent = tl.load(above + at + slot, mask=slot < num_nodes, other=-1)
    flags = tl.load(state + b)
    node = tl.zeros((), tl.int32)
    tried = tl.zeros((), tl.int32)  # the child that was tried last; the root hangs from nothing
    accepted = tl.zeros((), tl.int32)
    begin = tl.zeros((), tl.int32)  # of the node's part of the list
    end = tl.zeros((), tl.int32)
    scale = tl.full((), 1.0, tl.float32)
    taken = tl.zeros((), tl.float32)  # positive as soon as P is no longer the row's own
    rest = tl.full((), 1.0, tl.float32)
    w = tl.full((), 1.0, tl.float32)
    final = tl.full((), -1, tl.int64)
    walking = tl.load(blocks + b * 3 + 1) >= 0
    while walking:
        row = at + node
        rejected = tl.full((), -1, tl.int32)
        child = next_child(slot, parent, node, tried)
        start = target + b * stride_batch + node * stride_row
        draft_start = b * draft_stride_batch + node * draft_stride_row
        if (child < LAST_ID) & (accepted < max_depth):
            tried = child
            flags |= tl.load(row_status + row) | tl.load(draft_status + row)
            x = tl.load(tokens + child)
            p, q = pair(
                start, row, laws, argmax, scale, draft, draft_start, row, draft_vocab, draft_laws, draft_argmax, map_to,
                map_size, x, vocab, PROBS,
            )  # fmt: skip
            gone = tl.load(removed + slot, mask=(slot >= begin) & (slot < end), other=-1) == x
            p = tl.maximum(p - taken * q, 0.0)
            q = tl.where(tl.max(gone.to(tl.int32), 0) > 0, 0.0, q * rest)
            if q > 0.0:
                if TRAVERSAL:
                    enters = q > 0.0
                    weight = tl.minimum(tl.div_rn(w * p, q), 1.0)
                    level = levels + accepted * 5
                    tl.store(level, scale)
                    tl.store(level + 1, taken)
                    tl.store(level + 2, rest)
                    tl.store(level + 3, w)
                    tl.store(level + 4, begin.to(tl.float32))
                else:
                    coin, coin_flags = coin_at(uniforms, at + child)
                    flags |= coin_flags
                    enters = coin * q < p
                    weight = w
                if enters:
                    accepted += 1
                    node = child
                    tried = child  # children stand behind their parent
                    begin = end
                    scale = tl.full((), 1.0, tl.float32)
                    taken = tl.zeros((), tl.float32)
                    rest = tl.full((), 1.0, tl.float32)
                    w = weight
                else:
                    rejected = child
            else:
                flags |= BAD_TOKEN
        else:
            if TRAVERSAL:
                if node > 0:
                    coin, coin_flags = coin_at(uniforms, at + node)
                    flags |= coin_flags
                    if coin >= w:  # back to the node above, as it was left
                        rejected = node
                        tried = node
                        node = tl.load(above + at + node)
                        accepted -= 1
                        level = levels + accepted * 5
                        scale = tl.load(level)
                        taken = tl.load(level + 1)
                        rest = tl.load(level + 2)
                        w = tl.load(level + 3)
                        end = begin
                        begin = tl.load(level + 4).to(tl.int32)
            walking = rejected >= 0
        row = at + node
        drawn = (walking == 0) & (tl.load(ends + node) == 0)
        if drawn:
            flags |= tl.load(row_status + row)
        if (rejected >= 0) | (drawn & (taken > 0.0)):
            start = target + b * stride_batch + node * stride_row
            draft_start = b * draft_stride_batch + node * draft_stride_row
            left_scale, left_taken = scale, taken
            if rejected >= 0:
                left_scale, left_taken = w * scale, w * taken + rest
                tl.store(removed + end, tl.load(tokens + rejected))
                end += 1
            tl.debug_barrier()
            mass = tl.zeros((), tl.float32)  # of Q without the children
            for first_tile in range(0, tiles, TILES):
                ids = tile_ids(first_tile, TILES)
                left, q = remaining(
                    first_tile * TILE, ids, start, row, laws, argmax, draft, draft_start, draft_vocab, draft_laws,
                    draft_argmax, map_to, map_size, vocab, PROBS, left_scale, left_taken, removed, begin, end,
                    TILES * TILE,
                )  # fmt: skip
                tile = first_tile + tl.arange(0, TILES)
                tl.store(masses + tile, tl.sum(left, 1), mask=tile < tiles)
                mass += tl.sum(tl.sum(q, 1), 0)
            tl.debug_barrier()
            if rejected >= 0:
                total = total_mass(masses, tiles, ROW_TILES)
                if total > 0.0:
                    scale = tl.div_rn(left_scale, total)
                    taken = tl.div_rn(left_taken, total)
                rest = tl.where(mass > 0.0, tl.div_rn(1.0, tl.where(mass > 0.0, mass, 1.0)), 0.0)
                below = total + 1.0 - w
                w = tl.where(below > 0.0, tl.div_rn(total, tl.where(below > 0.0, below, 1.0)), 1.0)
            else:
                coin, coin_flags = coin_at(uniforms, at)
                flags |= coin_flags
                last_tile, goal = walk_tiles(masses, tiles, coin, -1, 0.0, ROW_TILES)
                last_tile = tl.maximum(last_tile, 0)
                last_ids = last_tile * TILE + tl.arange(0, TILE)
                weight, _ = remaining(
                    last_tile * TILE, last_ids, start, row, laws, argmax, draft, draft_start, draft_vocab, draft_laws,
                    draft_argmax, map_to, map_size, vocab, PROBS, scale, taken, removed, begin, end, TILE,
                )  # fmt: skip
                final = walk_ids(weight, last_ids, goal).to(tl.int64)
        elif drawn:
            id, coin_flags = token_of(
                row, target, stride_batch, stride_row, num_nodes, vocab, tiles, laws, argmax, tile_mass, uniforms, at,
                ROW_TILES,
            )  # fmt: skip
            final = id.to(tl.int64)
            flags |= coin_flags
        tl.debug_barrier()
    store_path(
        b, tokens - at, above, num_nodes, node, accepted, final, flags, out_tokens, num_accepted, num_tokens, status,
        out_nodes, max_depth, DEPTHS,
    )  # fmt: skip
