"""Logits processors: what the target's logits are made into as they are loaded. `sk.Processors` gives the order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...flat import FlatProcessors
from ...ops.arguments import Processing
from ...types import NO_ID
from ..reference.processors import valid_penalties
from ..reference.rows import slots_upto
from .arithmetic import BAD_PARAM, INFINITY, LAST_ID
from .bundles import Layout, Overlay, Rows
from .launch import numbers_a_program, run


@triton.jit
def entry_of(ids, list_ids, num, steps):
    """How many entries of an ascending list are less than each id, and whether the next is the id."""
    before = ids * 0
    for step in range(steps):
        probe = before + (tl.full((), 1, tl.int32) << (steps - 1 - step))
        less = tl.load(list_ids + probe - 1, mask=probe <= num, other=LAST_ID) < ids
        before = tl.where(less & (probe <= num), probe, before)
    return before, (before < num) & (tl.load(list_ids + before, mask=before < num, other=-1) == ids)


@triton.jit
def ascends(ids, num, CHUNK: tl.constexpr):
    """Whether a list's ids ascend: csrc/common/processors.h says which may follow which."""
    bad = tl.full((), 0, tl.int32)
    for begin in range(1, num, CHUNK):
        i = begin + tl.arange(0, CHUNK)
        id = tl.load(ids + i, mask=i < num, other=LAST_ID)
        before = tl.load(ids + i - 1, mask=i < num, other=0)
        bad = tl.maximum(bad, tl.max(((id <= before) & (id < LAST_ID)).to(tl.int32), 0))
    return bad == 0


@triton.jit(do_not_specialize=["num"])
def kernel_of_lists(ids, num, kept, flags, CHUNK: tl.constexpr):
    """A program a list, which is empty in `kept` where it does not ascend."""
    at = tl.program_id(0).to(tl.int64) * num
    good = ascends(ids + at, num, CHUNK)
    tl.store(flags + tl.program_id(0), tl.where(good, 0, BAD_PARAM))
    for begin in range(0, num, CHUNK):
        i = begin + tl.arange(0, CHUNK)
        id = tl.load(ids + at + i, mask=i < num, other=0)
        tl.store(kept + at + i, tl.where(good, id, LAST_ID), mask=i < num)


def steps_of(num: int) -> int:
    """Halvings in which `entry_of` finds an id among `num`: an odd number, as of others 16 would compile a variant."""
    return num.bit_length() | 1


def flagged_lists(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's `flagged_lists` ``[lists, n]``, in one launch."""
    lists, num = ids.shape
    ids = ids.contiguous()
    kept, flags = torch.empty_like(ids), torch.empty(lists, dtype=torch.int32, device=ids.device)
    run(kernel_of_lists, (lists,), ids, num, kept, flags, CHUNK=numbers_a_program(num))
    return kept, flags


@triton.jit
def allows(words, ids, inside):
    """The bit of each id."""
    word = tl.load(words + ids // 32, mask=inside, other=0)
    return ((word >> (ids % 32)) & 1) == 1


@triton.jit
def process(overlay, b, i, ids, inside, x):
    """The logits x of row i of sequence b, or of a vector of rows, as processors make them; of ids `inside` alone."""
    row = b
    if overlay.stride is not None:
        row = b * overlay.stride + i
    if overlay.bitmask is not None:
        x = tl.where(allows(overlay.bitmask + row * overlay.words, ids, inside), x, -INFINITY)
    if overlay.allowed is not None:
        x = tl.where(allows(overlay.allowed + b * overlay.words, ids, inside), x, -INFINITY)
    if overlay.stride is not None:  # from here on the number of a padded row, of which there is one for any i
        if overlay.ahead is not None:
            row += tl.load(overlay.ahead + b)
        row = tl.minimum(tl.maximum(row, 0), tl.load(overlay.last_row))
    if overlay.bias_ids is not None:
        at = b * overlay.num_bias
        entry, found = entry_of(ids, overlay.bias_ids + at, overlay.num_bias, overlay.bias_steps)
        found = found & inside
        added = tl.load(overlay.bias_values + at + entry, mask=found, other=0.0)
        if overlay.bias_until is not None:
            until = tl.load(overlay.bias_until + at + entry, mask=found, other=0)
            added = tl.where(tl.load(overlay.generated + row) < until, -INFINITY, added)
        x = tl.where(found, x + added, x)
    if overlay.penalties is not None:
        at = b * overlay.capacity
        entry, found = entry_of(ids, overlay.count_ids + at, overlay.capacity, overlay.count_steps)
        found = found & inside
        known = tl.maximum(tl.load(overlay.counts + at + entry, mask=found, other=0), 0)
        times = known >> 1
        for k in range(overlay.depth):
            times += (tl.load(overlay.drafted + row * overlay.depth + k) == ids).to(tl.int32)
        repetition = tl.load(overlay.penalties + b * 3)
        frequency, presence = tl.load(overlay.penalties + b * 3 + 1), tl.load(overlay.penalties + b * 3 + 2)
        repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where((known > 0) | (times > 0), repeated, x)
        x = tl.where(times > 0, x - frequency * times.to(tl.float32) - presence, x)
    return x


def drafted_before(layout: Layout, tokens: Tensor) -> Tensor:
    """The draft tokens before each target row ``[batch * n, width]``, −1 elsewhere; n for each sequence of a ragged
    batch too, as segments of a malformed one may overlap.
    """
    slots = slots_upto(layout.width, tokens)
    if layout.cu is not None:
        tokens = tokens[(layout.cu[:-1, None] + slots).clamp(0, max(layout.total - 1, 0))]
    before = slots < slots_upto(layout.width + layout.bonus_rows, tokens)[:, None]
    return torch.where(before, tokens[:, None], -1).flatten(0, 1)


def with_processors(rows: Rows, layout: Layout, n: int, given: Processing, drafted: Tensor | None = None) -> Rows:
    """Target rows, at most `n` a sequence, as processors make them; `drafted` as `drafted_before` has it."""
    if given is None:
        return rows
    flat, device, batch = FlatProcessors(*given), rows.data.device, layout.batch

    def of_each(lists: Tensor | None) -> Tensor | None:
        return None if lists is None else lists.expand(batch, *lists.shape[1:]).contiguous()

    def padded(lists: Tensor | None, value: int = 0) -> Tensor | None:
        return None if lists is None else of_each(F.pad(lists, (0, -lists.shape[1] % 16), value=value))

    if drafted is None:
        drafted = torch.empty(batch * n, 0, dtype=torch.int32, device=device)
    generated = None
    if flat.bias_until is not None:
        num_output = of_each(flat.num_output)
        assert num_output is not None
        generated = num_output.repeat_interleave(n) + (drafted >= 0).sum(1)
    penalties, flags = flat.penalties, torch.zeros(batch, dtype=torch.int32, device=device)
    bias_ids, count_ids = flat.bias_ids, flat.count_ids
    if bias_ids is not None:
        bias_ids, flags_of_bias = flagged_lists(bias_ids)
        flags |= flags_of_bias
    if penalties is not None and count_ids is not None:
        penalties, flags_of_penalties = valid_penalties(penalties)
        count_ids, flags_of_counts = flagged_lists(count_ids)
        flags |= flags_of_penalties | flags_of_counts
    bias_ids, count_ids = (padded(ids, NO_ID) for ids in (bias_ids, count_ids))
    num_bias, capacity = (0 if ids is None else ids.shape[1] for ids in (bias_ids, count_ids))
    stride, ahead = n, None
    if layout.cu is not None:
        stride = layout.bonus_rows
        ahead = slots_upto(batch, layout.cu) * (n - stride) - layout.cu[:-1]
    return rows._replace(
        overlay=Overlay(
            stride, ahead, torch.full((1,), batch * n - 1, dtype=torch.int32, device=device), flags,
            (rows.vocab + 31) // 32, None if flat.token_bitmask is None else flat.token_bitmask.contiguous(),
            of_each(flat.allowed),
            bias_ids, padded(flat.bias_values), padded(flat.bias_until), generated, num_bias, steps_of(num_bias),
            of_each(penalties), count_ids, padded(flat.counts), capacity, steps_of(capacity),
            drafted.to(torch.int32).contiguous(), drafted.shape[1],
        )
    )  # fmt: skip
