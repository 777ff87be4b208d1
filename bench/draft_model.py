"""``python -m bench.draft_model FOLDER``: a draft model that shares a target's tokenizer, end to end.

The target is SmolLM2-135M-Instruct, the draft a transformers folder as ``specdec medusa draft FOLDER`` trains it. For
each prompt set, temperature, rule and number of draft tokens γ it measures: tokens a second over plain decoding's, by
`bench.end_to_end`'s alternating rounds; and, from one more decoding, watched, the acceptance α of a draft token, c (the
time to draft one over that of a plain step), and the time of each part of a step. The peak of resident memory comes
from two separate processes, which decode one prompt plainly and with the draft. With ``--own-loop`` both models run in
the loop of ``examples/own_loop.py``, and no peak is taken; ``--draft-bfloat16`` rounds the draft's weights, which costs
acceptance, not exactness; ``--trees`` makes the same draft guess trees of so many nodes as well.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import specdec_kernels as sk
from bench import end_to_end, machine, real_model, timing
from bench.end_to_end import PLAIN, Way
from examples.own_loop import LeanLlama
from specdec_kernels import assets, pack_linear_weights
from specdec_kernels.analysis import measured
from specdec_kernels.assets import prompts
from specdec_kernels.options import COUNT, LENGTH, TEMPERATURE, existing, integer

RULES = ("token", "block")


def watched(model: Any, batches: Sequence[Any], drafter: sk.Drafter, **options: Any) -> dict[str, Any]:
    """Acceptance by position, and seconds of each part of a step, from one decoding of each batch."""
    seen = [
        measured.watch(model, ids, attention_mask=mask, drafter=drafter, seeds=torch.arange(len(ids)), **options)
        for ids, mask in batches
    ]
    parts = np.concatenate([one.seconds[one.rows == one.rows.max()] for one in seen])  # steps with a whole draft
    drafting, forward, rest = np.median(parts, axis=0)
    acceptance = measured.Acceptance.of(seen)
    return {
        "alpha": acceptance.alpha.mean,
        "alpha_low": acceptance.alpha.low,
        "alpha_high": acceptance.alpha.high,
        "drafting_us": drafting * 1e6,
        "forward_us": forward * 1e6,
        "rest_us": rest * 1e6,
    }


def models(arguments: argparse.Namespace, model: Any) -> tuple[Any, sk.ModelDrafter, int]:
    """What `generate` takes as the target, the drafter, and the draft's number of parameters."""
    draft, _ = assets.load_folder(arguments.folder)
    size = sum(p.numel() for p in draft.parameters())
    if arguments.draft_bfloat16:
        draft = draft.bfloat16()
    if not arguments.own_loop:
        for each in (model, draft):
            pack_linear_weights(each)
        return model, sk.ModelDrafter(draft), size
    return LeanLlama(model), real_model.draft_in_own_loop(draft), size


def peak_bytes(folder: Path, gamma: int) -> int:
    """The most memory that a separate process holds while it decodes a prompt with γ draft tokens (0: plainly).

    Raises
    ------
    OSError
        It failed; the message is the last line that it printed.
    """
    command = [sys.executable, "-m", "bench.draft_model", str(folder), "--only-memory", str(gamma)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise OSError(f"the process that measures memory ended with exit code {done.returncode}: {said[-1]}")
    return int(done.stdout.split()[-1])


def _print_peak(arguments: argparse.Namespace) -> None:
    model, tokenizer = assets.load_model()
    gamma = arguments.only_memory
    drafter: sk.Drafter = sk.NoDrafter()
    if gamma:
        drafter = sk.ModelDrafter(assets.load_folder(arguments.folder)[0])
    ids, mask = prompts.encode(tokenizer, prompts.load_prompts("humaneval", tokenizer)[-1:])
    sk.generate(
        model, ids, attention_mask=mask, drafter=drafter, max_new_tokens=64, num_speculative_tokens=max(gamma, 1)
    )
    print(timing.resident_peak())


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and write ``draft_model.json`` into the machine's results folder."""
    parser = real_model.parser(
        "draft_model", "A draft model, end to end.", sets=["humaneval", "code-edit", "chat"], prompts=4,
        prompts_help="so many, the last of each set (default 4)", max_new_tokens=96, rounds=3,
    )  # fmt: skip
    parser.add_argument("folder", type=existing, help="of the draft model")
    parser.add_argument("--lengths", nargs="+", type=LENGTH, default=[3, 5, 7, 14], help="γ (default 3 5 7 14)")
    parser.add_argument(
        "--trees", nargs="+", type=integer(2, 1024), default=[], help="nodes of trees (default: no trees)"
    )
    parser.add_argument("--temperatures", nargs="+", type=TEMPERATURE, default=[0.0, 1.0])
    parser.add_argument("--own-loop", action="store_true", help="the models of examples/own_loop.py, not transformers'")
    parser.add_argument("--draft-bfloat16", action="store_true", help="round the draft's weights")
    parser.add_argument("--name", default="draft_model", help="of the result file (default draft_model)")
    parser.add_argument("--only-memory", type=COUNT, metavar="γ", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    return real_model.run("draft_model", arguments, _measured if arguments.only_memory is None else _print_peak)


def _measured(arguments: argparse.Namespace) -> None:
    model, tokenizer, texts = real_model.load(arguments, arguments.prompts)
    target, drafter, draft_parameters = models(arguments, model)
    ways = {PLAIN: Way(sk.NoDrafter())} | {("model", gamma): Way(drafter, gamma) for gamma in arguments.lengths}
    for nodes in arguments.trees:
        tree = sk.ModelTreeDrafter(drafter.draft_model, nodes, token_map=drafter.token_map)
        ways["model-tree", nodes] = Way(tree, tree.max_depth)
    rows: list[dict[str, Any]] = []
    with tqdm(unit="answer", mininterval=1.0, disable=None) as bar:
        for name, chosen in texts.items():
            batches = [prompts.encode(tokenizer, [text]) for text in chosen]
            for temperature in arguments.temperatures:
                sampling = sk.SamplingParams(temperature=temperature)
                plain = watched(
                    target, batches, sk.NoDrafter(), sampling=sampling, num_speculative_tokens=1, acceptances=False,
                    max_new_tokens=arguments.max_new_tokens,
                )  # fmt: skip
                step_us = plain["forward_us"] + plain["rest_us"]
                for rule in RULES if temperature else ("greedy",):
                    bar.set_description(f"{name}, temperature {temperature:g}, {rule}")
                    results = end_to_end.measure(
                        target, batches, ways, sampling, rounds=arguments.rounds, sampled=rule, advance=bar.update,
                        max_new_tokens=arguments.max_new_tokens,
                    )  # fmt: skip
                    for row in end_to_end.rows_of(name, temperature, results):
                        gamma = row["num_speculative_tokens"]
                        row |= {"rule": rule, "plain_step_us": step_us}
                        key = row["drafter"], gamma
                        if key != PLAIN:
                            row |= watched(
                                target, batches, ways[key].drafter, sampling=sampling, acceptance=rule,
                                num_speculative_tokens=ways[key].num_speculative_tokens,  # a tree's key has its nodes
                                max_new_tokens=arguments.max_new_tokens,
                            )  # fmt: skip
                            if row["drafter"] == "model":
                                row["c"] = row["drafting_us"] / gamma / step_us
                            with tqdm.external_write_mode():
                                print(line(row), flush=True)
                        rows.append(row)
    memory: dict[int, int] = {}
    settings = real_model.settings(arguments) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "draft parameters": draft_parameters,
        "draft ids": drafter.runner.vocab_size,
        "peak_bytes": memory,
    }
    machine.save(arguments.output, arguments.name, rows, settings)  # in case a process below fails
    for gamma in () if arguments.own_loop else (0, max(arguments.lengths)):
        memory[gamma] = peak_bytes(arguments.folder, gamma)
        print(f"peak memory, γ = {gamma}: {memory[gamma] / 2**20:.0f} MB")
    print(f"written: {machine.save(arguments.output, arguments.name, rows, settings)}")


def line(row: dict[str, Any]) -> str:
    """A row as a line to read."""
    chain = row["drafter"] == "model"
    drafted = f"α {row['alpha']:.2f}  c {row['c']:.3f}" if chain else "(a tree's nodes)"
    return (
        f"{row['prompts']:10} T={row['temperature']:g} {row['rule']:6} γ={row['num_speculative_tokens']:<3}"
        f"{drafted:16}  {row['mean_acceptance_length']:.2f} tokens a step  "
        f"{row['ratio']:.2f}x ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})  ms a step: drafting "
        f"{row['drafting_us'] / 1e3:.1f}, forward {row['forward_us'] / 1e3:.1f}, rest {row['rest_us'] / 1e3:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
