"""The rules of verification, once more: one sequence at a time, float64, straight from the equations, nothing shared.

Each answer comes with whether it is *borderline*: whether a comparison that led to it lies within float32 error of
equality.
"""

from __future__ import annotations

import numpy as np

from specdec_kernels.testing import Float64, Int64

ERROR = 2e-6  # relative float32 error granted to probabilities, running masses and products of a few of them


def draw(weights: Float64, u: float) -> tuple[int, bool]:
    """Inverse CDF of weights that need not be normalised."""
    ends = np.cumsum(weights)
    total = ends[-1]
    token = int(np.searchsorted(ends, u * total, side="right"))
    token = min(token, int(np.flatnonzero(weights)[-1]))
    return token, bool(np.abs(ends[:-1] - u * total).min(initial=np.inf) < ERROR * max(1.0, total))


def brackets(weights: Float64, u: float, token: int) -> bool:
    """Whether `token` is what a draw with float32 error may return."""
    ends = np.cumsum(weights) / weights.sum()
    start = ends[token - 1] if token else 0.0
    return bool(weights[token] > 0 and start - ERROR < u < ends[token] + ERROR)


def chain(
    P: Float64, Q: Float64 | None, x: Int64, u: Float64, acceptance: str, eos: tuple[int, ...] = ()
) -> tuple[list[int], int, bool]:
    """One sequence: laws ``P [n + 1, vocab]``, ``Q [n, vocab]`` or None (one-hot), tokens ``x [n]``, ``u [n + 1]``.

    The draft ends before an x that Q cannot have given, if the rule asks Q. Returns the emitted tokens, how many are
    accepted, and whether this is borderline.
    """
    x = x[: next((i for i, t in enumerate(x) if t in eos), len(x)) + 1]
    n, vocab = len(x), P.shape[-1]
    if Q is None:
        Q = np.eye(vocab)[x]
        acceptance = "token"
    asks_draft = P[:n].max(-1) < 1 if acceptance == "token" else np.ones(n, bool)
    n = int(next(iter(np.flatnonzero(asks_draft & (Q[np.arange(n), x] == 0))), n))
    ended, x = n < len(x), x[:n]
    borderline = False
    accepted, scale = 0, 1.0
    if acceptance == "token":
        for i in range(n):
            p, q = P[i, x[i]], Q[i, x[i]]
            borderline |= bool(p > 0 and abs(u[i + 1] * q - p) < ERROR * max(u[i + 1] * q, p))
            if not u[i + 1] * q < p:
                break
            accepted += 1
    else:
        w = 1.0
        for i in range(1, n + 1):
            p, q = P[i - 1, x[i - 1]], Q[i - 1, x[i - 1]]
            w = 0.0 if p == 0 or w == 0 else min(1.0, w * p / q)
            if i < n:
                rest = np.maximum(w * P[i] - Q[i], 0).sum()
                h = rest / (rest + 1 - w) if rest + 1 - w > 0 else 1.0
                borderline |= bool(w > 0 and abs(u[i] - h) * (rest + 1 - w) < 4 * ERROR)
            else:
                h = w
                borderline |= bool(w > 0 and w < 1 and abs(u[i] - h) < 4 * ERROR)
            if u[i] < h:
                accepted, scale = i, w
    out = [int(t) for t in x[:accepted]]
    if accepted == n and n and x[-1] in eos and not ended:
        return out, accepted, borderline
    weights = P[accepted]
    if accepted < n:
        residual = np.maximum(scale * P[accepted] - Q[accepted], 0)
        total = residual.sum()
        if total > 1e-6:
            weights = residual
            borderline |= bool(total < 1e-3)  # what is left of a cancellation has few digits
        else:
            borderline |= bool(total > 0 or (scale * P[accepted] != Q[accepted]).any())
    token, close = draw(weights, u[0])
    return [*out, token], accepted, borderline or close


def matching(P: Float64, x: Int64, noise: Float64, eos: tuple[int, ...] = ()) -> tuple[list[int], int, bool]:
    """The match rule: noise ``[n + 1, vocab]``; a borderline case has two perturbed scores within float32 error."""
    out: list[int] = []
    for i in range(len(x) + 1):
        with np.errstate(divide="ignore"):
            scores = np.log(P[i]) + noise[i]
        best = int(scores.argmax())
        second = np.partition(scores, -2)[-2]
        borderline = bool(scores[best] - second < 1e-4)
        out.append(best)
        if borderline or i == len(x) or x[i] != best:
            return out, i, borderline
        if best in eos:
            return out, i + 1, False
    raise AssertionError("unreachable")
