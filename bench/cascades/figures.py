"""The curves as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cascades.results import DRAFT, LOSSLESS, TARGET, Row, curves
from bench.plot import revision

MAIN = (
    "Lossy, β = 1", "Chow", "Diff", "Opt", "TokenV3", "BiLD*", "TokenV2", "TokenCascade [Chow]", "SeqCascade [Chow]",
)  # fmt: skip
"""Rules in every panel; they keep their colour."""
VARIANTS = (
    "TokenV1", "TokenV2", "TokenV3", "TokenV3, cascade bonus", "TokenV3, block", "Opt", "Opt, cascade bonus",
    "Opt, block", "Lossy, β exact", "OracleCascade [Diff]", "BiLD, rollback 1", "BiLD, rollback 3",
)  # fmt: skip


def draw(
    result: Mapping[str, Any], panels: Sequence[tuple[str, str]], rules: Sequence[str], quality: str,
    labels: tuple[str, str], path: Path, alone: bool = True,
) -> None:  # fmt: skip
    """One panel for each (setting, cost) of `panels`, one line a rule, with a standard error up and down; the target's
    quality dashed. With `alone` there is a point for each of the two models alone, far from the lines at its cost.
    """
    import matplotlib

    rows: Sequence[Row] = result["rows"]
    matplotlib.use("Agg")
    from matplotlib import pyplot

    error = "log_loss_standard_error" if quality == "log_loss" else "standard_error"
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, all_axes = pyplot.subplots(
        lines, columns, figsize=(max(4.6 * columns, 8), 3.7 * lines + 0.6), squeeze=False, layout="constrained"
    )
    handles = {}
    for axes in all_axes.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (setting, cost) in zip(all_axes.flat, panels, strict=False):
        by_rule = curves(rows, setting)
        for i, rule in enumerate(rules):
            known = [(p[cost], p[quality], p[error]) for p in by_rule.get(rule, ()) if p.get(cost) is not None]
            if known:
                x, y, errors = zip(*known, strict=True)
                style = {"marker": "os^vD*Pxh"[i % 9], "markersize": 4, "linewidth": 1.1, "color": f"C{i % 10}"}
                handles[rule] = axes.errorbar(x, y, errors, elinewidth=0.6, capsize=1.5, **style)
        for name, marker in ((LOSSLESS, "s"), (DRAFT, "<"), (TARGET, ">")):
            for point in by_rule.get(name, ()):
                if point.get(cost) is not None and (alone or name == LOSSLESS):
                    handles[name] = axes.scatter(point[cost], point[quality], color="black", marker=marker, s=22)
                if name == TARGET:
                    axes.axhline(point[quality], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(setting, fontsize="medium")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=75, metadata={"Description": revision(result)})
    pyplot.close(figure)
