"""``specdec generate``: a model answers a prompt; its tokens appear as they come, coloured by who wrote them."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from ..analysis import drafters as choices
from ..assets import prompts
from ..commands import add_model_options, check_utf8, load, load_draft, model_name, read_text
from ..decoding import CostTable, GenerationOutput, GenerationStats
from ..decoding.generate import generate
from ..decoding.step import TREE_RULES
from ..ops.token_logprobs import MAX_TOP
from ..ops.verify_tree import DELTA, EPSILON
from ..options import (
    COUNT,
    POSITIVE,
    SEED,
    SHARE,
    TEMPERATURE,
    Defaults,
    draft_length,
    existing,
    integer,
    number,
)
from ..sampling import SamplingParams
from ..types import Status
from . import render

__all__ = ["main"]


class _Printer:
    """A streamer of `generate` that prints tokens by origin where a person looks, and the bare text elsewhere."""

    def __init__(self, tokenizer: Any, marked: bool, color: bool) -> None:
        self._text = render.Detokenizer(tokenizer)
        self._marked, self._color = marked, color
        self._begun = False

    def step(self, tokens: list[np.ndarray], origins: list[np.ndarray]) -> None:
        self._begun = True
        texts = [self._text.add(token) for token in tokens[0].tolist()]
        marked = render.render(texts, origins[0].tolist(), color=self._color)
        print(marked if self._marked else "".join(texts), end="", flush=True)

    def end(self) -> None:
        if self._begun:
            print(self._text.rest())


def main(argv: Sequence[str] | None = None) -> None:
    """Answer the prompt that the arguments, a file or stdin hold."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.prompt is None and arguments.prompt_file is None and sys.stdin.isatty():
        parser.error("a prompt is needed: as an argument, as --prompt-file, or on stdin")
    _run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdec generate",
        description="Let a model answer a prompt, with a drafter. In a terminal the tokens are coloured by who wrote "
        "them; what is piped on is the answer alone. A line of figures goes to stderr.",
        formatter_class=Defaults,
    )
    parser.add_argument("prompt", nargs="?", help="(default: what --prompt-file or stdin holds)")
    parser.add_argument("--prompt-file", type=existing, help="a text file with the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the tokenizer's chat template"
    )
    add_model_options(parser)
    parser.add_argument(
        "--drafter", choices=[*choices.NAMES, *choices.OF_DRAFT_MODEL],
        help='(default: "model" with --draft-model, else "lookup")',
    )  # fmt: skip
    parser.add_argument(
        "--num-speculative-tokens", type=draft_length, default="auto", metavar="K",
        help="draft tokens a step, or auto: as many as pay; of a tree, which has its own size, a number is the tree at "
        "every step, auto the tree or none, step by step (with typical the tree)",
    )  # fmt: skip
    parser.add_argument(
        "--min-confidence", type=SHARE, metavar="P",
        help="of --drafter model: draft no further after a token that the draft gave with less than this probability "
        "(default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--acceptance", choices=TREE_RULES, default="token",
        help="how draft tokens are accepted: token, block and match keep the distribution; greedy decodes as at "
        "temperature 0; typical, which takes a drafter of trees, is not lossless",
    )  # fmt: skip
    parser.add_argument("--epsilon", type=SHARE, help=f"of --acceptance typical: the threshold (default: {EPSILON})")
    parser.add_argument(
        "--delta",
        type=number(0, 1e6),
        help="of --acceptance typical: the factor δ of δ·exp(−entropy), the threshold where that is lower "
        f"(default: {DELTA})",
    )
    parser.add_argument("--temperature", type=TEMPERATURE, default=1.0, help="0 is greedy")
    parser.add_argument("--top-k", type=COUNT, default=0, help="0 is off")
    parser.add_argument("--top-p", type=SHARE, default=1.0, help="0 and 1 are off")
    parser.add_argument("--min-p", type=SHARE, default=0.0, help="0 is off")
    parser.add_argument("--seed", type=SEED, help="(default: another each time)")
    parser.add_argument("--max-new-tokens", type=POSITIVE, default=256, help="of the answer")
    parser.add_argument("--json", action="store_true", help="print answer and figures as one JSON document instead")
    parser.add_argument(
        "--logprobs", type=integer(0, MAX_TOP), metavar="N",
        help="with --json: log-probabilities and ranks of the tokens, and of the N likeliest ids beside each",
    )  # fmt: skip
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.logprobs is not None and not arguments.json:
        raise ValueError("--logprobs must be given with --json, got it alone")
    prompt = _prompt(arguments)
    sampling = SamplingParams(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    name = arguments.drafter or ("model" if arguments.draft_model else "lookup")
    if (name in choices.OF_DRAFT_MODEL) != (arguments.draft_model is not None):
        wanted = " or ".join(choices.OF_DRAFT_MODEL)
        raise ValueError(f"--draft-model must be given with --drafter {wanted} alone, got --drafter {name}")
    if arguments.heads is not None and name != "medusa":
        raise ValueError(f"--heads must be given with --drafter medusa alone, got --drafter {name}")
    choices.check_heads([name], arguments.model, arguments.heads)
    if name == "none" and arguments.num_speculative_tokens != "auto":
        raise ValueError("--num-speculative-tokens must be given with a drafter, got --drafter none")
    if arguments.min_confidence is not None and name != "model":
        raise ValueError(f"--min-confidence must be given with --drafter model alone, got --drafter {name}")
    typical = arguments.acceptance == "typical"
    if typical and name not in choices.OF_TREES:
        raise ValueError(
            f"--acceptance typical must be given with --drafter {' or '.join(choices.OF_TREES)}, got {name}"
        )
    thresholds = {key: getattr(arguments, key) for key in ("epsilon", "delta") if getattr(arguments, key) is not None}
    if thresholds and not typical:
        raise ValueError(f"--{next(iter(thresholds))} must be given with --acceptance typical alone")
    model, tokenizer, _ = load(arguments)
    made = choices.make(
        [name], model, tokenizer, corpus=arguments.model is None, heads=arguments.heads,
        draft_model=load_draft(arguments, model, tokenizer), min_confidence=arguments.min_confidence or 0.0,
    )  # fmt: skip
    text = prompt if arguments.raw else prompts.chat_of(tokenizer, prompt)
    ids = torch.tensor([prompts.ids_of(tokenizer, text)], device=model.device)
    seen = sys.stdout.isatty()
    printer = _Printer(tokenizer, marked=seen, color=render.use_color(sys.stdout))
    try:
        output = generate(
            model,
            ids,
            attention_mask=torch.ones_like(ids),
            drafter=made[name],
            sampling=sampling,
            seeds=None if arguments.seed is None else torch.tensor([arguments.seed]),
            max_new_tokens=arguments.max_new_tokens,
            num_speculative_tokens=arguments.num_speculative_tokens,
            acceptance=arguments.acceptance,
            **thresholds,
            streamer=None if arguments.json else printer,
            return_logprobs=arguments.logprobs,
        )
    finally:
        if not arguments.json:
            printer.end()
    if arguments.json:
        named = {"model": model_name(arguments), "drafter": name, "prompt": prompt}
        named |= {
            key: getattr(arguments, key) for key in ("acceptance", "temperature", "top_k", "top_p", "min_p", "seed")
        }
        print(json.dumps(named | _report(output, tokenizer), indent=1))
        return
    if seen:
        print(f"\n{render.legend(color=render.use_color(sys.stdout))}")
    print(_figures(output) + "; not lossless" * typical, file=sys.stderr)


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise ValueError("a prompt must be given once, got an argument and --prompt-file")
    if arguments.prompt is not None:
        prompt: str = arguments.prompt
    else:
        if arguments.prompt_file is None and isinstance(sys.stdin, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # something was read from it
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")  # whatever the terminal's
        prompt = sys.stdin.read() if arguments.prompt_file is None else read_text(arguments.prompt_file)
    check_utf8("the prompt", prompt)
    if not prompt.strip():
        raise ValueError("the prompt must hold some text, got none")
    return prompt


def _report(output: GenerationOutput, tokenizer: Any) -> dict[str, Any]:
    tokens = output.tokens[0].tolist()
    texts = render.pieces(tokenizer, tokens)
    stats = {field.name: getattr(output.stats, field.name) for field in fields(GenerationStats)}
    for name in ("mean_acceptance_length", "acceptance_rate", "alpha", "tokens_per_second"):
        stats[name] = getattr(output.stats, name)
    logprobs = {}
    if output.logprobs is not None:
        logprobs["logprobs"] = {
            name: _plain(values[0].double().numpy() if values.is_floating_point() else values[0].numpy())
            for name, values in output.logprobs._asdict().items()
        }
    return {
        "text": "".join(texts),
        "tokens": tokens,
        "texts": texts,
        "origins": output.provenance[0].tolist(),
        "status": int(output.status[0]),
        "stats": {name: _plain(value) for name, value in stats.items()},
        **logprobs,
    }


def _plain(value: Any) -> Any:
    """A number, list or dict that JSON has; None for what is no number."""
    if isinstance(value, CostTable):
        return {name: _plain(one) for name, one in vars(value).items()}
    if isinstance(value, (np.ndarray, list)):
        return [_plain(one) for one in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _figures(output: GenerationOutput) -> str:
    stats = output.stats
    accepted = (
        f"; {stats.acceptance_rate:.0%} of {stats.num_drafted} draft tokens accepted" if stats.num_drafted else ""
    )
    flags = f"; status: {Status(int(output.status[0]))!r}" if output.status[0] else ""
    first = stats.num_tokens - stats.num_tokens_decode
    others = f"the others in {stats.seconds_decode:.2f} s: {stats.tokens_per_second:.1f} tokens/s, "
    return (
        f"{stats.num_tokens} tokens, {first} of them in {stats.seconds_prefill:.2f} s of prefill, "
        f"{others if stats.num_tokens_decode else ''}{stats.mean_acceptance_length:.2f} a step{accepted}{flags}"
    )
