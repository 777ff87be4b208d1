"""Target laws: what each makes of the draft's law and the target's at every position of a block.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), equations 6 and 13–15, lemmas
2 and 4, appendix C. In these functions P and Q are the laws after the sampling transform, p and q the raw ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .law import Law, make_law, make_params, tile_sum

LOSSLESS, LOSSY, CHOW, DIFF, OPT, TOKEN_V1, TOKEN_V2, TOKEN_V3, BILD = range(9)
BISECTIONS = 24  # of [0, 1]: down to float32's precision


@dataclass
class Mixture:
    """The law π of each row that has a draft law, as the kernels have it: a few numbers a row and which ids are kept.

    A cascade's π is ``kept Q + scale P``; of a lossy law (and the lossless one, a = scale = 1) it is ``max(min(Q, a P),
    scale P)``, where that sums to 1. Either way the residual is ``(scale P − Q)+``, without Q where an id is kept.
    """

    scale: Tensor  # [batch, n]
    accept: Tensor  # [batch, n]: a
    kept: Tensor | None  # [batch, n, vocab] bool; None: not a cascade

    def accepts(self, i: int, x: Tensor, coin: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Whether token `x` ``[batch, 1]`` of position i is accepted by a coin: ``u Q < π``."""
        by_coin = coin * q < self.accept[:, i] * p
        if self.kept is None:
            return by_coin
        return by_coin | self.needs_no_coin(i, x, q)

    def needs_no_coin(self, i: int, x: Tensor, q: Tensor) -> Tensor:
        """Whether `x` is kept, so that π(x) >= Q(x)."""
        assert self.kept is not None
        return self.kept[:, i].gather(-1, x)[:, 0] & (q > 0)

    def prob(self, i: int, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """π of token `x` ``[batch, 1]`` of position i."""
        if self.kept is None:
            return torch.minimum(q, self.accept[:, i] * p).maximum(self.scale[:, i] * p)
        return torch.where(self.kept[:, i].gather(-1, x)[:, 0], q, 0.0) + self.scale[:, i] * p

    def residual(self, scale: Tensor, kept: Tensor | None, weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """``(weight π − Q)+`` of rows ``[batch, vocab]`` with these `scale` ``[batch]`` and `kept`; 0 < weight <= 1."""
        # where an id is kept, weight (Q + scale P) − Q without the cancellation
        lost = q if kept is None else torch.where(kept, (1 - weight)[:, None] * q, q)
        return ((weight * scale)[:, None] * p - lost).clamp_min(0.0)


def make_mixture(
    number: int, variant: bool, alpha: float, beta: float, target_logits: Tensor, draft_logits: Tensor | None,
    target: Law, Q: Tensor | None, target_to_draft: Tensor | None,
) -> Mixture:  # fmt: skip
    """The mixtures of the first rows of `target`, as many as `Q` ``[batch, n, vocab]`` has (None: one-hot drafts, for
    which only the residual's direction counts).
    """
    n = target.probs.shape[1] - 1 if Q is None else Q.shape[1]
    P = target.probs[:, :n]
    one = P.new_ones(P.shape[:2])
    if number == LOSSLESS:
        return Mixture(one, one, None)
    if number == LOSSY:
        a = 1 / (1 - alpha)
        scale = one / beta
        if variant:
            scale = one if Q is None else exact_scale(P, Q, a)
        return Mixture(scale, one * a, None)
    assert draft_logits is not None and Q is not None
    raw = make_params(P.shape[0], target_logits, 1.0, 0, 1.0, 0.0, False, None, None, None, None)
    raw_target, raw_draft = make_law(target_logits[:, :n], raw), make_law(draft_logits, raw)
    p, q = raw_target.probs, raw_draft.probs
    max_p, max_q = p.amax(-1), q.amax(-1)
    entropy_p, entropy_q = raw_target.values[..., 5], raw_draft.values[..., 5]
    q = onto_target(q, target_to_draft, p.shape[-1])

    if number in (TOKEN_V1, TOKEN_V2, TOKEN_V3):
        if number == TOKEN_V1:
            deferred = q < (max_p - alpha)[..., None]
        elif number == TOKEN_V2:
            deferred = p < (max_p - alpha)[..., None]
        else:
            deferred = p < ((1 - alpha) * max_p)[..., None]
        eta = tile_sum(torch.where(deferred, Q, 0.0))
        return Mixture(eta, eta, ~deferred)

    if number == CHOW:
        defer = entropy_q > alpha if variant else max_q < 1 - alpha
    elif number == BILD:
        cost = surprise(target_logits[:, :n], raw_target)
        if variant:
            distance = cost.gather(-1, raw_draft.argmax[..., None])[..., 0]
        else:
            distance = tile_sum(torch.where(q > 0, q * cost, 0.0))
        defer = distance > alpha
    else:
        gain = entropy_q - entropy_p if variant else max_p - max_q
        if number == OPT:
            distance = tile_sum((P - Q).clamp_min(0.0))  # total variation
            defer = gain > alpha * distance
        else:
            defer = gain > alpha
    delta = defer.to(P.dtype)
    return Mixture(delta, delta, ~defer[..., None].expand_as(P))


def surprise(logits: Tensor, raw: Law) -> Tensor:
    """−log p of rows ``[batch, n, vocab]`` whose law p is `raw`; from the logits, as p itself may have underflowed."""
    maximum, normalizer = raw.values[..., :1], raw.values[..., 3:4]
    x = logits.to(maximum.dtype)
    x = x.masked_fill(x.isnan(), -torch.inf)
    certain = torch.where(raw.probs > 0, 0.0, torch.inf)
    return torch.where(maximum.isinf(), certain, maximum - x + normalizer.log())


def exact_scale(P: Tensor, Q: Tensor, a: float) -> Tensor:
    """1/β in [0, 1] such that ``Σ (P/β − Q)+ = 1 − Σ min(Q, a P)``, by bisection."""

    def left(scale: Tensor) -> Tensor:
        return tile_sum((scale[..., None] * P - Q).clamp_min(0.0))

    one = P.new_ones(P.shape[:2])
    rejected = (left(one * a) + (1 - a)).clamp_min(0.0)  # Σ (a P − Q)+ = a − Σ min(Q, a P)
    low, high = torch.zeros_like(one), one
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = left(middle) > rejected
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high


def onto_target(probs: Tensor, target_to_draft: Tensor | None, vocab: int) -> Tensor:
    """Draft probabilities over target ids: 0 where an id is not in the draft's vocabulary."""
    if target_to_draft is None:
        return probs
    index = torch.nn.functional.pad(target_to_draft, (0, vocab - target_to_draft.numel()), value=-1)
    return torch.where(index >= 0, probs[..., index.clamp_min(0)], 0.0)
