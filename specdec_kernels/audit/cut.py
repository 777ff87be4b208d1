"""The outcomes of a step as a function of its random numbers: boxes of them, found by bisection."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..testing import LATTICE, Float64, Int64, Pieces, pieces
from .kernels import KernelNoise, Label
from .noise import Noise, UnknownNoise, differ
from .signatures import Signature
from .step import Step

Bool = np.ndarray[Any, np.dtype[np.bool_]]

_MOST_COLUMNS = 6
"""Numbers that are no races."""
_MOST_SINGLE = 1 << 17
"""Points that a search for hidden breakpoints may ask for at once where each is a call."""
_CALL_ROWS = 1 << 14
_MOST_FAILURES = 500
_CHECKED, _CHECKED_KERNELS = 600, 200
"""Random noises that the boxes found must predict; fewer for interpreted kernels, as they are slow."""
_KERNEL_ROWS = 64
"""Rows of interpreted kernels at once: what they teach saves later ones."""
_MOST_CUTS, _FOLLOWED = 4, 8
"""How often boxes are sought, and the random noises that those before did not predict from which they then are."""
_ALONE = 40
"""Rows that are also asked about one by one."""
_BASE, _BASE_IN_KERNELS, _FIRST, _NEVER = 1.0, 2.0**-10, 1e-30, 1e30
"""When ids of a race arrive. In a kernel with float32 uniforms `_NEVER` becomes 16.6, which is 2**14 times its base."""
_OCTAVES, _HALVINGS = 60.0, 36
"""A ratio of weights is sought between 2**-60 and 2**60, and that range halved so often: to a relative 1e-9."""


_Node = dict[int, Any]
"""``{column: {its number: node}}`` of the number that is asked for next, or ``{_OUTCOME: outcome}``."""
_OUTCOME = -1


class _Numbers:
    """A row's, by column."""

    def __init__(self, uniforms: Float64, races: dict[int, Float64], row: int) -> None:
        self.uniforms, self.races, self.row = uniforms, races, row

    def __getitem__(self, column: int) -> Hashable:
        if column in self.races:
            return self.races[column][self.row].tobytes()
        return float(self.uniforms[column]) if column < len(self.uniforms) else 0.5


@dataclass
class Boxes:
    """Where an outcome is constant; of a race, an entry for each id that may win it.

    Attributes
    ----------
    code : ndarray
        ``[n]`` the outcomes.
    path : ndarray
        ``[n]`` the row of the step.
    volume : ndarray
        ``[n]`` of the box, times the chance of the winner; those of a path sum to 1.
    at_ends : ndarray
        ``[n]`` whether the box is a lattice point wide at an end of a number's range.
    sides : ndarray
        ``[n, len(axes), 2]`` the box's ends, by the numbers that are no races.
    axes : list of int
        Their columns.
    race, winner : ndarray
        ``[n]`` the column of the race that decides (−1: none), and the id that wins.
    weights : ndarray
        ``[n, vocab]`` the race's.
    """

    code: Int64
    path: Int64
    volume: Float64
    at_ends: Bool
    sides: Float64
    axes: list[int]
    race: Int64
    winner: Int64
    weights: Float64


class Bisection:
    """Runs the rows of a step with given random numbers.

    Parameters
    ----------
    signature : Signature
    emit : callable
        ``[batch, width]`` tokens of a step: the signature's `emit`, or what its drafter draws.
    step : Step
        A row for each path.
    vocab, width : int
        Ids, and tokens that are emitted at most.
    rng : numpy.random.Generator
    other : Step, optional
        The step that every second row of a batch is taken from, the first and the last among them.
    position : int
        Of the first draft token.

    Attributes
    ----------
    kinds : list of str
        What each random number is.
    labels : dict of Label to int
        The columns of those that kernels asked for.
    dtypes : set of torch.dtype
        Of the uniforms.
    messages : list of str
        What went wrong; an outcome −1 − i is the i-th.
    differs_alone : bool
        Whether some rows came out otherwise in a call of their own, or asked for other numbers there.
    """

    def __init__(
        self, signature: Signature, emit: Callable[[Step], Tensor], step: Step, vocab: int, width: int,
        rng: np.random.Generator, other: Step | None = None, position: int = 7,
    ) -> None:  # fmt: skip
        self.signature, self.emit, self.step, self.vocab, self.width = signature, emit, step, vocab, width
        self.rng, self.other, self.position = rng, other, position
        self._likely = np.full(step.batch, 1 / step.batch)  # how often a path is drafted, as far as that is known
        widest = max(each.target_probs.shape[1] for each in (step, other or step))
        self.given = signature.uniforms(widest)
        self.batched = signature.batched
        self.kinds: list[str] = []
        self.labels: dict[Label, int] = {}
        self.dtypes: set[torch.dtype] = set()
        self.messages: list[str] = []
        self.differs_alone = False
        self._interpreted = False
        self._learns = not self.given and other is None  # a row's outcome depends on nothing but what kernels asked for
        self._known: dict[int, _Node] = {}

    # --- calls --------------------------------------------------------------------------------------------------------

    def _ask(self, path: Int64, uniforms: Float64, races: dict[int, Float64] | None, replaced: bool) -> Int64:
        """The outcomes of one call: codes of the tokens emitted (base vocab + 1, −1 as 0), or −1 − a message."""
        step, asked_for, of = self.step.take(path), slice(None), np.arange(len(path))
        if self.other is not None:
            others = self.rng.integers(0, self.other.batch, len(path) + 1)
            step, asked_for = step.beside(self.other.take(others)), slice(1, None, 2)
            of = np.minimum(np.arange(step.batch) // 2, len(path) - 1)
        rows, own = step.batch, uniforms[of]
        step.uniforms = torch.from_numpy(own[:, : self.given].astype(np.float32))
        seeds = self.rng.integers(0, 2**62, rows)
        step.seeds = torch.from_numpy(seeds)
        step.positions = torch.full((rows,), self.position)
        spread = {c: t[of] for c, t in (races or {}).items()}
        if not replaced:
            tokens = self.emit(step)
        elif self.signature.keyed:
            with KernelNoise(own[:, self.given :], seeds, self.vocab, self.labels, self.kinds, spread) as asked:
                tokens = self.emit(step)
            self._interpreted |= asked.interpreted
            codes = self._codes(tokens.cpu().numpy()[asked_for])
            for row in range(rows if self._learns else 0):
                self._learn(int(path[row]), _Numbers(own[row], spread, row), asked.asked[row], int(codes[row]))
            return codes
        else:
            with Noise(own[:, self.given :], step.lengths, self.vocab, spread) as noise:
                tokens = self.emit(step)
            if differ(noise.kinds, self.kinds):  # its columns are by the order in which a call asks
                raise UnknownNoise("a race in the place of another number")
            if len(noise.kinds) > len(self.kinds):
                self.kinds = noise.kinds
            self.dtypes |= noise.dtypes
        return self._codes(tokens.cpu().numpy()[asked_for])

    def _learn(self, path: int, numbers: _Numbers, asked: list[int], code: int) -> None:
        """Note which numbers an outcome depends on: those asked for."""
        at = self._known.setdefault(path, {})
        for column in dict.fromkeys(asked):
            if at.keys() - {column}:
                raise UnknownNoise("numbers from elsewhere")
            at = at.setdefault(column, {}).setdefault(numbers[column], {})
        if at.setdefault(_OUTCOME, code) != code or len(at) > 1:
            raise UnknownNoise("numbers from elsewhere")

    def _recall(self, path: int, numbers: _Numbers) -> int | None:
        """The outcome of numbers that agree with some seen before in all that those were asked for."""
        at = self._known.get(path)
        while at and _OUTCOME not in at:
            ((column, values),) = at.items()
            at = values.get(numbers[column])
        return at[_OUTCOME] if at else None

    def _codes(self, tokens: Int64) -> Int64:
        more = (tokens[:, self.width :] >= 0).any(1)
        tokens = tokens[:, : self.width]
        tokens = np.pad(tokens, ((0, 0), (0, self.width - tokens.shape[1])), constant_values=-1)
        on = np.cumprod(tokens >= 0, 1).astype(bool)
        vocab = self.vocab
        codes: Int64 = (np.where(on, tokens, -1).clip(-1, vocab - 1) + 1) @ (vocab + 1) ** np.arange(self.width)
        codes[~on[:, 0]] = self._failure("it emits no token")
        codes[((tokens >= vocab) & on).any(1)] = self._failure("it emits an id outside the vocabulary")
        codes[((tokens >= 0) & ~on).any(1)] = self._failure("it emits tokens behind a gap")
        codes[more] = self._failure("it emits more tokens than a step can")
        return codes

    def tokens(self, code: int) -> tuple[int, ...]:
        """What an outcome that is no failure stands for."""
        base, out = self.vocab + 1, []
        for i in range(self.width):
            token = int(code // base**i % base) - 1
            if token < 0:
                break
            out.append(token)
        return tuple(out)

    def _failure(self, message: str) -> int:
        if message not in self.messages:
            self.messages.append(message)
        return -1 - self.messages.index(message)

    def codes(
        self, path: Int64, uniforms: Float64, races: dict[int, Float64] | None = None, replaced: bool = True
    ) -> Int64:
        """The same for any number of rows, one call each where it must be.

        The rows at which a call fails are found by halving it; after `_MOST_FAILURES` single rows it fails as a whole.
        """
        remembers = replaced and bool(self.labels) and self._learns
        size = (_KERNEL_ROWS if remembers else _CALL_ROWS) if self.batched else 1
        parts = [np.arange(i, min(i + size, len(path))) for i in range(0, len(path), size)][::-1]
        out, failing = np.empty(len(path), np.int64), 0
        while parts:
            part = parts.pop()
            if remembers:
                part = self._unknown(part, path, uniforms, races or {}, out)
                if not len(part):
                    continue
            try:
                # A sequence alone may have its numbers in another order, which is looked at by itself.
                asked = part.repeat(2 if self.batched and len(part) == 1 and not self.signature.keyed else 1)
                part_races = {c: t[asked] for c, t in (races or {}).items()}
                given = self._ask(path[asked], uniforms[asked], part_races, replaced)
                short = f"it gives {len(given)} rows of tokens for {len(asked)} sequences"
                out[part] = given[: len(part)] if len(given) == len(asked) else self._failure(short)
            except UnknownNoise:
                raise
            except Exception as error:
                unknown = next((e for e in _chain(error) if isinstance(e, UnknownNoise)), None)
                if unknown is not None:  # from within a kernel
                    raise unknown from None
                lines = str(error).splitlines() or [""]
                message = f"it raises {type(error).__name__}: {lines[0][:100]}"
                if len(part) == 1 or failing >= _MOST_FAILURES:
                    out[part], failing = self._failure(message), failing + 1
                else:
                    middle = len(part) // 2
                    parts += [part[:middle], part[middle:]]
        return out

    def _unknown(self, part: Int64, path: Int64, uniforms: Float64, races: dict[int, Float64], out: Int64) -> Int64:
        """Those rows whose outcome must be asked for; the others' is written."""
        unknown = []
        for i in part:
            code = self._recall(int(path[i]), _Numbers(uniforms[i], races, i))
            if code is None:
                unknown.append(i)
            else:
                out[i] = code
        return np.array(unknown, np.int64)

    # --- boxes --------------------------------------------------------------------------------------------------------

    def find(self, hidden: bool = False, like: Found | None = None) -> Found:
        """Every path's boxes, which random numbers must confirm.

        `hidden`: see `pieces`. `like`: what may be found again, as it was at another position. Raises `UnknownNoise`
        where there are no boxes.
        """
        try:
            self._begin()
        except UnknownNoise:
            if not self.batched or self.labels:
                raise
            self.batched = False  # its numbers are none of one row each, unless there is one row
            self._begin()
        if like is not None and like.axes == self._axes() and {*like.race.tolist()} <= {-1, *self._races()}:
            if not self._surprises(like):
                return like
        surprises: list[tuple[int, list[int]]] = []
        for _ in range(_MOST_CUTS):
            found = Found(*self._cut(hidden, surprises))
            new = self._surprises(found)
            if not new:
                return found
            hidden, surprises = True, [*surprises, *new[:_FOLLOWED]]
        raise UnknownNoise("no boxes")

    def _begin(self) -> None:
        """See how many numbers it asks for, and that these are all that an outcome depends on."""
        num_paths = self.step.batch
        paths = np.arange(num_paths)
        for level in (0.5, 0.0, 1 - 2.0**-24):
            self.codes(paths, np.full((num_paths, self._columns()), level))
        if self.signature.keyed and not (self.labels or self._interpreted):
            raise UnknownNoise("keyed by seeds")
        path = np.tile(paths, 1 + self._checked // 3 // num_paths)
        same = self.rng.integers(0, LATTICE, (len(path), self._columns())) / LATTICE
        first = self.codes(path, same)
        self._known.clear()
        if (first != self.codes(path, same)).any():
            raise UnknownNoise("numbers from elsewhere")

    @property
    def _checked(self) -> int:
        return _CHECKED_KERNELS if self._interpreted else _CHECKED

    def _columns(self) -> int:
        return max(self.given + len(self.kinds), 1)

    def _races(self) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind == "race"]

    def _axes(self) -> list[int]:
        """The columns that are no races."""
        return [*range(self.given), *(self.given + i for i, kind in enumerate(self.kinds) if kind != "race")]

    def _cut(
        self, hidden: bool, surprises: list[tuple[int, list[int]]]
    ) -> tuple[Pieces, list[int], Int64, Float64, Int64]:
        """Boxes of the numbers that are no races; of each the race that decides, its weights and winners' outcomes."""
        axes: list[int] = []

        def run(path: Int64, lattice: Int64) -> Int64:
            if hidden and not self.batched and len(path) > _MOST_SINGLE:
                raise UnknownNoise("too many boxes")
            points = np.full((len(path), self._columns()), 0.5)
            points[:, axes] = lattice[:, : len(axes)] / LATTICE
            return self.codes(path, points)

        while True:
            axes = self._axes()
            if len(axes) > _MOST_COLUMNS:
                raise UnknownNoise(f"{len(axes)} random numbers")
            through = [(path, [point[axis] for axis in axes or [0]]) for path, point in surprises]
            try:
                found = pieces(run, self.step.batch, max(len(axes), 1), hidden, through=through)
            except ValueError as error:
                raise UnknownNoise("no boxes") from error
            if axes == self._axes():
                return found, axes, *self._decided(found, axes)

    def _decided(self, found: Pieces, axes: list[int]) -> tuple[Int64, Float64, Int64]:
        """Within a box the favourites' outcomes say whether a race matters; if one does, the ratio of two ids' weights
        is the ratio of times of arrival at which the outcome changes.
        """
        vocab, size, base_time = self.vocab, len(found.outcome), _BASE_IN_KERNELS if self.signature.keyed else _BASE
        points = np.full((size, self._columns()), 0.5)
        middles = np.concatenate([_ends(sides).mean(-1) for sides in found.sides])
        points[:, axes] = np.floor(middles * LATTICE)[:, : len(axes)] / LATTICE
        everything, columns = np.arange(size), self._races()

        def outcome(box: Int64, times: Float64, race: int) -> Int64:
            arrivals = {c: np.full((len(box), vocab), base_time) for c in columns}
            arrivals[race] = times
            return self.codes(found.path[box], points[box], arrivals)

        decides, weights = np.full(size, -1), np.zeros((size, vocab))
        weights[:, 0], winners = 1.0, np.repeat(found.outcome[:, None], vocab, 1)
        for race in columns:
            favoured, last = np.empty_like(winners), np.empty_like(winners)
            for v in range(vocab):
                times = np.full((size, vocab), base_time)
                times[:, v] = _FIRST
                favoured[:, v] = outcome(everything, times, race)
                times[:, v] = _NEVER
                last[:, v] = outcome(everything, times, race)
            alive = favoured != last
            box = np.flatnonzero(alive.any(1))
            if (decides[box] >= 0).any():
                raise UnknownNoise("races that depend on each other")
            decides[box] = race
            weights[box], winners[box] = alive[box], favoured[box]
            base = alive[box].argmax(1)
            for v in range(vocab):
                rest, first = box[alive[box, v] & (base != v)], base[alive[box, v] & (base != v)]
                low, high = np.full(len(rest), -_OCTAVES), np.full(len(rest), _OCTAVES)
                for _ in range(_HALVINGS if len(rest) else 0):
                    middle = (low + high) / 2
                    times = np.full((len(rest), vocab), _NEVER)
                    times[np.arange(len(rest)), first] = base_time
                    times[:, v] = base_time * 2.0**middle
                    wins = outcome(rest, times, race) == favoured[rest, v]
                    low, high = np.where(wins, middle, low), np.where(wins, high, middle)
                weights[rest, v] = 2.0**low
        return decides, weights / weights.sum(1, keepdims=True), winners

    def _surprises(self, found: Found) -> list[tuple[int, list[int]]]:
        """Those of some random numbers, with their paths, whose outcomes are others than the boxes say."""
        path = self.rng.choice(self.step.batch, self._checked, p=self._likely)
        points = self.rng.integers(0, LATTICE, (len(path), self._columns())) / LATTICE
        arrivals = {race: self.rng.exponential(size=(len(path), self.vocab)) for race in self._races()}
        seen = self.codes(path, points, arrivals)
        box = found.box(path, points)
        times = np.ones((len(path), self.vocab))
        for race, given in arrivals.items():
            times = np.where((found.race[box] == race)[:, None], given, times)
        chances = found.weights[box] / times
        order = np.sort(chances, 1)
        close = order[:, -2] > order[:, -1] * (1 - 1e-5)
        others = np.flatnonzero(~close & (found.winners[box, chances.argmax(1)] != seen))
        if not len(others) and self.batched and not self.labels and self.other is None:
            few = {c: t[:_ALONE] for c, t in arrivals.items()}
            self.differs_alone = self._differ_alone(path[:_ALONE], points[:_ALONE], few, seen[:_ALONE])
        return [(int(path[i]), (points[i] * LATTICE).astype(np.int64).tolist()) for i in others]

    def _differ_alone(self, path: Int64, points: Float64, races: dict[int, Float64], seen: Int64) -> bool:
        """Whether an outcome is another one in a call of its own."""
        kinds, self.batched = self.kinds, False
        try:
            return bool((self.codes(path, points, races) != seen).any()) or self.kinds != kinds
        except UnknownNoise:  # it asks for others there
            return True
        finally:
            self.kinds, self.batched = kinds, True


@dataclass
class Found:
    """What `_cut` finds: pieces, the columns of their axes, and of each box its race, weights and winners' outcomes."""

    pieces: Pieces
    axes: list[int]
    race: Int64
    weights: Float64
    winners: Int64

    def box(self, path: Int64, points: Float64) -> Int64:
        """The index of the box of each point."""
        return self.pieces.box(path, (points[:, self.axes or [0]] * LATTICE).astype(np.int64))

    def boxes(self) -> Boxes:
        index, winner = np.nonzero(self.weights)
        ends = np.concatenate([_ends(sides) for sides in self.pieces.sides])
        thin = np.diff(ends)[..., 0] == 1 / LATTICE
        at_ends = (thin & ((ends[..., 0] == 0) | (ends[..., 1] == 1))).any(1)
        share = self.weights[index, winner]
        return Boxes(
            self.winners[index, winner], self.pieces.path[index], self.pieces.volume[index] * share, at_ends[index],
            ends[index][:, : len(self.axes)], self.axes, self.race[index], winner, self.weights[index],
        )  # fmt: skip


def _ends(sides: list[Int64]) -> Float64:
    """``[boxes, axes, 2]``: each box's ends."""
    low, high = (np.stack([m.ravel() for m in np.meshgrid(*made, indexing="ij")], -1) / LATTICE
                 for made in ([s[:-1] for s in sides], [s[1:] for s in sides]))  # fmt: skip
    return np.stack([low, high], -1)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__
