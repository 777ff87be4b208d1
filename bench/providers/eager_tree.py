"""Token trees in plain PyTorch: whole batch at once, laws of all nodes written out, no synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.ops.verify_tree import DELTA, EPSILON

from ..inputs import TREE_WIDTHS, Case, TreeInputs
from ..timing import Call
from .eager import assemble, law, one_of, pick


def path_to(tree: sk.DraftTree, node: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes ``[batch, max_depth]`` from below the root to `node` ``[batch]``, then −1; and how many."""
    nodes = torch.nn.functional.pad(tree.paths[node], (0, 1), value=-1)[:, 1:-1]
    return nodes, (nodes >= 0).sum(-1)


def assembled(step: TreeInputs, node: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens on the path to `node`, the final one, then −1; and how many were accepted."""
    nodes, accepted = path_to(step.tree, node)
    return assemble(step.node_tokens.gather(1, nodes.clamp_min(0)), accepted, final)


def walk_to(step: TreeInputs, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Down the tree while the token `wanted` after a node, one per sequence, is a child's; rows on the way only."""
    node = torch.zeros_like(step.node_tokens[:, 0])
    token = wanted(node)
    for _ in range(step.tree.max_depth):
        is_it = (step.tree.parents == node[:, None]) & (step.node_tokens == token[:, None])
        goes_on = is_it.any(-1)
        node = torch.where(goes_on, is_it.int().argmax(-1), node)
        token = torch.where(goes_on, wanted(node), token)
    return assembled(step, node, token)


def recursive(step: TreeInputs, params: sk.SamplingParams) -> tuple[Tensor, Tensor]:
    """A level at a time, siblings one after the other: accept with min(1, P/Q), otherwise P becomes norm((P − Q)+) and
    the child leaves Q.
    """
    tree = step.tree
    node = torch.zeros_like(step.node_tokens[:, 0])
    goes_on = torch.ones_like(node, dtype=torch.bool)
    P = law(pick(step.target_logits, node), params)
    for width in TREE_WIDTHS:
        Q = law(pick(step.draft_logits, node), params)
        child, below, moved = tree.first_child[node], node, torch.zeros_like(goes_on)
        for _ in range(width):
            token = pick(step.node_tokens, child.clamp_min(0))
            at = token.clamp_min(0)[:, None]
            p, q = P.gather(1, at)[:, 0], Q.gather(1, at)[:, 0]
            tried = goes_on & ~moved & (child >= 0) & (token >= 0) & (q > 0)
            accept = tried & (torch.rand_like(q) * q < p)
            reject = (tried & ~accept)[:, None]
            left = (P - Q).clamp_min(0)
            mass = left.sum(-1, keepdim=True)
            rest = Q.scatter(1, at, 0.0)
            P = torch.where(reject & (mass > 0), left / mass, P)
            Q = torch.where(reject, rest / rest.sum(-1, keepdim=True).clamp_min(1e-30), Q)
            below, moved = torch.where(accept, child, below), moved | accept
            child = torch.where(child >= 0, tree.next_sibling[child.clamp_min(0)], -1)
        node, goes_on = below, moved
        P = torch.where(moved[:, None], law(pick(step.target_logits, node), params), P)
    return assembled(step, node, one_of(P))


def typical(step: TreeInputs, case: Case) -> tuple[Tensor, Tensor]:
    """Medusa's rule, with `verify_tree`'s ε and δ."""
    tree = step.tree
    p = (step.target_logits.float() / case.params.temperature).softmax(-1)
    threshold = (DELTA * (-torch.special.entr(p).sum(-1)).exp()).clamp_max(EPSILON)
    above = tree.parents.clamp_min(0)
    of_child = p[:, above].gather(-1, step.node_tokens.clamp_min(0)[..., None])[..., 0]
    passes = (of_child > threshold[:, above]) & (step.node_tokens >= 0)
    depth = torch.where(tree.parents < 0, 0, -1).expand(passes.shape)
    likelihood = torch.zeros_like(of_child)
    for d in range(1, tree.max_depth + 1):
        reached = passes & (depth[:, above] == d - 1) & (tree.parents >= 0)
        depth = torch.where(reached, d, depth)
        likelihood = torch.where(reached, likelihood[:, above] + of_child.log(), likelihood)
    longest = depth == depth.amax(-1, keepdim=True)
    node = likelihood.masked_fill(~longest, -torch.inf).argmax(-1)
    return assembled(step, node, one_of(law(pick(step.target_logits, node), case.params)))


def verify_tree(case: Case) -> Call | None:
    if case.acceptance == "traversal":
        return None

    def call(step: TreeInputs) -> tuple[Tensor, Tensor]:
        if case.acceptance == "greedy":
            return walk_to(step, lambda node: pick(step.target_logits, node).argmax(-1))
        if case.acceptance == "typical":
            return typical(step, case)
        if case.acceptance == "sample":
            return walk_to(step, lambda node: one_of(law(pick(step.target_logits, node), case.params)))
        return recursive(step, case.params)

    return call
