"""Target laws: distributions other than the target's, for lossy speculative decoding and speculative cascades.

A *law* is what a token is drawn from: a distribution over the vocabulary. A target law combines the draft's and the
target's distributions at a position into the distribution π that verification produces there (Narasimhan et al.,
"Faster Cascades via Speculative Decoding", arXiv 2405.19261, algorithm 4). With P and Q the target's and the draft's
after the sampling transform, p and q the *raw* ones (temperature 1, nothing cut; p after processors, as P is) and H the
entropy in nats:

============ =========================================================================================================
`Lossy`      accept with ``min(1, P(x) / ((1 − α) Q(x)))``, recovered from ``norm((P / β − Q)+)``
`Chow`       π = P where ``max q < 1 − α``, else Q; ``loss="log"``: where ``H(q) > α``
`Diff`       π = P where ``max q < max p − α``, else Q; ``loss="log"``: where ``H(q) > H(p) + α``
`Opt`        as Diff, with α · TV(P, Q) instead of α
`BiLD`       π = P where ``D(q, p) > α``, else Q
`TokenV1`    ``π(v) = Q(v) (1 − r(v)) + P(v) Σ r Q`` with ``r(v) = 1`` iff ``q(v) < max p − α``
`TokenV2`    the same with ``p(v) < max p − α``
`TokenV3`    the same with ``p(v) < (1 − α) max p``
============ =========================================================================================================

Pass one as ``target_law`` to `verify_chain`, `verify_packed` or `generate`, and all but `Lossy` to `verify_tree` with
"sample"; None is lossless. All but `Lossy` need the draft's logits, because they look at the raw q, and take
``bonus="cascade"``: then the token after a fully accepted draft is drawn from π too, and for a chain the draft's logits
must have one row more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

from .checks import check_is_number, check_one_of
from .flat import LOSSY, FlatLaw

__all__ = ["BiLD", "Chow", "Diff", "Lossy", "Opt", "TargetLaw", "TokenV1", "TokenV2", "TokenV3"]


_MOST_ALPHA = float(torch.finfo(torch.float32).max)  # kernels hold it so; infinite is not above infinite


@dataclass(frozen=True)
class TargetLaw:
    """What all laws share.

    Parameters
    ----------
    alpha : float
        How far π may be from the target's distribution.

    Raises
    ------
    TypeError, ValueError
        A field of another type, a number that is not finite or out of its range, or another name than those
        listed.
    """

    number: ClassVar[int]
    is_cascade: ClassVar[bool] = False
    alpha: float

    def __post_init__(self) -> None:
        check_is_number(type(self).__name__, "alpha", self.alpha)
        if not abs(self.alpha) <= sys.float_info.max:
            raise ValueError(f"{type(self).__name__}: alpha must be finite, got {self.alpha}")

    @property
    def cascade_bonus(self) -> bool:
        """Whether the token after a fully accepted draft is drawn from π too."""
        return getattr(self, "bonus", "target") == "cascade"

    def flat(self) -> FlatLaw:
        """As the ops take it."""
        alpha = min(max(float(self.alpha), -_MOST_ALPHA), _MOST_ALPHA)
        return FlatLaw(self.number, self._variant(), alpha, 1.0, self.cascade_bonus)

    def _variant(self) -> bool:
        return False

    def _one_of(self, name: str, choices: tuple[str, str]) -> None:
        check_one_of(type(self).__name__, name, getattr(self, name), choices)


_MOST_EXACT, _MOST_BETA = 0.999, 1e30


@dataclass(frozen=True)
class Lossy(TargetLaw):
    """Lossy speculative decoding (arXiv 2405.19261, section 2; Tran-Thien 2023).

    Accepts x with probability ``min(1, P(x) / ((1 − α) Q(x)))`` and draws the recovered token from ``norm((P / β −
    Q)+)``. With A = Σ min(Q, P / (1 − α)), that gives π = ``min(Q, P / (1 − α)) + (1 − A) · norm((P / β − Q)+)``; it is
    lemma 2's ``max(min(Q, P / (1 − α)), P / β)`` only for ``beta="exact"``, which makes that maximum sum to 1. Where
    ``(P / β − Q)+`` is 0 everywhere, the recovered token is drawn from P. At temperature 0 it is lossless.

    Parameters
    ----------
    alpha : float
        In [0, 1); 0 is lossless unless `beta` is above 1. At most 0.999 with ``beta="exact"``, whose sums are float32.
    beta : float or "exact"
        1 − alpha to 1e30. Acceptance "block" takes "exact" only.
    """

    number: ClassVar[int] = LOSSY
    beta: float | str = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < 1:
            raise ValueError(f"Lossy: alpha must be in [0, 1), got {self.alpha}")
        if isinstance(self.beta, str):
            if self.beta != "exact":
                raise ValueError(f"Lossy: beta must be a number or 'exact', got {self.beta!r}")
            if self.alpha > _MOST_EXACT:
                raise ValueError(f"Lossy: alpha must be at most {_MOST_EXACT} beside beta='exact', got {self.alpha}")
            return
        check_is_number("Lossy", "beta", self.beta, "a number or 'exact'")
        if not (1 - self.alpha) * (1 - 2.0**-50) <= self.beta <= _MOST_BETA:  # beta 0.3 passes with alpha 0.7
            raise ValueError(f"Lossy: beta must be in [1 - alpha = {1 - self.alpha}, {_MOST_BETA}], got {self.beta}")

    @property
    def is_exact(self) -> bool:
        """Whether β is solved for at each position."""
        return self.beta == "exact"

    def flat(self) -> FlatLaw:
        """As the ops take it."""
        return FlatLaw(self.number, self.is_exact, float(self.alpha), 1.0 if self.is_exact else float(self.beta), False)


@dataclass(frozen=True)
class _Cascade(TargetLaw):
    is_cascade: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("bonus", ("target", "cascade"))


@dataclass(frozen=True)
class _Deferral(_Cascade):
    """Adds the field `loss` to the rules that compare largest probabilities or entropies."""

    loss: str = "0-1"
    bonus: str = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("loss", ("0-1", "log"))

    def _variant(self) -> bool:
        return self.loss == "log"


@dataclass(frozen=True)
class Chow(_Deferral):
    """Defer where the draft is unsure: ``max q < 1 − α`` (arXiv 2405.19261, section 3.1), or ``H(q) > α``, the same
    under log-loss (as appendix D has it for `Diff` and `Opt`).

    Parameters
    ----------
    alpha : float
        Finite.
    loss : {"0-1", "log"}
        Which of the two.
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 2


@dataclass(frozen=True)
class Diff(_Deferral):
    """Defer where the target is surer by α: ``max q < max p − α``, or ``H(q) > H(p) + α`` (arXiv 2405.19261, section
    3.2 and appendix D).

    Parameters
    ----------
    alpha : float
        Finite.
    loss : {"0-1", "log"}
        Which of the two.
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 3


@dataclass(frozen=True)
class Opt(_Deferral):
    """The optimal deferral of a speculative cascade: `Diff` with ``α · TV(P, Q)`` for α (arXiv 2405.19261, lemma 4 and
    appendix D); TV is between the transformed distributions. At temperature 0 it is `Diff` where the argmaxes differ.

    Parameters
    ----------
    alpha : float
        Finite.
    loss : {"0-1", "log"}
        Which of the two.
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 4


@dataclass(frozen=True)
class _Token(_Cascade):
    bonus: str = "target"


@dataclass(frozen=True)
class TokenV1(_Token):
    """Replace those draft tokens for which ``q(v) < max p − α`` (arXiv 2405.19261, section 5, eq. 13).

    Parameters
    ----------
    alpha : float
        Finite.
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 5


@dataclass(frozen=True)
class TokenV2(_Token):
    """Replace those draft tokens for which ``p(v) < max p − α`` (arXiv 2405.19261, section 5, eq. 14).

    Parameters
    ----------
    alpha : float
        Finite.
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 6


@dataclass(frozen=True)
class TokenV3(_Token):
    """Replace those draft tokens for which ``p(v) < (1 − α) max p`` (arXiv 2405.19261, section 5, eq. 15). At
    temperature 0 this is the lossy greedy decoding of Leviathan et al. (lemma 7).

    Parameters
    ----------
    alpha : float
        Finite; below 0 (from −1e-7 down, as 1 − α is a float32) every token is replaced, from 1 on none.
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 7


@dataclass(frozen=True)
class BiLD(_Cascade):
    """Defer where the draft strays from the target: ``D(q, p) > α`` (BiLD* in arXiv 2405.19261, table 1; after Kim et
    al., arXiv 2302.07863).

    Parameters
    ----------
    alpha : float
        In nats; finite.
    distance : {"cross-entropy", "argmax"}
        D: ``−Σ q log p``, or ``−log p`` of the draft's argmax ("argmax" takes no `draft_token_map`).
    bonus : {"target", "cascade"}
        Whose distribution the token after a fully accepted draft has: the target's, or π.
    """

    number: ClassVar[int] = 8
    distance: str = "cross-entropy"
    bonus: str = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("distance", ("cross-entropy", "argmax"))

    def _variant(self) -> bool:
        return self.distance == "argmax"


def check_law(op: str, acceptance: str, law: object, name: str = "target_law") -> TargetLaw | None:
    """`law` if `acceptance` takes it; "token" takes all, "block" those that are normalised, the others none."""
    if law is None:
        return None
    if not isinstance(law, TargetLaw) or not hasattr(law, "number"):  # TargetLaw itself is not a law
        raise TypeError(f"{op}: {name} must be None or one of sk.laws, got {type(law).__name__}")
    if acceptance in ("match", "greedy"):
        hint = " (lossy greedy is TokenV3 at temperature 0)" if acceptance == "greedy" else ""
        raise ValueError(f"{op}: acceptance={acceptance!r} takes no {name}{hint}, got {law!r}")
    if acceptance == "block" and isinstance(law, Lossy) and not law.is_exact:
        raise ValueError(f"{op}: acceptance='block' takes Lossy with beta='exact' only, got {law!r}")
    return law
