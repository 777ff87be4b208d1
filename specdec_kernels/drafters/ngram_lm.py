"""A count-based language model as the drafter: n-grams of a body of text, and of the sequence itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import check_instance, check_int, check_number, check_sequence
from ..decoding.state import DecodingState, StepResult
from ..ops.noise_keys import noise_keys
from ..ops.sample import sample
from ..sampling import SamplingParams
from ..types import TokenMap
from .barred import Barred
from .base import Draft, Drafter
from .ngram_table import NgramTable

_Array = NDArray[np.int64]
_MOST_BIAS = 500.0
"""Its exponential is finite."""


class NgramLMDrafter(Drafter):
    """Drafts with an n-gram language model that learns from the sequence as it grows.

    Its distribution interpolates counts from the longest context down to the shortest (Witten & Bell 1991): first those
    of the sequence itself, then those of a fixed table. It costs no forward, and proposes at every step, also where
    nothing can be looked up.

    With acceptance "match" a token is drawn with the very noise that the verifier uses at its position, and so is
    accepted more often than any single guess would be; the distribution is sharpened for that, as its counts are
    smoother than a language model. Otherwise the likeliest token is proposed, a one-hot draft.

    What `processors` or a `grammar` bar has no share of the distribution, and a `logit_bias` changes an id's as it does
    the target's, before it is sharpened. Penalties are not looked at: counts are too smooth for what is meant for a
    target's logits.

    Works on the host, on the tokens of the stop check.

    Parameters
    ----------
    table : NgramTable, optional
        Counts of a text in the target's tokens; None: of the sequence alone.
    order : int
        Longest context looked up in the sequence, in tokens, >= 1.
    sharpness : float
        Exponent of the distribution before it is drawn from, > 0; 1 leaves it as counted.

    Raises
    ------
    ValueError, TypeError
        A parameter out of its range, or of another type; in `generate`, a table with ids that the target does not have.
    """

    def __init__(self, table: NgramTable | None = None, order: int = 4, sharpness: float = 2.0) -> None:
        if table is not None:
            check_instance("NgramLMDrafter", "table", table, NgramTable, "an NgramTable or None")
        check_int("NgramLMDrafter", "order", order, 1, None)
        if not check_number("NgramLMDrafter", "sharpness", sharpness, -math.inf, math.inf) > 0:
            raise ValueError(f"NgramLMDrafter: sharpness must be > 0, got {sharpness}")
        self.table, self.order, self.sharpness = table, order, sharpness
        self._texts = np.empty((0, 0), dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)
        self._barred: Barred | None = None
        self._noise: tuple[Tensor, SamplingParams] | None = None  # seeds and temperature, on the host

    def start(self, state: DecodingState) -> None:
        """Take in the prompts."""
        largest = max(int(order.ids.max(initial=-1)) for order in self.table.orders) if self.table else -1
        if largest >= state.vocab_size:
            raise ValueError(
                f"generate: the drafter's table must be of the target's tokenizer, but it has id {largest} and the "
                f"target's vocabulary {state.vocab_size} ids"
            )
        prompts = state.prompt.host_tokens
        self._lengths = np.array([len(prompt) for prompt in prompts])
        self._texts = np.full((len(prompts), state.capacity), -1, dtype=np.int64)
        for text, prompt in zip(self._texts, prompts, strict=True):
            text[: len(prompt)] = prompt
        self._barred = Barred.of(state)
        self._noise = None
        if state.acceptance == "match" and not state.sampling.is_greedy:
            temperature = state.sampling.temperature
            if isinstance(temperature, Tensor):
                temperature = temperature.cpu()
            self._noise = state.seeds.cpu(), SamplingParams(temperature=temperature / self.sharpness)

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """One-hot drafts, as far as the counts go."""
        lengths, open_rows = self._lengths.copy(), state.host_active.copy()
        keys, params = None, SamplingParams()
        if self._noise is not None:
            seeds, params = self._noise
            keys = noise_keys(seeds, torch.from_numpy(lengths)[:, None] + torch.arange(num_tokens))
        drafted = np.full((state.batch_size, num_tokens), -1, dtype=np.int64)
        for i in range(num_tokens):
            rows, ids, weights = self._law(self._texts, lengths, open_rows)
            candidates, columns = np.unique(ids, return_inverse=True)
            law = np.zeros((state.batch_size, len(candidates)))
            np.add.at(law, (rows, columns), weights)
            if self._barred is not None:
                asked = open_rows & (i < state.host_limits)
                drafts = [draft[:i] if one else None for draft, one in zip(drafted, asked, strict=True)]
                law *= np.exp(self._barred.after(drafts, candidates, lengths).clip(max=_MOST_BIAS), dtype=np.float64)
            open_rows &= law.any(1)
            if not open_rows.any():
                break
            if keys is None or len(candidates) == 1:
                tokens = candidates[law.argmax(1)]
            else:
                tokens = _draw(law, candidates, keys[:, i : i + 1], params)
            drafted[open_rows, i] = tokens[open_rows]
            self._texts[open_rows, lengths[open_rows]] = tokens[open_rows]  # written over by what is emitted
            lengths += open_rows
        return Draft(torch.from_numpy(drafted).to(state.device, non_blocking=True))

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Take in what was emitted."""
        for text, length, emitted, count in zip(
            self._texts, self._lengths, result.tokens, result.num_tokens, strict=True
        ):
            text[length : length + count] = emitted[:count]
        self._lengths += result.num_tokens

    def finish(self) -> None:
        self._texts, self._noise = np.empty((0, 0), dtype=np.int64), None

    def law_after(self, text: Sequence[int]) -> tuple[_Array, NDArray[np.float64]]:
        """The distribution of the token after `text` as it is counted, as terms: ids ``[n]`` int64, perhaps repeated,
        and what each adds ``[n]`` float64; what is missing to 1 is for tokens never seen.
        """
        check_sequence("NgramLMDrafter", "text", text, int, "integers")
        for token in text:
            check_int("NgramLMDrafter", "text", token, 0, 2**31 - 1)
        _, ids, weights = self._law(np.array([text], dtype=np.int64), np.array([len(text)]), np.array([True]))
        return ids, weights

    def _law(
        self, texts: _Array, lengths: _Array, open_rows: NDArray[np.bool_]
    ) -> tuple[_Array, _Array, NDArray[np.float64]]:
        """The distribution of the token after the first `lengths` ones of each of `texts` whose row is open, as terms
        to add up, not normalised: row, id and weight of each.
        """
        found: list[_Array] = []
        if self.table:
            columns = lengths[:, None] + np.arange(-len(self.table.orders), 0)
            tails = np.where(columns >= 0, np.take_along_axis(texts, np.maximum(columns, 0), 1), -1)
            found = self.table.find(tails)
        rows, ids, weights = [], [], []
        for row in np.flatnonzero(open_rows).tolist():
            rest = 1.0  # of the mass: what the contexts so far leave to shorter ones
            for following, kinds in self._continuations(texts[row, : lengths[row]]):
                share = rest / (len(following) + kinds)
                ids.append(following)
                weights.append(np.full(len(following), share))
                rows.append(np.full(len(following), row))
                rest = share * kinds
            for at, order in zip(reversed(found), reversed(self.table.orders if self.table else []), strict=True):
                context = at[row]
                if context < 0:
                    continue
                kinds = int(order.kinds[context])
                share = rest / (int(order.totals[context]) + kinds)
                entries = slice(order.starts[context], order.starts[context + 1])
                ids.append(order.ids[entries].astype(np.int64))
                weights.append(share * order.counts[entries])
                rows.append(np.full(len(ids[-1]), row))
                rest = share * kinds
        if not ids:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        return np.concatenate(rows), np.concatenate(ids), np.concatenate(weights)

    def _continuations(self, text: _Array) -> list[tuple[_Array, int]]:
        """What followed a text's last tokens before, longest context first, and how many kinds of it."""
        ends = np.flatnonzero(text[:-1] == text[-1])
        found = []
        for order in range(1, self.order + 1):
            if order > 1:
                ends = ends[ends >= order - 1]
                ends = ends[text[ends - order + 1] == text[len(text) - order]]
            if not len(ends):
                break
            following = text[ends + 1]
            found.append((following, len(set(following.tolist()))))
        return found[::-1]


def _draw(law: NDArray[np.float64], candidates: _Array, keys: Tensor, params: SamplingParams) -> _Array:
    """``[batch]`` ids drawn with the verifier's noise; an empty row of `law` draws anything."""
    law[~law.any(1)] = 1.0
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(law).astype(np.float32))
    token_map = TokenMap(torch.from_numpy(candidates))
    return sample(logits[:, None], params, noise_keys=keys, draft_token_map=token_map).token[:, 0].numpy()
