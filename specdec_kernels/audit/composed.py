"""Several steps of drafting and verifying, exactly: each call's boxes, put together by the numbers that they share.

A draft or a verify call emits certain tokens where its numbers lie in a box, each number known by the function and the
arguments that made it; several calls do where they lie in the intersection. For a race's times of arrival, of up to
three ids, a box says how many times as late as another one comes at least.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import combinations, pairwise, product
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..sampling import SamplingParams
from ..testing import Float64, Int64
from .cases import context_tables
from .cut import Bisection, Found
from .kernels import Label, elements
from .noise import UnknownNoise
from .signatures import Signature
from .step import Step, laws, step_behind

TOKENS = 2
SHAPES = ((2, 2), (3, 1))
"""Ids, and draft tokens a step: block verification needs two draft tokens, a race of two ids left after a rejection
needs three ids.
"""
_MOST_IDS = 3
_START = 10

Bounds = tuple[float, float] | Float64
"""A number's ends; of a race's times of arrival a matrix, ``times[v] >= bounds[v, u] * times[u]``."""
Sides = dict[Hashable, Bounds]
"""By what each number is."""


class Failure(Exception):
    """What went wrong instead of an answer."""


class Piece(NamedTuple):
    """Tokens, and where the numbers must be for them."""

    tokens: tuple[int, ...]
    sides: Sides


class Composed:
    """The calls of a loop's steps.

    Attributes
    ----------
    vocab, num_draft : int
    target, draft : ndarray
        ``[vocab, vocab]`` distributions by the token before.
    drafts : dict of tuple to list of Piece
        What the drafter draws, by a step's first place, a draft token's place in it and the token before it.
    verified : dict of tuple to list of Piece
        What the verifier emits, by a step's first place, the token before and the draft tokens.
    """

    def __init__(self, signature: Signature, vocab: int, num_draft: int, seed: int) -> None:
        self.signature, self.vocab, self.num_draft, self.seed = signature, vocab, num_draft, seed
        params = SamplingParams()
        self._logits = context_tables(vocab)
        self._laws = [laws(table, params) for table in self._logits]
        self.target, self.draft = (law.numpy() for law in self._laws)
        self.drafts: dict[tuple[int, int, int], list[Piece]] = {}
        self.verified: dict[tuple[int, ...], list[Piece]] = {}
        self._labels: set[Label] = set()
        self._found: dict[str, Found] = {}
        with torch.random.fork_rng(devices=[]):
            for start in range(TOKENS):
                self._call(start)

    def _call(self, start: int) -> None:
        """Cut a step's calls."""
        before = np.array(list(product(range(self.vocab), repeat=self.num_draft + 1)))
        for path, pieces in enumerate(self._cut("verify", self.signature.emit, before, start)):
            self.verified[(start, *before[path].tolist())] = pieces
        for i in range(self.num_draft if self.signature.draft is not None else 0):
            each = np.repeat(np.arange(self.vocab)[:, None], 2, 1)
            drawn = self._cut("draft", lambda step: self.signature.draw(step)[:, None], each, start + i)
            for path, pieces in enumerate(drawn):
                self.drafts[start, i, path] = pieces

    def _cut(self, what: str, emit: Callable[[Step], Tensor], before: Int64, place: int) -> list[list[Piece]]:
        """A call's pieces, by path; for a call like an earlier one, that one's, if random numbers confirm them."""
        step, width = step_behind(before, self._logits, self._laws), before.shape[1]
        rng = np.random.default_rng(self.seed)
        cut = Bisection(self.signature, emit, step, self.vocab, width, rng, position=_START + place)
        found = self._found[what] = cut.find(like=self._found.get(what))
        boxes = found.boxes()
        labels: dict[int, Hashable] = {column: label for label, column in cut.labels.items()}
        names = [labels[a - cut.given] if a >= cut.given else ("given", what, place, a) for a in boxes.axes]
        self._labels |= cut.labels.keys()
        if sum(len(elements(label)) for label in self._labels) > len(set().union(*map(elements, self._labels))):
            raise UnknownNoise("a number in two races")
        out: list[list[Piece]] = [[] for _ in before]
        for n, code in enumerate(boxes.code.tolist()):
            if code < 0:
                raise Failure(cut.messages[-1 - code])
            sides: Sides = {of: (low, high) for of, (low, high) in zip(names, boxes.sides[n], strict=True)}
            if boxes.race[n] >= 0:
                sides[labels[int(boxes.race[n])]] = won(boxes.weights[n], int(boxes.winner[n]))
            out[boxes.path[n]].append(Piece(cut.tokens(code), sides))
        return out

    def joint(self, fresh: bool = False, apart: bool = False) -> Float64:
        """``[vocab] * TOKENS``: the distribution of the tokens after an id 0.

        `apart`: the drafter's numbers are its own. `fresh`: numbers are new at every step.
        """
        out = np.zeros((self.vocab,) * TOKENS)

        def met(start: int, held: Sides, sides: Sides, drafting: bool) -> Sides | None:
            return _meet(held, {(start if fresh else 0, drafting and apart, of): at for of, at in sides.items()})

        def emit(tokens: tuple[int, ...], held: Sides) -> None:
            start = len(tokens) - 1
            if start >= TOKENS:
                out[tokens[1 : TOKENS + 1]] += _chance(held)
                return
            for drafted, with_drafts in self._drafted(start, (tokens[-1],), held, met):
                for piece in self.verified[(start, *drafted)]:
                    both = met(start, with_drafts, piece.sides, False)
                    if both is not None:
                        emit(tokens + piece.tokens, both)

        emit((0,), {})
        return out

    def _drafted(
        self, start: int, drafted: tuple[int, ...], held: Sides, met: Callable[[int, Sides, Sides, bool], Sides | None]
    ) -> Iterator[tuple[tuple[int, ...], Sides]]:
        """The ways in which a step's draft may go on: its tokens, and where the numbers must be for them."""
        i = len(drafted) - 1
        if i == self.num_draft:
            yield drafted, held
            return
        for piece in self._drawn(start, i, drafted[-1]):
            both = met(start, held, piece.sides, True)
            if both is not None:
                yield from self._drafted(start, drafted + piece.tokens, both, met)

    def _drawn(self, start: int, i: int, before: int) -> list[Piece]:
        if self.signature.draft is not None:
            return self.drafts[start, i, before]
        law = self.draft[before]
        return [Piece((v,), {("audit", start, i): won(law, v)}) for v in np.flatnonzero(law).tolist()]

    def distance(self, fresh: bool = False, apart: bool = False) -> float:
        """The total variation from the target."""
        return float(np.abs(self.joint(fresh, apart) - of_texts(self.target, TOKENS)).sum() / 2)

    def draft_distance(self) -> float:
        """How far the first step's draft tokens, together, are from the distributions that the verifier is told."""
        worst = 0.0
        for before in range(self.vocab):
            drawn = np.zeros((self.vocab,) * self.num_draft)
            for drafted, held in self._drafted(0, (before,), {}, lambda start, held, sides, _: _meet(held, sides)):
                drawn[drafted[1:]] += _chance(held)
            wanted = of_texts(self.draft, self.num_draft, before)
            worst = max(worst, float(np.abs(drawn - wanted).sum() / 2))
        return worst


def of_texts(law: Float64, length: int, before: int = 0) -> Float64:
    """``[vocab] * length``: the distribution of so many tokens. Row i of `law` is that of the token after token i."""
    out = law[before]
    for _ in range(1, length):
        out = out[..., None] * law
    return out


def won(weights: Float64, winner: int) -> Float64:
    """The bounds at which one id comes first in ``argmax(weights / times)``."""
    bounds = np.zeros((_MOST_IDS, _MOST_IDS))
    bounds[: len(weights), winner] = weights / weights[winner]
    bounds[winner, winner] = 0.0
    return bounds


def _meet(one: Sides, other: Sides) -> Sides | None:
    """What is in both; None if nothing is."""
    out = dict(one)
    for of, bounds in other.items():
        held = out.get(of)
        if isinstance(bounds, tuple):
            low, high = held if isinstance(held, tuple) else (0.0, 1.0)
            out[of] = max(low, bounds[0]), min(high, bounds[1])
        else:
            out[of] = bounds if held is None else np.maximum(bounds, held)
        if _chance({of: out[of]}) <= 0:
            return None
    return out


def _chance(sides: Sides) -> float:
    """The probability that all numbers lie within."""
    chance = 1.0
    for bounds in sides.values():
        chance *= bounds[1] - bounds[0] if isinstance(bounds, tuple) else arrival_chance(bounds)
    return chance


def arrival_chance(bounds: Float64) -> float:
    """How often three independent exponentials have ``times[v] >= bounds[v, u] * times[u]`` for all u and v.

    With t and s for the second and the third one over the first, that is the integral of 2 / (1 + t + s)**3; over s it
    is one of 1 / (1 + t + s)**2 at ends that are linear in t, between the points where those cross.
    """
    low, high = bounds[1, 0], 1 / bounds[0, 1] if bounds[0, 1] else inf
    lower = [(bounds[2, 0], 0.0), (0.0, bounds[2, 1])]  # s >= c + d t
    upper = [(1 / bounds[0, 2], 0.0)] if bounds[0, 2] else []
    upper += [(0.0, 1 / bounds[1, 2])] if bounds[1, 2] else []
    crossings = [(a[0] - b[0]) / (b[1] - a[1]) for a, b in combinations(lower + upper, 2) if a[1] != b[1]]
    points = [low, *sorted(t for t in crossings if low < t < high), high]
    total = 0.0

    def integral(line: tuple[float, float], start: float, end: float) -> float:
        c, d = 1 + line[0], 1 + line[1]
        return 1 / (d * (c + d * start)) - 1 / (d * (c + d * end))

    for start, end in pairwise(points):
        inside = (start + end) / 2 if end < inf else 2 * start + 1
        floor = max(lower, key=lambda line: line[0] + line[1] * inside)
        ceiling = min(upper, key=lambda line: line[0] + line[1] * inside, default=None)
        if start >= end or (ceiling and ceiling[0] - floor[0] + (ceiling[1] - floor[1]) * inside <= 0):
            continue
        total += integral(floor, start, end) - (integral(ceiling, start, end) if ceiling else 0.0)
    return total
