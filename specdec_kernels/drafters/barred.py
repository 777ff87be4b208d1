"""What bars a drafted token whatever its logit: no drafter need propose what cannot be emitted."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..backends.reference.processors import onto_vocab, unpacked
from ..decoding.grammar import Masks, SomeDrafts, allowed
from ..decoding.state import DecodingState
from ..flat import FlatProcessors
from ..types import PLACEHOLDER_TOKEN_ID

_Ints = NDArray[np.int64]


class Barred:
    """What processors add to ids, −inf where they bar one (not allowed, banned, an end before there are `min_tokens`),
    and what a grammar bars after a draft. Penalties are not looked at.

    Parameters
    ----------
    state : DecodingState
        What the call begins with. Looks at its device.
    device : torch.device
        Where `added` works; the others work on the CPU.
    """

    def __init__(self, state: DecodingState, device: torch.device | str = "cpu") -> None:
        self._prompt_lengths = torch.from_numpy(state.host_lengths.copy()).to(device)
        self._masks: Masks | None = state.masks
        self._bias: Tensor | None = None  # [batch, vocab]
        self._until: Tensor | None = None  # [batch, vocab]: barred while the output has fewer tokens
        if state.processors is None:
            return
        batch, vocab = state.batch_size, state.vocab_size
        lists = state.processors._lists(state.device, vocab)
        flat = FlatProcessors(None, *(None if x is None else x.to(device) for x in lists.flat))
        if flat.allowed is None and flat.bias_ids is None:
            return
        self._bias = torch.zeros(batch, vocab, dtype=torch.float32, device=device)
        if flat.allowed is not None:
            self._bias.masked_fill_(~unpacked(flat.allowed, vocab), -math.inf)
        if flat.bias_ids is not None and flat.bias_values is not None:
            self._bias += onto_vocab(flat.bias_ids, flat.bias_values, vocab)
        if flat.bias_ids is not None and flat.bias_until is not None:
            self._until = onto_vocab(flat.bias_ids, flat.bias_until, vocab).expand(batch, -1)

    @staticmethod
    def of(state: DecodingState, device: torch.device | str = "cpu") -> Barred | None:
        """None where nothing is barred or biased."""
        barred = Barred(state, device)
        return None if barred._bias is None and barred._masks is None else barred

    def added(self, ids: Tensor, lengths: Tensor, first: int = 0) -> Tensor:
        """What processors add to the logits of some ids, ``[n, m]`` float32.

        Parameters
        ----------
        ids : Tensor
            ``[n, m]`` int64 of sequences `first` and so on.
        lengths : Tensor
            ``[n, m]`` int64, or broadcast to that: tokens of a text before each.
        """
        mine = slice(first, first + len(ids))
        if self._bias is None:
            return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        bias = self._bias[mine].gather(1, ids)
        if self._until is None:
            return bias
        generated = lengths - self._prompt_lengths[mine, None]
        return bias.masked_fill(generated < self._until[mine].gather(1, ids), -math.inf)

    def after(self, drafts: SomeDrafts, ids: _Ints, lengths: _Ints) -> NDArray[np.float32]:
        """What is added to the logits of `ids` after a draft of each sequence, ``[batch, n]``.

        Parameters
        ----------
        drafts : list of ndarray or None
            As of `Masks.after`.
        ids : ndarray
            ``[n]`` int64.
        lengths : ndarray
            ``[batch]`` int64: tokens of each text and its draft.
        """
        of_each = torch.from_numpy(ids)
        bias = self.added(of_each.expand(len(drafts), -1), torch.from_numpy(lengths)[:, None])
        if self._masks is not None:
            rows, follows = self._masks.after(drafts)
            bias = bias.masked_fill(~allowed(rows, of_each) | ~torch.from_numpy(follows)[:, None], -math.inf)
        return bias.numpy()

    def cut(self, tokens: _Ints, lengths: _Ints, first: int = 0) -> _Ints:
        """Drafts ``[n, width]`` up to the first token that processors bar, then −1.

        Parameters
        ----------
        tokens : ndarray
            Of sequences `first` and so on; −1 where there is none.
        lengths : ndarray
            ``[n]`` int64: tokens of each text before its draft.
        """
        positions = torch.from_numpy(lengths)[:, None] + torch.arange(tokens.shape[1], device="cpu")
        added = self.added(torch.from_numpy(tokens).clamp_min(0), positions, first)
        return np.where(added.isneginf().numpy().cumsum(1) > 0, PLACEHOLDER_TOKEN_ID, tokens)

    def prune(self, tokens: _Ints, limits: _Ints, parents: _Ints | None = None) -> _Ints:
        """Drafts of all sequences without what a grammar bars, and what follows it; parameters as of `Masks.along`."""
        if self._masks is None:
            return tokens
        drafted = (tokens >= 0).any(1)  # a sequence without a draft may have ended
        _, reached, _ = self._masks.along(tokens, np.where(drafted, limits, -1), parents)
        return np.where(reached[:, 1:], tokens, PLACEHOLDER_TOKEN_ID)
