"""A key-value cache in which every sequence of a batch keeps its own length.

The cache is preallocated and knows no lengths: the caller says where each forward writes (`RaggedCache.place`) and
masks what a sequence may see. Rows past a sequence's length are never visible and are written again before they become
so: to roll back rejected draft tokens is to continue from a smaller length, on the device, without a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...ops.gather_kv_ import gather_kv_
from ...tree import DraftTree

VIEW_STEP = 64
"""Attention sees the buffer up to the next multiple of this: a short context does not pay for the capacity."""


class Place(NamedTuple):
    """Where a forward writes.

    Attributes
    ----------
    positions : Tensor
        ``[batch, n]`` int64, of the new rows in their sequences.
    rows : Tensor
        ``[batch * n]`` int64, of the new rows in the layers' buffers.
    visible : int
        Rows of each sequence that attention is computed over.
    """

    positions: Tensor
    rows: Tensor
    visible: int


class RaggedCache(Cache):
    """Keys and values of a decoder, written at each sequence's own position, for transformers' ``past_key_values``.

    Storage is token-major, ``[batch * capacity, heads, head_dim]``, so that one `index_copy_` writes the new rows of
    the whole batch; layers see it as ``[batch, heads, visible, head_dim]``.

    Parameters
    ----------
    num_layers, batch_size : int
    capacity : int
        Rows of one sequence. A forward of `n` rows needs ``start + n <= capacity`` for every sequence.
    reported_length : int
        What ``get_seq_length`` returns. No served model uses it for anything but a default position, except T5 (see
        `EncoderDecoderRunner`).
    """

    def __init__(self, num_layers: int, batch_size: int, capacity: int, reported_length: int = 0) -> None:
        self.num_sequences = batch_size
        self.capacity = capacity
        self.reported_length = reported_length
        self.coming: Place | None = None  # layers learn of it here: a model hands them keys and values alone
        super().__init__(layers=[_RaggedLayer(self) for _ in range(num_layers)])

    def place(self, starts: Tensor, num_rows: int, bound: int) -> Place:
        """Say where the next forward writes.

        Parameters
        ----------
        starts : Tensor
            ``[batch]`` int64, the first row written of each sequence: its length.
        num_rows : int
            New rows of every sequence.
        bound : int
            An upper bound of ``max(starts) + num_rows`` known on the host; attention is computed over that many rows,
            rounded up to `VIEW_STEP`.

        Returns
        -------
        Place
        """
        device = starts.device
        positions = starts[:, None] + torch.arange(num_rows, device=device)
        first_rows = torch.arange(0, self.num_sequences * self.capacity, self.capacity, device=device)
        rows = (positions + first_rows[:, None]).view(-1)
        self.coming = Place(positions, rows, min(self.capacity, -(-bound // VIEW_STEP) * VIEW_STEP))
        return self.coming

    def keep_path(self, accepted_nodes: Tensor, context_lengths: Tensor) -> None:
        """Move the rows of a tree's accepted nodes to the end of each sequence's text.

        Parameters
        ----------
        accepted_nodes : Tensor
            ``[batch, max_depth]`` int64, −1 padded, without the root.
        context_lengths : Tensor
            ``[batch]`` int64, the root's row; node i's is ``context_length + i``, and the j-th accepted one moves to
            ``context_length + 1 + j``.
        """
        shape = (self.num_sequences, self.capacity)
        buffers = [rows.unflatten(0, shape) for layer in self.layers for rows in (layer.key_rows, layer.value_rows)]
        gather_kv_(buffers, accepted_nodes, context_lengths, "bshd")

    def release(self) -> None:
        """Drop the layers' buffers: cache and layers refer to each other, so they would stay until a garbage
        collection.
        """
        self.layers.clear()


class _RaggedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty: a masked row has weight 0, and 0 times whatever lies in fresh memory may be NaN.
        size = self.cache.num_sequences * self.cache.capacity
        self.key_rows = key_states.new_zeros(size, key_states.shape[1], key_states.shape[3])
        self.value_rows = value_states.new_zeros(size, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[batch, heads, n, head_dim]`` new rows; return the visible part of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._write(self.key_rows, key_states)
        self.values = self._write(self.value_rows, value_states)
        return self.keys, self.values

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        cache, place = self.cache, self.cache.coming
        assert place is not None, "RaggedCache.place comes before a forward"
        buffer.index_copy_(0, place.rows, states.transpose(1, 2).reshape(-1, *buffer.shape[1:]))
        return buffer.view(cache.num_sequences, cache.capacity, *buffer.shape[1:])[:, : place.visible].transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.cache.reported_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        place = self.cache.coming
        return self.cache.capacity if place is None else place.visible, 0

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in older releases


def causal_mask(positions: Tensor, visible: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Additive mask that lets the row at a position see every earlier one of its sequence and itself.

    Parameters
    ----------
    positions : Tensor
        ``[batch, n]`` int64, positions of the query rows.
    visible : int
        Key rows; row `j` of a sequence holds its position `j`.
    dtype : torch.dtype
        Of the result: the model's.
    window : int, optional
        See at most this many positions, oneself included (sliding-window attention).

    Returns
    -------
    Tensor
        ``[batch, 1, n, visible]``: 0 where visible, the dtype's lowest number elsewhere.
    """
    keys = torch.arange(visible, device=positions.device)
    query = positions[:, None, :, None]
    hidden = keys > query
    if window is not None:
        hidden |= keys <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, torch.finfo(dtype).min)


def tree_mask(
    tree: DraftTree, context_lengths: Tensor, visible: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Additive mask that lets a tree's node see the text before its root, its ancestors and itself.

    Parameters
    ----------
    tree : DraftTree
    context_lengths : Tensor
        ``[batch]`` int64, the root's row.
    visible, dtype, window
        See `causal_mask`; a window counts positions, not rows.

    Returns
    -------
    Tensor
        ``[batch, 1, num_nodes, visible]``.
    """
    seen = tree.attention_mask(context_lengths, visible)
    if window is not None:
        context = context_lengths[:, None]
        query = context + tree.position_ids
        keys = torch.arange(visible, device=seen.device)
        node = (keys - context).clamp(0, tree.num_nodes - 1)
        keys = torch.where(keys < context, keys, query.gather(1, node))
        seen = seen & (keys[:, None, None] > query[:, None, :, None] - window)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
