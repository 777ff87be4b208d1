"""``python -m bench.plan``: the planner's predictions compared with decoding.

For SmolLM2-135M-Instruct, each drafter and each prompt set: what `specdec_kernels.analysis.planner` predicts and
simulates from measured acceptances and costs, and the speed-up actually measured on the same prompts by
`bench.end_to_end`'s alternating rounds. Costs are measured anew for each set, just before it is decoded. All times are
processor time, by default of one thread, which other programs on the machine disturb least, though not never: they
share its caches and memory.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from tqdm import tqdm

import specdec_kernels as sk
from bench import end_to_end, machine, real_model
from bench.end_to_end import PLAIN, Way
from specdec_kernels import GenerationOutput, pack_linear_weights
from specdec_kernels.analysis import drafters as choices
from specdec_kernels.analysis import measured, planner, plots
from specdec_kernels.assets import prompts
from specdec_kernels.options import POSITIVE, TEMPERATURE

TOLERANCE = 0.1
"""A prediction is good within this share of what is measured."""


def by_process_time(model: Any, input_ids: torch.Tensor, **options: Any) -> GenerationOutput:
    """`generate`, reporting the processor time of its steps instead of elapsed time."""
    seen = measured.watch(model, input_ids, clock=time.process_time, acceptances=False, **options)
    return replace(seen.output, stats=replace(seen.output.stats, seconds_decode=float(seen.seconds.sum())))


def compare(name: str, plan: planner.Plan, results: dict[float, dict[end_to_end.Key, end_to_end.Result]]) -> list[Any]:
    """One row for each choice of the plan: what was predicted, and what was measured."""
    rows = []
    for choice in plan.choices:
        if choice.batch_size != 1:
            continue
        key = choice.drafter, choice.num_speculative_tokens
        found = end_to_end.rows_of(name, choice.temperature, results[choice.temperature])
        (seen,) = (row for row in found if (row["drafter"], row["num_speculative_tokens"]) == key)
        acceptance = plan.acceptances[choice.temperature, *key]
        rows.append(
            {
                "prompts": name,
                **asdict(choice),
                "by_position": [asdict(estimate) for estimate in acceptance.by_position()],
                "measured": {"mean": seen["ratio"], "low": seen["ratio_min"], "high": seen["ratio_max"]},
                "measured_tokens_per_step": seen["mean_acceptance_length"],
                "within_tolerance": abs(choice.simulated.mean / seen["ratio"] - 1) <= TOLERANCE,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and write ``plan.json`` and ``plan.png`` into the machine's results folder."""
    parser = real_model.parser(
        "plan", "Predicted speed-up, and measured.", sets=["humaneval", "code-edit"], prompts=6,
        prompts_help="so many, the last of each set (default 6)", max_new_tokens=48, rounds=4, threads=1,
    )  # fmt: skip
    parser.add_argument("--drafter", nargs="+", choices=choices.PLANNED, default=list(choices.COMPARED))
    parser.add_argument("--lengths", nargs="+", type=POSITIVE, default=[3, 7])
    parser.add_argument("--temperatures", nargs="+", type=TEMPERATURE, default=[0.0, 1.0])
    parser.add_argument("--batch", nargs="+", type=POSITIVE, default=[1, 2, 4, 8], help="that steps are timed at")
    parser.add_argument("--draws", type=POSITIVE, default=4, help="answers to each prompt at temperatures above 0")
    arguments = parser.parse_args(argv)
    if 1 not in arguments.batch:
        parser.error("--batch must have 1, at which is decoded")
    return real_model.run("plan", arguments, _measured)


def _measured(arguments: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    model, tokenizer, texts = real_model.load(arguments, arguments.prompts)
    pack_linear_weights(model)
    drafters = choices.make(arguments.drafter, model, tokenizer, corpus=True)
    singles = {name: [prompts.encode(tokenizer, [text]) for text in chosen] for name, chosen in texts.items()}
    together = {name: [prompts.encode(tokenizer, chosen)] for name, chosen in texts.items()}
    with tqdm(unit="run", mininterval=1.0, disable=None) as bar:
        for name in arguments.sets:
            bar.set_description(name)
            plan = planner.plan(
                model, together[name], drafters, temperatures=arguments.temperatures, lengths=arguments.lengths,
                batch_sizes=arguments.batch, max_new_tokens=arguments.max_new_tokens, rounds=arguments.rounds,
                draws=arguments.draws, clock=time.process_time, advance=bar.update,
            )  # fmt: skip
            costs += [{"prompts": name} | row for row in plan.to_dict()["costs"]]
            ways = {PLAIN: Way(sk.NoDrafter())}
            ways |= {
                (c.drafter, c.num_speculative_tokens): Way(drafters[c.drafter], c.num_speculative_tokens)
                for c in plan.choices
            }
            results = {
                temperature: end_to_end.measure(
                    model, singles[name], ways, sk.SamplingParams(temperature=temperature), sampled="token",
                    rounds=arguments.rounds, max_new_tokens=arguments.max_new_tokens, decode=by_process_time,
                    advance=bar.update,
                )
                for temperature in arguments.temperatures
            }  # fmt: skip
            rows += compare(name, plan, results)
    for row in rows:
        print(
            f"{row['prompts']:10} T={row['temperature']:g} {row['drafter']:9} K={row['num_speculative_tokens']} "
            f"predicted {row['gain']['mean']:.2f} simulated {row['simulated']['mean']:.2f} "
            f"measured {row['measured']['mean']:.2f} ({row['measured']['low']:.2f} to {row['measured']['high']:.2f})"
        )
    settings = real_model.settings(arguments) | {"clock": "processor time", "costs": costs}
    good = sum(row["within_tolerance"] for row in rows) / len(rows)
    what = f"share of the simulated gains within {TOLERANCE:.0%} of the measured"
    targets = [{"what": what, "target": 1.0, "measured": good, "reached": good == 1.0}]
    path = machine.save(arguments.output, "plan", rows, settings, targets)
    figure = plots.predicted_and_measured(rows)
    plots.save(figure, path.with_suffix(".png"), machine.command())
    print(f"{what}: {good:.0%}\nwritten: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    sys.exit(main())
