"""``python -m bench.end_to_end``: tokens a second of a real model with and without speculation.

SmolLM2-135M-Instruct on the CPU, prompt sets of `specdec_kernels.assets.prompts`, temperatures 0 and 1. Every
configuration, plain decoding included, goes through `generate` with the same packed weights and seeds; with
``--own-loop`` the model runs in the loop of ``examples/own_loop.py`` instead of transformers'. In every round all
configurations run on a prompt before the next prompt comes, in an order shuffled each time, or with ``--in-turns`` side
by side, a step at a time, so that other work on the machine slows all of them alike. A round gives one ratio of tokens
a second (prefill not counted) to plain decoding. The result is the median over the rounds, with its 95 % confidence
interval (of order statistics; with fewer than six rounds, just the smallest and largest). "auto" goes on with what the
calls before have learned of costs; with ``--first-calls`` each call begins anew. At temperature 1 the rounds have
different seeds. With acceptance "match" (temperature 0 included, as "greedy") the outputs must be those of plain
decoding.

``--drafter medusa`` decodes with the shipped Medusa heads: each head's best token alone, and their calibrated trees; at
temperatures above 0 also with typical acceptance, whose outputs have another distribution. ``--drafter lookup-tree``
drafts several continuations of the text's own n-grams. The numbers beside their names count tree nodes, the root
included. ``--trees`` compares calibrated trees with random ones of equal size.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from tqdm import tqdm

import specdec_kernels as sk
from bench import machine, real_model
from bench.turns import Call, InTurns, Timed, one_by_one
from examples.own_loop import LeanLlama
from specdec_kernels import GenerationOutput, assets, generate, pack_linear_weights
from specdec_kernels.assets import prompts
from specdec_kernels.drafters import (
    Drafter,
    MedusaDrafter,
    ModelDrafter,
    NgramTreeDrafter,
    NoDrafter,
    TreeDrafter,
)
from specdec_kernels.medusa import SHIPPED_HEADS, MedusaHeads
from specdec_kernels.options import POSITIVE, SEED, SHARE, TEMPERATURE, draft_length, existing

SETS = ("code-edit", "quote", "humaneval", "summarise", "chat")
DRAFT_LENGTHS: tuple[int | str, ...] = (3, 7, "auto")
TREE_NODES = (8, 16, 32, 64)
DRAFTERS = ("lookup", "ngram-lm", "lookup-tree", "medusa", "model")

Key = tuple[str, "int | str"]
"""A drafter's name, and its draft length or tree's nodes."""
PLAIN: Key = ("none", 0)


@dataclass(frozen=True)
class Way:
    """One way of decoding."""

    drafter: Drafter
    num_speculative_tokens: int | str = 0
    """Of drafters of trees any number > 0, or "auto"."""
    typical: bool = False
    """Accept typically, not losslessly."""
    model: Any = None
    """Of its own, where ways are not run one after the other."""


def ways_of(
    names: Sequence[str], model: Any, tokenizer: Any, heads_path: Path, seed: int | None = None,
    lengths: Sequence[int | str] = DRAFT_LENGTHS, draft_model: Path | None = None, min_confidence: float | None = None,
) -> dict[Key, Way]:  # fmt: skip
    """All ways of decoding with the drafters of these names; with a `seed`, random trees beside the calibrated ones. A
    draft model runs in the loop of ``examples/own_loop.py``; with `min_confidence`, a second one that stops by it is
    added.

    Raises
    ------
    ValueError, FileNotFoundError
        Heads that do not exist or do not belong to the model.
    """
    ways: dict[Key, Way] = {PLAIN: Way(NoDrafter())}
    for name in names:
        if name == "medusa":
            heads = MedusaHeads.load(heads_path, model)
            if heads.accuracy is None:
                raise ValueError(f"{heads_path} must be calibrated (specdec medusa calibrate)")
            pack_linear_weights(heads)
            if seed is None:
                alone = MedusaDrafter(heads, sk.DraftTree.cartesian([1] * heads.num_heads))
                ways |= _of_trees("medusa, heads alone", alone, lengths)
            for nodes in TREE_NODES:
                medusa = MedusaDrafter(heads, sk.DraftTree.calibrated(heads.accuracy, nodes))
                ways |= _of_trees(name, medusa, lengths if seed is None else ())
                if seed is None:
                    ways["medusa, typical", nodes] = Way(medusa, medusa.max_depth, typical=True)
                else:
                    tree = random_tree(heads.num_heads, heads.accuracy.shape[1], nodes, seed)
                    ways["medusa, random tree", nodes] = Way(MedusaDrafter(heads, tree), tree.max_depth)
        elif name == "lookup-tree":
            for nodes in TREE_NODES[:2]:
                ways |= _of_trees(name, NgramTreeDrafter(num_nodes=nodes), lengths)
        else:
            (drafter,) = real_model.drafters_of([name], model, tokenizer, draft_model, real_model.ReadOnce).values()
            ways |= {(name, length): Way(drafter, length) for length in lengths}
            if isinstance(drafter, ModelDrafter) and min_confidence is not None:
                sure = copy.copy(drafter)
                sure.min_confidence = min_confidence
                ways |= {(f"model, {min_confidence:g}", length): Way(sure, length) for length in lengths}
    return ways


def _of_trees(name: str, drafter: TreeDrafter, lengths: Sequence[int | str]) -> dict[Key, Way]:
    """The tree at every step; the smaller ones, if "auto" is among the lengths, also only when it pays."""
    ways: dict[Key, Way] = {(name, drafter.num_nodes): Way(drafter, drafter.max_depth)}
    if "auto" in lengths and drafter.num_nodes in TREE_NODES[:2]:
        ways[name, f"auto, {drafter.num_nodes}"] = Way(drafter, "auto")
    return ways


def random_tree(num_heads: int, ranks: int, nodes: int, seed: int) -> sk.DraftTree:
    """A tree grown like a calibrated one, but at random: any node that may come next is as likely as any other."""
    random_choice = random.Random(seed)
    chosen: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [(0,)]
    while waiting and len(chosen) < nodes - 1:
        choice = waiting.pop(random_choice.randrange(len(waiting)))
        chosen.append(choice)
        if len(choice) < num_heads:
            waiting.append((*choice, 0))
        if choice[-1] + 1 < ranks:
            waiting.append((*choice[:-1], choice[-1] + 1))
    return sk.DraftTree.from_choices(chosen)


def by_itself(way: Way, target: LeanLlama) -> Way:
    """The same way with a drafter of its own, and models of its own that share the weights."""
    drafter = copy.copy(way.drafter)
    if isinstance(drafter, ModelDrafter):
        drafter.draft_model = drafter.runner = _beside(drafter.draft_model)
    return replace(way, drafter=drafter, model=_beside(target))


def _beside(model: LeanLlama) -> LeanLlama:
    """The same weights with a cache of its own."""
    other = copy.copy(model)
    other.layers = [copy.copy(layer) for layer in model.layers]
    return other


def first_call(model: LeanLlama, *given: Any, **options: Any) -> GenerationOutput:
    """`generate`, with a model whose costs no call has learned."""
    return generate(_beside(model), *given, **options)


@dataclass
class Result:
    """What one configuration did on one prompt set at one temperature: one number per round."""

    tokens: list[int] = field(default_factory=list)
    timed_tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    differing: int = 0
    """Batches whose answers are not all plain decoding's, over all rounds; not counted where they need not be."""

    def begin_round(self) -> None:
        self.tokens.append(0)
        self.timed_tokens.append(0)
        self.steps.append(0)
        self.seconds.append(0.0)

    def add(self, timed: Timed, plain: Timed | None) -> None:
        output = timed.output
        self.tokens[-1] += output.stats.num_tokens
        self.timed_tokens[-1] += output.stats.num_tokens_decode
        self.steps[-1] += output.stats.num_steps
        self.seconds[-1] += timed.seconds
        self.differing += plain is not None and not torch.equal(output.tokens, plain.output.tokens)

    def rates(self) -> list[float]:
        return [n / s for n, s in zip(self.timed_tokens, self.seconds, strict=True)]


def measure(
    model: Any,
    batches: Sequence[Any],
    ways: dict[Key, Way],
    sampling: sk.SamplingParams,
    *,
    rounds: int,
    max_new_tokens: int,
    advance: Any,
    sampled: str = "match",
    decode: Callable[..., GenerationOutput] = generate,
    run: Callable[[Sequence[Call]], list[Timed]] = one_by_one,
    one_batch: bool = False,
) -> dict[Key, Result]:
    """Run all ways of decoding, `PLAIN` among them, `rounds` times on all batches; with `one_batch`, each round runs on
    the next batch alone.

    `sampled` is the acceptance rule at temperatures above 0; only with "match" must its outputs equal plain decoding's.
    `decode` is called like `generate`, and `run` makes the calls of one batch.
    """
    configurations = [key for key, way in ways.items() if not (way.typical and sampling.is_greedy)]
    results = {key: Result() for key in configurations}
    order = random.Random(0)
    for turn in range(rounds):
        for result in results.values():
            result.begin_round()
        for ids, mask in [batches[turn % len(batches)]] if one_batch else batches:
            order.shuffle(configurations)
            calls = []
            for key in configurations:
                way = ways[key]
                lossless = "greedy" if sampling.is_greedy else sampled
                call = partial(
                    decode,
                    model if way.model is None else way.model,
                    ids,
                    attention_mask=mask,
                    drafter=way.drafter,
                    sampling=sampling,
                    seeds=torch.arange(len(ids)) + 1000 * turn,
                    max_new_tokens=max_new_tokens,
                    num_speculative_tokens=way.num_speculative_tokens,
                    acceptance="typical" if way.typical else lossless,
                )
                calls.append(call)
            outputs = dict(zip(configurations, run(calls), strict=True))
            for key, output in outputs.items():
                advance()
                identical = not ways[key].typical and (sampling.is_greedy or sampled == "match")
                results[key].add(output, outputs[PLAIN] if identical else None)
    return results


def rows_of(name: str, temperature: float, results: dict[Key, Result]) -> list[dict[str, Any]]:
    """One row for every configuration, with medians and the spread over the rounds."""
    plain = results[PLAIN].rates()
    rows = []
    for (drafter, length), result in results.items():
        ratios = [rate / base for rate, base in zip(result.rates(), plain, strict=True)]
        low, high = stats.quantile_test(ratios).confidence_interval(0.95)
        rows.append(
            {
                "prompts": name,
                "temperature": temperature,
                "drafter": drafter,
                "num_speculative_tokens": length,
                "rates": [round(rate, 3) for rate in result.rates()],
                "tokens_per_second": statistics.median(result.rates()),
                "mean_acceptance_length": sum(result.tokens) / sum(result.steps),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "ratio_low": low if low == low else min(ratios),
                "ratio_high": high if high == high else max(ratios),
                "batches_differing": result.differing,
            }
        )
    return rows


def targets_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's goals, each for one configuration named beforehand: picking the best of several would flatter."""

    def ratio(name: str, temperature: float, drafter: str, length: int) -> float:
        wanted = (name, temperature, drafter, length)
        keys = ("prompts", "temperature", "drafter", "num_speculative_tokens")
        return next((row["ratio"] for row in rows if tuple(row[key] for key in keys) == wanted), float("nan"))

    goals = [
        (f"{name}, greedy, lookup, K = 7: ratio to plain", 2.0, ratio(name, 0.0, "lookup", 7))
        for name in ("code-edit", "quote")
    ]
    goals.append(
        ("humaneval, temperature 1, ngram-lm, K = 3: ratio to plain", 1.3, ratio("humaneval", 1.0, "ngram-lm", 3))
    )
    auto = [row for row in rows if str(row["num_speculative_tokens"]).startswith("auto")]
    goals.append(
        ("auto, any set: smallest ratio to plain", 0.97, min((r["ratio"] for r in auto), default=float("nan")))
    )
    shares = []
    for row in auto:
        nodes = row["num_speculative_tokens"].partition(", ")[2]  # of the tree that "auto" drafts or not
        same = [r for r in rows if all(r[key] == row[key] for key in ("prompts", "temperature", "drafter"))]
        numbers = [r for r in same if isinstance(r["num_speculative_tokens"], int)]
        fixed = [r for r in numbers if nodes in ("", str(r["num_speculative_tokens"]))]
        best = max(fixed, key=lambda r: r["ratio"], default=row)
        if best["ratio"] > 1 and best is not row:
            shares.append(statistics.median(a / b for a, b in zip(row["rates"], best["rates"], strict=True)))
    what = "auto, where drafts pay: smallest share of the best fixed K, round by round"
    goals.append((what, 0.95, min(shares, default=float("nan"))))
    measured = [
        {"what": what, "target": goal, "measured": value, "reached": value >= goal}
        for what, goal, value in goals
        if value == value
    ]
    differing = sum(row["batches_differing"] for row in rows)
    measured.append(
        {"what": "batches unlike plain decoding's", "target": 0, "measured": differing, "reached": not differing}
    )
    return measured


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print one table of rows."""
    for row in rows:
        print(
            f"{row['prompts']:10} T={row['temperature']:g} {row['drafter']:8} K={row['num_speculative_tokens']!s:5}"
            f"{row['tokens_per_second']:7.1f} tokens/s, {row['mean_acceptance_length']:.2f} a step, "
            f"{row['ratio']:.2f}x ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
            + (f", {row['batches_differing']} batches differ" if row["batches_differing"] else ""),
            flush=True,
        )


def plot(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of the ratio to plain decoding: prompt sets along the axis, one panel per temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({row["temperature"] for row in rows})
    names = list(dict.fromkeys(row["prompts"] for row in rows))
    kinds = list(dict.fromkeys((r["drafter"], r["num_speculative_tokens"]) for r in rows if r["drafter"] != "none"))
    figure, panels = pyplot.subplots(
        len(temperatures), 1, figsize=(10, 3.6 * len(temperatures) + 0.8), squeeze=False, layout="constrained"
    )
    width = 0.8 / len(kinds)
    for temperature, panel in zip(temperatures, panels[:, 0], strict=True):
        for i, kind in enumerate(kinds):
            chosen = [
                r
                for name in names
                for r in rows
                if (r["prompts"], r["temperature"]) == (name, temperature)
                and (r["drafter"], r["num_speculative_tokens"]) == kind
            ]
            if not chosen:  # typical acceptance, greedy
                continue
            ratios = [r["ratio"] for r in chosen]
            spread = [[r["ratio"] - r["ratio_low"] for r in chosen], [r["ratio_high"] - r["ratio"] for r in chosen]]
            places = [x + (i - (len(kinds) - 1) / 2) * width for x in range(len(names))]
            panel.bar(places, ratios, width, yerr=spread, error_kw={"linewidth": 0.8}, label=f"{kind[0]}, {kind[1]}")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(names)), names)
        panel.set_ylabel("tokens/s over plain decoding")
        panel.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
    # The panel with the highest temperature has every way of decoding.
    handles, labels = panels[-1, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="drafter, draft length or nodes of the tree", ncols=5, fontsize="small",
        loc="outside lower center",
    )  # fmt: skip
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_trees(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Lines over the number of nodes: tokens a step on the left, ratio to plain decoding on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    quantities = {"mean_acceptance_length": "tokens a step", "ratio": "tokens/s over plain decoding"}
    cases = dict.fromkeys((r["prompts"], r["temperature"]) for r in rows)
    for panel, (quantity, label) in zip(panels, quantities.items(), strict=True):
        for i, (name, temperature) in enumerate(cases):
            for drafter, style in (("medusa", "-o"), ("medusa, random tree", "--x")):
                wanted = (name, temperature, drafter)
                line = [r for r in rows if (r["prompts"], r["temperature"], r["drafter"]) == wanted]
                line = [r for r in line if isinstance(r["num_speculative_tokens"], int)]  # not what "auto" chose
                kind = "random" if "random" in drafter else "calibrated"
                panel.plot(
                    [r["num_speculative_tokens"] for r in line], [r[quantity] for r in line], style, color=f"C{i}",
                    label=f"{name}, T = {temperature:g}, {kind}",
                )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_xticks(TREE_NODES, TREE_NODES)
        panel.set_xlabel("nodes of the tree, root included")
        panel.set_ylabel(label)
    panels[0].legend(fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its rows and a figure, ``end_to_end.*``, into the machine's results folder."""
    parser = real_model.parser(
        "end_to_end", "Real decoding, plain and speculative.", sets=SETS, prompts=4,
        prompts_help="so many, the last of each set (default 4)", max_new_tokens=96, rounds=3,
    )  # fmt: skip
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=["lookup", "ngram-lm"])
    parser.add_argument("--heads", type=existing, default=SHIPPED_HEADS, help="Medusa's (default: those shipped)")
    parser.add_argument(
        "--trees", type=SEED, metavar="SEED", help="Medusa's calibrated trees against random ones of this seed"
    )
    parser.add_argument("--name", default="end_to_end", help="of the result files (default end_to_end)")
    parser.add_argument("--temperatures", nargs="+", type=TEMPERATURE, default=[0.0, 1.0])
    parser.add_argument("--batch", type=POSITIVE, default=1, help="prompts decoded together (default 1)")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=draft_length,
        default=DRAFT_LENGTHS,
        help="of lookup, ngram-lm and a draft model",
    )
    parser.add_argument("--draft-model", type=existing, metavar="FOLDER", help="of the drafter model; needs --own-loop")
    parser.add_argument(
        "--min-confidence", type=SHARE, metavar="P", help="a draft model that stops after a token less sure, as well"
    )
    parser.add_argument("--own-loop", action="store_true", help="the model of examples/own_loop.py, not transformers'")
    parser.add_argument("--in-turns", action="store_true", help="step by step side by side; needs --own-loop")
    parser.add_argument("--first-calls", action="store_true", help="no call knows of others' costs; needs --own-loop")
    parser.add_argument(
        "--one-batch", action="store_true", help="each round decodes the next batch of the prompts, not all of them"
    )
    arguments = parser.parse_args(argv)
    for option in ("in_turns", "first_calls"):
        if getattr(arguments, option) and not arguments.own_loop:
            parser.error(f"--{option.replace('_', '-')} needs --own-loop")
    if "model" in arguments.drafter and (arguments.draft_model is None or not arguments.own_loop):
        parser.error("--drafter model needs --draft-model and --own-loop")
    for given, option, drafter in (
        (arguments.draft_model is not None, "--draft-model", "model"),
        (arguments.min_confidence is not None, "--min-confidence", "model"),
        (arguments.heads != SHIPPED_HEADS, "--heads", "medusa"),
        (arguments.trees is not None, "--trees", "medusa"),
    ):
        if given and drafter not in arguments.drafter:
            parser.error(f"{option} must be given with --drafter {drafter}, got {' '.join(arguments.drafter)}")
    return real_model.run("end_to_end", arguments, _measured)


def _measured(arguments: argparse.Namespace) -> None:
    # The last prompts: the n-gram model's constants were chosen on the first ones of HumanEval.
    model, tokenizer, texts = real_model.load(arguments, arguments.prompts)
    batch = arguments.batch
    least = min(texts, key=lambda name: len(texts[name]))
    if arguments.one_batch and len(texts[least]) < (needed := arguments.rounds * batch):
        raise ValueError(
            f"--one-batch: each set must have --rounds × --batch = {needed} prompts, "
            f"got {len(texts[least])} of {least} (--prompts {arguments.prompts})"
        )
    ways = ways_of(
        arguments.drafter, model, tokenizer, arguments.heads, arguments.trees, arguments.lengths,
        arguments.draft_model, arguments.min_confidence,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    greedy_ways = sum(not way.typical for way in ways.values())
    runs = sum(len(ways) if temperature else greedy_ways for temperature in arguments.temperatures)
    runs *= arguments.rounds * len(texts) * (1 if arguments.one_batch else -(-arguments.prompts // batch))
    target = real_model.ReadOnce(model, arguments.rounds) if arguments.own_loop else model
    run: Callable[[Sequence[Call]], list[Timed]] = one_by_one
    with ExitStack() as stack:
        if arguments.in_turns:
            ways = {key: by_itself(way, target) for key, way in ways.items()}
            run = stack.enter_context(InTurns(len(ways)))
        stack.enter_context(pack_linear_weights(model))
        bar = stack.enter_context(tqdm(total=runs, unit="answer", mininterval=1.0, disable=None))
        warm_up = prompts.encode(tokenizer, next(iter(texts.values()))[:batch])
        generate(target, *warm_up[:1], attention_mask=warm_up[1], drafter=NoDrafter(), max_new_tokens=8)
        for name, chosen in texts.items():
            parts = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]
            if arguments.one_batch:
                parts = parts[: arguments.rounds]
            batches = [prompts.encode(tokenizer, part) for part in parts]
            for temperature in arguments.temperatures:
                bar.set_description(f"{name}, temperature {temperature:g}")
                results = measure(
                    target,
                    batches,
                    ways,
                    sk.SamplingParams(temperature=temperature),
                    rounds=arguments.rounds,
                    max_new_tokens=arguments.max_new_tokens,
                    advance=bar.update,
                    decode=first_call if arguments.first_calls else generate,
                    run=run,
                    one_batch=arguments.one_batch,
                )
                fresh = rows_of(name, temperature, results)
                rows += fresh
                with tqdm.external_write_mode():
                    print_rows(fresh)
    goals = targets_of(rows)
    for goal in goals:
        verdict = "ok" if goal["reached"] else "MISSED"
        print(f"{goal['what']}: {goal['measured']:.2f} (target {goal['target']}) {verdict}")
    path = machine.save(arguments.output, arguments.name, rows, real_model.settings(arguments), goals)
    title = f"{assets.MODEL_NAME}, {machine.cpu_model()}, {arguments.threads} threads, batch {batch}"
    draw = plot if arguments.trees is None else plot_trees
    draw(rows, path.with_suffix(".png"), title)
    print(f"written: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    sys.exit(main())
