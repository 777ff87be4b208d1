"""`count_tokens_` as a Triton kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import CountTokensArguments
from .arithmetic import BAD_PARAM, LAST_ID
from .launch import numbers_a_program, run
from .processors import ascends, entry_of

WINDOW = 32  # tokens that are counted at once


class Counted(NamedTuple):
    """What is written."""

    ids: Tensor  # [batch, capacity]
    counts: Tensor  # the same
    num_output: Tensor  # [batch]
    status: Tensor  # [batch]


class Emitted(NamedTuple):
    """What is counted."""

    tokens: Tensor  # [batch, n]
    num_tokens: Tensor | None  # [batch]


@triton.jit(do_not_specialize=["capacity", "steps", "n"])
def kernel(counted, capacity, steps, emitted, n, CHUNK: tl.constexpr, WINDOW: tl.constexpr):
    """A program a sequence: what is in the list moves up by as many places as lower ids are added."""
    b = tl.program_id(0).to(tl.int64)
    ids, counts = counted.ids + b * capacity, counted.counts + b * capacity
    good = ascends(ids, capacity, CHUNK)
    stop = tl.zeros_like(b) + n
    if emitted.num_tokens is not None:
        stop = tl.minimum(stop, tl.load(emitted.num_tokens + b).to(tl.int64))
    stop = tl.where(good, stop, 0)
    num_output = tl.load(counted.num_output + b)
    fits = good
    for window in range(0, stop, WINDOW):
        j = window + tl.arange(0, WINDOW)
        token = tl.load(emitted.tokens + b * n + j, mask=j < stop, other=-1).to(tl.int64)
        some = (token >= 0) & (token < LAST_ID)
        num_output += tl.sum(some.to(tl.int32), 0)
        id = tl.where(some, token, LAST_ID).to(tl.int32)
        alike = id[:, None] == id[None, :]
        count = 2 * tl.sum(alike.to(tl.int32), 1)
        before = tl.sum((alike & (j[None, :] < j[:, None])).to(tl.int32), 1)
        entry, known = entry_of(id, ids, capacity, steps)
        first = some & (before == 0)
        known = first & known
        tl.store(counts + entry, tl.load(counts + entry, mask=known, other=0) + count, mask=known)
        fresh = tl.where(first & (known == 0), id, LAST_ID)
        goes_to = entry + tl.sum((fresh[None, :] < fresh[:, None]).to(tl.int32), 1)
        begin = tl.min(tl.where(fresh < LAST_ID, entry, capacity), 0)
        end = begin
        if begin < capacity:
            end = tl.max(entry_of(tl.full((1,), LAST_ID, tl.int32), ids, capacity, steps)[0], 0)
        fits = fits & (end + tl.sum((fresh < LAST_ID).to(tl.int32), 0) <= capacity)
        tl.debug_barrier()  # what one thread has written others load, and the other way round
        for moved in range(0, end - begin, CHUNK):
            i = end - 1 - moved - tl.arange(0, CHUNK)
            moves = i >= begin
            held = tl.load(ids + i, mask=moves, other=0)
            held_count = tl.load(counts + i, mask=moves, other=0)
            to = i + tl.sum((fresh[None, :] < held[:, None]).to(tl.int32), 1)
            tl.debug_barrier()
            tl.store(ids + to, held, mask=moves & (to < capacity))
            tl.store(counts + to, held_count, mask=moves & (to < capacity))
        tl.debug_barrier()
        tl.store(ids + goes_to, fresh, mask=(fresh < LAST_ID) & (goes_to < capacity))
        tl.store(counts + goes_to, count, mask=(fresh < LAST_ID) & (goes_to < capacity))
        tl.debug_barrier()
    tl.store(counted.num_output + b, num_output)
    tl.store(counted.status + b, tl.where(fits, 0, BAD_PARAM))


def count_tokens_(args: CountTokensArguments) -> Tensor:
    """The status ``[batch]``."""
    ids, counts, num_output, tokens, num_tokens = args
    batch, capacity = ids.shape
    counted = Counted(ids, counts, num_output, torch.empty_like(num_output))
    emitted = Emitted(tokens.contiguous(), None if num_tokens is None else num_tokens.contiguous())
    run(
        kernel, (batch,), counted, capacity, capacity.bit_length(), emitted, tokens.shape[1],
        CHUNK=numbers_a_program(capacity), WINDOW=WINDOW,
    )  # fmt: skip
    return counted.status
