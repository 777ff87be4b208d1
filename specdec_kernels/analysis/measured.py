"""What is measured: acceptance by position with its confidence, and what a step costs by rows and batch size."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from ..checks import (
    ID_DTYPES,
    check_callable,
    check_given,
    check_id_tensor,
    check_instance,
    check_int,
    check_mapping,
    check_sequence,
    shape_error,
)
from ..decoding.request import MAX_SPECULATIVE_TOKENS
from ..drafters.base import Drafter, TreeDrafter
from ..drafters.none import NoDrafter
from ..integrations.runners import as_runner
from ..sampling import SamplingParams
from ..types import MASK_DTYPES
from .theory import expected_tokens_by_position
from .watching import Clock, Unlikely, Watched, watch

__all__ = ["Acceptance", "Estimate", "StepCosts", "Watched", "measure_acceptance", "measure_costs", "watch"]

Advance = Callable[[], Any]
CONFIDENCE = 0.95
_CONTEXT = 128  # tokens of each prompt, at most, that costs are measured after; prefill is not measured


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval of 95 % confidence; without observations a share is all NaN.

    Where a mean is over steps of several prompts, the interval allows for what a prompt's steps have in common. With
    two or three prompts it is wide, and it can only guess what other prompts would give: where a few prompts accept far
    more than the others, as copied text does, six or eight prompts tell too little, and the interval errs low.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How often a drafter's tokens are accepted, as `watch` saw it.

    Attributes
    ----------
    steps : ndarray
        ``[num_steps, longest]`` float64, `Watched.acceptance`.
    sequence : ndarray
        ``[num_steps]`` int64: which prompt each step is of an answer to.
    """

    steps: NDArray[np.float64]
    sequence: NDArray[np.int64]

    @staticmethod
    def of(watched: Sequence[Watched]) -> Acceptance:
        """All steps of several generations.

        Raises
        ------
        TypeError
            Not a sequence of `Watched`.
        """
        check_sequence("Acceptance", "watched", watched, Watched, "Watched", least=0)
        widest = max((w.acceptance.shape[1] for w in watched), default=0)
        steps = [
            np.pad(w.acceptance, ((0, 0), (0, widest - w.acceptance.shape[1])), constant_values=np.nan) for w in watched
        ]
        firsts = np.cumsum([0, *(w.sequence.max(initial=-1) + 1 for w in watched)])
        sequence = [w.sequence + first for w, first in zip(watched, firsts, strict=False)]
        return Acceptance(np.concatenate(steps or [np.zeros((0, 0))]), np.concatenate(sequence or [np.zeros(0, int)]))

    @property
    def longest(self) -> int:
        """The most draft tokens that a step had room for."""
        return self.steps.shape[1]

    @property
    def drafted_share(self) -> float:
        """Share of the steps in which the drafter had something to propose."""
        return float((self.steps[:, 0] >= 0).mean()) if self.steps.size else 0.0

    @property
    def alpha(self) -> Estimate:
        """α: the mean over all draft tokens that were judged."""
        judged = self.steps >= 0
        return self._share(np.where(judged, self.steps, 0.0).sum(1), judged.sum(1))

    def by_position(self) -> list[Estimate]:
        """For each position, how often a step that got there has a draft token accepted; a step without one counts as
        0.
        """
        found = []
        for column in self.steps.T:
            reached = ~np.isnan(column)
            found.append(self._share(np.where(reached, column.clip(min=0), 0.0), reached))
        return found

    def _share(self, accepted: NDArray[np.float64], counted: NDArray[Any]) -> Estimate:
        """The share that was accepted of those counted in each step. From two prompts on, the interval allows for what
        steps of one prompt have in common; it is no narrower than Clopper and Pearson's for independent ones.
        """
        independent = _of_shares(float(accepted.sum()), int(counted.sum()))
        sums = self._by_prompt(np.stack([accepted, counted], -1))
        sums = sums[sums[:, 1] > 0]
        if len(sums) < 2:
            return independent
        found = _of_prompts(sums, lambda total: float(total[0] / total[1]))
        low, high = min(found.low, independent.low), max(found.high, independent.high)
        return Estimate(independent.mean, max(low, 0.0), min(high, 1.0))

    def _by_prompt(self, of_steps: NDArray[Any]) -> NDArray[np.float64]:
        """Sums over the steps of each prompt, ``[prompts, ...]``."""
        owners, which = np.unique(self.sequence, return_inverse=True)
        sums = np.zeros((len(owners), *of_steps.shape[1:]))
        np.add.at(sums, which, of_steps)
        return sums

    def means(self) -> NDArray[np.float64]:
        """``[longest]`` float64, the means of `by_position`; 0 at positions that no step reached."""
        return np.nan_to_num([estimate.mean for estimate in self.by_position()])

    def expected_tokens(self) -> Estimate:
        """Tokens a step by `expected_tokens_by_position`; the interval is over prompts, NaN where there is one. Without
        observations (1, NaN, NaN).

        Where all prompts have the same mean, the interval is that of drafts with every position at one end of its
        interval.
        """
        mean = float(expected_tokens_by_position(self.means()))
        known = ~np.isnan(self.steps)
        sums = self._by_prompt(np.stack([np.where(known, self.steps.clip(min=0), 0.0), known], 1))
        if len(sums) < 2 or not self.longest:
            return Estimate(mean, float("nan"), float("nan"))

        def tokens(total: NDArray[np.float64]) -> float:  # of all prompts but one, which rounding may put above 1
            return float(expected_tokens_by_position((total[0] / np.maximum(total[1], 1)).clip(0.0, 1.0)))

        found = _of_prompts(sums, tokens)
        if found.high - found.low <= 1e-9 * mean:  # up to rounding
            shares = self.by_position()
            ends = (np.nan_to_num([getattr(share, end) for share in shares]) for end in ("low", "high"))
            found = Estimate(mean, *(float(expected_tokens_by_position(each)) for each in ends))
        return Estimate(mean, max(found.low, 1.0), min(found.high, 1.0 + self.longest))


def _of_prompts(sums: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], float]) -> Estimate:
    """A statistic of sums over two prompts or more, with the jackknife's standard error and Student's t: a bootstrap of
    few prompts is too narrow.
    """
    total, count = sums.sum(0), len(sums)
    without = np.array([statistic(total - one) for one in sums])
    error = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    mean = statistic(total)
    return Estimate(mean, mean - reach, mean + reach)


def _of_shares(total: float, count: int) -> Estimate:
    """The mean of `count` numbers in [0, 1] that sum to `total`."""
    if not count:
        return Estimate(float("nan"), float("nan"), float("nan"))
    tail = (1 - CONFIDENCE) / 2
    low = stats.beta.ppf(tail, total, count - total + 1) if total > 0 else 0.0
    high = stats.beta.ppf(1 - tail, total + 1, count - total) if total < count else 1.0
    return Estimate(total / count, float(low), float(high))


def measure_acceptance(
    model: Any,
    batches: Sequence[tuple[Tensor, Tensor | None]],
    drafter: Drafter,
    *,
    sampling: SamplingParams,
    num_speculative_tokens: int,
    max_new_tokens: int,
    acceptance: str = "token",
    draws: int = 1,
    advance: Advance = lambda: None,
) -> Acceptance:
    """Decode prompts with a drafter, and note how likely each of its tokens was to be accepted.

    Parameters
    ----------
    model, drafter, sampling, num_speculative_tokens, max_new_tokens, acceptance
        As of `generate`, but `num_speculative_tokens` must be an integer.
    batches : sequence of (Tensor, Tensor or None)
        Input ids and attention mask of each, ``[batch, prompt]``.
    draws : int
        Answers to each prompt, with other seeds.
    advance : callable
        Called after each batch.

    Raises
    ------
    ValueError, TypeError
        As `generate`.
    """
    check_batches("measure_acceptance", batches)
    check_instance("measure_acceptance", "drafter", drafter, Drafter, "a Drafter (NoDrafter() for none)")
    check_callable("measure_acceptance", "advance", advance)
    check_int("measure_acceptance", "draws", draws, 1, 2**31 - 1)
    firsts = np.cumsum([0, *(len(ids) for ids, _ in batches)])
    apart = max(1000, *(len(ids) for ids, _ in batches))
    seen, owners = [], []
    for i, (ids, mask) in enumerate(list(batches) * draws):
        seeds = torch.arange(len(ids)) + apart * i
        seen.append(
            watch(
                model, ids, drafter=drafter, attention_mask=mask, sampling=sampling, seeds=seeds,
                num_speculative_tokens=num_speculative_tokens, max_new_tokens=max_new_tokens, acceptance=acceptance,
            )
        )  # fmt: skip
        owners.append(seen[-1].sequence + firsts[i % len(batches)])
        advance()
    return Acceptance(Acceptance.of(seen).steps, np.concatenate(owners))


def check_batches(caller: str, batches: object) -> None:
    """Raise unless pairs of input ids and attention mask, one or more; `generate` checks their contents."""
    check_sequence(caller, "batches", batches, tuple, "(input ids, attention mask)")
    for pair in cast(Sequence[tuple[Any, ...]], batches):
        if len(pair) != 2 or not isinstance(pair[0], Tensor) or not isinstance(pair[1], (Tensor, type(None))):
            got = ", ".join(type(part).__name__ for part in pair)
            raise TypeError(f"{caller}: batches must be a sequence of (input ids, attention mask), got ({got})")


def check_measuring(
    caller: str, drafters: object, lengths: object, rounds: object, clock: object, advance: object
) -> None:
    """Raise for the first wrong argument of those that `measure_costs` and `plan` both take."""
    check_mapping(caller, "drafters", drafters, str, Drafter, "names to drafters")
    check_sequence(caller, "lengths", lengths, int, "integers")
    for length in cast(Sequence[int], lengths):
        check_int(caller, "lengths", length, 1, MAX_SPECULATIVE_TOKENS)
    check_int(caller, "rounds", rounds, 1, 2**31 - 1)
    check_callable(caller, "clock", clock)
    check_callable(caller, "advance", advance)


@dataclass(frozen=True)
class StepCosts:
    """What a step of a batch costs, in seconds of the clock.

    Attributes
    ----------
    batch_size : int
    steps : dict
        Rows a sequence, or a tree drafter's name, to the seconds of a step without drafting: the target's forward on so
        many rows, verification, the loop. Key 1 is plain decoding. Medians.
    drafting : dict
        (A drafter's name, draft tokens) to the seconds of drafting a step; of a tree its depth. Means.
    """

    batch_size: int
    steps: dict[int | str, float]
    drafting: dict[tuple[str, int], float]

    def verification(self, rows: int | str) -> float:
        """Time of such a step, drafting not counted, over plain decoding's.

        Raises
        ------
        ValueError
            `rows` that were not measured.
        """
        _check_key("rows", rows, self.steps)
        return self.steps[rows] / self.steps[1]

    def c(self, name: str, length: int) -> float:
        """c of this drafter: seconds a draft token over those of a plain step (definition 3.7).

        Raises
        ------
        ValueError
            A drafter or a length that was not measured.
        """
        _check_key("name", name, {known for known, _ in self.drafting})
        _check_key("length", length, {known for of, known in self.drafting if of == name})
        return self.drafting[name, length] / (max(length, 1) * self.steps[1])


def _check_key(argument: str, key: object, known: Collection[object]) -> None:
    if isinstance(key, bool) or not isinstance(key, (int, str)) or key not in known:
        raise ValueError(f"StepCosts: {argument} must be one of {sorted(known, key=str)}, got {key!r:.40}")


def measure_costs(
    model: Any,
    input_ids: Tensor,
    drafters: Mapping[str, Drafter],
    *,
    attention_mask: Tensor | None = None,
    lengths: Sequence[int],
    batch_size: int,
    rounds: int = 3,
    steps: int = 8,
    clock: Clock = time.perf_counter,
    advance: Advance = lambda: None,
) -> StepCosts:
    """Time steps of `batch_size` sequences, plain and with drafts of each length, all in turn in every round.

    Steps are greedy, after at most the last 128 tokens of each prompt: steps after a longer text cost more, by what
    attention takes. The costs of verifying a chain are those of a draft that costs nothing and has no distribution.

    Parameters
    ----------
    model
        As of `generate`.
    input_ids : Tensor
        ``[num_prompts, prompt]`` int64 or int32: decoding begins after the last of these, taken in turn.
    drafters : mapping
        Names to drafters; none: plain decoding and `lengths` alone are timed.
    attention_mask : Tensor, optional
        ``[num_prompts, prompt]`` of 0 and 1, zeros on the left; None: no padding. As of `generate`.
    lengths : sequence of int
        Draft tokens a step, >= 1.
    batch_size, rounds, steps : int
        >= 1; `steps` of each way a round, at most 2^20.
    clock : callable
        See `watch`.
    advance : callable
        Called after each way in each round.

    Raises
    ------
    ValueError, TypeError
        As `generate`; a drafter of trees that drafted none.
    """
    check_measuring("measure_costs", drafters, lengths, rounds, clock, advance)
    check_int("measure_costs", "batch_size", batch_size, 1, 2**31 - 1)
    check_int("measure_costs", "steps", steps, 1, 2**20)
    check_id_tensor("measure_costs", "input_ids", input_ids, ID_DTYPES)
    if input_ids.dim() != 2 or len(input_ids) < 1:
        raise shape_error("measure_costs", "input_ids", "[num_prompts >= 1, prompt]", input_ids)
    if attention_mask is not None:
        names, shape = ("num_prompts", "prompt"), tuple(input_ids.shape)
        check_given("measure_costs", "attention_mask", attention_mask, MASK_DTYPES, input_ids.device, names, shape)
    # A drafter's name, the drafter, its draft tokens, and the rows of a step that drafts.
    ways: list[tuple[str | None, Drafter, int, int]] = [(None, NoDrafter(), 0, 1)]
    ways += [(None, Unlikely(), k, k + 1) for k in lengths]
    for name, drafter in drafters.items():
        if isinstance(drafter, TreeDrafter):
            ways.append((name, drafter, drafter.max_depth, drafter.num_nodes))
        else:
            ways += [(name, drafter, k, k + 1) for k in lengths]

    # So that every step has room for a whole draft, including the first one, which is not counted.
    wanted = {length: (steps + 1) * (length + 1) + 1 for _, _, length, _ in ways}
    runners = [as_runner(model, "measure_costs"), *(d.runner for d in drafters.values() if d.runner is not None)]
    held = min((r.max_length for r in runners if r.max_length is not None), default=2**31 - 1)
    context = min(_CONTEXT, input_ids.shape[1], max(held - max(wanted.values()), 1))
    chosen = torch.arange(batch_size) % len(input_ids)
    ids = input_ids[chosen, -context:]
    if attention_mask is None and context < input_ids.shape[1]:
        attention_mask = torch.ones_like(input_ids)  # a cut row may begin with the padding id
    mask = None if attention_mask is None else attention_mask[chosen, -context:]
    seconds: defaultdict[int | str, list[float]] = defaultdict(list)
    drafting: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(ways)
        for way, drafter, length, rows in ways:
            seen = watch(
                model, ids, drafter=drafter, clock=clock, acceptances=False, attention_mask=mask, eos_token_id=[],
                sampling=SamplingParams(0.0), num_speculative_tokens=length, stop=_after(steps + 1),
                max_new_tokens=min(wanted[length], max(held - context, 1)),
            )  # fmt: skip
            counted = seen.seconds[1:]  # the first step may prepare something
            if way is None or isinstance(drafter, TreeDrafter):
                # A tree may have fewer nodes than the drafter's at most.
                drafts = seen.rows[1:] == rows if way is None else seen.rows[1:] > 1
                seconds[way or rows] += counted[drafts, 1:].sum(1).tolist()
            if way is not None:
                drafting[way, length] += counted[:, 0].tolist()
            advance()
    if nothing := [key for key, values in seconds.items() if not values]:
        raise ValueError(f"measure_costs: drafters must draft a tree after input_ids, got none from {nothing[0]!r}")
    return StepCosts(
        batch_size,
        {key: float(np.median(values)) for key, values in seconds.items()},
        {key: float(np.mean(values)) for key, values in drafting.items()},
    )


def _after(steps: int) -> Callable[[list[NDArray[np.int64]]], list[int | None]]:
    """Ends all sequences after so many steps, for ``stop`` of `generate`."""
    numbers = itertools.count(1)

    def stop(tokens: list[NDArray[np.int64]]) -> list[int | None]:
        over = next(numbers) >= steps
        return [len(new) if over else None for new in tokens]

    return stop
