"""What speculation gains in theory: pure functions of acceptance and costs, broadcast over all their arguments.

Equations, definitions and theorems are those of Leviathan et al., arXiv 2211.17192. Everywhere

- ``alpha`` is the probability that a draft token is accepted where all before it were, in [0, 1], without a unit;
- ``gamma`` is the number of draft tokens a step, an integer >= 0;
- ``c`` is the time of drafting one token over that of a forward of the target on one row (definition 3.7), >= 0.

Arguments are numbers or arrays that broadcast against each other; results are float64 (integers: int64) of the
broadcast shape.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..checks import check_number

__all__ = [
    "best_draft_length",
    "best_gamma",
    "break_even_acceptance",
    "expected_tokens",
    "expected_tokens_by_position",
    "least_improvement",
    "memory_factor",
    "operations_factor",
    "walltime_improvement",
]

Floats = NDArray[np.float64]
MAX_GAMMA = 64
"""The largest γ that `best_gamma` tries by default; `generate` drafts no more."""
_LARGEST_GAMMA = 1 << 20


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> Floats:
    """Tokens that a step yields in the mean, the recovered or bonus token included: between 1 and γ + 1.

    ``(1 − α^(γ+1)) / (1 − α)``, equation 1; γ + 1 at α = 1.

    Raises
    ------
    TypeError, ValueError
        Something else than numbers; ``alpha`` outside [0, 1], or ``gamma`` that is negative or no integer; shapes that
        do not broadcast. The functions below raise the same, also for their other arguments, by name.
    """
    name = "expected_tokens"
    shares, gammas = _share(name, "alpha", alpha), _count(name, gamma)
    _fit(name, alpha=shares, gamma=gammas)
    return _expected_tokens(shares, gammas)


def expected_tokens_by_position(acceptances: ArrayLike) -> Floats:
    """Tokens that a step yields in the mean where acceptance depends on the position.

    ``1 + Σ_k Π_{j ≤ k} a_j``: equation 1 is the case of equal a_j.

    Parameters
    ----------
    acceptances : array_like
        ``[..., gamma]`` in [0, 1]: the probability that draft token j is accepted where all before it were.

    Returns
    -------
    ndarray
        ``[...]`` float64.
    """
    accepted = _share("expected_tokens_by_position", "acceptances", acceptances)
    if accepted.ndim == 0:
        raise ValueError("expected_tokens_by_position: acceptances must be [..., gamma], got a number")
    return np.asarray(1.0 + accepted.cumprod(-1).sum(-1))


def walltime_improvement(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, verification: ArrayLike = 1.0) -> Floats:
    """Tokens a second, as a multiple of plain decoding's.

    ``E / (γ·c + verification)``, theorem 3.8 with E of `expected_tokens`.

    Parameters
    ----------
    alpha, gamma, c : array_like
    verification : array_like
        Time of a forward on γ + 1 rows over one on a single row, > 0. 1 is what the paper assumes; where computing and
        not reading weights takes the time (large batches, small models on a CPU), it is more. At γ = 0, plain decoding,
        give 1: it divides there, too.
    """
    name = "walltime_improvement"
    shares, gammas, costs = _share(name, "alpha", alpha), _count(name, gamma), _cost(name, "c", c)
    verified = _cost(name, "verification", verification, positive=True)
    _fit(name, alpha=shares, gamma=gammas, c=costs, verification=verified)
    return _expected_tokens(shares, gammas) / (gammas * costs + verified)


def operations_factor(alpha: ArrayLike, gamma: ArrayLike, operations_ratio: ArrayLike) -> Floats:
    """Arithmetic operations a token, as a multiple of plain decoding's: at least 1 for a draft that costs nothing.

    ``(γ·ĉ + γ + 1) / E``, theorem 3.11.

    Parameters
    ----------
    alpha, gamma : array_like
    operations_ratio : array_like
        ĉ, operations a token of the draft over the target's (definition 3.10), >= 0: about that of their parameters.
    """
    name = "operations_factor"
    shares, gammas = _share(name, "alpha", alpha), _count(name, gamma)
    ratios = _cost(name, "operations_ratio", operations_ratio)
    _fit(name, alpha=shares, gamma=gammas, operations_ratio=ratios)
    return (gammas * ratios + gammas + 1) / _expected_tokens(shares, gammas)


def memory_factor(alpha: ArrayLike, gamma: ArrayLike, memory_ratio: ArrayLike = 0.0) -> Floats:
    """Bytes of weights and cache read a token, as a multiple of plain decoding's.

    ``(γ·m + 1) / E``: section 3.4 with the draft's own traffic, which the paper leaves out (``memory_ratio`` = 0).

    Parameters
    ----------
    alpha, gamma : array_like
    memory_ratio : array_like
        m, bytes of weights and cache that a forward of the draft reads over what one of the target reads, >= 0.
    """
    name = "memory_factor"
    shares, gammas = _share(name, "alpha", alpha), _count(name, gamma)
    ratios = _cost(name, "memory_ratio", memory_ratio)
    _fit(name, alpha=shares, gamma=gammas, memory_ratio=ratios)
    return (gammas * ratios + 1) / _expected_tokens(shares, gammas)


def best_gamma(alpha: ArrayLike, c: ArrayLike, max_gamma: int = MAX_GAMMA) -> NDArray[np.int64]:
    """The γ in 0 … `max_gamma` with the largest `walltime_improvement` (section 3.5), the smallest one if several are
    equal.

    0, which is plain decoding, where α <= c: nothing is gained then.

    Raises
    ------
    TypeError, ValueError
        As `expected_tokens`; ``max_gamma`` that is negative, no integer, above 2**20 or an array.
    """
    name = "best_gamma"
    most = _count(name, max_gamma, "max_gamma")
    if most.ndim or most > _LARGEST_GAMMA:
        raise ValueError(f"{name}: max_gamma must be a number <= {_LARGEST_GAMMA}, got {max_gamma!r}")
    lengths = np.arange(int(most) + 1)
    shares, costs = _share(name, "alpha", alpha), _cost(name, "c", c)
    _fit(name, alpha=shares, c=costs)
    found = _best_draft_length(shares, lengths, 1.0 + lengths * costs[..., None])
    return np.where(shares > costs, found, 0)[()]  # rounding would decide where they are equal


def best_draft_length(
    alpha: ArrayLike, lengths: ArrayLike, seconds: ArrayLike, margin: float = 1.0
) -> NDArray[np.int64]:
    """The one of several draft lengths with the most expected tokens a second, by measured times of whole steps.

    Parameters
    ----------
    alpha : array_like
        ``[...]``.
    lengths : array_like
        ``[n]`` draft tokens a step, the first one 0.
    seconds : array_like
        ``[..., n]``, > 0: time of a step of each length, drafting and verifying, in any unit.
    margin : float
        > 0: another length must be better than the first by this factor.

    Returns
    -------
    ndarray
        ``[...]`` int64, of `lengths`.
    """
    name = "best_draft_length"
    check_number(name, "margin", margin, sys.float_info.min, sys.float_info.max)
    counts = _count(name, lengths, "lengths")
    times = _cost(name, "seconds", seconds, positive=True)
    if counts.ndim != 1 or times.ndim == 0 or times.shape[-1] != counts.size or counts.size == 0:
        raise ValueError(
            f"{name}: lengths must be [n >= 1] and seconds [..., n], got {list(counts.shape)} and {list(times.shape)}"
        )
    if counts[0] != 0:
        raise ValueError(f"{name}: lengths must begin with 0, got {int(counts[0])}")
    shares = _share(name, "alpha", alpha)
    _fit(name, alpha=shares, seconds=times[..., 0])
    return _best_draft_length(shares, counts, times, margin)


def break_even_acceptance(gamma: ArrayLike, c: ArrayLike, verification: ArrayLike = 1.0) -> Floats:
    """The α at which γ draft tokens a step are as fast as plain decoding; above it they are faster.

    The root of `walltime_improvement` = 1. With γ = 1 and ``verification`` = 1 it is c (corollary 3.9: a gain is
    possible if and only if α > c). 0 where every α suffices; NaN where none does, and where γ = 0, which is plain
    decoding at any α.

    Parameters
    ----------
    gamma, c, verification : array_like
        As in `walltime_improvement`.
    """
    name = "break_even_acceptance"
    gammas, costs = _count(name, gamma), _cost(name, "c", c)
    verified = _cost(name, "verification", verification, positive=True)
    _fit(name, gamma=gammas, c=costs, verification=verified)
    gammas, costs, verified = np.broadcast_arrays(gammas, costs, verified)
    needed = gammas * costs + verified  # tokens a step
    low, high = np.zeros(needed.shape), np.ones(needed.shape)
    for _ in range(53):  # bits of a float64; the expected tokens grow with α
        middle = (low + high) / 2
        enough = _expected_tokens(middle, gammas) >= needed
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    high = np.where(needed <= 1.0, 0.0, high)
    return np.where((gammas == 0) | (needed > gammas + 1), np.nan, high)


def least_improvement(alpha: ArrayLike, c: ArrayLike) -> Floats:
    """What the best γ gains at least, as a multiple of plain decoding: ``max(1, (1 + α) / (1 + c))``, corollary 3.9."""
    name = "least_improvement"
    shares, costs = _share(name, "alpha", alpha), _cost(name, "c", c)
    _fit(name, alpha=shares, c=costs)
    return np.maximum(1.0, (1.0 + shares) / (1.0 + costs))


def _expected_tokens(alpha: Floats, gamma: NDArray[np.int64]) -> Floats:
    """Without checks. ``expm1`` keeps the digits of α near 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens = -np.expm1((gamma + 1) * np.log(alpha)) / (1.0 - alpha)
    return np.where(alpha == 1.0, gamma + 1.0, np.clip(tokens, 1.0, gamma + 1.0))


def _best_draft_length(
    alpha: Floats, lengths: NDArray[np.int64], seconds: Floats, margin: float = 1.0
) -> NDArray[np.int64]:
    rates = _expected_tokens(alpha[..., None], lengths) / seconds
    rates[..., 0] *= margin
    return lengths[rates.argmax(-1)]


def _fit(caller: str, **given: NDArray[np.generic]) -> None:
    """ValueError unless their shapes broadcast."""
    try:
        np.broadcast_shapes(*(numbers.shape for numbers in given.values()))
    except ValueError:
        shapes = ", ".join(str(list(numbers.shape)) for numbers in given.values())
        raise ValueError(f"{caller}: {', '.join(given)} must broadcast against each other, got {shapes}") from None


def _share(caller: str, name: str, value: ArrayLike) -> Floats:
    numbers = _numbers(caller, name, value)
    return _checked(caller, name, "in [0, 1]", numbers, (numbers >= 0) & (numbers <= 1))


def _cost(caller: str, name: str, value: ArrayLike, positive: bool = False) -> Floats:
    numbers = _numbers(caller, name, value)
    good = np.isfinite(numbers) & ((numbers > 0) if positive else (numbers >= 0))
    return _checked(caller, name, "finite and > 0" if positive else "finite and >= 0", numbers, good)


def _count(caller: str, value: ArrayLike, name: str = "gamma") -> NDArray[np.int64]:
    numbers = _numbers(caller, name, value)
    good = (numbers >= 0) & (numbers == np.floor(numbers)) & np.isfinite(numbers)
    return _checked(caller, name, "an integer >= 0", numbers, good & (numbers < 2.0**63)).astype(np.int64)


def _numbers(caller: str, name: str, value: ArrayLike) -> Floats:
    try:
        given = np.asarray(value)
        if given.dtype.kind in "iuf" or given.size == 0:
            return given.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):  # the last one of a torch tensor that requires grad
        pass
    raise TypeError(f"{caller}: {name} must be a number or an array of numbers, got {value!r}")


def _checked(caller: str, name: str, wanted: str, numbers: Floats, good: NDArray[np.bool_]) -> Floats:
    if not good.all():
        raise ValueError(f"{caller}: {name} must be {wanted}, got {numbers[~good].flat[0]:g}")
    return numbers
