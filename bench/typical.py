"""``python -m bench.typical``: what Medusa's typical acceptance accepts and emits, by its threshold ε.

SmolLM2-135M-Instruct with the shipped heads and their calibrated tree of 16 nodes, δ = √ε as in the defaults. For each
prompt set and temperature, averaged over the prompts and with standard errors: tokens a step, and the log-probability
of an emitted token under the target at temperature 1, in nats. Lossless decoding with the same tree, and plain
decoding, are listed beside it (with ε null). A log-probability above theirs means likelier text than the target's
distribution gives: less varied, not better. Nothing here is a time, so a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

import specdec_kernels as sk
from bench import machine, real_model
from specdec_kernels.analysis import plots
from specdec_kernels.assets import prompts
from specdec_kernels.medusa import SHIPPED_HEADS, MedusaHeads
from specdec_kernels.options import TEMPERATURE

EPSILONS = (0.01, 0.03, 0.05, 0.09, 0.15, 0.2, 0.25)


PLAIN, LOSSLESS, TYPICAL = "plain", "lossless", "typical"


def ways(drafter: sk.Drafter) -> list[tuple[str, float | None, dict[str, Any]]]:
    """Each way of decoding: its name, ε, and arguments of `generate`."""
    typical = [
        (TYPICAL, epsilon, {"drafter": drafter, "acceptance": "typical", "epsilon": epsilon, "delta": epsilon**0.5})
        for epsilon in EPSILONS
    ]
    return [(PLAIN, None, {"drafter": sk.NoDrafter()}), (LOSSLESS, None, {"drafter": drafter}), *typical]


def measure(model: Any, batches: Sequence[Any], drafter: sk.Drafter, advance: Any, **how: Any) -> list[dict[str, Any]]:
    """One row for each way; `how` holds arguments of `generate` that all share. Each batch is one prompt."""
    rows = []
    for name, epsilon, way in ways(drafter):
        lengths, nats = [], []
        for i, (ids, mask) in enumerate(batches):
            out = sk.generate(
                model, ids, attention_mask=mask, seeds=torch.tensor([i]), return_logprobs=0, **way, **how
            )  # fmt: skip
            assert out.logprobs is not None
            lengths.append(out.stats.mean_acceptance_length)
            nats.append(out.logprobs.raw_log_prob.double().mean().item())
            advance()
        rows.append({"way": name, "epsilon": epsilon, **mean("tokens_per_step", lengths), **mean("log_prob", nats)})
    return rows


def mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of one value per prompt, and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {name: statistics.fmean(values), f"{name}_error": error}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and write ``typical.json`` and ``typical.png`` into the machine's results folder."""
    parser = real_model.parser(
        "typical", "Typical acceptance over its threshold.", sets=["humaneval", "chat", "code-edit"], prompts=8,
        prompts_help="so many, the last of each set (default 8)", max_new_tokens=96,
    )  # fmt: skip
    parser.add_argument("--temperature", type=TEMPERATURE, default=0.7)
    return real_model.run("typical", parser.parse_args(argv), _measured)


def _measured(arguments: argparse.Namespace) -> None:
    model, tokenizer, texts = real_model.load(arguments, arguments.prompts)
    drafter = sk.MedusaDrafter(MedusaHeads.load(SHIPPED_HEADS, model))
    rows: list[dict[str, Any]] = []
    total = len(ways(drafter)) * arguments.prompts * len(texts)
    with sk.pack_linear_weights(model), tqdm(total=total, unit="answer", mininterval=1.0, disable=None) as bar:
        for name, chosen in texts.items():
            fresh = measure(
                model, [prompts.encode(tokenizer, [text]) for text in chosen], drafter, bar.update,
                sampling=sk.SamplingParams(arguments.temperature), max_new_tokens=arguments.max_new_tokens,
                eos_token_id=[],
            )  # fmt: skip
            rows += [{"prompts": name, "temperature": arguments.temperature, **row} for row in fresh]
            with tqdm.external_write_mode():
                for row in fresh:
                    print(
                        f"{name:10} {row['way']:9} ε {row['epsilon'] or '–'!s:5} {row['tokens_per_step']:.2f} tokens a "
                        f"step, {row['log_prob']:.2f} nats a token",
                        flush=True,
                    )
    path = machine.save(arguments.output, "typical", rows, real_model.settings(arguments))
    plots.save(plots.thresholds(rows), path.with_suffix(".png"), machine.command())
    print(f"written: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    sys.exit(main())
