"""A grammar of numbers, and every kind of drafter to write by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.tree_models import Fixed, medusa
from specdec_kernels.drafters import Drafter

NEW, END = 24, 1
WIDE = sk.DraftTree.cartesian([4, 3, 2])
DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "plain": lambda draft: sk.NoDrafter(),
    "lookup": lambda draft: sk.NgramDrafter(),
    "trees": lambda draft: sk.NgramTreeDrafter(),
    "counts": lambda draft: sk.NgramLMDrafter(),
    "medusa": lambda draft: medusa(draft, WIDE),
    "model": sk.ModelDrafter,
    "model trees": sk.ModelTreeDrafter,
    "any": lambda draft: Fixed(WIDE, torch.arange(3, 3 + WIDE.num_nodes - 1).tolist()),  # is told nothing
}


class Residues(sk.Grammar):
    """Token t of a sequence leaves the sum of those before it, modulo 3 (the end may always come). As XGrammar does, it
    fails where it is asked what follows an end.
    """

    def __init__(self, batch: int, vocab: int) -> None:
        self.vocab, self.ended, self.looked_at = vocab, [False] * batch, 0
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.asked: set[tuple[int, bytes]] = set()  # in this step

    def allowed(self, text: list[int]) -> list[int]:
        rest = sum(text) % 3
        return [v for v in range(self.vocab) if v == END or v % 3 == rest]

    def fill(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        assert rows.dtype == torch.int32 and bool((rows == -1).all())
        assert rows.shape[0] == len(drafts) == len(self.texts) and rows.shape[2] == -(-self.vocab // 32)
        assert any(draft is not None for draft in drafts)
        for b, draft in enumerate(drafts):
            if draft is None:
                rows[b] = 0  # whatever stands there
                continue
            assert len(draft) < rows.shape[1] and not self.ended[b] and END not in draft
            assert (b, draft.tobytes()) not in self.asked, "its last row is known"
            self.asked.add((b, draft.tobytes()))
            for i in range(len(draft) + 1):
                rows[b, i] = self.row(b, draft[:i])
            rows[b, len(draft) + 1 :] = 0  # whatever stands there
            self.looked_at += len(draft)

    def row(self, b: int, draft: np.ndarray) -> Tensor:
        mask = sum(1 << v for v in self.allowed([*self.texts[b], *draft.tolist()]))
        words = [mask >> 32 * k & 0xFFFFFFFF for k in range(-(-self.vocab // 32))]
        return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)

    def fill_last(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        assert len(drafts) == len(self.texts) and any(draft is not None for draft in drafts)
        for b, draft in enumerate(drafts):
            if draft is not None:
                assert not self.ended[b] and END not in draft and len(self.texts[b]) + len(draft) < NEW
                for i, token in enumerate(draft.tolist()):
                    assert token in self.allowed([*self.texts[b], *draft[:i].tolist()])
        super().fill_last(rows, drafts)

    def commit(self, tokens: list[np.ndarray]) -> None:
        for b, new in enumerate(tokens):
            assert not (self.ended[b] and len(new))
            for token in new.tolist():
                assert token in self.allowed(self.texts[b])
                self.texts[b].append(token)
            self.ended[b] = self.ended[b] or END in new or len(self.texts[b]) == NEW
        self.asked.clear()
