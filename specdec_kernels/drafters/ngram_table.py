"""Counts of the n-grams of a text."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..checks import check_int, check_path, check_sequence
from ..files import write_whole

_Array = NDArray[np.int64]
_KEPT = 64  # continuations kept per context: rarer ones are hardly ever accepted
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads the hash over all bits


@dataclass(frozen=True, eq=False)
class Order:
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


_DTYPES = {"keys": "uint64", "totals": "int32", "kinds": "int32", "starts": "int64", "ids": "int32", "counts": "int32"}


class NgramTable:
    """Which tokens followed which contexts of 1 to `order` tokens in a text, and how often: of each context the 64 that
    followed most often.

    Parameters
    ----------
    orders : list of Order
        Made by `from_tokens` or `load`.

    Raises
    ------
    TypeError, ValueError
        Something else in `orders`; an array of another dtype or length.
    """

    def __init__(self, orders: list[Order]) -> None:
        check_sequence("NgramTable", "orders", orders, Order, "Order")
        for i, order in enumerate(orders):
            _check(order, f"orders[{i}]")
        self.orders = orders

    @staticmethod
    def from_tokens(tokens: _Array, order: int = 4, min_count: int = 2) -> NgramTable:
        """Count a text.

        Parameters
        ----------
        tokens : ndarray
            ``[n]`` int64 ids, 0 … 2**31 − 1; separate documents with an end-of-text id.
        order : int
            Longest context, in tokens, >= 1.
        min_count : int
            Contexts of two and more tokens that occurred less often are left out.

        Raises
        ------
        ValueError
            Not ``[n > order]``, an id or a parameter out of its range.
        TypeError
            Not an int64 array, or a number that is no integer.
        """
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int64:
            got = getattr(tokens, "dtype", type(tokens).__name__)
            raise TypeError(f"NgramTable: tokens must be an int64 array, got {got}")
        check_int("NgramTable", "order", order, 1, None)
        check_int("NgramTable", "min_count", min_count, 1, None)
        if tokens.ndim != 1 or len(tokens) <= order:
            raise ValueError(f"NgramTable: tokens must be [n > order={order}], got {list(tokens.shape)}")
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= 1 << 31:
            raise ValueError(f"NgramTable: tokens must be ids in [0, {2**31 - 1}], got {least if least < 0 else most}")
        return NgramTable([_count(tokens, length, min_count if length > 1 else 1) for length in range(1, order + 1)])

    def save(self, path: Path) -> None:
        """Write the table to a ``.npz`` file.

        Raises
        ------
        TypeError
            `path` is no Path.
        OSError
            The file could not be written.
        """
        check_path("NgramTable", "path", path)
        names = Order.__dataclass_fields__
        arrays = {f"{name}{i}": getattr(order, name) for i, order in enumerate(self.orders) for name in names}

        def write(unfinished: Path) -> None:
            with unfinished.open("wb") as file:
                np.savez(file, **arrays)

        write_whole(path, write)

    @staticmethod
    def load(path: Path) -> NgramTable:
        """Read what `save` wrote.

        Raises
        ------
        OSError
            No file is there (FileNotFoundError), or it cannot be read.
        ValueError
            It holds no table.
        TypeError
            `path` is no Path.
        """
        check_path("NgramTable", "path", path)
        names = Order.__dataclass_fields__
        try:
            read = np.load(path, allow_pickle=False)
            if isinstance(read, np.ndarray):
                raise ValueError("it holds one array")
            with read as file:
                count = len(file.files) // len(names)
                return NgramTable([Order(*(file[f"{name}{i}"] for name in names)) for i in range(count)])
        except (KeyError, EOFError, ValueError, TypeError, NotImplementedError, zipfile.BadZipFile) as error:
            raise ValueError(f"NgramTable: {path} is not a table: {error}") from error

    def contexts(self, text: Sequence[int]) -> list[tuple[Order, int]]:
        """Where the end of a text stands in the table.

        Parameters
        ----------
        text : sequence of int
            Its last tokens, ids in 0 … 2**31 − 1; those before the longest context change nothing.

        Returns
        -------
        list of (Order, int)
            Longest context first: the `Order` of its length, and the context's index there. Lengths without one are
            left out.

        Raises
        ------
        TypeError, ValueError
            Not a sequence of integers; an id out of its range.
        """
        check_sequence("NgramTable", "text", text, int, "integers", least=0)
        for token in text:
            check_int("NgramTable", "text", token, 0, 2**31 - 1)
        found = []
        for length in range(min(len(self.orders), len(text)), 0, -1):
            order = self.orders[length - 1]
            (key,) = _hash([np.array([token]) for token in text[len(text) - length :]])
            at = int(np.searchsorted(order.keys, key))
            if at < len(order.keys) and order.keys[at] == key:
                found.append((order, at))
        return found


def _check(order: Order, name: str) -> None:
    arrays = {field: getattr(order, field) for field in _DTYPES}
    for field, array in arrays.items():
        plain = isinstance(array, np.ndarray) and array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned
        if not plain or array.dtype != _DTYPES[field]:
            got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"NgramTable: {name}.{field} must be contiguous {_DTYPES[field]} [n], got {got}")
    contexts, entries = len(order.keys), len(order.ids)
    lengths = {"starts": contexts + 1, "counts": entries, "ids": entries}
    for field, array in arrays.items():
        if len(array) != (length := lengths.get(field, contexts)):
            raise ValueError(f"NgramTable: {name}.{field} must be [{length}], got {list(array.shape)}")
    for field, least in (("totals", 1), ("kinds", 1), ("ids", 0), ("counts", 1)):
        if arrays[field].min(initial=least) < least:
            raise ValueError(f"NgramTable: {name}.{field} must be >= {least}, got {arrays[field].min()}")
    if order.starts[0] != 0 or order.starts[-1] != entries or (np.diff(order.starts) < 0).any():
        raise ValueError(f"NgramTable: {name}.starts must rise from 0 to {entries}, got others")


def _hash(columns: list[_Array]) -> NDArray[np.uint64]:
    """One number for the tokens in each row of `columns`; it takes 2**32 contexts to make a clash likely."""
    key = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        key = (key ^ column.astype(np.uint64)) * _MULTIPLIER  # wraps around
        key ^= key >> np.uint64(29)
    return key


def _count(tokens: _Array, length: int, min_count: int) -> Order:
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
    return Order(
        keys[often],
        totals[often].astype(np.int32),
        kinds[often].astype(np.int32),
        np.r_[0, np.cumsum(entries)],
        following[kept],
        counts[kept].astype(np.int32),
    )
