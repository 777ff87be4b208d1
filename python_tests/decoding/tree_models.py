"""Models and drafters of trees, and the exact distribution of their texts: what several test files share."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, tiny
from specdec_kernels.decoding import DecodingState
from specdec_kernels.drafters import Draft, TreeDrafter
from specdec_kernels.medusa import MedusaHeads

decode = partial(sk.generate, num_speculative_tokens=1)  # the tree at every step
WINDOW = 3  # less than a tree's depth: what a node may see of its path is a matter of positions, not of rows


def target(family: str) -> Any:
    return tiny(family, **({"sliding_window": WINDOW} if family == "mistral" else {}))


def medusa(model: Any, tree: sk.DraftTree | None = None, noise: float = 0.1) -> sk.MedusaDrafter:
    heads = MedusaHeads.of_model(model, 3, sk.TokenMap(torch.arange(3, 50)))
    generator = torch.Generator().manual_seed(5)
    for weight in heads.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * noise
    return sk.MedusaDrafter(heads.requires_grad_(False), tree or sk.DraftTree.cartesian([4, 3, 2]))


class TreeTable(TableRunner):
    """`TableRunner` for trees."""

    takes_trees = True

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: sk.DraftTree, bound: int) -> tuple[Tensor, None]:
        assert bool((starts + tokens.shape[1] <= bound).all()) and bound < self.text.shape[1]
        self.tokens = tokens
        parents = tree.parents.clamp(min=0).expand(tokens.shape)
        before = torch.where(tree.depth > 0, tokens.gather(1, parents), self.text.gather(1, starts[:, None]))
        return self.table[before, tokens], None

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        rows = torch.cat([torch.zeros_like(starts)[:, None], accepted_nodes], 1)
        kept = self.tokens.gather(1, rows.clamp(min=0))
        self.text.scatter_(1, starts[:, None] + 1 + torch.arange(rows.shape[1]), kept)


class Fixed(TreeDrafter):
    """The same tree at every step."""

    def __init__(self, tree: sk.DraftTree, tokens: list[int]) -> None:
        self.tree, self.tokens = tree, torch.tensor(tokens)
        self.num_nodes, self.max_depth = tree.num_nodes, tree.max_depth

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        return Draft(self.tokens.expand(state.batch_size, -1), tree=self.tree)

    def commit(self, state: DecodingState, result: Any) -> None: ...


TREE = sk.DraftTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
TOKENS = [2, 0, 1, 3, 2, 0]  # of its nodes 1 … 6


def frequencies(tokens: Tensor, vocab: int) -> np.ndarray:
    code = (tokens * vocab ** torch.arange(tokens.shape[1])).sum(1)
    return np.bincount(code.numpy(), minlength=vocab ** tokens.shape[1]) / len(tokens)


def exact_law(table: Tensor, prompt: list[int], length: int) -> np.ndarray:
    """Of texts of `length` tokens, in the order of `frequencies`."""
    vocab = table.shape[0]
    law = np.zeros(vocab**length)
    laws = table.double().softmax(-1).numpy()
    for code in range(vocab**length):
        text, chance = list(prompt), 1.0
        for i in range(length):
            token = code // vocab**i % vocab
            chance *= laws[text[-2], text[-1], token]
            text.append(token)
        law[code] = chance
    return law
