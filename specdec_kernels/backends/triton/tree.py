"""What the kernels of all tree rules share: the trees as the rules see them, coins, draws from a row, the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import BAD_PARAM, BAD_TOKEN, LAST_ID
from .launch import power_of_2, run
from .row import load_law
from .sample import draw_from_law


@triton.jit(do_not_specialize=["parent_stride", "status_stride", "num_eos", "num_nodes"])
def plan(
    node_tokens, parents, parent_stride, tree_status, status_stride, eos, num_eos, num_nodes, vocab,
    tokens, above, ends, inner, blocks, draft_blocks, state, DRAFT_AT_LEAVES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program a sequence: its `Nodes`. Nothing hangs from an EOS, and an unusable node hangs from nothing."""
    b = tl.program_id(0).to(tl.int64)
    node_tokens += b * num_nodes
    slot = tl.arange(0, SLOTS)
    inside = slot < num_nodes
    parent = tl.load(parents + b * parent_stride + slot, mask=inside, other=-1)
    in_tree = (parent >= 0) & (parent < slot)
    token = tl.load(node_tokens + slot, mask=inside, other=-1).to(tl.int64)
    token_above = tl.load(node_tokens + parent, mask=in_tree, other=-1).to(tl.int64)
    usable = in_tree & (token >= 0) & (token < vocab)
    is_eos = slot < 0
    under_eos = slot < 0
    for i in range(num_eos):
        id = tl.load(eos + i)
        is_eos = is_eos | (token == id)
        under_eos = under_eos | (token_above == id)
    under_eos = under_eos & (parent > 0)  # the root's token was emitted before
    hangs = usable & (under_eos == 0)
    at = b * num_nodes + slot
    tl.store(tokens + at, token.to(tl.int32), mask=inside)
    tl.store(above + at, tl.where(hangs, parent, -1).to(tl.int32), mask=inside)
    tl.store(ends + at, (is_eos & usable).to(tl.int32), mask=inside)
    tl.store(inner + at, tl.zeros((SLOTS,), tl.int32), mask=inside)
    tl.debug_barrier()
    tl.store(inner + b * num_nodes + parent, tl.full((SLOTS,), 1, tl.int32), mask=hangs)
    idle = tl.load(node_tokens).to(tl.int64) == -1
    last = tl.max(tl.where(hangs, slot, 0), 0)
    last_inner = last if DRAFT_AT_LEAVES else tl.max(tl.where(hangs, parent, -1), 0)
    tl.store(blocks + b * 3, tl.zeros((), tl.int64))
    tl.store(blocks + b * 3 + 1, tl.where(idle, -1, last).to(tl.int64))
    tl.store(draft_blocks + b * 3, tl.zeros((), tl.int64))
    tl.store(draft_blocks + b * 3 + 1, tl.where(idle, -1, last_inner).to(tl.int64))
    bad = tl.max((in_tree & (usable == 0) & (token != -1)).to(tl.int32), 0) * BAD_TOKEN
    tl.store(state + b, tl.load(tree_status + b * status_stride) | tl.where(idle, 0, bad))


@triton.jit
def coin_at(uniforms, at):
    """(the uniform there, flags); 0 where there are none, which only point masses may do without."""
    coin = tl.zeros((), tl.float32)
    if uniforms is not None:
        coin = tl.load(uniforms + at)
    good = (coin >= 0.0) & (coin < 1.0)
    return tl.where(good, coin, 0.0), tl.where(good, 0, BAD_PARAM)


@triton.jit
def token_of(
    row, target, stride_batch, stride_row, num_nodes, vocab, tiles, laws, argmax, tile_mass, uniforms, uniform_at,
    TILES: tl.constexpr,
):  # fmt: skip
    """(A token from P of a row, flags of the uniform that it takes)."""
    id = tl.load(argmax + row).to(tl.int32)
    flags = tl.zeros((), tl.int32)
    if tile_mass is not None:
        maximum, cutoff, inverse_temperature, _ = load_law(laws, row)
        if inverse_temperature > 0:
            uniform, flags = coin_at(uniforms, uniform_at)
            id = draw_from_law(
                target + row // num_nodes * stride_batch + row % num_nodes * stride_row, vocab, tiles,
                tile_mass + row * tiles, maximum, cutoff, inverse_temperature, uniform, TILES,
            )  # fmt: skip
    return id, flags


@triton.jit
def next_child(slot, parent, node, before):
    """The first child of `node` behind the node `before`; LAST_ID if there is none."""
    return tl.min(tl.where((parent == node) & (slot > before), slot, LAST_ID), 0)


@triton.jit
def store_path(
    b, tokens, above, num_nodes, node, accepted, final, flags, out_tokens, num_accepted, num_tokens, status, out_nodes,
    max_depth, DEPTHS: tl.constexpr,
):  # fmt: skip
    """The `accepted` nodes down to `node` and their tokens, the final token (-1: none), then -1."""
    slot = tl.arange(0, DEPTHS)
    out_tokens += b * (max_depth + 1)
    out_nodes += b * max_depth
    nothing = tl.full((DEPTHS,), -1, tl.int64)
    behind = slot >= accepted
    tl.store(out_tokens + slot, tl.where(slot == accepted, final, nothing), mask=behind & (slot <= max_depth))
    tl.store(out_nodes + slot, nothing, mask=behind & (slot < max_depth))
    at = b * num_nodes
    depth = accepted
    while depth > 0:
        depth -= 1
        tl.store(out_tokens + depth, tl.load(tokens + at + node).to(tl.int64))
        tl.store(out_nodes + depth, node.to(tl.int64))
        node = tl.load(above + at + node)
    tl.store(num_accepted + b, accepted)
    tl.store(num_tokens + b, accepted + (final >= 0).to(tl.int32))
    tl.store(status + b, flags)


@dataclass
class Nodes:
    """The nodes ``[batch, num_nodes]`` int32 of each sequence, and which of its rows are read."""

    tokens: Tensor
    above: Tensor  # parents; -1 for the root and what can never be accepted
    ends: Tensor  # whether it is an EOS
    inner: Tensor  # whether something can be accepted after it
    blocks: Tensor  # [batch, 3] int64, as verify.py has them: the rows up to the last node that can be accepted
    draft_blocks: Tensor  # the same of the draft's rows
    state: Tensor  # [batch] int32: status so far

    @property
    def arguments(self) -> tuple[object, ...]:
        """What the kernels that walk take."""
        return self.tokens, self.above, self.ends, self.blocks, self.state, self.tokens.shape[1]


def make_nodes(
    node_tokens: Tensor, parents: Tensor, tree_status: Tensor, eos_token_ids: Tensor | None, vocab: int,
    *, draft_at_leaves: bool,
) -> Nodes:  # fmt: skip
    """`parents` and `tree_status` are those of one tree or of one a sequence. Draft rows are read at nodes that have
    children, or at all.
    """
    batch, num_nodes = node_tokens.shape
    device = node_tokens.device
    tokens, above, ends, inner = torch.empty(4, batch, num_nodes, dtype=torch.int32, device=device)
    blocks, draft_blocks = torch.empty(2, batch, 3, dtype=torch.int64, device=device)
    state = torch.empty(batch, dtype=torch.int32, device=device)
    eos = None if eos_token_ids is None else eos_token_ids.contiguous()
    run(
        plan, (batch,), node_tokens.contiguous(), parents.contiguous(), num_nodes if parents.dim() == 2 else 0,
        tree_status.contiguous(), tree_status.dim(), eos, 0 if eos is None else eos.numel(), num_nodes, vocab,
        tokens, above, ends, inner, blocks, draft_blocks, state, DRAFT_AT_LEAVES=draft_at_leaves,
        SLOTS=power_of_2(num_nodes),
    )  # fmt: skip
    return Nodes(tokens, above, ends, inner, blocks, draft_blocks, state)
