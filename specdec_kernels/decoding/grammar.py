"""Grammars in the loop: an engine on the host bars what a text may not go on with, at every row of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Drafts = list[np.ndarray]
"""``[n]`` int64, of each sequence."""
SomeDrafts = list[np.ndarray | None]
"""The same; None for a sequence that is not asked about."""


class Grammar(ABC):
    """What the texts of a `generate` call may be: a grammar engine (XGrammar, llguidance) for each sequence.

    A step calls ``fill`` or ``fill_last`` while its draft is made and again for what remains of the draft, verifies,
    and calls ``commit``. A draft, or a tree, may be anything: what the grammar bars is rejected, so the text is that of
    plain decoding with the grammar, unless it comes to where processors and grammar together bar every id (the grammar
    alone may). A `Grammar` follows the texts of one call; make another for the next call. One for "every other token is
    even"::

        class Alternating(Grammar):
            def __init__(self, batch):
                self.lengths = [0] * batch

            def fill(self, rows, drafts):
                for b, draft in enumerate(drafts):
                    if draft is not None:
                        for i in range(len(draft) + 1):
                            if (self.lengths[b] + i) % 2:
                                rows[b, i] = 0x55555555

            def commit(self, tokens):
                for b, new in enumerate(tokens):
                    self.lengths[b] += len(new)
    """

    @abstractmethod
    def fill(self, rows: Tensor, drafts: SomeDrafts) -> None:
        """Clear the bits of what may not come next.

        Parameters
        ----------
        rows : Tensor
            ``[batch, at least n + 1, ceil(vocab / 32)]`` int32 on the CPU, all bits 1, to be written: ``rows[b, i]`` is
            for the token after the first i of ``drafts[b]``; bit ``v % 32`` of word ``v // 32`` is id v's. Engines fill
            ``rows[b]`` one row at a time. Rows after a token that is barred are not looked at.
        drafts : list of ndarray or None
            ``[n]`` int64 draft tokens of each sequence, which the engine must forget again. None of them ends the
            sequence: a draft is cut before such a token. None: no row of the sequence is looked at, e.g. because it has
            ended.
        """

    def fill_last(self, rows: Tensor, drafts: SomeDrafts) -> None:
        """Clear the bits of what may not come after the whole of a draft: the last row of those that ``fill`` writes.

        Called where a draft is made token by token, and at the nodes of a tree. By default it calls ``fill``. An engine
        that can roll back avoids filling the other rows again: it takes in ``drafts[b]``, fills ``rows[b]`` and rolls
        back.

        Parameters
        ----------
        rows : Tensor
            ``[batch, ceil(vocab / 32)]`` int32 on the CPU, all bits 1, to be written.
        drafts : list of ndarray or None
            ``[n]`` int64 of each sequence, without a token that is barred or ends it; None: its row is not looked at.
        """
        every = rows.new_full((len(rows), _longest(drafts) + 1, rows.shape[1]), -1)
        self.fill(every, drafts)
        for b, draft in enumerate(drafts):
            if draft is not None:
                rows[b] = every[b, len(draft)]

    @abstractmethod
    def commit(self, tokens: Drafts) -> None:
        """Take note of what the step emitted, the end of a sequence included: ``[n]`` int64 new tokens of each."""


def _longest(drafts: SomeDrafts) -> int:
    return max((len(draft) for draft in drafts if draft is not None), default=0)


def allowed(rows: Tensor, ids: Tensor) -> Tensor:
    """Whether the bits of `ids` ``[n]`` int64 are 1 in rows ``[..., words]``: ``[..., n]`` bool."""
    return (rows[..., ids // 32] >> (ids % 32).to(torch.int32)) & 1 != 0


class Masks:
    """What a grammar allows after the texts of a `generate` call and after their drafts; asks for each row once a step.

    Parameters
    ----------
    grammar : Grammar
    vocab_size : int
        The target's.
    ends : Tensor, optional
        ``[num_eos]`` int64 ids that end a sequence: nothing follows them.
    """

    def __init__(self, grammar: Grammar, vocab_size: int, ends: Tensor | None = None) -> None:
        self._grammar, self._vocab_size = grammar, vocab_size
        self._ends = frozenset(() if ends is None else ends.tolist())
        words = (vocab_size + 31) // 32
        self._real = torch.full((words,), -1, dtype=torch.int32, device="cpu")  # the bits that stand for ids
        if vocab_size % 32:
            self._real[-1] = (1 << vocab_size % 32) - 1
        self._rows: dict[tuple[int, bytes], Tensor] = {}

    def after(self, drafts: SomeDrafts, among: Tensor | None = None) -> tuple[Tensor, NDArray[np.bool_]]:
        """What may follow the whole of each draft.

        Parameters
        ----------
        drafts : list of ndarray or None
            ``[n]`` int64 of each sequence, without a token that is barred; None: not asked about.
        among : Tensor, optional
            ``[m]`` int64 on the CPU: the only ids considered.

        Returns
        -------
        tuple
            ``[batch, ceil(vocab / 32)]`` int32 on the CPU, and ``[batch]`` bool: whether any of them may follow. Where
            none may, or nothing was asked, the row has all its bits.
        """
        rows = self._after(drafts)
        some = ((rows & self._real) != 0).any(1) if among is None else allowed(rows, among).any(1)
        follows = some.numpy() & np.array([self._key(b, d) is not None for b, d in enumerate(drafts)])
        rows[torch.from_numpy(~follows)] = -1
        return rows, follows

    def along(
        self, tokens: NDArray[np.int64], limits: NDArray[np.int64], parents: NDArray[np.int64] | None = None
    ) -> tuple[Tensor, NDArray[np.bool_], NDArray[np.bool_]]:
        """What may follow each node of drafted trees, chains where there are no `parents`; node 0 is the text's last
        token.

        Parameters
        ----------
        tokens : ndarray
            ``[batch, num_nodes - 1]`` int64 of the other nodes; −1 where there is none.
        limits : ndarray
            ``[batch]`` int64: nodes that lie deeper are not looked at; −1: neither is the text.
        parents : ndarray, optional
            ``[batch, num_nodes]`` int64: each before its children.

        Returns
        -------
        tuple
            ``[batch, num_nodes, ceil(vocab / 32)]`` int32 on the CPU, and two of ``[batch, num_nodes]`` bool: which
            nodes can be reached, i.e. neither their tokens nor those above are barred (all other rows have all their
            bits); and which come right behind a row that bars every id.
        """
        batch, num_nodes = len(tokens), tokens.shape[1] + 1
        if parents is None:
            parents = np.broadcast_to(np.arange(-1, num_nodes - 1), (batch, num_nodes))
            # Engines have no row to give after an end, and may refuse to be asked for one.
            real = (tokens >= 0) & (tokens < self._vocab_size) & ~np.isin(tokens, list(self._ends))
            lengths = np.minimum(real.cumprod(1).sum(1), limits)
            self._ask([None if n < 0 else row[:n] for row, n in zip(tokens, lengths, strict=True)])
        rows = torch.full((batch, num_nodes, len(self._real)), -1, dtype=torch.int32, device="cpu")
        bits, every = rows.numpy(), self._real.numpy()
        behind = np.zeros((batch, num_nodes), dtype=np.bool_)
        paths: list[SomeDrafts] = [[None if limit < 0 else tokens[b, :0] for b, limit in enumerate(limits)]]
        rows[:, 0] = self._after(paths[0])
        for node in range(1, num_nodes):
            path: SomeDrafts = [None] * batch
            for b, (token, parent) in enumerate(
                zip(tokens[:, node - 1].tolist(), parents[:, node].tolist(), strict=True)
            ):
                above = paths[parent][b] if parent >= 0 else None
                if above is None or self._key(b, above) is None or len(above) >= limits[b]:
                    continue
                behind[b, node] = not (bits[b, parent] & every).any()
                if 0 <= token < self._vocab_size and bits[b, parent, token // 32] >> token % 32 & 1:
                    path[b] = np.append(above, token)
            paths.append(path)
            rows[:, node] = self._after(path)
        return rows, np.array([[path is not None for path in column] for column in paths]).T, behind

    def commit(self, tokens: Drafts) -> None:
        """As `Grammar.commit`."""
        self._rows.clear()
        self._grammar.commit(tokens)

    def _key(self, sequence: int, draft: np.ndarray | None) -> tuple[int, bytes] | None:
        """The key of the row after `draft`; None where there is no row to ask for."""
        if draft is None or not self._ends.isdisjoint(draft.tolist()):
            return None
        return sequence, draft.tobytes()

    def _after(self, drafts: SomeDrafts) -> Tensor:
        """The rows as the grammar fills them, with all their bits where there is none."""
        keys = [self._key(b, draft) for b, draft in enumerate(drafts)]
        unknown = [None if key is None or key in self._rows else draft for key, draft in zip(keys, drafts, strict=True)]
        if any(draft is not None for draft in unknown):
            filled = torch.full((len(drafts), len(self._real)), -1, dtype=torch.int32, device="cpu")
            self._grammar.fill_last(filled, unknown)
            self._rows |= {
                key: row for key, row, draft in zip(keys, filled, unknown, strict=True) if key and draft is not None
            }
        blank = torch.full_like(self._real, -1)
        return torch.stack([blank if key is None else self._rows[key] for key in keys])

    def _ask(self, drafts: SomeDrafts) -> None:
        """Ask for the rows along whole drafts at once, unless those before the last are known; their tokens may be
        barred, but none ends a sequence.
        """
        unknown: SomeDrafts = [None] * len(drafts)
        several = False
        for b, draft in enumerate(drafts):
            if draft is not None:
                known = [(b, draft[:i].tobytes()) in self._rows for i in range(len(draft) + 1)]
                unknown[b] = None if all(known) else draft
                several |= not all(known[:-1])
        if not several:
            return
        size = len(drafts), _longest(unknown) + 1, len(self._real)
        rows = torch.full(size, -1, dtype=torch.int32, device="cpu")
        self._grammar.fill(rows, unknown)
        for b, draft in enumerate(unknown):
            if draft is not None:
                self._rows |= {(b, draft[:i].tobytes()): rows[b, i] for i in range(len(draft) + 1)}
