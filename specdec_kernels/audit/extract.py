"""The joint distribution that a verifier's steps really have: exactly where its random numbers can be given, else
from samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats

from ..testing import LATTICE, Float64, Int64, Pieces, TreeProblem, joint_of, pieces, target_joint
from .cases import Case
from .noise import Noise, UnknownNoise
from .signatures import Signature
from .step import Problem, draw, step_of

Bool = np.ndarray[Any, np.dtype[np.bool_]]

_MOST_COLUMNS = 6
_CALL_ROWS = 1 << 14
_ONE_BY_ONE = 5000
"""Samples at most of a verifier that takes one sequence a call."""
_MOST_FAILURES = 500
_CHECKED = 600
"""Random noises that the boxes found must predict."""
LEVEL = 1e-7
"""p-values below it are differences."""
_POOLED = 5.0
"""Cells of a G-test that expect fewer are one."""


@dataclass
class Joint:
    """What a verifier emits in a case.

    Attributes
    ----------
    law : ndarray
        ``[n] + [vocab] * num_tokens``: as `specdec_kernels.testing.exact_law`; of samples their frequencies.
    samples : int or None
        How many, of each of the n; None: exact.
    failures : dict of str to float
        What went wrong instead of an answer, and with which probability.
    impossible : dict of tuple to float
        What was emitted although the target cannot give it, with its probability, by emitted tokens. Of trees and
        chains alike the last one is the final token.
    at_ends : bool
        Whether that, and failures, need a uniform at an end of its range.
    dtypes : set of torch.dtype
        Of the uniforms.
    """

    law: Float64
    samples: int | None = None
    failures: dict[str, float] = field(default_factory=dict)
    impossible: dict[tuple[int, ...], float] = field(default_factory=dict)
    at_ends: bool = False
    dtypes: set[torch.dtype] = field(default_factory=set)

    def distance(self, expected: Float64) -> float:
        """The total variation from a distribution, or of several the largest."""
        off = np.abs(self.law - expected).reshape(len(self.law), -1).sum(-1).max() / 2
        return float(off) + sum(self.failures.values()) / 2

    def p_value(self, expected: Float64) -> float:
        """Of a G-test of the samples, with Bonferroni's correction where there are several tests; 1 where exact."""
        if self.samples is None:
            return 1.0
        wanted = np.broadcast_to(expected, self.law.shape)
        found = [g_test(self.samples * law, of) for law, of in zip(self.law, wanted, strict=True)]
        return min(1.0, min(found) * len(found))

    def agrees(self, expected: Float64, tolerance: float) -> bool:
        if self.samples is not None:
            return self.p_value(expected) > LEVEL
        return self.distance(expected) <= tolerance


def g_test(counts: Float64, law: Float64) -> float:
    """The p-value of counts under a distribution; 0 where something impossible was counted."""
    seen, expected = counts.ravel(), law.ravel() * counts.sum()
    if (seen[expected <= 0] > 0).any():
        return 0.0
    seen, expected = seen[expected > 0], expected[expected > 0]
    few = expected < _POOLED
    if few.any():
        seen, expected = np.append(seen[~few], seen[few].sum()), np.append(expected[~few], expected[few].sum())
        if len(expected) > 1 and expected[-1] < _POOLED:  # the rest is itself too rare
            least = expected[:-1].argmin()
            seen[least] += seen[-1]
            expected[least] += expected[-1]
            seen, expected = seen[:-1], expected[:-1]
    if len(expected) < 2:
        return 1.0
    return float(stats.power_divergence(seen, expected * seen.sum() / expected.sum(), lambda_="log-likelihood").pvalue)


class Extractor:
    """Runs one case of a signature's verifier with given or with its own random numbers."""

    def __init__(self, signature: Signature, case: Case, rng: np.random.Generator) -> None:
        self.signature, self.case, self.rng = signature, case, rng
        self.problem: Problem = case.problem
        self.step = step_of(case.problem)
        self.other = None if case.beside is None else step_of(case.beside)
        self.width = self.problem.num_tokens
        self.given = signature.uniforms(self.step.target_probs.shape[1])
        self.batched = signature.batched
        self.kinds: list[str] = []
        self.dtypes: set[torch.dtype] = set()
        self.messages: list[str] = []

    def joint(self, samples: int) -> Joint:
        """Exactly, or from so many samples (of each choice of given tokens)."""
        with torch.random.fork_rng(devices=[]):
            try:
                return self._exact()
            except UnknownNoise:
                return self._sampled(samples)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _ask(self, path: Int64, uniforms: Float64, races: dict[int, Float64] | None, replaced: bool) -> Int64:
        """The outcomes of one call: codes of the tokens emitted (base vocab + 1, −1 as 0), or −1 − a message."""
        step = self.step.take(path)
        if self.other is not None:
            step = step.beside(self.other.take(self.rng.integers(0, self.other.batch, len(path))))
        rows = step.batch
        own = np.repeat(uniforms, rows // len(path), 0)
        step.uniforms = torch.from_numpy(own[:, : self.given].astype(np.float32))
        step.seeds = torch.from_numpy(self.rng.integers(0, 2**62, rows))
        step.positions = torch.full((rows,), 7)
        if not replaced:
            tokens = self.signature.emit(step)
        else:
            vocab = self.problem.vocab
            spread = {c: np.repeat(t, rows // len(path), 0) for c, t in (races or {}).items()}
            with Noise(own[:, self.given :], step.lengths, vocab, spread) as noise:
                tokens = self.signature.emit(step)
            if len(noise.kinds) > len(self.kinds):
                self.kinds = noise.kinds
            self.dtypes |= noise.dtypes
        return self._codes(tokens.cpu().numpy()[rows // len(path) - 1 :: rows // len(path)])

    def _codes(self, tokens: Int64) -> Int64:
        tokens = tokens[:, : self.width]
        tokens = np.pad(tokens, ((0, 0), (0, self.width - tokens.shape[1])), constant_values=-1)
        on = np.cumprod(tokens >= 0, 1).astype(bool)
        vocab = self.problem.vocab
        codes: Int64 = (np.where(on, tokens, -1).clip(-1, vocab - 1) + 1) @ (vocab + 1) ** np.arange(self.width)
        codes[~on[:, 0]] = self._failure("it emits no token")
        codes[((tokens >= vocab) & on).any(1)] = self._failure("it emits an id outside the vocabulary")
        codes[((tokens >= 0) & ~on).any(1)] = self._failure("it emits tokens behind a gap")
        return codes

    def _failure(self, message: str) -> int:
        if message not in self.messages:
            self.messages.append(message)
        return -1 - self.messages.index(message)

    def _codes_of(
        self, path: Int64, uniforms: Float64, races: dict[int, Float64] | None = None, replaced: bool = True
    ) -> Int64:
        """The same for any number of rows, one call each where it must be.

        A call that fails is told apart by halves; after `_MOST_FAILURES` single rows it fails as a whole.
        """
        size = _CALL_ROWS if self.batched else 1
        parts = [slice(i, i + size) for i in range(0, len(path), size)]
        out, failing = np.empty(len(path), np.int64), 0
        while parts:
            part = parts.pop()
            rows = path[part]
            part_races = {c: t[part] for c, t in (races or {}).items()}
            try:
                out[part] = self._ask(rows, uniforms[part], part_races, replaced)
            except UnknownNoise:
                raise
            except Exception as error:
                lines = str(error).splitlines() or [""]
                message = f"it raises {type(error).__name__}: {lines[0][:100]}"
                if len(rows) == 1 or failing >= _MOST_FAILURES:
                    out[part], failing = self._failure(message), failing + 1
                else:
                    middle = part.start + len(rows) // 2
                    parts += [slice(part.start, middle), slice(middle, part.start + len(rows))]
        return out

    # --- exactly ------------------------------------------------------------------------------------------------------

    def _exact(self) -> Joint:
        if self.signature.keyed:
            raise UnknownNoise("keyed by seeds")
        num_paths, hidden = self.step.batch, isinstance(self.problem, TreeProblem)
        paths = np.arange(num_paths)
        for level in (0.5, 0.0, 1 - 2.0**-24):  # how many numbers it asks for
            try:
                self._codes_of(paths, np.full((num_paths, self.given + len(self.kinds)), level))
            except UnknownNoise:
                if not self.batched:
                    raise
                self.batched = False
                self._codes_of(paths, np.full((num_paths, self.given + len(self.kinds)), level))
        columns = max(self.given + len(self.kinds), 1)
        path = np.tile(paths, 1 + 200 // num_paths)
        same = self.rng.integers(0, LATTICE, (len(path), columns)) / LATTICE
        if (self._codes_of(path, same) != self._codes_of(path, same)).any():
            raise UnknownNoise("numbers from elsewhere")
        if columns > _MOST_COLUMNS:
            raise UnknownNoise(f"{columns} random numbers")

        def run(path: Int64, lattice: Int64) -> Int64:
            return self._codes_of(path, lattice / LATTICE)

        for attempt in (hidden, True):
            found = pieces(run, num_paths, columns, attempt)
            races = [self.given + i for i, kind in enumerate(self.kinds) if kind == "race"]
            if races:
                return self._assembled(*self._race(found, races))
            if self._predicts(found):
                at_ends = np.concatenate([_boxes(sides)[2] for sides in found.sides])
                return self._assembled(found.outcome, found.volume, found.path, at_ends)
        raise UnknownNoise("no boxes")

    def _box(self, found: Pieces, path: Int64, uniforms: Float64) -> Int64:
        """The index of the box of each point."""
        sizes = np.array([np.prod([len(s) - 1 for s in sides]) for sides in found.sides])
        starts = sizes.cumsum() - sizes
        out = np.empty(len(path), np.int64)
        for p in np.unique(path):
            here, sides = path == p, found.sides[p]
            places = [np.searchsorted(s, uniforms[here, a] * LATTICE, side="right") - 1 for a, s in enumerate(sides)]
            out[here] = starts[p] + np.ravel_multi_index(places, [len(s) - 1 for s in sides])
        return out

    def _predicts(self, found: Pieces) -> bool:
        columns = len(found.sides[0])
        path = self.rng.integers(0, self.step.batch, _CHECKED)
        uniforms = self.rng.integers(0, LATTICE, (_CHECKED, columns)) / LATTICE
        return bool((self._codes_of(path, uniforms) == found.outcome[self._box(found, path, uniforms)]).all())

    def _race(self, found: Pieces, races: list[int]) -> tuple[Int64, Float64, Int64, Bool]:
        """Boxes of the numbers that are no races, with each race's winners by their true chances.

        Within such a box the favourites' outcomes say whether a race matters; if one does, the ratio of two ids'
        weights is the ratio of times of arrival at which the outcome changes. Random arrivals must then be predicted.
        """
        vocab, others = self.problem.vocab, [a for a in range(len(found.sides[0])) if a not in races]
        made = [_boxes([sides[a] for a in others] or [np.array([0, LATTICE])]) for sides in found.sides]
        boxes, volumes, ends = (np.concatenate(parts) for parts in zip(*made, strict=True))
        owners = np.repeat(np.arange(len(made)), [len(m[1]) for m in made])
        points = np.full((len(boxes), len(found.sides[0])), 0.5)
        if others:
            points[:, others] = boxes / LATTICE
        columns = [race - self.given for race in races]

        def outcome(box: Int64, times: Float64, race: int) -> Int64:
            arrivals = {c: np.ones((len(box), vocab)) for c in columns}
            arrivals[race] = times
            return self._codes_of(owners[box], points[box], arrivals)

        everything = np.arange(len(boxes))
        weights, winners = np.zeros((len(boxes), vocab)), np.zeros((len(boxes), vocab), np.int64)
        weights[:, 0], winners[:] = 1.0, outcome(everything, np.ones((len(boxes), vocab)), columns[0])[:, None]
        decides = np.full(len(boxes), -1)
        for race in columns:
            favoured, last = np.empty_like(winners), np.empty_like(winners)
            for v in range(vocab):
                times = np.ones((len(boxes), vocab))
                times[:, v] = 1e-30
                favoured[:, v] = outcome(everything, times, race)
                times[:, v] = 1e30
                last[:, v] = outcome(everything, times, race)
            alive = favoured != last
            box = np.flatnonzero(alive.any(1))
            if (decides[box] >= 0).any():
                raise UnknownNoise("races that depend on each other")
            decides[box] = race
            weights[box], winners[box] = alive[box], favoured[box]
            base = alive[box].argmax(1)
            for v in range(vocab):
                rest = box[alive[box, v] & (base != v)]
                first = alive[rest].argmax(1)
                low, high = np.full(len(rest), -60.0), np.full(len(rest), 60.0)
                for _ in range(46 if len(rest) else 0):
                    middle = (low + high) / 2
                    times = np.full((len(rest), vocab), 1e30)
                    times[np.arange(len(rest)), first] = 1.0
                    times[:, v] = 2.0**middle
                    wins = outcome(rest, times, race) == favoured[rest, v]
                    low, high = np.where(wins, middle, low), np.where(wins, high, middle)
                weights[rest, v] = 2.0**low
        weights /= weights.sum(1, keepdims=True)
        self._check_races(found, races, boxes, others, owners, weights, winners)
        index = np.repeat(everything, vocab)
        return winners.ravel(), volumes[index] * weights.ravel(), owners[index], ends[index]

    def _check_races(
        self, found: Pieces, races: list[int], boxes: Int64, others: list[int], owners: Int64, weights: Float64,
        winners: Int64,
    ) -> None:  # fmt: skip
        vocab, rng = self.problem.vocab, self.rng
        box = rng.integers(0, len(boxes), _CHECKED)
        points = np.full((_CHECKED, len(found.sides[0])), 0.5)
        if others:
            points[:, others] = boxes[box] / LATTICE
        arrivals = {race - self.given: rng.exponential(size=(_CHECKED, vocab)) for race in races}
        seen = self._codes_of(owners[box], points, arrivals)
        fits = np.zeros(_CHECKED, bool)
        for times in arrivals.values():
            chance = weights[box] / times
            order = np.sort(chance, 1)
            close = order[:, -2] > order[:, -1] * (1 - 1e-5)
            fits |= close | (winners[box, chance.argmax(1)] == seen)
        if not fits.all():
            raise UnknownNoise("no race")

    def _assembled(self, codes: Int64, volumes: Float64, owner: Int64, at_ends: Bool) -> Joint:
        _, weights = self.problem.paths()
        each = self.problem.each_is_right
        good = (codes >= 0) & (volumes > 0)
        emitted = [self._tokens(code) for code in codes[good]]
        joint = Joint(joint_of(self.problem, emitted, volumes[good], owner[good]), dtypes=self.dtypes)
        shares = volumes * (1 / len(weights) if each else weights[owner])
        ends = []
        for code, share, end in zip(codes, shares, at_ends, strict=True):
            if code < 0 and share > 0:
                message = self.messages[-1 - code]
                joint.failures[message] = joint.failures.get(message, 0.0) + share
                ends.append(end)
        possible = _prefixes(self.problem)
        for tokens, share, end in zip(emitted, shares[good], at_ends[good], strict=True):
            if possible[len(tokens)][tokens] == 0:
                joint.impossible[tokens] = joint.impossible.get(tokens, 0.0) + share
                ends.append(end)
        joint.at_ends = bool(ends) and all(ends)
        return joint

    def _tokens(self, code: int) -> tuple[int, ...]:
        base, out = self.problem.vocab + 1, []
        for i in range(self.width):
            token = int(code // base**i % base) - 1
            if token < 0:
                break
            out.append(token)
        return tuple(out)

    # --- from samples -------------------------------------------------------------------------------------------------

    def _sampled(self, samples: int) -> Joint:
        """Its own random numbers; what a step does not emit is drawn from the distribution that it should have."""
        problem, rng = self.problem, self.rng
        _, weights = problem.paths()
        each = problem.each_is_right
        if not self.signature.batched:
            samples = min(samples, _ONE_BY_ONE)
        if each:
            samples = max(samples // len(weights), 2000)
            path = np.repeat(np.arange(len(weights)), samples)
        else:
            path = rng.choice(len(weights), samples, p=weights / weights.sum())
        self.batched = self.signature.batched
        codes = self._codes_of(path, rng.integers(0, LATTICE, (len(path), self.given)) / LATTICE, replaced=False)
        joint = Joint(np.zeros((len(weights) if each else 1, *[problem.vocab] * self.width)), samples)
        laws, possible = problem.target_laws(), _prefixes(problem)
        for code in np.unique(codes):
            here = np.flatnonzero(codes == code)
            if code < 0:
                joint.failures[self.messages[-1 - code]] = len(here) / len(path)
                continue
            tokens = self._tokens(code)
            if possible[len(tokens)][tokens] == 0:
                joint.impossible[tokens] = len(here) / len(path)
            ids = np.tile(np.array(tokens), (len(here), 1))
            for depth in range(len(tokens), self.width):
                ids = np.concatenate([ids, draw(laws[depth][tuple(ids.T)], rng)[:, None]], 1)
            np.add.at(joint.law, (path[here] if each else 0, *ids.T), 1 / samples)
        return joint


def _boxes(sides: list[Int64]) -> tuple[Int64, Float64, Bool]:
    """Of the boxes with these sides a point inside, the volume, and whether one is a lattice point wide at an end."""
    inside = np.meshgrid(*[(s[:-1] + s[1:]) // 2 for s in sides], indexing="ij")
    sizes = np.meshgrid(*[np.diff(s) / LATTICE for s in sides], indexing="ij")
    ends = np.meshgrid(*[(np.diff(s) == 1) & ((s[:-1] == 0) | (s[1:] == LATTICE)) for s in sides], indexing="ij")
    points = np.stack([m.ravel() for m in inside], -1)
    return points, np.prod([s.ravel() for s in sizes], 0), np.any([e.ravel() for e in ends], 0)


def _prefixes(problem: Problem) -> list[Float64]:
    """The probability of each prefix of 0, 1, … tokens."""
    joint = target_joint(problem)
    return [joint.sum(tuple(range(depth, joint.ndim))) for depth in range(joint.ndim + 1)]
