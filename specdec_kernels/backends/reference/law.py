"""From raw logits to a law and from a law to a token: the definitions that all reference ops share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...types import Status

TILE = 1024
SMALLEST_EXPONENT = -87.0  # exp below this is 0 in every backend: float32 would leave the normal numbers
SMALLEST_TEMPERATURE = 2.0**-126  # below it 1 / temperature overflows; read as greedy


@dataclass
class Params:
    """Sampling parameters of each sequence, ``[batch, 1]`` in the compute dtype, made valid; `status` says where they
    were not.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    min_p_first: bool
    status: Tensor  # [batch] int32

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
    batch: int, like: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, min_p_first: bool,
    temperatures: Tensor | None, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None,
) -> Params:  # fmt: skip
    """Scalars or per-sequence tensors as ``[batch, 1]``; what is out of range is read as 1 (temperature) or off."""
    dtype = compute_dtype(like)

    def column(scalar: float, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        if tensor is None:
            return torch.full((batch, 1), scalar, dtype=dtype, device=like.device)
        return tensor[:, None].to(dtype)

    t, p, m = column(temperature, temperatures, dtype), column(top_p, top_ps, dtype), column(min_p, min_ps, dtype)
    bad_t, bad_p, bad_m = ~((t >= 0) & (t < math.inf)), ~(p >= 0), ~((m >= 0) & (m <= 1))
    status = torch.where((bad_t | bad_p | bad_m)[:, 0], int(Status.BAD_PARAM), 0).to(torch.int32)
    t, p, m = t.masked_fill(bad_t, 1.0), p.masked_fill(bad_p, 1.0), m.masked_fill(bad_m, 0.0)
    return Params(t, column(top_k, top_ks, torch.int64), p, m, min_p_first, status)


@dataclass
class Law:
    """The laws of rows of logits ``[batch, n, vocab]``: their probabilities and what `row_stats` reports of them."""

    probs: Tensor  # [batch, n, vocab]
    values: Tensor  # [batch, n, 6]
    argmax: Tensor  # [batch, n] int64
    status: Tensor  # [batch, n] int32
    one_hot: Tensor  # [batch, n] bool: all mass on argmax (greedy, +inf, nothing possible)
    scores: Tensor  # [batch, n, vocab]: (logit − max) / temperature where kept, −inf elsewhere; 0 / −inf where one_hot


def make_law(logits: Tensor, params: Params) -> Law:
    """The sampling transform S of every row (temperature → top-k → top-p → min-p, or min-p first)."""
    dtype = compute_dtype(logits)
    x = logits.to(dtype)
    status = torch.where(x.isnan().any(-1), int(Status.NAN), 0) | torch.where(
        (x == math.inf).any(-1), int(Status.INF), 0
    )
    x = x.masked_fill(x.isnan(), -math.inf)
    maximum = x.amax(-1)
    empty = maximum == -math.inf
    status = (status | torch.where(empty, int(Status.EMPTY_ROW), 0)).to(torch.int32) | params.status[:, None]
    vocab = x.shape[-1]
    ids = torch.arange(vocab, device=x.device)
    argmax = torch.where(x == maximum[..., None], ids, vocab).amin(-1).clamp_max(vocab - 1)
    argmax = torch.where(empty, 0, argmax)
    one_hot = params.greedy | maximum.isinf()
    inverse_t = params.inverse_temperature[..., None]
    finite_max = torch.where(maximum.isinf(), 0.0, maximum)[..., None]

    scores = (x - finite_max) * inverse_t
    weights = exp(scores)
    kept, cut = truncate(x, weights, finite_max, params)
    cutoff = torch.where(cut & ~one_hot, torch.where(kept, x, math.inf).amin(-1), -math.inf)
    weights = torch.where(kept, weights, 0.0)
    scores = torch.where(weights > 0, scores, -math.inf)
    normalizer = torch.where(one_hot, 1.0, tile_sum(weights))
    hot = ids == argmax[..., None]
    probs = torch.where(one_hot[..., None], hot.to(dtype), weights / normalizer[..., None])
    scores = torch.where(one_hot[..., None], torch.where(hot, 0.0, -math.inf).to(dtype), scores)

    log_normalizer = maximum * inverse_t[..., 0] + normalizer.log()
    raw = exp(x - finite_max)
    raw_normalizer = tile_sum(raw)
    raw_log_normalizer = maximum + torch.where(maximum.isinf(), 0.0, raw_normalizer.log())
    shifted = torch.where(raw > 0, x - finite_max, 0.0)
    raw_entropy = torch.where(maximum.isinf(), 0.0, raw_normalizer.log() - tile_sum(raw * shifted) / raw_normalizer)
    values = torch.stack([maximum, cutoff, log_normalizer, normalizer, raw_log_normalizer, raw_entropy], -1)
    return Law(probs, values, argmax, status, one_hot, scores)


def exp(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, exactly 0 below `SMALLEST_EXPONENT`."""
    return torch.where(x < SMALLEST_EXPONENT, 0.0, x.exp())


def truncate(x: Tensor, weights: Tensor, maximum: Tensor, params: Params) -> tuple[Tensor, Tensor]:
    """Which ids top-k, top-p and min-p keep ``[batch, n, vocab]``, and whether anything may be cut at all ``[batch,
    n]``.
    """
    vocab = x.shape[-1]
    k, p, m = params.top_k[..., None], params.top_p[..., None], params.min_p[..., None]
    k_on, p_on, m_on = (k > 0) & (k < vocab), (p > 0) & (p < 1), m > 0
    # min-p as a bound on logits, not on probabilities: that needs no normaliser and no pass of its own
    likely = ~m_on | (x >= maximum + m.log() / params.inverse_temperature[..., None])
    kept = likely if params.min_p_first else torch.ones_like(likely)
    kth = x.sort(-1, descending=True).values.gather(-1, (k.clamp(1, vocab) - 1).expand(*x.shape[:-1], 1))
    kept = kept & (~k_on | (x >= kth))
    order = torch.where(kept, x, -math.inf).sort(-1, descending=True)
    mass = torch.where(kept, weights, 0.0).gather(-1, order.indices)
    above = mass.cumsum(-1) - mass
    # an id stays iff what lies strictly above its value is still short of top_p: so ties live and die together
    first_equal = torch.searchsorted(-order.values.contiguous(), -order.values.contiguous()).clamp_max(vocab - 1)
    short = above.gather(-1, first_equal) < p * mass.sum(-1, keepdim=True)
    kept = kept & (~p_on | torch.zeros_like(kept).scatter(-1, order.indices, short))
    kept = kept & likely
    return kept & (x > -math.inf), (k_on | p_on | m_on)[..., 0].expand(x.shape[:-1])


def tile_sum(weights: Tensor) -> Tensor:
    """Sum over the last dimension: tiles of 1024 ids, their sums added in index order."""
    return tile_masses(weights).cumsum(-1)[..., -1]


def tile_masses(weights: Tensor) -> Tensor:
    """``[..., vocab]`` to ``[..., tiles]``."""
    vocab = weights.shape[-1]
    if vocab <= TILE:
        return weights.sum(-1, keepdim=True)
    padded = torch.nn.functional.pad(weights, (0, -vocab % TILE))
    return padded.unflatten(-1, (-1, TILE)).sum(-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The id at which the running mass of `weights` first exceeds ``uniform · total``; an overrun takes the last
    possible id.

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
    rows, vocab = weights.shape
    ids = torch.arange(vocab, device=weights.device)
    last = torch.where(weights > 0, ids, 0).amax(-1)
    masses = tile_masses(weights)
    tile_ends = masses.cumsum(-1)
    goal = uniform.to(weights.dtype) * tile_ends[:, -1]
    past = tile_ends > goal[:, None]
    tile = torch.where(past.any(-1), past.int().argmax(-1), last // TILE)
    rest = goal - (tile_ends - masses).gather(-1, tile[:, None])[:, 0]
    columns = tile[:, None] * TILE + torch.arange(min(TILE, vocab), device=weights.device)
    inside = torch.where(columns < vocab, weights.gather(-1, columns.clamp_max(vocab - 1)), 0.0)
    past = inside.cumsum(-1) > rest[:, None]
    last_inside = torch.where((inside > 0), columns, -1).amax(-1)
    found = columns.gather(-1, past.int().argmax(-1)[:, None])[:, 0]
    return torch.where(past.any(-1), found, last_inside).clamp(0, vocab - 1)
