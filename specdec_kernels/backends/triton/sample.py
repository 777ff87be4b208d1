"""`sample` as Triton kernels: by inverse CDF, by Gumbel-max, or without replacement by Gumbel top-k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import SampleArguments, tiles_of
from .arithmetic import BAD_PARAM, INFINITY, LAST_ID, TILE, high_word, low_word, ordered
from .bundles import EVERY_ROW, LOGITS, NO_NOISE, WEIGHTS, Drawn, Groups, Layout, Listed, Noise, Range, Row, rows_of
from .launch import numbers_a_program, power_of_2, run, tiles_at_once, tiles_of_rows
from .law import find_laws
from .noise import best_of_row, best_scores
from .processors import with_processors
from .row import draw_from_law, load_law, load_logits
from .search import CANDIDATES, list_values, listed_of, load_listed, nth_maximum, select, select_listed


@triton.jit(do_not_specialize=["batch", "num", "n"])
def find_named(
    row_index,
    batch,
    num,
    n,
    starts,
    spans,
    SLOTS: tl.constexpr,
):
    """For each sequence, which of the `num` times n rows its index names, and a span of these; where it names none, -1
    and an idle span.
    """
    b = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    inside = b < batch
    named = tl.load(row_index + b, mask=inside, other=0).to(tl.int64)
    there = (named >= 0) & (named < num)
    tl.store(starts + b, tl.where(there, named, -1), mask=inside)
    span = spans + b * 4
    tl.store(span, b * 0, mask=inside)
    tl.store(span + 1, tl.where(there, b * 0 + n - 1, -1), mask=inside)
    tl.store(span + 2, b * 0, mask=inside)
    tl.store(span + 3, b * (n - 1), mask=inside)


@triton.jit
def has_row(rows, b):
    """Whether there are rows for sequence b to be drawn from."""
    there = b >= 0
    if rows.starts is not None:
        there = tl.load(rows.starts + b) >= 0
    return there


@triton.jit
def store_no_row(laws, values, row):
    """The stats of a row that does not exist."""
    column = tl.arange(0, 8)
    tl.store(values + row * 6 + column, tl.where(column == 3, 1.0, -INFINITY), mask=column < 6)
    tl.store(laws.argmax + row, tl.zeros((), tl.int64))
    tl.store(laws.status + row, tl.full((), BAD_PARAM, tl.int32))


@triton.jit
def store_token(drawn, at, row, id, normalizer):
    """A drawn id and its log-probability."""
    if row.law.inverse_temperature > 0:
        logit = load_logits(row.rows, row.b, row.i, id)
        if row.rows.kind == LOGITS:
            probability = (logit - row.law.max) * row.law.inverse_temperature - tl.log(normalizer)
        else:
            probability = tl.log(logit * row.law.inverse_temperature) - tl.log(normalizer)
    else:
        probability = tl.zeros((), tl.float32)
    tl.store(drawn.log_prob + at, probability)
    tl.store(drawn.token + at, id.to(tl.int64) if drawn.to_target is None else tl.load(drawn.to_target + id))


@triton.jit(do_not_specialize=["n", "tiles"])
def draw_one(
    target,
    n,
    tiles,
    values,
    tile_mass,
    uniforms,
    best,
    drawn,
    TILES: tl.constexpr,
):
    """A program a row: one token, by its uniform, by its tiles' best scores, or the argmax."""
    row = tl.program_id(0).to(tl.int64)
    if has_row(target.rows, row // n):
        at = Row(target.rows, row // n, row % n, tiles, load_law(target.laws, row))
        id = at.law.argmax
        if uniforms is not None:
            if at.law.inverse_temperature > 0:
                uniform = tl.load(uniforms + row)
                good = (uniform >= 0.0) & (uniform < 1.0)
                status = target.laws.status + row
                tl.store(status, tl.load(status) | tl.where(good, 0, BAD_PARAM))
                id = draw_from_law(at, tile_mass + row * tiles, tl.where(good, uniform, 0.0), None, TILES)
        if best.id is not None:
            if at.law.inverse_temperature > 0:
                id = best_of_row(best, row, tiles, TILES)
        store_token(drawn, row, at, id, tl.load(values + row * 6 + 3))
    else:
        store_no_row(target.laws, values, row)
        tl.store(drawn.token + row, tl.full((), -1, tl.int64))
        tl.store(drawn.log_prob + row, -INFINITY)


@triton.jit(do_not_specialize=["n", "tiles", "count"])
def draw_many(
    target,
    n,
    tiles,
    values,
    keys,
    best,
    listed,
    drawn,
    count,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """A program a row: the `count` best scores in descending order, ties by lowest id.

    Lists what may be among them in index order, as far as the best of tiles tell, and puts each where its rank says.
    """
    row = tl.program_id(0).to(tl.int64)
    at = Row(target.rows, row // n, row % n, tiles, load_law(target.laws, row))
    slot = tl.arange(0, SLOTS)
    # what is not drawn stays -1; the barrier orders these stores before those of the tokens
    tl.store(drawn.token + row * count + slot, tl.full((SLOTS,), -1, tl.int64), mask=slot < count)
    tl.store(drawn.log_prob + row * count + slot, tl.full((SLOTS,), -INFINITY, tl.float32), mask=slot < count)
    tl.debug_barrier()
    normalizer = tl.load(values + row * 6 + 3)
    if has_row(target.rows, row // n) == 0:
        store_no_row(target.laws, values, row)
    elif at.law.inverse_temperature < 0:
        store_token(drawn, row * count, at, at.law.argmax, normalizer)
    else:
        scores = best.score + row * tiles
        groups, own = Groups(scores, tiles), listed_of(row, tiles, listed)
        key = tl.load(keys + row)
        noise = Noise(low_word(key), high_word(key), drawn.to_target)
        top = tl.full((), -INFINITY, tl.float32)
        for first in range(0, tiles, ROW_TILES):
            t = first + tl.arange(0, ROW_TILES)
            top = tl.maximum(top, tl.max(tl.load(scores + t, mask=t < tiles, other=-INFINITY), 0))
        end = ordered(top).to(tl.int64) + 1
        begin, none = nth_maximum(groups, count, end - 1, ROW_TILES), tl.zeros((), tl.int32)
        found = tl.full((), CANDIDATES + 1, tl.int32)
        attempts = tl.zeros((), tl.int32)
        while (found > CANDIDATES) & (attempts < 2):  # a loop so that the list is compiled once
            if attempts > 0:
                between = Range(begin, end, none, 0.0)
                begin = select(between, count, 1.0, 0.0, at, groups, noise, own, TILE, TILES, ROW_TILES)
            found = list_values(begin, end, at, groups, noise, own, TILE, TILES, ROW_TILES)
            attempts += 1
        found = tl.minimum(found, CANDIDATES)
        # ranking takes a read of the list: only for what is drawn, and what ties with the last of it
        one_each = tl.full((CANDIDATES,), 1.0, tl.float32)
        least = select_listed(load_listed(found, own), one_each, count, begin, end).to(tl.int32)
        for i in range(found):
            mine = tl.load(own.key + i)
            if mine >= least:
                rank = tl.zeros((), tl.int32)
                for first in range(0, found, SLOTS):
                    other = first + slot
                    theirs = tl.load(own.key + other, mask=other < found, other=-LAST_ID)
                    before = (theirs > mine) | ((theirs == mine) & (other < i))
                    rank += tl.sum(before.to(tl.int32), 0)
                if rank < count:
                    id = tl.load(own.id + i)
                    store_token(drawn, row * count + rank, at, id, normalizer)


def sample(args: SampleArguments) -> tuple[Tensor, ...]:
    """Tokens, log_probs and the rows' stats."""
    return args.rowwise(draw_rows)


def draw_rows(args: SampleArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to tokens and log_probs ``[batch, n, num_samples]``, and the rows' stats."""
    logits, uniform_samples, noise_keys, draft_to_target, num_samples, params, processors, probs, row_index = args
    given, n, vocab = logits.shape
    batch = given if row_index is None else row_index.numel()

    def empty(most: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, n, most, dtype=dtype, device=logits.device)

    tiles = tiles_of(vocab)
    rows, spans = rows_of(logits), None
    if row_index is not None:
        starts, spans = (torch.empty(batch, *more, dtype=torch.int64, device=logits.device) for more in ((), (4,)))
        slots = numbers_a_program(batch)
        run(
            find_named, (triton.cdiv(batch, slots),), row_index.contiguous(), batch, given, n, starts, spans,
            SLOTS=slots,
        )  # fmt: skip
        rows = rows._replace(starts=starts)
    rows = with_processors(rows, Layout(batch, 0, None, 0), n, processors)
    rows = rows._replace(kind=WEIGHTS) if probs else rows
    found = find_laws(rows, batch, n, params, values=True, wanted=EVERY_ROW._replace(spans=spans))
    draft_to_target = None if draft_to_target is None else draft_to_target.contiguous()
    drawn = Drawn(empty(num_samples, torch.int64), empty(num_samples, torch.float32), draft_to_target)
    best = NO_NOISE
    if noise_keys is not None:
        noise_keys = noise_keys.contiguous()
        best = best_scores(found, noise_keys, to_target=draft_to_target, spans=spans)
    if num_samples == 1:
        # At temperature 0 no row has masses to draw by; a GPU's compiler looks at both sides of a branch.
        if found.tile_mass is None or uniform_samples is None:
            uniform_samples = None
        else:
            uniform_samples = uniform_samples.contiguous()
        run(
            draw_one, (batch * n,), found.target, n, tiles, found.values, found.tile_mass, uniform_samples, best, drawn,
            TILES=tiles_at_once(vocab),
        )  # fmt: skip
    else:
        listed = Listed(*(empty(most, torch.int32) for most in (CANDIDATES.value, CANDIDATES.value, tiles)))
        run(
            draw_many, (batch * n,), found.target, n, tiles, found.values, noise_keys, best, listed, drawn, num_samples,
            SLOTS=power_of_2(num_samples), TILES=tiles_of_rows(rows, 2), ROW_TILES=tiles_at_once(vocab),
            registers=240 if rows.overlay.flags is None else 255,
        )  # fmt: skip
    assert found.values is not None and found.target.laws.argmax is not None
    return drawn.token, drawn.log_prob, found.values, found.target.laws.argmax, found.target.laws.status
