"""How a decoding loop runs a model: feed rows at each sequence's own position, get their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, LOGIT_DTYPES, check_given, describe
from ..tree import DraftTree

PREFILL_ROWS = 512
"""Prompts are fed in pieces of this many rows, so that the mask stays small beside the cache."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a generation starts from.

    Attributes
    ----------
    tokens : Tensor
        ``[batch, longest]`` int64 decoder prompts, left-aligned (padding moved to the right and set to 0).
    lengths : Tensor
        ``[batch]`` int64, on the device, >= 1.
    host_tokens : list of ndarray
        The same prompts on the host, one int64 array a sequence, without padding.
    source_tokens, source_mask : Tensor or None
        ``[batch, source]`` ids and mask of the encoder's input; None for a decoder-only model.
    host_source : list of ndarray or None
        The encoder's input on the host, without padding.
    """

    tokens: Tensor
    lengths: Tensor
    host_tokens: list[np.ndarray]
    source_tokens: Tensor | None = None
    source_mask: Tensor | None = None
    host_source: list[np.ndarray] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest decoder prompt."""
        return self.tokens.shape[1]

    @property
    def last_piece(self) -> int | None:
        """Where the last piece that `Runner.prefill` feeds begins; None: there is none, or not all prompts reach it."""
        first = (self.longest - 2) // PREFILL_ROWS * PREFILL_ROWS
        return first if first >= 0 and min(map(len, self.host_tokens)) > first else None

    def up_to(self, length: int) -> Prompt:
        """The first `length` tokens of each."""
        host_tokens = [one[:length] for one in self.host_tokens]
        return replace(
            self, tokens=self.tokens[:, :length], lengths=self.lengths.clamp(max=length), host_tokens=host_tokens
        )

    def clamped(self, vocab: int) -> Prompt:
        """As a model with `vocab` ids reads it: ids beyond them become its last one."""
        source, host_source = self.source_tokens, self.host_source
        return replace(
            self,
            tokens=self.tokens.clamp(max=vocab - 1),
            host_tokens=[one.clip(max=vocab - 1) for one in self.host_tokens],
            source_tokens=None if source is None else source.clamp(max=vocab - 1),
            host_source=None if host_source is None else [one.clip(max=vocab - 1) for one in host_source],
        )


class Runner(ABC):
    """A model as the loops see it. Subclass it to decode with something that is not a transformers model.

    Sequence `b`'s row at position `i` must attend to that sequence's rows ``0..i`` as last written, and to nothing
    else: rows are overwritten when rejected draft tokens are replaced.

    Attributes
    ----------
    name : str
        For messages.
    vocab_size : int
    device : torch.device
        As on its tensors: a GPU with its index.
    max_length : int or None
        Longest sequence the model can hold; None: no limit. Padded drafts and trees are fed past it, so clamp look-ups
        by position: nobody looks at those rows' logits.
    decoder_start : int or None
        None for a decoder-only model; else the id that starts the decoder of an encoder-decoder.
    capturable : bool
        True: `forward` may be captured in a CUDA graph. It then works on the device alone, on the values of its tensor
        arguments and on buffers that stay where they are until `finish`, and what it does on the host depends on the
        shapes, `bound` and `need_logits` alone: a replay does not call it.
    takes_trees : bool
        True: `forward_tree` and `keep_path` work.
    gives_rows : bool
        True: `forward_rows` works. Then the first step reads the last part of the prompts, which saves a forward.
    num_embeddings : int or None
        Ids that it can read, which may be more than it gives logits for; None: all of the target's.
    hidden_size : int or None
        Width of the hidden states that `forward_tree` gives; None: it gives none.
    end_ids : tuple of int
        Ids that end a sequence where the caller names none.
    padding_id : int
        Fills `GenerationOutput.sequences` after a sequence's end.
    prompt_padding : int or None
        Id that prompts are padded with: those that begin with it need an attention mask. None: none is known.
    """

    name: str
    vocab_size: int
    device: torch.device
    max_length: int | None = None
    decoder_start: int | None = None
    capturable: bool = False
    takes_trees: bool = False
    gives_rows: bool = False
    num_embeddings: int | None = None
    hidden_size: int | None = None
    end_ids: tuple[int, ...] = ()
    padding_id: int = 0
    prompt_padding: int | None = None

    @abstractmethod
    def start(self, prompt: Prompt, capacity: int) -> None:
        """Make room for ``prompt.lengths.numel()`` sequences of `capacity` rows each, nothing in them yet."""

    @abstractmethod
    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        """Feed `n` tokens of every sequence.

        Parameters
        ----------
        tokens : Tensor
            ``[batch, n]`` int64.
        starts : Tensor
            ``[batch]`` int64: token `i` of sequence `b` stands at position ``starts[b] + i``, which may be past
            `max_length`, but not past the `capacity` of `start`.
        bound : int
            Upper bound of ``max(starts) + n``.
        need_logits : bool
            False where only the cache is wanted.

        Returns
        -------
        Tensor or None
            ``[batch, n, vocab_size]`` logits, float32, bfloat16 or float16, on `device`; may be None if they are not
            needed.
        """

    def expect(self, real: Callable[[], Tensor]) -> None:  # noqa: B027 - of use to few
        """Called before a forward that verifies, begins a draft or continues a chain, of which not all rows are looked
        at.

        Parameters
        ----------
        real : callable
            Gives ``[batch, n]`` bool: which of the tokens that follow are a sequence's own. The others fill up shorter
            drafts and texts; their rows are not read.
        """

    def forward_rows(self, tokens: Tensor, starts: Tensor, bound: int, rows: Tensor) -> Tensor:
        """As `forward`, but multiply only some rows by the LM head.

        Parameters
        ----------
        tokens, starts, bound
            As of `forward`.
        rows : Tensor
            ``[batch, r]`` int64: of each sequence's `n` tokens, those whose logits are needed.

        Returns
        -------
        Tensor
            ``[batch, r, vocab_size]`` logits, as of `forward`.
        """
        raise NotImplementedError(f"{self.name} gives no logits of some rows alone")

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int) -> tuple[Tensor, Tensor | None]:
        """Feed a tree of tokens: each attends to what stands before the root, to its ancestors and to itself.

        Parameters
        ----------
        tokens : Tensor
            ``[batch, num_nodes]`` int64; any id where a sequence lacks a node.
        starts : Tensor
            ``[batch]`` int64: the root's position, which is also its row; node i has row ``starts + i`` and position
            ``starts + tree.position_ids[i]``.
        tree : DraftTree
        bound : int
            Upper bound of ``max(starts) + num_nodes``.

        Returns
        -------
        logits : Tensor
            ``[batch, num_nodes, vocab_size]``, as of `forward`.
        hidden : Tensor or None
            ``[batch, num_nodes, hidden_size]``, what the LM head was given; None where `hidden_size` is.
        """
        raise NotImplementedError(f"{self.name} takes no trees")

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        """After `forward_tree`: bring the rows of the accepted nodes to where a text's rows stand.

        Parameters
        ----------
        accepted_nodes : Tensor
            ``[batch, max_depth]`` int64, −1 padded, without the root: the j-th of them moves to row ``starts + 1 + j``.
        starts : Tensor
            ``[batch]`` int64, as given to `forward_tree`.
        """
        raise NotImplementedError(f"{self.name} takes no trees")

    def prefill(self, prompt: Prompt) -> None:
        """Feed every prompt token but the last, which the first decoding step feeds.

        Where `gives_rows`, `generate` leaves the last piece to that step.
        """
        for first in range(0, prompt.longest - 1, PREFILL_ROWS):
            rows = min(PREFILL_ROWS, prompt.longest - 1 - first)
            starts = torch.full_like(prompt.lengths, first)
            self.forward(prompt.tokens[:, first : first + rows], starts, first + rows, need_logits=False)

    def finish(self) -> None:  # noqa: B027 - nothing to release is a fine default
        """Release what `start` made."""

    def costs_as(self) -> tuple[object, Hashable]:
        """The key of a forward's measured cost: an object that lives as long as the model, and the model's present
        condition as far as that changes its speed.
        """
        return self, None


def forward_logits(runner: Runner, tokens: Tensor, starts: Tensor, bound: int) -> Tensor:
    """`Runner.forward` for its logits; raises unless they are as it promises."""
    return checked_logits(runner, "forward", runner.forward(tokens, starts, bound), tokens.shape)


def checked_logits(runner: Runner, method: str, logits: object, rows: torch.Size) -> Tensor:
    """`logits`, which a method of `runner` gave; raises unless ``[*rows, vocab_size]``. The ops cannot tell: to them
    any width is a vocabulary, and too few rows are the drafter's fault.
    """
    shape, names = (*rows, runner.vocab_size), ("batch", "n", "vocab_size")
    check_given(f"{runner.name}.{method}", "logits", logits, LOGIT_DTYPES, runner.device, names, shape)
    assert isinstance(logits, Tensor)
    return logits


def forward_tree(
    runner: Runner, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int
) -> tuple[Tensor, Tensor | None]:
    """`Runner.forward_tree`; raises unless it gives what it promises."""
    given, method = runner.forward_tree(tokens, starts, tree, bound), f"{runner.name}.forward_tree"
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{method}: logits must come with hidden states or None, as a pair, got {describe(given)}")
    logits, hidden = checked_logits(runner, "forward_tree", given[0], tokens.shape), given[1]
    if runner.hidden_size is not None:
        shape, names = (*tokens.shape, runner.hidden_size), ("batch", "num_nodes", "hidden_size")
        check_given(method, "hidden", hidden, FLOAT_DTYPES, runner.device, names, shape)
    return logits, hidden
