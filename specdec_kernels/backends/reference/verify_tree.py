"""Reference of `verify_tree`: every rule for all sequences of the batch at once, one node of each at a time.

Sources: Miao et al. 2024 (arXiv 2305.09781) and Chen et al. 2024 (arXiv 2402.12374) for sampled children, Weng et al.
2025 (arXiv 2505.12398) for traversal, Cai et al. 2024 (arXiv 2401.10774) for typical acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.arguments import TREE_ACCEPTANCES, VerifyArguments, VerifyTreeArguments
from ...types import PLACEHOLDER_TOKEN_ID, Status
from .coins import with_numbers
from .draft import can_give, draft_probs
from .law import (
    Params,
    Remainder,
    accept_token,
    block_threshold,
    make_law,
    make_params,
    next_block_weight,
    remainder,
    rows_of_target,
    tile_sum,
    untruncated,
)  # fmt: skip
from .processors import processed
from .reads import Reads, clean_uniforms, flags_of
from .rows import at, laid_out, slots_upto, with_rows
from .sample import perturbed
from .target_law import make_mixtures

SAMPLE, GREEDY, MATCH, TYPICAL, RECURSIVE, TRAVERSAL = TREE_ACCEPTANCES.values()


def verify_tree(args: VerifyTreeArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens ``[batch, max_depth + 1]``, num_accepted, num_tokens, status ``[batch]``, accepted_nodes ``[batch,
    max_depth]``.
    """
    step = prepared(args)
    return finished(step, decide(step))


def prepared(args: VerifyTreeArguments) -> Step:
    """What the rules look at: random numbers are made and logits processed."""
    args = args._replace(shared=with_numbers(args.shared, args.node_tokens.shape[1]))
    tree = make_tree(args)
    logits, flags = processed(args.shared.target_logits, args.shared.processors, tree.draft_before())
    args = args._replace(shared=args.shared._replace(target_logits=logits, processors=None))
    return make_step(args, tree, flags)


def decide(step: Step) -> Walk:
    """Where the rule ends."""
    rules = {TYPICAL: typical, RECURSIVE: recursive, TRAVERSAL: traversal}
    return rules.get(step.args.acceptance, walk_down)(step)


def finished(step: Step, walk: Walk) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the op gives."""
    args, tree = step.args, step.tree
    nodes, accepted = tree.path(walk.node)
    accepted, nodes = torch.where(step.idle, 0, accepted), torch.where(step.idle[:, None], -1, nodes)
    num_tokens = accepted + (~step.idle & ~tree.ends(walk.node)).int()
    tokens = laid_out(tree.tokens.gather(1, nodes.clamp_min(0)), accepted, walk.final, num_tokens)
    flags = flags_of(what_was_read(step, walk), args.shared, step.params, step.draft_params)
    flags = flags | torch.where(tree.bad, int(Status.BAD_TOKEN), 0)
    flags = flags | torch.where(walk.skipped.any(-1), int(Status.BAD_DRAFT), 0)
    status = args.tree_status | torch.where(step.idle, 0, flags)
    int32 = torch.int32
    return tokens, accepted.to(int32), num_tokens.to(int32), status.to(int32), nodes


# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass
class Tree:
    """The trees of a batch ``[batch, num_nodes]`` as the rules see them: nothing hangs from an EOS."""

    tokens: Tensor  # clamped into the vocabulary
    usable: Tensor  # bool
    parents: Tensor  # −1: not in the tree
    first_child: Tensor
    next_sibling: Tensor
    is_eos: Tensor
    bad: Tensor  # [batch] bool: some token is no id
    max_depth: int

    def child_with(self, node: Tensor, token: Tensor) -> Tensor:
        """The first child of each sequence's `node` that is this token, or −1."""
        nodes = slots_upto(self.tokens.shape[1], self.tokens)
        is_it = (self.parents == node[:, None]) & self.usable & (self.tokens == token[:, None])
        found = torch.where(is_it, nodes, nodes.numel()).amin(-1)
        return torch.where(found < nodes.numel(), found, -1)

    def first_below(self, node: Tensor, depth: Tensor) -> Tensor:
        """The first child of each sequence's `node`, which is of such a depth ``[batch]``, or −1: a tree that is deeper
        than it says ends there.
        """
        return torch.where(depth < self.max_depth, at(self.first_child, node), -1)

    def parents_of(self, some: Tensor) -> Tensor:
        """Which nodes have one of `some` ``[batch, num_nodes]`` as a child."""
        num_nodes = self.tokens.shape[1]
        above = torch.where(some & (self.parents >= 0), self.parents, num_nodes)
        return torch.nn.functional.pad(torch.zeros_like(some), (0, 1)).scatter(1, above, True)[:, :-1]

    def path(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes ``[batch, max_depth]`` from below the root down to `node`, then −1; and how many."""
        out = node.new_full((node.shape[0], self.max_depth), PLACEHOLDER_TOKEN_ID)
        for _ in range(self.max_depth):  # each node is put in front of what is there
            inside = (node > 0)[:, None]
            out = torch.where(inside, torch.cat([node[:, None], out[:, :-1]], 1), out)
            node = torch.where(node > 0, at(self.parents, node), node)
        return out, (out >= 0).sum(-1)

    def draft_before(self) -> Tensor:
        """The draft tokens before the row of each node ``[batch, num_nodes, max_depth]``, its own the first, then −1:
        not the root's.
        """
        node, out = slots_upto(self.tokens.shape[1], self.tokens).expand(self.tokens.shape), []
        for _ in range(self.max_depth):
            out.append(torch.where(node > 0, self.tokens.gather(1, node), PLACEHOLDER_TOKEN_ID))
            node = torch.where(node > 0, self.parents.gather(1, node), node).clamp_min(0)
        return torch.stack(out, -1) if out else self.tokens.new_empty(*self.tokens.shape, 0)

    def of_parents(self, values: Tensor) -> Tensor:
        """For each node, the value of its parent; `values` are those of all nodes ``[batch, num_nodes]``."""
        return values.gather(1, self.parents.clamp_min(0))

    def of_nodes(self, probs: Tensor) -> Tensor:
        """The probability ``[batch, num_nodes]`` that each node's token has at its parent, of ``[batch, num_nodes,
        vocab]``.
        """
        return probs[slots_upto(len(probs), probs)[:, None], self.parents.clamp_min(0), self.tokens]

    def reached(self, passes: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """The depth of each node ``[batch, num_nodes]`` that is accepted with all above it, −1 of the others, and the
        logarithm of the product of p on its path.
        """
        depth = torch.where(slots_upto(p.shape[1], p) == 0, 0, -1).expand(p.shape)
        likelihood = torch.zeros_like(p)
        for d in range(1, self.max_depth + 1):
            here = self.usable & passes & (self.of_parents(depth) == d - 1)
            depth = torch.where(here, d, depth)
            likelihood = torch.where(here, self.of_parents(likelihood) + p.log(), likelihood)
        return depth, likelihood

    def ends(self, node: Tensor) -> Tensor:
        """Whether nothing is drawn after `node`: an EOS."""
        return at(self.is_eos, node) & (node > 0)


def make_tree(args: VerifyTreeArguments) -> Tree:
    """A link that is not one of the tree counts as −1."""
    vocab, tokens = args.shared.target_logits.shape[-1], args.node_tokens.to(torch.int64)
    num_nodes = tokens.shape[1]
    nodes = slots_upto(num_nodes, tokens)
    parents, first_child, next_sibling = (links.expand(tokens.shape) for links in args.links)
    parents = torch.where((parents >= 0) & (parents < nodes), parents, -1)

    def to_child_of(above: Tensor, links: Tensor) -> Tensor:
        inside = links.clamp(0, num_nodes - 1)
        return torch.where((links == inside) & (links > nodes) & (parents.gather(1, inside) == above), links, -1)

    first_child, next_sibling = to_child_of(nodes, first_child), to_child_of(parents, next_sibling)
    usable = (tokens >= 0) & (tokens < vocab) & (parents >= 0)
    bad = (parents >= 0) & ~usable & (tokens != PLACEHOLDER_TOKEN_ID)
    is_eos = torch.zeros_like(usable)
    if args.shared.eos_token_ids is not None:
        is_eos = (tokens[..., None] == args.shared.eos_token_ids).any(-1) & usable
    under_eos = is_eos.gather(1, parents.clamp_min(0)) & (parents >= 0)
    return Tree(
        tokens.clamp(0, vocab - 1), usable & ~under_eos, torch.where(under_eos, -1, parents),
        torch.where(is_eos, -1, first_child), next_sibling, is_eos, bad.any(-1), args.max_depth,
    )  # fmt: skip


@dataclass
class Step:
    """What the rules look at."""

    args: VerifyTreeArguments
    tree: Tree
    idle: Tensor  # [batch] bool
    params: Params
    draft_params: Params
    uniforms: Tensor  # [batch, num_nodes]
    mixed: Tensor  # [batch, num_nodes] bool: where a cascade's π has the place of P


def make_step(args: VerifyTreeArguments, tree: Tree, flags: Tensor | int) -> Step:
    shared = args.shared
    batch = shared.target_logits.shape[0]
    params = make_params(batch, shared.target_logits, shared.params, flags, rows_of_target(shared))
    if args.acceptance == GREEDY:
        params.temperature = torch.zeros_like(params.temperature)
    draft_params = make_params(batch, shared.target_logits, shared.draft_params)
    uniforms = torch.zeros(args.node_tokens.shape, device=args.node_tokens.device)
    if shared.uniform_samples is not None:
        uniforms = clean_uniforms(shared.uniform_samples)
    idle = args.node_tokens[:, 0] == PLACEHOLDER_TOKEN_ID
    mixed = (tree.parents_of(tree.usable) | shared.law.cascade_bonus) & (shared.law.number != 0)
    return Step(args, tree, idle, params, draft_params, uniforms, mixed)


def rows_at(step: Step, node: Tensor) -> VerifyArguments:
    """The arguments for one node of each sequence ``[batch]``: rows ``[batch, 1, …]``."""

    def only(rows: Tensor) -> Tensor:
        return at(rows, node)[:, None]

    return with_rows(step.args.shared, only, only)


# --- the rules --------------------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """Where a rule ended, and what it tried on the way."""

    node: Tensor  # [batch]: the last accepted node
    final: Tensor  # [batch]: the token after it
    tried: Tensor  # [batch, num_nodes] bool: children that their parent's law was asked about
    skipped: Tensor  # [batch, num_nodes] bool: of these, those that the draft cannot have drawn
    certain: Tensor  # [batch, num_nodes] bool: where a token was drawn, whether without a uniform


def walk_down(step: Step) -> Walk:
    """From the root down while the token that plain decoding takes after a node is a child's: that of P's argmax, drawn
    with the node's noise, or drawn with its uniform (from π where that has P's place).
    """
    tree = step.tree
    tried, certain = torch.zeros_like(tree.usable), torch.zeros_like(tree.usable)
    node = torch.zeros_like(tree.tokens[:, 0])
    for depth in range(tree.max_depth + 1):
        rest = remainder_at(step, node)
        final, certain = rest.draw(at(step.uniforms, node)), certain | mark(node, rest.certain, certain)
        child = tree.child_with(node, final)
        found = (child >= 0) & (depth < tree.max_depth)
        node = torch.where(found, child, node)
        tried = tried | mark(node, found, tried)
    return Walk(node, final, tried, torch.zeros_like(tried), certain)


def remainder_at(step: Step, node: Tensor) -> Remainder:
    """What plain decoding draws the token after a node of each sequence ``[batch]`` from."""
    args, here = step.args, rows_at(step, node)
    law = make_law(here.target_logits, step.params)
    P = law.at(torch.zeros_like(node))
    if args.acceptance in (GREEDY, MATCH):
        wanted = P.argmax
        if here.noise_keys is not None:
            wanted = perturbed(law, here.noise_keys, None)[:, 0].argmax(-1)
        return Remainder(P.weights, torch.ones_like(P.certain), wanted)
    if not here.law.number:
        return P
    Q, mixed = draft_probs(here, step.draft_params), at(step.mixed, node)
    pi = make_mixtures(here, law.probs, Q).probs(law.probs, Q)[:, 0]
    weights = torch.where((mixed & (tile_sum(pi) > 0))[:, None], pi, P.weights)  # 0 where Q is
    return Remainder(weights, P.certain & ~mixed, P.argmax)


def typical(step: Step) -> Walk:
    """x is accepted iff ``p(x) > min(ε, δ exp(−H(p)))``, p at the sampling temperature with nothing cut; the longest
    accepted path wins, of equal ones the likelier.
    """
    tree = step.tree
    tempered = make_law(step.args.shared.target_logits, untruncated(step.params))
    spread = torch.where(tempered.probs > 0, tempered.probs * tempered.scores, 0.0)
    entropy = torch.where(tempered.one_hot, 0.0, tempered.normalizer.log() - tile_sum(spread))
    p = tree.of_nodes(tempered.probs)
    depth, likelihood = tree.reached(p > tree.of_parents(typical_from(step, entropy)), p)
    node = likeliest(depth, likelihood)
    tried = tree.usable & (tree.of_parents(depth) >= 0)
    here = make_law(rows_at(step, node).target_logits, step.params)
    return ended(step, node, here.at(torch.zeros_like(node)), tried, torch.zeros_like(tried))


def typical_from(step: Step, entropy: Tensor) -> Tensor:
    """The probability that a child must exceed, ``[batch, num_nodes]``."""
    return (step.args.delta * (-entropy).exp()).clamp_max(step.args.epsilon)


def likeliest(depth: Tensor, likelihood: Tensor) -> Tensor:
    """Of the nodes that are deepest, the first that is likeliest ``[batch]``."""
    score = torch.where(depth == depth.amax(-1, keepdim=True), likelihood, -torch.inf)
    return (score == score.amax(-1, keepdim=True)).int().argmax(-1)


def ended(step: Step, node: Tensor, rest: Remainder, tried: Tensor, skipped: Tensor) -> Walk:
    """At a node after which the final token is drawn with the uniform of column 0."""
    certain = mark(torch.zeros_like(node), rest.certain, tried)
    return Walk(node, rest.draw(step.uniforms[:, 0]), tried, skipped, certain)


def recursive(step: Step, left: Siblings | None = None) -> Walk:
    """Children drawn without replacement are tried in order: accept x iff ``u Q(x) < P(x)``, else P becomes ``norm((P −
    Q)+)`` and x leaves Q.
    """
    tree, left = step.tree, left or make_siblings(step)
    node = depth = torch.zeros_like(tree.tokens[:, 0])
    child = tree.first_below(node, depth)
    tried, skipped = torch.zeros_like(tree.usable), torch.zeros_like(tree.usable)
    for _ in range(tree.tokens.shape[1] - 1):
        here = child.clamp_min(0)
        asked = (child >= 0) & at(tree.usable, here)
        given = left.given(node, here, asked)
        tried, skipped = tried | mark(here, asked, tried), skipped | mark(here, asked & ~given, skipped)
        accept = left.accepts(node, here, given)
        left.reject(node, here, given & ~accept)
        node, depth = torch.where(accept, here, node), depth + accept
        child = torch.where(accept, tree.first_below(here, depth), at(tree.next_sibling, here))
    return ended(step, node, left.at(node), tried, skipped)


def traversal(step: Step, left: Siblings | None = None) -> Walk:
    """Block verification on a tree, from the leaves up. A child is entered with weight ``min(1, w P(x) / Q(x))``; once
    its own children are rejected it is accepted iff ``u < w``, with what its weight has become. A rejected child turns
    its parent's P into ``norm((w P − Q)+)`` and w into ``R / (R + 1 − w)``, R the sum of those, and leaves Q.
    """
    tree, left = step.tree, left or make_siblings(step)
    node = depth = torch.zeros_like(tree.tokens[:, 0])
    child = tree.first_below(node, depth)
    walking = torch.ones_like(node, dtype=torch.bool)
    tried, skipped = torch.zeros_like(tree.usable), torch.zeros_like(tree.usable)
    for _ in range(2 * tree.tokens.shape[1]):  # each node is entered once and left once
        here = child.clamp_min(0)
        there = walking & (child >= 0)
        asked = there & at(tree.usable, here)
        enter = left.given(node, here, asked)
        tried, skipped = tried | mark(here, asked, tried), skipped | mark(here, asked & ~enter, skipped)
        left.enter(node, here, enter)

        # no child is left: the node in hand is accepted, or its parent takes its loss
        leave = walking & (child < 0)
        accept = left.keeps(node, leave)
        up = leave & ~accept
        above = torch.where(up, at(tree.parents, node), node)
        left.lose(above, node, up)
        depth = depth + enter.int() - up.int()
        following = torch.where(up, at(tree.next_sibling, node), at(tree.next_sibling, here))
        child = torch.where(enter, tree.first_below(here, depth), torch.where(up | there, following, child))
        node = torch.where(enter, here, above)
        walking = walking & ~accept
    return ended(step, node, left.at(node), tried, skipped)


@dataclass
class Siblings:
    """P, Q and the weight w of every node as its rejected children have left them.

    A method takes nodes and children ``[batch]``, in the sequences `where` ``[batch]``.
    """

    step: Step
    P: Tensor  # [batch, num_nodes, vocab]
    Q: Tensor  # [batch, num_nodes, vocab]
    weight: Tensor  # [batch, num_nodes]
    certain: Tensor  # [batch, num_nodes] bool: P is all on `argmax`
    argmax: Tensor

    def probs(self, node: Tensor, child: Tensor) -> tuple[Tensor, Tensor]:
        """P and Q of a child's token."""
        sequence, token = slots_upto(node.shape[0], node), at(self.step.tree.tokens, child)
        return self.P[sequence, node, token], self.Q[sequence, node, token]

    def given(self, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
        """Whether the draft can have drawn a child."""
        return where & can_give(self.probs(node, child)[1])

    def accepts(self, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
        """Whether the coin of a child of `node` accepts it ("recursive")."""
        p, q = self.probs(node, child)
        return where & accept_token(at(self.step.uniforms, child), p, q)

    def enter(self, node: Tensor, child: Tensor, where: Tensor) -> None:
        """Gives a child its weight."""
        w = next_block_weight(at(self.weight, node), *self.probs(node, child))
        self.weight = torch.where(mark(child, where, self.certain), w[:, None], self.weight)

    def keeps(self, node: Tensor, where: Tensor) -> Tensor:
        """Whether a node's coin accepts it once its children are rejected ("traversal"); the root needs none."""
        return where & ((node == 0) | (at(self.step.uniforms, node) < at(self.weight, node)))

    def lose(self, node: Tensor, child: Tensor, where: Tensor) -> None:
        """`reject`, which also changes the node's weight."""
        w = block_threshold(at(self.weight, node), self.reject(node, child, where))
        self.weight = torch.where(mark(node, where, self.certain), w[:, None], self.weight)

    def reject(self, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
        """Takes a child's token from P and Q of its parent `node`; R ``[batch]``."""
        sequence, token = slots_upto(node.shape[0], node), at(self.step.tree.tokens, child)
        P, Q = at(self.P, node), at(self.Q, node)
        left, rest = rejected(P, Q, at(self.weight, node))
        self.P[sequence, node] = torch.where(where[:, None], left, P)
        self.Q[sequence, node] = torch.where(where[:, None], remove(Q, token), Q)
        self.certain = self.certain & ~mark(node, where & (rest > 0), self.certain)
        return rest

    def at(self, node: Tensor) -> Remainder:
        """What the token after a node is drawn from, once all its children are rejected."""
        return Remainder(at(self.P, node), at(self.certain, node), at(self.argmax, node))


def make_siblings(step: Step) -> Siblings:
    shared = step.args.shared
    target, Q = make_law(shared.target_logits, step.params), draft_probs(shared, step.draft_params)
    return Siblings(step, target.probs, Q.clone(), torch.ones_like(target.maximum), target.one_hot, target.argmax)


def rejected(P: Tensor, Q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What a rejected child leaves of P ``[batch, vocab]``: norm((w P − Q)+), or P if that is empty; and R ``[batch]``,
    the sum of it before.
    """
    left = remainder(P, Q, w)
    rest = tile_sum(left)
    return torch.where(rest[:, None] > 0, left / rest[:, None].clamp_min(torch.finfo(P.dtype).tiny), P), rest


def remove(Q: Tensor, token: Tensor) -> Tensor:
    """`Q` ``[batch, vocab]`` without a token, renormalised unless nothing is left."""
    Q = Q.scatter(1, token[:, None], 0.0)
    total = tile_sum(Q)[:, None]
    return torch.where(total > 0, Q / total, Q)


def mark(node: Tensor, where: Tensor, like: Tensor) -> Tensor:
    """One node of each sequence `where` ``[batch]``, as ``[batch, num_nodes]`` bool."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, node[:, None], where[:, None])


# --- what was read ----------------------------------------------------------------------------------------------------


def what_was_read(step: Step, walk: Walk) -> Reads:
    """A rule reads P at nodes whose children it asked about and where the final token is drawn; Q where its law is made
    of it or children were drawn from it; and the uniforms of whatever it drew or decided by a coin.
    """
    tree, acceptance = step.tree, step.args.acceptance
    asked = tree.parents_of(walk.tried)
    last = mark(walk.node, ~tree.ends(walk.node), asked)
    target, nothing = asked | last, torch.zeros_like(asked)
    if acceptance in (GREEDY, MATCH):
        return Reads(target, nothing, nothing)
    if acceptance == SAMPLE:
        return Reads(target, target & step.mixed, target & ~walk.certain)
    final = mark(torch.zeros_like(walk.node), last.any(-1), asked) & ~walk.certain
    if acceptance == TYPICAL:
        return Reads(target, nothing, final)
    coins = walk.tried & ~walk.skipped
    if acceptance == TRAVERSAL:  # a node decides when it is left: those above the accepted one never were
        above = tree.path(at(tree.parents, walk.node).clamp_min(0))[0]
        coins = coins & ~nothing.scatter(1, above.clamp_min(0), True)
    return Reads(target, asked, coins | final)
