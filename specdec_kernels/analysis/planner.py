"""Which drafter, and how many draft tokens: predicted from measured acceptances and costs, and simulated."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..checks import check_array, check_flag, check_int, check_mapping, check_number, check_one_of, check_sequence
from ..decoding.arguments import check_own_runner
from ..decoding.request import Request, check_room
from ..drafters.base import Drafter, TreeDrafter
from ..integrations.runners import as_runner
from ..sampling import SamplingParams
from .measured import (
    Acceptance,
    Estimate,
    StepCosts,
    check_batches,
    check_measuring,
    measure_acceptance,
    measure_costs,
)  # fmt: skip
from .theory import walltime_improvement
from .watching import Clock

__all__ = ["LENGTHS", "PLAIN", "Choice", "Plan", "count_runs", "plan", "simulate"]

LENGTHS = (1, 3, 7)
"""Draft tokens a step that are compared, which makes 2, 4 and 8 rows."""
PLAIN = "none"
"""The name of plain decoding in the place of a drafter's."""


@dataclass(frozen=True)
class Choice:
    """One way of decoding, and what it should gain.

    Attributes
    ----------
    temperature : float
    batch_size : int
    drafter : str
    num_speculative_tokens : int
        K of a chain, the depth of a tree.
    rows : int
        Rows a sequence that a drafting step verifies.
    alpha : Estimate
        Mean acceptance of a judged draft token, over all positions.
    c : float
        Time of drafting one token over a plain step's.
    verification : float
        Time of verifying over a plain step's.
    drafted_share : float
        Share of a sequence's steps in which the drafter has something to propose. A step of a batch is a plain one if
        it has nothing for any sequence; with a tree, none is.
    tokens_per_step : Estimate
    gain : Estimate
        Tokens a second over plain decoding's: ``tokens_per_step`` over the mean time of a step, in plain steps.
    gain_by_alpha : float
        The same by theorem 3.8 alone, from `alpha`, `c` and `verification`, as if all positions were alike and each
        step drafted.
    simulated : Estimate
        The mean gain of simulated answers, and the range that holds 95 % of them.
    """

    temperature: float
    batch_size: int
    drafter: str
    num_speculative_tokens: int
    rows: int
    alpha: Estimate
    c: float
    verification: float
    drafted_share: float
    tokens_per_step: Estimate
    gain: Estimate
    gain_by_alpha: float
    simulated: Estimate


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes
    ----------
    choices : list of Choice
        Every drafter and number of draft tokens, by temperature and batch size.
    acceptances : dict
        (Temperature, drafter, draft tokens) to its `Acceptance`. Each length is measured by itself: where acceptance
        comes in runs, steps of short drafts begin within a run more often than those of long ones.
    costs : dict
        Batch size to its `StepCosts`, measured on the first batch of prompts.
    """

    choices: list[Choice] = field(default_factory=list)
    acceptances: dict[tuple[float, str, int], Acceptance] = field(default_factory=dict)
    costs: dict[int, StepCosts] = field(default_factory=dict)

    def best(self, temperature: float, batch_size: int) -> Choice | None:
        """The choice of the largest gain; None where plain decoding is best.

        The largest of several estimates is overrated: look at its interval, and measure that choice once more.

        Raises
        ------
        ValueError, TypeError
            A temperature and batch size that were not planned.
        """
        check_number("Plan", "temperature", temperature, 0, float("inf"))
        check_int("Plan", "batch_size", batch_size, 1, None)
        found = [c for c in self.choices if (c.temperature, c.batch_size) == (temperature, batch_size)]
        if not found:
            known = sorted({(c.temperature, c.batch_size) for c in self.choices})
            raise ValueError(
                f"Plan: temperature and batch_size must be one of the pairs planned, {known}, got "
                f"({temperature}, {batch_size})"
            )
        return max((c for c in found if c.gain.mean > 1.0), key=lambda c: c.gain.mean, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: "choices", "acceptances" by position, "costs" and "best"; None stands for NaN."""
        acceptances = [
            {
                "temperature": temperature,
                "drafter": name,
                "num_speculative_tokens": length,
                "drafted_share": found.drafted_share,
                "alpha": asdict(found.alpha),
                "by_position": [asdict(estimate) for estimate in found.by_position()],
            }
            for (temperature, name, length), found in self.acceptances.items()
        ]
        costs = [
            {"batch_size": batch, "rows": str(rows), "seconds": seconds}
            for batch, found in self.costs.items()
            for rows, seconds in found.steps.items()
        ]
        cases = dict.fromkeys((c.temperature, c.batch_size) for c in self.choices)
        best = []
        for temperature, batch in cases:
            choice = self.best(temperature, batch)
            best.append(
                {
                    "temperature": temperature,
                    "batch_size": batch,
                    "drafter": choice.drafter if choice else PLAIN,
                    "num_speculative_tokens": choice.num_speculative_tokens if choice else 0,
                    "gain": choice.gain.mean if choice else 1.0,
                }
            )
        found: dict[str, Any] = _without_nan(
            {"best": best, "choices": list(map(asdict, self.choices)), "acceptances": acceptances, "costs": costs}
        )
        return found


def count_runs(
    drafters: Mapping[str, Drafter], num_batches: int, temperatures: Sequence[float], lengths: int, batch_sizes: int,
    rounds: int, draws: int = 1, acceptance: str = "token",
) -> int:  # fmt: skip
    """How many generations `plan` makes, which is how often it calls `advance`.

    `num_batches`, `lengths` and `batch_sizes` say how many there are of each: of batch sizes 0 where `costs` are given.
    The rest is as in `plan`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type; numbers below 0; no temperatures; another `acceptance` than "token" or "greedy".
    """
    check_mapping("count_runs", "drafters", drafters, str, Drafter, "names to drafters")
    _check_temperatures("count_runs", temperatures)
    for name, value in (
        ("num_batches", num_batches), ("lengths", lengths), ("batch_sizes", batch_sizes), ("rounds", rounds),
        ("draws", draws),
    ):  # fmt: skip
        check_int("count_runs", name, value, 0, None)
    trees = sum(isinstance(drafter, TreeDrafter) for drafter in drafters.values())
    ways = trees + (len(drafters) - trees) * lengths
    check_one_of("count_runs", "acceptance", acceptance, ("token", "greedy"))
    answers = sum(_answers(temperature, draws, acceptance) for temperature in temperatures)
    return answers * ways * num_batches + batch_sizes * rounds * (1 + lengths + ways)


def _answers(temperature: float, draws: int, acceptance: str) -> int:
    """How often a prompt is decoded with one drafter and length: greedily it always has the same answer."""
    return 1 if acceptance == "greedy" or SamplingParams(temperature).is_greedy else draws


def _check_temperatures(caller: str, temperatures: object) -> None:
    check_sequence(caller, "temperatures", temperatures, (int, float), "numbers")
    for temperature in cast(Sequence[float], temperatures):
        check_number(caller, "temperatures", temperature, 0, float(np.finfo(np.float32).max))


def plan(
    model: Any,
    batches: Sequence[tuple[Tensor, Tensor | None]],
    drafters: Mapping[str, Drafter],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    lengths: Sequence[int] = LENGTHS,
    batch_sizes: Sequence[int] = (1, 8),
    max_new_tokens: int = 64,
    rounds: int = 3,
    draws: int = 1,
    acceptance: str = "token",
    costs: Mapping[int, StepCosts] | None = None,
    clock: Clock = time.perf_counter,
    advance: Callable[[], Any] = lambda: None,
) -> Plan:
    """Measure acceptances and costs, and predict the gain of every drafter, draft length and batch size.

    Parameters
    ----------
    model
        As of `generate`.
    batches : sequence of (Tensor, Tensor or None)
        The prompts: input ids and attention mask of each batch, ``[batch, prompt]``. Acceptances are measured on all of
        them, costs on the first batch alone, as `measure_costs` does: after at most 128 tokens; for longer prompts,
        where attention counts, hand in `costs` of your own.
    drafters : mapping
        Names to drafters, at least one.
    temperatures, lengths, batch_sizes : sequence
        What is compared; of a tree drafter `lengths` are not looked at.
    max_new_tokens : int
        Of each answer; the simulated ones have as many.
    rounds : int
        Times that each way is timed at each batch size.
    draws : int
        Sampled answers to each prompt, with different seeds: one answer of a few dozen tokens tells little about how
        often a draft token is accepted.
    acceptance : str
        Rule of `generate`, "token" or "greedy".
    costs : mapping, optional
        Batch size to what `measure_costs` found before, for these drafters and lengths at least: nothing is timed then,
        and `batch_sizes` and `rounds` have no effect.
    clock : callable
        See `watch`.
    advance : callable
        Called after each generation: as often as `count_runs` says, of no batch sizes where `costs` are given.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError, TypeError
        As `generate`; no drafter, no prompt, costs of no batch size, or a drafter that is called "none".
    """
    runner = as_runner(model, "plan")
    check_batches("plan", batches)
    check_measuring("plan", drafters, lengths, rounds, clock, advance)
    _check_temperatures("plan", temperatures)
    check_sequence("plan", "batch_sizes", batch_sizes, int, "integers")
    for batch_size in batch_sizes:
        check_int("plan", "batch_sizes", batch_size, 1, 2**31 - 1)
    check_int("plan", "max_new_tokens", max_new_tokens, 1, 2**31 - 1)
    check_int("plan", "draws", draws, 1, 2**31 - 1)
    if costs is not None:
        check_mapping("plan", "costs", costs, int, StepCosts, "batch sizes to StepCosts")
        if not costs:
            raise ValueError("plan: costs must be of one batch size or more (None: they are measured), got {}")
    if not drafters or PLAIN in drafters:
        raise ValueError(f"plan: drafters must be one or more, none of them called {PLAIN!r}, got {list(drafters)}")
    check_one_of("plan", "acceptance", acceptance, ("token", "greedy"))
    for batch_size, known in (costs or {}).items():
        if 1 not in known.steps or not all(0 < seconds < math.inf for seconds in known.steps.values()):
            what = f"the time of a plain step, and times > 0, for batch size {batch_size}"
            raise ValueError(f"plan: costs must have {what}, and have not")
        for name, drafter in drafters.items():
            for length, _, key in _ways(name, drafter, lengths):
                if (name, length) not in known.drafting or key not in known.steps:
                    what = f"{name!r} with {length} draft tokens for batch size {batch_size}"
                    raise ValueError(f"plan: costs must have {what}, and have not")
    for ids, mask in batches:  # before anything is timed, for minutes
        request = Request(ids, mask, SamplingParams(), None, max_new_tokens, None)
        request.check("plan", runner)
        for drafter in drafters.values():
            check_own_runner("plan", runner, drafter)
            if drafter.runner is not None:
                check_room("plan", drafter.runner, request.prompt(runner).longest + max_new_tokens)
    found = Plan(costs=dict(costs or {}))
    for batch_size in () if costs else batch_sizes:
        found.costs[batch_size] = measure_costs(
            model, batches[0][0], drafters, attention_mask=batches[0][1], lengths=lengths, batch_size=batch_size,
            rounds=rounds, clock=clock, advance=advance,
        )  # fmt: skip
    for temperature in temperatures:
        for name, drafter in drafters.items():
            for length, rows, key in _ways(name, drafter, lengths):
                seen = found.acceptances[temperature, name, length] = measure_acceptance(
                    model, batches, drafter, sampling=SamplingParams(temperature), num_speculative_tokens=length,
                    max_new_tokens=max_new_tokens, acceptance=acceptance,
                    draws=_answers(temperature, draws, acceptance), advance=advance,
                )  # fmt: skip
                for batch_size, known in found.costs.items():
                    how = (temperature, batch_size, name, length, rows)
                    found.choices.append(_choice(how, seen, known, key, max_new_tokens))
    return found


def _ways(name: str, drafter: Drafter, lengths: Sequence[int]) -> Iterator[tuple[int, int, int | str]]:
    """Draft tokens, rows, and what `StepCosts.steps` has their time under."""
    if isinstance(drafter, TreeDrafter):
        yield drafter.max_depth, drafter.num_nodes, name
    else:
        yield from ((length, length + 1, length + 1) for length in lengths)


def _choice(
    how: tuple[float, int, str, int, int], seen: Acceptance, costs: StepCosts, key: int | str, max_new_tokens: int
) -> Choice:
    _, batch_size, name, length, _ = how
    drafting = costs.drafting[name, length] / costs.steps[1]
    verification, share = costs.verification(key), seen.drafted_share
    plain_share = 0.0 if isinstance(key, str) else (1.0 - share) ** batch_size  # a tree is verified at every step
    step = drafting + plain_share + (1.0 - plain_share) * verification
    tokens = seen.expected_tokens()
    alpha, c = seen.alpha, costs.c(name, length)
    return Choice(
        *how, alpha, c, verification, share, tokens,
        Estimate(tokens.mean / step, tokens.low / step, tokens.high / step),
        float(walltime_improvement(np.nan_to_num(alpha.mean), length, c, verification)),
        simulate(
            seen.means(), share, drafting, verification, batch_size, max_new_tokens, always=isinstance(key, str)
        ),
    )  # fmt: skip


def simulate(
    acceptances: NDArray[np.float64], drafted_share: float, drafting: float, verification: float, batch_size: int,
    num_tokens: int, *, always: bool = False, answers: int = 400, seed: int = 0,
) -> Estimate:  # fmt: skip
    """The gain of simulated answers, token by token: with their ends, and a batch that waits for its slowest.

    Parameters
    ----------
    acceptances : ndarray
        ``[length]``: `Acceptance.means`.
    drafted_share : float
        How often there is a draft, independently of what went before.
    drafting, verification : float
        Times of drafting and of verifying a draft, in plain steps.
    batch_size, num_tokens : int
        Sequences decoded together; tokens of each.
    always : bool
        A step without a draft costs as much as one with it.
    answers : int
        Batches simulated.
    seed : int

    Returns
    -------
    Estimate
        The mean gain over plain decoding, and the range of 95 % of the batches.

    Raises
    ------
    TypeError, ValueError
        An argument of another type or shape; acceptances or a share outside [0, 1]; times below 0 or above 10^9,
        of verification 0, too; counts below 1, a seed below 0.
    """
    check_array("simulate", "acceptances", acceptances, "f", "[length] float64")
    if acceptances.ndim != 1 or not ((acceptances >= 0) & (acceptances <= 1)).all():
        raise ValueError(f"simulate: acceptances must be [length] numbers in [0, 1], got {acceptances}")
    check_number("simulate", "drafted_share", drafted_share, 0, 1)
    check_number("simulate", "drafting", drafting, 0, 1e9)
    check_number("simulate", "verification", verification, sys.float_info.min, 1e9)
    for name, value in (("batch_size", batch_size), ("num_tokens", num_tokens), ("answers", answers)):
        check_int("simulate", name, value, 1, 2**31 - 1)
    check_flag("simulate", "always", always)
    check_int("simulate", "seed", seed, 0, None)
    random = np.random.default_rng(seed)
    accepting = acceptances.copy()
    if drafted_share > 0 and len(accepting):
        accepting[0] = min(1.0, accepting[0] / drafted_share)  # where there is a draft
    left = np.full((answers, batch_size), num_tokens)
    spent = np.zeros(answers)
    while (left > 0).any():
        drafts = (random.random(left.shape) < drafted_share) & (left > 1)
        passed = random.random((*left.shape, len(accepting))) < accepting
        accepted = np.where(drafts, passed.cumprod(-1).sum(-1), 0)
        running, asked = (left > 0).any(1), (left > 1).any(1)
        verified = asked if always else drafts.any(1)
        spent += running * (asked * drafting + np.where(verified, verification, 1.0))
        left -= np.minimum(accepted + 1, left)
    gains = num_tokens / spent
    low, high = np.quantile(gains, [0.025, 0.975])
    return Estimate(float(num_tokens / spent.mean()), float(low), float(high))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value
