"""What a target law makes of P and Q at each position: ``mixtures`` computes a few numbers a row, by which the other
kernels weigh ids. The definitions are those of csrc/common/target_law.h.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import laws
from ...flat import FlatLaw
from ...ops.arguments import tiles_of
from ..reference import target_law
from .arithmetic import INFINITY, LAST_ID, exp_nonpositive
from .bundles import Mixture, Mixtures, Position, RawRow, RowLaw, TargetLaw
from .draft import Draft, draft_ids_of, q_at, q_by
from .launch import run, tiles_of_rows
from .law import Found, load_span
from .remainder import remainder
from .row import load_logits, tile_ids

LOSSY = tl.constexpr(laws.Lossy.number)
CHOW = tl.constexpr(laws.Chow.number)
OPT = tl.constexpr(laws.Opt.number)
TOKEN_V1 = tl.constexpr(laws.TokenV1.number)
TOKEN_V2 = tl.constexpr(laws.TokenV2.number)
TOKEN_V3 = tl.constexpr(laws.TokenV3.number)
BILD = tl.constexpr(laws.BiLD.number)

BISECTIONS = tl.constexpr(target_law.BISECTIONS)

# KEPT_BY: whose row decides which ids are kept
NO_ROW = tl.constexpr(0)  # not a cascade
TARGET_ROW = tl.constexpr(1)
DRAFT_ROW = tl.constexpr(2)


@triton.jit
def load_mixture(mixtures, rows, mask):
    """That of a row or a vector of rows."""
    at = mixtures.numbers + rows * 4
    accept, scale = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
    kept_id = tl.load(at + 3, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return Mixture(accept, scale, tl.load(at + 2, mask=mask, other=0.0), kept_id)


@triton.jit
def is_kept(target, draft, at, mixture, ids, KEPT_BY: tl.constexpr):
    """Whether the row of a position that decides keeps target ids; where Q is 0 it does not matter."""
    if KEPT_BY == DRAFT_ROW:
        ids = draft_ids_of(draft, ids)
        x = load_logits(draft.rows, at.b, at.i, ids)
    else:
        x = load_logits(target.rows, at.b, at.i, ids)
    return tl.where(mixture.kept_id >= 0, ids == mixture.kept_id, x >= mixture.bound)


@triton.jit
def law_remainder(target, draft, mixtures, at, weight, whole, ids):
    """What the final token of a position is drawn from, of target ids: ``(weight * law - Q)+``, or, of a cascade if
    `whole`, the law itself. The law is P, or what a target law makes of P and Q: then it is a `remainder` of those two.
    """
    scale, taken = weight, 1.0
    if mixtures.numbers is not None:
        mixture = load_mixture(mixtures, at.draft_row, at.draft_row >= 0)
        if mixtures.kept_by != NO_ROW:
            kept = is_kept(target, draft, at, mixture, ids, mixtures.kept_by)
            scale = tl.where(whole, 1.0, weight)
            # where an id is kept, weight (Q + scale P) - Q without the cancellation
            taken = tl.where(whole, tl.where(kept, -1.0, 0.0), tl.where(kept, 1.0 - weight, 1.0))
        scale *= mixture.scale
    return remainder(target, draft, at, scale, taken, ids)


@triton.jit
def load_raw(values, row, argmax):
    """The `RawRow` of a row that `scan` has read."""
    values += row * 6
    probability = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(values + 4))
    return RawRow(tl.load(values), probability, tl.load(values + 5), tl.load(argmax + row).to(tl.int32))


@triton.jit
def raw_of_row(rows, b, i, tiles, TILES: tl.constexpr):
    """The `RawRow` of a row of logits that `scan` has not read."""
    maximum = tl.full((), -INFINITY, tl.float32)
    argmax = tl.zeros((), tl.int32)
    for first_tile in range(0, tiles, TILES):
        ids = tile_ids(first_tile, TILES)
        x = load_logits(rows, b, i, ids)
        top = tl.max(tl.max(x, 1), 0)
        if top > maximum:
            maximum = top
            argmax = tl.min(tl.min(tl.where(x == top, ids, LAST_ID), 1), 0)
    probability = tl.full((), 1.0, tl.float32)
    entropy = tl.zeros((), tl.float32)
    if tl.abs(maximum) < INFINITY:
        mass = tl.zeros((), tl.float32)
        moment = tl.zeros((), tl.float32)
        for first_tile in range(0, tiles, TILES):
            shifted = load_logits(rows, b, i, tile_ids(first_tile, TILES)) - maximum
            raw = exp_nonpositive(shifted)
            mass += tl.sum(tl.sum(raw, 1), 0)
            moment += tl.sum(tl.sum(raw * tl.where(raw > 0.0, shifted, 0.0), 1), 0)  # 0 log 0 = 0
        probability = tl.div_rn(probability, mass)
        entropy = tl.log(mass) - tl.div_rn(moment, mass)
    return RawRow(maximum, probability, entropy, argmax)


@triton.jit
def surprise(x, ids, p):
    """-log of the raw probability of ids, whose logits are x."""
    certain = tl.where(ids == p.argmax, 0.0, INFINITY)
    return tl.where(tl.abs(p.max) < INFINITY, (p.max - x) - tl.log(p.max_prob), certain)


@triton.jit
def remainder_mass(target, draft, at, scale, tiles, TILES: tl.constexpr):
    """``sum (scale * P - Q)+`` of one position."""
    total = tl.zeros((), tl.float32)
    for first_tile in range(0, tiles, TILES):
        left = remainder(target, draft, at, scale, 1.0, tile_ids(first_tile, TILES))
        total += tl.sum(tl.sum(left, 1), 0)
    return total


@triton.jit
def exact_scale(target, draft, at, accept, tiles, TILES: tl.constexpr):
    """A lossy law's scale in [0, 1] at which as much is recovered as is rejected, ``1 - sum min(Q, accept * P)``."""
    rejected = tl.zeros((), tl.float32)
    low = tl.zeros((), tl.float32)
    high = tl.full((), 1.0, tl.float32)
    for step in range(BISECTIONS + 1):
        scale = tl.where(step == 0, accept, 0.5 * (low + high))
        left = remainder_mass(target, draft, at, scale, tiles, TILES)
        if step == 0:  # sum (accept P - Q)+ = accept - sum min(Q, accept P)
            rejected = tl.maximum(left + (1.0 - accept), 0.0)
        elif left > rejected:
            high = scale
        else:
            low = scale
    return high


@triton.jit
def deferred_mass(target, draft, at, mixture, tiles, KEPT_BY: tl.constexpr, TILES: tl.constexpr):
    """The mass of Q that is not kept."""
    mass = tl.zeros((), tl.float32)
    for first_tile in range(0, tiles, TILES):
        ids = tile_ids(first_tile, TILES)
        q = q_at(draft, at, ids)
        kept = is_kept(target, draft, at, mixture, ids, KEPT_BY)
        mass += tl.sum(tl.sum(tl.where(kept, 0.0, q), 1), 0)
    return mass


@triton.jit
def cross_entropy(target, draft, at, p, q, tiles, TILES: tl.constexpr):
    """``- sum q log p`` of the raw rows of a position."""
    certain = tl.where(tl.abs(q.max) < INFINITY, 1.0, -1.0)
    law = RowLaw(q.max, -INFINITY, certain, q.max_prob, q.argmax)
    total = tl.zeros((), tl.float32)
    for first_tile in range(0, tiles, TILES):
        ids = tile_ids(first_tile, TILES)
        raw_q = q_by(law, draft, at, ids)
        cost = surprise(load_logits(target.rows, at.b, at.i, ids), ids, p)
        total += tl.sum(tl.sum(tl.where(raw_q > 0.0, raw_q * cost, 0.0), 1), 0)
    return total


@triton.jit
def keep_from(least, row):
    """(bound, kept_id) of the ids whose raw probability in `row` is at least `least`."""
    reachable = (least > 0.0) & (least <= 1.0)
    lowest = row.max + tl.log(tl.div_rn(tl.where(reachable, least, 1.0), row.max_prob))
    kept_id = tl.where(tl.abs(row.max) < INFINITY, -1, row.argmax)
    kept_id = tl.where(reachable, kept_id, tl.where(least > 0.0, LAST_ID, -1))
    return tl.where(reachable, lowest, -INFINITY), kept_id


@triton.jit
def defers(target, draft, at, law, p, q, tiles, TILES: tl.constexpr):
    """Whether a cascade that decides by row takes the target's law at a position, not the draft's."""
    if law.number == CHOW:
        defer = q.entropy > law.alpha if law.variant else q.max_prob < law.rest
    elif law.number == BILD:
        if law.variant:
            x = load_logits(target.rows, at.b, at.i, q.argmax)
            distance = surprise(x, q.argmax, p)
        else:
            distance = cross_entropy(target, draft, at, p, q, tiles, TILES)
        defer = distance > law.alpha
    else:
        gain = q.entropy - p.entropy if law.variant else p.max_prob - q.max_prob
        price = tl.full((), law.alpha, tl.float32)
        if law.number == OPT:
            # a total variation is in [0, 1]: between 0 and alpha it decides
            if (gain > tl.minimum(price, 0.0)) & (gain <= tl.maximum(price, 0.0)):
                price *= remainder_mass(target, draft, at, 1.0, tiles, TILES)
        defer = gain > price
    return defer


@triton.jit(do_not_specialize=["width", "tiles", "draft_tiles"])
def mixtures(
    target,
    width,
    tiles,
    spans,
    values,
    draft,
    draft_values,
    draft_tiles,
    law,
    numbers,
    TILES: tl.constexpr,
):
    """A program a position that has a draft row: its `Mixture`. Some sum over all ids first."""
    draft_row = tl.program_id(0).to(tl.int64)
    b = draft_row // (width + draft.bonus)
    i = draft_row % (width + draft.bonus)
    span = load_span(spans, b)
    if i < span.length + draft.bonus:
        row = b * (width + 1) + i
        at = Position(b, span.first + i, row, draft_row)
        bound = tl.full((), -INFINITY, tl.float32)
        kept_id = tl.full((), -1, tl.int32)
        if law.number == LOSSY:
            accept = tl.div_rn(tl.full((), 1.0, tl.float32), tl.full((), law.rest, tl.float32))
            scale = tl.div_rn(tl.full((), 1.0, tl.float32), tl.full((), law.beta, tl.float32))
            if law.variant:
                scale = exact_scale(target, draft, at, accept, tiles, TILES)
        else:
            p = load_raw(values, row, target.laws.argmax)
            if draft_values is None:
                q = raw_of_row(draft.rows, b, at.i, draft_tiles, TILES)
            else:
                q = load_raw(draft_values, draft_row, draft.laws.argmax)
            if (law.number == TOKEN_V1) | (law.number == TOKEN_V2) | (law.number == TOKEN_V3):
                least = law.rest * p.max_prob if law.number == TOKEN_V3 else p.max_prob - law.alpha
                bound, kept_id = keep_from(least, q if law.number == TOKEN_V1 else p)
                mixture = Mixture(1.0, 0.0, bound, kept_id)
                scale = deferred_mass(
                    target, draft, at, mixture, tiles, DRAFT_ROW if law.number == TOKEN_V1 else TARGET_ROW, TILES
                )
            else:
                defer = defers(target, draft, at, law, p, q, tiles, TILES)
                scale = defer.to(tl.float32)
                kept_id = tl.where(defer, LAST_ID, -1)
            accept = scale
        numbers += draft_row * 4
        tl.store(numbers, accept)
        tl.store(numbers + 1, scale)
        tl.store(numbers + 2, bound)
        tl.store(numbers + 3, kept_id.to(tl.float32, bitcast=True))


NO_MIXTURE = Mixtures(None, NO_ROW)  # the law is P


def find_mixtures(law: FlatLaw, found: Found, draft: Draft, n: int, spans: torch.Tensor) -> Mixtures:
    """The mixtures of the `n` rows of each sequence that have a draft row."""
    target = found.target
    batch, rows, tiles = found.tile_max.shape
    numbers = torch.empty(batch, n, 4, dtype=torch.float32, device=target.rows.data.device)
    # all of a one-hot draft's mass is on the token that was rejected: the remainder's scale does not matter
    variant = law.variant and (law.is_cascade or draft.laws.rows is not None)
    run(
        mixtures, (batch * n,), target, rows - 1, tiles, spans, found.values, draft.laws, draft.values,
        0 if draft.laws.rows is None else tiles_of(draft.laws.rows.vocab),
        TargetLaw(tl.constexpr(law.number), tl.constexpr(variant), law.alpha, 1 - law.alpha, law.beta), numbers,
        TILES=tiles_of_rows(target.rows, 2), warps=8, registers=128,
    )  # fmt: skip
    kept_by = DRAFT_ROW if law.number == TOKEN_V1.value else TARGET_ROW
    return Mixtures(numbers, kept_by if law.is_cascade else NO_ROW)
