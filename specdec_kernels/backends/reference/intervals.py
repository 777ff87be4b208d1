"""Rows that are known up to a factor: which ids they keep, and their weights and probabilities, as intervals.

Each weight ``exp(logit / temperature)``, and each sum of weights, may be off by a factor between ``exp(−m)`` and
``exp(m)``, all of them independently. That covers logits that each move by at most m temperatures, and results computed
with relative errors of at most m. Then, with low and high marking the ends of an interval:

- a probability w / Σ w lies in [low w / high Σ, high w / low Σ];
- an id whose distance to a border (of top-k, min-p, the argmax) exceeds 2m is on its side of it for sure, because both
  ends of the distance move by at most m; whether top-p keeps it is a question of two sums;
- an id that is kept for sure adds its lower weight to the lower sums, one that may be kept its upper one to the upper.

The ends are monotone in m: what has one answer at m has the same at every smaller m.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .law import SMALLEST_EXPONENT, TOP_P_REACHED, Params, RowKind, clean, make_law, positive, remainder

Ends = tuple[Tensor, Tensor]
"""The lower and the upper end of an interval."""


class LooseRows:
    """Rows of logits, or of probabilities, ``[rows, vocab]``, that may be off by m ``[rows]``."""

    def __init__(self, given: Tensor, params: Params) -> None:
        law = make_law(given[:, None], params)
        self.params, self.argmax = params, law.argmax
        x = clean(given) if params.rows is RowKind.LOGITS else positive(given).clamp_min(0.0).log()
        top = x.gather(-1, law.argmax)
        self.scores = (x - torch.where(top.isinf(), 0.0, top)) * params.inverse_temperature  # at most 0
        self.ids = torch.arange(x.shape[-1], device=x.device)
        self.best = self.ids == self.argmax  # [rows, vocab] bool
        self.second = self.scores.masked_fill(self.best, -math.inf).amax(-1, keepdim=True)
        self.fixed = law.one_hot & (~params.greedy | law.maximum.isinf())  # all mass on argmax, whatever moves
        if params.top_k is not None or params.top_p is not None:
            self.order = self.scores.sort(-1, descending=True)

    def first(self, m: Tensor) -> Ends:
        """Which id is the argmax for sure, and which may be ``[rows, vocab]`` bool."""
        m2 = 2 * m[:, None]
        sure, maybe = self.best & (self.second < -m2), self.scores >= -m2
        return torch.where(self.fixed, self.best, sure), torch.where(self.fixed, self.best, maybe)

    def kept(self, m: Tensor) -> Ends:
        """Which ids are kept for sure, and which may be ``[rows, vocab]`` bool."""
        m2, s, params = 2 * m[:, None], self.scores, self.params
        is_best, may_be_best = self.first(m)
        m_p = params.min_p.log()
        likely = is_best | (s >= m_p + m2), s >= m_p - m2
        sure, maybe = likely if params.min_p_first else (torch.ones_like(likely[0]),) * 2
        if params.top_k is not None:
            vocab = s.shape[-1]
            off = (params.top_k <= 0) | (params.top_k >= vocab)
            k = params.top_k.clamp(1, vocab)
            kth, next_one = (self.order.values.gather(-1, i.clamp(0, vocab - 1)) for i in (k - 1, k))
            sure, maybe = sure & (off | (s > next_one + m2)), maybe & (off | (s >= kth - m2))
        if params.top_p is not None:
            sure, maybe = self._top_p(m, sure, maybe)
        possible = s > -math.inf
        sure, maybe = sure & likely[0] & possible, maybe & likely[1] & possible
        sure = torch.where(params.greedy, is_best, sure)
        maybe = torch.where(params.greedy, may_be_best, maybe)
        return torch.where(self.fixed, self.best, sure), torch.where(self.fixed, self.best, maybe)

    def _top_p(self, m: Tensor, sure: Tensor, maybe: Tensor) -> Ends:
        """Of what was kept before. An id stays iff what lies strictly above it is short of top_p."""
        p, m2, (values, order) = self.params.top_p, 2 * m[:, None], self.order
        assert p is not None
        off = (p <= 0) | (p >= 1)
        low, high = (w.gather(-1, order) for w in self._weights(m, sure, maybe))
        down = -values  # ascending
        surely_above, maybe_above = (torch.searchsorted(down, (down + by).contiguous()) for by in (-m2, m2))
        ends_low, ends_high = (torch.nn.functional.pad(w.cumsum(-1), (1, 0)) for w in (low, high))
        above_high = ends_high.gather(-1, maybe_above) - torch.where(maybe_above > self.ids, high, 0.0)
        goal = p * TOP_P_REACHED
        stays = above_high < goal * ends_low[:, -1:]
        may_stay = ends_low.gather(-1, surely_above) < goal * ends_high[:, -1:]
        stays, may_stay = (torch.zeros_like(off | sure).scatter(-1, order, t) for t in (stays, may_stay))
        return sure & (off | stays), maybe & (off | may_stay)

    def _weights(self, m: Tensor, sure: Tensor, maybe: Tensor) -> Ends:
        s, m = self.scores, m[:, None]
        low = torch.where(sure & (s - 2 * m >= SMALLEST_EXPONENT), (s - m).exp(), 0.0)
        return low, torch.where(maybe & (s + 2 * m >= SMALLEST_EXPONENT), (s + m).exp(), 0.0)

    def weights(self, m: Tensor) -> Ends:
        """``[rows, vocab]``, relative to the largest."""
        sure, maybe = self.kept(m)
        low, high = self._weights(m, sure, maybe)
        certain = self.fixed | self.params.greedy
        return torch.where(certain, sure.to(low.dtype), low), torch.where(certain, maybe.to(low.dtype), high)


def probs(weights: Ends) -> Ends:
    """Bounds of weights ``[rows, vocab]``, each divided by their sum."""
    low, high = weights
    smallest, largest = low.sum(-1, keepdim=True), high.sum(-1, keepdim=True)
    return low / largest, torch.where(high > 0, high / smallest, 0.0).clamp_max(1.0)


def entropy(probs: Ends) -> Ends:
    """In nats, of probabilities ``[rows, vocab]``: −p log p is largest at 1 / e, and smallest at an end."""
    low, high = (torch.special.entr(p) for p in probs)
    top = torch.special.entr(probs[1].minimum(probs[0].clamp_min(math.exp(-1))))
    return low.minimum(high).sum(-1), top.sum(-1)


def surely_drawn(weights: Ends, uniform: Tensor, token: Tensor) -> Tensor:
    """Whether a draw by `uniform` ends at `token` ``[rows]`` in all weights ``[rows, vocab]`` between these: what is
    before it does not exceed ``uniform · total``, what is up to it does, or nothing comes after it.
    """
    low, high = weights
    ids, at = torch.arange(low.shape[-1], device=low.device), token[:, None]
    before = torch.where(ids < at, high, 0.0).sum(-1)
    upto = torch.where(ids <= at, low, 0.0).sum(-1)
    last = ~((high > 0) & (ids > at)).any(-1)
    reached = last | (upto > uniform * high.sum(-1))
    return (low.gather(-1, at)[:, 0] > 0) & (before <= uniform * low.sum(-1)) & reached


def surely_best(rows: LooseRows, noise: Tensor | None, m: Tensor, tokens: Tensor) -> Tensor:
    """Whether each of `tokens` ``[rows, n]`` has for sure the largest of all logits plus `noise` ``[rows, vocab]`` once
    those before it are taken, and whether there is none where it is −1; where all mass is on one id, noise does not
    count.
    """
    sure, maybe = rows.kept(m)
    scores, m, certain = rows.scores, m[:, None], rows.fixed | rows.params.greedy
    if noise is not None:
        scores = scores + torch.where(certain, 0.0, noise)
    vocab, num = scores.shape[-1], tokens.shape[-1]
    there, at = tokens >= 0, tokens.clamp_min(0)
    taken = torch.zeros_like(torch.nn.functional.pad(maybe, (0, 1)))
    taken = taken.scatter(-1, torch.where(there, tokens, vocab), True)[:, :vocab]
    others = scores.masked_fill(~maybe | taken, -math.inf).amax(-1, keepdim=True)
    own = scores.gather(-1, at).masked_fill(~there, -math.inf)
    later = torch.nn.functional.pad(own, (0, 1), value=-math.inf).flip(-1).cummax(-1).values.flip(-1)[:, 1:]
    ahead = rows.fixed | (own - m > others.maximum(later) + m)
    none_left = certain | (maybe.sum(-1, keepdim=True) <= torch.arange(num, device=tokens.device))
    return torch.where(there, sure.gather(-1, at) & ahead, none_left)


def left(P: Ends, Q: Ends, w: Ends) -> Ends:
    """``(w P − Q)+`` ``[rows, vocab]``, w ``[rows]``."""
    return remainder(P[0], Q[1], w[0]), remainder(P[1], Q[0], w[1])


def unless_empty(where: Tensor, ends: Ends, other: Ends) -> Ends:
    """`ends` ``[rows, vocab]`` in the rows `where` ``[rows]``, if anything may be there, else `other`."""
    here = where[:, None] & (ends[1] > 0).any(-1, keepdim=True)
    return torch.where(here, ends[0], other[0]), torch.where(here, ends[1], other[1])
