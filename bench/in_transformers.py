"""``python -m bench.in_transformers``: transformers' ``model.generate``: plain, with its own assistance, and through
this package, with a fixed draft length or one that is chosen at each step ("auto").

SmolLM2-135M-Instruct on the CPU with packed weights. All ways are calls of ``model.generate`` with the same arguments,
except for ``prompt_lookup_num_tokens`` and the block of `assisted_generation` around the call; they take turns on every
batch of prompts, in an order shuffled each time. A round gives each way's tokens a second, prefill included, and their
ratio to plain generation's in the same round, by the wall clock and by the process's own CPU time, which is more
reliable on a busy machine; results are medians over the rounds. transformers' own assisted generation takes one
sequence only. With ``--own-loop`` there are also calls of `sk.generate` on the model of ``examples/own_loop.py``:
plain, with the same lookup, with an n-gram model whose draft length is chosen ("auto"), and, given an ``--assistant``,
with trees drafted by it with its weights rounded to bfloat16.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import specdec_kernels as sk
from bench import machine, real_model, report
from examples.own_loop import LeanLlama
from specdec_kernels import assets
from specdec_kernels.assets import prompts
from specdec_kernels.decoding import Runner
from specdec_kernels.integrations.transformers import assisted_generation
from specdec_kernels.options import LENGTH, POSITIVE, existing

PLAIN, STOCK, OURS, AUTO = "plain", "transformers", "specdec_kernels", "specdec_kernels, auto"
STOCK_MODEL, OURS_MODEL = f"{STOCK}, assistant", f"{OURS}, assistant"
CLOCKS: dict[str, Callable[[], float]] = {"ratio": time.perf_counter, "ratio_cpu": time.process_time}
"""By what a row calls the ratio of rates that each gives."""
TREE = 6  # nodes that the draft model drafts
GOALS = {("code-edit", "greedy"): 2.5, ("quote", "greedy"): 2.5, ("humaneval", "T = 1"): 1.4}
"""Of the best drafter in the own loop, times its plain decoding, by prompts and sampling."""


@dataclass(frozen=True)
class Loop:
    """A call of `sk.generate`."""

    drafter: sk.Drafter
    num_speculative_tokens: int | str | None = None
    """None: as many as the other ways have."""
    acceptance: str = "match"


PLAIN_LOOP = "own loop, plain"
LOOPS = {PLAIN_LOOP: Loop(sk.NoDrafter()), "own loop": Loop(sk.NgramDrafter())}
SAMPLING = {
    "greedy": sk.SamplingParams(0.0),
    "T = 1": sk.SamplingParams(),
    "T = 0.8, top-k 50, top-p 0.9": sk.SamplingParams(0.8, top_k=50, top_p=0.9),
}


def arguments_of(sampling: sk.SamplingParams) -> dict[str, Any]:
    """The parameters as ``model.generate`` takes them."""
    if sampling.is_greedy:
        return {"do_sample": False}
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {"do_sample": True} | drawn


def block(way: str) -> AbstractContextManager[None]:
    """The context manager around a call of this way."""
    if way in (PLAIN, STOCK, STOCK_MODEL):
        return nullcontext()
    return assisted_generation(num_speculative_tokens="auto" if way == AUTO else None)


def measure(
    model: Any,
    batches: Sequence[Any],
    sampling: sk.SamplingParams,
    *,
    rounds: int,
    max_new_tokens: int,
    num_speculative_tokens: int,
    advance: Any,
    assistant: Any = None,
    runner: Runner | None = None,
    loops: Mapping[str, Loop] = LOOPS,
) -> dict[str, dict[str, Any]]:
    """For each way its tokens and seconds, by both clocks, one number per round, and how many batches of greedy answers
    differed from plain ones. With a draft model, `assistant`, some ways draft with it as well; with a `runner` of the
    same model there are also those of its own loop, `loops`.
    """
    alone = all(len(ids) == 1 for ids, _ in batches)
    ways = [PLAIN, OURS, AUTO, *[STOCK] * alone]
    if assistant is not None:
        ways += [OURS_MODEL, *[STOCK_MODEL] * alone]
    if runner is not None:
        ways += loops
    results: dict[str, dict[str, Any]] = {
        way: {"tokens": [0] * rounds, "differing": 0, **{clock: [0.0] * rounds for clock in CLOCKS}} for way in ways
    }
    lookup = {"prompt_lookup_num_tokens": num_speculative_tokens, "max_matching_ngram_size": 3}
    drafted = dict.fromkeys(ways, lookup) | {PLAIN: {}}
    drafted |= dict.fromkeys((OURS_MODEL, STOCK_MODEL), {"assistant_model": assistant})

    def answer(way: str, ids: Tensor, mask: Tensor, turn: int) -> Tensor:
        if way in loops:
            loop = loops[way]
            number = num_speculative_tokens if loop.num_speculative_tokens is None else loop.num_speculative_tokens
            return sk.generate(
                runner, ids, attention_mask=mask, drafter=loop.drafter, sampling=sampling, eos_token_id=(),
                max_new_tokens=max_new_tokens, num_speculative_tokens=number, acceptance=loop.acceptance,
                seeds=torch.arange(len(ids)) + 1000 * turn,
            ).sequences  # fmt: skip
        torch.manual_seed(turn)
        with block(way):
            found: Tensor = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, eos_token_id=None, pad_token_id=0,
                **arguments_of(sampling), **drafted[way],
            )  # fmt: skip
        return found

    order = random.Random(0)
    for turn in range(rounds):
        for ids, mask in batches:
            order.shuffle(ways)
            answers = {}
            for way in ways:
                began = {clock: now() for clock, now in CLOCKS.items()}
                answers[way] = answer(way, ids, mask, turn)
                for clock, now in CLOCKS.items():
                    results[way][clock][turn] += now() - began[clock]
                results[way]["tokens"][turn] += answers[way][:, ids.shape[1] :].numel()
                advance()
            for way in ways:
                differs = not torch.equal(answers[way], answers[PLAIN])
                results[way]["differing"] += differs and sampling.is_greedy
    return results


def rows_of(name: str, batch: int, sampling: str, results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every way except plain generation."""

    def ratios(way: str, clock: str) -> list[float]:
        rates = [[n / s for n, s in zip(results[w]["tokens"], results[w][clock], strict=True)] for w in (way, PLAIN)]
        return [rate / plain for rate, plain in zip(*rates, strict=True)]

    rows = []
    for way in sorted(results.keys() - {PLAIN}):
        row = {"prompts": name, "batch": batch, "sampling": sampling, "way": way}
        for clock in CLOCKS:
            found = ratios(way, clock)
            row |= {clock: statistics.median(found), f"{clock}_min": min(found), f"{clock}_max": max(found)}
        rows.append(row | {"batches_differing": results[way]["differing"]})
    return rows


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`GOALS`, for one sequence at a time, and what was measured of them."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["batch"] == 1 and row["way"].startswith("own loop"):
            found.setdefault((row["prompts"], row["sampling"]), {})[row["way"]] = row["ratio"]
    return [
        report.at_least(f"{prompts}, {sampling}: own loop, best drafter", goal, max(ways.values()) / ways[PLAIN_LOOP])
        for (prompts, sampling), goal in GOALS.items() if (ways := found.get((prompts, sampling)))
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write ``in_transformers.json`` into the machine's results folder."""
    parser = real_model.parser(
        "in_transformers", "model.generate of transformers, with and without.", sets=["code-edit", "humaneval"],
        prompts=2, prompts_help="batches of each set, from its end (default 2)", max_new_tokens=48, rounds=3,
    )  # fmt: skip
    parser.add_argument("--assistant", type=existing, help="folder of a draft model, to draft with as well")
    parser.add_argument("--own-loop", action="store_true", help="and the model of examples/own_loop.py with generate")
    parser.add_argument("--name", default="in_transformers", help="of the result file (default in_transformers)")
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING))
    parser.add_argument("--batch", nargs="+", type=POSITIVE, default=[1, 8], help="prompts decoded together")
    parser.add_argument("--num-speculative-tokens", type=LENGTH, default=7)
    return real_model.run("in_transformers", parser.parse_args(argv), _measured)


def _measured(arguments: argparse.Namespace) -> None:
    model, tokenizer, texts = real_model.load(arguments)
    assistant = None
    if arguments.assistant is not None:
        assistant, _ = assets.load_folder(arguments.assistant)
        assistant.generation_config.num_assistant_tokens = arguments.num_speculative_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        sk.pack_linear_weights(assistant)
    runner = LeanLlama(model) if arguments.own_loop else None
    loops = LOOPS
    if arguments.own_loop:
        made = real_model.drafters_of(["ngram-lm"], model, tokenizer, None)
        loops = loops | {"own loop, n-gram model": Loop(made["ngram-lm"], "auto")}
    if arguments.own_loop and arguments.assistant is not None:
        draft = real_model.draft_in_own_loop(assets.load_folder(arguments.assistant)[0].bfloat16())
        tree = sk.ModelTreeDrafter(draft.draft_model, TREE, token_map=draft.token_map)
        loops = loops | {"own loop, tree": Loop(tree, tree.max_depth, "token")}
    rows: list[dict[str, Any]] = []
    with sk.pack_linear_weights(model), tqdm(unit="answer", mininterval=1.0, disable=None) as bar:
        model.generate(*prompts.encode(tokenizer, texts[arguments.sets[0]][:1])[:1], max_new_tokens=4)
        for name, found in texts.items():
            for batch in arguments.batch:
                chosen = (found * (arguments.prompts * batch))[-arguments.prompts * batch :]
                batches = [prompts.encode(tokenizer, chosen[i : i + batch]) for i in range(0, len(chosen), batch)]
                for sampling in arguments.sampling:
                    bar.set_description(f"{name}, batch {batch}, {sampling}")
                    results = measure(
                        model, batches, SAMPLING[sampling], rounds=arguments.rounds, advance=bar.update,
                        max_new_tokens=arguments.max_new_tokens,
                        num_speculative_tokens=arguments.num_speculative_tokens, assistant=assistant, runner=runner,
                        loops=loops,
                    )  # fmt: skip
                    fresh = rows_of(name, batch, sampling, results)
                    rows += fresh
                    with tqdm.external_write_mode():
                        for row in fresh:
                            print(
                                f"{name:10} batch {batch} {sampling:30}{row['way']:22}"
                                + ", ".join(
                                    f"{row[clock]:.2f}x ({row[f'{clock}_min']:.2f} to {row[f'{clock}_max']:.2f})"
                                    for clock in CLOCKS
                                )
                                + (f", {row['batches_differing']} batches differ" if row["batches_differing"] else ""),
                                flush=True,
                            )
    path = machine.save(arguments.output, arguments.name, rows, real_model.settings(arguments), targets(rows))
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
