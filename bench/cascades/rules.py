"""The rules that are compared, and values of α spread evenly over the range of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from specdec_kernels import SamplingParams, laws
from specdec_kernels.laws import TargetLaw

Float64 = NDArray[np.float64]
_NEARLY_ONE = 1 - 1e-6  # the largest α tried where 1 stands for the draft's law
_MOST_EXACT = 0.999  # the largest that `laws.Lossy` takes with an exact β

SETTINGS: dict[str, SamplingParams] = {
    "T = 0": SamplingParams(0.0),
    "T = 0.1": SamplingParams(0.1),
    "T = 0.5": SamplingParams(0.5),
    "T = 1": SamplingParams(),
    "top-p 0.9": SamplingParams(top_p=0.9),
}
"""How both models are sampled."""


@dataclass(frozen=True)
class Laws:
    """The laws at some positions: P, Q after the sampling transform of target and draft, and p, q the raw ones; ``[n,
    vocab]`` float64.
    """

    P: Float64
    Q: Float64
    p: Float64
    q: Float64


@dataclass(frozen=True)
class Rule:
    """A family of target laws with free α.

    Attributes
    ----------
    name : str
    make : callable
        α → law.
    score : callable
        ``(laws, tokens)`` → ``[n]``: the rule keeps the draft's law (token rules: the draft's token) where this is at
        most α.
    by_token : bool
        The score depends on the drafted token.
    settings : tuple of str
        Those at which it differs from the other rules.
    """

    name: str
    make: Callable[[float], TargetLaw]
    score: Callable[[Laws, NDArray[np.int64]], Float64]
    by_token: bool = False
    settings: tuple[str, ...] = tuple(SETTINGS)


def _at(law: Float64, tokens: NDArray[np.int64]) -> Float64:
    return law[np.arange(len(law)), tokens]


def _chow(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return 1 - x.q.max(1)


def _diff(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return x.p.max(1) - x.q.max(1)


def _opt(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return _diff(x, tokens) / np.maximum(total_variation(x.P, x.Q), 1e-9)


def _diff_of_entropies(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return entropy(x.q) - entropy(x.p)


def _opt_of_entropies(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return _diff_of_entropies(x, tokens) / np.maximum(total_variation(x.P, x.Q), 1e-9)


def _cross_entropy(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return -(x.q * np.log(np.maximum(x.p, 1e-300))).sum(1)


def _token_v1(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return x.p.max(1) - _at(x.q, tokens)


def _token_v2(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return x.p.max(1) - _at(x.p, tokens)


def _token_v3(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return np.minimum(1 - _at(x.p, tokens) / x.p.max(1), _NEARLY_ONE)


def _lossy(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return np.clip(1 - _at(x.P, tokens) / _at(x.Q, tokens), 0.0, _NEARLY_ONE)


def _lossy_exact(x: Laws, tokens: NDArray[np.int64]) -> Float64:
    return np.minimum(_lossy(x, tokens), _MOST_EXACT)


_SAMPLED = ("T = 0.1", "T = 0.5", "T = 1", "top-p 0.9")  # at T = 0 Lossy is lossless and Opt is Diff
DETAILED = ("T = 0", "T = 1")
"""Where every variant of a rule, and the sequential baselines, are measured too."""

RULES = (
    Rule("Lossy, β = 1", lambda a: laws.Lossy(a), _lossy, True, _SAMPLED),
    Rule("Lossy, β exact", lambda a: laws.Lossy(a, beta="exact"), _lossy_exact, True, ("T = 1",)),
    Rule("Chow", lambda a: laws.Chow(a), _chow),
    Rule("Diff", lambda a: laws.Diff(a), _diff),
    Rule("Opt", lambda a: laws.Opt(a), _opt, settings=_SAMPLED),
    Rule("TokenV1", lambda a: laws.TokenV1(a), _token_v1, True),
    Rule("TokenV2", lambda a: laws.TokenV2(a), _token_v2, True),
    Rule("TokenV3", lambda a: laws.TokenV3(a), _token_v3, True),
    Rule("BiLD*", lambda a: laws.BiLD(a), _cross_entropy),
)
LOG_RULES = (
    Rule("Chow, log", lambda a: laws.Chow(a, loss="log"), lambda x, tokens: entropy(x.q)),
    Rule("Diff, log", lambda a: laws.Diff(a, loss="log"), _diff_of_entropies),
    Rule("Opt, log", lambda a: laws.Opt(a, loss="log"), _opt_of_entropies),
)
"""For a quality that is itself a log-loss."""


def with_cascade_bonus(rule: Rule) -> Rule:
    """`rule`, applying its law to the token after a fully accepted draft as well."""
    make = rule.make
    return dataclasses.replace(
        rule,
        name=f"{rule.name}, cascade bonus",
        make=lambda a: dataclasses.replace(make(a), bonus="cascade"),  # type: ignore[call-arg]
        settings=DETAILED,
    )


def total_variation(a: Float64, b: Float64) -> Float64:
    """``[n]``: Σ |a − b| / 2."""
    out: Float64 = np.abs(a - b).sum(1) / 2
    return out


def entropy(law: Float64) -> Float64:
    """``[n]``, in nats."""
    out: Float64 = special.entr(law).sum(1)
    return out


def spread_alphas(rule: Rule, x: Laws, shares: Sequence[float]) -> list[float]:
    """For each of `shares` an α with which `rule` still rejects about that share of what lossless verification rejects.

    Taken from the distribution of the rule's own statistic over the positions `x`, each weighted by the mass rejected
    there: at most positions both models agree, and α makes no difference.
    """
    cumulative = x.Q.cumsum(1)
    coins = np.random.default_rng(0).random(len(cumulative))[:, None] * cumulative[:, -1:]
    tokens = np.minimum((cumulative <= coins).sum(1), x.Q.shape[1] - 1)
    if rule.by_token:
        rejected = np.maximum(1 - _at(x.P, tokens) / _at(x.Q, tokens), 0)
    else:
        rejected = total_variation(x.P, x.Q)
    scores = rule.score(x, tokens)
    order = np.argsort(scores, kind="stable")
    below = rejected[order].cumsum() / rejected.sum()
    picked = [int(np.searchsorted(below, 1 - share).clip(0, len(order) - 1)) for share in shares]
    return sorted({round(float(scores[order[i]]), 7) for i in picked})
