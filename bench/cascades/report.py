"""Figures and tables from the result files of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cascades import figures
from bench.cascades.results import (
    DRAFT,
    LOSSLESS,
    TARGET,
    Row,
    at_length,
    best_quality,
    curves,
    least_cost,
    markdown,
    swept,
)
from bench.cascades.rules import DETAILED

_HEAD = """# Cascades on tasks with a ground truth

Written by `python -m bench.cascades report` from the JSON files beside it; what was measured is in `bench/cascades/`.

A curve is a rule swept over α, straight between neighbouring points; those of speculative rules begin at lossless
verification, which is what they all come to at one end. "At equal quality" is the least cost on it with the target's
quality. The other columns are the best quality on it at a cost of no more than is said. "–" stands where it nowhere
has that quality, is nowhere so cheap, or has no such cost. In the figures a bar is one standard error up and down.
"""
_NOISE = 0.005  # two runs of the same law differ by this much in word accuracy


def write(folder: Path) -> list[Path]:
    """Write ``README.md`` and the figures for the results in `folder`; returns all their paths.

    Raises
    ------
    FileNotFoundError
        There are none.
    """
    written, sections = [], [_HEAD]
    makers = {
        "rewriting": (_rewriting, _draw_rewriting), "draft-lengths": (_draft_lengths, _draw_draft_lengths),
        "next-token": (_next_token, _draw_next_token),
    }  # fmt: skip
    for task, (describe, draw) in makers.items():
        path = folder / f"{task}.json"
        if path.exists():
            result = json.loads(path.read_text())
            drawn = draw(result, folder)
            sections += [describe(result), *(f"![{p.stem}]({p.name})\n" for p in drawn)]
            written += drawn
    if not written:
        raise FileNotFoundError(f"no result file in {folder}")
    readme = folder / "README.md"
    readme.write_text("\n".join(sections))
    return [readme, *written]


def _settings_of(result: dict[str, Any], with_number: str | None = None) -> list[str]:
    """The settings in the order measured, or only those whose rows have this number."""
    rows = result["rows"]
    return list(dict.fromkeys(row["setting"] for row in rows if with_number is None or with_number in row))


def _only(points: Sequence[Row] | None) -> Row:
    assert points is not None and len(points) == 1
    return points[0]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _provenance(result: dict[str, Any]) -> str:
    machine, git = result["machine"], result["git"]
    changed = " (with changes)" if git.get("modified") else ""
    command = result["command"].replace(".__main__", "")
    return (
        f"`{command}`, {result['date'][:10]}, {machine['cpu']}, {machine['logical_cores']} cores, "
        f"{result['settings']['threads']} thread(s), revision {git.get('revision', 'unknown')[:10]}{changed}."
    )


# --- rewriting --------------------------------------------------------------------------------------------------------


_REJECTED, _CALLS, _SECONDS = "rejection_rate", "target_calls_per_token", "relative_seconds_alone"


def _rewriting(result: dict[str, Any]) -> str:
    settings = result["settings"]
    parts = [
        "## Rewriting\n",
        f"Telegraphic text back to prose, {settings['pairs']} held-out texts, two T5 trained here, drafts of "
        f"{settings['draft_length']} tokens. Quality is word accuracy in % (1 − word error rate); equal quality means "
        f"no more than {100 * _NOISE:g} points below the target's, and best qualities are better by luck by about as "
        "much. Seconds are of decoding a token, as a multiple of the target alone in the same run, one text at a time, "
        f"{settings['timed']} texts. (`relative_seconds` in the JSON is of {settings['batch']} texts together, which "
        "wait for the slowest.)\n",
        _provenance(result) + "\n",
    ]
    for setting in _settings_of(result):
        by_rule = curves(result["rows"], setting)
        target, draft, lossless = (_only(by_rule.get(name)) for name in (TARGET, DRAFT, LOSSLESS))
        costs = {"rejected %": (_REJECTED, _percent), "target calls": (_CALLS, _number)}
        limits = {
            "≤ lossless's rejections": (_REJECTED, lossless[_REJECTED]),
            "≤ half of them": (_REJECTED, lossless[_REJECTED] / 2),
            "≤ lossless's target calls": (_CALLS, lossless[_CALLS]),
        }
        time = ""
        if setting in _settings_of(result, _SECONDS):
            costs["seconds"] = (_SECONDS, _number)
            limits["≤ target's seconds"] = (_SECONDS, 1.0)
            time = f" and {_number(lossless[_SECONDS])} of the target's time"
        parts.append(
            f"### {setting}\n\nTarget {_percent(target['word_accuracy'])} ± {_percent(target['standard_error'])}, "
            f"draft {_percent(draft['word_accuracy'])}; lossless verification rejects "
            f"{_percent(lossless[_REJECTED])} % and takes {_number(lossless[_CALLS])} target calls{time} a token.\n"
        )
        enough = target["word_accuracy"] - _NOISE
        body = [
            [
                rule,
                *(form(least_cost(points, "word_accuracy", cost, enough)) for cost, form in costs.values()),
                *(_percent(best_quality(points, "word_accuracy", *limit)) for limit in limits.values()),
            ]
            for rule, points in swept(by_rule, lossless).items()
        ]
        head = ["rule", *(f"{name} at equal quality" for name in costs), *(f"best at {name}" for name in limits)]
        parts.append(markdown(head, body) + "\n")
    return "\n".join(parts)


def _draw_rewriting(result: dict[str, Any], folder: Path) -> list[Path]:
    costs = {"rejections": _REJECTED, "target-calls": _CALLS}
    if _settings_of(result, _SECONDS):
        costs["seconds"] = _SECONDS
    drawn = []
    for name, cost in costs.items():
        path = folder / f"rewriting-{name}.png"
        figures.draw(result, cost, "word_accuracy", figures.MAIN, path)
        drawn.append(path)
    if detailed := [s for s in _settings_of(result) if s in DETAILED]:
        path = folder / "rewriting-variants.png"
        figures.draw(result, _CALLS, "word_accuracy", figures.VARIANTS, path, settings=detailed)
        drawn.append(path)
    return drawn


# --- draft lengths ----------------------------------------------------------------------------------------------------


def _draft_lengths(result: dict[str, Any]) -> str:
    settings, lengths = result["settings"], result["settings"]["draft_length"]
    parts = [
        "## Draft lengths\n",
        f"The same task and pair with drafts of {', '.join(map(str, lengths))} tokens, {settings['pairs']} texts: "
        "target calls a token at equal quality, and the best quality at no more target calls than lossless "
        "verification's.\n",
        _provenance(result) + "\n",
    ]
    for setting in settings["settings"]:
        by_length = [curves(result["rows"], at_length(setting, length)) for length in lengths]
        lossless = [_only(by_rule.get(LOSSLESS)) for by_rule in by_length]
        swept_by = [swept(by_rule, point) for by_rule, point in zip(by_length, lossless, strict=True)]
        enough = _only(by_length[0].get(TARGET))["word_accuracy"] - _NOISE
        calls = ", ".join(_number(point[_CALLS]) for point in lossless)
        parts.append(f"### {setting}\n\nLossless verification takes {calls} target calls a token.\n")
        body = [
            [
                rule,
                *(_number(least_cost(of[rule], "word_accuracy", _CALLS, enough)) for of in swept_by),
                *(
                    _percent(best_quality(of[rule], "word_accuracy", _CALLS, point[_CALLS]))
                    for of, point in zip(swept_by, lossless, strict=True)
                ),
            ]
            for rule in swept_by[0]
        ]
        head = ["rule", *(f"calls, γ = {n}" for n in lengths), *(f"best, γ = {n}" for n in lengths)]
        parts.append(markdown(head, body) + "\n")
    return "\n".join(parts)


def _draw_draft_lengths(result: dict[str, Any], folder: Path) -> list[Path]:
    path = folder / "draft-lengths.png"
    figures.draw(result, _CALLS, "word_accuracy", figures.MAIN, path, alone=False)
    return [path]


# --- next token -------------------------------------------------------------------------------------------------------


def _next_token(result: dict[str, Any]) -> str:
    parts = [
        "## Next token\n",
        f"{result['settings']['target']} with a draft of {result['settings']['draft']}, the next token at "
        f"{result['settings']['positions']} places of HumanEval's solutions, distributions in closed form: no sampling "
        "noise. Accuracy is the mean π(x) of the true token in %, log-loss the mean −log π(x) in nats, and the "
        "rejection rate the mean TV(π, Q).\n",
        _provenance(result) + "\n",
    ]
    for setting in _settings_of(result):
        by_rule = curves(result["rows"], setting)
        target, draft = (_only(by_rule.get(name)) for name in (TARGET, DRAFT))
        lossless = target["rejection_rate"]
        with_loss = target["log_loss"] is not None
        losses = f" (log-loss {_number(target['log_loss'])} and {_number(draft['log_loss'])})" if with_loss else ""
        parts.append(
            f"### {setting}\n\nTarget {_percent(target['accuracy'])} ± {_percent(target['standard_error'])}, draft "
            f"{_percent(draft['accuracy'])}{losses}; lossless rejects {_percent(lossless)} %.\n"
        )
        body = []
        for rule, points in swept(by_rule, target).items():
            cells = [
                _percent(least_cost(points, "accuracy", _REJECTED, target["accuracy"] - 1e-9)),
                *(_percent(best_quality(points, "accuracy", _REJECTED, x)) for x in (lossless, lossless / 2)),
            ]
            if with_loss:
                gains = [{**p, "gain": -p["log_loss"]} for p in points]
                best = [best_quality(gains, "gain", _REJECTED, x) for x in (lossless, lossless / 2)]
                cells.append(_percent(least_cost(gains, "gain", _REJECTED, -target["log_loss"] - 1e-9)))
                cells += [_number(None if x is None else -x) for x in best]
            body.append([rule, *cells])
        columns = ["rejected % at equal {}", "best {} at ≤ lossless's rejections", "best {} at ≤ half of them"]
        head = [c.format(q) for q in ("accuracy", "log-loss")[: 1 + with_loss] for c in columns]
        parts.append(markdown(["rule", *head], body) + "\n")
    return "\n".join(parts)


def _draw_next_token(result: dict[str, Any], folder: Path) -> list[Path]:
    rows = result["rows"]
    rules: tuple[str, ...] = (*figures.MAIN[:6], "TokenV1", "TokenV2")
    path = folder / "next-token-accuracy.png"
    figures.draw(result, _REJECTED, "accuracy", rules, path)
    drawn = [path]
    if any(_only(curves(rows, s).get(TARGET))["log_loss"] is not None for s in _settings_of(result)):
        path = folder / "next-token-log-loss.png"
        rules = (*rules, "Chow, log", "Diff, log", "Opt, log")
        figures.draw(result, _REJECTED, "log_loss", rules, path)
        drawn.append(path)
    return drawn
