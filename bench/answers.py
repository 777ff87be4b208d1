"""``python -m bench.answers``: what drafters would have proposed at each token of many answers of the real model.

SmolLM2-135M-Instruct, in the loop of ``examples/own_loop.py``, writes one answer to each prompt of each set by plain
decoding, and before each token every drafter is asked what it would propose. In greedy decoding, and when both draw
with the same noise (acceptance "match"), the target accepts a draft token exactly if it is the one that came. So an
answer tells how many tokens of each draft would be accepted, and `bench.replay` runs any rule on it without the model.

Writes ``answers.npz`` into the machine's results folder, and ``answers.json``, which says how it was made.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

import specdec_kernels as sk
from bench import machine, real_model
from examples.own_loop import LeanLlama
from specdec_kernels.assets import prompts
from specdec_kernels.decoding import DecodingState, StepResult
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS
from specdec_kernels.files import write_whole
from specdec_kernels.options import TEMPERATURE, existing

LONGEST = AUTO_DRAFT_LENGTHS[-1]
TOGETHER = 8  # answers written in one batch
DRAFTERS = ("lookup", "lookup-16", "ngram-lm", "model")


@dataclass(frozen=True)
class Answer:
    """At each token of an answer, ``[n]``: how many of `LONGEST` tokens the drafter proposes, how many of these match
    what follows, and, if it foresees, how much of the text it found again.
    """

    drafted: NDArray[np.int64]
    right: NDArray[np.int64]
    matched: NDArray[np.int64] | None

    def first(self, tokens: int) -> Answer:
        """The answer as if it had ended after so many tokens."""
        left = np.arange(tokens, 0, -1)[: len(self.right)]
        matched = None if self.matched is None else self.matched[:tokens]
        return Answer(self.drafted[:tokens], np.minimum(self.right[:tokens], left), matched)


Answers = dict[tuple[str, float, str], list[Answer]]
"""By prompt set, temperature and drafter."""


class _Asked:
    """One drafter's proposals at each step of a call."""

    def __init__(self, drafter: sk.Drafter) -> None:
        self.drafter = drafter
        self.drafts: list[NDArray[np.int64]] = []  # [batch, LONGEST] each
        self.matched: list[NDArray[np.int64] | None] = []
        self._committed = 0  # drafts so far

    def ask(self, state: DecodingState, num_tokens: int) -> None:
        foresight = self.drafter.foresee(state)
        self.matched.append(None if foresight is None else foresight.matched)
        self.drafts.append(self.drafter.propose(state, num_tokens).widened(LONGEST).tokens.numpy())

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Tell the drafter that it drafted, although nothing was verified."""
        drafted = self.drafts[-1] if len(self.drafts) > self._committed else np.empty((state.batch_size, 0), np.int64)
        self._committed = len(self.drafts)
        self.drafter.commit(state, replace(result, tokens=np.hstack([result.tokens, np.full_like(drafted, -1)])))

    def answers(self, out: sk.GenerationOutput) -> list[Answer]:
        """How well a call's drafts would have done. Before the last token of a longest answer none is asked for."""
        answers, foresees = [], any(found is not None for found in self.matched)
        for sequence, (tokens, count) in enumerate(zip(out.tokens.numpy(), out.num_tokens.tolist(), strict=True)):
            drafted, right, matched = np.zeros((3, count), dtype=np.int64)
            for i, (drafts, found) in enumerate(zip(self.drafts[:count], self.matched, strict=False)):
                draft, coming = drafts[sequence], tokens[i : min(i + LONGEST, count)]
                drafted[i] = (draft >= 0).sum()
                right[i] = (draft[: len(coming)] == coming).cumprod().sum()
                matched[i] = 0 if found is None else found[sequence]
            answers.append(Answer(drafted, right, matched if foresees else None))
        return answers


class Asking(sk.Drafter):
    """Asks other drafters, one of which may have a model, at each step of plain decoding, and proposes nothing."""

    def __init__(self, of: Sequence[sk.Drafter]) -> None:
        self.asked = [_Asked(drafter) for drafter in of]
        self.runner = next((drafter.runner for drafter in of if drafter.runner is not None), None)

    def start(self, state: DecodingState) -> None:
        for each in self.asked:
            each.drafter.start(state)

    def prepare(self, state: DecodingState) -> None:
        for each in self.asked:
            each.drafter.prepare(state)

    def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
        for each in self.asked:
            each.ask(state, num_tokens)
        return sk.Draft(state.tokens[:, :0])

    def commit(self, state: DecodingState, result: StepResult) -> None:
        for each in self.asked:
            each.commit(state, result)

    def finish(self) -> None:
        for each in self.asked:
            each.drafter.finish()


def asked(model: Any, ids: torch.Tensor, of: Sequence[sk.Drafter], **options: Any) -> list[list[Answer]]:
    """Decode plainly and ask the drafters at each token; returns the answers of each drafter."""
    watched = Asking(of)
    acceptance = "greedy" if options["sampling"].is_greedy else "match"
    out = sk.generate(model, ids, drafter=watched, num_speculative_tokens=LONGEST, acceptance=acceptance, **options)
    return [each.answers(out) for each in watched.asked]


def written(
    model: Any, tokenizer: Any, of: Mapping[str, sk.Drafter], texts: Sequence[str], temperature: float, new_tokens: int
) -> dict[str, list[Answer]]:
    """One answer to each text, as each drafter sees it."""
    answers: dict[str, list[Answer]] = {name: [] for name in of}
    for begin in range(0, len(texts), TOGETHER):
        ids, mask = prompts.encode(tokenizer, texts[begin : begin + TOGETHER])
        found = asked(
            model, ids, list(of.values()), attention_mask=mask, sampling=sk.SamplingParams(temperature),
            seeds=torch.arange(begin, begin + len(ids)), max_new_tokens=new_tokens,
        )  # fmt: skip
        for name, each in zip(of, found, strict=True):
            answers[name] += each
    return answers


def save(path: Path, answers: Answers) -> None:
    """Write them as arrays, with the tokens of all answers one after the other."""
    arrays: dict[str, Any] = {}
    for (prompt_set, temperature, drafter), each in answers.items():
        at = f"{prompt_set}/{temperature}/{drafter}"
        arrays[f"{at}/count"] = np.array([len(answer.right) for answer in each], dtype=np.int16)
        for of in ("drafted", "right", "matched"):
            if (first := getattr(each[0], of)) is not None:
                parts = [first, *(getattr(answer, of) for answer in each[1:])]
                arrays[f"{at}/{of}"] = np.concatenate(parts).astype(np.int16)

    def write(made: Path) -> None:
        with made.open("wb") as file:  # to the name of a file numpy would add its own ending
            np.savez_compressed(file, **arrays)

    write_whole(path, write)


def load(path: Path) -> Answers:
    """What `save` has written."""
    answers: Answers = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            at, _, of = key.rpartition("/")
            if of == "count":
                ends = arrays[key].astype(np.int64).cumsum()[:-1]
                parts = [
                    np.split(arrays[f"{at}/{of}"].astype(np.int64), ends) if f"{at}/{of}" in arrays else None
                    for of in ("drafted", "right", "matched")
                ]
                prompt_set, temperature, drafter = at.split("/")
                answers[prompt_set, float(temperature), drafter] = [
                    Answer(*(None if part is None else part[i] for part in parts))  # type: ignore[arg-type]
                    for i in range(len(ends) + 1)
                ]
    return answers


def add_drafter(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add the options ``--drafter`` and ``--draft-model``, which `check_drafter` then looks at."""
    parser.add_argument("--drafter", choices=DRAFTERS, help="lookup-16: by up to 16 tokens", **options)
    parser.add_argument("--draft-model", type=existing, metavar="FOLDER", help="of the drafter model")


def check_drafter(parser: argparse.ArgumentParser, names: Sequence[str], draft_model: Path | None) -> None:
    """End with an error unless a draft model is given where one is needed."""
    if ("model" in names) != (draft_model is not None):
        parser.error(f"--draft-model must be given with --drafter model alone, got --drafter {' '.join(names)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``answers.npz``."""
    parser = real_model.parser(
        "answers", "What drafters would have proposed in many answers.", sets=prompts.PROMPT_SETS,
        prompts=40, prompts_help="so many, the last of each set (default 40)", max_new_tokens=64,
    )  # fmt: skip
    add_drafter(parser, nargs="+", default=["lookup", "lookup-16", "ngram-lm"])
    parser.add_argument("--name", default="answers", help="of the files (default answers)")
    parser.add_argument("--temperatures", nargs="+", type=TEMPERATURE, default=[0.0, 1.0])
    arguments = parser.parse_args(argv)
    check_drafter(parser, arguments.drafter, arguments.draft_model)
    return real_model.run("answers", arguments, _measured)


def _measured(arguments: argparse.Namespace) -> None:
    model, tokenizer, texts = real_model.load(arguments, arguments.prompts)
    target = LeanLlama(model)
    of = real_model.drafters_of(arguments.drafter, model, tokenizer, arguments.draft_model)
    answers: Answers = {}
    with tqdm(total=len(texts) * len(arguments.temperatures), unit="set", disable=None) as bar:
        for name, chosen in texts.items():
            for temperature in arguments.temperatures:
                found = written(target, tokenizer, of, chosen, temperature, arguments.max_new_tokens)
                answers |= {(name, temperature, drafter): each for drafter, each in found.items()}
                bar.update()
    rows = [
        {
            "prompts": name, "temperature": temperature, "drafter": drafter, "answers": len(each),
            "tokens": sum(len(answer.right) for answer in each),
            "right": float(np.mean(np.concatenate([answer.right > 0 for answer in each]))),
        }
        for (name, temperature, drafter), each in answers.items()
    ]  # fmt: skip
    folder = arguments.output or machine.RESULTS / machine.label()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arguments.name}.npz"
    save(path, answers)  # first: what says how answers were made never stands beside others
    said = machine.save(folder, arguments.name, rows, real_model.settings(arguments))
    print(f"written: {path} and {said.name}")


if __name__ == "__main__":
    sys.exit(main())
