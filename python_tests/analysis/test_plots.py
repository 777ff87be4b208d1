"""Figures show what they say: their lines are the theory's, their points the rows', and everything is labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from specdec_kernels import analysis
from specdec_kernels.analysis import plots


def estimate(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def row(drafter: str, length: int, temperature: float, batch: int = 1, gain: float = 1.5) -> dict[str, Any]:
    return {
        "prompts": "texts", "drafter": drafter, "num_speculative_tokens": length, "temperature": temperature,
        "batch_size": batch, "gain": estimate(gain), "simulated": estimate(gain - 0.1),
        "measured": estimate(gain - 0.2),
        "gain_by_alpha": gain + 0.3, "by_position": [estimate(0.7 - 0.1 * i) for i in range(length)],
        "ratio": gain, "ratio_min": gain - 0.1, "ratio_max": gain + 0.1,
    }  # fmt: skip


ROWS = [
    row(d, k, t, b, 1 + 0.1 * k / b) for d in ("lookup", "medusa") for k in (1, 3) for t in (0.0, 1.0) for b in (1, 8)
]
TYPICAL = [
    {"prompts": "texts", "temperature": 0.7, "way": way, "epsilon": epsilon, "tokens_per_step": 2 - (epsilon or 1),
     "tokens_per_step_error": 0.1, "log_prob": -1.0, "log_prob_error": 0.1}
    for way, epsilon in (("plain", None), ("lossless", None), ("typical", 0.05), ("typical", 0.2))
]  # fmt: skip
CASCADES = [
    {"setting": setting, "rule": rule, "alpha": alpha, "word_accuracy": 0.5 + (alpha or 0.1), "standard_error": 0.01,
     "target_calls_per_token": None if rule == "target alone" and setting == "T = 1" else 0.2 + (alpha or 0.3)}
    for setting in ("T = 0, γ = 3", "T = 0, γ = 5", "T = 0, γ = 7", "T = 1")
    for rule, alpha in [("target alone", None), ("draft alone", None), ("lossless", None), ("Chow", 0.2), ("Chow", 0.1),
                        ("Diff", 0.05)]
]  # fmt: skip
FIGURES = {
    "expected_tokens": plots.expected_tokens,
    "improvement_surfaces": plots.improvement_surfaces,
    "best_gamma": plots.best_gamma,
    "acceptance_by_position": lambda: plots.acceptance_by_position(ROWS),
    "gain_by_batch": lambda: plots.gain_by_batch(ROWS),
    "predicted_and_measured": lambda: plots.predicted_and_measured(ROWS),
    "techniques": lambda: plots.techniques(ROWS),
    "thresholds": lambda: plots.thresholds(TYPICAL),
    "cascades": lambda: plots.cascades(CASCADES),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_panel_is_labelled_and_the_command_stands_below(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    panels = [axes for axes in figure.axes if axes.axison]
    assert panels and all(axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    plots.save(figure, tmp_path / "figure.png", "specdec plot something", "of these rows")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with Image.open(tmp_path / "figure.png") as written:
        assert written.info["Description"] == "of these rows"
        assert written.width == pytest.approx(110 * figure.get_figwidth(), abs=1)
    assert figure.get_supxlabel() == "specdec plot something"


def test_a_description_is_kept_or_refused(tmp_path: Path) -> None:
    for suffix in (".svg", ".PNG"):
        path = tmp_path / f"figure{suffix}"
        plots.save(plots.best_gamma(), path, "a command", "of these rows")
        assert b"of these rows" in path.read_bytes()
    for suffix in (".pdf", ".jpg", ".eps"):
        path = tmp_path / f"figure{suffix}"
        with pytest.raises(
            ValueError, match=r"^save: description must be None unless path ends with .png or .svg, got it"
        ):
            plots.save(plots.best_gamma(), path, "a command", "of these rows")
        assert not path.exists()
    plots.save(plots.best_gamma(), tmp_path / "figure.pdf", "a command")


def test_every_figure_is_tested() -> None:
    assert set(FIGURES) == set(plots.__all__) - {"save"}


def test_expected_tokens_has_a_line_for_each_gamma() -> None:
    lines = plots.expected_tokens().axes[0].lines
    assert len(lines) == 15
    for gamma, line in enumerate(lines, 1):
        np.testing.assert_allclose(line.get_ydata(), analysis.expected_tokens(line.get_xdata(), gamma))


def test_best_gamma_has_the_best_and_its_gain() -> None:
    best, speed = plots.best_gamma([0.05, 0.3], max_gamma=12).axes
    for c, one, other in zip((0.05, 0.3), best.lines, speed.lines, strict=True):
        gammas = analysis.best_gamma(one.get_xdata(), c, 12)
        np.testing.assert_array_equal(one.get_ydata(), gammas)
        np.testing.assert_allclose(other.get_ydata(), analysis.walltime_improvement(other.get_xdata(), gammas, c))


def points(figure: Figure, panel: int, label: str) -> list[float]:
    """The heights of a line with error bars."""
    (found,) = (c for c in figure.axes[panel].containers if c.get_label() == label)
    return list(found.lines[0].get_ydata())


def test_points_are_those_of_the_rows() -> None:
    alone = [r for r in ROWS if r["batch_size"] == 1]
    figure = plots.predicted_and_measured(alone)
    assert [axes.get_title() for axes in figure.axes] == ["texts, greedy", "texts, T = 1"]
    greedy = [r for r in alone if r["temperature"] == 0]
    for key, label in (("gain", "predicted, 95 %"), ("measured", "measured, all rounds")):
        assert points(figure, 0, label) == [r[key]["mean"] for r in greedy]
    figure = plots.acceptance_by_position(alone)
    assert points(figure, 1, "medusa") == pytest.approx([0.7, 0.6, 0.5])  # of the longest draft
    some = [r for r in alone if r["drafter"] == "medusa" or r["temperature"] == 0]  # lookup in one panel of two
    colors = [
        c.lines[0].get_color()
        for axes in plots.acceptance_by_position(some).axes
        for c in axes.containers
        if c.get_label() == "medusa"
    ]
    assert len(colors) == 2 and len(set(colors)) == 1
    figure = plots.gain_by_batch(ROWS)
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == "lookup, 3")
    assert list(line.get_ydata()) == pytest.approx([1.3, 1.0375])
    both = plots.gain_by_batch([*ROWS, *({**r, "prompts": "others", "gain": estimate(9.0)} for r in ROWS)])
    assert [axes.get_title() for axes in both.axes] == [
        f"{of}, {how}" for of in ("texts", "others") for how in ("greedy", "T = 1")
    ]
    (line,) = (line for line in both.axes[0].lines if line.get_label() == "lookup, 3")
    assert list(line.get_ydata()) == pytest.approx([1.3, 1.0375]), "not the other set's"
    chosen = [r | {"num_speculative_tokens": "auto, 8"} for r in alone]
    assert points(plots.techniques([*alone, *chosen]), 0, "medusa") == pytest.approx([1.1, 1.3])
    figure = plots.thresholds(TYPICAL)
    assert points(figure, 0, "texts, T = 0.7") == [1.95, 1.8]
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == "the same, lossless")
    assert set(line.get_ydata()) == {1.0}


def test_cascades_have_a_curve_for_each_rule_and_a_panel_for_each_setting() -> None:
    figure, settings = plots.cascades(CASCADES), list(dict.fromkeys(row["setting"] for row in CASCADES))
    assert [axes.get_title() for axes in figure.axes if axes.axison] == settings
    assert points(figure, 0, "Chow") == [0.6, 0.7]  # by α
    assert {c.get_label() for c in figure.axes[3].containers} == {"Chow", "Diff"}
    (dashed,) = (line for line in figure.axes[3].lines if line.get_linestyle() == "--")
    assert set(dashed.get_ydata()) == {0.6}, "the target's quality, of which no cost is known"

    def models(figure: Figure, panel: int) -> list[object]:
        return [c.get_label() for c in figure.axes[panel].collections if c.get_label() in plots._MODELS]

    few = plots.cascades(CASCADES, rules=["Diff", "no rule"], alone=True)
    assert [c.get_label() for c in few.axes[0].containers] == ["Diff"]
    assert models(figure, 0) == ["lossless"] and models(few, 0) == ["lossless", "draft alone", "target alone"]
    assert models(few, 3) == ["lossless", "draft alone"]
    timed = [row | {"relative_seconds_alone": 1.0} if row["setting"] == "T = 1" else row for row in CASCADES]
    assert [axes.get_title() for axes in plots.cascades(timed, "relative_seconds_alone").axes] == ["T = 1"]


def test_there_may_be_more_drafters_than_markers() -> None:
    many = [row(f"drafter {i}", 2, 0.0) for i in range(12)]
    for draw in (plots.acceptance_by_position, plots.techniques, plots.gain_by_batch):
        labels = draw(many).axes[0].get_legend_handles_labels()[1]
        assert sum(label.startswith("drafter") for label in labels) == 12


def test_what_is_unknown_is_left_out() -> None:
    """A position that no step reached has no mean; a gain from one answer has no interval."""
    unknown = row("lookup", 2, 0.0)
    unknown["by_position"][1] = {"mean": None, "low": None, "high": None}
    unknown["gain"] = {"mean": 1.2, "low": None, "high": None}
    assert points(plots.acceptance_by_position([unknown]), 0, "lookup") == [0.7]
    assert points(plots.predicted_and_measured([unknown]), 0, "predicted, 95 %") == [1.2]
