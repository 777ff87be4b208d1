"""Reference of `gather_kv_`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.arguments import CACHE_DIMS, GatherKVArguments
from ...types import Status

BLOCK, HEAD, ROW, ELEMENT, BATCH_AND_HEAD, FURTHER = CACHE_DIMS.values()
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rows_of(
    cache: Sequence[Tensor], key_layout: Sequence[int], value_layout: Sequence[int], batch: int
) -> list[Tensor]:
    """The tensors as views ``[blocks, block_size, heads, dim, …further]``, a block being a sequence without a table."""
    views = []
    for number, tensor in enumerate(cache):
        kinds = list(value_layout if number % 2 else key_layout)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
            kinds.append(FURTHER)
        if BATCH_AND_HEAD in kinds:
            at = kinds.index(BATCH_AND_HEAD)
            tensor = tensor.unflatten(at, (batch, tensor.shape[at] // max(batch, 1)))
            kinds[at : at + 1] = [BLOCK, HEAD]
        for kind in (HEAD, ELEMENT):
            if kind not in kinds:
                kinds.append(kind)
                tensor = tensor.unsqueeze(-1)
        further = [i for i, kind in enumerate(kinds) if kind == FURTHER]
        views.append(tensor.permute(*(kinds.index(kind) for kind in (BLOCK, ROW, HEAD, ELEMENT)), *further))
    return views


def follow(
    accepted_nodes: Tensor, context_lengths: Tensor, block_table: Tensor | None, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which nodes are followed ``[batch, max_depth]``; their rows, where they go (``[2, batch, max_depth]``: block and
    row); the new lengths and the status ``[batch]``."""
    batch, max_depth = accepted_nodes.shape
    capacity = block_size if block_table is None else block_table.shape[1] * block_size
    context = context_lengths.to(torch.int64)[:, None]
    stays = (context < 0) | (context >= capacity)
    nodes = accepted_nodes.to(torch.int64)
    before = torch.cat([torch.zeros_like(context), nodes], 1)[:, :-1]
    j = torch.arange(max_depth, device=nodes.device)
    goes = ~stays & (nodes > before) & (nodes > j) & (nodes < capacity - context)

    def find(position: Tensor) -> Tensor:
        position = torch.where(goes, position, 0)
        if block_table is None:
            return torch.stack([torch.arange(batch, device=j.device)[:, None].expand_as(position), position])
        if capacity == 0:
            return torch.stack([position, position])
        return torch.stack([block_table.gather(1, position // block_size).to(torch.int64), position % block_size])

    source, target = find(context + nodes), find(context + 1 + j)
    for block in (source[0], target[0]):
        goes = goes & (block >= 0) & (block < num_blocks)
    followed = goes.cumprod(1).bool()
    count = followed.sum(1, keepdim=True)
    stopping = torch.cat([nodes, torch.full_like(context, -1)], 1).gather(1, count)
    bad = torch.where(~stays & (stopping != -1), int(Status.BAD_TREE), 0)
    status = torch.where(context >= capacity, int(Status.BAD_PARAM), bad)
    lengths = torch.where(stays, context, context + 1 + count)
    return followed, source, target, lengths[:, 0].to(context_lengths.dtype), status[:, 0].to(torch.int32)


def extent_of(views: Sequence[Tensor]) -> tuple[int, int]:
    """How many blocks the smallest of the tensors has, and of how many rows; without a tensor, any number."""
    any_number = torch.iinfo(torch.int32).max
    num_blocks = min((view.shape[0] for view in views), default=any_number)
    return num_blocks, min((view.shape[1] for view in views), default=any_number)


def gather_kv_(args: GatherKVArguments) -> tuple[Tensor, Tensor]:
    """Copy the rows of each path, then write the copies; lengths and status ``[batch]``."""
    cache, key_layout, value_layout, accepted_nodes, context_lengths, block_table = args
    views = rows_of(cache, key_layout, value_layout, context_lengths.shape[0])
    num_blocks, block_size = extent_of(views)
    followed, source, target, lengths, status = follow(
        accepted_nodes, context_lengths, block_table, num_blocks, block_size
    )
    if followed.numel() == 0 or 0 in (num_blocks, block_size):
        return lengths, status
    # A node that is not followed repeats one that is: the same copy is written twice, without asking the device how
    # many there are. Where nothing is followed, row 0 is written onto itself.
    some = followed.flatten().to(torch.int32).argmax()[None]  # an index without dimensions would be read on the host
    source, target = (torch.where(followed, at, 0).flatten(1) for at in (source, target))
    source, target = (torch.where(followed.flatten(), at, at.index_select(1, some)) for at in (source, target))
    for view in views:
        numbers = view.view(_INTEGERS[view.element_size()])  # bits, whatever the dtype
        numbers[target[0], target[1]] = numbers[source[0], source[1]]
    return lengths, status
