"""Kernels of the tree rules that accept given tokens: "sample", "greedy" and "match" go where a token is drawn,
"typical" weighs all nodes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import INFINITY, LAST_ID, TILE, any_flags
from .law import needed
from .mixture import NO_ROW, weights
from .noise import best_of_row
from .row import load_laws, tile_ids, walk_ids, walk_tiles, weigh
from .tree import coin_at, store_path, token_of


@triton.jit
def is_mixed(row, inner, EVERYWHERE: tl.constexpr):
    """Whether a cascade's law takes the place of P after a node."""
    return row >= 0 if EVERYWHERE else tl.load(inner + row) > 0


@triton.jit(do_not_specialize=["num_nodes", "tiles"])
def law_masses(
    target, stride_batch, stride_row, num_nodes, tiles, blocks, laws, argmax,
    draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax, draft_status, map_to, map_size,
    PROBS: tl.constexpr, BONUS: tl.constexpr, mixture, KEPT_BY: tl.constexpr, vocab, inner, EVERYWHERE: tl.constexpr,
    masses, TILES: tl.constexpr,
):  # fmt: skip
    """A program for TILES tiles of a row where a cascade's law is drawn from: the mass of that in each."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    b = row // num_nodes
    node = row % num_nodes
    wanted, _ = needed(b, node, blocks, False)
    if wanted:
        if is_mixed(row, inner, EVERYWHERE):
            law = weights(
                target + b * stride_batch + node * stride_row, row, laws, argmax, 1.0, row >= 0, draft,
                b * draft_stride_batch + node * draft_stride_row, row, draft_vocab, draft_laws, draft_argmax, map_to,
                map_size, tile_ids(first_tile, TILES), vocab, PROBS, mixture, KEPT_BY,
            )  # fmt: skip
            tile = first_tile + tl.arange(0, TILES)
            tl.store(masses + row * tiles + tile, tl.sum(law, 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["num_nodes", "tiles"])
def choose(
    target, stride_batch, stride_row, num_nodes, tiles, blocks, laws, argmax,
    draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax, draft_status, map_to, map_size,
    PROBS: tl.constexpr, BONUS: tl.constexpr, mixture, KEPT_BY: tl.constexpr, vocab, inner, EVERYWHERE: tl.constexpr,
    masses, tile_mass, uniforms, best, best_id, status, chosen, TILES: tl.constexpr,
):  # fmt: skip
    """A program a node: the token after it, by its uniform or its tiles' best scores; flags go to the row's status."""
    row = tl.program_id(0).to(tl.int64)
    b = row // num_nodes
    node = row % num_nodes
    wanted, _ = needed(b, node, blocks, False)
    if wanted:
        id = tl.load(argmax + row).to(tl.int32)
        mixed = row < 0
        if KEPT_BY != NO_ROW:
            mixed = is_mixed(row, inner, EVERYWHERE)
        if best is not None:
            if tl.load(laws + row * 4 + 2) > 0:
                id = best_of_row(best + row * tiles, best_id + row * tiles, tiles, TILES)
        elif mixed:
            if KEPT_BY != NO_ROW:
                uniform, flags = coin_at(uniforms, row)
                tile, rest = walk_tiles(masses + row * tiles, tiles, uniform, -1, 0.0, TILES)
                ids = tl.maximum(tile, 0) * TILE + tl.arange(0, TILE)
                law = weights(
                    target + b * stride_batch + node * stride_row, row, laws, argmax, 1.0, row >= 0, draft,
                    b * draft_stride_batch + node * draft_stride_row, row, draft_vocab, draft_laws, draft_argmax,
                    map_to, map_size, ids, vocab, PROBS, mixture, KEPT_BY,
                )  # fmt: skip
                id = walk_ids(law, ids, rest)
                tl.store(status + row, tl.load(status + row) | tl.load(draft_status + row) | flags)
        else:
            id, flags = token_of(
                row, target, stride_batch, stride_row, num_nodes, vocab, tiles, laws, argmax, tile_mass, uniforms, row,
                TILES,
            )  # fmt: skip
            tl.store(status + row, tl.load(status + row) | flags)
        tl.store(chosen + row, id.to(tl.int64))


@triton.jit(do_not_specialize=["num_nodes", "max_depth"])
def walk_tree(
    tokens, above, ends, blocks, state, num_nodes, chosen, row_status,
    out_tokens, num_accepted, num_tokens, status, out_nodes, max_depth, SLOTS: tl.constexpr, DEPTHS: tl.constexpr,
):  # fmt: skip
    """A program a sequence: from the root down while the token chosen at a node is a child's."""
    b = tl.program_id(0).to(tl.int64)
    at = b * num_nodes
    slot = tl.arange(0, SLOTS)
    parent = tl.load(above + at + slot, mask=slot < num_nodes, other=-1)
    token = tl.load(tokens + at + slot, mask=slot < num_nodes, other=-1)
    flags = tl.load(state + b)
    node = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    final = tl.full((), -1, tl.int64)
    walking = tl.load(blocks + b * 3 + 1) >= 0
    while walking:
        flags |= tl.load(row_status + at + node)
        wanted = tl.load(chosen + at + node)
        child = tl.min(tl.where((parent == node) & (token == wanted), slot, LAST_ID), 0)
        if (child < LAST_ID) & (accepted < max_depth):
            node = child
            accepted += 1
            walking = tl.load(ends + at + node) == 0
        else:
            final = wanted
            walking = child < 0
    store_path(
        b, tokens, above, num_nodes, node, accepted, final, flags, out_tokens, num_accepted, num_tokens, status,
        out_nodes, max_depth, DEPTHS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_nodes", "max_depth", "tiles", "epsilon", "delta"])
def typical(
    target, stride_batch, stride_row, tiles, vocab, laws, argmax, row_status, tile_mass, values, uniforms,
    tokens, above, ends, blocks, state, num_nodes, epsilon, delta, reached,
    out_tokens, num_accepted, num_tokens, status, out_nodes, max_depth,
    SLOTS: tl.constexpr, DEPTHS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program a sequence: which nodes pass, then level by level which are reached, and a token after the best of the
    deepest. `reached` ``[batch, 2, num_nodes]`` float32: depth (-1: not reached) and log-likelihood.
    """
    b = tl.program_id(0).to(tl.int64)
    flags = tl.load(state + b)
    node = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    final = tl.full((), -1, tl.int64)
    if tl.load(blocks + b * 3 + 1) >= 0:
        at = b * num_nodes
        slot = tl.arange(0, SLOTS)
        inside = slot < num_nodes
        parent = tl.load(above + at + slot, mask=inside, other=-1)
        token = tl.load(tokens + at + slot, mask=inside, other=-1)
        hangs = parent >= 0
        maximum, _, inverse_temperature, _ = load_laws(laws, at + parent, hangs)
        normalizer = tl.load(values + (at + parent) * 6 + 4, mask=hangs, other=1.0)
        entropy = tl.load(values + (at + parent) * 6 + 5, mask=hangs, other=0.0)
        x = tl.load(target + b * stride_batch + parent * stride_row + token, mask=hangs, other=-INFINITY).to(tl.float32)
        x = tl.where(x == x, x, -INFINITY)
        one_hot = inverse_temperature < 0
        best = tl.load(argmax + at + parent, mask=hangs, other=-1)
        p = tl.div_rn(weigh(x, maximum, -INFINITY, inverse_temperature), normalizer)
        p = tl.where(one_hot, (token == best).to(tl.float32), p)
        least = tl.minimum(delta * tl.exp(tl.where(one_hot, 0.0, -entropy)), epsilon)
        passes = hangs & (p > least)
        log_p = tl.log(tl.where(p > 0.0, p, 1.0))
        depth = tl.where(slot == 0, 0.0, -1.0)
        depth_above = tl.full((SLOTS,), -1.0, tl.float32)
        likelihood = tl.zeros((SLOTS,), tl.float32)
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
        row_flags = tl.load(row_status + at + parent, mask=hangs & (depth_above >= 0.0), other=0)
        flags |= any_flags(row_flags)
        if tl.load(ends + at + node) == 0:
            id, coin_flags = token_of(
                at + node, target, stride_batch, stride_row, num_nodes, vocab, tiles, laws, argmax, tile_mass, uniforms,
                at, TILES,
            )  # fmt: skip
            final = id.to(tl.int64)
            flags |= coin_flags | tl.load(row_status + at + node)
    store_path(
        b, tokens, above, num_nodes, node, accepted, final, flags, out_tokens, num_accepted, num_tokens, status,
        out_nodes, max_depth, DEPTHS,
    )  # fmt: skip
