"""`gather_kv_`: move the accepted path of a token tree to the end of its sequence's key-value cache."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..checks import ID_DTYPES, check_tensor, shape_error
from ..types import GatherOutput
from ._common import define, dispatch, places_of, raise_for_status, written
from .arguments import CACHE_DIMS, GatherKVArguments

_NAMES = {
    "b": "batch", "n": "num_blocks", "h": "heads", "s": "rows", "d": "dim", "(bh)": "batch={batch} * heads",
    "l": "layers", "2": "keys and values",
}  # fmt: skip
_KINDS = {
    "b": "block", "n": "block", "h": "head", "s": "row", "d": "element", "(bh)": "batch_and_head", "l": "further",
    "2": "further",
}  # fmt: skip
_NUMBERS = {letter: CACHE_DIMS[kind] for letter, kind in _KINDS.items()}
_BESIDE = ("_quantized_keys", "indexer_keys", "recurrent_states")  # transformers' layers have rows there too
_DENSE = "of b or (bh), s, h, d, l and 2, each at most once, with a batch, s, and no h beside (bh)"
_PAGED = "of n, s, h, d, l and 2, each at most once, with n and s where a block_table is given"


def _fake(args: GatherKVArguments) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.context_lengths), torch.empty_like(args.context_lengths, dtype=torch.int32)


_op, _call = define("gather_kv_", GatherKVArguments, "(Tensor, Tensor)", _fake)


def gather_kv_(
    cache: Any,
    accepted_nodes: Tensor,
    context_lengths: Tensor,
    layout: str | tuple[str, str] | None = None,
    *,
    block_table: Tensor | None = None,
    backend: str | None = None,
) -> GatherOutput:
    """Move the accepted path's rows of a key-value cache to where the next step expects them, in place.

    After a forward pass over a tree, node i's row stands at position ``context_length + i`` of its sequence, node 0
    being the root. Accepted node j (from 0, without the root) moves to ``context_length + 1 + j``, and the sequence is
    then ``context_length + 1 + num_accepted`` rows long. Nothing else is written. All layers move in one launch (up to
    256 tensors of keys or values of a layer, in 24 shapes and strides; more in several), and the host waits for
    nothing: a step can be captured in a CUDA graph.

    Parameters
    ----------
    cache : sequence of Tensor, Tensor or transformers.Cache
        Keys and values of all layers: ``(key, value)`` pairs; or a flat sequence of tensors, keys and values in turn
        where `layout` is a pair; or one stacked tensor; or a cache of transformers whose layers keep all rows. Any
        dtype (bytes are moved) and any strides, but no byte may be in two elements, of one tensor or of two: a stride
        is no smaller than what the dimensions of smaller strides span.
    accepted_nodes : Tensor
        ``[batch, max_depth]`` int64 (or int32), −1 padded: `VerifyOutput.accepted_nodes`. Ascending, as parents stand
        before children.
    context_lengths : Tensor
        ``[batch]`` int32 or int64, rows before the root's. A negative number marks an idle row: nothing moves, and its
        length stays as it is.
    layout : str or pair of str, optional
        The tensors' dimensions in their order; a pair: those of keys and those of values. ``b`` is the batch, ``s`` the
        row (position), ``h`` the key-value head, ``d`` the element of a head, ``(bh)`` batch and heads in one
        dimension, batch first; ``l`` (layers) and ``2`` (keys and values) are further dimensions. Only the batch and
        ``s`` are required.

        - ``"bhsd"``, the default: Llama and most of transformers;
        - ``"sbhd"``: ChatGLM; ``"bshd"``: FlashAttention;
        - ``("(bh)ds", "(bh)sd")``: Bloom;
        - ``"l2bhsd"``: all layers in one tensor.

        With a `block_table`, ``n`` (page) takes the place of ``b``, and ``s`` is the row in its page:

        - ``"nshd"``, the default there: one tensor a layer for keys and one for values, as FlashInfer's NHD pages;
        - ``"nhsd"``: FlashInfer's HND pages;
        - ``"2nshd"``, ``"n2shd"``: vLLM's keys and values in one tensor a layer, in its older and its newer order;
          ``"n2hsd"``: FlashInfer's HND with keys and values in one tensor.
    block_table : Tensor, optional
        ``[batch, max_blocks]`` int32 or int64: each sequence's pages (vLLM's blocks), by ``position // page_size``.
        Only the entries of the accepted nodes' rows and of their destinations are read. Two sequences may not share a
        page that is written to, nor may one sequence have a page twice among those that hold its rows from the root on.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    GatherOutput
        lengths ``[batch]`` of context_lengths' dtype, and status ``[batch]`` int32.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, device or layout, tensors that overlap or require grad (outside of ``torch.no_grad()``),
        or a backend that cannot run here; before any work. What only values can show sets ``status``:
        `Status.BAD_TREE` for an accepted node that is not greater than the one before it, or whose row or page lies
        outside the cache: the path ends before it; `Status.BAD_PARAM` for a context length that leaves no row for the
        root: an idle row.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "gather_kv_"
    check_tensor(op, "context_lengths", context_lengths, ID_DTYPES, None)
    if context_lengths.dim() != 1:
        raise shape_error(op, "context_lengths", "[batch]", context_lengths)
    device, batch = context_lengths.device, context_lengths.shape[0]
    _check_columns(op, "accepted_nodes", accepted_nodes, batch, "max_depth", device)
    if block_table is not None:
        _check_columns(op, "block_table", block_table, batch, "max_blocks", device)
    tensors = _tensors(op, cache)
    layouts = _layouts(op, layout, block_table is not None)
    _check_cache(op, tensors, layouts, batch, device)
    key_layout, value_layout = ([_NUMBERS[letter] for letter in letters] for letters in (layouts[0], layouts[-1]))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):  # rows move behind autograd's back
        raise ValueError(f"{op}: cache must not require grad (call it within torch.no_grad()), got some that does")
    chosen = dispatch(op, _op, backend, device)
    written(*tensors)
    out = _call(
        chosen, cache=tensors, key_layout=key_layout, value_layout=value_layout, accepted_nodes=accepted_nodes,
        context_lengths=context_lengths, block_table=block_table,
    )  # fmt: skip
    raise_for_status(op, out[1])
    return GatherOutput(*out)


def _tensors(op: str, cache: Any) -> list[Any]:
    """What should be a cache's tensors in their order, whatever form the cache has."""
    if isinstance(cache, Tensor):
        return [cache]
    layers = getattr(cache, "layers", None)
    if layers is None:
        if not isinstance(cache, Sequence):
            raise TypeError(f"{op}: cache must be tensors, pairs of them or a Cache, got {type(cache).__name__}")
        return [t for item in cache for t in (item if isinstance(item, (tuple, list)) else [item])]
    for number, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False):
            raise ValueError(f"{op}: cache must keep all rows, got a sliding window in layer {number}")
        if any(hasattr(layer, name) for name in _BESIDE):
            raise ValueError(
                f"{op}: cache must keep all that it has in keys and values, got a {type(layer).__name__} "
                f"in layer {number}"
            )
    return [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]


def _layouts(op: str, layout: str | tuple[str, str] | None, paged: bool) -> tuple[list[str], ...]:
    """The letters of the layout of all tensors, or of the keys' and of the values' layout."""
    letters = _letters if torch.compiler.is_compiling() else _known_letters  # Dynamo warns of a cache
    if layout is None or isinstance(layout, str):
        return (letters(op, ("nshd" if paged else "bhsd") if layout is None else layout, paged),)
    if not isinstance(layout, (tuple, list)) or len(layout) != 2 or not all(isinstance(text, str) for text in layout):
        raise TypeError(f"{op}: layout must be a str or a pair of them, got {layout!r}")
    return letters(op, layout[0], paged), letters(op, layout[1], paged)


def _letters(op: str, text: str, paged: bool) -> list[str]:
    """The letters of one layout, ``(bh)`` being one; ValueError unless it is one."""
    before, merged, after = text.partition("(bh)")
    letters = [*before, *([merged] if merged else []), *after]
    batch = [letter for letter in letters if letter in ("b", "(bh)", "n")]
    known = all(letter in _NAMES for letter in letters) and len(set(letters)) == len(letters)
    right = batch == ["n"] if paged else batch in (["b"], ["(bh)"])
    if not (known and right and "s" in letters) or {"(bh)", "h"} <= set(letters):
        raise ValueError(f"{op}: layout must be made {_PAGED if paged else _DENSE}, got {text!r}")
    return letters


_known_letters = functools.cache(_letters)


def _check_columns(op: str, argument: str, value: object, batch: int, width: str, device: torch.device) -> None:
    """TypeError or ValueError unless ``[batch, width]`` of indices."""
    check_tensor(op, argument, value, ID_DTYPES, device)
    assert isinstance(value, Tensor)
    if value.dim() != 2 or value.shape[0] != batch:
        raise shape_error(op, argument, f"[batch={batch}, {width}]", value)


def _check_cache(
    op: str, tensors: list[Tensor], layouts: tuple[list[str], ...], batch: int, device: torch.device
) -> None:
    """TypeError or ValueError unless every tensor fits its layout; tensors that are alike are checked once."""
    if len(tensors) % len(layouts):
        raise ValueError(
            f"{op}: cache must be keys and values in turn where layout is a pair, got {len(tensors)} tensors"
        )
    known = {"b": batch, "2": 2}  # sizes
    spans: dict[Any, int] = {}  # of tensors that are alike, in bytes
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: cache[{number}] must be a tensor, got {type(tensor).__name__}")
        letters = layouts[number % len(layouts)]
        try:
            shape, strides, place = tensor.shape, tensor.stride(), tensor.device
        except RuntimeError:  # of a sparse one
            raise _wrong_kind(op, number, tensor) from None
        # As a key it would fix sizes that may change from call to call of compiled code.
        kind = None if torch.compiler.is_compiling() else (number % len(layouts), shape, strides, place, tensor.dtype)
        if kind in spans:
            continue
        if tensor.layout is not torch.strided or tensor.is_quantized:  # whose bytes are not all of what it is
            raise _wrong_kind(op, number, tensor)
        if place != device:
            raise ValueError(f"{op}: cache[{number}] must be on {device}, got {place}")
        right = len(shape) == len(letters)
        for letter, size in zip(letters, shape, strict=False):
            if letter == "(bh)":
                right &= size % batch == 0 if batch else size == 0
            else:
                right &= known.get(letter, size) == size
        if not right:
            names = (f"{_NAMES[k]}={known[k]}" if k in known else _NAMES[k].format(batch=batch) for k in letters)
            raise shape_error(op, f"cache[{number}]", f"[{', '.join(names)}]", tensor)
        nested, span = places_of(shape, strides)
        if kind is not None:
            spans[kind] = span * tensor.element_size()
        if not nested and tensor.numel():
            raise ValueError(f"{op}: cache[{number}] must not overlap themselves, got strides {strides}")
        if "n" in letters:
            known["s"] = shape[letters.index("s")]  # blocks are of one size
    if spans and not isinstance(tensors[0], FakeTensor):
        addresses = sorted([address for tensor in tensors if (address := tensor.data_ptr())])  # 0: an empty one
        if min(map(operator.sub, addresses[1:], addresses), default=0) < max(spans.values()) and len(addresses) > 1:
            _check_apart(op, tuple(_Place(t.data_ptr(), t.shape, t.stride(), t.element_size()) for t in tensors))


def _wrong_kind(op: str, number: int, tensor: Tensor) -> TypeError:
    got = f"{tensor.layout} {tensor.dtype}"
    return TypeError(f"{op}: cache[{number}] must be a strided tensor and not quantized by torch, got {got}")


class _Place(NamedTuple):
    """Where the elements of a tensor lie."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def end(self) -> int:
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address + (last + 1) * self.itemsize if math.prod(self.shape) else self.address

    def for_numpy(self) -> Any:
        """An array of these places, for numpy to compare; their memory, which may be a GPU's, is never looked at."""
        steps = tuple(stride * self.itemsize for stride in self.strides)
        interface = {"version": 3, "data": (self.address, True), "typestr": f"|V{self.itemsize}", "strides": steps}
        return np.asarray(SimpleNamespace(__array_interface__={**interface, "shape": tuple(self.shape)}))


@functools.lru_cache(maxsize=8)  # a cache keeps its place from step to step
def _check_apart(op: str, places: tuple[_Place, ...]) -> None:
    """ValueError unless no two of the tensors share a byte."""
    in_order = sorted(place for place in places if place.end() > place.address)
    for index, place in enumerate(in_order):
        end = place.end()
        for other in in_order[index + 1 :]:
            if other.address >= end:
                break
            if np.shares_memory(place.for_numpy(), other.for_numpy()):
                raise ValueError(f"{op}: cache must hold each tensor once, got two that share memory")
