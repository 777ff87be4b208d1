"""`token_logprobs` as Triton kernels: the laws of the rows of tokens, then a program a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...flat import FlatProcessors
from ...ops.arguments import Processing, TokenLogprobsArguments, tiles_of
from ..reference.rows import slots_upto
from .arithmetic import BAD_PARAM, BAD_TOKEN, INFINITY, LAST_ID
from .bundles import Layout, Row, Rows, Wanted, step_of
from .launch import empties, numbers_a_program, run, tiles_a_program
from .law import find_laws, load_span
from .processors import with_processors
from .row import load_law, load_logits, tile_ids


class Tokens(NamedTuple):
    """Tokens ``[batch, width]`` and where they come from."""

    token: Tensor
    row: Tensor | None  # the same; None: token j is of row j
    num: Tensor | None  # [batch]


class Logprobs(NamedTuple):
    """What the op returns."""

    raw: Tensor
    processed: Tensor
    rank: Tensor
    status: Tensor
    top_id: Tensor
    top_raw: Tensor
    top_processed: Tensor


@triton.jit(do_not_specialize=["unit", "n", "width", "count"])
def find_rows(rows, unit, n, width, count, tokens, spans, status, SLOTS: tl.constexpr):
    """Of each token its row as a span of one row, counted from the first in steps of `unit` elements; an idle one where
    there is no token.
    """
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < count
    b, j = slot // width, slot % width
    token = tl.load(tokens.token + slot, mask=inside, other=-1)
    if tokens.num is not None:
        token = tl.where(j < tl.load(tokens.num + b, mask=inside, other=0), token, -1)
    row = j
    if tokens.row is not None:
        row = tl.load(tokens.row + slot, mask=inside, other=0)
    flags = tl.where((token < 0) | (token >= rows.vocab), BAD_TOKEN, 0)
    flags |= tl.where((row < 0) | (row >= n), BAD_PARAM, 0)
    flags = tl.where(token == -1, 0, flags)
    is_token = (token != -1) & (flags == 0)
    at = spans + slot * 4
    tl.store(at, tl.where(is_token, (b * rows.stride_batch + row * rows.stride_row) // unit, 0), mask=inside)
    tl.store(at + 1, tl.where(is_token, 0, -1).to(tl.int64), mask=inside)
    tl.store(status + slot, flags, mask=inside)


@triton.jit
def log_probs_of(x, id, raw_row, row, log_normalizer, raw_log_normalizer):
    """Raw and processed, of an id whose logit is given as x."""
    all_or_none = tl.where(id == raw_row.law.argmax, 0.0, -INFINITY)
    raw = tl.where(tl.abs(raw_row.law.max) == INFINITY, all_or_none, x - raw_log_normalizer)
    law = row.law
    if row.rows.overlay.flags is not None:
        x = load_logits(row.rows, row.b, row.i, id)
    all_or_none = tl.where(id == law.argmax, 0.0, -INFINITY)
    kept = tl.where(x >= law.cutoff, (x - law.max) * law.inverse_temperature - log_normalizer, -INFINITY)
    return raw, tl.where(law.inverse_temperature < 0.0, all_or_none, kept)


@triton.jit(do_not_specialize=["tiles", "num_top"])
def describe(
    target,
    raw,
    tiles,
    spans,
    token,
    values,
    raw_values,
    raw_tile_max,
    num_top,
    out,
    TILES: tl.constexpr,
    TOP: tl.constexpr,
):
    """A program a token; `raw` is without processors. Tiles whose maximum cannot matter are not read again."""
    slot = tl.program_id(0).to(tl.int64)
    span = load_span(spans, slot)
    place = tl.arange(0, TOP)
    tops = slot * num_top + place
    # what is not found stays so; the barrier orders these stores before those of ids
    tl.store(out.top_id + tops, tl.full((TOP,), -1, tl.int64), mask=place < num_top)
    tl.store(out.top_raw + tops, tl.full((TOP,), -INFINITY, tl.float32), mask=place < num_top)
    tl.store(out.top_processed + tops, tl.full((TOP,), -INFINITY, tl.float32), mask=place < num_top)
    tl.debug_barrier()
    if span.length < 0:
        tl.store(out.raw + slot, -INFINITY)
        tl.store(out.processed + slot, -INFINITY)
        tl.store(out.rank + slot, 0)
    else:
        processed_row = Row(target.rows, slot, span.first, tiles, load_law(target.laws, slot))
        row = Row(raw.rows, slot, span.first, tiles, load_law(raw.laws, slot))
        tile_max = raw_tile_max + slot * tiles
        log_normalizer, raw_log_normalizer = tl.log(tl.load(values + slot * 6 + 3)), tl.load(raw_values + slot * 6 + 4)
        id = tl.load(token + slot).to(tl.int32)
        x = load_logits(row.rows, row.b, row.i, id)
        rank = tl.full((), 1, tl.int32)
        for first in range(0, tiles, TILES):
            t = first + tl.arange(0, TILES)
            if tl.max(tl.load(tile_max + t, mask=t < tiles, other=-INFINITY), 0) >= x:
                ids = tile_ids(first, TILES)
                other = load_logits(row.rows, row.b, row.i, ids)
                before = (ids < row.rows.vocab) & ((other > x) | ((other == x) & (ids < id)))
                rank += tl.sum(tl.sum(before.to(tl.int32), 1), 0)
        given, processed = log_probs_of(x, id, row, processed_row, log_normalizer, raw_log_normalizer)
        tl.store(out.raw + slot, given)
        tl.store(out.processed + slot, processed)
        tl.store(out.rank + slot, rank)
        tl.store(out.status + slot, tl.load(target.laws.status + slot) | tl.load(raw.laws.status + slot))
        last = tl.full((), INFINITY, tl.float32)  # of the id listed last
        last_id = tl.full((), -1, tl.int32)
        for k in range(num_top):
            best = tl.full((), -INFINITY, tl.float32)
            best_id = tl.full((), LAST_ID, tl.int32)
            for first in range(0, tiles, TILES):
                t = first + tl.arange(0, TILES)
                highest = tl.max(tl.load(tile_max + t, mask=t < tiles, other=-INFINITY), 0)
                if (highest > best) | (best_id == LAST_ID):
                    ids = tile_ids(first, TILES)
                    other = load_logits(row.rows, row.b, row.i, ids)
                    left = (ids < row.rows.vocab) & ((other < last) | ((other == last) & (ids > last_id)))
                    top = tl.max(tl.max(tl.where(left, other, -INFINITY), 1), 0)
                    top_id = tl.min(tl.min(tl.where(left & (other == top), ids, LAST_ID), 1), 0)
                    if (top > best) | (best_id == LAST_ID):
                        best = top
                        best_id = top_id
            last = best
            last_id = best_id
            if best_id < LAST_ID:
                given, processed = log_probs_of(best, best_id, row, processed_row, log_normalizer, raw_log_normalizer)
                tl.store(out.top_id + slot * num_top + k, best_id.to(tl.int64))
                tl.store(out.top_raw + slot * num_top + k, given)
                tl.store(out.top_processed + slot * num_top + k, processed)


def token_logprobs(args: TokenLogprobsArguments) -> tuple[Tensor, ...]:
    """What `TokenLogprobs` holds, in its order."""
    logits, tokens, rows, num_tokens, num_top, params, processors = args
    (_, n, vocab), (batch, width) = logits.shape, tokens.shape
    count, tiles = batch * width, tiles_of(vocab)
    empty = empties(logits.device, torch.float32)
    shape, top = (batch, width), (batch, width, num_top)
    out = Logprobs(
        empty(*shape), empty(*shape), empty(*shape, dtype=torch.int32), empty(*shape, dtype=torch.int32),
        empty(*top, dtype=torch.int64), empty(*top), empty(*top),
    )  # fmt: skip
    given = Tokens(*(None if t is None else t.contiguous() for t in (tokens, rows, num_tokens)))  # type: ignore[arg-type]
    spans = empty(count, 4, dtype=torch.int64)
    a_program, unit = numbers_a_program(count), step_of(logits)
    run(
        find_rows, (triton.cdiv(count, a_program),), Rows(logits, logits.stride(0), logits.stride(1), vocab), unit, n,
        width, count, given, spans, out.status, SLOTS=a_program,
    )  # fmt: skip
    # each token is a sequence of one row, which its span finds
    each = tuple(v.repeat_interleave(width) if isinstance(v, Tensor) else v for v in params)
    own, wanted = Rows(logits, 0, unit, vocab), Wanted(spans, tl.constexpr(False))
    # of the rows as they are given their maxima are all that is needed where there are processors
    raw = find_laws(
        own, count, 1, each, values=True, raw=True, logarithm=True, greedy=processors is not None, wanted=wanted
    )
    found = raw
    if processors is not None:
        made = with_processors_of_tokens(own, n, tokens, rows, processors)
        found = find_laws(made, count, 1, each, values=True, wanted=wanted)
    run(
        describe, (count,), found.target, raw.target, tiles, spans, given.token, found.values, raw.values,
        raw.tile_max, num_top, out, TILES=tiles_a_program(vocab, 2), TOP=32,
    )  # fmt: skip
    return tuple(out)


def with_processors_of_tokens(own: Rows, n: int, tokens: Tensor, rows: Tensor | None, given: Processing) -> Rows:
    """A row for each token, as its sequence's processors make it: with the tokens before it, and its row's mask."""
    assert given is not None
    batch, width = tokens.shape
    slots = slots_upto(width, tokens)
    flat = FlatProcessors(*(x if x is None or len(x) == 1 else x.repeat_interleave(width, 0) for x in given))
    if given[0] is not None:
        words = (own.vocab + 31) // 32
        at = (slots.expand(batch, -1) if rows is None else rows).clamp(0, n - 1)
        mask = given[0].view(batch, n, words).gather(1, at[..., None].expand(-1, -1, words))
        flat = flat._replace(token_bitmask=mask.flatten(0, 1))
    # an id beyond the vocabulary counts as a token, and as no id
    before = torch.where(slots < slots[:, None], tokens.clamp(-1, own.vocab)[:, None], -1).flatten(0, 1)
    made = with_processors(own, Layout(batch * width, 0, None, 0), 1, list(flat), before)
    return made._replace(overlay=made.overlay._replace(stride=None))
