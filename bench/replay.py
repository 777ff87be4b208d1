"""``python -m bench.replay``: "auto" on many answers of the real model, replayed from the costs of steps.

`bench.answers` says how many tokens of each draft would be accepted, so that a schedule can be run without the model if
it is told what a step costs: 1 for a plain step, and for one with drafts what
`specdec_kernels.analysis.measured.measure_costs` finds first, or an earlier replay found, or ``--costs`` says, with
noise. (Before a draft model drafts again it must be fed what plain steps wrote; if costs are measured, that counts as
the time of one draft token.) For each batch size some batches of answers are drawn, and the whole time with fixed
numbers of draft tokens, and with "auto", is compared with plain decoding's. The other work of "auto" on the host is not
included: `bench.end_to_end` measures that, on the few batches that there is time for.

For a drafter that foresees, it also reports how often it was right, by how much of the text it found again: what
`MatchYield` assumes at first is below what ``--drafter lookup-16`` gives and, if nothing was found, ``--drafter
ngram-lm``. Writes ``replay.json`` into the machine's results folder.
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import machine, real_model
from bench.answers import Answer, add_drafter, check_drafter, load
from examples.own_loop import LeanLlama
from specdec_kernels import assets
from specdec_kernels.analysis import measured
from specdec_kernels.assets import prompts
from specdec_kernels.decoding import StepResult
from specdec_kernels.decoding.costs import AUTO_DRAFT_LENGTHS, LearnedCosts
from specdec_kernels.decoding.foresight import ForesightSchedule, MatchYield
from specdec_kernels.decoding.schedule import AutoSchedule, FixedSchedule, Schedule
from specdec_kernels.drafters import Foresight
from specdec_kernels.options import POSITIVE, existing, number

Costs = dict[int, tuple[NDArray[np.float64], float]]
"""In plain steps, by batch size: of steps with `AUTO_DRAFT_LENGTHS`, drafting and verifying, and of catching up."""

NOISE = 0.05  # of a step's time, as a standard deviation of its logarithm
CALLS = 10  # in a row, which learn what steps cost; then another first call


def replayed(
    answers: Sequence[Answer],
    schedule: Schedule,
    costs: NDArray[np.float64],
    random: np.random.Generator,
    new_tokens: int,
    catch_up: float = 0.0,
) -> float:
    """The time of all answers together, in plain steps; as far as decoding knows, each may get so many tokens.

    `catch_up` is the additional time of the first draft after plain steps.
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
            schedule.look(Foresight(np.where(limits > 0, 1, -1), np.array(matched)))
        drafted = np.minimum(limits, schedule.next())
        width = schedule.round_up(int(drafted.max()))
        accepted = np.minimum(right, drafted)
        emitted = np.minimum(accepted + 1, left)  # there is no token after an answer's end
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
    seed: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """One row for each number of draft tokens, and for "auto", whose batches follow one another as calls do."""
    random = np.random.default_rng(seed)
    chosen = [random.permutation(len(answers))[:batch] for _ in range(batches)]
    times: dict[int | str, list[float]] = {way: [] for way in (*AUTO_DRAFT_LENGTHS, "auto")}
    adaptive = AutoSchedule if answers[0].matched is None else ForesightSchedule
    for i, each in enumerate(chosen):
        if i % CALLS == 0:
            learned = LearnedCosts.assumed(answers[0].matched is None, batch, None, 1, on_gpu=False)
        texts = [answers[which] for which in each]
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
    """How often a draft's first token was right, and one after right ones, by the number of tokens found again."""
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
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description='What "auto" gains, by many answers.')
    parser.add_argument(
        "--answers", type=existing, metavar="FILE", default=machine.RESULTS / machine.label() / "answers.npz",
        help="of python -m bench.answers (default: the machine's)",
    )  # fmt: skip
    add_drafter(parser, default="lookup")
    parser.add_argument("--max-new-tokens", type=POSITIVE, help="of each answer, the first (default: all)")
    parser.add_argument("--draws", type=POSITIVE, default=20, help="batches drawn for each batch size (default 20)")
    parser.add_argument("--batch", nargs="+", type=POSITIVE, default=[1, 2, 4, 8], help="sizes (default 1 2 4 8)")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--costs", nargs="+", type=number(1, 1e3), help="of a step with 1, 3 and 7 draft tokens, for each batch size"
    )
    costs.add_argument("--costs-of", type=existing, metavar="FILE", help="a replay.json: costs as it has them")
    parser.add_argument("--name", default="replay", help="of the result file (default replay)")
    real_model.add_common(parser, rounds=12)
    arguments = parser.parse_args(argv)
    sizes, given = len(arguments.batch), arguments.costs
    if given is not None and len(given) != 3 * sizes:
        parser.error(f"--costs must be three for each of {sizes} batch sizes, got {len(given)}")
    if given is None and arguments.costs_of is None:
        check_drafter(parser, [arguments.drafter], arguments.draft_model)
    elif arguments.draft_model is not None:
        parser.error("--draft-model must be left out where costs are given, got it")
    return real_model.run("replay", arguments, _replayed)


def costs_of(arguments: argparse.Namespace) -> Costs:
    """As given, or measured on the model."""
    if arguments.costs is not None:
        rows = np.array(arguments.costs).reshape(-1, 3)
        return {batch: (np.array([1.0, *row]), 0.0) for batch, row in zip(arguments.batch, rows, strict=True)}
    if arguments.costs_of is not None:
        found = json.loads(arguments.costs_of.read_text()).get("settings", {})
        if "cost of catching up" not in found:
            raise ValueError(f"--costs-of must be what a replay has written, got {arguments.costs_of}")
        steps, catch_up = found["costs of steps"], found["cost of catching up"]
        if lacking := [batch for batch in arguments.batch if str(batch) not in steps]:
            raise ValueError(f"--batch must be of those that --costs-of has, {', '.join(steps)}, got {lacking[0]}")
        return {batch: (np.array(steps[str(batch)]), catch_up[str(batch)]) for batch in arguments.batch}
    model, tokenizer = assets.load_model()
    (drafter,) = real_model.drafters_of([arguments.drafter], model, tokenizer, arguments.draft_model).values()
    ids, mask = prompts.encode(tokenizer, prompts.load_prompts(prompts.PROMPT_SETS[0], tokenizer)[:1])
    measured_costs: Costs = {}
    for batch in arguments.batch:
        costs = measured.measure_costs(
            LeanLlama(model), ids, {"it": drafter}, attention_mask=mask, lengths=AUTO_DRAFT_LENGTHS[1:],
            batch_size=batch, rounds=arguments.rounds,
        )  # fmt: skip
        seconds = np.array(
            [costs.steps[length + 1] + costs.drafting.get(("it", length), 0.0) for length in AUTO_DRAFT_LENGTHS]
        )
        catch_up = costs.drafting["it", 1] / seconds[0] if drafter.runner is not None else 0.0
        measured_costs[batch] = np.maximum.accumulate(seconds / seconds[0]), catch_up
    return measured_costs


def _replayed(arguments: argparse.Namespace) -> None:
    if not arguments.answers.exists():
        raise FileNotFoundError(
            f"--answers must be what python -m bench.answers writes, got {arguments.answers}, not there"
        )
    everything = load(arguments.answers)
    answers = {of[:2]: each for of, each in everything.items() if of[2] == arguments.drafter}
    if not answers:
        known = ", ".join(dict.fromkeys(of[2] for of in everything))
        raise ValueError(f"--drafter must be one that was asked in --answers, {known}, got {arguments.drafter}")
    if max(arguments.batch) > (fewest := min(map(len, answers.values()))):
        raise ValueError(f"--batch must be at most {fewest}, which a set has answers, got {max(arguments.batch)}")
    longest = max(len(answer.right) for each in answers.values() for answer in each)
    new_tokens = min(arguments.max_new_tokens or longest, longest)
    costs = costs_of(arguments)
    rows: list[dict[str, Any]] = []
    for place, ((name, temperature), each) in enumerate(answers.items()):
        texts = [answer.first(new_tokens) for answer in each]
        for batch, (steps, catch_up) in costs.items():
            found = compared(texts, batch, arguments.draws, steps, new_tokens, catch_up, seed=(place, batch))
            rows += [{"prompts": name, "temperature": temperature, "batch": batch, **row} for row in found]
            print(line(rows[-len(found) :]), flush=True)
    of_all = [answer for each in answers.values() for answer in each]
    matches = [] if of_all[0].matched is None else by_match(of_all)
    for row in matches:
        print(f"{row['matched']}+ tokens found again: the next right {row['first']:.2f}, the later {row['later']:.2f}")
    settings = real_model.settings(arguments) | {
        "costs of steps": {batch: steps.tolist() for batch, (steps, _) in costs.items()},
        "cost of catching up": {batch: catch_up for batch, (_, catch_up) in costs.items()},
    }
    print(f"written: {machine.save(arguments.output, arguments.name, rows + matches, settings)}")


def line(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one set, temperature and batch size as lines to read."""
    of = rows[0]
    each = "  ".join(f"K={row['num_speculative_tokens']} {row['ratio']:.2f}" for row in rows[1:])
    what = f"{of['prompts']:10} T={of['temperature']:g} batch {of['batch']}"
    return f"{what}: {each} (a tenth below {rows[-1]['ratio_low']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
