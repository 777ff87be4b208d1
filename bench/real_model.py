"""What the benchmarks on the real model start with: their common options, and the model with its prompts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sk
from examples.own_loop import LeanLlama
from specdec_kernels import assets
from specdec_kernels.analysis import drafters
from specdec_kernels.assets import prompts
from specdec_kernels.commands import ended
from specdec_kernels.decoding import Prompt
from specdec_kernels.options import POSITIVE, THREADS


def parser(
    name: str, description: str, *, sets: Sequence[str], prompts_help: str, **defaults: int
) -> argparse.ArgumentParser:
    """A parser with the options that all of them have; `defaults` of ``--prompts`` and so on."""
    parse = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parse.add_argument("--sets", nargs="+", choices=prompts.PROMPT_SETS, default=list(sets))
    parse.add_argument("--prompts", type=POSITIVE, default=defaults["prompts"], help=prompts_help)
    parse.add_argument("--max-new-tokens", type=POSITIVE, default=defaults["max_new_tokens"])
    add_common(parse, **{key: defaults[key] for key in ("rounds", "threads") if key in defaults})
    return parse


def add_common(parse: argparse.ArgumentParser, rounds: int | None = None, threads: int | None = None) -> None:
    """Add the options of commands without prompts, too; ``--rounds`` if a number of rounds is given."""
    if rounds is not None:
        parse.add_argument("--rounds", type=POSITIVE, default=rounds)
    parse.add_argument("--threads", type=THREADS, default=torch.get_num_threads() if threads is None else threads)
    parse.add_argument("--output", type=Path, help="folder of the results (default: bench/results/<machine>)")


def run(name: str, arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], None]) -> int:
    """The exit status of `measure` with so many threads; errors are reported as one sentence (`commands.ended`)."""
    torch.set_num_threads(arguments.threads)
    return ended(name, partial(measure, arguments))


def load(arguments: argparse.Namespace, last: int | None = None) -> tuple[Any, Any, dict[str, list[str]]]:
    """The model, its tokenizer, and the texts of each set, or the `last` of them."""
    model, tokenizer = assets.load_model()
    texts = {name: prompts.load_prompts(name, tokenizer) for name in arguments.sets}
    return model, tokenizer, texts if last is None else {name: found[-last:] for name, found in texts.items()}


class ReadOnce(LeanLlama):
    """The loop of ``examples/own_loop.py`` which, together with its copies, reads a batch of prompts only once: reading
    is not timed, but took most of a run.

    Parameters
    ----------
    model : LlamaForCausalLM
    most : int
        How many batches' keys and values are kept, the last ones.
    ids : ``[n]`` int64, optional
        As of `LeanLlama`.
    """

    gives_rows = False  # reading is to be apart from the first step

    def __init__(self, model: Any, most: int = 1, ids: torch.Tensor | None = None) -> None:
        super().__init__(model, ids=ids)
        self.most = most
        self.read: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def prefill(self, prompt: Prompt) -> None:
        batch, rows = len(prompt.lengths), prompt.longest - 1
        buffers = [
            buffer.unflatten(0, (batch, -1))[:, :rows] for layer in self.layers for buffer in (layer.keys, layer.values)
        ]
        key = (prompt.tokens.shape, *prompt.tokens.flatten().tolist())
        if key not in self.read:
            super().prefill(prompt)
            while len(self.read) >= self.most:
                del self.read[next(iter(self.read))]
            self.read[key] = [buffer.clone() for buffer in buffers]
        for buffer, kept in zip(buffers, self.read[key], strict=True):
            buffer.copy_(kept)


def draft_in_own_loop(draft: Any, loop: Callable[..., LeanLlama] = LeanLlama) -> sk.ModelDrafter:
    """A drafter with this transformers model in the `loop` of ``examples/own_loop.py``."""
    ids = getattr(draft.config, "draft_token_ids", None)
    ids = None if ids is None else torch.tensor(ids)
    return sk.ModelDrafter(loop(draft, ids=ids), token_map=None if ids is None else sk.TokenMap(ids))


def drafters_of(
    names: Sequence[str], model: Any, tokenizer: Any, draft_model: Path | None,
    loop: Callable[..., LeanLlama] = LeanLlama,
) -> dict[str, sk.Drafter]:  # fmt: skip
    """Drafters by name: "model" with the model of a folder in the `loop`; "lookup-16", a lookup of up to 16 tokens; and
    those that `specdec_kernels.analysis.drafters.make` makes without a model.
    """
    made: dict[str, sk.Drafter] = {}
    for name in names:
        if name == "lookup-16":
            made[name] = sk.NgramDrafter(16)
        elif draft_model is not None and name == "model":
            made[name] = draft_in_own_loop(assets.load_folder(draft_model)[0], loop)
        else:
            made |= drafters.make([name], model, tokenizer, corpus=True)
    return made


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a result file records about how it was made."""
    given = {k: v.name if isinstance(v, Path) else v for k, v in vars(arguments).items() if k != "output"}
    return given | {"model": assets.MODEL_NAME, "weights": "packed"}
