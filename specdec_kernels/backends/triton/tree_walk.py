"""Kernels of the tree rules that accept given tokens: "sample", "greedy" and "match" go where a token is drawn,
"typical" weighs all nodes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import INFINITY, LAST_ID, TILE, any_flags
from .bundles import LOGITS, Position
from .law import needed
from .mixture import NO_ROW, law_remainder
from .noise import best_of_row
from .row import coin_at, load_law, load_logits, tile_ids, walk_ids, walk_tiles, weigh
from .tree import store_path, token_of


@triton.jit
def cascade_law(target, draft, mixtures, b, node, row, ids):
    """A cascade's law after a node, of target ids."""
    return law_remainder(target, draft, mixtures, Position(b, node, row, row), 1.0, row >= 0, ids)


@triton.jit(do_not_specialize=["num_nodes", "tiles"])
def law_masses(
    target,
    num_nodes,
    tiles,
    trees,
    draft,
    mixtures,
    masses,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of a row where a cascade's law is drawn from: the mass of that in each."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    b = row // num_nodes
    node = row % num_nodes
    wanted, _ = needed(trees.spans, b, node, False)
    if wanted:
        if tl.load(trees.mixed + row) > 0:
            law = cascade_law(target, draft, mixtures, b, node, row, tile_ids(first_tile, TILES))
            tile = first_tile + tl.arange(0, TILES)
            tl.store(masses + row * tiles + tile, tl.sum(law, 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["num_nodes", "tiles"])
def choose(
    target,
    num_nodes,
    tiles,
    trees,
    draft,
    mixtures,
    masses,
    tile_mass,
    uniforms,
    best,
    chosen,
    TILES: tl.constexpr,
):
    """A program a node: the token after it, by its uniform or its tiles' best scores; flags go to the row's status."""
    row = tl.program_id(0).to(tl.int64)
    b = row // num_nodes
    node = row % num_nodes
    status = target.laws.status + row
    wanted, _ = needed(trees.spans, b, node, False)
    if wanted:
        id = tl.load(target.laws.argmax + row).to(tl.int32)
        mixed = row < 0
        if mixtures.kept_by != NO_ROW:
            mixed = tl.load(trees.mixed + row) > 0
        if best.id is not None:
            if tl.load(target.laws.numbers + row * 4 + 2) > 0:
                id = best_of_row(best, row, tiles, TILES)
        elif mixed:
            if mixtures.kept_by != NO_ROW:
                uniform, flags = coin_at(uniforms, row)
                tile, rest, mass = walk_tiles(masses + row * tiles, tiles, uniform, -1, 0.0, TILES)
                if tile >= 0:
                    ids = tile * TILE + tl.arange(0, TILE)
                    id = walk_ids(cascade_law(target, draft, mixtures, b, node, row, ids), ids, rest, mass)
                else:  # the law is 0, as Q is; the flags of the uniform are known
                    id, known_flags = token_of(target, tiles, b, node, num_nodes, tile_mass, uniforms, row, TILES)
                tl.store(status, tl.load(status) | tl.load(draft.laws.status + row) | flags)
        else:
            id, flags = token_of(target, tiles, b, node, num_nodes, tile_mass, uniforms, row, TILES)
            tl.store(status, tl.load(status) | flags)
        tl.store(chosen + row, id.to(tl.int64))


@triton.jit(do_not_specialize=["num_nodes", "max_depth"])
def walk_tree(
    trees,
    num_nodes,
    chosen,
    row_status,
    out,
    max_depth,
):
    """A program a sequence: from the root down while the token chosen at a node is a child's."""
    b = tl.program_id(0).to(tl.int64)
    at = b * num_nodes
    slot = tl.arange(0, trees.slots)
    parent = tl.load(trees.above + at + slot, mask=slot < num_nodes, other=-1)
    token = tl.load(trees.tokens + at + slot, mask=slot < num_nodes, other=-1)
    flags = tl.load(trees.state + b)
    node = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    final = tl.full((), -1, tl.int64)
    walking = tl.load(trees.spans + b * 4 + 1) >= 0
    while walking:
        flags |= tl.load(row_status + at + node)
        wanted = tl.load(chosen + at + node)
        child = tl.min(tl.where((parent == node) & (token == wanted), slot, LAST_ID), 0)
        if (child < LAST_ID) & (accepted < max_depth):
            node = child
            accepted += 1
            walking = tl.load(trees.ends + at + node) == 0
        else:
            final = wanted
            walking = child < 0
    store_path(b, trees, num_nodes, node, accepted, final, flags, out, max_depth)


@triton.jit(do_not_specialize=["tiles", "num_nodes", "max_depth"])
def typical(
    target,
    tiles,
    tile_mass,
    values,
    trees,
    num_nodes,
    uniforms,
    bounds,
    reached,
    out,
    max_depth,
    TILES: tl.constexpr,
):
    """A program a sequence: which nodes pass, then level by level which are reached, and a token after the best of the
    deepest. `reached` ``[batch, 2, num_nodes]`` float32: depth (-1: not reached) and log-likelihood.
    """
    b = tl.program_id(0).to(tl.int64)
    flags = tl.load(trees.state + b)
    node = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    final = tl.full((), -1, tl.int64)
    if tl.load(trees.spans + b * 4 + 1) >= 0:
        at = b * num_nodes
        slot = tl.arange(0, trees.slots)
        inside = slot < num_nodes
        parent = tl.load(trees.above + at + slot, mask=inside, other=-1)
        token = tl.load(trees.tokens + at + slot, mask=inside, other=-1)
        hangs = parent >= 0
        law = load_law(target.laws, at + parent, hangs)
        normalizer = tl.load(values + (at + parent) * 6 + 4, mask=hangs, other=1.0)
        entropy = tl.load(values + (at + parent) * 6 + 5, mask=hangs, other=0.0)
        x = load_logits(target.rows, b, parent, tl.where(hangs, token, -1))
        one_hot = law.inverse_temperature < 0
        p = tl.div_rn(weigh(x, law, -INFINITY, LOGITS), normalizer)
        p = tl.where(one_hot, (token == law.argmax).to(tl.float32), p)
        least = tl.minimum(bounds.delta * tl.exp(tl.where(one_hot, 0.0, -entropy)), bounds.epsilon)
        passes = hangs & (p > least)
        log_p = tl.log(tl.where(p > 0.0, p, 1.0))
        depth = tl.where(slot == 0, 0.0, -1.0)
        depth_above = tl.full((trees.slots,), -1.0, tl.float32)
        likelihood = tl.zeros((trees.slots,), tl.float32)
        reached += at * 2
        growing = flags == flags
        while growing:
            tl.store(reached + slot, depth, mask=inside)
            tl.store(reached + num_nodes + slot, likelihood, mask=inside)
            tl.debug_barrier()
            depth_above = tl.load(reached + parent, mask=hangs, other=-1.0)
            likelihood_above = tl.load(reached + num_nodes + parent, mask=hangs, other=0.0)
            tl.debug_barrier()  # none may load what another stores next
            new = passes & (depth < 0.0) & (depth_above >= 0.0) & (depth_above < max_depth)
            depth = tl.where(new, depth_above + 1.0, depth)
            likelihood = tl.where(new, likelihood_above + log_p, likelihood)
            growing = tl.max(new.to(tl.int32), 0) > 0
        deepest = tl.max(depth, 0)
        score = tl.where(depth == deepest, likelihood, -INFINITY)
        node = tl.min(tl.where((depth == deepest) & (score == tl.max(score, 0)), slot, LAST_ID), 0)
        accepted = deepest.to(tl.int32)
        row_flags = tl.load(target.laws.status + at + parent, mask=hangs & (depth_above >= 0.0), other=0)
        flags |= any_flags(row_flags)
        if tl.load(trees.ends + at + node) == 0:
            id, coin_flags = token_of(target, tiles, b, node, num_nodes, tile_mass, uniforms, at, TILES)
            final = id.to(tl.int64)
            flags |= coin_flags | tl.load(target.laws.status + at + node)
    store_path(b, trees, num_nodes, node, accepted, final, flags, out, max_depth)
