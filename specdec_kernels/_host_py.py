"""The n-gram index and the noise of draws in Python: the readable specification, and what runs where the compiled
module is missing.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from .backends.reference.random import gumbel

MAX_NGRAM = 64
MAX_SEQUENCES = 2**20
MAX_TOKEN = 2**31 - 1
_SEPARATOR = -1  # stands between corpus documents; no sequence holds it, so no match spans two documents


class Counts(Protocol):
    """What is read of an `NgramTable`."""

    orders: list[Any]

    def contexts(self, text: Sequence[int]) -> list[tuple[Any, int]]: ...


class NgramIndex:
    """An incremental n-gram index over many sequences: the memory of drafters that look back.

    For every sequence it finds, in time independent of the length of the text, the longest suffix of `min_ngram` to
    `max_ngram` tokens that occurred earlier, and proposes what followed it.

    Let the text be ``x[0:n]``. The match is the largest ``L`` in ``[min_ngram, max_ngram]`` for which some
    ``e < n`` has ``x[e-L:e] == x[n-L:n]``, and of these the largest ``e``: the most recent earlier occurrence, which
    may overlap the suffix. The proposal is ``y[i] = x[e + i mod (n - e)]``: a continuation that runs into the end of
    the text goes on periodically, because a match at distance ``p`` says that the text repeats with period ``p``. A
    match in the text itself therefore always gives as many tokens as were asked for.

    A corpus (`add_corpus`) is text that every sequence may match too. The longer match wins, the sequence's own text
    at equal length. A continuation from the corpus stops at the end of its document, so it may be shorter.

    Every call is atomic: it holds the index's own lock, so threads may share an index; the order of their calls is
    theirs to arrange. An argument that is refused leaves the index as it was.

    Parameters
    ----------
    num_sequences
        Number of sequences `B`, in [1, 2**20]. All are empty at first.
    max_ngram, min_ngram
        Longest and shortest suffix looked up, in tokens; ``1 <= min_ngram <= max_ngram <= 64``.

    Raises
    ------
    ValueError
        For a parameter out of range.
    TypeError
        For a parameter that is not an integer.

    Notes
    -----
    Every gram remembers the end of its latest occurrence, and every end remembers the occurrence before it. The
    second makes `truncate` an exact undo, and lists a gram's occurrences, latest first, for `distribution`.
    """

    def __init__(self, num_sequences: SupportsIndex, max_ngram: SupportsIndex = 4, min_ngram: SupportsIndex = 1):
        self._num_sequences = check_integer("NgramIndex", "num_sequences", num_sequences, 1, MAX_SEQUENCES)
        self._max_ngram = check_integer("NgramIndex", "max_ngram", max_ngram, 1, MAX_NGRAM)
        self._min_ngram = check_integer("NgramIndex", "min_ngram", min_ngram, 1, self._max_ngram)
        self._texts = [self._empty_text() for _ in range(self._num_sequences)]
        self._corpus = self._empty_text()
        self._lock = threading.Lock()

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self._num_sequences

    @property
    def max_ngram(self) -> int:
        """Longest suffix looked up, in tokens."""
        return self._max_ngram

    @property
    def min_ngram(self) -> int:
        """Shortest suffix looked up, in tokens."""
        return self._min_ngram

    def append(self, sequence: SupportsIndex, tokens: NDArray[np.int64]) -> None:
        """Append `tokens` ([n] int64, in [0, 2**31)) to one sequence."""
        b = self._sequence("append", sequence)
        _check_array("append", "tokens", tokens, ("int64",), (None,), "[n]")
        values = tokens.tolist()
        _check_tokens("append", values)
        with self._lock:
            self._texts[b].extend(values)

    def append_batch(self, tokens: NDArray[np.int64], counts: NDArray[Any] | None = None) -> None:
        """Append to every sequence the first tokens of its row.

        Parameters
        ----------
        tokens
            [num_sequences, n] int64. What follows a row's count is not looked at (it may be -1).
        counts
            [num_sequences] int32 or int64, each in [0, n]. None: whole rows.
        """
        _check_array("append_batch", "tokens", tokens, ("int64",), (self._num_sequences, None), self._shape(", n"))
        width = tokens.shape[1]
        lengths = [width] * self._num_sequences
        if counts is not None:
            _check_array("append_batch", "counts", counts, ("int32", "int64"), (self._num_sequences,), self._shape())
            lengths = counts.tolist()
            for b, count in enumerate(lengths):
                if not 0 <= count <= width:
                    raise ValueError(f"append_batch: counts must be in [0, n={width}], got {count} at [{b}]")
        rows = [row[:count].tolist() for row, count in zip(tokens, lengths, strict=True)]
        for b, row in enumerate(rows):
            _check_tokens("append_batch", row, f"{b}, ")
        with self._lock:
            for text, row in zip(self._texts, rows, strict=True):
                text.extend(row)

    def add_corpus(self, tokens: NDArray[np.int64]) -> None:
        """Add one document ([n] int64) that all sequences may match. It stays for the life of the index."""
        _check_array("add_corpus", "tokens", tokens, ("int64",), (None,), "[n]")
        values = tokens.tolist()
        _check_tokens("add_corpus", values)
        with self._lock:
            self._corpus.extend([*values, _SEPARATOR])

    def truncate(self, sequence: SupportsIndex, length: SupportsIndex) -> None:
        """Take back the end of a sequence: it keeps its first `length` tokens. Costs as much as appending them did."""
        b = self._sequence("truncate", sequence)
        keep = check_integer("truncate", "length", length)
        with self._lock:
            text = self._texts[b]
            if not 0 <= keep <= len(text.tokens):
                raise ValueError(f"truncate: length must be in [0, {len(text.tokens)}], got {keep}")
            text.truncate(keep)

    def reset(self, sequence: SupportsIndex) -> None:
        """Empty a sequence and release its memory, so that its slot can serve another text."""
        b = self._sequence("reset", sequence)
        with self._lock:
            self._texts[b] = self._empty_text()

    def length(self, sequence: SupportsIndex) -> int:
        """Return the number of tokens in a sequence."""
        b = self._sequence("length", sequence)
        with self._lock:
            return len(self._texts[b].tokens)

    def propose(
        self,
        num_tokens: SupportsIndex,
        *,
        limits: NDArray[Any] | None = None,
        out: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Propose the continuation of every sequence.

        Parameters
        ----------
        num_tokens
            Most tokens per sequence `K`, in [0, 2**31).
        limits
            [num_sequences] int32 or int64: a lower limit for single sequences. Any value is allowed: above `K` it
            means `K`; zero or less (an idle row) means no proposal.
        out
            The pair (tokens, counts) to write into and to return, instead of new arrays.

        Returns
        -------
        tokens
            [num_sequences, K] int64: the proposal, then -1.
        counts
            [num_sequences] int32: tokens proposed; 0 where nothing matches.
        """
        width = check_integer("propose", "num_tokens", num_tokens, 0, MAX_TOKEN)
        allowed = self._limits("propose", limits, width)
        if out is None:
            tokens = np.empty((self._num_sequences, width), np.int64)
            counts = np.empty(self._num_sequences, np.int32)
        else:
            if not isinstance(out, tuple) or len(out) != 2:
                raise TypeError("propose: out must be a pair (tokens, counts) of numpy arrays")
            tokens, counts = out
            _check_array(
                "propose", "out[0]", tokens, ("int64",), (self._num_sequences, width), self._shape(f", {width}"), True
            )
            _check_array("propose", "out[1]", counts, ("int32",), (self._num_sequences,), self._shape(), True)
        with self._lock:
            for b, limit in enumerate(allowed):
                proposal = self._continuation(self._texts[b], limit) if limit else []
                tokens[b, : len(proposal)] = proposal
                tokens[b, len(proposal) :] = -1
                counts[b] = len(proposal)
        return tokens, counts

    def matched(self) -> NDArray[np.int64]:
        """Return the length of every sequence's match, in tokens ([num_sequences] int64); 0 where nothing matches."""
        with self._lock:
            return np.array([max(own[0], corpus[0]) for own, corpus in map(self._matches, self._texts)])

    def distribution(
        self, table: Counts | None = None, *, limits: NDArray[Any] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the distribution of every sequence's next token by counts: of its own text, then of `table`.

        Each context leaves to the next shorter one as much of the mass as it has seen different tokens follow, of all
        that followed (Witten & Bell 1991): from `max_ngram` tokens down to `min_ngram` in the text itself, then from
        the table's longest to its shortest. A corpus does not count. It takes as long as its contexts have occurred.

        Parameters
        ----------
        table
            An `NgramTable`, counts of another text; None: there are none.
        limits
            [num_sequences] int32 or int64: a sequence with zero or less is left out, its row 0.

        Returns
        -------
        ids
            [n] int64, ascending: all tokens that followed in any sequence.
        probs
            [num_sequences, n] float64. What a row lacks to 1 is for tokens that were never seen.
        """
        allowed = self._limits("distribution", limits, 1)
        if table is not None and not hasattr(table, "orders"):
            raise TypeError(f"distribution: table must be an NgramTable or None, got {type(table).__name__}")
        longest = 0 if table is None else len(table.orders)
        with self._lock:
            seen = [
                (text.tokens[max(len(text.tokens) - longest, 0) :], text.followers()) if wanted else ([], [])
                for text, wanted in zip(self._texts, allowed, strict=True)
            ]
        terms: list[tuple[int, int, float]] = []  # row, id, and what it adds
        for row, (end, following) in enumerate(seen):
            if not allowed[row]:
                continue
            rest = 1.0  # of the mass: what the contexts so far leave to shorter ones
            for found in reversed(following):
                kinds = len(set(found))
                share = rest / (len(found) + kinds)
                terms += [(row, token, share) for token in found]
                rest = share * kinds
            for order, context in table.contexts(end) if table is not None else ():
                kinds = int(order.kinds[context])
                share = rest / (int(order.totals[context]) + kinds)
                entries = slice(order.starts[context], order.starts[context + 1])
                counted = zip(order.ids[entries].tolist(), order.counts[entries].tolist(), strict=True)
                terms += [(row, token, share * count) for token, count in counted]
                rest = share * kinds
        ids = sorted({token for _, token, _ in terms})
        column = {token: i for i, token in enumerate(ids)}
        probs = np.zeros((self._num_sequences, len(ids)))
        for row, token, weight in terms:
            probs[row, column[token]] += weight
        return np.array(ids, dtype=np.int64), probs

    def _matches(self, text: _Text) -> tuple[tuple[int, int], tuple[int, int]]:
        """Length and end of the longest match in the text itself, and of that in the corpus."""
        return text.longest_match(text.tokens), self._corpus.longest_match(text.tokens)

    def _continuation(self, text: _Text, limit: int) -> list[int]:
        (length, end), (corpus_length, corpus_end) = self._matches(text)
        if corpus_length > length:
            following = self._corpus.tokens[corpus_end : corpus_end + limit]
            return following[: following.index(_SEPARATOR)] if _SEPARATOR in following else following
        if length == 0:
            return []
        period = text.tokens[end : end + limit]
        return [period[i % len(period)] for i in range(limit)]

    def _limits(self, function: str, limits: NDArray[Any] | None, most: int) -> list[int]:
        if limits is None:
            return [most] * self._num_sequences
        _check_array(function, "limits", limits, ("int32", "int64"), (self._num_sequences,), self._shape())
        return [max(0, min(limit, most)) for limit in limits.tolist()]

    def _empty_text(self) -> _Text:
        return _Text(self._min_ngram, self._max_ngram)

    def _sequence(self, function: str, sequence: SupportsIndex) -> int:
        return check_integer(function, "sequence", sequence, 0, self._num_sequences - 1)

    def _shape(self, rest: str = "") -> str:
        return f"[num_sequences={self._num_sequences}{rest}]"


class _Text:
    """One growing text and, per gram, the end of its latest occurrence that is followed by a token.

    Grams that end at the end of the text are not indexed yet, so a lookup of the text's own suffix finds only
    *earlier* occurrences.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.tokens: list[int] = []
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._latest: dict[tuple[int, ...], int] = {}  # gram -> end of its latest occurrence; ends are exclusive
        self._previous: list[list[int]] = []  # per end, per gram length: the occurrence before it, 0 for none

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            self.tokens.append(token)
            previous: list[int] = []
            if token != _SEPARATOR:  # nothing follows the last gram of a document
                for gram in _grams(self.tokens, end, self._min_ngram, self._max_ngram):
                    previous.append(self._latest.get(gram, 0))
                    self._latest[gram] = end
            self._previous.append(previous)

    def truncate(self, length: int) -> None:
        for end in range(len(self.tokens) - 1, length - 1, -1):
            grams = _grams(self.tokens, end, self._min_ngram, self._max_ngram)
            for gram, previous in zip(grams, self._previous.pop(), strict=True):
                if previous:
                    self._latest[gram] = previous
                else:
                    del self._latest[gram]
            self.tokens.pop()

    def longest_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Length and end of the latest occurrence here of the longest suffix of `tokens`; (0, 0) if there is none."""
        match = (0, 0)
        for gram in _grams(tokens, len(tokens), self._min_ngram, self._max_ngram):
            end = self._latest.get(gram)
            if end is None:  # a longer gram contains this one
                break
            match = (len(gram), end)
        return match

    def followers(self) -> list[list[int]]:
        """For each suffix that occurred earlier, shortest first: the tokens that followed, the latest first."""
        found = []
        for i, gram in enumerate(_grams(self.tokens, len(self.tokens), self._min_ngram, self._max_ngram)):
            end, following = self._latest.get(gram, 0), []
            while end:
                following.append(self.tokens[end])
                end = self._previous[end][i]
            if not following:
                break
            found.append(following)
        return found


def _grams(tokens: Sequence[int], end: int, min_ngram: int, max_ngram: int) -> Iterator[tuple[int, ...]]:
    """Yield the grams that end at `end`, shortest first, as far as they do not span two documents."""
    for length in range(min_ngram, min(max_ngram, end) + 1):
        gram = tuple(tokens[end - length : end])
        if _SEPARATOR in gram:
            return
        yield gram


def gumbel_noise(keys: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the noise ([n] float32) of each token ([n] int64, in [0, 2**31)) under its key ([n] int64).

    It is the noise that `sample` and ``verify_chain(acceptance="match")`` draw with: see `noise_keys`.
    """
    _check_array("gumbel_noise", "tokens", tokens, ("int64",), (None,), "[n]")
    _check_tokens("gumbel_noise", tokens.tolist())
    _check_array("gumbel_noise", "keys", keys, ("int64",), (len(tokens),), f"[n={len(tokens)}]")
    return np.asarray(
        gumbel(torch.from_numpy(np.array(keys)), torch.from_numpy(np.array(tokens)), torch.float32).numpy()
    )


def check_integer(
    function: str, name: str, value: SupportsIndex, low: int | None = None, high: int | None = None
) -> int:
    """`value` as an int in [low, high]; else a TypeError or ValueError that names the function and the argument."""
    try:
        number = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{function}: {name} must be an integer, got {type(value).__name__}") from None
    if low is not None and number < low or high is not None and number > high:
        raise ValueError(f"{function}: {name} must be in [{low}, {high}], got {number}")
    return number


def _check_array(
    function: str,
    name: str,
    array: object,
    dtypes: tuple[str, ...],
    shape: tuple[int | None, ...],
    shape_text: str,
    writeable: bool = False,
) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{function}: {name} must be a numpy array, got {type(array).__name__}")
    fits = array.ndim == len(shape) and all(
        want is None or got == want for got, want in zip(array.shape, shape, strict=True)
    )
    if not fits or not any(array.dtype == dtype for dtype in dtypes):
        got = f"{array.dtype} [{', '.join(map(str, array.shape))}]"
        raise ValueError(f"{function}: {name} must be {' or '.join(dtypes)} {shape_text}, got {got}")
    if writeable and not array.flags.writeable:
        raise ValueError(f"{function}: {name} must be writeable")


def _check_tokens(function: str, tokens: Sequence[int], row: str = "") -> None:
    for i, token in enumerate(tokens):
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"{function}: tokens must be in [0, {MAX_TOKEN}], got {token} at [{row}{i}]")
