"""What float64 decides on trees, and how far each decision is from flipping: as `margins` for chains."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.arguments import VerifyTreeArguments
from .coins import with_numbers
from .intervals import Ends, LooseRows, entropy, left, probs, surely_drawn, unless_empty
from .law import accept_token, block_threshold, next_block_weight, untruncated
from .loose_laws import LooseStep, gives
from .margins import NO_MARGINS, Decided, drawn_from, each_alone, in_float64, largest, part_of, split
from .rows import at, slots_upto, with_rows
from .verify_tree import (
    GREEDY,
    MATCH,
    RECURSIVE,
    SAMPLE,
    TRAVERSAL,
    TYPICAL,
    Siblings,
    Step,
    Walk,
    decide,
    draft_probs,
    finished,
    likeliest,
    make_siblings,
    mark,
    prepared,
    recursive,
    rows_at,
    traversal,
    typical_from,
)  # fmt: skip


def verify_tree(args: VerifyTreeArguments) -> tuple[Tensor, ...]:
    """What the op gives, decided in float64, and margins ``[batch, max_depth + 1]`` float64."""
    args = args._replace(shared=with_numbers(args.shared, args.node_tokens.shape[1]))
    batch, nodes, vocab = args.shared.target_logits.shape
    parts = [of_trees(sequences(args, part)) for part in split(batch, nodes * vocab)]
    tokens, num_accepted, num_tokens, status, accepted_nodes, margins = map(torch.cat, zip(*parts, strict=True))
    return tokens, num_accepted, num_tokens, status, accepted_nodes, margins


def sequences(args: VerifyTreeArguments, part: slice) -> VerifyTreeArguments:
    """The step of some sequences."""
    alike = args.links.dim() == 2
    return args._replace(
        shared=part_of(args.shared, part), node_tokens=args.node_tokens[part],
        links=args.links if alike else args.links[:, part],
        tree_status=args.tree_status if alike else args.tree_status[part],
    )  # fmt: skip


def of_trees(args: VerifyTreeArguments) -> tuple[Tensor, ...]:
    step = prepared(args._replace(shared=in_float64(args.shared)))
    walk = decide(step)
    tokens, num_accepted, num_tokens, status, nodes = finished(step, walk)
    of_rules: dict[int, Callable[..., LooseTree]] = {
        **dict.fromkeys((SAMPLE, GREEDY, MATCH), LoosePath), TYPICAL: LooseTypical, RECURSIVE: LooseRecursive,
        TRAVERSAL: LooseTraversal,
    }  # fmt: skip
    if step.args.acceptance not in of_rules:
        raise NotImplementedError(NO_MARGINS)
    rule = of_rules[step.args.acceptance](step, walk, tokens, nodes)
    emitted = slots_upto(tokens.shape[1], tokens) < num_tokens[:, None]
    margins = torch.where(emitted, rule.margins(emitted), math.inf)
    return tokens, num_accepted, num_tokens, status, nodes, margins


class LooseTree(ABC):
    """A tree whose rows may be off by m, and what was decided on it."""

    def __init__(self, step: Step, walk: Walk, tokens: Tensor, nodes: Tensor) -> None:
        self.step, self.tree, self.last, self.nodes = step, step.tree, walk.node, nodes
        self.tokens, self.final = tokens, walk.final
        self.path = torch.nn.functional.pad(nodes.clamp_min(0), (1, 0))  # [batch, max_depth + 1], from the root
        self.slots = slots_upto(tokens.shape[1], tokens)
        self.accepted = (nodes >= 0).sum(-1, keepdim=True)

    @abstractmethod
    def margins(self, emitted: Tensor) -> Tensor:
        """Of the tokens that are `emitted` ``[batch, max_depth + 1]``."""

    def with_final(self, accepted: Tensor, final: Tensor) -> Tensor:
        """Of what is known of accepted tokens ``[batch, max_depth + 1]`` and of the final one ``[batch]``."""
        return torch.where(self.slots == self.accepted, final[:, None], accepted)

    def shared(self) -> Tensor:
        """How many nodes of the accepted path lead to each node ``[batch, num_nodes]``, itself among them."""
        own = torch.zeros_like(self.tree.parents)
        for depth in range(1, self.tree.max_depth + 1):
            own = torch.where(mark(self.path[:, depth], depth <= self.accepted[:, 0], own), depth, own)
        shared = own
        for _ in range(self.tree.max_depth):
            shared = own.maximum(self.tree.of_parents(shared))
        return shared


class LoosePath(LooseTree):
    """Each token is what its node's row gives, whatever hangs from it."""

    def margins(self, emitted: Tensor) -> Tensor:
        def on_path(rows: Tensor) -> Tensor:
            return rows[slots_upto(len(rows), rows)[:, None], self.path]

        step, shared = self.step, with_rows(self.step.args.shared, on_path, on_path)
        rows = LooseStep(shared, step.params, step.draft_params, None)

        def decided(j: int) -> Decided:
            row, token, keys = rows.targets[j], self.tokens[:, [j]].clamp_min(0), shared.noise_keys
            uniforms, mixed = on_path(step.uniforms)[:, j], on_path(step.mixed)[:, j]
            if step.args.acceptance != SAMPLE:
                return drawn_from(row, token, None, None if keys is None else keys[:, j], row.ids)
            if not shared.law.number:
                return drawn_from(row, token, uniforms, None, row.ids)

            def from_pi(m: Tensor) -> Tensor:
                laws = rows.at(j, m)
                return surely_drawn(unless_empty(mixed, laws.pi(), laws.weights), uniforms, token[:, 0])[:, None]

            return from_pi

        return each_alone(decided, emitted)


class LooseWhole(LooseTree):
    """Whether a token stays depends on nodes outside its path."""

    def margins(self, emitted: Tensor) -> Tensor:
        return largest(lambda m: self.surely(m) | ~emitted, self.tokens.double())

    @abstractmethod
    def surely(self, m: Tensor) -> Tensor:
        """Which tokens surely stay ``[batch, max_depth + 1]``."""


class LooseTypical(LooseWhole):
    """Any node may win that no other one surely beats."""

    def __init__(self, *decided: Any) -> None:
        super().__init__(*decided)
        plain = untruncated(self.step.params)
        self.rows = [LooseRows(rows, plain) for rows in self.step.args.shared.target_logits.unbind(1)]
        self.last_row = LooseRows(rows_at(self.step, self.last).target_logits[:, 0], self.step.params)

    def surely(self, m: Tensor) -> Tensor:
        tree = self.tree
        wins, shared = self.may_win(m), self.shared()
        least = torch.where(wins, shared, tree.max_depth).amin(-1, keepdim=True)
        others = (wins & ~mark(self.last, torch.ones_like(wins[:, 0]), wins)).any(-1)
        drawn = surely_drawn(self.last_row.weights(m), self.step.uniforms[:, 0], self.final)
        return self.with_final(self.slots < least, ~others & drawn)

    def may_win(self, m: Tensor) -> Tensor:
        """``[batch, num_nodes]`` bool. What two paths share counts alike for both."""
        tree, P = self.tree, probs(stacked([rows.weights(m) for rows in self.rows]))
        low, high = (tree.of_nodes(end) for end in P)
        highest, lowest = (typical_from(self.step, end) for end in entropy(P))
        depth, likelihood = tree.reached(low > tree.of_parents(highest), low)
        best = likeliest(depth, likelihood)
        upto_best = torch.zeros_like(tree.usable)
        for node in tree.path(best)[0].unbind(1):
            upto_best = upto_best | mark(node.clamp_min(0), node > 0, upto_best)
        deepest, likely = tree.reached(high > tree.of_parents(lowest), torch.where(upto_best, low, high))
        depth, likelihood = at(depth, best)[:, None], at(likelihood, best)[:, None]
        return (deepest > depth) | (deepest == depth) & (likely >= likelihood)


class LooseSiblings(Siblings):
    """Decides as `Siblings` does, and notes what of it is sure. A walk from the leaves up goes on as if the accepted
    node had been rejected.
    """

    def __init__(self, exact: Siblings, rows: LooseStep, m: Tensor, last: Tensor, final: Tensor) -> None:
        super().__init__(exact.step, exact.P.clone(), exact.Q.clone(), exact.weight, exact.certain, exact.argmax)
        self.draws = stacked([target.weights(m) for target in rows.targets])  # what a token is drawn from
        drafts = [rows.draft(node, m) for node in range(len(rows.targets))]
        self.draft_weights, self.loose_Q = (stacked(ends) for ends in zip(*drafts, strict=True))
        self.loose_P, self.loose_weight = probs(self.draws), (exact.weight, exact.weight)
        self.last, self.final = last, final
        self.sure = torch.ones_like(exact.certain)  # of each node, what was asked about its children
        self.known = torch.ones_like(self.sure[:, 0])  # all children so far that the draft can have drawn
        # of each node, whether its coin accepts it, when those before it do not
        self.surely, self.possibly, self.before = (torch.zeros_like(self.sure) for _ in range(3))
        self.reached, self.drawn = torch.zeros_like(self.known), torch.zeros_like(self.known)

    def loose_probs(self, node: Tensor, child: Tensor) -> tuple[Ends, Ends]:
        """Ends of P and Q of a child's token."""
        sequence, token = slots_upto(node.shape[0], node), at(self.step.tree.tokens, child)
        p, q = ((low[sequence, node, token], high[sequence, node, token]) for low, high in (self.loose_P, self.loose_Q))
        return p, q

    def given(self, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
        can, cannot = gives(self.probs(node, child)[1], self.loose_probs(node, child)[1])
        unsure = where & ~can & ~cannot
        self.sure, self.known = self.sure & ~mark(node, unsure, self.sure), self.known & ~unsure
        return super().given(node, child, where)

    def accepts(self, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
        (p, q), u = self.loose_probs(node, child), at(self.step.uniforms, child)
        accept = super().accepts(node, child, where)
        sure = torch.where(accept, accept_token(u, p[0], q[1]), ~accept_token(u, p[1], q[0]))
        self.sure = self.sure & ~mark(node, where & ~sure, self.sure)
        return accept

    def enter(self, node: Tensor, child: Tensor, where: Tensor) -> None:
        super().enter(node, child, where)
        (p, q), w = self.loose_probs(node, child), ends_at(self.loose_weight, node)
        self.weigh(child, where, (next_block_weight(w[0], p[0], q[1]), next_block_weight(w[1], p[1], q[0])))

    def keeps(self, node: Tensor, where: Tensor) -> Tensor:
        root, (low, high), u = node == 0, ends_at(self.loose_weight, node), at(self.step.uniforms, node)
        self.surely = self.surely | mark(node, where & self.known & (root | (u < low)), self.sure)
        self.possibly = self.possibly | mark(node, where & (~self.known | root | (u < high)), self.sure)
        here = where & (node == self.last)
        self.before = self.before | mark(node, where & ~here & ~self.reached, self.sure)
        if bool(here.any()):
            self.drawn = torch.where(here, self.surely_drawn(node), self.drawn)
        self.reached = self.reached | here
        return where & root

    def lose(self, node: Tensor, child: Tensor, where: Tensor) -> None:
        rest = self.rest(node)
        super().lose(node, child, where)
        w = ends_at(self.loose_weight, node)
        self.weigh(node, where, (block_threshold(w[0], rest[0].sum(-1)), block_threshold(w[1], rest[1].sum(-1))))

    def reject(self, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
        rest, token = self.rest(node), at(self.step.tree.tokens, child)[:, None]
        here, low, high = where & (rest[1] > 0).any(-1), *probs(rest)
        certain = (rest[0] > 0).any(-1, keepdim=True)  # that something is left: else P may stay as it is
        high = torch.where(certain, high, high.maximum(at(self.loose_P[1], node)))
        set_ends(self.draws, node, here & certain[:, 0], rest)
        set_ends(self.draws, node, here & ~certain[:, 0], (low, high))
        set_ends(self.loose_P, node, here, (low, high))
        least, most = (end.scatter(1, token, 0.0) for end in ends_at(self.draft_weights, node))
        set_ends(self.draft_weights, node, where, (least, most))
        set_ends(self.loose_Q, node, where, probs((least, most)))
        return super().reject(node, child, where)

    def rest(self, node: Tensor) -> Ends:
        """Ends of ``(w P − Q)+``."""
        return left(ends_at(self.loose_P, node), ends_at(self.loose_Q, node), ends_at(self.loose_weight, node))

    def weigh(self, node: Tensor, where: Tensor, w: Ends) -> None:
        here = mark(node, where, self.sure)
        low, high = (torch.where(here, new[:, None], old) for new, old in zip(w, self.loose_weight, strict=True))
        self.loose_weight = low, high

    def surely_drawn(self, node: Tensor) -> Tensor:
        """Whether the final token is surely drawn after a node."""
        return surely_drawn(ends_at(self.draws, node), self.step.uniforms[:, 0], self.final)


def stacked(rows: Sequence[Ends]) -> Ends:
    """Ends of each node, side by side: ``[batch, num_nodes, vocab]``."""
    return torch.stack([low for low, _ in rows], 1), torch.stack([high for _, high in rows], 1)


def ends_at(ends: Ends, node: Tensor) -> Ends:
    """Of one node of each sequence."""
    return at(ends[0], node), at(ends[1], node)


def set_ends(ends: Ends, node: Tensor, where: Tensor, new: Ends) -> None:
    """Replaces those of a node ``[batch]`` in the sequences `where`."""
    sequence = slots_upto(node.shape[0], node)
    for old, given in zip(ends, new, strict=True):
        old[sequence, node] = torch.where(where[:, None], given, old[sequence, node])


class LooseRecursive(LooseWhole):
    """A token depends on what was asked about the children of the node before it."""

    def __init__(self, *decided: Any) -> None:
        super().__init__(*decided)
        step = self.step
        Q = draft_probs(step.args.shared, step.draft_params)
        self.rows, self.exact = LooseStep(step.args.shared, step.params, step.draft_params, Q), make_siblings(step)

    def siblings(self, m: Tensor) -> LooseSiblings:
        """What all nodes are known to be, before any child was looked at."""
        return LooseSiblings(self.exact, self.rows, m, self.last, self.final)

    def surely(self, m: Tensor) -> Tensor:
        left = self.siblings(m)
        recursive(self.step, left)
        sure = left.sure.gather(1, self.path)
        return self.with_final(sure, at(left.sure, self.last) & left.surely_drawn(self.last))


class LooseTraversal(LooseRecursive):
    """An accepted token is sure as long as nothing outside its subtree may be accepted first, and something inside
    surely is, then or later; the final one as long as nothing may be accepted first, and its own draw is.
    """

    def surely(self, m: Tensor) -> Tensor:
        left, shared = self.siblings(m), self.shared()
        traversal(self.step, left)
        first = left.possibly & left.before
        least = torch.where(first, shared, self.tree.max_depth).amin(-1)
        most = torch.where(left.surely, shared, 0).amax(-1)
        final = ~first.any(-1) & at(left.surely, self.last) & left.drawn
        return self.with_final(self.slots < least.minimum(most)[:, None], final)
