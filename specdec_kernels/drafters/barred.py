"""What processors bar whatever the logits are: no drafter on the host need propose it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..decoding.state import DecodingState
from ..processors import FlatProcessors
from ..types import PLACEHOLDER_TOKEN_ID

_Ints = NDArray[np.int64]


class Barred:
    """The ids that sequences cannot emit: not allowed, banned, or ends before there are `min_tokens`.

    Parameters
    ----------
    flat : FlatProcessors
        On the CPU.
    prompt_lengths : ndarray
        ``[batch]`` int64.
    """

    def __init__(self, flat: FlatProcessors, prompt_lengths: _Ints) -> None:
        batch = len(prompt_lengths)

        def of_each(lists: torch.Tensor | None) -> np.ndarray | None:
            return None if lists is None else np.broadcast_to(lists.numpy(), (batch, lists.shape[1]))

        self._allowed, self._ids = of_each(flat.allowed), of_each(flat.bias_ids)
        self._values, self._until = of_each(flat.bias_values), of_each(flat.bias_until)
        self._prompt_lengths = prompt_lengths

    @staticmethod
    def of(state: DecodingState) -> Barred | None:
        """Of what `state` begins with; None where nothing can be barred. Looks at the device, once a call."""
        if state.processors is None:
            return None
        lists = state.processors._lists(state.device, state.vocab_size)
        flat = FlatProcessors(None, *(x if x is None else x.cpu() for x in lists.flat))
        if flat.allowed is None and flat.bias_ids is None:
            return None
        return Barred(flat, state.host_lengths.copy())

    def cut(self, tokens: _Ints, lengths: _Ints, first: int = 0) -> _Ints:
        """Drafts ``[n, width]`` up to the first token that is barred, then −1.

        Parameters
        ----------
        tokens : ndarray
            Of sequences `first` and so on; −1 where there is none.
        lengths : ndarray
            ``[n]`` int64: tokens of each text before its draft.
        """
        mine = slice(first, first + len(tokens))
        ids = tokens.clip(0)
        barred = np.zeros(tokens.shape, dtype=bool)
        if self._allowed is not None:
            words = np.take_along_axis(self._allowed[mine], ids // 32, 1)
            barred |= ((words >> (ids % 32)) & 1) == 0
        if self._ids is not None and self._values is not None:
            never = np.isneginf(self._values[mine])[:, None]
            if self._until is not None:
                generated = (lengths - self._prompt_lengths[mine])[:, None] + np.arange(tokens.shape[1])
                never = never | (generated[..., None] < self._until[mine][:, None])
            barred |= ((ids[..., None] == self._ids[mine][:, None]) & never).any(-1)
        return np.where(barred.cumsum(1) > 0, PLACEHOLDER_TOKEN_ID, tokens)
