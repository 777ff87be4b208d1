"""What a curve is made of, and how it answers the paper's two questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
"""A measured point: "setting", "rule", "alpha" and numbers."""

TARGET, DRAFT, LOSSLESS = "target alone", "draft alone", "lossless"
_SEQUENTIAL = ("TokenCascade", "OracleCascade", "SeqCascade", "BiLD,")


def clustered_error(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    """The standard error of a mean, ``sums.sum(-1) / counts.sum()``, over texts ``[..., texts]``, each of which has a
    sum over so many words or positions. Those within a text are alike; the texts are taken as independent.
    """
    mean = sums.sum(-1) / counts.sum()
    deviations = sums - mean[..., None] * counts
    error: NDArray[np.float64] = np.sqrt((deviations**2).sum(-1)) / counts.sum()
    return error


def at_length(setting: str, draft_length: int) -> str:
    """The "setting" of rows that compare draft lengths."""
    return f"{setting}, γ = {draft_length}"


def curves(rows: Sequence[Row], setting: str) -> dict[str, list[Row]]:
    """The points of each rule at `setting`, by α."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["setting"] == setting:
            found.setdefault(row["rule"], []).append(row)
    for points in found.values():
        points.sort(key=lambda row: row["alpha"] if row["alpha"] is not None else 0.0)
    return found


def swept(by_rule: dict[str, list[Row]], lossless: Row) -> dict[str, list[Row]]:
    """The curves among `by_rule`; those of speculative rules begin at `lossless`, where all of them meet."""
    return {
        rule: points if rule.startswith(_SEQUENTIAL) else [lossless, *points]
        for rule, points in by_rule.items()
        if rule not in (TARGET, DRAFT, LOSSLESS)
    }


def least_cost(points: Sequence[Row], quality: str, cost: str, enough: float) -> float | None:
    """The smallest cost at which the curve through `points` (straight between neighbours) has quality `enough`; None if
    it never does.
    """
    known = _known(points, quality, cost)
    reached = [c for q, c in known if q >= enough]
    return min(reached + [c for _, c in _crossings(known, 0, enough)], default=None)


def best_quality(points: Sequence[Row], quality: str, cost: str, affordable: float) -> float | None:
    """The best quality on the curve at a cost of at most `affordable`; None if every point costs more."""
    known = _known(points, quality, cost)
    reached = [q for q, c in known if c <= affordable]
    return max(reached + [q for q, _ in _crossings(known, 1, affordable)], default=None)


def _known(points: Sequence[Row], quality: str, cost: str) -> list[tuple[float, float]]:
    return [(row[quality], row[cost]) for row in points if row.get(cost) is not None]


def _crossings(known: Sequence[tuple[float, float]], axis: int, level: float) -> Iterator[tuple[float, float]]:
    """Where the curve crosses `level` of quality (axis 0) or cost (axis 1)."""
    for a, b in pairwise(known):
        if (a[axis] < level) != (b[axis] < level):
            t = (level - a[axis]) / (b[axis] - a[axis])
            yield a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
