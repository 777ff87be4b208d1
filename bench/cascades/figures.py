"""The curves as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.plot import revision
from specdec_kernels.analysis import plots

MAIN = (
    "Lossy, β = 1", "Chow", "Diff", "Opt", "TokenV3", "BiLD*", "TokenV2", "TokenCascade [Chow]", "SeqCascade [Chow]",
)  # fmt: skip
"""Rules in every panel; they keep their colour."""
VARIANTS = (
    "TokenV1", "TokenV2", "TokenV3", "TokenV3, cascade bonus", "TokenV3, block", "Opt", "Opt, cascade bonus",
    "Opt, block", "Lossy, β exact", "OracleCascade [Diff]", "BiLD, rollback 1", "BiLD, rollback 3",
)  # fmt: skip


def draw(
    result: Mapping[str, Any], cost: str, quality: str, rules: Sequence[str], path: Path, *,
    settings: Sequence[str] | None = None, alone: bool = True,
) -> None:  # fmt: skip
    """Draw `plots.cascades` of a result, at these settings or at all that have such numbers, together with the command
    that draws it and the revision of its rows.
    """
    rows = [row for row in result["rows"] if settings is None or row["setting"] in settings]
    figure = plots.cascades(rows, cost, quality, rules, alone)
    plots.save(figure, path, "python -m bench.cascades report", revision(result))
