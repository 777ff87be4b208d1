"""``python -m bench.replay``: "auto" on many answers of the real model, replayed by what steps cost.

SmolLM2-135M-Instruct, in the loop of ``examples/own_loop.py``, writes one answer to each prompt of each set, plainly,
and before each token the drafter is asked what it would propose. Greedily, and where both draw with the same noise
(acceptance "match"), the target accepts a token where it is the one that came. So an answer tells what each draft
within it comes to, and a schedule can be run on it without the model, if it is told what a step takes: a plain one 1,
and one with drafts what `specdec_kernels.analysis.measured.measure_costs` finds first, or ``--costs`` says, with noise.
(A draft model has to be fed what plain steps wrote before it drafts again: as if that took a draft token's time, where
costs are measured.)
For each batch size some batches of prompts are drawn, and the whole time by fixed numbers of draft tokens, and by
"auto", is compared with plain decoding's. What else "auto" takes on the host is not part of it: `bench.end_to_end`
measures that, on the few batches that there is time for.

Of a drafter that foresees it also says how often it was right by how much of the text it found again: what `MatchYield`
first assumes lies below what ``--n 16`` gives and, where nothing was found, ``--drafter ngram-lm``. Writes
``replay.json`` into the machine's results folder.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

import specdec_kernels as sk
from bench import machine, real_model
from examples.own_loop import LeanLlama
from specdec_kernels import assets
from specdec_kernels.analysis import drafters, measured
from specdec_kernels.assets import prompts
from specdec_kernels.decoding import DecodingState, StepResult
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, LearnedCosts
from specdec_kernels.decoding.foresight import ForesightSchedule, MatchYield
from specdec_kernels.decoding.schedule import AutoSchedule, FixedSchedule, Schedule
from specdec_kernels.options import POSITIVE, TEMPERATURE, existing, integer, number

LONGEST = AUTO_DRAFT_LENGTHS[-1]
NOISE = 0.05  # of a step's time, as a standard deviation of its logarithm
TOGETHER = 8  # answers written in one batch


@dataclass(frozen=True)
class Answer:
    """At each token of an answer, ``[n]``: how many tokens the drafter proposes of `LONGEST`, how many of these are the
    ones that follow, and, if it foresees, how much of the text it found again.
    """

    drafted: NDArray[np.int64]
    right: NDArray[np.int64]
    matched: NDArray[np.int64] | None


class Asked(sk.Drafter):
    """Asks another drafter at each step of plain decoding, and proposes nothing."""

    def __init__(self, drafter: sk.Drafter) -> None:
        self.drafter, self.runner = drafter, drafter.runner
        self._drafts: list[NDArray[np.int64]] = []  # [batch, LONGEST] each
        self._matched: list[NDArray[np.int64] | None] = []
        self._committed = 0  # drafts, so far

    def start(self, state: DecodingState) -> None:
        self.drafter.start(state)
        self._drafts, self._matched, self._committed = [], [], 0

    def prepare(self, state: DecodingState) -> None:
        self.drafter.prepare(state)

    def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
        foresight = self.drafter.foresee(state)
        self._matched.append(None if foresight is None else foresight.matched)
        self._drafts.append(self.drafter.propose(state, num_tokens).widened(LONGEST).tokens.numpy())
        return sk.Draft(state.tokens[:, :0])

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """It learns that it drafted, although nothing was verified."""
        drafted = self._drafts[-1] if len(self._drafts) > self._committed else np.empty((state.batch_size, 0), np.int64)
        self._committed = len(self._drafts)
        self.drafter.commit(state, replace(result, tokens=np.hstack([result.tokens, np.full_like(drafted, -1)])))

    def finish(self) -> None:
        self.drafter.finish()

    def answers(self, out: sk.GenerationOutput) -> list[Answer]:
        """What the drafts of a call would have come to. Before the last token of a longest answer none is asked for."""
        answers, foresees = [], any(found is not None for found in self._matched)
        for sequence, (tokens, count) in enumerate(zip(out.tokens.numpy(), out.num_tokens.tolist(), strict=True)):
            drafted, right, matched = np.zeros((3, count), dtype=np.int64)
            for i, (drafts, found) in enumerate(zip(self._drafts[:count], self._matched, strict=False)):
                draft, coming = drafts[sequence], tokens[i : min(i + LONGEST, count)]
                drafted[i] = (draft >= 0).sum()
                right[i] = (draft[: len(coming)] == coming).cumprod().sum()
                matched[i] = 0 if found is None else found[sequence]
            answers.append(Answer(drafted, right, matched if foresees else None))
        return answers


def written(
    model: Any, tokenizer: Any, drafter: sk.Drafter, texts: Sequence[str], temperature: float, new_tokens: int
) -> list[Answer]:
    """One answer to each text."""
    answers = []
    for begin in range(0, len(texts), TOGETHER):
        ids, mask = prompts.encode(tokenizer, texts[begin : begin + TOGETHER])
        answers += asked(
            model, ids, drafter, attention_mask=mask, sampling=sk.SamplingParams(temperature),
            seeds=torch.arange(begin, begin + len(ids)), max_new_tokens=new_tokens,
        )  # fmt: skip
    return answers


def asked(model: Any, ids: torch.Tensor, drafter: sk.Drafter, **options: Any) -> list[Answer]:
    """Decode plainly, and ask the drafter at each token."""
    watched = Asked(drafter)
    acceptance = "greedy" if options["sampling"].is_greedy else "match"
    out = sk.generate(model, ids, drafter=watched, num_speculative_tokens=LONGEST, acceptance=acceptance, **options)
    return watched.answers(out)


def replayed(
    answers: Sequence[Answer],
    schedule: Schedule,
    costs: NDArray[np.float64],
    random: np.random.Generator,
    new_tokens: int,
    catch_up: float = 0.0,
) -> float:
    """What the answers take together, in plain steps; as far as decoding knows each may have so many tokens.

    `catch_up` is what the first draft after plain steps takes more.
    """
    left = np.array([len(answer.right) for answer in answers])
    room = np.full(len(answers), new_tokens)
    spent, none, behind = 0.0, np.zeros(len(answers), dtype=np.int64), False
    while left.any():
        at = [(answer, len(answer.right) - n) for answer, n in zip(answers, left, strict=True)]
        proposed, right = (
            np.array([getattr(answer, of)[i] if i < len(answer.right) else 0 for answer, i in at])
            for of in ("drafted", "right")
        )
        limits = np.where(left > 0, np.minimum(proposed, room - 1), 0)
        if isinstance(schedule, ForesightSchedule):
            matched = [
                answer.matched[i] if answer.matched is not None and i < len(answer.matched) else 0 for answer, i in at
            ]
            schedule.look(sk.Foresight(np.where(limits > 0, 1, -1), np.array(matched)))
        drafted = np.minimum(limits, schedule.next())
        width = schedule.round_up(int(drafted.max()))
        accepted = np.minimum(right, drafted)
        emitted = np.minimum(accepted + 1, left)  # an answer's end has no token after it
        taken = costs[AUTO_DRAFT_LENGTHS.index(width)] + (catch_up if behind and width else 0)
        seconds = float(taken * np.exp(NOISE * random.standard_normal()))
        behind = width == 0
        active, spent = left > emitted, spent + seconds
        tokens = np.where(right > 0, 1, 0)[:, None] + np.zeros((1, width + 1), dtype=np.int64)
        schedule.note(StepResult(tokens, emitted, np.where(left > 0, drafted, -1), accepted, active, none), seconds)
        left, room = left - emitted, room - emitted
    return spent


def compared(
    answers: Sequence[Answer],
    batch: int,
    batches: int,
    costs: NDArray[np.float64],
    new_tokens: int,
    catch_up: float = 0.0,
) -> list[dict[str, Any]]:
    """One row for each number of draft tokens, and for "auto", whose batches follow each other as calls do."""
    random = np.random.default_rng(0)
    chosen = [random.permutation(len(answers))[:batch] for _ in range(batches)]
    times: dict[int | str, list[float]] = {way: [] for way in (*AUTO_DRAFT_LENGTHS, "auto")}
    adaptive = AutoSchedule if answers[0].matched is None else ForesightSchedule
    learned = LearnedCosts(costs * np.exp(NOISE * random.standard_normal(len(costs))), 1 / 2)
    for each in chosen:
        texts = [answers[i] for i in each]
        for way, spent in times.items():
            by = FixedSchedule(way) if isinstance(way, int) else adaptive(batch, new_tokens, learned)
            spent.append(replayed(texts, by, costs, random, new_tokens, catch_up))
        learned = learned.continued()
    plain = np.array(times[0])
    return [
        {
            "num_speculative_tokens": way,
            "ratio": float(plain.sum() / np.sum(spent)),
            "ratio_low": float(np.quantile(plain / spent, 0.1)),
        }
        for way, spent in times.items()
    ]


def by_match(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """How often the first token of a draft was right, and one that follows right ones, by tokens found again."""
    drafted, right = (np.concatenate([getattr(answer, of) for answer in answers]) for of in ("drafted", "right"))
    matched = np.concatenate([answer.matched for answer in answers if answer.matched is not None])
    came = np.concatenate([np.arange(len(answer.right), 0, -1) for answer in answers])
    kind = np.where(drafted > 0, np.searchsorted(MatchYield.LEAST, matched, side="right"), 0)
    rows = []
    for i, least in enumerate(MatchYield.LEAST):
        found, most = right[kind == i + 1], np.minimum(came, drafted)[kind == i + 1]
        if len(found):
            judged_later = np.minimum(found, most - 1)[found > 0]
            rows.append(
                {
                    "matched": least, "count": len(found), "first": float((found > 0).mean()),
                    "later": float((found - 1).clip(0).sum() / max(judged_later.sum(), 1)),
                }
            )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and write ``replay.json``."""
    parser = real_model.parser(
        "replay", 'What "auto" gains, by many answers.', sets=prompts.PROMPT_SETS,
        prompts=40, prompts_help="so many, the last of each set (default 40)", max_new_tokens=64, rounds=12,
    )  # fmt: skip
    parser.add_argument("--batches", type=POSITIVE, default=20, help="drawn for each batch size (default 20)")
    parser.add_argument("--batch", nargs="+", type=POSITIVE, default=[1, 2, 4, 8], help="sizes (default 1 2 4 8)")
    parser.add_argument("--drafter", choices=("lookup", "ngram-lm", "model"), default="lookup")
    parser.add_argument("--n", type=integer(1, 64), help="longest match of lookup (default 3)")
    parser.add_argument("--draft-model", type=existing, metavar="FOLDER", help="of the drafter model")
    parser.add_argument("--name", default="replay", help="of the result file (default replay)")
    parser.add_argument("--temperatures", nargs="+", type=TEMPERATURE, default=[0.0, 1.0])
    parser.add_argument(
        "--costs", nargs="+", type=number(1, 1e3), help="of a step with 1, 3 and 7 draft tokens, for each batch size"
    )
    arguments = parser.parse_args(argv)
    sizes, given = len(arguments.batch), arguments.costs
    if given is not None and len(given) != 3 * sizes:
        parser.error(f"--costs must be three for each of {sizes} batch sizes, got {len(given)}")
    if (arguments.drafter == "model") != (arguments.draft_model is not None):
        parser.error(f"--draft-model must be given with --drafter model alone, got --drafter {arguments.drafter}")
    if arguments.n is not None and arguments.drafter != "lookup":
        parser.error(f"--n must be given with --drafter lookup alone, got --drafter {arguments.drafter}")
    return real_model.run("replay", arguments, _measured)


def drafter_of(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> sk.Drafter:
    """What ``--drafter`` says."""
    if arguments.n is not None:
        return sk.NgramDrafter(arguments.n)
    if arguments.draft_model is not None:
        return real_model.draft_in_own_loop(assets.load_folder(arguments.draft_model)[0])
    return drafters.make([arguments.drafter], model, tokenizer, corpus=True)[arguments.drafter]


def costs_of(
    model: Any, tokenizer: Any, drafter: sk.Drafter, text: str, arguments: argparse.Namespace
) -> dict[int, tuple[NDArray[np.float64], float]]:
    """In plain steps, by batch size: of steps with `AUTO_DRAFT_LENGTHS`, drafting and verifying, and of catching up."""
    if arguments.costs is not None:
        rows = np.array(arguments.costs).reshape(-1, 3)
        return {batch: (np.array([1.0, *row]), 0.0) for batch, row in zip(arguments.batch, rows, strict=True)}
    ids, mask = prompts.encode(tokenizer, [text])
    found = {}
    for batch in arguments.batch:
        costs = measured.measure_costs(
            model, ids, mask, {"it": drafter}, lengths=AUTO_DRAFT_LENGTHS[1:], batch_size=batch,
            rounds=arguments.rounds,
        )  # fmt: skip
        seconds = np.array(
            [costs.steps[length + 1] + costs.drafting.get(("it", length), 0.0) for length in AUTO_DRAFT_LENGTHS]
        )
        catch_up = costs.drafting["it", 1] / seconds[0] if drafter.runner is not None else 0.0
        found[batch] = np.maximum.accumulate(seconds / seconds[0]), catch_up
    return found


def _measured(arguments: argparse.Namespace) -> None:
    model, tokenizer, texts = real_model.load(arguments, arguments.prompts)
    if max(arguments.batch) > (fewest := min(map(len, texts.values()))):
        raise ValueError(f"--batch must be at most {fewest}, which a set has prompts, got {max(arguments.batch)}")
    target = LeanLlama(model)
    drafter = drafter_of(model, tokenizer, arguments)
    costs = costs_of(target, tokenizer, drafter, next(iter(texts.values()))[0], arguments)
    rows: list[dict[str, Any]] = []
    everything: list[Answer] = []
    with tqdm(total=len(texts) * len(arguments.temperatures), unit="set", disable=None) as bar:
        for name, chosen in texts.items():
            for temperature in arguments.temperatures:
                answers = written(target, tokenizer, drafter, chosen, temperature, arguments.max_new_tokens)
                everything += answers
                for batch, (steps, catch_up) in costs.items():
                    found = compared(answers, batch, arguments.batches, steps, arguments.max_new_tokens, catch_up)
                    rows += [{"prompts": name, "temperature": temperature, "batch": batch, **row} for row in found]
                    with tqdm.external_write_mode():
                        print(line(rows[-len(found) :]), flush=True)
                bar.update()
    matches = [] if everything[0].matched is None else by_match(everything)
    for row in matches:
        print(f"{row['matched']}+ tokens found again: the next right {row['first']:.2f}, the later {row['later']:.2f}")
    settings = real_model.settings(arguments) | {
        "costs of steps": {batch: steps.tolist() for batch, (steps, _) in costs.items()},
        "cost of catching up": {batch: catch_up for batch, (_, catch_up) in costs.items()},
    }
    print(f"written: {machine.save(arguments.output, arguments.name, rows + matches, settings)}")


def line(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a set, temperature and batch size for people."""
    of = rows[0]
    each = "  ".join(f"K={row['num_speculative_tokens']} {row['ratio']:.2f}" for row in rows[1:])
    what = f"{of['prompts']:10} T={of['temperature']:g} batch {of['batch']}"
    return f"{what}: {each} (a tenth below {rows[-1]['ratio_low']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
