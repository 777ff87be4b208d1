"""What transformers returns of every token: tensors of the whole batch, hidden states, attention weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .models import layer_windows


class Columns:
    """One tensor per new token, of the whole batch: zeros where a sequence has ended before it."""

    def __init__(self, batch: int) -> None:
        self._batch, self._tensors = batch, list[Tensor]()

    def of(self, t: int, b: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Sequence `b`'s part, of this shape, of token `t`'s tensor, to be written to."""
        if t == len(self._tensors):
            with torch.inference_mode(False):  # else autograd could not use what is returned
                self._tensors.append(like.new_zeros(self._batch, *shape))
        return self._tensors[t][b]

    def put(self, t: int, b: int, row: Tensor) -> None:
        """Make `row` sequence `b`'s part of token `t`'s tensor."""
        self.of(t, b, row.shape, row).copy_(row)

    def first(self, count: int) -> tuple[Tensor, ...]:
        """The tensors of the first `count` tokens."""
        return tuple(self._tensors[:count])


class States:
    """Hidden states and attention weights of the rows that emitted tokens are drawn from, as plain generation has them.

    Entry t of an output is for token t: a tuple with a tensor per layer, ``[batch, rows, hidden]`` or ``[batch, heads,
    rows, keys]``. The first has a row for each column of the prompts, every other has one. The keys of the decoder's
    own attention are the columns of the text before token t, ``prompt + t`` of them; in a layer with a sliding window,
    from the second entry on, only the last of these, as many as the window holds. Those of cross attention are the
    source's columns. Rows and keys of padding are zeros, and so is what comes after a sequence's end.

    Parameters
    ----------
    config : PreTrainedConfig
        The target's.
    asked : dict
        ``output_hidden_states`` and ``output_attentions``, those that are wanted, as a model takes them.
    real : Tensor
        ``[batch, prompt]`` bool, False where the decoder's prompts are padded.

    Raises
    ------
    ValueError
        Attention weights of an implementation that gives none.
    """

    def __init__(self, config: Any, asked: dict[str, Any], real: Tensor) -> None:
        attention = config._attn_implementation
        if "output_attentions" in asked and attention != "eager":
            raise ValueError(
                f"generate: not served by specdec_kernels: output_attentions of attention implementation "
                f"{attention!r}, which gives no weights; load the model with 'eager'"
            )
        self.asked = asked
        own = "decoder_" if config.is_encoder_decoder else ""
        names = [own + option.removeprefix("output_") for option in asked]
        if own and "output_attentions" in asked:
            names.append("cross_attentions")
        self._own_attentions = own + "attentions"
        self._kept: dict[str, list[Columns]] = {name: [] for name in names}
        self._places = [row.nonzero()[:, 0] for row in real.cpu()]
        # In prompts that are padded elsewhere than on the left, a window spans more columns than its size.
        left = bool((real[:, 1:] >= real[:, :-1]).all())
        self._windows = layer_windows(config) if left else []
        self._batch, self._prompt = real.shape
        self._fed = 0  # tokens of the prompts
        self._last: dict[str, Any] = {}  # layers by name

    def hear(self, output: Any, num_rows: int, in_prompt: bool) -> None:
        """Take in what a forward gave for rows of all prompts, which come in order, or of each text's end."""
        self._last = {name: output[name] for name in self._kept}
        for name, layers in self._last.items():
            self._kept[name] = self._kept[name] or [Columns(self._batch) for _ in layers]
        if in_prompt:
            start, self._fed = self._fed, self._fed + num_rows
            for b, places in enumerate(self._places):
                if start < len(places) - 1:  # the last is fed by the first step
                    self._write(b, 0, slice(min(num_rows, len(places) - 1 - start)), start)

    def take(self, b: int, i: int, t: int) -> None:
        """Token `t` of sequence `b` was drawn from row `i` of the last forward."""
        self._write(b, t, slice(i, i + 1), len(self._places[b]) - 1 + t)

    def _write(self, b: int, t: int, rows: slice, start: int) -> None:
        """Put `rows` of the last forward, at the positions from `start` on, where token `t`'s entry has them."""
        more = torch.arange(self._prompt, self._prompt + t, device="cpu")
        columns = torch.cat([self._places[b], more])  # of each position
        for name, layers in self._last.items():
            for kept, layer in zip(self._kept[name], layers, strict=True):
                if layer is None:  # not among the indices that were asked for
                    continue
                given = layer[b, ..., rows, :]
                num_rows, at = 1, torch.zeros(1, dtype=torch.int64, device="cpu")
                if t == 0:
                    num_rows, at = self._prompt, columns[start : start + given.shape[-2]]
                width, keys = given.shape[-1], torch.arange(given.shape[-1], device="cpu")
                if name == self._own_attentions:
                    keys = columns[:width]  # a prompt's first pieces saw a shorter cache than `width` below
                    width = self._prompt + t
                entry = kept.of(t, b, (*given.shape[:-2], num_rows, width), given)
                entry[..., at[:, None], keys] = given[..., : len(keys)]

    def outputs(self, count: int) -> dict[str, tuple[tuple[Tensor | None, ...], ...]]:
        """By name, the entries of the first `count` tokens."""
        found = {}
        for name, layers in self._kept.items():
            of_layers: list[tuple[Tensor | None, ...]] = [kept.first(count) or (None,) * count for kept in layers]
            for i, window in enumerate(self._windows if name == self._own_attentions else ()):
                if window is not None:
                    first, *others = layers[i].first(count)
                    of_layers[i] = (first, *(weights[..., -window:] for weights in others))
            found[name] = tuple(zip(*of_layers, strict=True))
        return found
