"""What transformers' users see of every token: stopping criteria, streamers, scores, states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .processors import ProcessedRunner, Processor
from .states import Columns, States


class Follower:
    """Looks at each token as plain generation would: `generate` calls it after every step.

    Parameters
    ----------
    prompts : Tensor
        ``[batch, prompt]`` int64, as given, padding included.
    max_new_tokens : int
    criteria : sequence of StoppingCriteria
        Those that the loop does not know itself; each is called with one sequence, ``[1, length]``, for every token.
    ends : list of int
        Ids that end a sequence.
    alone : bool
        Each sequence ends by itself; else all go on until each has met a criterion, as in transformers where none of
        the criteria has ids that end a sequence.
    pad : int
        Follows a sequence's end.
    streamer : BaseStreamer or None
        Given a column ``[batch]`` at a time, as soon as every sequence has its token for it.
    runner : ProcessedRunner or None
        The target, if its rows are wanted.
    folded : sequence of LogitsProcessor
        What turns the runner's rows into scores.
    output_scores, output_logits : bool
        Keep the rows of every token.
    states : States or None
        Told which row every token was drawn from.
    """

    def __init__(
        self, prompts: Tensor, max_new_tokens: int, criteria: Sequence[Any], ends: list[int], alone: bool, pad: int,
        streamer: Any, runner: ProcessedRunner | None, folded: Sequence[Processor], output_scores: bool,
        output_logits: bool, states: States | None,
    ) -> None:  # fmt: skip
        batch, self._prompt = prompts.shape
        self._text = torch.nn.functional.pad(prompts, (0, max_new_tokens), value=pad)
        self._most, self._ends, self._alone = max_new_tokens, frozenset(ends), alone
        self._criteria = StoppingCriteriaList(criteria)
        self._streamer, self._streamed = streamer, 0
        self._runner, self._warp = runner, folded
        self._scores = Columns(batch) if output_scores else None
        self._logits = Columns(batch) if output_logits else None
        self._states = states
        self._counts = [0] * batch
        # New tokens of each sequence before its first row that cannot be sampled from; where criteria end nothing, and
        # where there are no rows to look at, that is not asked.
        self._sound = [max_new_tokens if criteria and runner is not None else -1] * batch
        self._done: list[int | None] = [None] * batch  # how many new tokens it had when it met an end
        self._cut = [False] * batch  # whether a step's tokens went on behind it

    def __call__(self, tokens: list[np.ndarray]) -> list[int | None]:
        """Take in a step's new tokens; for each sequence how many of them it keeps, where it ends, or None."""
        kept: list[int | None] = [None] * len(tokens)
        for b, new in enumerate(tokens):
            for i, token in enumerate(new.tolist()):
                self._take(b, i, token)
                if self._alone and self._done[b] is not None:
                    kept[b], self._cut[b] = i + 1, i + 1 < len(new)
                    break
        if not self._alone and None not in self._done:
            kept = [len(new) if n >= self.width else None for new, n in zip(tokens, self._counts, strict=True)]
            self._cut = [n > self.width for n in self._counts]
        if self._alone and self._runner is not None:
            self._runner.ended[:] = [done is not None for done in self._done]
        if self._streamer is not None:
            self._stream()
        return kept

    @property
    def width(self) -> int:
        """New tokens of the longest sequence; anything past that is ignored."""
        return max(n if done is None else done for n, done in zip(self._counts, self._done, strict=True))

    def scores(self) -> tuple[Tensor, ...] | None:
        """One ``[batch, vocab]`` float32 tensor a column: the processed logits; zeros after a sequence's end."""
        return None if self._scores is None else self._scores.first(self.width)

    def logits(self) -> tuple[Tensor, ...] | None:
        """The same of the logits as the model gave them."""
        return None if self._logits is None else self._logits.first(self.width)

    def states(self) -> dict[str, Any]:
        """Hidden states and attentions that were asked for, by their names in a model's output."""
        return {} if self._states is None else self._states.outputs(self.width)

    def judged(self, status: Tensor) -> Tensor:
        """The status of the whole call, without flags of rows that a criterion has cut off, as far as that is known."""
        behind = [cut and n >= self.width for cut, n in zip(self._cut, self._sound, strict=True)]
        return status.masked_fill(torch.tensor(behind, device=status.device), 0)

    def _take(self, b: int, i: int, token: int) -> None:
        """The next token of sequence `b`, drawn from row `i` of the last forward."""
        t = self._counts[b]
        length = self._prompt + t + 1
        self._text[b, length - 1] = token
        self._counts[b] += 1
        if self._states is not None:
            self._states.take(b, i, t)
        if self._logits is not None:
            assert self._runner is not None
            self._logits.put(t, b, self._runner.raw[b, i].float())
        if self._scores is not None:
            assert self._runner is not None
            row = self._runner.rows[b, i : i + 1].to(torch.float32, copy=True)
            for processor in self._warp:
                row = processor(self._text[b : b + 1, : length - 1], row)
            self._scores.put(t, b, row[0])
        if self._sound[b] > t:
            assert self._runner is not None
            if not self._runner.rows[b, i].max().isfinite():
                self._sound[b] = t
        if self._done[b] is None:
            seen = None
            if self._scores is not None and self._criteria:
                seen = tuple(scores[b : b + 1] for scores in self._scores.first(t + 1))
            met = bool(self._criteria) and bool(self._criteria(self._text[b : b + 1, :length], seen)[0])
            if met or token in self._ends or self._counts[b] == self._most:
                self._done[b] = self._counts[b]

    def _stream(self) -> None:
        waiting = [n for n, done in zip(self._counts, self._done, strict=True) if done is None or not self._alone]
        ready = min([*waiting, self._most if None in self._done else self.width])
        for t in range(self._streamed, ready):
            self._streamer.put(self._text[:, self._prompt + t].cpu())
        self._streamed = max(self._streamed, ready)
