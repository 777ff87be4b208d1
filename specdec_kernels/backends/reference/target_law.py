"""Target laws: what each makes of the draft's law and the target's at a position.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), equations 6 and 13–15, lemmas
2 and 4, appendix C. Here P and Q are the laws after the sampling transform, p and q the raw ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ... import laws
from ...ops.arguments import VerifyArguments
from ...sampling import DEFAULT_PARAMS
from .draft import onto_target
from .law import clean, make_law, make_params, raw_entropies, remainder, tile_sum
from .rows import at

BISECTIONS = 24  # of [0, 1]: down to float32's precision


@dataclass
class Mixtures:
    """What a target law π is at each row: a few numbers and which ids are kept, as the kernels have it.

    A cascade's π is ``kept Q + scale P``; of a lossy law (and the lossless one, accept = scale = 1) it is ``max(min(Q,
    accept P), scale P)``, where that sums to 1. A token from Q is accepted with probability ``min(1, accept P / Q)``,
    and always where it is kept.
    """

    accept: Tensor  # [batch, n]
    scale: Tensor  # [batch, n]
    kept: Tensor  # [batch, n, vocab] bool
    is_cascade: bool
    at_bonus: bool  # a cascade's bonus is drawn from π, too

    def at(self, row: Tensor) -> Mixtures:
        """One row of each sequence ``[batch]``, without its dimension."""
        return replace(self, accept=at(self.accept, row), scale=at(self.scale, row), kept=at(self.kept, row))

    def of(self, tokens: Tensor) -> Mixtures:
        """The first rows, seen by their tokens ``[batch, n]`` alone."""
        n = tokens.shape[1]
        kept = self.kept[:, :n].gather(-1, tokens[..., None])
        return replace(self, accept=self.accept[:, :n], scale=self.scale[:, :n], kept=kept)

    def probs(self, P: Tensor, Q: Tensor) -> Tensor:
        """π, from P and Q ``[..., vocab]``."""
        if self.is_cascade:
            return torch.where(self.kept, Q, 0.0) + self.scale[..., None] * P
        return torch.minimum(Q, self.accept[..., None] * P).maximum(self.scale[..., None] * P)

    def remainder(self, P: Tensor, Q: Tensor, w: Tensor) -> Tensor:
        """``(w π − Q)+`` for 0 < w <= 1; of a lossy law ``(w scale P − Q)+``, which is the same in the end."""
        # where an id is kept, w (Q + scale P) − Q without the cancellation
        return remainder(P, torch.where(self.kept, (1 - w)[..., None] * Q, Q), w * self.scale)


def make_mixtures(args: VerifyArguments, P: Tensor, Q: Tensor) -> Mixtures:
    """Those of the rows of Q ``[batch, n, vocab]``; the remaining rows of P are all the target's."""
    law, (batch, rows, vocab) = args.law, Q.shape
    more, P = P.shape[1] - rows, P[:, :rows]
    one = P.new_ones(batch, rows)
    accept, scale, kept = one, one, torch.zeros_like(P[..., :1], dtype=torch.bool)
    if law.number == laws.Lossy.number:
        accept = one * (1 / (1 - law.alpha))
        scale = one / law.beta
        one_hot = args.draft_logits is None and args.draft_probs is None
        if law.variant and not one_hot:  # of a one-hot draft's remainder only the direction counts
            scale = exact_scale(P, Q, 1 / (1 - law.alpha))
    elif law.is_cascade:
        defer = CASCADES[law.number](Position(args, P, Q))
        kept = ~defer
        by_row = defer.shape[-1] == 1
        scale = accept = defer[..., 0].to(P.dtype) if by_row else tile_sum(torch.where(defer, Q, 0.0))
    scale, accept = (torch.nn.functional.pad(t, (0, more), value=1.0) for t in (scale, accept))
    kept = torch.nn.functional.pad(kept, (0, 0, 0, more)).expand(-1, -1, vocab)
    return Mixtures(accept, scale, kept, law.is_cascade, law.cascade_bonus)


def exact_scale(P: Tensor, Q: Tensor, a: float) -> Tensor:
    """1/β in [0, 1] such that ``Σ (P/β − Q)+ = 1 − Σ min(Q, a P)``, by bisection."""
    accepts = P.new_full(P.shape[:-1], a)
    rejected = (tile_sum(remainder(P, Q, accepts)) + (1 - a)).clamp_min(0.0)  # Σ (a P − Q)+ = a − Σ min(Q, a P)
    return scale_that_leaves(P, Q, rejected)


def scale_that_leaves(P: Tensor, Q: Tensor, rejected: Tensor) -> Tensor:
    """s in [0, 1] such that ``Σ (s P − Q)+ = rejected``, by bisection."""
    low, high = torch.zeros_like(rejected), torch.ones_like(rejected)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = tile_sum(remainder(P, Q, middle)) > rejected
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high


# --- cascades: where each defers to the target ------------------------------------------------------------------------


class Position:
    """What a cascade may look at: laws over target ids ``[batch, n, vocab]`` and numbers of a row ``[batch, n, 1]``.

    Its decision must rise with max p, H(q), the surprises and fall with the others, or the other way round, because
    margins look at these ends alone (`loose_laws.LoosePosition`).
    """

    def __init__(self, args: VerifyArguments, P: Tensor, Q: Tensor) -> None:
        assert args.draft_logits is not None
        self.P, self.Q = P, Q
        self.alpha, self.variant = args.law.alpha, args.law.variant
        self._logits, self._draft_logits = args.target_logits[:, : Q.shape[1]], args.draft_logits
        raw = make_params(P.shape[0], P, DEFAULT_PARAMS._flat)
        self._target, self._draft = make_law(self._logits, raw), make_law(self._draft_logits, raw)
        self.p, self.max_p = self._target.probs, self._target.probs.amax(-1, keepdim=True)
        self.q = onto_target(self._draft.probs, args.target_to_draft, P.shape[-1])
        self.max_q = self._draft.probs.amax(-1, keepdim=True)
        self.draft_argmax = self._draft.argmax[..., None]

    @cached_property
    def entropy_p(self) -> Tensor:
        """H(p) in nats."""
        return raw_entropies(self._logits)[1][..., None]

    @cached_property
    def entropy_q(self) -> Tensor:
        """H(q) in nats."""
        return raw_entropies(self._draft_logits)[1][..., None]

    @cached_property
    def total_variation(self) -> Tensor:
        """TV(P, Q)."""
        return tile_sum(remainder(self.P, self.Q, torch.ones_like(self.P[..., 0])))[..., None]

    @cached_property
    def surprise(self) -> Tensor:
        """−log p ``[batch, n, vocab]``; from the logits, as p itself may have underflowed."""
        maximum, normalizer = self._target.maximum[..., None], self._target.normalizer[..., None]
        certain = torch.where(self.p > 0, 0.0, torch.inf)
        return torch.where(maximum.isinf(), certain, maximum - clean(self._logits) + normalizer.log())

    @cached_property
    def argmax_surprise(self) -> Tensor:
        """−log p of the draft's argmax."""
        return self.surprise.gather(-1, self.draft_argmax)

    @cached_property
    def cross_entropy(self) -> Tensor:
        """−Σ q log p."""
        return tile_sum(torch.where(self.q > 0, self.q * self.surprise, 0.0))[..., None]


Defers = Callable[[Position], Tensor]
"""Where π takes the target's law: rows ``[batch, n, 1]``, or ids ``[batch, n, vocab]``."""
CASCADES: dict[int, Defers] = {}


def cascade(law: type[laws.TargetLaw]) -> Callable[[Defers], Defers]:
    """Registers what one of `sk.laws` does."""

    def register(defers: Defers) -> Defers:
        CASCADES[law.number] = defers
        return defers

    return register


@cascade(laws.Chow)
def chow(x: Position) -> Tensor:
    """``max q < 1 − α``, or ``H(q) > α``."""
    return x.entropy_q > x.alpha if x.variant else x.max_q < 1 - x.alpha


def gain(x: Position) -> Tensor:
    """How much surer the target is than the draft: ``max p − max q``, or ``H(q) − H(p)``."""
    return x.entropy_q - x.entropy_p if x.variant else x.max_p - x.max_q


@cascade(laws.Diff)
def diff(x: Position) -> Tensor:
    """``max q < max p − α``, or ``H(q) > H(p) + α``."""
    return gain(x) > x.alpha


@cascade(laws.Opt)
def opt(x: Position) -> Tensor:
    """``max q < max p − α TV(P, Q)``, or ``H(q) > H(p) + α TV(P, Q)`` (lemma 4)."""
    return gain(x) > x.alpha * x.total_variation


@cascade(laws.BiLD)
def bild(x: Position) -> Tensor:
    """``−Σ q log p > α``, or ``−log p > α`` of the draft's argmax."""
    return (x.argmax_surprise if x.variant else x.cross_entropy) > x.alpha


@cascade(laws.TokenV1)
def token_v1(x: Position) -> Tensor:
    """``q(v) < max p − α`` (equation 13)."""
    return x.q < x.max_p - x.alpha


@cascade(laws.TokenV2)
def token_v2(x: Position) -> Tensor:
    """``p(v) < max p − α`` (equation 14)."""
    return x.p < x.max_p - x.alpha


@cascade(laws.TokenV3)
def token_v3(x: Position) -> Tensor:
    """``p(v) < (1 − α) max p`` (equation 15)."""
    return x.p < (1 - x.alpha) * x.max_p
