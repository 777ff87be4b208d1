"""A count-based language model as the drafter: n-grams of a body of text, and of the sequence itself."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ops.noise_keys import noise_keys
from ..ops.sample import sample
from ..sampling import SamplingParams
from ..types import TokenMap
from .base import Draft, Drafter

if TYPE_CHECKING:
    from ..decoding.state import DecodingState, StepResult

_Array = NDArray[np.int64]
_KEPT = 64  # continuations kept of a context: rarer ones are hardly ever accepted
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads the hash over all bits


@dataclass(frozen=True)
class _Order:
    """The contexts of one length: context `i` owns the entries from ``starts[i]`` to ``starts[i + 1]``."""

    keys: NDArray[np.uint64]
    """``[num_contexts]`` hashes, ascending."""
    totals: NDArray[np.int32]
    """``[num_contexts]``, times that the context occurred."""
    kinds: NDArray[np.int32]
    """``[num_contexts]``, different tokens that followed it."""
    starts: _Array
    ids: NDArray[np.int32]
    """``[num_entries]``, the tokens that followed most often."""
    counts: NDArray[np.int32]


class NgramTable:
    """Which tokens followed which contexts of 1 to `order` tokens in a text, and how often.

    Parameters
    ----------
    orders : list of _Order
        Made by `from_tokens` or `load`.
    """

    def __init__(self, orders: list[_Order]) -> None:
        self.orders = orders

    @staticmethod
    def from_tokens(tokens: _Array, order: int = 4, min_count: int = 2) -> NgramTable:
        """Count a text.

        Parameters
        ----------
        tokens : ndarray
            ``[n]`` int64 ids, 0 … 2**31 − 1; documents are best parted by an id that ends a text.
        order : int
            Longest context, in tokens, >= 1.
        min_count : int
            Contexts of two and more tokens that occurred less often are left out.

        Raises
        ------
        ValueError
            Not ``[n > order]``, an id or a parameter out of its range.
        TypeError
            Not an int64 array.
        """
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int64:
            got = getattr(tokens, "dtype", type(tokens).__name__)
            raise TypeError(f"NgramTable: tokens must be an int64 array, got {got}")
        if order < 1 or min_count < 1:
            raise ValueError(f"NgramTable: order and min_count must be >= 1, got {order} and {min_count}")
        if tokens.ndim != 1 or len(tokens) <= order:
            raise ValueError(f"NgramTable: tokens must be [n > order={order}], got {list(tokens.shape)}")
        if tokens.min() < 0 or tokens.max() >= 1 << 31:
            raise ValueError("NgramTable: tokens must be ids in 0 .. 2**31 - 1")
        return NgramTable([_count(tokens, length, min_count if length > 1 else 1) for length in range(1, order + 1)])

    def save(self, path: Path) -> None:
        """Write the table to a ``.npz`` file."""
        names = _Order.__dataclass_fields__
        arrays = {f"{name}{i}": getattr(order, name) for i, order in enumerate(self.orders) for name in names}
        with path.open("wb") as file:
            np.savez(file, **arrays)

    @staticmethod
    def load(path: Path) -> NgramTable:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            Not such a file.
        """
        names = _Order.__dataclass_fields__
        try:
            with np.load(path, allow_pickle=False) as file:
                count = len(file.files) // len(names)
                return NgramTable([_Order(*(file[f"{name}{i}"] for name in names)) for i in range(count)])
        except (KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"NgramTable: {path} is not a table: {error}") from error

    def find(self, tails: _Array) -> list[_Array]:
        """Where the ends of some texts stand in the table.

        Parameters
        ----------
        tails : ndarray
            ``[batch, order]`` int64, the last tokens of each text.

        Returns
        -------
        list of ndarray
            For each context length from 1: ``[batch]`` int64 indices of contexts, −1 where there is none.
        """
        found = []
        for length, order in enumerate(self.orders, start=1):
            keys = _hash([tails[:, -length + i] for i in range(length)])
            at = np.searchsorted(order.keys, keys)
            if not len(order.keys):
                found.append(np.full_like(at, -1))
                continue
            found.append(np.where(order.keys.take(at, mode="clip") == keys, at, -1))
        return found


def _hash(columns: list[_Array]) -> NDArray[np.uint64]:
    """One number for the tokens in each row of `columns`; it takes 2**32 contexts to make a clash likely."""
    key = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        key = (key ^ column.astype(np.uint64)) * _MULTIPLIER  # wraps around
        key ^= key >> np.uint64(29)
    return key


def _count(tokens: _Array, length: int, min_count: int) -> _Order:
    size = len(tokens) - length
    keys, following = _hash([tokens[i : i + size] for i in range(length)]), tokens[length:].astype(np.int32)
    order = np.lexsort((following, keys))
    keys, following = keys[order], following[order]
    new_context = np.r_[True, keys[1:] != keys[:-1]]
    new_pair = new_context | np.r_[True, following[1:] != following[:-1]]
    pairs = np.flatnonzero(new_pair)
    counts = np.diff(np.r_[pairs, size])
    context = np.cumsum(new_context)[pairs] - 1  # of each pair
    keys, following = keys[new_context], following[pairs]
    totals = np.bincount(context, weights=counts).astype(np.int64)
    kinds = np.bincount(context)

    best_first = np.lexsort((following, -counts, context))
    following, counts, context = following[best_first], counts[best_first], context[best_first]
    rank = np.arange(len(context)) - np.searchsorted(context, context)  # within its context
    kept = (rank < _KEPT) & (totals[context] >= min_count)
    often = totals >= min_count
    entries = np.minimum(kinds, _KEPT)[often]
    return _Order(
        keys[often],
        totals[often].astype(np.int32),
        kinds[often].astype(np.int32),
        np.r_[0, np.cumsum(entries)],
        following[kept],
        counts[kept].astype(np.int32),
    )


class NgramLMDrafter(Drafter):
    """Drafts with an n-gram language model that learns from the sequence as it grows.

    The law interpolates counts from the longest context down to the shortest (Witten & Bell 1991): first those of the
    sequence itself, then those of a fixed table. It costs no forward, and proposes at every step, also where nothing
    can be looked up.

    With acceptance "match" a token is drawn with the very noise that the verifier uses at its position, and so is
    accepted more often than any single guess would be; the law is sharpened for that, as its counts are smoother than a
    language model. Otherwise the likeliest token is proposed, a one-hot draft.

    Works on the host, on the tokens of the stop check.

    Parameters
    ----------
    table : NgramTable, optional
        Counts of a text in the target's tokens; None: of the sequence alone.
    order : int
        Longest context looked up in the sequence, in tokens, >= 1.
    sharpness : float
        Exponent of the law before it is drawn from, > 0; 1 leaves it as counted.

    Raises
    ------
    ValueError
        A parameter out of its range; in `generate`, a table with ids that the target does not have.
    """

    def __init__(self, table: NgramTable | None = None, order: int = 4, sharpness: float = 2.0) -> None:
        if order < 1:
            raise ValueError(f"NgramLMDrafter: order must be >= 1, got {order}")
        if not sharpness > 0:
            raise ValueError(f"NgramLMDrafter: sharpness must be > 0, got {sharpness}")
        self.table, self.order, self.sharpness = table, order, sharpness
        self._texts = np.empty((0, 0), dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)
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
        self._noise = None
        if state.acceptance == "match" and not state.sampling.is_greedy:
            temperature = state.sampling.temperature
            if isinstance(temperature, Tensor):
                temperature = temperature.cpu()
            self._noise = state.seeds.cpu(), SamplingParams(temperature=temperature / self.sharpness)

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """One-hot drafts, as far as the counts go."""
        lengths, open_rows = self._lengths.copy(), state.host_active.copy()
        keys = None
        if self._noise is not None:
            positions = torch.from_numpy(lengths)[:, None] + torch.arange(num_tokens)
            keys = noise_keys(self._noise[0], positions)
        drafted = np.full((state.batch_size, num_tokens), -1, dtype=np.int64)
        for i in range(num_tokens):
            rows, ids, weights = self._law(lengths, open_rows)
            candidates, columns = np.unique(ids, return_inverse=True)
            law = np.zeros((state.batch_size, len(candidates)))
            np.add.at(law, (rows, columns), weights)
            open_rows &= law.any(1)
            if not open_rows.any():
                break
            if keys is None or len(candidates) == 1:
                tokens = candidates[law.argmax(1)]
            else:
                tokens = self._draw(law, candidates, keys[:, i : i + 1])
            drafted[open_rows, i] = tokens[open_rows]
            self._texts[open_rows, lengths[open_rows]] = tokens[open_rows]  # written over by what is emitted
            lengths += open_rows
        return Draft(torch.from_numpy(drafted).to(state.device, non_blocking=True))

    def _draw(self, law: NDArray[np.float64], candidates: _Array, keys: Tensor) -> _Array:
        """``[batch]`` ids drawn with the verifier's noise; an empty row of `law` draws anything."""
        assert self._noise is not None
        law[~law.any(1)] = 1.0
        with np.errstate(divide="ignore"):
            logits = torch.from_numpy(np.log(law).astype(np.float32))
        token_map = TokenMap(torch.from_numpy(candidates))
        return sample(logits[:, None], self._noise[1], noise_keys=keys, draft_token_map=token_map).token[:, 0].numpy()

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
        """The law of the token after `text` as it is counted, as terms: ids ``[n]`` int64, perhaps repeated, and what
        each adds ``[n]`` float64; what is missing to 1 is for tokens never seen. Not while a `generate` is at work.
        """
        self._texts = np.array([text], dtype=np.int64)
        _, ids, weights = self._law(np.array([len(text)]), np.array([True]))
        return ids, weights

    def _law(self, lengths: _Array, open_rows: NDArray[np.bool_]) -> tuple[_Array, _Array, NDArray[np.float64]]:
        """The next token's law in every open row, as terms to add up, not normalised: row, id and weight of each."""
        found: list[_Array] = []
        if self.table:
            span = np.arange(-len(self.table.orders), 0)
            columns = np.maximum(lengths[:, None] + span, 0)
            known = lengths[:, None] + span >= 0
            tails = np.where(known, np.take_along_axis(self._texts, columns, 1), -1)
            found = self.table.find(tails)
        rows, ids, weights = [], [], []
        for row in np.flatnonzero(open_rows).tolist():
            rest = 1.0  # of the mass: what the contexts so far leave to shorter ones
            for following, kinds in self._continuations(row, int(lengths[row])):
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

    def _continuations(self, row: int, length: int) -> list[tuple[_Array, int]]:
        """What followed the sequence's last tokens before, longest context first, and how many kinds of it."""
        text = self._texts[row, :length]
        ends = np.flatnonzero(text[:-1] == text[-1])
        found = []
        for order in range(1, self.order + 1):
            if order > 1:
                ends = ends[ends >= order - 1]
                ends = ends[text[ends - order + 1] == text[length - order]]
            if not len(ends):
                break
            following = text[ends + 1]
            found.append((following, len(set(following.tolist()))))
        return found[::-1]
