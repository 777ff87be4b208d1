"""Prompt lookup: the continuation of the longest suffix that occurred before."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .._host_py import MAX_NGRAM
from ..checks import check_int
from ..decoding.state import DecodingState, StepResult
from ..host import NgramIndex
from ..types import PLACEHOLDER_TOKEN_ID
from .barred import Barred
from .base import Draft, Drafter, Foresight


class NgramDrafter(Drafter):
    """Proposes what followed the most recent earlier occurrence of a sequence's last tokens (Saxena 2023, prompt
    lookup).

    Works on the host, on the tokens of the stop check: it costs microseconds and never waits for the device; what it
    proposes is copied there. A sequence without a match proposes nothing; a step in which no sequence has a match is a
    plain step. For an encoder-decoder the encoder's input is looked up too. A proposal that reaches the end of the text
    goes on periodically; it ends before a token that `processors` or a `grammar` bar.

    Parameters
    ----------
    n : int
        Longest suffix looked up, in tokens, 1 … 64.
    min_n : int
        Shortest suffix that counts as a match, 1 … `n`.

    Raises
    ------
    ValueError, TypeError
        A parameter out of its range.
    """

    def __init__(self, n: int = 3, min_n: int = 1) -> None:
        self.n = check_int("NgramDrafter", "n", n, 1, MAX_NGRAM)
        self.min_n = check_int("NgramDrafter", "min_n", min_n, 1, self.n)
        self._index: NgramIndex | None = None
        self._barred: Barred | None = None

    def start(self, state: DecodingState) -> None:
        """Index the prompts."""
        self._index = NgramIndex(state.batch_size, self.n, self.min_n)
        self._barred = Barred.of(state)
        prompt = state.prompt
        for texts in (prompt.host_source, prompt.host_tokens):
            for sequence, text in enumerate(texts or ()):
                self._index.append(sequence, text)

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """One-hot drafts, as wide as the longest found."""
        found = self._found(state, num_tokens)
        if self._barred is not None:
            found = self._barred.prune(found, state.host_limits)
            found = found[:, : int((found >= 0).sum(1).max())]
        return Draft(torch.from_numpy(np.ascontiguousarray(found)).to(state.device, non_blocking=True))

    def foresee(self, state: DecodingState) -> Foresight:
        """The first token found, and the length of the suffix that it followed. No grammar is asked, as that takes
        time.
        """
        found = self._found(state, 1)
        tokens = found[:, 0] if found.shape[1] else np.full(len(found), PLACEHOLDER_TOKEN_ID)
        assert self._index is not None
        return Foresight(tokens, self._index.matched())

    def _found(self, state: DecodingState, num_tokens: int) -> NDArray[np.int64]:
        """``[batch, at most num_tokens]`` that processors allow, −1 after what was found."""
        assert self._index is not None
        tokens, counts = self._index.propose(num_tokens, limits=state.host_limits)
        found = tokens[:, : int(counts.max())]
        return found if self._barred is None else self._barred.cut(found, state.host_lengths)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Index what was emitted."""
        assert self._index is not None
        self._index.append_batch(np.ascontiguousarray(result.tokens), result.num_tokens)

    def finish(self) -> None:
        self._index = self._barred = None
