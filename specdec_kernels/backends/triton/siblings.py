"""The kernel of the tree rules whose children were drawn without replacement: "recursive" and "traversal".

P and Q at a node some of whose children were rejected are ``(scale P - taken lift Q)+`` and ``rest lift Q`` of the
row's own P and Q, and 0 at those children: a chain of "P becomes norm((w P - Q)+)" never needs more, as the inner (.)+
is in the outer one, and as a child where w P > Q is never rejected. So nothing as wide as the vocabulary is written.
`lift` is a power of two, as in csrc/common/siblings.h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import BAD_DRAFT, LAST_ID, TILE
from .bundles import Position
from .draft import accept_token, block_threshold, can_give, next_block_weight
from .remainder import pair
from .row import coin_at, tile_ids, total_mass, walk_ids, walk_tiles
from .tree import next_child, store_path, token_of

LEAST_MASS, LIFT = tl.constexpr(2.0**-60), tl.constexpr(2.0**100)
LEVEL = tl.constexpr(7)
"""Numbers of a node that is left for its child: those that `store_level` takes."""


@triton.jit
def remaining(
    target,
    draft,
    at,
    scale,
    taken,
    lift,
    removed,
    begin,
    end,
    first_id,
    ids,
    WIDTH: tl.constexpr,
):
    """``(scale P - taken lift Q)+`` of the WIDTH `ids` from `first_id` on, and their Q; both 0 at children that were
    removed.
    """
    p, q = pair(target, draft, at, scale, ids)
    left = tl.maximum(p - taken * (lift * q), 0.0)
    for i in range(begin, end):
        id = tl.load(removed + i)
        if (id >= first_id) & (id < first_id + WIDTH):
            left = tl.where(ids == id, 0.0, left)
            q = tl.where(ids == id, 0.0, q)
    return left, q


@triton.jit
def masses_left(
    target,
    draft,
    at,
    scale,
    taken,
    lift,
    removed,
    begin,
    end,
    tiles,
    masses,
    TILES: tl.constexpr,
):
    """Stores the mass of what `remaining` leaves of each tile; returns that of Q without the children."""
    mass = tl.zeros((), tl.float32)
    for first_tile in range(0, tiles, TILES):
        ids = tile_ids(first_tile, TILES)
        left, q = remaining(
            target, draft, at, scale, taken, lift, removed, begin, end, first_tile * TILE, ids, TILES * TILE
        )
        tile = first_tile + tl.arange(0, TILES)
        tl.store(masses + tile, tl.sum(left, 1), mask=tile < tiles)
        mass += tl.sum(tl.sum(q, 1), 0)
    return mass


@triton.jit
def after_rejection(scale, taken, lift, only, left_scale, left_taken, rejected, had, total, mass):
    """What is left after the child `rejected`, which `had` so much of P: of P `total`, of Q `mass`. As in
    csrc/common/siblings.h.
    """
    lifted = tl.where(mass < LEAST_MASS, LIFT, 1.0)
    change = tl.div_rn(lift, lifted)
    if total > 0.0:
        scale = tl.div_rn(left_scale, total)
        taken = tl.div_rn(left_taken * change, total)
    else:
        taken *= change
        if (taken > 0.0) & (only < 0) & (had > 0.0):
            only = rejected
    rest = tl.where(mass > 0.0, tl.div_rn(1.0, tl.where(mass > 0.0, mass * lifted, 1.0)), 0.0)
    return scale, taken, lifted, rest, only


@triton.jit
def store_level(level, scale, taken, lift, rest, only, w, begin):
    """What a node is left with, which its child replaces."""
    tl.store(level, scale)
    tl.store(level + 1, taken)
    tl.store(level + 2, lift)
    tl.store(level + 3, rest)
    tl.store(level + 4, only.to(tl.float32))
    tl.store(level + 5, w)
    tl.store(level + 6, begin.to(tl.float32))


@triton.jit
def load_level(level):
    """What `store_level` was given."""
    only, begin = tl.load(level + 4).to(tl.int32), tl.load(level + 6).to(tl.int32)
    return tl.load(level), tl.load(level + 1), tl.load(level + 2), tl.load(level + 3), only, tl.load(level + 5), begin


@triton.jit(do_not_specialize=["tiles", "num_nodes", "max_depth"])
def try_siblings(
    target,
    tiles,
    tile_mass,
    draft,
    trees,
    num_nodes,
    uniforms,
    scratch,
    out,
    max_depth,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """A program a sequence. "recursive": a child that its coin accepts is the next node. "traversal": every child is,
    with the weight ``min(1, w P / Q)``; a node without further children ends the walk if its coin is below what has
    become of its weight, else it is a rejected child of the node above.
    """
    b = tl.program_id(0).to(tl.int64)
    root = b * num_nodes
    tokens = trees.tokens + root
    removed = scratch.removed + root
    masses = scratch.masses + b * tiles
    levels = scratch.levels + b * (max_depth + 1) * LEVEL
    slot = tl.arange(0, trees.slots)
    parent = tl.load(trees.above + root + slot, mask=slot < num_nodes, other=-1)
    flags = tl.load(trees.state + b)
    node = tl.zeros((), tl.int32)
    tried = tl.zeros((), tl.int32)  # the child that was tried last; the root hangs from nothing
    accepted = tl.zeros((), tl.int32)
    begin = tl.zeros((), tl.int32)  # of the node's part of the list
    end = tl.zeros((), tl.int32)
    scale = tl.full((), 1.0, tl.float32)
    taken = tl.zeros((), tl.float32)  # positive as soon as P is no longer the row's own
    lift = tl.full((), 1.0, tl.float32)
    rest = tl.full((), 1.0, tl.float32)
    only = tl.full((), -1, tl.int32)  # a child that was rejected, by rounding, although it had all that was left of P
    w = tl.full((), 1.0, tl.float32)
    final = tl.full((), -1, tl.int64)
    walking = tl.load(trees.spans + b * 4 + 1) >= 0
    while walking:
        row = root + node
        rejected = tl.full((), -1, tl.int32)
        child = next_child(slot, parent, node, tried)
        if (child < LAST_ID) & (accepted < max_depth):
            tried = child
            flags |= tl.load(target.laws.status + row) | tl.load(draft.laws.status + row)
            x = tl.load(tokens + child)
            p, q = pair(target, draft, Position(b, node, row, row), scale, x)
            gone = tl.load(removed + slot, mask=(slot >= begin) & (slot < end), other=-1) == x
            p = tl.maximum(p - taken * (lift * q), 0.0)
            q = tl.where(tl.max(gone.to(tl.int32), 0) > 0, 0.0, lift * q * rest)
            if can_give(q):
                if scratch.traversal:
                    enters = q > 0.0
                    weight = next_block_weight(w, p, q)
                    store_level(levels + accepted * LEVEL, scale, taken, lift, rest, only, w, begin)
                else:
                    coin, coin_flags = coin_at(uniforms, root + child)
                    flags |= coin_flags
                    enters = accept_token(coin, p, q)
                    weight = w
                if enters:
                    accepted += 1
                    node = child
                    tried = child  # children come after their parent
                    begin = end
                    scale = tl.full((), 1.0, tl.float32)
                    taken = tl.zeros((), tl.float32)
                    lift = tl.full((), 1.0, tl.float32)
                    rest = tl.full((), 1.0, tl.float32)
                    only = tl.full((), -1, tl.int32)
                    w = weight
                else:
                    rejected = child
            else:
                flags |= BAD_DRAFT
        else:
            if scratch.traversal:
                if node > 0:
                    coin, coin_flags = coin_at(uniforms, root + node)
                    flags |= coin_flags
                    if coin >= w:  # back to the node above, as it was left
                        rejected = node
                        tried = node
                        node = tl.load(trees.above + root + node)
                        accepted -= 1
                        end = begin
                        scale, taken, lift, rest, only, w, begin = load_level(levels + accepted * LEVEL)
            walking = rejected >= 0
        row = root + node
        drawn = (walking == 0) & (tl.load(trees.ends + root + node) == 0)
        if drawn:
            flags |= tl.load(target.laws.status + row)
        if (rejected >= 0) | (drawn & (taken > 0.0)):
            at = Position(b, node, row, row)
            left_scale, left_taken = scale, taken
            had = tl.zeros((), tl.float32)  # what the rejected child has of P
            if rejected >= 0:
                left_scale, left_taken = w * scale, w * taken + rest
                y = tl.load(tokens + rejected)
                had, of_draft = pair(target, draft, at, scale, y)
                had -= taken * (lift * of_draft)
                tl.store(removed + end, y)
                end += 1
            tl.debug_barrier()
            mass = masses_left(
                target, draft, at, left_scale, left_taken, lift, removed, begin, end, tiles, masses, TILES
            )
            tl.debug_barrier()
            if rejected >= 0:
                total = total_mass(masses, tiles, ROW_TILES)
                scale, taken, lift, rest, only = after_rejection(
                    scale, taken, lift, only, left_scale, left_taken, rejected, had, total, mass
                )
                if scratch.traversal:  # else it stays 1
                    w = block_threshold(w, total)
            else:
                coin, coin_flags = coin_at(uniforms, root)
                flags |= coin_flags
                last_tile, rest_there, last_mass = walk_tiles(masses, tiles, coin, -1, 0.0, ROW_TILES)
                last_tile = tl.maximum(last_tile, 0)
                last_ids = last_tile * TILE + tl.arange(0, TILE)
                weight, _ = remaining(
                    target, draft, at, scale, taken, lift, removed, begin, end, last_tile * TILE, last_ids, TILE
                )
                final = walk_ids(weight, last_ids, rest_there, last_mass).to(tl.int64)
                if only >= 0:
                    final = tl.load(tokens + only).to(tl.int64)
        elif drawn:
            id, coin_flags = token_of(target, tiles, b, node, num_nodes, tile_mass, uniforms, root, ROW_TILES)
            final = id.to(tl.int64)
            flags |= coin_flags
        tl.debug_barrier()
    store_path(b, trees, num_nodes, node, accepted, final, flags, out, max_depth)
