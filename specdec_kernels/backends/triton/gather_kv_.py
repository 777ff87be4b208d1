"""`gather_kv_` as a Triton kernel.

Strides are in the bundle `Planes`, and so are specialised. Where a head's rows are a multiple of 16 pieces (of 8 bytes
at most; so are heads of 64 or 128 in half precision) that makes one form of the kernel; otherwise a cache that is dense
and grows meets a second one, as its strides are multiples of 16 at some lengths alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import GatherKVArguments
from ..reference.gather_kv_ import extent_of, rows_of
from .arithmetic import BAD_PARAM, BAD_TREE
from .launch import power_of_2, run

MOST_PLANES = 256  # pointers that a launch takes
PIECES = 256  # of a row that a program moves on a GPU
WINDOW = 8  # rows that it holds at once
_PIECES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Paths(NamedTuple):
    """What moves, and where to."""

    accepted: Tensor  # [batch, max_depth]
    contexts: Tensor  # [batch]
    table: Tensor | None  # [batch, max_blocks]


class Planes(NamedTuple):
    """Where the rows lie."""

    pointers: tuple[Any, ...]  # to pieces
    firsts: tuple[int, ...]
    shapes: tuple[int, ...]  # ``shapes[7 * i :]`` is the `shape_of` those planes from number ``firsts[i]`` on


class Moved(NamedTuple):
    """What is returned, ``[batch]``."""

    lengths: Tensor
    status: Tensor


@triton.jit
def find(table, b, position, found, max_blocks, block_size, num_blocks):
    """The block and the row in it of positions, and whether there is such a block; where `found`."""
    if table is None:
        block, row = tl.zeros_like(position) + b, position
    else:
        block = tl.load(table + b * max_blocks + position // block_size, mask=found, other=-1).to(tl.int64)
        row, found = position % block_size, found & (block >= 0) & (block < num_blocks)
    return block, row, found


@triton.jit(do_not_specialize=["max_depth", "max_blocks", "block_size", "num_blocks", "capacity"])
def kernel(
    paths,
    max_depth,
    max_blocks,
    block_size,
    num_blocks,
    capacity,
    planes,
    moved,
    DEPTH: tl.constexpr,
    PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """A program for PIECES pieces of the rows of one sequence in one plane."""
    shapes = planes.shapes
    b, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(paths.contexts + b).to(tl.int64)
    room = tl.where(context >= 0, capacity - context, 0)  # rows from the root's on
    j = tl.arange(0, DEPTH)
    inside = j < max_depth
    node = tl.load(paths.accepted + b * max_depth + j, mask=inside, other=-1).to(tl.int64)
    before = tl.load(paths.accepted + b * max_depth + j - 1, mask=inside & (j > 0), other=0).to(tl.int64)
    goes = (node > before) & (node > j) & (node < room)
    _, _, goes = find(paths.table, b, context + node, goes, max_blocks, block_size, num_blocks)
    _, _, goes = find(paths.table, b, context + 1 + j, goes, max_blocks, block_size, num_blocks)
    count = tl.min(tl.where(goes, DEPTH, j), 0)
    bad = tl.max(tl.where((j == count) & (node != -1), BAD_TREE, 0), 0)
    if (plane == 0) & (tl.program_id(2) == 0):
        tl.store(moved.lengths + b, tl.where(room > 0, context + 1 + count, context))
        tl.store(moved.status + b, tl.where(context >= capacity, BAD_PARAM, tl.where(room > 0, bad, 0)))
    if len(planes.pointers) > 0:
        base = planes.pointers[0]
        block_stride = tl.full((), shapes[0], tl.int64)
        row_stride = tl.full((), shapes[1], tl.int64)
        head_stride = tl.full((), shapes[2], tl.int64)
        element_stride = tl.full((), shapes[3], tl.int64)
        a_head = tl.full((), shapes[4], tl.int32)
        an_element = tl.full((), shapes[5], tl.int32)
        pieces = tl.full((), shapes[6], tl.int32)
        for i in tl.static_range(1, len(planes.pointers)):
            base = tl.where(plane == i, planes.pointers[i], base)
        for i in tl.static_range(1, len(planes.firsts)):
            later = plane >= planes.firsts[i]
            block_stride = tl.where(later, shapes[7 * i], block_stride)
            row_stride = tl.where(later, shapes[7 * i + 1], row_stride)
            head_stride = tl.where(later, shapes[7 * i + 2], head_stride)
            element_stride = tl.where(later, shapes[7 * i + 3], element_stride)
            a_head = tl.where(later, shapes[7 * i + 4], a_head)
            an_element = tl.where(later, shapes[7 * i + 5], an_element)
            pieces = tl.where(later, shapes[7 * i + 6], pieces)
        piece = tl.program_id(2) * PIECES + tl.arange(0, PIECES)
        in_head = piece % a_head
        base += piece // a_head * head_stride + in_head // an_element * element_stride + in_head % an_element
        for first in range(0, count, WINDOW):
            step = first + tl.arange(0, WINDOW)
            moving = step < count
            down = tl.load(paths.accepted + b * max_depth + step, mask=moving, other=0).to(tl.int64)
            moving = moving & (down != step + 1)  # else it is in its place
            block, row, moving = find(paths.table, b, context + down, moving, max_blocks, block_size, num_blocks)
            source = block * block_stride + row * row_stride
            block, row, moving = find(paths.table, b, context + 1 + step, moving, max_blocks, block_size, num_blocks)
            target = block * block_stride + row * row_stride
            mask = moving[:, None] & (piece < pieces)[None, :]
            held = tl.load(base[None, :] + source[:, None], mask=mask, other=0)
            tl.debug_barrier()  # a thread may write what another one loads
            tl.store(base[None, :] + target[:, None], held, mask=mask)
            tl.debug_barrier()


def is_whole(plane: Tensor) -> bool:
    """Whether the row of a head is one piece of memory."""
    return plane.shape[3] == 1 or plane.stride(3) == 1


def piece_of(plane: Tensor) -> int:
    """The widest piece, in bytes, that the rows of ``[blocks, block_size, heads, dim]`` consist of."""
    size = plane.element_size()
    if not is_whole(plane):
        return size
    bits = 8 | plane.shape[3] * size | plane.data_ptr()
    for stride in plane.stride()[:3]:
        bits |= stride * size
    return bits & -bits


def shape_of(plane: Tensor, piece: int) -> tuple[int, ...]:
    """What the kernel knows of a plane, in pieces of so many bytes: strides of block, row, head and element; the pieces
    of a head, of what lies together, and of a row."""
    size = plane.element_size()
    block, row, head, element = (stride * size // piece for stride in plane.stride())
    a_head = plane.shape[3] * size // piece
    an_element = a_head if is_whole(plane) else size // piece
    return block, row, head, element, a_head, an_element, plane.shape[2] * a_head


def gather_kv_(args: GatherKVArguments) -> tuple[Tensor, Tensor]:
    """Move the rows of each path; lengths and status ``[batch]``."""
    cache, key_layout, value_layout, accepted_nodes, context_lengths, block_table = args
    batch, max_depth = accepted_nodes.shape
    planes = rows_of(cache, key_layout, value_layout, batch)
    num_blocks, block_size = extent_of(planes)
    max_blocks = 1 if block_table is None else block_table.shape[1]
    planes = [plane for plane in planes if plane.numel()]
    while any(plane.dim() > 4 for plane in planes):
        planes = [one for plane in planes for one in (plane.unbind(4) if plane.dim() > 4 else [plane])]
    piece = min((piece_of(plane) for plane in planes), default=1)
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for plane in planes:
        by_shape.setdefault(shape_of(plane, piece), []).append(plane)
    ordered = [(shape, plane) for shape, alike in by_shape.items() for plane in alike]
    moved = Moved(
        torch.empty(batch, dtype=context_lengths.dtype, device=context_lengths.device),
        torch.empty(batch, dtype=torch.int32, device=context_lengths.device),
    )
    table = None if block_table is None else block_table.contiguous()
    paths = Paths(accepted_nodes.contiguous(), context_lengths.contiguous(), table)
    for start in range(0, max(1, len(ordered)), MOST_PLANES):
        some = ordered[start : start + MOST_PLANES]
        shapes = list(dict.fromkeys(shape for shape, _ in some))
        firsts = tuple([shape for shape, _ in some].index(shape) for shape in shapes)
        pointers = tuple(triton.reinterpret(plane, _PIECES[piece]) for _, plane in some)
        most = max((shape[-1] for shape in shapes), default=1)
        width = power_of_2(most) if triton.knobs.runtime.interpret else min(power_of_2(most), PIECES)
        run(
            kernel, (batch, max(1, len(some)), triton.cdiv(most, width)), paths, max_depth, max_blocks, block_size,
            num_blocks, max_blocks * block_size, Planes(pointers, firsts, sum(shapes, ())), moved,
            DEPTH=power_of_2(max_depth), PIECES=width, WINDOW=WINDOW,
        )  # fmt: skip
    return moved.lengths, moved.status
