"""What the demo does: every prompt set and temperature once plainly and once with speculation, and how the two
compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import assets
from ..assets import corpus, prompts
from ..decoding import GenerationOutput
from ..decoding.generate import generate
from ..drafters import Drafter, NgramLMDrafter, NoDrafter
from ..integrations.transformers.packing import has_onednn, pack_linear_weights
from ..sampling import SamplingParams
from . import render

_MAX_THREADS = 8  # a model this small gains nothing from more
_RULE = 100

Report = dict[str, Any]


def run(
    names: Sequence[str],
    *,
    batch: int,
    max_new_tokens: int,
    temperatures: Sequence[float],
    threads: int | None,
    num_speculative_tokens: int | str,
    seed: int,
    show: Callable[[Report], None] | None,
) -> Report:
    """Decode the first `batch` prompts of every set at every temperature, plainly and with speculation.

    Both go through `generate` with the same packed weights and seeds. With ``acceptance="match"``, and "greedy"
    at temperature 0, the two outputs are the same tokens, which is checked.

    Returns
    -------
    dict
        Of plain values: "threads", "batch", "max_new_tokens" and "comparisons", a list with one dict for each set and
        temperature; `show` has been called with each of those when it was ready. Where stderr is a terminal, it shows
        the two runs side by side as they happen.

    Raises
    ------
    AssetError
        The model or a text cannot be fetched or read.
    ValueError
        No such prompt set, too few prompts in it, a bad temperature.
    """
    from .columns import Columns

    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    torch.set_num_threads(threads or min(_MAX_THREADS, cores))
    settings = [SamplingParams(temperature=temperature) for temperature in temperatures]
    for name in names:
        if batch > (most := prompts.num_prompts(name)):
            raise ValueError(f"demo: batch must be at most {most}, the prompts of {name!r}, got {batch}")
    model, tokenizer = assets.load_model()
    batches = {name: prompts.encode(tokenizer, prompts.load_prompts(name, tokenizer, batch)) for name in names}
    drafter = NgramLMDrafter(corpus.ngram_table(tokenizer))
    seeds = torch.tensor([(seed + row) % 2**63 for row in range(batch)])
    report: Report = {"threads": torch.get_num_threads(), "batch": batch, "max_new_tokens": max_new_tokens}
    report["comparisons"] = []
    with pack_linear_weights(model) if has_onednn() else nullcontext():

        def decode(
            inputs: tuple[Tensor, Tensor], drafter: Drafter, sampling: SamplingParams, streamer: object
        ) -> GenerationOutput:
            return generate(
                model,
                inputs[0],
                attention_mask=inputs[1],
                drafter=drafter,
                sampling=sampling,
                seeds=seeds,
                max_new_tokens=max_new_tokens,
                num_speculative_tokens=num_speculative_tokens,
                acceptance="greedy" if sampling.is_greedy else "match",
                streamer=streamer,
            )

        for number, (name, sampling) in enumerate(product(names, settings), 1):
            title = f"{name}, temperature {sampling.temperature:g} ({number} of {len(names) * len(settings)})"
            runs = {"plain decoding": NoDrafter(), "with speculation": drafter}
            with Columns(title, tokenizer, sys.stderr) if sys.stderr.isatty() else nullcontext() as columns:
                plain, speculative = (
                    decode(batches[name], by, sampling, columns and columns.begin(run)) for run, by in runs.items()
                )
            comparison = {"prompts": name, "temperature": sampling.temperature}
            comparison |= _compare(plain, speculative, tokenizer)
            report["comparisons"].append(comparison)
            if show is not None:
                show(comparison)
    return report


def _compare(plain: GenerationOutput, speculative: GenerationOutput, tokenizer: Any) -> Report:
    rates = [of.stats.tokens_per_second if of.stats.num_tokens_decode else None for of in (plain, speculative)]
    slow, fast = rates
    stats = speculative.stats
    answers = []
    for ids, origins, count in zip(speculative.tokens, speculative.provenance, speculative.num_tokens, strict=True):
        kept = ids[: int(count)].tolist()
        answers.append({"texts": render.pieces(tokenizer, kept), "origins": origins[: int(count)].tolist()})
    return {
        "plain_tokens_per_second": slow,
        "speculative_tokens_per_second": fast,
        "speed_up": fast / slow if fast and slow else None,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate if stats.num_drafted else None,
        "identical": torch.equal(plain.tokens, speculative.tokens),
        "answers": answers,
    }


def _told(number: float | None, form: str) -> str:
    """A figure; what was all emitted with the prompt's forward has none."""
    return "–" if number is None else format(number, form)


def print_comparison(comparison: Report) -> None:
    """Print one comparison: the first answer with its tokens' origins, and the figures below it."""
    color = render.use_color(sys.stdout)
    answer = comparison["answers"][0]
    title = f"{comparison['prompts']}, temperature {comparison['temperature']:g} "
    print(f"\n{title:─<{_RULE}}")
    print(render.render(answer["texts"], answer["origins"], color=color).strip("\n"))
    print(f"  {render.legend(color=color)}")
    same = "identical to plain decoding" if comparison["identical"] else "NOT identical to plain decoding"
    print(
        f"  {_told(comparison['plain_tokens_per_second'], '.1f')} tokens/s plain, "
        f"{_told(comparison['speculative_tokens_per_second'], '.1f')} with speculation: "
        f"{_told(comparison['speed_up'], '.2f')}x; "
        f"mean acceptance length {comparison['mean_acceptance_length']:.2f}; output {same}",
        flush=True,
    )


def print_summary(report: Report) -> None:
    """Print the table of all comparisons."""
    print(f"\n{'summary ':─<{_RULE}}")
    print(f"{assets.MODEL_NAME}, float32, {report['threads']} CPU threads, batch {report['batch']}")
    print(f"{'prompts':12}{'temperature':>12}{'plain tok/s':>13}{'spec. tok/s':>13}{'speed-up':>10}", end="")
    print(f"{'mean acceptance length':>24}  identical")
    for row in report["comparisons"]:
        print(
            f"{row['prompts']:12}{row['temperature']:12g}{_told(row['plain_tokens_per_second'], '.1f'):>13}"
            f"{_told(row['speculative_tokens_per_second'], '.1f'):>13}{_told(row['speed_up'], '.2f'):>9}x"
            f"{row['mean_acceptance_length']:24.2f}"
            f"  {'yes' if row['identical'] else 'NO'}"
        )
