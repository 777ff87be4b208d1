"""``specdec demo``: a real language model decodes real prompts with and without speculation, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ..assets.prompts import PROMPT_SETS
from ..options import POSITIVE, SEED, TEMPERATURE, THREADS, Defaults, draft_length, integer

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo with these options; those of the process by default."""
    arguments = _parse(argv)
    from . import compare

    report = compare.run(
        arguments.sets,
        batch=arguments.batch,
        max_new_tokens=arguments.max_new_tokens,
        temperatures=arguments.temperature,
        threads=arguments.threads,
        num_speculative_tokens=arguments.num_speculative_tokens,
        seed=arguments.seed,
        show=None if arguments.json else compare.print_comparison,
    )
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        compare.print_summary(report)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="specdec demo",
        description="Decode real prompts with a real language model (SmolLM2-135M-Instruct, fetched once), with and "
        "without speculation, through the same loop and with the same weights.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        default=["code-edit", "humaneval", "chat"],
        choices=PROMPT_SETS,
        help="prompt sets",
    )
    parser.add_argument("--batch", type=integer(1, 4096), default=2, help="prompts decoded together")
    parser.add_argument("--max-new-tokens", type=POSITIVE, default=96, help="tokens of each prompt's answer")
    parser.add_argument("--temperature", type=TEMPERATURE, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    parser.add_argument(
        "--num-speculative-tokens",
        type=draft_length,
        default="auto",
        metavar="K",
        help="draft tokens a step, or auto: as many as pay",
    )
    parser.add_argument("--threads", type=THREADS, help="CPU threads (default: the cores, at most 8)")
    parser.add_argument("--seed", type=SEED, default=0, help="of the sampled answers")
    parser.add_argument("--json", action="store_true", help="print figures and texts as one JSON document instead")
    return parser.parse_args(argv)
