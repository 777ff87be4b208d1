"""P, Q and what a target law makes of them at each row, as intervals: see `intervals`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ... import laws
from ...ops.arguments import VerifyArguments
from ...sampling import DEFAULT_PARAMS
from .draft import can_give, onto_target
from .intervals import Ends, LooseRows, entropy, left, probs
from .law import Params, accept_token, make_params, next_block_weight
from .target_law import CASCADES, Mixtures, Position, scale_that_leaves


class LooseLaws(NamedTuple):
    """What is known of one row of each sequence: ends ``[batch, vocab]``."""

    weights: Ends  # of the target, relative to the largest
    P: Ends
    Q: Ends
    mixtures: tuple[Mixtures, Mixtures]  # the least and the most that the target law makes of them

    def pi(self) -> Ends:
        """π."""
        low, high = self.mixtures
        return low.probs(self.P[0], self.Q[0]), high.probs(self.P[1], self.Q[1])

    def left(self, w: Ends) -> Ends:
        """``(w π − Q)+``, w ``[batch]``."""
        low, high = self.mixtures
        return low.remainder(self.P[0], self.Q[1], w[0]), high.remainder(self.P[1], self.Q[0], w[1])

    def gives(self, token: Tensor, q: Tensor) -> Ends:
        """Whether Q can surely have given a token ``[batch]``, and surely not; q is what it is without error."""
        return gives(q, of_token(self.Q, token))

    def coin(self, token: Tensor, u: Tensor) -> Ends:
        """Whether the coin u ``[batch]`` surely accepts a token, and surely does not."""
        (p, q), (low, high) = (of_token(self.P, token), of_token(self.Q, token)), self.mixtures
        kept, may_be_kept = of_token((low.kept, high.kept), token)
        accepted, rejected = accept_token(u, low.accept * p[0], q[1]), ~accept_token(u, high.accept * p[1], q[0])
        return kept | accepted, ~may_be_kept & rejected

    def next_weights(self, token: Tensor, w: Ends) -> Ends:
        """Of a path that goes on with a token: ``min(1, w π / Q)``, which rises with P / Q."""
        p, q, kept = (
            of_token(ends, token) for ends in (self.P, self.Q, (self.mixtures[0].kept, self.mixtures[1].kept))
        )
        ends = []
        for i, mixtures in enumerate(self.mixtures):
            of_x = replace(mixtures, kept=kept[i][:, None]).probs(p[i][:, None], q[1 - i][:, None])[:, 0]
            ends.append(torch.where(w[i] > 0, next_block_weight(w[i], of_x, q[1 - i]), 0.0))
        return ends[0], ends[1]


def of_token(ends: Ends, token: Tensor) -> Ends:
    """Of ends ``[batch, vocab]``, those of a token of each sequence ``[batch]``."""
    at = token[:, None]
    return ends[0].gather(-1, at)[:, 0], ends[1].gather(-1, at)[:, 0]


def gives(exact: Tensor, q: Ends) -> Ends:
    """Whether a draft can surely have given tokens of probability `exact`, known as q, and surely not ``[batch]``."""
    possible = can_give(exact)
    return possible & (q[0] > 0), ~possible & ~((exact == 0) & (q[1] > 0))


class LooseStep:
    """The rows of a step ``[batch, n, vocab]``, and what they come to where each may be off by m ``[batch]``."""

    def __init__(self, shared: VerifyArguments, params: Params, draft_params: Params, Q: Tensor | None) -> None:
        """Q: the draft's probabilities over target ids, without error; None: nothing is made of them."""
        self.shared, self.params, self.draft_params, self.Q = shared, params, draft_params, Q
        self.point = shared.draft_logits is None and shared.draft_probs is None
        draft = () if shared.draft_logits is None else shared.draft_logits.unbind(1)
        self.targets = [LooseRows(rows, params) for rows in shared.target_logits.unbind(1)]
        self.drafts = [LooseRows(rows, draft_params) for rows in draft]
        self.raw: list[tuple[LooseRows, LooseRows]] = []
        if shared.law.is_cascade:
            plain = make_params(shared.target_logits.shape[0], shared.target_logits, DEFAULT_PARAMS._flat)
            rows_of_both = zip(shared.target_logits.unbind(1), draft, strict=False)
            self.raw = [(LooseRows(target, plain), LooseRows(of_draft, plain)) for target, of_draft in rows_of_both]

    def at(self, j: int, m: Tensor) -> LooseLaws:
        """Row j of each sequence."""
        weights = self.targets[j].weights(m)
        P, (_, Q) = probs(weights), self.draft(j, m)
        return LooseLaws(weights, P, Q, self._mixtures(j, m, P, Q))

    def draft(self, j: int, m: Tensor) -> tuple[Ends, Ends]:
        """The draft's weights over target ids at row j, and Q."""
        if j < len(self.drafts):
            low, high = (self.onto_target(end) for end in self.drafts[j].weights(m))
            return (low, high), probs((low, high))
        assert self.Q is not None
        Q, by = self.Q[:, j], 1.0 if self.point else m[:, None].exp()
        return (Q / by, Q * by), (Q / by**2, Q * by**2)

    def onto_target(self, of_draft: Tensor) -> Tensor:
        return onto_target(of_draft, self.shared.target_to_draft, self.shared.target_logits.shape[-1])

    def _mixtures(self, j: int, m: Tensor, P: Ends, Q: Ends) -> tuple[Mixtures, Mixtures]:
        law, one = self.shared.law, torch.ones_like(m)
        none = torch.zeros_like(P[0], dtype=torch.bool)
        lossless = Mixtures(one, one, none, law.is_cascade, law.cascade_bonus)
        if law.number == laws.Lossy.number:
            accept = 1 / (1 - law.alpha)
            scales = (one / law.beta,) * 2
            if law.variant and not self.point:  # falls as P and Q rise
                rejected = [(1 - q.minimum(accept * p).sum(-1)).clamp_min(0.0) for p, q in zip(P, Q, strict=True)]
                scales = scale_that_leaves(P[1], Q[1], rejected[1]), scale_that_leaves(P[0], Q[0], rejected[0])
            low, high = (replace(lossless, accept=one * accept, scale=scale) for scale in scales)
            return low, high
        if j >= len(self.raw):
            return lossless, lossless
        first, second = (CASCADES[law.number](self._position(j, m, P, Q, end)) for end in (0, 1))
        sure, maybe = first & second, first | second
        by_row = sure.shape[-1] == 1
        scales = (
            (sure[:, 0].to(one.dtype), maybe[:, 0].to(one.dtype)) if by_row
            else (torch.where(sure, Q[0], 0.0).sum(-1), torch.where(maybe, Q[1], 0.0).sum(-1).clamp_max(1.0))
        )  # fmt: skip
        accepts = (one, one) if by_row else scales  # of a row that keeps nothing
        return (
            replace(lossless, accept=accepts[0], scale=scales[0], kept=~maybe.expand_as(none)),
            replace(lossless, accept=accepts[1], scale=scales[1], kept=~sure.expand_as(none)),
        )

    def _position(self, j: int, m: Tensor, P: Ends, Q: Ends, end: int) -> Position:
        """Where a cascade defers least (0) and most (1). The raw rows have temperature 1: an error of m temperatures in
        a logit moves them by that much more where the temperature is higher, and their own rounding is not less than m.
        """
        target, draft = self.raw[j]
        by, of_draft = (
            m * torch.where(params.greedy, 1.0, params.temperature.clamp_min(1.0))[:, 0]
            for params in (self.params, self.draft_params)
        )
        return LoosePosition(self.shared, target, by, draft, of_draft, left(P, Q, (torch.ones_like(m),) * 2), end)


class LoosePosition(Position):
    """What a cascade looks at in one row of each sequence, at those ends that make it defer least (0) or most (1)."""

    def __init__(
        self, args: VerifyArguments, target: LooseRows, m: Tensor, draft: LooseRows, of_draft: Tensor, rest: Ends,
        end: int,
    ) -> None:  # fmt: skip
        """`rest`: ``(P − Q)+``."""
        self.alpha, self.variant = args.law.alpha, args.law.variant
        weights, other = target.weights(m), 1 - end
        p, q = probs(weights), probs(draft.weights(of_draft))
        least, most = (onto_target(q[i], args.target_to_draft, p[0].shape[-1]) for i in (other, end))
        self.entropy_p, self.entropy_q = entropy(p)[other][:, None], entropy(q)[end][:, None]
        self.max_p, self.max_q = p[end].amax(-1, keepdim=True), q[other].amax(-1, keepdim=True)
        # what is the largest for sure is as large as the largest
        self.p = torch.where(target.first(m)[0], self.max_p, p[other])
        self.q = least
        self.total_variation = rest[other if self.alpha > 0 else end].sum(-1, keepdim=True).clamp_max(1.0)
        surprise = self._surprise(target, weights, m, end)
        self.cross_entropy = torch.where(most > 0, most * surprise, 0.0).sum(-1, keepdim=True)
        if surprise.shape == q[0].shape:
            candidates = draft.first(of_draft)[1]
            worst = surprise.masked_fill(~candidates, -torch.inf if end else torch.inf)
            self.argmax_surprise = worst.amax(-1, keepdim=True) if end else worst.amin(-1, keepdim=True)

    @staticmethod
    def _surprise(rows: LooseRows, weights: Ends, m: Tensor, end: int) -> Tensor:
        """An end of −log p; from the scores, as p itself may have underflowed."""
        by, total = m[:, None] * (2 * end - 1), weights[end].sum(-1, keepdim=True).log()
        certain = torch.where(rows.best, 0.0, torch.inf)
        return torch.where(rows.fixed, certain, (total - rows.scores + by).clamp_min(0.0))
