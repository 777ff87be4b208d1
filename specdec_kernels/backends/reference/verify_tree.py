"""Reference of `verify_tree`: every rule for all sequences of the batch at once, one node of each at a time.

Sources: Miao et al. 2024 (arXiv 2305.09781) and Chen et al. 2024 (arXiv 2402.12374) for sampled children, Weng et al.
2025 (arXiv 2505.12398) for traversal, Cai et al. 2024 (arXiv 2401.10774) for typical acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...types import PLACEHOLDER_TOKEN_ID, Status
from .law import Law, Params, draw, make_law, make_params, tile_sum
from .sample import perturbed
from .target_law import make_mixture
from .verify_chain import any_flag, at, make_draft, slots_upto

SAMPLE, GREEDY, MATCH, TYPICAL, RECURSIVE, TRAVERSAL = range(6)


@dataclass
class Tree:
    """The trees of a batch ``[batch, num_nodes]`` as the rules see them: nothing hangs from an EOS."""

    tokens: Tensor  # clamped into the vocabulary
    usable: Tensor  # bool
    parents: Tensor  # −1: not in the tree
    first_child: Tensor
    next_sibling: Tensor
    is_eos: Tensor
    max_depth: int

    def child_with(self, node: Tensor, token: Tensor) -> Tensor:
        """The first child of each sequence's `node` that is this token, or −1."""
        nodes = slots_upto(self.tokens.shape[1], self.tokens)
        is_it = (self.parents == node[:, None]) & self.usable & (self.tokens == token[:, None])
        found = torch.where(is_it, nodes, nodes.numel()).amin(-1)
        return torch.where(found < nodes.numel(), found, -1)

    def path(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes ``[batch, max_depth]`` from below the root down to `node`, then −1; and how many."""
        out = node.new_full((node.shape[0], self.max_depth), PLACEHOLDER_TOKEN_ID)
        for _ in range(self.max_depth):  # each node is put in front of what is there
            inside = (node > 0)[:, None]
            out = torch.where(inside, torch.cat([node[:, None], out[:, :-1]], 1), out)
            node = torch.where(node > 0, at(self.parents, node), node)
        return out, (out >= 0).sum(-1)


@dataclass
class Outcome:
    """Where each sequence's walk ended ``[batch]``."""

    node: Tensor  # the last accepted node
    weights: Tensor  # [batch, vocab]: what the final token is drawn from
    certain: Tensor  # bool: all of it is on `argmax`
    argmax: Tensor
    read: Tensor  # [batch, num_nodes] bool: target rows whose flags count
    status: Tensor  # flags of the draft's rows and of skipped children
    coins: Tensor  # [batch, num_nodes] bool: uniforms that were looked at


def verify_tree(
    target_logits: Tensor, node_tokens: Tensor, parents: Tensor, first_child: Tensor, next_sibling: Tensor,
    tree_status: Tensor, max_depth: int, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    eos_token_ids: Tensor | None, acceptance: int, epsilon: float, delta: float,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """tokens ``[batch, max_depth + 1]``, num_accepted, num_tokens, status ``[batch]``, accepted_nodes ``[batch,
    max_depth]``.
    """
    batch, num_nodes, vocab = target_logits.shape
    target_params = make_params(batch, target_logits, *params[:9])  # type: ignore[arg-type]
    draft_params = make_params(batch, target_logits, *params[9:])  # type: ignore[arg-type]
    if acceptance == GREEDY:
        target_params.temperature = torch.zeros_like(target_params.temperature)
    shape = (batch, num_nodes)
    tree, status = make_tree(
        node_tokens, parents.expand(shape), first_child.expand(shape), next_sibling.expand(shape), eos_token_ids,
        max_depth, vocab,
    )  # fmt: skip
    idle = node_tokens[:, 0] == PLACEHOLDER_TOKEN_ID
    target = make_law(target_logits, target_params)
    draft = make_draft(
        draft_logits, draft_probs, draft_values, draft_argmax, draft_status, draft_params, target_to_draft, vocab
    )
    uniforms, bad_uniform = torch.zeros(shape, device=target_logits.device), torch.zeros_like(tree.usable)
    if uniform_samples is not None:
        bad_uniform = ~((uniform_samples >= 0) & (uniform_samples < 1))
        uniforms = uniform_samples.masked_fill(bad_uniform, 0.0)

    if acceptance in (SAMPLE, GREEDY, MATCH):
        if acceptance == SAMPLE:
            weights, certain = target.probs, target.one_hot
            if law:
                assert draft.probs is not None
                mixture = make_mixture(
                    law, law_variant, law_alpha, law_beta, target_logits, draft_logits, target, draft.probs,
                    target_to_draft,
                )  # fmt: skip
                assert mixture.kept is not None
                pi = mixture.scale[..., None] * target.probs + torch.where(mixture.kept, draft.probs, 0.0)
                mixed = torch.ones_like(certain) if cascade_bonus else has_children(tree)
                weights, certain = torch.where(mixed[..., None], pi, weights), certain & ~mixed
                draft.status = torch.where(mixed, draft.status, 0)
            wanted = draw(weights.flatten(0, 1), uniforms.flatten()).view(shape)
            wanted = torch.where(certain, target.argmax, wanted)
        else:
            wanted = target.argmax if noise_keys is None else perturbed(target, noise_keys, None).argmax(-1)
            certain = torch.ones_like(target.one_hot)
        out = walk_to(tree, wanted, target)
        out.coins = out.read & ~certain
        out.status = any_flag(draft.status.expand(shape), out.read) if law else torch.zeros_like(status)
    elif acceptance == TYPICAL:
        out = typical(tree, target, target_logits, target_params, epsilon, delta)
    else:
        assert draft.probs is not None
        rule = recursive if acceptance == RECURSIVE else traversal
        out = rule(tree, target, draft.probs, draft.status, uniforms)

    ended = at(tree.is_eos, out.node) & (out.node > 0)
    if acceptance in (TYPICAL, RECURSIVE, TRAVERSAL):
        drawn = draw(out.weights, uniforms[:, 0])
        out.argmax = torch.where(out.certain, out.argmax, drawn)
        out.coins[:, 0] |= ~out.certain & ~ended
    nodes, accepted = tree.path(out.node)
    accepted, nodes = torch.where(idle, 0, accepted), torch.where(idle[:, None], -1, nodes)
    num_tokens = torch.where(idle, 0, accepted + (~ended).int())
    tokens = torch.nn.functional.pad(tree.tokens.gather(1, nodes.clamp_min(0)), (0, 1))
    slots = slots_upto(max_depth + 1, tokens)
    tokens = torch.where(slots == accepted[:, None], out.argmax[:, None], tokens)
    tokens = torch.where(slots < num_tokens[:, None], tokens, PLACEHOLDER_TOKEN_ID)
    flags = any_flag(target.status, out.read) | any_flag(bad_uniform * int(Status.BAD_PARAM), out.coins) | out.status
    status = tree_status | torch.where(idle, 0, status | flags | target_params.status)
    int32 = torch.int32
    return tokens, accepted.to(int32), num_tokens.to(int32), status.to(int32), nodes


def make_tree(
    tokens: Tensor, parents: Tensor, first_child: Tensor, next_sibling: Tensor, eos_token_ids: Tensor | None,
    max_depth: int, vocab: int,
) -> tuple[Tree, Tensor]:  # fmt: skip
    """The trees, and flags of tokens that are none. A link that is none of the tree counts as −1."""
    tokens, num_nodes = tokens.to(torch.int64), tokens.shape[1]
    nodes = slots_upto(num_nodes, tokens)
    parents = torch.where((parents >= 0) & (parents < nodes), parents, -1)

    def to_child_of(above: Tensor, links: Tensor) -> Tensor:
        inside = links.clamp(0, num_nodes - 1)
        return torch.where((links == inside) & (links > nodes) & (parents.gather(1, inside) == above), links, -1)

    first_child, next_sibling = to_child_of(nodes, first_child), to_child_of(parents, next_sibling)
    usable = (tokens >= 0) & (tokens < vocab) & (parents >= 0)
    bad = (parents >= 0) & ~usable & (tokens != PLACEHOLDER_TOKEN_ID)
    is_eos = torch.zeros_like(usable)
    if eos_token_ids is not None:
        is_eos = (tokens[..., None] == eos_token_ids).any(-1) & usable
    under_eos = is_eos.gather(1, parents.clamp_min(0)) & (parents >= 0)
    tree = Tree(
        tokens.clamp(0, vocab - 1), usable & ~under_eos, torch.where(under_eos, -1, parents),
        torch.where(is_eos, -1, first_child), next_sibling, is_eos, max_depth,
    )  # fmt: skip
    return tree, torch.where(bad.any(-1), int(Status.BAD_TOKEN), 0)


def has_children(tree: Tree) -> Tensor:
    """Whether a node has a child that can be accepted ``[batch, num_nodes]``."""
    num_nodes = tree.tokens.shape[1]
    above = torch.where(tree.usable, tree.parents, num_nodes)
    seen = torch.zeros(tree.tokens.shape[0], num_nodes + 1, dtype=torch.bool, device=above.device)
    return seen.scatter(1, above, True)[:, :-1]


def walk_to(tree: Tree, wanted: Tensor, target: Law) -> Outcome:
    """From the root down while the token `wanted` at a node is a child's (the deterministic-children rule)."""
    node = torch.zeros_like(wanted[:, 0])
    read = torch.zeros_like(tree.usable)
    read[:, 0] = True
    for _ in range(tree.max_depth):
        child = tree.child_with(node, at(wanted, node))
        node = torch.where(child >= 0, child, node)
        read = read.scatter(1, node[:, None], True)
    read &= ~(tree.is_eos & tree.usable)  # nothing is asked of an accepted EOS
    final = at(wanted, node)
    return Outcome(node, final, torch.ones_like(read[:, 0]), final, read, torch.zeros_like(node), read)


def typical(tree: Tree, target: Law, logits: Tensor, params: Params, epsilon: float, delta: float) -> Outcome:
    """x is accepted iff ``p(x) > min(ε, δ exp(−H(p)))``, p at the sampling temperature with nothing cut; the longest
    accepted path wins, of equal ones the likelier.
    """
    tempered = make_law(logits, untruncated(params))
    spread = torch.where(tempered.probs > 0, tempered.probs * tempered.scores, 0.0)
    entropy = torch.where(tempered.one_hot, 0.0, tempered.values[..., 3].log() - tile_sum(spread))
    threshold = (delta * (-entropy).exp()).clamp_max(epsilon)
    above = tree.parents.clamp_min(0)
    rows = tempered.probs.gather(1, above[..., None].expand(-1, -1, logits.shape[-1]))
    p = rows.gather(-1, tree.tokens[..., None])[..., 0]
    passes = tree.usable & (p > threshold.gather(1, above))
    depth = torch.where(slots_upto(p.shape[1], p) == 0, 0, -1).expand(p.shape)
    likelihood = torch.zeros_like(p)
    for d in range(1, tree.max_depth + 1):
        reached = passes & (depth.gather(1, above) == d - 1)
        depth = torch.where(reached, d, depth)
        likelihood = torch.where(reached, likelihood.gather(1, above) + p.log(), likelihood)
    longest = depth == depth.amax(-1, keepdim=True)
    score = torch.where(longest, likelihood, -torch.inf)
    node = (score == score.amax(-1, keepdim=True)).int().argmax(-1)
    read = (depth >= 0) & has_children(tree)
    ended = at(tree.is_eos, node) & (node > 0)
    read = torch.where(ended[:, None], read, read.scatter(1, node[:, None], True))
    none = torch.zeros_like(node)
    return Outcome(
        node,
        at(target.probs, node),
        at(target.one_hot, node),
        at(target.argmax, node),
        read,
        none,
        torch.zeros_like(read),
    )


def untruncated(params: Params) -> Params:
    """The same temperatures with nothing cut."""
    zero = torch.zeros_like
    return replace(params, top_k=zero(params.top_k), top_p=torch.ones_like(params.top_p), min_p=zero(params.min_p))


def remove(Q: Tensor, token: Tensor) -> Tensor:
    """`Q` ``[batch, vocab]`` without a token, renormalised unless nothing is left."""
    Q = Q.scatter(1, token[:, None], 0.0)
    total = tile_sum(Q)[:, None]
    return torch.where(total > 0, Q / total, Q)


def rejected(P: Tensor, Q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What a rejected child leaves of P ``[batch, vocab]``: norm((w P − Q)+), or P if that is empty; and the sum of it
    before, ``[batch]``.
    """
    left = (w[:, None] * P - Q).clamp_min(0.0)
    rest = tile_sum(left)
    return torch.where(rest[:, None] > 0, left / rest[:, None].clamp_min(torch.finfo(P.dtype).tiny), P), rest


def child_weight(w: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """What a child of a node of weight w is entered with: min(1, w p / q)."""
    return torch.where(p > 0, w * p / q.clamp_min(torch.finfo(q.dtype).tiny), 0.0).clamp_max(1.0)


def weight_left(w: Tensor, rest: Tensor) -> Tensor:
    """What a node's weight becomes when a child is rejected: R / (R + 1 − w)."""
    smaller = rest + 1 - w
    return torch.where(smaller > 0, rest / smaller, 1.0)


def recursive(tree: Tree, target: Law, draft: Tensor, draft_status: Tensor, uniforms: Tensor) -> Outcome:
    """Children drawn without replacement are tried in order: accept with min(1, P/Q), else P becomes norm((P − Q)+) and
    the child leaves Q.
    """
    batch, num_nodes = tree.tokens.shape
    node, child = torch.zeros_like(tree.tokens[:, 0]), tree.first_child[:, 0]
    P, Q = target.probs[:, 0], draft[:, 0]
    certain, skipped = target.one_hot[:, 0], torch.zeros_like(node)
    read, coins = torch.zeros_like(tree.usable), torch.zeros_like(tree.usable)
    read[:, 0] = True
    read_draft = torch.zeros_like(read)
    for _ in range(num_nodes - 1):
        here = child.clamp_min(0)
        tried = (child >= 0) & at(tree.usable, here)
        token = at(tree.tokens, here)
        p, q = (rows.gather(1, token[:, None])[:, 0] for rows in (P, Q))
        read_draft = read_draft | torch.zeros_like(read).scatter(1, node[:, None], tried[:, None])
        skipped = skipped | torch.where(tried & (q <= 0), int(Status.BAD_TOKEN), 0)
        tried &= q > 0
        coins = coins | torch.zeros_like(coins).scatter(1, here[:, None], tried[:, None])
        accept = tried & (at(uniforms, here) * q < p)
        reject = tried & ~accept
        new_P, rest = rejected(P, Q, torch.ones_like(p))
        P = torch.where(reject[:, None], new_P, P)
        certain = certain & ~(reject & (rest > 0))
        Q = torch.where(reject[:, None], remove(Q, token), Q)
        node = torch.where(accept, here, node)
        P = torch.where(accept[:, None], at(target.probs, here), P)
        Q = torch.where(accept[:, None], at(draft, here), Q)
        certain = torch.where(accept, at(target.one_hot, here), certain)
        ended = accept & at(tree.is_eos, here)
        read = read | torch.zeros_like(read).scatter(1, here[:, None], (accept & ~ended)[:, None])
        child = torch.where(accept, at(tree.first_child, here), at(tree.next_sibling, here))
    status = skipped | any_flag(draft_status, read_draft)
    return Outcome(node, P, certain, at(target.argmax, node), read, status, coins)


def traversal(tree: Tree, target: Law, draft: Tensor, draft_status: Tensor, uniforms: Tensor) -> Outcome:
    """Block verification on a tree, from the leaves up: a child's weight is min(1, w P / Q); a node whose children are
    all rejected is accepted with what its weight has become; a rejected child c turns P into norm((w P − Q)+), w into
    R / (R + 1 − w) with R the sum of those, and leaves Q.
    """
    batch, num_nodes = tree.tokens.shape
    levels = tree.max_depth + 1
    sequence = torch.arange(batch, device=tree.tokens.device)
    depth = torch.zeros_like(sequence)  # of the node in hand
    node = depth.new_zeros(batch, levels)  # on the path to it
    P, Q = target.probs[:, :1].repeat(1, levels, 1), draft[:, :1].repeat(1, levels, 1)  # as they have become there
    w = torch.ones_like(P[..., 0])
    certain = target.one_hot[:, :1].repeat(1, levels)
    child, walking, skipped = tree.first_child[:, 0], torch.ones_like(depth, dtype=torch.bool), torch.zeros_like(depth)
    coins, read_draft = torch.zeros_like(tree.usable), torch.zeros_like(tree.usable)
    for _ in range(2 * num_nodes):  # each node is entered once and left once
        here = child.clamp_min(0)
        token = at(tree.tokens, here)
        p, q = (rows[sequence, depth].gather(1, token[:, None])[:, 0] for rows in (P, Q))
        tried = walking & (child >= 0) & at(tree.usable, here)
        read_draft = read_draft | torch.zeros_like(coins).scatter(1, at(node, depth)[:, None], tried[:, None])
        skipped = skipped | torch.where(tried & (q <= 0), int(Status.BAD_TOKEN), 0)
        enter = tried & (q > 0)
        skip = walking & (child >= 0) & ~enter
        weight = child_weight(at(w, depth), p, q)
        below = (depth + 1).clamp_max(levels - 1)

        # no child is left: the node in hand is accepted, or its parent takes its loss
        leave = walking & (child < 0)
        current = at(node, depth)
        accept = leave & ((current == 0) | (at(uniforms, current) < at(w, depth)))
        coins = coins | torch.zeros_like(coins).scatter(1, current[:, None], (leave & (current > 0))[:, None])
        up = leave & ~accept
        above = (depth - 1).clamp_min(0)
        upper_P, upper_Q, upper_w = P[sequence, above], Q[sequence, above], at(w, above)
        new_P, rest = rejected(upper_P, upper_Q, upper_w)
        P[sequence, above] = torch.where(up[:, None], new_P, upper_P)
        Q[sequence, above] = torch.where(up[:, None], remove(upper_Q, at(tree.tokens, current)), upper_Q)
        w[sequence, above] = torch.where(up, weight_left(upper_w, rest), upper_w)
        certain[sequence, above] &= ~(up & (rest > 0))

        P[sequence, below] = torch.where(enter[:, None], at(target.probs, here), P[sequence, below])
        Q[sequence, below] = torch.where(enter[:, None], at(draft, here), Q[sequence, below])
        w[sequence, below] = torch.where(enter, weight, at(w, below))
        certain[sequence, below] = torch.where(enter, at(target.one_hot, here), at(certain, below))
        node[sequence, below] = torch.where(enter, here, at(node, below))
        walking = walking & ~accept
        following = torch.where(up, at(tree.next_sibling, current), at(tree.next_sibling, here))
        child = torch.where(enter, at(tree.first_child, here), torch.where(up | skip, following, child))
        depth = torch.where(enter, below, torch.where(up, above, depth))
    last = at(node, depth)
    drawn = ~(at(tree.is_eos, last) & (last > 0))
    read = read_draft | torch.zeros_like(read_draft).scatter(1, last[:, None], drawn[:, None])
    status = skipped | any_flag(draft_status, read_draft)
    return Outcome(last, P[sequence, depth], at(certain, depth), at(target.argmax, last), read, status, coins)
