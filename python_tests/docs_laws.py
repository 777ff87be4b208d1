"""What the tables of docs/choosing-a-law.md must hold, by the curves of bench/results/cascades."""

from __future__ import annotations

from bench import machine
from bench.cascades.report import _CALLS, _NOISE, _REJECTED, _SECONDS
from bench.cascades.results import LOSSLESS, TARGET, Row, best_quality, curves, least_cost, swept
from python_tests.docs_tables import Expected, results

CASCADES = machine.RESULTS / "cascades"
CHOOSING = "docs/choosing-a-law.md"
RULES = {"`BiLD`": "BiLD*", "`seq_cascade`": "SeqCascade [Chow]"}  # the others are called as in the results


def rewriting(setting: str) -> tuple[Row, Row, dict[str, list[Row]]]:
    """Target, lossless verification and the curves of the laws."""
    by_rule = curves(results("rewriting", CASCADES)["rows"], setting)
    (target,), (lossless,) = by_rule[TARGET], by_rule[LOSSLESS]
    return target, lossless, swept(by_rule, lossless)


def best_by_law(setting: str, column: str) -> Expected:
    """Word accuracy in percent at no more rejections than lossless verification's, or the α that has it."""
    target, lossless, laws = rewriting(setting)
    if column == "target":
        return [100 * target["word_accuracy"]]
    name = column.replace("`", "").removesuffix(", α")
    if setting == "T = 0" and name == "Lossy, β = 1":  # is lossless verification there
        return []
    points = laws["Diff" if setting == "T = 0" and name == "Opt" else name]
    best = best_quality(points, "word_accuracy", _REJECTED, lossless[_REJECTED])
    assert best is not None
    if not column.endswith(", α"):
        return [100 * best]
    return [next(point["alpha"] for point in points if point["word_accuracy"] == best)]


def cost_by_law(label: str, column: str) -> Expected:
    """At T = 1, with the target's quality; percent rejected, target calls, or seconds."""
    rule = RULES.get(label, label.replace("`", ""))
    if column == "rejected, next-token (accuracy)":
        by_rule = curves(results("next-token", CASCADES)["rows"], "T = 1")
        (target,) = by_rule[TARGET]
        points = [target] if rule == LOSSLESS else swept(by_rule, target).get(rule)
        least = points and least_cost(points, "accuracy", _REJECTED, target["accuracy"] - 1e-9)
        return [100 * least] if least else []
    target, lossless, laws = rewriting("T = 1")
    cost, unit = {
        "rejected, rewriting": (_REJECTED, 100), "target calls a token": (_CALLS, 1),
        "time, of the target's": (_SECONDS, 1),
    }[column]  # fmt: skip
    points = [lossless] if rule == LOSSLESS else laws[rule]
    enough = target["word_accuracy"] - _NOISE
    least = least_cost(points, "word_accuracy", cost, enough)
    assert least is not None
    return [unit * least]
