"""``specdec plan`` and ``specdec plot``."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..assets import prompts
from ..commands import add_model_options, check_utf8, load, load_draft, model_name, read_text
from ..options import LENGTH, POSITIVE, TEMPERATURE, Defaults, existing
from . import drafters as choices
from . import planner, plots

__all__ = ["main"]

FIGURES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "expected-tokens": (lambda _: plots.expected_tokens(), "tokens a step against acceptance"),
    "surfaces": (lambda _: plots.improvement_surfaces(), "speed and operations over acceptance and draft tokens"),
    "best-gamma": (lambda _: plots.best_gamma(), "the best number of draft tokens, and what it gains"),
    "acceptance": (lambda found: plots.acceptance_by_position(_rows(found, "acceptances")), "acceptance by position"),
    "batch": (lambda found: plots.gain_by_batch(_rows(found, "choices")), "predicted gain by batch size"),
    "measured": (lambda found: plots.predicted_and_measured(_rows(found)), "predicted, simulated and measured gain"),
    "techniques": (lambda found: plots.techniques(_rows(found)), "Medusa losslessly, typically, and lookups, by tree"),
    "thresholds": (lambda found: plots.thresholds(_rows(found)), "typical acceptance over its threshold"),
    "cascades": (lambda found: plots.cascades(_rows(found)), "quality against target calls of cascades"),
}
"""What `specdec plot` draws; those from "acceptance" on of a JSON file."""
_OF_FILES = tuple(FIGURES)[3:]


def main(argv: Sequence[str]) -> None:
    """Run ``plan`` or ``plot``, the first of the arguments, with the others."""
    command, *given = argv
    parser = _plan_parser() if command == "plan" else _plot_parser()
    (_plan if command == "plan" else _plot)(parser.parse_args(given), shlex.join(["specdec", *argv]))


def _plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdec plan",
        description="Measure how often each drafter's tokens are accepted and what each step costs, and say which "
        "drafter and how many draft tokens gain most, at each temperature and batch size. Steps are timed greedily, "
        "after at most the last 128 tokens of each prompt. Takes minutes on a CPU.",
        formatter_class=Defaults,
    )
    add_model_options(parser)
    parser.add_argument(
        "--drafter", nargs="*", choices=choices.PLANNED,
        help="what is compared, beside the chains and trees of --draft-model "
        f"(default: {', '.join(choices.COMPARED)}, the last where there are heads for the model)",
    )  # fmt: skip
    parser.add_argument("--sets", choices=prompts.PROMPT_SETS, help="the demo's prompts (default: humaneval)")
    parser.add_argument("--prompt-file", type=existing, help="instead: a text of one prompt a line, or of JSON strings")
    parser.add_argument(
        "--raw", action="store_true", help="of --prompt-file: as it is, not in the model's chat template"
    )
    parser.add_argument(
        "--count",
        type=POSITIVE,
        default=8,
        help="prompts at most, decoded together: the first of a file, the last of a set",
    )
    parser.add_argument("--temperature", type=TEMPERATURE, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    parser.add_argument(
        "--num-speculative-tokens", type=LENGTH, nargs="+", default=list(planner.LENGTHS), metavar="K",
        help="draft tokens a step",
    )  # fmt: skip
    parser.add_argument("--batch", type=POSITIVE, nargs="+", default=[1, 8], help="sequences decoded together")
    parser.add_argument("--max-new-tokens", type=POSITIVE, default=48, help="tokens of each answer")
    parser.add_argument("--rounds", type=POSITIVE, default=2, help="times that each step is timed")
    parser.add_argument("--draws", type=POSITIVE, default=2, help="answers to each prompt at temperatures above 0")
    parser.add_argument("--figure", type=Path, help="also draw the gains by batch size into this PNG")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON document instead")
    return parser


def _plan(arguments: argparse.Namespace, line: str) -> None:
    if arguments.figure is not None:
        plots.check_writable("plan", arguments.figure, "--figure")
    own = arguments.model is None
    names = arguments.drafter
    if arguments.prompt_file is None and arguments.raw:
        raise ValueError("--raw must be given with --prompt-file, got it alone")
    if arguments.prompt_file is not None and arguments.sets is not None:
        raise ValueError("prompts must be given once, got --sets and --prompt-file")
    if arguments.heads is not None and names is not None and "medusa" not in names:
        raise ValueError("--heads must be given with --drafter medusa, got it without")
    choices.check_heads(names or (), arguments.model, arguments.heads)
    given = arguments.sets or "humaneval"
    texts = [] if arguments.prompt_file is None else _read_prompts(arguments.prompt_file)[: arguments.count]
    model, tokenizer, packs = load(arguments)
    if arguments.prompt_file is not None:
        texts = texts if arguments.raw else [prompts.chat_of(tokenizer, text) for text in texts]
    else:
        texts = prompts.load_prompts(given, tokenizer)[-arguments.count :]  # the n-gram model was tuned on the first
    ids, mask = (tensor.to(model.device) for tensor in prompts.encode(tokenizer, texts))
    if names is None:
        names = [name for name in choices.COMPARED if name != "medusa" or own or arguments.heads]
    draft_model = load_draft(arguments, model, tokenizer)
    if draft_model is not None:
        names = [*names, *choices.of_draft_model(model, draft_model)]
    drafters = choices.make(names, model, tokenizer, corpus=own, heads=arguments.heads, draft_model=draft_model)
    if not drafters:
        raise ValueError("--drafter or --draft-model must name one or more, got none")
    total = planner.count_runs(
        drafters, 1, arguments.temperature, len(arguments.num_speculative_tokens), len(arguments.batch),
        arguments.rounds, arguments.draws,
    )  # fmt: skip
    with tqdm(total=total, unit="run", mininterval=0.5, leave=False, disable=None) as bar:
        found = planner.plan(
            model, [(ids, mask)], drafters, temperatures=arguments.temperature,
            lengths=arguments.num_speculative_tokens, batch_sizes=arguments.batch,
            max_new_tokens=arguments.max_new_tokens, rounds=arguments.rounds,
            draws=arguments.draws, advance=bar.update,
        )  # fmt: skip
    report: dict[str, Any] = {
        "model": model_name(arguments),
        "prompts": given if arguments.prompt_file is None else arguments.prompt_file.name,
        "num_prompts": len(texts),
        "device": str(ids.device),
        "threads": torch.get_num_threads(),
        "packed": packs,
        "command": line,
    } | found.to_dict()
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    if arguments.figure is not None:  # last: what was measured is not lost if the file cannot be written
        plots.save(plots.gain_by_batch(report["choices"]), arguments.figure, line)
        if not arguments.json:
            print(f"written: {arguments.figure}")


def _print(report: dict[str, Any]) -> None:
    where = f"{report['device']}, {report['threads']} threads" if report["device"] == "cpu" else report["device"]
    print(f"{report['model']} on {where}, {report['num_prompts']} prompts of {report['prompts']}")
    for best in report["best"]:
        case = f"temperature {best['temperature']:g}, batch {best['batch_size']}"
        if best["drafter"] == planner.PLAIN:
            print(f"  {case}: plain decoding; no drafter gains anything")
        else:
            how = f"{best['drafter']} with {best['num_speculative_tokens']} tokens"
            print(f"  {case}: {how}, {best['gain']:.2f} times plain decoding (the largest of all: it may flatter)")
    print(
        f"\n{'temperature':>11} {'batch':>5}  {'drafter':10}{'tokens':>7}{'alpha':>7}{'c':>7}{'verify':>8}"
        f"{'a step':>8}{'gain':>7}  95 %"
    )
    for row in report["choices"]:
        numbers = (row["alpha"]["mean"], row["gain"]["low"], row["gain"]["high"])
        alpha, low, high = ("–" if number is None else f"{number:.2f}" for number in numbers)
        print(
            f"{row['temperature']:11g} {row['batch_size']:5}  {row['drafter']:10}{row['num_speculative_tokens']:7}"
            f"{alpha:>7}{row['c']:7.3f}{row['verification']:8.2f}{row['tokens_per_step']['mean']:8.2f}"
            f"{row['gain']['mean']:7.2f}  {low} to {high}"
        )
    print(
        "\ntokens: draft tokens a step, of a tree its depth; alpha: acceptance of a draft token; c: drafting a token "
        "over a plain\nstep; verify: a verified step over a plain one; a step: tokens a step; gain: tokens a second "
        "over plain decoding"
    )


def _read_prompts(path: Path) -> list[str]:
    """One prompt a line; a line that begins with a quotation mark is a JSON string, which may have several lines."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.startswith('"'):
            try:
                line = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
        check_utf8(f"{path}, line {number}", line)
        if line.strip():
            found.append(line)
    if not found:
        raise ValueError(f"{path} must hold a prompt, and has none")
    return found


def _plot_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:16}{text}" for name, (_, text) in FIGURES.items())
    parser = argparse.ArgumentParser(
        prog="specdec plot",
        description="Draw a figure into a PNG.",
        epilog=f"figures:\n{listing}\n{', '.join(_OF_FILES[:2])}: of what `specdec plan --json` printed or python -m "
        "bench.plan wrote;\nmeasured: of the latter; techniques, thresholds: of end_to_end_medusa.json and "
        "typical.json in bench/results/MACHINE;\ncascades: of draft-lengths.json in bench/results/cascades, or of "
        "rewriting.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figure", choices=FIGURES, metavar="figure", help=", ".join(FIGURES))
    parser.add_argument("results", type=existing, nargs="?", help=f"a JSON file, for {', '.join(_OF_FILES)}")
    parser.add_argument("--output", type=Path, help="the PNG (default: FIGURE.png)")
    return parser


def _plot(arguments: argparse.Namespace, line: str) -> None:
    draw, _ = FIGURES[arguments.figure]
    output = arguments.output or Path(f"{arguments.figure}.png")
    plots.check_writable("plot", output, "--output")
    if (arguments.figure in _OF_FILES) != (arguments.results is not None):
        wanted = "a JSON file" if arguments.figure in _OF_FILES else "no file"
        raise ValueError(f"figure {arguments.figure} takes {wanted}, got {arguments.results or 'none'}")
    text = None if arguments.results is None else read_text(arguments.results)
    try:
        figure = draw(None if text is None else json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # of a file's contents
        raise ValueError(f"{arguments.results} does not hold what {arguments.figure} is drawn from: {error}") from error
    plots.save(figure, output, line)
    print(f"written: {output}")


def _rows(found: dict[str, Any], key: str = "rows") -> list[dict[str, Any]]:
    """The rows of a plan's own report, or of a result file."""
    name = key if key in found else "rows"
    rows: list[dict[str, Any]] = found[name]
    if not rows:
        raise ValueError(f"its {name} must not be empty")
    return rows
