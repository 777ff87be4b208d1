"""What a target law makes of P and Q at each position: ``mixtures`` computes a few numbers a row, by which the other
kernels weigh ids. The definitions are those of csrc/common/law.h.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import INFINITY, LAST_ID, exp_nonpositive
from .draft import DraftLaws, draft_ids_of, draft_probabilities
from .launch import run, tiles_a_program, tiles_of
from .law import Laws, Rows, needed
from .row import load_law, load_logits, probabilities, tile_ids

# laws, as specdec_kernels/laws.py numbers them
LOSSY = tl.constexpr(1)
CHOW = tl.constexpr(2)
OPT = tl.constexpr(4)
TOKEN_V1 = tl.constexpr(5)
TOKEN_V2 = tl.constexpr(6)
TOKEN_V3 = tl.constexpr(7)
BILD = tl.constexpr(8)

BISECTIONS = tl.constexpr(24)  # of [0, 1]: down to float32's precision

# KEPT_BY: whose row decides which ids are kept
NO_ROW = tl.constexpr(0)  # not a cascade
TARGET_ROW = tl.constexpr(1)
DRAFT_ROW = tl.constexpr(2)


@triton.jit
def load_mixtures(mixture, rows, mask):
    """(accept, scale, bound, kept_id) of a row or a vector of rows.

    An id is kept iff, in the row that decides, it is `kept_id` (`LAST_ID` is none), or, where that is negative, its
    logit is >= `bound`.
    """
    at = mixture + rows * 4
    accept, scale = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
    kept_id = tl.load(at + 3, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    return accept, scale, tl.load(at + 2, mask=mask, other=0.0), kept_id


@triton.jit
def is_kept(
    target, draft, draft_vocab, map_to, map_size, ids, vocab, bound, kept_id, KEPT_BY: tl.constexpr,
):  # fmt: skip
    """Whether the row at `target` or `draft` that decides keeps target ids; where Q is 0 it does not matter."""
    if KEPT_BY == DRAFT_ROW:
        ids = draft_ids_of(ids, map_to, map_size)
        x = load_logits(draft, ids, draft_vocab)
    else:
        x = load_logits(target, ids, vocab)
    return tl.where(kept_id >= 0, ids == kept_id, x >= bound)


@triton.jit
def pair(
    target, row, laws, argmax, scale, draft, draft_start, draft_row, draft_vocab, draft_laws, draft_argmax, map_to,
    map_size, ids, vocab, PROBS: tl.constexpr,
):  # fmt: skip
    """``scale * P`` and Q of target ids at one position; 0 past the end."""
    maximum, cutoff, inverse_temperature, inverse_normalizer = load_law(laws, row)
    x = load_logits(target, ids, vocab)
    best = tl.load(argmax + row).to(tl.int32)
    p = probabilities(x, ids, maximum, cutoff, inverse_temperature, inverse_normalizer * scale, best)
    q_maximum, q_cutoff, q_inverse_temperature, q_inverse_normalizer = load_law(draft_laws, draft_row)
    q = draft_probabilities(
        draft, draft_start, draft_vocab, map_to, map_size, ids, q_maximum, q_cutoff, q_inverse_temperature,
        q_inverse_normalizer, tl.load(draft_argmax + draft_row).to(tl.int32), PROBS,
    )  # fmt: skip
    return p, q


@triton.jit
def weights(
    target, row, laws, argmax, weight, whole, draft, draft_start, draft_row, draft_vocab, draft_laws, draft_argmax,
    map_to, map_size, ids, vocab, PROBS: tl.constexpr, mixture, KEPT_BY: tl.constexpr,
):  # fmt: skip
    """What the last token of a position is drawn from, of target ids: ``(weight * law - Q)+``, or, of a cascade if
    `whole`, the law itself.
    """
    scale = weight
    if mixture is not None:
        _, of_law, bound, kept_id = load_mixtures(mixture, draft_row, draft_row >= 0)
        if KEPT_BY != NO_ROW:
            scale = tl.where(whole, 1.0, weight)
        scale *= of_law
    p, q = pair(
        target, row, laws, argmax, scale, draft, draft_start, draft_row, draft_vocab, draft_laws, draft_argmax, map_to,
        map_size, ids, vocab, PROBS,
    )  # fmt: skip
    if KEPT_BY != NO_ROW:
        kept = is_kept(
            target, draft + draft_start, draft_vocab, map_to, map_size, ids, vocab, bound, kept_id, KEPT_BY
        )  # fmt: skip
        # where an id is kept, weight (Q + scale P) - Q without the cancellation
        q *= tl.where(whole, tl.where(kept, -1.0, 0.0), tl.where(kept, 1.0 - weight, 1.0))
    return tl.maximum(p - q, 0.0)


@triton.jit
def load_raw(values, row):
    """(max, probability of the argmax, entropy) of a row at temperature 1 with nothing cut."""
    maximum = tl.load(values + row * 6)
    probability = tl.exp(maximum - tl.load(values + row * 6 + 4))
    return maximum, tl.where(tl.abs(maximum) < INFINITY, probability, 1.0), tl.load(values + row * 6 + 5)


@triton.jit
def raw_of_row(row, vocab, tiles, TILES: tl.constexpr):
    """What `load_raw` gives, and the argmax, of a row of logits that `scan` has not read."""
    maximum = tl.full((), -INFINITY, tl.float32)
    argmax = tl.zeros((), tl.int32)
    for first_tile in range(0, tiles, TILES):
        ids = tile_ids(first_tile, TILES)
        x = load_logits(row, ids, vocab)
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
            shifted = load_logits(row, tile_ids(first_tile, TILES), vocab) - maximum
            raw = exp_nonpositive(shifted)
            mass += tl.sum(tl.sum(raw, 1), 0)
            moment += tl.sum(tl.sum(raw * tl.where(raw > 0.0, shifted, 0.0), 1), 0)  # 0 log 0 = 0
        probability = tl.div_rn(probability, mass)
        entropy = tl.log(mass) - tl.div_rn(moment, mass)
    return maximum, probability, entropy, argmax


@triton.jit
def surprise(x, ids, maximum, probability, argmax):
    """-log of the raw probability of ids, whose logits are x."""
    certain = tl.where(ids == argmax, 0.0, INFINITY)
    return tl.where(tl.abs(maximum) < INFINITY, (maximum - x) - tl.log(probability), certain)


@triton.jit
def left_over(
    scale, target, row, laws, argmax, tiles, draft, draft_start, draft_row, draft_vocab, draft_laws, draft_argmax,
    map_to, map_size, vocab, PROBS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``sum (scale * P - Q)+`` of one position."""
    total = tl.zeros((), tl.float32)
    for first_tile in range(0, tiles, TILES):
        p, q = pair(
            target, row, laws, argmax, scale, draft, draft_start, draft_row, draft_vocab, draft_laws, draft_argmax,
            map_to, map_size, tile_ids(first_tile, TILES), vocab, PROBS,
        )  # fmt: skip
        total += tl.sum(tl.sum(tl.maximum(p - q, 0.0), 1), 0)
    return total


@triton.jit
def exact_scale(
    accept, target, row, laws, argmax, tiles, draft, draft_start, draft_row, draft_vocab, draft_laws, draft_argmax,
    map_to, map_size, vocab, PROBS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A lossy law's scale in [0, 1] at which as much is recovered as is rejected, ``1 - sum min(Q, accept * P)``."""
    rejected = tl.zeros((), tl.float32)
    low = tl.zeros((), tl.float32)
    high = tl.full((), 1.0, tl.float32)
    for step in range(BISECTIONS + 1):
        scale = tl.where(step == 0, accept, 0.5 * (low + high))
        left = left_over(
            scale, target, row, laws, argmax, tiles, draft, draft_start, draft_row, draft_vocab, draft_laws,
            draft_argmax, map_to, map_size, vocab, PROBS, TILES,
        )  # fmt: skip
        if step == 0:  # sum (accept P - Q)+ = accept - sum min(Q, accept P)
            rejected = tl.maximum(left + (1.0 - accept), 0.0)
        elif left > rejected:
            high = scale
        else:
            low = scale
    return high


@triton.jit(do_not_specialize=["tiles", "width", "draft_tiles"])
def mixtures(
    target, target_stride_batch, target_stride_row, tiles, blocks, width, laws, argmax, status, values,
    draft, draft_stride_batch, draft_stride_row, draft_vocab, draft_laws, draft_argmax, draft_status, map_to, map_size,
    PROBS: tl.constexpr, BONUS: tl.constexpr, draft_values, draft_tiles, vocab, alpha, beta, mixture,
    LAW: tl.constexpr, VARIANT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program a position that has a draft row: its ``mixture``, see `load_mixtures`. Some sum over all ids first."""
    draft_row = tl.program_id(0).to(tl.int64)
    b = draft_row // (width + BONUS)
    i = draft_row % (width + BONUS)
    wanted, first = needed(b, i, blocks, BONUS == 0)
    if wanted:
        row = b * (width + 1) + i
        start = target + b * target_stride_batch + (first + i) * target_stride_row
        draft_start = b * draft_stride_batch + (first + i) * draft_stride_row
        bound = tl.full((), -INFINITY, tl.float32)
        kept_id = tl.full((), -1, tl.int32)
        if LAW == LOSSY:
            accept = tl.div_rn(tl.full((), 1.0, tl.float32), 1.0 - alpha)
            scale = tl.div_rn(tl.full((), 1.0, tl.float32), tl.full((), beta, tl.float32))
            if VARIANT:
                scale = exact_scale(
                    accept, start, row, laws, argmax, tiles, draft, draft_start, draft_row, draft_vocab, draft_laws,
                    draft_argmax, map_to, map_size, vocab, PROBS, TILES,
                )  # fmt: skip
        else:
            p_max, p_top, p_entropy = load_raw(values, row)
            p_best = tl.load(argmax + row).to(tl.int32)
            if draft_values is None:
                q_max, q_top, q_entropy, q_best = raw_of_row(draft + draft_start, draft_vocab, draft_tiles, TILES)
            else:
                q_max, q_top, q_entropy = load_raw(draft_values, draft_row)
                q_best = tl.load(draft_argmax + draft_row).to(tl.int32)
            if (LAW == TOKEN_V1) | (LAW == TOKEN_V2) | (LAW == TOKEN_V3):
                # keeps the ids whose raw probability in the row that decides is at least `least`
                least = (1.0 - alpha) * p_top if LAW == TOKEN_V3 else p_top - alpha
                best = q_best if LAW == TOKEN_V1 else p_best
                maximum = q_max if LAW == TOKEN_V1 else p_max
                top = q_top if LAW == TOKEN_V1 else p_top
                reachable = (least > 0.0) & (least <= 1.0)
                lowest = maximum + tl.log(tl.div_rn(tl.where(reachable, least, 1.0), top))
                bound = tl.where(reachable, lowest, -INFINITY)
                kept_id = tl.where(tl.abs(maximum) < INFINITY, -1, best)
                kept_id = tl.where(reachable, kept_id, tl.where(least > 0.0, LAST_ID, -1))
                scale = tl.zeros((), tl.float32)  # becomes the mass of Q that is not kept
                for first_tile in range(0, tiles, TILES):
                    ids = tile_ids(first_tile, TILES)
                    _, q = pair(
                        start, row, laws, argmax, 1.0, draft, draft_start, draft_row, draft_vocab, draft_laws,
                        draft_argmax, map_to, map_size, ids, vocab, PROBS,
                    )  # fmt: skip
                    kept = is_kept(
                        start, draft + draft_start, draft_vocab, map_to, map_size, ids, vocab, bound, kept_id,
                        DRAFT_ROW if LAW == TOKEN_V1 else TARGET_ROW,
                    )  # fmt: skip
                    scale += tl.sum(tl.sum(tl.where(kept, 0.0, q), 1), 0)
            else:
                if LAW == CHOW:
                    defer = q_entropy > alpha if VARIANT else q_top < 1.0 - alpha
                elif LAW == BILD:
                    if VARIANT:
                        x = load_logits(start, q_best, vocab)
                        distance = surprise(x, q_best, p_max, p_top, p_best)
                    else:
                        distance = tl.zeros((), tl.float32)  # - sum q log p
                        certain = tl.where(tl.abs(q_max) < INFINITY, 1.0, -1.0)
                        for first_tile in range(0, tiles, TILES):
                            ids = tile_ids(first_tile, TILES)
                            raw_q = draft_probabilities(
                                draft, draft_start, draft_vocab, map_to, map_size, ids, q_max, -INFINITY, certain,
                                q_top, q_best, PROBS,
                            )  # fmt: skip
                            cost = surprise(load_logits(start, ids, vocab), ids, p_max, p_top, p_best)
                            distance += tl.sum(tl.sum(tl.where(raw_q > 0.0, raw_q * cost, 0.0), 1), 0)
                    defer = distance > alpha
                else:
                    gain = q_entropy - p_entropy if VARIANT else p_top - q_top
                    price = tl.full((), alpha, tl.float32)
                    if LAW == OPT:
                        # a total variation is in [0, 1]: between 0 and alpha it decides
                        if (gain > tl.minimum(price, 0.0)) & (gain <= tl.maximum(price, 0.0)):
                            price *= left_over(
                                1.0, start, row, laws, argmax, tiles, draft, draft_start, draft_row, draft_vocab,
                                draft_laws, draft_argmax, map_to, map_size, vocab, PROBS, TILES,
                            )  # fmt: skip
                    defer = gain > price
                scale = defer.to(tl.float32)
                kept_id = tl.where(defer, LAST_ID, -1)
            accept = scale
        mixture += draft_row * 4
        tl.store(mixture, accept)
        tl.store(mixture + 1, scale)
        tl.store(mixture + 2, bound)
        tl.store(mixture + 3, kept_id.to(tl.float32, bitcast=True))


@dataclass
class TargetLaw:
    """A law that is not lossless, as the ops take it."""

    number: int
    variant: bool
    alpha: float
    beta: float

    NONE: ClassVar[tuple[object, ...]] = (None, NO_ROW.value)

    @property
    def is_cascade(self) -> bool:
        """Whether it looks at the raw rows."""
        return self.number != LOSSY.value

    @property
    def kept_by(self) -> int:
        """Whose row decides which ids are kept."""
        if not self.is_cascade:
            return int(NO_ROW.value)
        return int(DRAFT_ROW.value if self.number == TOKEN_V1.value else TARGET_ROW.value)

    def arguments(
        self, target: Rows, found: Laws, draft: DraftLaws | None, width: int, blocks: Tensor
    ) -> tuple[object, ...]:
        """What kernels take of the law: the mixtures of all rows that have a draft row, and `kept_by`."""
        n = width if draft is None else draft.rows.n
        mixture = torch.empty(target.batch, n, 4, dtype=torch.float32, device=target.data.device)
        draft_args = DraftLaws.NONE if draft is None else draft.arguments
        draft_raw = (None, 0) if draft is None else (draft.values, tiles_of(draft.rows.vocab))
        run(
            mixtures, (target.batch * n,), *target.address, tiles_of(target.vocab), blocks, width, found.laws,
            found.argmax, found.status, found.values, *draft_args, *draft_raw, target.vocab, self.alpha, self.beta,
            mixture, LAW=self.number, TILES=tiles_a_program(target.vocab, 2), warps=8, registers=128,
            # all of a one-hot draft's mass is on the token that was rejected: the residual's scale does not matter
            VARIANT=self.variant and (self.is_cascade or draft is not None),
        )  # fmt: skip
        return mixture, self.kept_by
