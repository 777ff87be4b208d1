"""From raw logits to a law and from a law to a token: the definitions that all reference ops share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ...flat import FlatParams
from ...ops.arguments import TILE, VerifyArguments
from ...sampling import SMALLEST_TEMPERATURE
from ...types import Status
from .rows import at, slots_upto

TILES_A_TREE = 256  # neighbouring tiles that are added as a balanced tree; see csrc/common/tile_sums.h
SMALLEST_EXPONENT = -87.0  # exp below this is 0 in every backend: float32 would leave the normal numbers
SMALLEST_WEIGHT = 2.0**-126  # a row without a larger one has none: 1 / max would overflow
SLACK = 0.01  # probabilities sum to 1 within it, and a draft's do not exceed 1 by more
TOP_P_REACHED = 1 - 2.0**-18  # what of top_p a mass has to reach: with 0.8, 0.5 + 0.3 does, however it was rounded


# --- sampling parameters ----------------------------------------------------------------------------------------------


class RowKind(Enum):
    """What rows hold: logits, weights that are proportional to probabilities, or probabilities, which sum to 1."""

    LOGITS, WEIGHTS, PROBS = range(3)


@dataclass
class Params:
    """Sampling parameters of each sequence, ``[batch, 1]`` in the compute dtype, made valid; `status` says where they
    were not.
    """

    temperature: Tensor
    top_k: Tensor | None  # None: off in every sequence
    top_p: Tensor | None  # None: off in every sequence
    min_p: Tensor
    min_p_first: bool
    status: Tensor  # [batch] int32
    rows: RowKind = RowKind.LOGITS

    @property
    def inverse_temperature(self) -> Tensor:
        """1 / temperature; 1 in greedy sequences, whose law does not use it."""
        return torch.where(self.greedy, 1.0, 1.0 / self.temperature)

    @property
    def greedy(self) -> Tensor:
        """[batch, 1] bool."""
        return self.temperature < SMALLEST_TEMPERATURE


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits (tests ask for it), else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def make_params(
    batch: int, like: Tensor, given: FlatParams, flags: Tensor | int = 0, rows: RowKind = RowKind.LOGITS
) -> Params:
    """An op's sampling parameters for laws of `rows` of `like`; what is out of range is read as 1 (temperature) or off.
    `flags` ``[batch]``: what is known of the sequences besides.
    """
    dtype = compute_dtype(like)

    def column(scalar: float, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        if tensor is None:
            return torch.full((batch, 1), scalar, dtype=dtype, device=like.device)
        return tensor[:, None].to(dtype)

    t, p, m = (
        column(given.temperature, given.temperatures, dtype), column(given.top_p, given.top_ps, dtype),
        column(given.min_p, given.min_ps, dtype),
    )  # fmt: skip
    bad_t, bad_p, bad_m = ~((t >= 0) & (t < math.inf)), ~(p >= 0), ~((m >= 0) & (m <= 1))
    status = torch.where((bad_t | bad_p | bad_m)[:, 0], int(Status.BAD_PARAM), 0).to(torch.int32) | flags
    t, p, m = t.masked_fill(bad_t, 1.0), p.masked_fill(bad_p, 1.0), m.masked_fill(bad_m, 0.0)
    no_top_k = given.top_ks is None and not given.top_k > 0
    no_top_p = given.top_ps is None and not 0 < given.top_p < 1
    top_k = None if no_top_k else column(given.top_k, given.top_ks, torch.int64)
    return Params(t, top_k, None if no_top_p else p, m, given.min_p_first, status, rows)


def rows_of_target(args: VerifyArguments) -> RowKind:
    """What the target's rows of a verify step hold."""
    return RowKind.PROBS if args.target_probs else RowKind.LOGITS


def untruncated(params: Params) -> Params:
    """The same temperatures with nothing cut."""
    return Params(params.temperature, None, None, torch.zeros_like(params.min_p), False, params.status)


# --- row laws ---------------------------------------------------------------------------------------------------------


@dataclass
class RowLaws:
    """The laws P of rows of logits ``[batch, n, vocab]``: ``P(v) = exp(scores_v) / normalizer``."""

    probs: Tensor  # [batch, n, vocab]
    scores: Tensor  # [batch, n, vocab]: (logit − max) / temperature where kept, −inf elsewhere; 0 / −inf where one_hot
    maximum: Tensor  # [batch, n], and so on: what `RowStats` says of a row
    cutoff: Tensor
    normalizer: Tensor
    log_normalizer: Tensor
    argmax: Tensor  # [batch, n] int64
    one_hot: Tensor  # [batch, n] bool: all mass on argmax (greedy, +inf, nothing possible)

    def at(self, row: Tensor) -> Remainder:
        """What a token of one row of each sequence ``[batch]`` is drawn from."""
        return Remainder(at(self.probs, row), at(self.one_hot, row), at(self.argmax, row))


def lowest_argmax(x: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows ``[..., vocab]`` without NaN the lowest id of the largest value, and where in a row that is."""
    ids = torch.arange(x.shape[-1], device=x.device)
    lowest = torch.where(x == maximum[..., None], ids, x.shape[-1]).amin(-1)
    return lowest, ids == lowest[..., None]


def make_law(logits: Tensor, params: Params) -> RowLaws:
    """The sampling transform S of every row (temperature → top-k → top-p → min-p, or min-p first)."""
    if params.rows is not RowKind.LOGITS:
        return law_of_weights(logits, params)
    x = clean(logits)
    maximum = x.amax(-1)
    vocab = x.shape[-1]
    argmax, hot = lowest_argmax(x, maximum)
    one_hot = params.greedy | maximum.isinf()
    inverse_t = params.inverse_temperature[..., None]
    finite_max = torch.where(maximum.isinf(), 0.0, maximum)[..., None]

    scores = (x - finite_max) * inverse_t
    weights = exp(scores)
    # min-p as a bound on logits, not on probabilities: that needs no normaliser and no pass of its own
    likely = finite_max + (params.min_p.log() * torch.where(params.greedy, 1.0, params.temperature))[..., None]
    kept, cut = truncate(x, weights, likely, params)
    cutoff = torch.where(cut & ~one_hot, torch.where(kept, x, math.inf).amin(-1), -math.inf)
    weights = torch.where(kept, weights, 0.0)
    scores = torch.where(weights > 0, scores, -math.inf)
    normalizer = tile_sum(weights)
    if vocab > TILE:  # with one tile its maximum is the row's
        whole = merge_tiles(*tile_stats(x, inverse_t), maximum, inverse_t[..., 0])
        normalizer = torch.where(cut, normalizer, sum_of(whole))
    normalizer = torch.where(one_hot, 1.0, normalizer)
    probs = torch.where(one_hot[..., None], hot.to(x.dtype), weights / normalizer[..., None])
    scores = torch.where(one_hot[..., None], torch.where(hot, 0.0, -math.inf).to(x.dtype), scores)
    log_normalizer = maximum * inverse_t[..., 0] + normalizer.log()
    return RowLaws(probs, scores, maximum, cutoff, normalizer, log_normalizer, argmax, one_hot)


def law_of_weights(given: Tensor, params: Params) -> RowLaws:
    """The same of rows of weights, whose max is the largest of them and whose normaliser is relative to it; the
    temperature only says whether they are greedy.
    """
    x, total = positive(given), weights_sum(given)
    maximum = x.amax(-1)
    argmax, hot = lowest_argmax(x, maximum)
    one_hot = params.greedy | maximum.isinf() | total.isinf()
    finite_max = torch.where(maximum.isinf(), 1.0, maximum)[..., None]
    weights = x.clamp_min(0.0) / finite_max
    kept, cut = truncate(x, weights, finite_max * params.min_p[..., None], params)
    cutoff = torch.where(cut & ~one_hot, torch.where(kept, x, math.inf).amin(-1), -math.inf)
    weights = torch.where(kept, weights, 0.0)
    normalizer = torch.where(one_hot, 1.0, tile_sum(weights))
    probs = torch.where(one_hot[..., None], hot.to(x.dtype), weights / normalizer[..., None])
    scores = torch.where(one_hot[..., None], hot.to(x.dtype), weights).log()
    log_normalizer = (maximum.clamp_min(0.0) * normalizer).log()
    return RowLaws(probs, scores, maximum, cutoff, normalizer, log_normalizer, argmax, one_hot)


def positive(weights: Tensor) -> Tensor:
    """Weights in the compute dtype, −inf for what is not one: NaN, 0, negatives, and a whole row without any."""
    x = weights.to(compute_dtype(weights))
    x = torch.where(x > 0, x, -math.inf)
    return x.masked_fill(x.amax(-1, keepdim=True) < SMALLEST_WEIGHT, -math.inf)


def weights_sum(weights: Tensor) -> Tensor:
    """``[batch, n]``: the sum of each row's; infinite where one is negative (−inf counts as 0)."""
    x = weights.to(compute_dtype(weights)).nan_to_num(0.0, math.inf, 0.0)
    return torch.where((x < 0).any(-1), math.inf, tile_sum(x.clamp_min(0.0)))


def clean(logits: Tensor) -> Tensor:
    """In the compute dtype, NaN read as −inf."""
    x = logits.to(compute_dtype(logits))
    return x.masked_fill(x.isnan(), -math.inf)


def row_status(logits: Tensor, params: Params) -> Tensor:
    """The flags of each row ``[batch, n]``: NaN, +inf, nothing possible, bad parameters."""
    status = torch.where(logits.isnan().any(-1), int(Status.NAN), 0)
    status = status | torch.where((logits == math.inf).any(-1), int(Status.INF), 0)
    x = clean(logits) if params.rows is RowKind.LOGITS else positive(logits)
    empty = (x == -math.inf).all(-1)
    status = status | torch.where(empty, int(Status.EMPTY_ROW), 0)
    if params.rows is not RowKind.LOGITS:
        total = weights_sum(logits)
        bad = total.isinf() if params.rows is RowKind.WEIGHTS else ~((total - 1).abs() <= SLACK)
        summed = ~params.greedy & ~empty & ~(logits == math.inf).any(-1)
        status = status | torch.where(bad & summed, int(Status.BAD_PARAM), 0)
    return status.to(torch.int32) | params.status[:, None]


def raw_entropies(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-normaliser and entropy in nats ``[batch, n]`` of the raw laws (temperature 1, nothing cut)."""
    x = clean(logits)
    maximum = x.amax(-1)
    shifted = x - torch.where(maximum.isinf(), 0.0, maximum)[..., None]
    raw = exp(shifted)
    normalizer = tile_sum(raw)
    log_normalizer = maximum + torch.where(maximum.isinf(), 0.0, normalizer.log())
    spread = tile_sum(raw * torch.where(raw > 0, shifted, 0.0)) / normalizer
    return log_normalizer, torch.where(maximum.isinf(), 0.0, normalizer.log() - spread)


def exp(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, exactly 0 below `SMALLEST_EXPONENT`."""
    return torch.where(x < SMALLEST_EXPONENT, 0.0, x.exp())


def truncate(x: Tensor, weights: Tensor, likely_from: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """Which ids top-k, top-p and min-p keep ``[batch, n, vocab]``, and whether anything may be cut at all ``[batch,
    n]``. min-p cuts what is below `likely_from` ``[batch, n, 1]``.
    """
    vocab = x.shape[-1]
    m = params.min_p[..., None]
    cut = m > 0
    likely = ~cut | (x >= likely_from)
    kept = likely if params.min_p_first else torch.ones_like(likely)
    if params.top_k is not None or params.top_p is not None:
        order = x.sort(-1, descending=True)
    if params.top_k is not None:
        k = params.top_k[..., None]
        on = (k > 0) & (k < vocab)
        cut = cut | on
        kth = order.values.gather(-1, (k.clamp(1, vocab) - 1).expand(*x.shape[:-1], 1))
        kept = kept & (~on | (x >= kth))
    if params.top_p is not None:
        p = params.top_p[..., None]
        on = (p > 0) & (p < 1)
        cut = cut | on
        mass = torch.where(kept, weights, 0.0).gather(-1, order.indices)
        above = mass.cumsum(-1) - mass
        # an id stays iff what lies strictly above its value is still short of top_p: so ties live and die together
        goal = p * TOP_P_REACHED * mass.sum(-1, keepdim=True)
        before = above.gather(-1, first_equals(order.values))
        short = (before < goal) | (before <= 0)  # the largest stays even where a tiny goal is flushed to 0
        kept = kept & (~on | torch.zeros_like(kept).scatter(-1, order.indices, short))
    return kept & likely & (x > -math.inf), cut[..., 0].expand(x.shape[:-1])


def first_equals(values: Tensor) -> Tensor:
    """In rows that are sorted, where the first value equal to each one stands."""
    differs = torch.ones_like(values, dtype=torch.bool)
    differs[..., 1:] = values[..., 1:] != values[..., :-1]
    return torch.where(differs, slots_upto(values.shape[-1], values), 0).cummax(-1).values


# --- from a law to a token --------------------------------------------------------------------------------------------


class Remainder(NamedTuple):
    """What one token of each sequence is drawn from: weights that need not be normalised, or one id alone."""

    weights: Tensor  # [batch, vocab], >= 0
    certain: Tensor  # [batch] bool: all of it is on `argmax`, and no uniform is looked at
    argmax: Tensor  # [batch] int64

    def draw(self, uniform: Tensor) -> Tensor:
        """``[batch]`` int64, by uniforms ``[batch]``."""
        return torch.where(self.certain, self.argmax, draw(self.weights, uniform))


def remainder(P: Tensor, Q: Tensor, w: Tensor) -> Tensor:
    """``(w P − Q)+``: what is left of P where a token from Q was rejected; ``[..., vocab]``, w ``[...]``."""
    return (w[..., None] * P - Q).clamp_min(0.0)


def accept_token(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether the coin u accepts a token x that Q can have given: ``u Q(x) < P(x)``, strictly. Where Q(x) exceeds 1,
    that is rounding: if P(x) is 1 too, a coin close to 1 must not reject x.
    """
    return u * q.clamp_max(1.0) < p


def next_block_weight(w: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The weight with which a token x that Q can have given goes on: ``min(1, w P(x) / Q(x))``, w the path's so far."""
    return torch.where(p <= 0, 0.0, w * p / q.clamp_max(1.0)).clamp_max(1.0)


def block_threshold(w: Tensor, residual: Tensor) -> Tensor:
    """What is left of a path's weight without its next token, R the sum of its remainder: ``R / (R + 1 − w)``."""
    below = residual + 1 - w
    return torch.where(below > 0, residual / below, 1.0)


def tile_sum(weights: Tensor) -> Tensor:
    """Sum over the last dimension: tiles of 1024 ids, their sums added in trees of `TILES_A_TREE`, those in order."""
    return sum_of(tile_masses(weights))


def sum_of(masses: Tensor) -> Tensor:
    """The sum of tiles' masses ``[..., tiles]``."""
    return tree_levels(masses)[-1].cumsum(-1)[..., -1]


def tile_masses(weights: Tensor) -> Tensor:
    """``[..., vocab]`` to ``[..., tiles]``."""
    if weights.shape[-1] <= TILE:
        return weights.sum(-1, keepdim=True)
    return in_tiles(weights, 0.0).sum(-1)


def in_tiles(rows: Tensor, beyond: float) -> Tensor:
    """``[..., vocab]`` to ``[..., tiles, TILE]``, the last one filled up."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % TILE), value=beyond).unflatten(-1, (-1, TILE))


def tile_stats(x: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows ``[..., vocab]`` the tiles' maxima and their masses relative to those, ``[..., tiles]``."""
    tiles = in_tiles(x, -math.inf)
    maximum = tiles.amax(-1)
    finite = torch.where(maximum.isinf(), 0.0, maximum)
    mass = exp((tiles - finite[..., None]) * inverse_temperature[..., None]).sum(-1)
    return maximum, torch.where(maximum.isinf(), 0.0, mass)


def merge_tiles(tile_max: Tensor, tile_mass: Tensor, maximum: Tensor, inverse_temperature: Tensor) -> Tensor:
    """The same masses relative to the rows' maxima ``[...]``."""
    shift = (tile_max - torch.where(maximum.isinf(), 0.0, maximum)[..., None]) * inverse_temperature[..., None]
    return tile_mass * exp(shift.clamp_max(0.0))


def tree_levels(masses: Tensor) -> list[Tensor]:
    """Sums of neighbours: ``[..., tiles]`` filled up with zeros, each next half as wide, at last those of the trees."""
    tiles = masses.shape[-1]
    leaves = min(TILES_A_TREE, 1 << (tiles - 1).bit_length())
    levels = [torch.nn.functional.pad(masses, (0, -tiles % leaves))]
    for _ in range(leaves.bit_length() - 1):
        levels.append(levels[-1][..., 0::2] + levels[-1][..., 1::2])
    return levels


def find_tile(masses: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tile of each row of ``[rows, tiles]`` where a draw with `uniform` ``[rows]`` ends, what is left of its
    goal there, and the tile's mass; in float64. On an overrun, which ends at the last tile of positive mass, infinity
    is left.
    """
    *below, trees = tree_levels(masses.double())
    ends = trees.cumsum(-1)
    goal = uniform.double() * ends[:, -1]
    past = ends > goal[:, None]
    found = past.any(-1)
    last = torch.where(trees > 0, slots_upto(trees.shape[-1], trees), 0).amax(-1)
    node = torch.where(found, past.int().argmax(-1), last)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(-1, node[:, None])[:, 0]
    rest = torch.where(found, goal - before, math.inf)
    for sums in reversed(below):  # to the right one of two neighbours if the left one has no more than the rest
        left, right = (sums.gather(-1, 2 * node[:, None] + side)[:, 0] for side in (0, 1))
        goes_right = (rest >= left) & (right > 0)
        rest = torch.where(goes_right, rest - left, rest)
        node = 2 * node + goes_right
    return node, rest, masses.double().gather(-1, node[:, None].clamp_max(masses.shape[-1] - 1))[:, 0]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The id at which the running mass of `weights` first exceeds ``uniform · total``, by tiles and then by ids; an
    overrun takes the last possible id.

    Parameters
    ----------
    weights : Tensor
        ``[rows, vocab]``, >= 0, not necessarily normalised.
    uniform : Tensor
        ``[rows]`` in [0, 1).

    Returns
    -------
    Tensor
        ``[rows]`` int64; 0 in a row without any weight.
    """
    vocab = weights.shape[-1]
    tile, rest, mass = find_tile(tile_masses(weights), uniform)
    columns = tile[:, None] * TILE + slots_upto(min(TILE, vocab), weights)
    inside = torch.where(columns < vocab, weights.gather(-1, columns.clamp_max(vocab - 1)), 0.0)
    found = columns.gather(-1, find_inside(inside, rest, mass)[:, None])[:, 0]
    return found.clamp(0, vocab - 1)


def find_inside(weights: Tensor, rest: Tensor, mass: Tensor) -> Tensor:
    """The place in the weights ``[rows, n]`` of a tile of some mass where a draw ends that has `rest` left there: where
    their running sum first exceeds that share of them all; the last of positive weight on an overrun.
    """
    ends = weights.double().cumsum(-1)
    past = ends > rest[:, None] * (ends[:, -1:] / mass[:, None])
    last = torch.where(weights > 0, slots_upto(weights.shape[-1], weights), 0).amax(-1)
    return torch.where(past.any(-1), past.int().argmax(-1), last)
