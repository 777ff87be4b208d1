"""Medusa's heads as the drafter: the tree of their best tokens."""

from __future__ import annotations

import torch

from ..decoding.state import DecodingState, StepResult
from ..tree import DraftTree
from ..types import PLACEHOLDER_TOKEN_ID
from .base import Draft, TreeDrafter
from .medusa_heads import MedusaHeads


class MedusaDrafter(TreeDrafter):
    """Drafts a tree whose nodes at depth k + 1 are head k's best tokens (Cai et al., arXiv 2401.10774).

    The heads read the target's hidden state of the last verification, so that a draft costs no forward of its own; the
    first step, before which there is none, goes without a draft.

    Parameters
    ----------
    heads : MedusaHeads
        Of the target, on its device; see `specdec_kernels.medusa`.
    tree : DraftTree, optional
        Made by `DraftTree.calibrated`, `from_choices` or `cartesian`, at most as deep as there are heads. None: the
        calibrated tree of 16 nodes, of the accuracies that came with the heads.

    Raises
    ------
    TypeError, ValueError
        No such tree (here), or heads that do not fit the target (in `generate`).
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
        # of each node's token in the heads' best tokens, head by head
        self._places = (tree.depth[1:] - 1) * self.num_ranks + tree.ranks[1:]

    def start(self, state: DecodingState) -> None:
        """Check that the heads are of this target."""
        assert state.hidden is not None
        self.heads.check_fits(state.vocab_size, state.hidden.shape[1])
        if self.heads.w1.weight.device != state.device:
            raise ValueError(f"generate: heads must be on {state.device}, got {self.heads.w1.weight.device}")
        self.tree, self._places = self.tree.to(state.device), self._places.to(state.device)

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """The whole tree."""
        assert state.hidden is not None
        best = self.heads.top_tokens(state.hidden, self.num_ranks).flatten(1)
        tokens = best[:, self._places]
        return Draft(torch.where(state.step[:, None] > 0, tokens, PLACEHOLDER_TOKEN_ID), tree=self.tree)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Nothing to note: the target's hidden state is in `state`."""
