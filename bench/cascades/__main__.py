"""``python -m bench.cascades``: quality against cost of every target law, on tasks with a ground truth.

Two tasks. *rewriting*: a T5 and a shallower one, both trained here (`train`, once; the cache keeps them), turn
telegraphic text back to prose; quality is word accuracy, cost is the rejection rate, target calls and wall clock
(*draft-lengths*: target calls alone, with drafts of 3, 5 and 7 tokens).
*next-token*: SmolLM2-135M-Instruct with an n-gram draft on held-out code; quality is the exact log-loss and accuracy of
the distribution produced, cost is the exact rejection rate. `report` makes figures and tables from the results.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench import machine
from bench.cascades import generation, next_token, report, rules, training
from bench.cascades.results import Row
from specdec_kernels import assets
from specdec_kernels.commands import ended
from specdec_kernels.options import COUNT, POSITIVE, THREADS, fill

PARTS = ("train", "rewriting", "draft-lengths", "next-token", "report")
SIZES = {"pairs": 128, "batch": 16, "timed": 16, "positions": 1000, "settings": None}
QUICK = {"pairs": 16, "batch": 16, "timed": 2, "positions": 64, "settings": ["T = 1"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts asked for; the results of each task go into one JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cascades", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"out of {', '.join(PARTS)} (default: all, in order)")
    parser.add_argument(
        "--settings", nargs="+", choices=rules.SETTINGS,
        help=f"(default: all; of draft-lengths {' and '.join(rules.DETAILED)})",
    )  # fmt: skip
    parser.add_argument("--pairs", type=POSITIVE, help="held-out texts rewritten (default 128)")
    parser.add_argument("--batch", type=POSITIVE, help="texts decoded together (default 16)")
    parser.add_argument("--timed", type=COUNT, help="of them decoded one by one, timed (default 16)")
    parser.add_argument("--positions", type=POSITIVE, help="next tokens predicted (default 1000)")
    parser.add_argument("--threads", type=THREADS, default=torch.get_num_threads())
    parser.add_argument(
        "--quick", action="store_true", help="a rehearsal of sizes of its own; its figures mean nothing"
    )
    parser.add_argument("--output", type=Path, help="folder of the results (default: bench/results/cascades)")
    arguments = parser.parse_args(argv)
    parts = arguments.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    fill(parser, arguments, SIZES, QUICK)
    return ended("cascades", partial(_run, arguments, parts))


def _run(arguments: argparse.Namespace, parts: Sequence[str]) -> None:
    folder = arguments.output or (Path("build/cascades") if arguments.quick else machine.RESULTS / "cascades")
    shares = {"rewriting": generation.SHARES, "draft-lengths": generation.SHARES, "next-token": next_token.SHARES}
    recipes = training.TARGET, training.DRAFT
    if arguments.quick:
        shares = dict.fromkeys(shares, (0.7, 0.3))
        recipes = training.quick(training.TARGET), training.quick(training.DRAFT)
    torch.set_num_threads(arguments.threads)

    def settings_of(task: str) -> list[str]:
        return arguments.settings or list(rules.DETAILED if task == "draft-lengths" else rules.SETTINGS)

    def measure(task: str, sweep: Callable[..., list[Row]], **more: object) -> None:
        """Replace the task's file once its sweep is over: until then the rows go into a file of their own."""
        settings = {"settings": settings_of(task), "threads": arguments.threads, "shares": shares[task], **more}
        part = f"{task}.unfinished"
        rows = sweep(
            settings=settings_of(task), shares=shares[task],
            save=lambda rows: machine.save(folder, part, rows, settings),
        )  # fmt: skip
        machine.save(folder, task, rows, settings)
        (folder / f"{part}.json").unlink()

    if {"train", "rewriting", "draft-lengths"} & set(parts):
        corpus = training.load_corpus()
        target, draft = (training.load_model(recipe, corpus) for recipe in recipes)
    for task in [part for part in ("rewriting", "draft-lengths") if part in parts]:
        several = task == "draft-lengths"
        lengths = generation.DRAFT_LENGTHS if several else (generation.DRAFT_LENGTH,)
        timed = 0 if several else arguments.timed
        sizes = {"pairs": arguments.pairs, "batch": arguments.batch, "timed": timed}
        measure(
            task, partial(generation.sweep, target, draft, corpus, draft_lengths=lengths, **sizes), **sizes,
            draft_length=lengths if several else lengths[0], target=str(recipes[0]), draft=str(recipes[1]),
        )  # fmt: skip
    if "next-token" in parts:
        held_out = next_token.held_out(arguments.positions)
        measure(
            "next-token", partial(next_token.sweep, *held_out),
            positions=len(held_out[2]), problems=len(set(held_out[3].tolist())),
            target=assets.MODEL_NAME, draft="n-grams of the standard library and of the text",
        )  # fmt: skip
    if "report" in parts:
        for path in report.write(folder):
            print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
