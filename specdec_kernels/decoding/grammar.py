"""Grammars in the loop: an engine on the host bars what a text may not go on with, at every row of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Draft
from ..processors import Processors
from .state import DecodingState

Lists = list[np.ndarray]
"""``[n]`` int64, of each sequence."""


class Grammar(ABC):
    """What the texts of a `generate` call may be: a grammar engine (XGrammar, llguidance) for each sequence.

    A step calls ``fill`` when its draft is made, verifies, and calls ``commit``. The draft may be anything: what the
    grammar bars is rejected, so that the text is that of plain decoding with the grammar. One of "every other token is
    even"::

        class Alternating(Grammar):
            def __init__(self, batch):
                self.lengths = [0] * batch

            def fill(self, rows, drafts):
                for b, draft in enumerate(drafts):
                    for i in range(len(draft) + 1):
                        if (self.lengths[b] + i) % 2:
                            rows[b, i] = 0x55555555

            def commit(self, tokens):
                for b, new in enumerate(tokens):
                    self.lengths[b] += len(new)
    """

    @abstractmethod
    def fill(self, rows: Tensor, drafts: Lists) -> None:
        """Clear the bits of what may not come next.

        Parameters
        ----------
        rows : Tensor
            ``[batch, at least n + 1, ceil(vocab / 32)]`` int32 on the CPU, all bits 1, to be written: ``rows[b, i]`` is
            of the token after the first i of ``drafts[b]``; bit ``v % 32`` of word ``v // 32`` is id v's. ``rows[b]``
            is what engines fill one row of at a time. Rows after a token that is barred are not looked at, nor those of
            a sequence that has ended.
        drafts : list of ndarray
            ``[n]`` int64 draft tokens of each sequence, to be forgotten again; none of one that has ended.
        """

    @abstractmethod
    def commit(self, tokens: Lists) -> None:
        """Take note of what the step emitted, the end of a sequence included: ``[n]`` int64 new tokens of each."""


def with_grammar(state: DecodingState, grammar: Grammar, draft: Draft, limits: np.ndarray) -> DecodingState:
    """The state as a step sees it whose mask `grammar` has filled; its tensors are shared. Waits for the draft, of
    which no more than `limits` ``[batch]`` are put to the test.
    """
    tokens = draft.tokens.cpu().numpy()
    if draft.num_draft_tokens is not None:
        limits = np.minimum(limits, draft.num_draft_tokens.cpu().numpy())
    lengths = np.minimum((tokens >= 0).cumprod(1).sum(1), limits.clip(0))
    shape = (*tokens.shape[:1], tokens.shape[1] + 1, (state.vocab_size + 31) // 32)
    rows = torch.full(shape, -1, dtype=torch.int32)
    grammar.fill(rows, [row[:n] for row, n in zip(tokens, lengths, strict=True)])
    processors = state.processors or Processors()
    return replace(state, processors=processors.with_bitmask(rows.to(state.device)))
