"""A count-based language model as the drafter: n-grams of a body of text, and of the sequence itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .._host_py import MAX_NGRAM
from ..checks import check_instance, check_int, check_number, check_sequence
from ..decoding.state import DecodingState, StepResult
from ..host import NgramIndex, gumbel_noise
from ..ops.noise_keys import noise_keys
from ..types import PLACEHOLDER_TOKEN_ID
from .barred import Barred
from .base import Draft, Drafter, Foresight
from .ngram_table import NgramTable

_Array = NDArray[np.int64]
_MOST_BIAS = 500.0
"""Its exponential is finite."""


class NgramLMDrafter(Drafter):
    """Drafts with an n-gram language model that learns from the sequence as it grows.

    Its distribution interpolates counts from the longest context down to the shortest (Witten & Bell 1991): first those
    of the sequence itself, then those of a fixed table. It costs no forward, and proposes wherever the last token was
    followed before, in the text or in the table.

    With acceptance "match" a token is drawn with the very noise that the verifier uses at its position, and so is
    accepted more often than any single guess would be; the distribution is sharpened for that, as its counts are
    smoother than a language model. Otherwise the likeliest token is proposed, a one-hot draft.

    What `processors` or a `grammar` bar has no share of the distribution, and a `logit_bias` changes an id's as it does
    the target's, before it is sharpened. Penalties are ignored: they are meant for a target's logits, and counts are
    too smooth for them.

    Works on the host, on the tokens of the stop check.

    Parameters
    ----------
    table : NgramTable, optional
        Counts of a text in the target's tokens; None: of the sequence alone.
    order : int
        Longest context looked up in the sequence, in tokens, 1 … 64.
    sharpness : float
        Exponent of the distribution before it is drawn from, > 0 and finite; 1 leaves it as counted.

    Raises
    ------
    ValueError, TypeError
        A parameter out of its range, or of another type; in `generate`, a table with ids that the target does not have.
    """

    def __init__(self, table: NgramTable | None = None, order: int = 4, sharpness: float = 2.0) -> None:
        if table is not None:
            check_instance("NgramLMDrafter", "table", table, NgramTable, "an NgramTable or None")
        check_int("NgramLMDrafter", "order", order, 1, MAX_NGRAM)
        check_number("NgramLMDrafter", "sharpness", sharpness, sys.float_info.min, sys.float_info.max)
        self.table, self.order, self.sharpness = table, order, sharpness
        self._index: NgramIndex | None = None
        self._barred: Barred | None = None
        self._noise: _Noise | None = None
        self._first: _Array | None = None  # the first token of each draft, once it was asked for

    def start(self, state: DecodingState) -> None:
        """Take in the prompts."""
        largest = max(int(order.ids.max(initial=-1)) for order in self.table.orders) if self.table else -1
        if largest >= state.vocab_size:
            raise ValueError(
                f"generate: the drafter's table must be of the target's tokenizer, but it has id {largest} and the "
                f"target's vocabulary {state.vocab_size} ids"
            )
        self._index = NgramIndex(state.batch_size, self.order)
        for sequence, prompt in enumerate(state.prompt.host_tokens):
            self._index.append(sequence, prompt)
        self._barred = Barred.of(state)
        self._noise = None
        if state.acceptance == "match" and not state.sampling.is_greedy:
            self._noise = _Noise(state, self.sharpness)
        self._first = None

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """One-hot drafts, as wide as the longest that the counts give."""
        assert self._index is not None
        lengths = [self._index.length(sequence) for sequence in range(state.batch_size)]
        drafted = np.full((state.batch_size, num_tokens), PLACEHOLDER_TOKEN_ID, dtype=np.int64)
        try:
            for i in range(num_tokens):
                if i > 0:
                    self._index.append_batch(drafted[:, i - 1 : i], (drafted[:, i - 1] >= 0).astype(np.int64))
                drafted[:, i] = self._first_token(state) if i == 0 else self._next(state, drafted[:, :i])
                if not (drafted[:, i] >= 0).any():
                    break
        finally:
            for sequence, length in enumerate(lengths):
                self._index.truncate(sequence, length)
        widest = int((drafted >= 0).sum(1).max(initial=0))
        return Draft(torch.from_numpy(drafted[:, :widest]).to(state.device, non_blocking=True))

    def foresee(self, state: DecodingState) -> Foresight:
        """The first token of a draft, and the length of the longest context of the sequence itself that stood there
        before.
        """
        assert self._index is not None
        tokens = np.where(state.host_limits > 0, self._first_token(state), PLACEHOLDER_TOKEN_ID)
        return Foresight(tokens, self._index.matched())

    def _first_token(self, state: DecodingState) -> _Array:
        if self._first is None:
            self._first = self._next(state, np.empty((state.batch_size, 0), dtype=np.int64))
        return self._first

    def _next(self, state: DecodingState, drafted: _Array) -> _Array:
        """``[batch]``: the token to draft after these drafted ones; −1 where there is none, or the draft has ended."""
        assert self._index is not None
        goes_on = state.host_active & (drafted[:, -1:] >= 0).all(1)
        candidates, law = self._index.distribution(self.table, limits=goes_on.astype(np.int64))
        lengths = state.host_lengths + drafted.shape[1]
        if self._barred is not None and len(candidates):
            asked = goes_on & (drafted.shape[1] < state.host_limits)
            drafts = [draft if one else None for draft, one in zip(drafted, asked, strict=True)]
            law *= np.exp(self._barred.after(drafts, candidates, lengths).clip(max=_MOST_BIAS), dtype=np.float64)
        goes_on &= law.any(1)
        if not goes_on.any():
            return np.full(len(goes_on), PLACEHOLDER_TOKEN_ID)
        scores = law if self._noise is None else self._noise.added(law, candidates, lengths)
        return np.where(goes_on, candidates[scores.argmax(1)], PLACEHOLDER_TOKEN_ID)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Take in what was emitted."""
        assert self._index is not None
        self._index.append_batch(np.ascontiguousarray(result.tokens), result.num_tokens)
        self._first = None

    def finish(self) -> None:
        self._index = self._noise = self._first = self._barred = None

    def law_after(self, text: Sequence[int]) -> tuple[_Array, NDArray[np.float64]]:
        """The distribution of the token after `text` as it is counted: ids ``[n]`` int64, ascending, and the
        probability of each, ``[n]`` float64; the remainder to 1 is for tokens never seen.

        Raises
        ------
        TypeError, ValueError
            Not a sequence of integers, an empty one, or an id outside [0, 2**31).
        """
        check_sequence("NgramLMDrafter", "text", text, int, "integers")
        for token in text:
            check_int("NgramLMDrafter", "text", token, 0, 2**31 - 1)
        index = NgramIndex(1, self.order)
        index.append(0, np.array(text, dtype=np.int64))
        ids, law = index.distribution(self.table)
        return ids, law[0]


class _Noise:
    """What a verifier that draws by noise adds at each position of a call.

    Parameters
    ----------
    state : DecodingState
        What the call begins with.
    sharpness : float
        Of `NgramLMDrafter`.
    """

    def __init__(self, state: DecodingState, sharpness: float) -> None:
        positions = torch.arange(state.capacity, device="cpu").expand(state.batch_size, -1)
        self._keys = noise_keys(state.seeds.cpu(), positions).numpy()  # [batch, capacity]
        given = state.sampling.temperature
        temperature = given.double().cpu().numpy() if isinstance(given, torch.Tensor) else np.float64(given)
        with np.errstate(divide="ignore"):
            self._exponent = np.broadcast_to(sharpness / temperature, state.batch_size)

    def added(self, law: NDArray[np.float64], candidates: _Array, lengths: _Array) -> NDArray[np.float64]:
        """Scores whose largest is drawn at these positions; where decoding is greedy, the likeliest one's."""
        rows, columns = law.nonzero()
        with np.errstate(invalid="ignore", over="ignore"):  # where decoding is greedy, the exponent is infinite
            drawn = np.log(law[rows, columns] / law.max(1)[rows]) * self._exponent[rows]
        drawn += gumbel_noise(self._keys[rows, lengths[rows]], candidates[columns])
        scores = np.full(law.shape, -np.inf)
        scores[rows, columns] = drawn
        return np.where(np.isfinite(self._exponent)[:, None], scores, law)
