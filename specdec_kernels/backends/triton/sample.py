"""`sample` as Triton kernels: by inverse CDF, by Gumbel-max, or without replacement by Gumbel top-k."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import BAD_PARAM, INFINITY, LAST_ID, TILE, high_word, low_word, ordered
from .launch import power_of_2, run, tiles_a_program, tiles_at_once, tiles_of
from .law import Rows, find_laws
from .noise import best_of_row, best_scores
from .row import CANDIDATES, load_law, load_logits, load_values, places, select, tile_ids, walk_ids, walk_tiles, weigh


@triton.jit
def draw_from_law(row, vocab, tiles, masses, maximum, cutoff, inverse_temperature, uniform, TILES: tl.constexpr):
    """An id from P by inverse CDF; `masses` are those of its tiles."""
    tile, rest = walk_tiles(masses, tiles, uniform, -1, 0.0, TILES)
    ids = tl.maximum(tile, 0) * TILE + tl.arange(0, TILE)
    weight = weigh(load_logits(row, ids, vocab), maximum, cutoff, inverse_temperature)
    return walk_ids(weight, ids, rest)


@triton.jit
def store_token(token, log_prob, at, id, row, maximum, inverse_temperature, normalizer, map_to):
    logit = tl.load(row + id).to(tl.float32)
    if inverse_temperature > 0:
        probability = (logit - maximum) * inverse_temperature - tl.log(normalizer)
    else:
        probability = tl.zeros((), tl.float32)
    tl.store(log_prob + at, probability)
    tl.store(token + at, id.to(tl.int64) if map_to is None else tl.load(map_to + id))


@triton.jit(do_not_specialize=["n", "tiles"])
def draw_one(
    logits, stride_batch, stride_row, vocab, n, tiles, laws, argmax, tile_mass, uniforms, best, best_id, map_to,
    values, status, token, log_prob, TILES: tl.constexpr,
):  # fmt: skip
    """A program a row: one token, by its uniform, by its tiles' best scores, or the argmax."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row // n * stride_batch + row % n * stride_row
    maximum, cutoff, inverse_temperature, _ = load_law(laws, row)
    id = tl.load(argmax + row).to(tl.int32)
    if uniforms is not None:
        if inverse_temperature > 0:
            uniform = tl.load(uniforms + row)
            good = (uniform >= 0.0) & (uniform < 1.0)
            tl.store(status + row, tl.load(status + row) | tl.where(good, 0, BAD_PARAM))
            id = draw_from_law(
                start, vocab, tiles, tile_mass + row * tiles, maximum, cutoff, inverse_temperature,
                tl.where(good, uniform, 0.0), TILES,
            )  # fmt: skip
    if best is not None:
        if inverse_temperature > 0:
            id = best_of_row(best + row * tiles, best_id + row * tiles, tiles, TILES)
    store_token(token, log_prob, row, id, start, maximum, inverse_temperature, tl.load(values + row * 6 + 3), map_to)


@triton.jit(do_not_specialize=["n", "tiles", "count"])
def draw_many(
    logits, stride_batch, stride_row, vocab, n, tiles, laws, argmax, keys, best, map_to, listed, listed_ids,
    values, token, log_prob, count, SLOTS: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    """A program a row: the `count` best scores in descending order, ties by lowest id.

    Finds the count-th best, lists what reaches it in index order, and puts each where its rank says.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row // n * stride_batch + row % n * stride_row
    token += row * count
    log_prob += row * count
    maximum, cutoff, inverse_temperature, _ = load_law(laws, row)
    slot = tl.arange(0, SLOTS)
    # what is not drawn stays -1; the barrier orders these stores before those of the tokens
    tl.store(token + slot, tl.full((SLOTS,), -1, tl.int64), mask=slot < count)
    tl.store(log_prob + slot, tl.full((SLOTS,), -INFINITY, tl.float32), mask=slot < count)
    tl.debug_barrier()
    normalizer = tl.load(values + row * 6 + 3)
    if inverse_temperature < 0:
        store_token(
            token, log_prob, 0, tl.load(argmax + row).to(tl.int32), start, maximum, inverse_temperature, normalizer,
            map_to,
        )  # fmt: skip
    else:
        best += row * tiles
        listed += row * CANDIDATES
        listed_ids += row * CANDIDATES
        key = tl.load(keys + row)
        key0, key1 = low_word(key), high_word(key)
        top = tl.full((), -INFINITY, tl.float32)
        for first in range(0, tiles, ROW_TILES):
            t = first + tl.arange(0, ROW_TILES)
            top = tl.maximum(top, tl.max(tl.load(best + t, mask=t < tiles, other=-INFINITY), 0))
        bound = select(
            tl.full((), -INFINITY, tl.float32), count, 0.0, count < 0, start, vocab, tiles, best, top, maximum,
            cutoff, inverse_temperature, key0, key1, map_to, listed, True, TILES,
        )  # fmt: skip
        found = tl.zeros((), tl.int32)
        for first in range(0, tiles, TILES):
            t = first + tl.arange(0, TILES)
            if tl.max(tl.load(best + t, mask=t < tiles, other=-INFINITY), 0) >= bound:
                score = load_values(
                    start, first, vocab, maximum, cutoff, inverse_temperature, key0, key1, map_to, True, TILES
                )
                reached = (score >= bound) & (score > -INFINITY)
                place, reaching = places(reached, TILES)
                place += found
                fits = reached & (place < CANDIDATES)
                tl.store(listed + place, ordered(score), mask=fits)
                tl.store(listed_ids + place, tile_ids(first, TILES), mask=fits)
                found += reaching
        found = tl.minimum(found, CANDIDATES)
        tl.debug_barrier()
        for i in range(found):
            mine = tl.load(listed + i)
            rank = tl.zeros((), tl.int32)
            for first in range(0, found, SLOTS):
                other = first + slot
                theirs = tl.load(listed + other, mask=other < found, other=-LAST_ID)
                before = (theirs > mine) | ((theirs == mine) & (other < i))
                rank += tl.sum(before.to(tl.int32), 0)
            if rank < count:
                id = tl.load(listed_ids + i)
                store_token(token, log_prob, rank, id, start, maximum, inverse_temperature, normalizer, map_to)


def sample(
    logits: Tensor, uniform_samples: Tensor | None, noise_keys: Tensor | None, num_samples: int,
    draft_to_target: Tensor | None, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``[batch, n, vocab]`` to tokens and log_probs ``[batch, n, num_samples]``, and the rows' stats."""
    batch, n, vocab = logits.shape
    rows = Rows(logits, batch, n, *logits.stride()[:2])
    found = find_laws(rows, params, values=True)
    token = torch.empty(batch, n, num_samples, dtype=torch.int64, device=logits.device)
    log_prob = torch.empty(batch, n, num_samples, dtype=torch.float32, device=logits.device)
    tiles = tiles_of(vocab)
    shape = (*rows.address, vocab, n, tiles, found.laws, found.argmax)
    draft_to_target = None if draft_to_target is None else draft_to_target.contiguous()
    best = best_id = None
    if noise_keys is not None:
        noise_keys = noise_keys.contiguous()
        best, best_id = best_scores(rows, found, noise_keys, draft_to_target)
    if num_samples == 1:
        uniform_samples = None if uniform_samples is None else uniform_samples.contiguous()
        run(
            draw_one, (batch * n,), *shape, found.tile_mass, uniform_samples, best, best_id, draft_to_target,
            found.values, found.status, token, log_prob, TILES=tiles_at_once(vocab),
        )  # fmt: skip
    else:
        listed, listed_ids = (
            torch.empty(batch, n, CANDIDATES.value, dtype=torch.int32, device=logits.device) for _ in range(2)
        )
        run(
            draw_many, (batch * n,), *shape, noise_keys, best, draft_to_target, listed, listed_ids, found.values,
            token, log_prob, num_samples, SLOTS=power_of_2(num_samples), TILES=tiles_a_program(vocab, 2),
            ROW_TILES=tiles_at_once(vocab), registers=168,
        )  # fmt: skip
    assert found.values is not None
    return token, log_prob, found.values, found.argmax, found.status
