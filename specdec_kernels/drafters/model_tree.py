"""A smaller model as the drafter of a tree: its likeliest continuations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_int
from ..decoding.runner import forward_logits, forward_tree
from ..decoding.state import DecodingState
from ..sampling import SMALLEST_TEMPERATURE
from ..tree import MAX_DEPTH, MAX_NODES, DraftTree
from ..types import PLACEHOLDER_TOKEN_ID, TokenMap
from .barred import Barred
from .base import Draft, TreeDrafter
from .model import ModelBase


class ModelTreeDrafter(ModelBase, TreeDrafter):
    """At each step, drafts the tree that a model thinks likeliest: the continuations of the greatest probability (the
    product along each path), found by beams of `width` nodes (the dynamic trees of EAGLE-2: Li et al., arXiv
    2406.16858, with a model of any kind as the draft).

    A tree d deep takes d forwards of the draft, as a chain of d tokens does: the first feeds the text's last tokens,
    each other one the tree so far. As its tokens are not drawn, the tree is one-hot to the verifier, which walks it
    with draws of its own: lossless at any temperature, and a token of the target is found wherever it is among a node's
    children. It pays where rows of the target are cheap, and sampled text is hard to guess with one token a position.

    Probabilities are those at the target's temperature (at 1 if it is greedy). `processors` apply, except for
    penalties: no node has a token that they bar. What a `grammar` bars is taken out of the tree.

    Parameters
    ----------
    draft_model
        A transformers model that takes trees, or a `specdec_kernels.decoding.Runner` that does; see `ModelDrafter`.
    num_nodes : int
        Rows of a verification, root included, 2 … 1024.
    max_depth : int
        Longest continuation, 1 … 64.
    width : int
        Nodes of each depth that are continued, 1 … ``1023 // max(max_depth - 1, 1)``.
    token_map : TokenMap, optional
        See `ModelDrafter`.

    Raises
    ------
    ValueError
        A parameter out of its range, a model that cannot be served (here) or takes no trees, or does not fit the target
        (in `generate`).
    TypeError
        A parameter is something else.
    """

    def __init__(
        self,
        draft_model: Any,
        num_nodes: int = 6,
        max_depth: int = 2,
        width: int = 3,
        token_map: TokenMap | None = None,
    ) -> None:
        caller = "ModelTreeDrafter"
        self.num_nodes = check_int(caller, "num_nodes", num_nodes, 2, MAX_NODES)
        self.max_depth = check_int(caller, "max_depth", max_depth, 1, MAX_DEPTH)
        self.width = check_int(caller, "width", width, 1, max((MAX_NODES - 1) // max(max_depth - 1, 1), 1))
        self._fed = max_depth + 1
        super().__init__(caller, draft_model, token_map)
        if not self.runner.takes_trees:
            raise ValueError(f"{caller}: draft_model must be a model that takes trees, got {self.runner.name}")
        self._barred: Barred | None = None

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """As the draft's `Runner`; False in a subclass with another `propose`, unless that says otherwise."""
        return self.runner.capturable and type(self).propose is ModelTreeDrafter.propose

    def start(self, state: DecodingState) -> None:
        super().start(state)
        self._barred = Barred.of(state, state.device)

    def _capacity(self, state: DecodingState) -> int:
        """Rows for the nodes that are fed, which may be more than those that are verified."""
        return state.capacity + max(self.width * (self.max_depth - 1) + 1 - self.num_nodes, 0)

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """Grow the tree depth by depth, then keep the likeliest nodes."""
        batch, device = state.batch_size, state.device
        depth = min(self.max_depth, num_tokens)
        likely, ids = self._likeliest(state, self._after_text(state), 1)  # [batch, 1, children]
        # All candidates, those nearer to the root first: token, log-probability of the path, node fed as the parent.
        tokens, scores = [ids[:, 0]], [likely[:, 0]]
        parents = [torch.zeros_like(ids[:, 0])]
        # What is fed: its tokens, its parents as fed, and which candidate each is. The root is none.
        fed = [state.last_tokens()]
        fed_parents = [torch.full((batch, 1), -1, device=device)]
        fed_from = [torch.full((batch, 1), -1, device=device)]
        before = 0  # candidates of lesser depth
        for level in range(1, depth):
            found, best = scores[-1].topk(min(self.width, scores[-1].shape[1]), dim=1)  # [batch, width]
            fed.append(tokens[-1].gather(1, best))
            fed_parents.append(parents[-1].gather(1, best))
            fed_from.append(before + best)
            before += tokens[-1].shape[1]
            rows = torch.cat(fed, 1)
            tree = DraftTree.from_parents(torch.cat(fed_parents, 1), level)
            known, bound = self._known(rows.clamp(min=0)), state.longest + tree.num_nodes - 1
            logits, _ = forward_tree(self.runner, known, state.lengths - 1, tree, bound)
            width = best.shape[1]
            likely, ids = self._likeliest(state, logits[:, -width:], level + 1)  # [batch, width, children]
            tokens.append(ids.flatten(1))
            # a sequence's tree is no deeper than it has room for, whatever the others have
            beyond = level + 1 > state.remaining - 1
            scores.append((found[..., None] + likely).flatten(1).masked_fill(beyond[:, None], -torch.inf))
            nodes = torch.arange(rows.shape[1] - width, rows.shape[1], device=device)
            parents.append(nodes.repeat_interleave(ids.shape[2]).expand(batch, -1))
        kept, above = self._kept(*(torch.cat(each, 1) for each in (tokens, scores, parents, fed_from)))
        if state.masks is not None and self._barred is not None:
            limits = state.host_limits
            drafted = np.where(limits[:, None] > 0, kept.cpu().numpy(), PLACEHOLDER_TOKEN_ID)
            kept = torch.from_numpy(self._barred.prune(drafted, limits, above.cpu().numpy())).to(device)
        return Draft(kept, tree=DraftTree.from_parents(above, self.max_depth))

    def _after_text(self, state: DecodingState) -> Tensor:
        """``[batch, 1, vocab_draft]``: what follows the text, of which a step may have added as much as is fed here."""
        count = self._fed
        rows, starts = self._text(state, count, count)
        self.runner.expect(lambda: torch.arange(count, device=state.device) <= (state.lengths - 1 - starts)[:, None])
        logits = forward_logits(self.runner, rows, starts, max(state.longest, count))
        return logits.gather(1, (state.lengths - 1 - starts)[:, None, None].expand(-1, 1, logits.shape[2]))

    def _likeliest(self, state: DecodingState, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the likeliest tokens after each node, ``[batch, nodes, children]`` both."""
        logits = logits.float()
        if self._barred is not None:
            own = torch.arange(logits.shape[2], device=state.device)
            ids = own if self.token_map is None else self.token_map.draft_to_target
            lengths = state.lengths[:, None] + depth - 1
            logits = logits + self._barred.added(ids.expand(state.batch_size, -1), lengths)[:, None]
        logits = logits / self._temperature(state)
        # a row without a possible id, or with a NaN, has no children
        scores = logits.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        best, ids = scores.topk(min(self.num_nodes - 1, logits.shape[2]), dim=-1)
        if self.token_map is not None:
            ids = self.token_map.draft_to_target[ids]
        return best, ids

    def _temperature(self, state: DecodingState) -> float | Tensor:
        """The target's, ``[batch, 1, 1]`` where each sequence has its own; 1 where it is greedy."""
        temperature = state.effective_sampling.temperature
        if isinstance(temperature, Tensor):
            return torch.where(temperature.float() >= SMALLEST_TEMPERATURE, temperature, 1.0).view(-1, 1, 1)
        return 1.0 if state.effective_sampling.is_greedy else temperature

    def _kept(self, tokens: Tensor, scores: Tensor, parents: Tensor, fed_from: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and parents of the tree of the likeliest candidates, ``[batch, num_nodes - 1]`` and one more.

        No child is likelier than its parent, and of equals the earlier one comes first: so parents are kept, and stand
        before their children.
        """
        missing = max(self.num_nodes - 1 - tokens.shape[1], 0)  # where the vocabulary is that small
        tokens, parents = (pad(each, (0, missing)) for each in (tokens, parents))
        scores = pad(scores, (0, missing), value=-torch.inf)
        tokens = tokens.masked_fill(~(scores > -torch.inf), PLACEHOLDER_TOKEN_ID)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.num_nodes - 1]
        nodes = torch.arange(1, self.num_nodes, device=tokens.device).expand(order.shape)
        node_of = torch.zeros_like(tokens).scatter(1, order, nodes)  # of each candidate
        node_fed = torch.where(fed_from < 0, 0, node_of.gather(1, fed_from.clamp(min=0)))
        above = node_fed.gather(1, parents.gather(1, order))
        return tokens.gather(1, order), pad(above, (1, 0), value=-1)

    def finish(self) -> None:
        super().finish()
        self._barred = None
