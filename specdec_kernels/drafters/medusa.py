"""Medusa's heads as the drafter: the tree of their best tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..backends.reference.processors import counted, penalised, valid_penalties
from ..decoding.grammar import SomeDrafts, allowed
from ..decoding.state import DecodingState, StepResult
from ..flat import FlatProcessors
from ..tree import DraftTree
from ..types import PLACEHOLDER_TOKEN_ID
from .barred import Barred
from .base import Draft, TreeDrafter
from .medusa_heads import MedusaHeads


class MedusaDrafter(TreeDrafter):
    """Drafts a tree whose nodes at depth k + 1 are head k's best tokens (Cai et al., arXiv 2401.10774).

    The heads read the target's hidden state of the last verification, so that a draft costs no forward of its own; the
    first step, before which there is no such state, has no draft.

    A head's best tokens are those of its logits as `processors` make them, where penalties count the tokens above a
    node; with a `grammar` a node's children are the best of those that it lets follow the node. Where fewer are left
    than the tree asks for, a sequence lacks those nodes.

    Parameters
    ----------
    heads : MedusaHeads
        Of the target, on its device; see `specdec_kernels.medusa`.
    tree : DraftTree, optional
        Made by `DraftTree.calibrated`, `from_choices` or `cartesian`, at most as deep as there are heads. None: the
        tree of 16 nodes calibrated on the accuracies that came with the heads.

    Raises
    ------
    TypeError, ValueError
        Arguments other than heads and a tree; a tree without ranks, deeper than there are heads or with a rank outside
        their vocabulary; no tree for heads without accuracies. In `generate`: heads that do not fit the target;
        a target that is compiled (`torch.compile`), whose hidden states are not heard.
    """

    capturable = True
    reads_hidden = True

    def __init__(self, heads: MedusaHeads, tree: DraftTree | None = None) -> None:
        if not isinstance(heads, MedusaHeads):
            raise TypeError(f"MedusaDrafter: heads must be MedusaHeads, got {type(heads).__name__}")
        if tree is None:
            if heads.accuracy is None:
                raise ValueError("MedusaDrafter: tree must be given for heads that were not calibrated, got None")
            tree = DraftTree.calibrated(heads.accuracy, 16)
        if not isinstance(tree, DraftTree):
            raise TypeError(f"MedusaDrafter: tree must be a DraftTree, got {type(tree).__name__}")
        if tree.ranks is None:
            raise ValueError("MedusaDrafter: tree must have ranks (calibrated, from_choices, cartesian), got none")
        if tree.max_depth > heads.num_heads:
            raise ValueError(f"MedusaDrafter: tree must be at most heads={heads.num_heads} deep, got {tree.max_depth}")
        self.num_ranks = int(tree.ranks.max()) + 1
        if self.num_ranks > len(heads.token_map):
            vocab = len(heads.token_map)
            raise ValueError(f"MedusaDrafter: tree must have ranks < vocab_draft={vocab}, got {self.num_ranks - 1}")
        self.heads, self.tree = heads, tree
        self.num_nodes, self.max_depth = tree.num_nodes, tree.max_depth
        # of each node's token among the heads' best tokens, head by head
        self._places = (tree.depth[1:] - 1) * self.num_ranks + tree.ranks[1:]
        self._above = tree.ancestors()[1:, 1:]
        self._children = _children(tree)
        self._barred: Barred | None = None
        self._penalties: Tensor | None = None  # [batch or 1, 3]

    def start(self, state: DecodingState) -> None:
        """Check that the heads are of this target."""
        assert state.hidden is not None
        self.heads.check_fits(state.vocab_size, state.hidden.shape[1])
        if self.heads.w1.weight.device != state.device:
            raise ValueError(f"generate: heads must be on {state.device}, got {self.heads.w1.weight.device}")
        self.tree, self._places = self.tree.to(state.device), self._places.to(state.device)
        self._above = self._above.to(state.device)
        self._barred = Barred.of(state, state.device)
        flat = None if state.processors is None else state.processors._lists(state.device, state.vocab_size).flat
        given = None if flat is None else FlatProcessors(None, *flat).penalties
        self._penalties = None if given is None else valid_penalties(given)[0]

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """The whole tree."""
        assert state.hidden is not None
        logits = self.heads(state.hidden.to(self.heads.w1.weight.dtype))
        ids = self.heads.token_map.draft_to_target
        if self._barred is not None:
            batch, num_heads, vocab = logits.shape
            lengths = state.next_positions(num_heads).repeat_interleave(vocab, 1)
            logits = logits + self._barred.added(ids.repeat(num_heads).expand(batch, -1), lengths).view_as(logits)
        if state.masks is None and self._penalties is None:
            tokens = _best(logits, ids, self.num_ranks).flatten(1)[:, self._places]
        else:
            tokens = self._node_by_node(state, logits)
        tokens = tokens.masked_fill(((tokens < 0)[:, None] & self._above).any(-1), PLACEHOLDER_TOKEN_ID)
        return Draft(torch.where(state.step[:, None] > 0, tokens, PLACEHOLDER_TOKEN_ID), tree=self.tree)

    def _node_by_node(self, state: DecodingState, logits: Tensor) -> Tensor:
        """The nodes' tokens where each depends on those above: by penalties, or a grammar (it waits for the device)."""
        token_map, masks = self.heads.token_map, state.masks
        ids = token_map.draft_to_target
        if masks is not None:
            known, limits = ids.cpu(), np.where(state.step.cpu().numpy() > 0, state.host_limits, 0)
        chosen = [state.tokens.new_full((state.batch_size,), PLACEHOLDER_TOKEN_ID)] * self.num_nodes
        paths: dict[int, SomeDrafts] = {0: [np.empty(0, dtype=np.int64)] * state.batch_size}
        counts: dict[int, Tensor] = {}
        if self._penalties is not None and state.token_counts is not None:
            counts[0] = counted(state.token_counts, ids.expand(state.batch_size, -1))
        for node, depth, children in self._children:
            left = logits[:, depth]
            if masks is not None:
                above = [path if depth < limit else None for path, limit in zip(paths[node], limits, strict=True)]
                rows, follows = masks.after(above)
                closed = ~(allowed(rows, known) & torch.from_numpy(follows)[:, None])
                left = left.masked_fill(closed.to(state.device), -torch.inf)
            if counts and self._penalties is not None:
                left = penalised(left, self._penalties, counts[node])
            best = _best(left, ids, max(children.values()) + 1)
            for child, rank in children.items():
                chosen[child] = token = best[:, rank]
                if masks is not None:
                    paths[child] = [
                        None if path is None or new < 0 else np.append(path, new)
                        for path, new in zip(above, token.tolist(), strict=True)
                    ]
                if counts:
                    at = token_map.target_to_draft[token.clamp_min(0)].clamp_min(0)
                    counts[child] = counts[node].scatter_add(1, at[:, None], 2 * (token >= 0).int()[:, None])
        return torch.stack(chosen[1:], 1)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Nothing to note: the target's hidden state is in `state`."""

    def finish(self) -> None:
        self._barred = self._penalties = None


def _children(tree: DraftTree) -> list[tuple[int, int, dict[int, int]]]:
    """Of each node that has children: itself, its depth, and the rank of each child."""
    assert tree.ranks is not None
    parents, ranks, depths = (x.tolist() for x in (tree.parents, tree.ranks, tree.depth))
    found: dict[int, dict[int, int]] = {}
    for child in range(1, tree.num_nodes):
        found.setdefault(parents[child], {})[child] = ranks[child]
    return [(node, depths[node], found[node]) for node in sorted(found)]


def _best(logits: Tensor, ids: Tensor, num: int) -> Tensor:
    """The `num` likeliest of `ids` in logits ``[..., vocab_draft]``, likeliest first: ``[..., num]`` int64, −1 where no
    more are possible.
    """
    best = logits.topk(num, dim=-1)
    return ids[best.indices].masked_fill(best.values.isneginf(), PLACEHOLDER_TOKEN_ID)
