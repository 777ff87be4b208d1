"""Prompt lookup with several continuations: a tree of what followed a sequence's last tokens before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from .._host_py import MAX_NGRAM
from ..checks import check_int
from ..decoding.state import DecodingState, StepResult
from ..tree import MAX_DEPTH, MAX_NODES, DraftTree
from ..types import PLACEHOLDER_TOKEN_ID
from .barred import Barred
from .base import Draft, Foresight, TreeDrafter


class NgramTreeDrafter(TreeDrafter):
    """Proposes what followed earlier occurrences of a sequence's last tokens, as one tree.

    `NgramDrafter` proposes one continuation, the most recent one of the longest suffix that occurred before. Here
    others join it as long as there are nodes left: those of longer suffixes first, then the more recent ones, of each
    suffix the `num_nodes` latest; common beginnings are drafted once. As there, one that reaches the end of the text
    goes on periodically. None goes on past a token that `processors` bar, and what a `grammar` bars is taken out of the
    tree.

    Parameters
    ----------
    n, min_n : int
        Longest and shortest suffix looked up, in tokens: ``1 <= min_n <= n <= 64``.
    num_nodes : int
        Rows of a verification, root included, 2 … 1024.
    max_depth : int
        Longest continuation, 1 … 64.

    Raises
    ------
    ValueError, TypeError
        A parameter out of its range.
    """

    def __init__(self, n: int = 3, min_n: int = 1, num_nodes: int = 16, max_depth: int = 7) -> None:
        self.n = check_int("NgramTreeDrafter", "n", n, 1, MAX_NGRAM)
        self.min_n = check_int("NgramTreeDrafter", "min_n", min_n, 1, self.n)
        self.num_nodes = check_int("NgramTreeDrafter", "num_nodes", num_nodes, 2, MAX_NODES)
        self.max_depth = check_int("NgramTreeDrafter", "max_depth", max_depth, 1, MAX_DEPTH)
        self._texts: list[NDArray[np.int64]] = []
        self._lengths: list[int] = []
        self._barred: Barred | None = None

    def start(self, state: DecodingState) -> None:
        """Take in the prompts."""
        self._barred = Barred.of(state)
        self._lengths = [len(prompt) for prompt in state.prompt.host_tokens]
        self._texts = [np.zeros(state.capacity, dtype=np.int64) for _ in self._lengths]
        for text, prompt in zip(self._texts, state.prompt.host_tokens, strict=True):
            text[: len(prompt)] = prompt

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """A tree for each sequence."""
        drafted = np.zeros((2, state.batch_size, self.num_nodes), dtype=np.int64)  # tokens and parents
        drafted[0], drafted[1, :, 0] = PLACEHOLDER_TOKEN_ID, -1
        for row, (text, length) in enumerate(zip(self._texts, self._lengths, strict=True)):
            if state.host_active[row]:
                self._grow(row, text[:length], int(state.host_limits[row]), *drafted[:, row])
        if self._barred is not None:
            drafted[0, :, 1:] = self._barred.prune(drafted[0, :, 1:], state.host_limits, drafted[1])
        moved = torch.from_numpy(drafted).to(state.device, non_blocking=True)
        return Draft(moved[0, :, 1:], tree=DraftTree.from_parents(moved[1], self.max_depth))

    def foresee(self, state: DecodingState) -> Foresight:
        """The root's first child, and the length of the suffix that it followed. No grammar is asked, as that takes
        time.
        """
        tokens = np.full(state.batch_size, PLACEHOLDER_TOKEN_ID)
        matched = np.zeros(state.batch_size, dtype=np.int64)
        for row, (text, length) in enumerate(zip(self._texts, self._lengths, strict=True)):
            if state.host_limits[row] > 0:
                first = next(self._continuations(row, text[:length], 1), None)
                if first is not None:
                    (tokens[row],), matched[row] = first
        return Foresight(tokens, matched)

    def _grow(
        self, row: int, text: NDArray[np.int64], depth: int, tokens: NDArray[np.int64], parents: NDArray[np.int64]
    ) -> None:
        """Fill in the tree of sequence `row`."""
        children: dict[tuple[int, int], int] = {}
        for continuation, _ in self._continuations(row, text, depth):
            node = 0
            for token in continuation:
                below = children.get((node, token))
                if below is None:
                    if len(children) == self.num_nodes - 1:
                        return
                    below = children[node, token] = len(children) + 1
                    tokens[below], parents[below] = token, node
                node = below

    def _continuations(self, row: int, text: NDArray[np.int64], depth: int) -> Iterator[tuple[list[int], int]]:
        """What followed each earlier occurrence of the text's last tokens, and how many of these occurred there."""
        seen: set[int] = set()
        for end, length in self._occurrences(text):
            if end in seen:  # of a longer suffix too
                continue
            seen.add(end)
            continuation = text[end + 1 + np.arange(depth) % (len(text) - 1 - end)]
            if self._barred is not None:
                continuation = self._barred.cut(continuation[None], np.array([len(text)]), row)[0]
                continuation = continuation[continuation >= 0]
            if len(continuation):
                yield continuation.tolist(), length

    def _occurrences(self, text: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Where earlier occurrences of the text's last tokens end, and of how many: longest first, then the latest."""
        ends = np.flatnonzero(text[:-1] == text[-1])
        found: list[list[tuple[int, int]]] = []
        for length in range(1, self.n + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[text[ends - length + 1] == text[len(text) - length]]
            if not len(ends):
                break
            if length >= self.min_n:
                found.append([(end, length) for end in ends[::-1][: self.num_nodes].tolist()])
        return [each for of_length in reversed(found) for each in of_length]

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Take in what was emitted."""
        for row, count in enumerate(result.num_tokens.tolist()):
            begin = self._lengths[row]
            self._texts[row][begin : begin + count] = result.tokens[row, :count]
            self._lengths[row] += count

    def finish(self) -> None:
        self._texts, self._lengths = [], []
        self._barred = None
