"""What the kernels of all tree rules share: the trees as the rules see them, draws from a row, the outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import BAD_TOKEN, LAST_ID
from .bundles import Row, Trees
from .launch import empties, power_of_2, run
from .law import store_span
from .row import coin_at, draw_from_law, load_law


@triton.jit
def store_span_of_tree(spans, b, num_nodes, length):
    """Nodes lie as the rows of num_nodes - 1 draft tokens and the bonus do."""
    zero = tl.zeros((), tl.int64)
    store_span(spans, b, zero, length, zero, b * (num_nodes - 1))


@triton.jit(do_not_specialize=["parent_stride", "status_stride", "num_eos", "num_nodes"])
def plan(
    node_tokens,
    parents,
    parent_stride,
    tree_status,
    status_stride,
    eos,
    num_eos,
    num_nodes,
    vocab,
    trees,
    DRAFT_AT_LEAVES: tl.constexpr,
):
    """A program a sequence: its tree. Nothing hangs from an EOS, and an unusable node hangs from nothing."""
    b = tl.program_id(0).to(tl.int64)
    node_tokens += b * num_nodes
    slot = tl.arange(0, trees.slots)
    inside = slot < num_nodes
    parent = tl.load(parents + b * parent_stride + slot, mask=inside, other=-1)
    in_tree = (parent >= 0) & (parent < slot)
    token = tl.load(node_tokens + slot, mask=inside, other=-1).to(tl.int64)
    token_above = tl.load(node_tokens + parent, mask=in_tree, other=-1).to(tl.int64)
    usable = in_tree & (token >= 0) & (token < vocab)
    is_eos = slot < 0
    under_eos = slot < 0
    if eos is not None:
        for i in range(num_eos):
            id = tl.load(eos + i)
            is_eos = is_eos | (token == id)
            under_eos = under_eos | (token_above == id)
    under_eos = under_eos & (parent > 0)  # the root's token was emitted before
    hangs = usable & (under_eos == 0)
    at = b * num_nodes + slot
    tl.store(trees.tokens + at, token.to(tl.int32), mask=inside)
    tl.store(trees.above + at, tl.where(hangs, parent, -1).to(tl.int32), mask=inside)
    tl.store(trees.ends + at, (is_eos & usable).to(tl.int32), mask=inside)
    tl.store(trees.mixed + at, tl.full((trees.slots,), 1 if DRAFT_AT_LEAVES else 0, tl.int32), mask=inside)
    tl.debug_barrier()
    tl.store(trees.mixed + b * num_nodes + parent, tl.full((trees.slots,), 1, tl.int32), mask=hangs)
    idle = tl.load(node_tokens).to(tl.int64) == -1
    last = tl.max(tl.where(hangs, slot, 0), 0)
    last_inner = last if DRAFT_AT_LEAVES else tl.max(tl.where(hangs, parent, -1), 0)
    store_span_of_tree(trees.spans, b, num_nodes, tl.where(idle, -1, last))
    store_span_of_tree(trees.draft_spans, b, num_nodes, tl.where(idle, -1, last_inner))
    bad = tl.max((in_tree & (usable == 0) & (token != -1)).to(tl.int32), 0) * BAD_TOKEN
    tl.store(trees.state + b, tl.load(tree_status + b * status_stride) | tl.where(idle, 0, bad))


@triton.jit
def token_of(target, tiles, b, node, num_nodes, tile_mass, uniforms, uniform_at, TILES: tl.constexpr):
    """(A token from P after a node, flags of the uniform that it takes)."""
    row = b * num_nodes + node
    id = tl.load(target.laws.argmax + row).to(tl.int32)
    flags = tl.zeros((), tl.int32)
    if tile_mass is not None:
        at = Row(target.rows, b, node, tiles, load_law(target.laws, row))
        if at.law.inverse_temperature > 0:
            uniform, flags = coin_at(uniforms, uniform_at)
            id = draw_from_law(at, tile_mass + row * tiles, uniform, None, TILES)
    return id, flags


@triton.jit
def next_child(slot, parent, node, before):
    """The first child of `node` after the node `before`; LAST_ID if there is none."""
    return tl.min(tl.where((parent == node) & (slot > before), slot, LAST_ID), 0)


@triton.jit
def store_path(
    b,
    trees,
    num_nodes,
    node,
    accepted,
    final,
    flags,
    out,
    max_depth,
):
    """The `accepted` nodes down to `node` and their tokens, the final token (-1: none), then -1."""
    slot = tl.arange(0, out.slots)
    tokens = out.tokens + b * (max_depth + 1)
    nodes = out.nodes + b * max_depth
    nothing = tl.full((out.slots,), -1, tl.int64)
    behind = slot >= accepted
    tl.store(tokens + slot, tl.where(slot == accepted, final, nothing), mask=behind & (slot <= max_depth))
    tl.store(nodes + slot, nothing, mask=behind & (slot < max_depth))
    at = b * num_nodes
    depth = accepted
    while depth > 0:
        depth -= 1
        tl.store(tokens + depth, tl.load(trees.tokens + at + node).to(tl.int64))
        tl.store(nodes + depth, node.to(tl.int64))
        node = tl.load(trees.above + at + node)
    tl.store(out.num_accepted + b, accepted)
    tl.store(out.num_tokens + b, accepted + (final >= 0).to(tl.int32))
    tl.store(out.status + b, flags)


def make_trees(
    node_tokens: Tensor, parents: Tensor, tree_status: Tensor, eos_token_ids: Tensor | None, vocab: int,
    *, draft_at_leaves: bool,
) -> Trees:  # fmt: skip
    """`parents` and `tree_status` are those of one tree or of one a sequence. Draft rows are read at nodes that have
    children, or at all.
    """
    batch, num_nodes = node_tokens.shape
    empty = empties(node_tokens.device)
    # each apart, so that all are aligned
    tokens, above, ends, mixed = (empty(batch, num_nodes) for _ in range(4))
    spans, draft_spans = empty(2, batch, 4, dtype=torch.int64)
    slots = tl.constexpr(power_of_2(num_nodes))
    trees = Trees(tokens, above, ends, mixed, spans, draft_spans, empty(batch), slots)
    eos = None if eos_token_ids is None else eos_token_ids.contiguous()
    run(
        plan, (batch,), node_tokens.contiguous(), parents.contiguous(), num_nodes if parents.dim() == 2 else 0,
        tree_status.contiguous(), tree_status.dim(), eos, 0 if eos is None else eos.numel(), num_nodes, vocab, trees,
        DRAFT_AT_LEAVES=draft_at_leaves,
    )  # fmt: skip
    return trees
