"""Figures of theory, of what was measured and of results: each function returns a matplotlib figure, `save` writes it.

matplotlib is needed here alone; no backend is chosen and no window opened. TypeError or ValueError is raised for an
argument of another type or out of its range, and for rows without what is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..checks import check_flag, check_instance, check_number, check_one_of, check_path, check_sequence
from . import theory

__all__ = [
    "acceptance_by_position",
    "best_gamma",
    "cascades",
    "expected_tokens",
    "gain_by_batch",
    "improvement_surfaces",
    "predicted_and_measured",
    "save",
    "techniques",
    "thresholds",
]

Row = Mapping[str, Any]
_COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_WAY = ("drafter", "num_speculative_tokens", "temperature")  # of decoding: what every row says
_MARKERS = "os^vDP*X"
_AXES = {
    "target_calls_per_token": "target calls a token", "rejection_rate": "rejection rate",
    "relative_seconds_alone": "time a token, of the target's alone", "word_accuracy": "word accuracy",
    "log_loss": "log-loss in nats",
}  # fmt: skip
_MODELS = {"lossless": "s", "draft alone": "<", "target alone": ">"}  # points of `cascades` that belong to no curve


def save(figure: Figure, path: Path, command: str, description: str | None = None) -> None:
    """Write a figure as PNG (or what the path's suffix says), with the command that made it in its last line; the
    `description` is not shown, but kept in the file, a PNG or SVG.

    Raises
    ------
    ValueError, TypeError
        A suffix that matplotlib cannot write, or arguments of other types; a description for another kind of file.
    OSError
        It could not be written.
    """
    check_instance("save", "figure", figure, Figure, "a matplotlib Figure")
    check_instance("save", "command", command, str, "a string")
    check_instance("save", "description", description, (str, type(None)), "a string or None")
    check_writable("save", path)
    if description is not None and path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"save: description must be None unless path ends with .png or .svg, got it for {path}")
    figure.supxlabel(command, fontsize=7, family="monospace", color="dimgray", wrap=True)
    figure.savefig(path, dpi=110, metadata=None if description is None else {"Description": description})


def check_writable(caller: str, path: object, name: str = "path") -> None:
    """Raise unless `path` is one that `save` can write: what takes minutes to draw should not fail in the end."""
    check_path(caller, name, path)
    assert isinstance(path, Path)
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{caller}: {name} must end with one of {', '.join(f'.{one}' for one in known)}, got {path}")
    tried = Figure(figsize=(1, 1))
    tried.supxlabel("x")
    try:
        tried.savefig(io.BytesIO(), format=path.suffix[1:].lower())
    except Exception as error:  # .pgf needs LaTeX, which fails in ways of its own
        raise ValueError(f"{caller}: {name} must end as what can be written here, got {path}: {error}") from error
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{caller}: {name} must be in a folder that is there, got {path}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{caller}: {name} must be a file that can be written, got {path}")


def expected_tokens(gammas: Sequence[int] = tuple(range(1, 16))) -> Figure:
    """Tokens a step against α, a line for each γ (figure 2 of arXiv 2211.17192)."""
    _check_numbers("expected_tokens", "gammas", gammas, int, 0)
    figure, axes = _panels(1, 8.5, 5.1)
    alphas = np.linspace(0, 1, 401)
    for i, gamma in enumerate(gammas):
        color = colormaps["viridis"](i / max(len(gammas) - 1, 1))
        tokens = theory.expected_tokens(alphas, gamma)
        axes[0].plot(alphas, tokens, color=color, linewidth=1.8)
        axes[0].annotate(f"γ = {gamma}", (1.0, tokens[-1]), (4, -3), textcoords="offset points", fontsize=9)
    _label(axes[0], "Tokens a step, equation 1", "α, acceptance of a draft token", "expected tokens a step")
    axes[0].set_xlim(0, 1.09)
    return figure


def improvement_surfaces(c: float = 0.05, operations_ratio: float | None = None) -> Figure:
    """Speed and arithmetic operations over α and γ (theorems 3.8 and 3.11), for a draft of cost `c`; ĉ is c if None."""
    check_number("improvement_surfaces", "c", c, 0, 1e9)
    if operations_ratio is not None:
        check_number("improvement_surfaces", "operations_ratio", operations_ratio, 0, 1e9)
    ratio = c if operations_ratio is None else operations_ratio
    figure, axes = _panels(2, 12, 4.8)
    alphas, gammas = np.linspace(0.01, 0.99, 99), np.arange(1, 16)
    grid = alphas[None], gammas[:, None]
    panels = (
        (f"Speed over plain decoding, c = {c:g}", theory.walltime_improvement(*grid, c), [0.75, 1, 1.5, 2, 3, 4, 6, 8]),
        (
            f"Operations over plain decoding, ĉ = {ratio:g}",
            theory.operations_factor(*grid, ratio),
            [1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12],
        ),
    )
    for panel, (title, values, levels) in zip(axes, panels, strict=True):
        panel.contourf(alphas, gammas, np.log(values), levels=30, cmap="viridis")
        lines = panel.contour(alphas, gammas, values, levels=levels, colors="white", linewidths=1.2)
        panel.clabel(lines, fmt=lambda level: f"{level:g} ×", fontsize=10)
        _label(panel, title, "α, acceptance of a draft token", "γ, draft tokens a step")
        panel.grid(False)
    return figure


def best_gamma(costs: Sequence[float] = _COSTS, max_gamma: int = 30) -> Figure:
    """The best γ against α, and what it gains, a line for each cost c (section 3.5, figure 3)."""
    _check_numbers("best_gamma", "costs", costs, (int, float), 0)
    figure, axes = _panels(2, 12, 4.8)
    alphas = np.linspace(0, 0.99, 199)
    for i, c in enumerate(costs):
        best = theory.best_gamma(alphas, c, max_gamma)
        style: dict[str, Any] = {"color": f"C{i}", "linewidth": 1.8, "label": f"c = {c:g}"}
        axes[0].step(alphas, best, where="mid", **style)
        axes[1].plot(alphas, theory.walltime_improvement(alphas, best, c), **style)
    _label(axes[0], f"The best γ, up to {max_gamma}", "α, acceptance of a draft token", "γ, draft tokens a step")
    _label(axes[1], "Speed at the best γ", "α, acceptance of a draft token", "tokens a second over plain decoding")
    axes[1].set_yscale("log", base=2)
    axes[1].set_yticks([1, 2, 4, 8, 16], ["1 ×", "2 ×", "4 ×", "8 ×", "16 ×"])
    axes[1].legend(fontsize=10)
    return figure


def acceptance_by_position(rows: Sequence[Row]) -> Figure:
    """Acceptance of each draft position with its 95 % interval, a panel for each prompt set and temperature.

    Parameters
    ----------
    rows : sequence of mapping
        With "drafter", "num_speculative_tokens", "temperature" and "by_position", as "acceptances" of `Plan.to_dict`;
        "prompts" where there are several sets. Of each drafter the longest draft is drawn.
    """
    _check_rows(
        "acceptance_by_position", "rows", rows, "drafter", "num_speculative_tokens", "temperature", "by_position"
    )
    cases = _cases(rows)
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    figure, axes = _panels(len(cases), 6.2 * min(len(cases), 2), 3.9)
    for panel, (name, temperature) in zip(axes, cases, strict=False):
        chosen = [row for row in rows if (row.get("prompts", ""), row["temperature"]) == (name, temperature)]
        for i, drafter in enumerate(drafters):
            of_drafter = [row for row in chosen if row["drafter"] == drafter]
            if not of_drafter:
                continue
            longest = max(of_drafter, key=lambda row: row["num_speculative_tokens"])["by_position"]
            points = [
                (k + 1 + 0.08 * (i - len(drafters) / 2), e["mean"], e["mean"] - e["low"], e["high"] - e["mean"])
                for k, e in enumerate(longest)
                if e["mean"] is not None and not np.isnan(e["mean"])
            ]
            if points:
                x, mean, below, above = np.array(points).T
                bars = np.maximum([below, above], 0)
                style: dict[str, Any] = {"fmt": f"C{i}-{_marker(i)}", "capsize": 3, "linewidth": 1.5}
                panel.errorbar(x, mean, bars, **style, label=drafter)
        _label(panel, _title(name, temperature), "position in the draft", "accepted, of steps that got there")
        panel.set_ylim(-0.03, 1.03)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def gain_by_batch(choices: Sequence[Row]) -> Figure:
    """Predicted gain against batch size, a line for each drafter and draft length, a panel for each temperature.

    Parameters
    ----------
    choices : sequence of mapping
        "choices" of `Plan.to_dict`.
    """
    _check_rows("gain_by_batch", "choices", choices, *_WAY, "batch_size", "gain")
    cases = _cases(choices)
    ways = list(dict.fromkeys((row["drafter"], row["num_speculative_tokens"]) for row in choices))
    batches = sorted({row["batch_size"] for row in choices})
    figure, axes = _panels(len(cases), 6.4 * min(2, len(cases)), 4.6)
    drafters = list(dict.fromkeys(drafter for drafter, _ in ways))
    for panel, (prompts, temperature) in zip(axes, cases, strict=False):
        for i, way in enumerate(ways):
            chosen = {
                row["batch_size"]: row["gain"]["mean"]
                for row in choices
                if row.get("prompts", "") == prompts
                and (row["temperature"], row["drafter"], row["num_speculative_tokens"]) == (temperature, *way)
            }
            style: dict[str, Any] = {"color": f"C{drafters.index(way[0])}", "marker": _marker(i)}
            panel.plot([batches.index(b) for b in chosen], list(chosen.values()), label=f"{way[0]}, {way[1]}", **style)
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        _label(panel, _title(prompts, temperature), "sequences decoded together", "tokens a second over plain decoding")
    _legend(figure, axes, title="drafter, draft tokens")
    return figure


def predicted_and_measured(rows: Sequence[Row]) -> Figure:
    """Speed-up as predicted, simulated and measured, by drafter and draft length; a panel a prompt set and temperature.

    Parameters
    ----------
    rows : sequence of mapping
        Of ``bench/results/…/plan.json``.
    """
    _check_rows(
        "predicted_and_measured", "rows", rows, *_WAY, "gain", "simulated", "measured", "gain_by_alpha",
    )  # fmt: skip
    cases = _cases(rows)
    figure, axes = _panels(len(cases), 12.5, 4.2)
    kinds = (("gain", "predicted, 95 %", "o", -0.22), ("simulated", "simulated, 95 % of answers", "s", 0.0),
             ("measured", "measured, all rounds", "D", 0.22))  # fmt: skip
    for panel, case in zip(axes, cases, strict=False):
        chosen = [row for row in rows if (row.get("prompts", ""), row["temperature"]) == case]
        for i, (key, label, marker, offset) in enumerate(kinds):
            mean, low, high = (
                np.array([row[key][part] for row in chosen], dtype=float) for part in ("mean", "low", "high")
            )
            bars = np.nan_to_num(np.maximum([mean - low, high - mean], 0))
            panel.errorbar(
                np.arange(len(chosen)) + offset, mean, bars, fmt=marker, color=f"C{i}", capsize=3, markersize=7,
                elinewidth=1.4, label=label,
            )  # fmt: skip
        one = [row["gain_by_alpha"] for row in chosen]
        panel.plot(range(len(chosen)), one, "_", color="gray", markersize=16, label="theorem 3.8, from one α")
        panel.axhline(1.0, color="black", linewidth=1)
        names = [f"{row['drafter']}\n{row['num_speculative_tokens']}" for row in chosen]
        panel.set_xticks(range(len(chosen)), names, fontsize=10)
        _label(panel, _title(*case), "drafter, draft tokens (a tree: its depth)", "tokens a second over plain decoding")
    _legend(figure, axes)
    return figure


def techniques(rows: Sequence[Row]) -> Figure:
    """Medusa's speed-up by technique: its heads alone, by trees, and with typical acceptance, beside a tree of lookups.

    Parameters
    ----------
    rows : sequence of mapping
        Of ``bench/results/…/end_to_end_medusa.json``; those of "auto" are left out.
    """
    _check_rows(
        "techniques",
        "rows",
        rows,
        "drafter",
        "num_speculative_tokens",
        "temperature",
        "ratio",
        "ratio_min",
        "ratio_max",
    )
    rows = [row for row in rows if isinstance(row["num_speculative_tokens"], int)]
    if not rows:
        raise ValueError('techniques: rows must have a num_speculative_tokens other than "auto", got none')
    cases = _cases(rows)
    drafters = [name for name in dict.fromkeys(row["drafter"] for row in rows) if name != "none"]
    figure, axes = _panels(len(cases), 12, 3.7)
    for panel, case in zip(axes, cases, strict=False):
        for i, drafter in enumerate(drafters):
            chosen = [
                row for row in rows if (row.get("prompts", ""), row["temperature"], row["drafter"]) == (*case, drafter)
            ]
            if not chosen:  # typical acceptance, greedily
                continue
            gains = np.array([[row["ratio"], row["ratio_min"], row["ratio_max"]] for row in chosen])
            bars = [gains[:, 0] - gains[:, 1], gains[:, 2] - gains[:, 0]]
            nodes = [row["num_speculative_tokens"] for row in chosen]
            panel.errorbar(nodes, gains[:, 0], bars, fmt=f"-{_marker(i)}", color=f"C{i}", capsize=3, label=drafter)
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set_xscale("log", base=2)
        ticks = sorted({row["num_speculative_tokens"] for row in rows if row["drafter"] != "none"})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        _label(panel, _title(*case), "nodes of the tree, root included", "tokens a second over plain")
    _legend(figure, axes)
    return figure


def thresholds(rows: Sequence[Row]) -> Figure:
    """Typical acceptance over its threshold ε: tokens a step, and how likely its text is, beside lossless decoding.

    Parameters
    ----------
    rows : sequence of mapping
        Of ``bench/results/…/typical.json``; where ``epsilon`` is None, of lossless or plain decoding.
    """
    keys = ("tokens_per_step", "log_prob")
    errors = [f"{key}_error" for key in keys]
    _check_rows("thresholds", "rows", rows, "prompts", "temperature", "way", "epsilon", *keys, *errors)
    figure, axes = _panels(2, 12, 4.8)
    labels = ("tokens a step", "log-probability of a token, nats")
    for panel, key, error, label in zip(axes, keys, errors, labels, strict=True):
        for i, case in enumerate(_cases(rows)):
            mine = [row for row in rows if (row["prompts"], row["temperature"]) == case]
            over = [row for row in mine if row["epsilon"] is not None]
            x, y, bars = ([row[k] for row in over] for k in ("epsilon", key, error))
            panel.errorbar(x, y, bars, fmt=f"-{_marker(i)}", color=f"C{i}", capsize=3, label=_title(*case))
            for row in mine:
                if row["way"] == "lossless":
                    panel.axhline(row[key], color=f"C{i}", linestyle="--", linewidth=1, label="the same, lossless")
        _label(panel, "Typical acceptance, δ = √ε", "threshold ε", label)
    _legend(figure, axes)
    return figure


def cascades(
    rows: Sequence[Row], cost: str = "target_calls_per_token", quality: str = "word_accuracy",
    rules: Sequence[str] | None = None, alone: bool = False,
) -> Figure:  # fmt: skip
    """Quality against cost of speculative cascades and other target laws: a line for each rule, swept over α, with a
    standard error up and down; the target's quality dashed. A panel for each way of sampling and draft length.

    Parameters
    ----------
    rows : sequence of mapping
        Of a file of ``bench/results/cascades``: ``draft-lengths.json`` or ``rewriting.json``.
    cost, quality : str
        What is drawn, by the names that the rows have for it; quality is "word_accuracy", or of ``next-token.json``
        "accuracy" or "log_loss". A way of sampling for which the rows have no such numbers is left out.
    rules : sequence of str, optional
        Which are drawn, in this order; None: all that there are.
    alone : bool
        Also draw the two models alone as points, which at their cost lie far from the lines.
    """
    check_one_of("cascades", "quality", quality, ("word_accuracy", "accuracy", "log_loss"))
    error = "log_loss_standard_error" if quality == "log_loss" else "standard_error"
    _check_rows("cascades", "rows", rows, "setting", "rule", "alpha", quality, error)
    check_instance("cascades", "cost", cost, str, "a string")
    check_flag("cascades", "alone", alone)
    if rules is None:
        rules = [rule for rule in dict.fromkeys(row["rule"] for row in rows) if rule not in _MODELS]
    check_sequence("cascades", "rules", rules, str, "names")
    points: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get(cost) is not None and row[quality] is not None:
            points.setdefault((row["setting"], row["rule"]), []).append(row)
    if not points:
        raise ValueError(f"cascades: cost must be a number that rows have, got {cost!r}")
    settings = list(dict.fromkeys(setting for setting, _ in points))
    figure, axes = _panels(len(settings), max(4.6 * min(3, len(settings)), 8), 3.9, columns=3)
    for panel, setting in zip(axes, settings, strict=False):
        for i, rule in enumerate(rules):
            if curve := sorted(points.get((setting, rule), ()), key=lambda row: row["alpha"] or 0.0):
                x, y, bars = ([row[key] for row in curve] for key in (cost, quality, error))
                style: dict[str, Any] = {"fmt": f"-{_marker(i)}", "color": f"C{i % 10}", "markersize": 5, "capsize": 2}
                panel.errorbar(x, y, bars, linewidth=1.3, elinewidth=0.7, label=rule, **style)
        for name, marker in _MODELS.items():
            for row in points.get((setting, name), ()) if alone or name == "lossless" else ():
                panel.scatter(row[cost], row[quality], color="black", marker=marker, s=30, label=name)
        for row in rows:
            if (row["setting"], row["rule"]) == (setting, "target alone"):
                panel.axhline(row[quality], color="black", linewidth=1, linestyle="--")
        _label(panel, setting, _AXES.get(cost, cost), _AXES.get(quality, quality))
    _legend(figure, axes)
    return figure


def _marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]


def _check_rows(caller: str, name: str, rows: object, *keys: str) -> None:
    """Raise unless mappings with these keys, one or more."""
    check_sequence(caller, name, rows, Mapping, "mappings")
    for row in cast(Sequence[Row], rows):
        if missing := [key for key in keys if key not in row]:
            raise ValueError(f"{caller}: {name} must have {', '.join(keys)}, got one without {', '.join(missing)}")


def _check_numbers(caller: str, name: str, values: object, kind: type | tuple[type, ...], least: float) -> None:
    """Raise unless numbers, one or more, of at least so much."""
    check_sequence(caller, name, values, kind, "integers" if kind is int else "numbers")
    for value in cast(Sequence[float], values):
        check_number(caller, name, value, least, 1e9)


def _panels(count: int, width: float, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, `columns` a line, `width` inches in all and `height` inches for each line."""
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(width, lines * height + 0.4), layout="constrained")
    axes: list[Axes] = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes


def _legend(figure: Figure, axes: Sequence[Axes], title: str | None = None) -> None:
    """One legend of all panels, above them."""
    found = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), title=title, loc="outside upper center", ncols=4, fontsize=11)


def _cases(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Prompt sets and temperatures, in order."""
    return list(dict.fromkeys((row.get("prompts", ""), row["temperature"]) for row in rows))


def _title(name: str, temperature: float) -> str:
    kind = "greedy" if temperature == 0 else f"T = {temperature:g}"
    return f"{name}, {kind}" if name else kind


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=13)
    axes.set_xlabel(x, fontsize=12)
    axes.set_ylabel(y, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.3)
