"""The exact distribution that a verifier produces, found through its uniforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import (
    ID_DTYPES,
    check_array,
    check_callable,
    check_device,
    check_flag,
    check_instance,
    check_int,
    check_sequence,
)
from .laws import Float64, Int64
from .problems import LATTICE, ChainProblem, TreeProblem, Verify

_CALL_ROWS = 1 << 15  # rows handed to the verifier at once
MAX_WIDTH = 64
MOST_POINTS = 2**22
"""That a search for hidden breakpoints looks at in a round: where no boxes have constant outcomes, it would not end."""
GRID = np.linspace(0, LATTICE - 1, 9).astype(np.int64)
WAYS = 8  # that `exact_law` divides an interval into: fewer calls than by bisection, of more rows each
POINTS = 600  # random uniforms that it checks
Cut = tuple[int, int, int]  # path, axis, first lattice point of the next piece
Run = Callable[[Int64, Int64], Int64]
"""Outcomes ``[n]`` of drafted paths ``[n]`` with uniforms ``[n, width]`` in units of 2**-24."""


class Pieces(NamedTuple):
    """The boxes of constant outcome that the cube of uniforms of every path falls into, path after path."""

    outcome: Int64
    volume: Float64
    path: Int64
    sides: list[list[Int64]]
    """``sides[path][axis]``: the borders, 0 and `LATTICE` included; boxes of a path are in the order of its axes."""

    def box(self, path: Int64, points: Int64) -> Int64:
        """``[n]``: the box in which each point of the lattice ``[n, width]`` lies, in the cube of each path ``[n]``.

        Raises
        ------
        TypeError, ValueError
            Not int64 arrays, or of other shapes; a path that is not there, or a point outside the lattice.
        """
        _check_vector("Pieces", "path", path, "i", "[n] int64")
        width = len(self.sides[0])
        check_array("Pieces", "points", points, "i", f"[n, width={width}] int64", width)
        if points.shape != (len(path), width):
            raise ValueError(f"Pieces: points must be [n={len(path)}, width={width}], got {list(points.shape)}")
        _check_range("Pieces", "path", path, len(self.sides))
        _check_range("Pieces", "points", points, LATTICE)
        sizes = np.array([np.prod([len(s) - 1 for s in sides]) for sides in self.sides])
        starts = sizes.cumsum() - sizes
        out = np.empty(len(path), np.int64)
        for p in np.unique(path):
            here, sides = path == p, self.sides[p]
            places = [np.searchsorted(s, points[here, a], side="right") - 1 for a, s in enumerate(sides)]
            out[here] = starts[p] + np.ravel_multi_index(places, [len(s) - 1 for s in sides])
        return out


def exact_law(
    verify: Verify,
    problem: ChainProblem | TreeProblem,
    acceptance: str,
    device: torch.device | str = "cpu",
    *,
    points: int | None = None,
) -> Float64:
    """The joint distribution, over as many tokens as a step can emit, that `verify` really produces with drafts drawn
    from the draft's own distribution.

    What a step emits is continued with the distribution that it should have, so a right verifier yields exactly
    `target_joint`. The uniforms are taken to be independent and uniform on the lattice of 2^-24. The points where the
    output changes are found by bisection between neighbours of nine points whose outcomes differ, along each uniform
    while the others are at the ends of their range (for a tree, also anywhere between the breakpoints found so far). A
    change that is undone before the next of the nine does not show; therefore `points` random uniforms must have the
    outcomes that were found. A defect of probability p passes that with probability ``(1 - p) ** points``.

    Parameters
    ----------
    verify : callable
        With the arguments of `specdec_kernels.verify_chain`, or of `verify_tree` for a `TreeProblem`.
    problem : ChainProblem or TreeProblem
        One verify step.
    acceptance : str
        The rule.
    device : torch.device or str
        Where the tensors are.
    points : int
        Random uniforms to check, >= 0. None: 600.

    Returns
    -------
    ndarray
        ``[n] + [vocab] * num_tokens`` float64. n is 1, except for drafts without a distribution, where it is the number
        of drafted paths, for each of which the tokens must have `target_joint`.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; of a `TreeProblem`, outcomes that are not constant in boxes of uniforms.
    AssertionError
        What `verify` returns is not an output (it has no ``tokens`` and ``num_tokens`` of the shapes that
        `verify_chain`'s have, these disagree, a step has no token, or an id lies outside the vocabulary), or a random
        point does not have the outcome that was found for its surroundings.
    """
    _check_problem("exact_law", problem)
    check_callable("exact_law", "verify", verify)
    check_instance("exact_law", "acceptance", acceptance, str, "a string")
    device = check_device("exact_law", "device", device)
    points = POINTS if points is None else check_int("exact_law", "points", points, 0, 2**31 - 1)
    paths, weights = problem.paths()
    vocab, width = problem.vocab, problem.num_tokens

    def run(path: Int64, uniforms: Int64) -> Int64:
        """The emitted tokens as one number (base vocab + 1, −1 as 0)."""
        codes = np.empty(len(path), np.int64)
        for i in range(0, len(path), _CALL_ROWS):
            part = slice(i, i + _CALL_ROWS)
            out = problem.call(verify, paths[path[part]], uniforms[part], acceptance, device)
            emitted = _emitted(out, len(path[part]), width, vocab)
            codes[part] = (emitted + 1) @ (vocab + 1) ** np.arange(width)
        return codes

    found = pieces(run, len(paths), problem.num_uniforms, isinstance(problem, TreeProblem), WAYS)
    random = np.random.default_rng(0)
    path = random.choice(len(paths), points, p=weights / weights.sum())
    uniforms = random.integers(LATTICE, size=(points, problem.num_uniforms))
    if points and not np.array_equal(run(path, uniforms), found.outcome[found.box(path, uniforms)]):
        raise AssertionError("verify must give one outcome within a piece of the uniforms, and gives two")
    emitted = [
        tuple(t for i in range(width) if (t := int(code // (vocab + 1) ** i % (vocab + 1)) - 1) >= 0)
        for code in found.outcome
    ]
    return joint_of(problem, emitted, found.volume, found.path)


def _emitted(out: object, n: int, width: int, vocab: int) -> Int64:
    """The tokens ``[n, width]`` of a verifier's output, −1 after the last; AssertionError unless it is an output."""
    tokens, counts = getattr(out, "tokens", None), getattr(out, "num_tokens", None)
    if not isinstance(tokens, Tensor) or not isinstance(counts, Tensor):
        raise AssertionError(f"verify must give tensors tokens and num_tokens, got {type(out).__name__}")
    if tokens.shape != (n, width) or counts.shape != (n,) or tokens.dtype not in ID_DTYPES:
        of = f"{list(tokens.shape)} {tokens.dtype} and {list(counts.shape)}"
        raise AssertionError(f"verify must give integer tokens [{n}, {width}] and num_tokens [{n}], got {of}")
    emitted: Int64 = tokens.cpu().numpy().astype(np.int64)
    said = counts.detach().cpu().numpy()
    if (said > width).any() or not ((emitted >= 0) == (np.arange(width) < said[:, None])).all():
        raise AssertionError("verify must give as many tokens as num_tokens says")
    # What is not emitted counts as drawn rightly, so that a step without tokens would pass as exact.
    if not (said >= 1).all():
        raise AssertionError("verify must give a token or more of each step, got none")
    if not (emitted < vocab).all():
        raise AssertionError("verify must give ids of the vocabulary")
    return emitted


def joint_of(
    problem: ChainProblem | TreeProblem, emitted: Sequence[tuple[int, ...]], volume: Float64, path: Int64
) -> Float64:
    """The joint distribution that `exact_law` returns, from what a step emits from each path and with which
    probability.

    Raises
    ------
    TypeError, ValueError
        A wrong type, or several lengths; no token, more than a step can emit, an id outside the vocabulary, or a path
        that is not among ``problem.paths()``.
    """
    _check_problem("joint_of", problem)
    _check_vector("joint_of", "volume", volume, "f", "[boxes] float64")
    _check_vector("joint_of", "path", path, "i", "[boxes] int64")
    if not isinstance(emitted, Sequence) or not all(isinstance(tokens, tuple) for tokens in emitted):
        raise TypeError(f"joint_of: emitted must be a sequence of tuples, got {type(emitted).__name__}")
    if not all(isinstance(token, (int, np.integer)) for tokens in emitted for token in tokens):
        raise TypeError("joint_of: emitted must be a sequence of tuples of integers, got others in them")
    if not len(emitted) == len(volume) == len(path):
        raise ValueError(
            f"joint_of: emitted, volume and path must have one length, got {len(emitted)}, {len(volume)}, {len(path)}"
        )
    _, weights = problem.paths()
    _check_range("joint_of", "path", path, len(weights))
    for tokens in set(emitted):
        if not 1 <= len(tokens) <= problem.num_tokens or not all(0 <= token < problem.vocab for token in tokens):
            wanted = f"1 to {problem.num_tokens} ids in [0, {problem.vocab - 1}]"
            raise ValueError(f"joint_of: emitted must be tuples of {wanted}, got {tokens}")
    laws, one_hot = problem.target_laws(), problem.each_is_right
    joint = np.zeros((len(weights) if one_hot else 1, *[problem.vocab] * problem.num_tokens))
    rest = {tokens: _continuation(laws, tokens) for tokens in set(emitted)}
    for tokens, share, p in zip(emitted, volume, path, strict=True):
        joint[(p if one_hot else 0, *tokens)] += share * (1.0 if one_hot else weights[p]) * rest[tokens]
    return joint


def target_joint(problem: ChainProblem | TreeProblem) -> Float64:
    """``[vocab] * num_tokens``: the joint distribution of plain sampling from the target (a `ChainProblem`: its `law`),
    enumerated.

    Raises
    ------
    TypeError, ValueError
        Not a problem, or a `TreeProblem` with a `law`, whose joint distribution depends on the drafted tokens.
    """
    _check_problem("target_joint", problem)
    if isinstance(problem, TreeProblem) and problem.law is not None:
        raise ValueError("target_joint: problem.law must be None for a TreeProblem, got one")
    return _continuation(problem.target_laws(), ())


def total_variation(laws: Float64, expected: Float64) -> float:
    """The largest ``Σ |law − expected| / 2`` over the distributions stacked along the first dimension.

    Raises
    ------
    TypeError, ValueError
        Not float64 arrays, empty ones, or shapes that do not fit.
    """
    check_array("total_variation", "laws", laws, "f", "[n, ...] float64")
    check_array("total_variation", "expected", expected, "f", "[...] float64")
    if not laws.ndim or not laws.size:
        raise ValueError(f"total_variation: laws must be [n >= 1, ...], and not empty, got {list(laws.shape)}")
    if laws.shape[1:] != expected.shape:
        raise ValueError(f"total_variation: expected must be {list(laws.shape[1:])}, got {list(expected.shape)}")
    return float(np.abs(laws - expected).reshape(len(laws), -1).sum(-1).max() / 2)


def _check_problem(caller: str, problem: object) -> None:
    check_instance(caller, "problem", problem, (ChainProblem, TreeProblem), "a ChainProblem or a TreeProblem")


def _check_vector(caller: str, name: str, value: object, kind: str, words: str) -> None:
    check_array(caller, name, value, kind, words)
    assert isinstance(value, np.ndarray)
    if value.ndim != 1:
        raise ValueError(f"{caller}: {name} must be {words}, got {list(value.shape)}")


def _check_range(caller: str, name: str, value: Int64, end: int) -> None:
    """ValueError unless all in ``[0, end)``: numpy would count a negative one from the other end."""
    wrong = value[(value < 0) | (value >= end)]
    if wrong.size:
        raise ValueError(f"{caller}: {name} must be in [0, {end - 1}], got {wrong[0]}")


def _continuation(laws: Sequence[Float64], prefix: tuple[int, ...]) -> Float64:
    """The joint distribution of the tokens after `prefix`, up to the depth of `laws`."""
    if len(prefix) == len(laws):
        return np.ones(())
    joint = laws[len(prefix)][prefix]
    for d in range(len(prefix) + 1, len(laws)):
        joint = joint[..., None] * laws[d][prefix]
    return joint


def pieces(
    run: Run, num_paths: int, width: int, hidden: bool = False, ways: int = 2,
    through: Sequence[tuple[int, Sequence[int]]] = (),
) -> Pieces:  # fmt: skip
    """Cut the cube of uniforms of every path into boxes of constant outcome.

    `hidden`: also look for breakpoints that show only while the other uniforms are inside their range. `ways`: how many
    parts an interval whose ends differ is divided into, >= 2. `through`: paths and points ``[width]`` in their cubes,
    in units of 2**-24, from which to look as well: there the outcome is another one than boxes found before say.

    Raises
    ------
    TypeError, ValueError
        A wrong type, or a number out of its range; `run` gives no outcome for each point, or, if `hidden`, outcomes
        that are not constant in boxes.
    """
    check_callable("pieces", "run", run)
    check_int("pieces", "num_paths", num_paths, 1, 2**31 - 1)
    check_int("pieces", "width", width, 1, MAX_WIDTH)
    check_flag("pieces", "hidden", hidden)
    check_int("pieces", "ways", ways, 2, LATTICE)
    check_sequence("pieces", "through", through, tuple, "(path, point)", least=0)
    for number, point in through:
        check_int("pieces", "through", number, 0, num_paths - 1)
        for at in point:
            check_int("pieces", "through", at, 0, LATTICE - 1)
    run = _checked(run)
    ends = [np.array([0, LATTICE - 1])] * width
    cuts = _breakpoints(
        run, {p: [e[:1] for e in ends] for p in range(num_paths)}, set(), GRID, ways
    )  # most show here already
    cuts |= _breakpoints(run, dict.fromkeys(range(num_paths), ends), cuts, GRID, ways)
    for number, point in through:
        spot = [np.array([at]) for at in point]
        cuts |= _breakpoints(run, {number: spot}, cuts, np.union1d(GRID, np.array(point)), ways)
    unsettled = set(range(num_paths) if hidden else ())
    while True:
        edges = _edges(cuts)
        sides = [[np.array([0, *edges.get((p, a), []), LATTICE]) for a in range(width)] for p in range(num_paths)]
        probes = [[(s[:-1] + s[1:]) // 2 for s in axes] for axes in sides]
        if not unsettled:
            break
        asked = 2 * width * sum(math.prod(len(of) for of in probes[p]) for p in unsettled)  # about
        if asked > MOST_POINTS:
            raise ValueError(
                f"pieces: outcomes must be constant in a few boxes of uniforms, got {asked} points to look at"
            )
        new = _breakpoints(run, {p: probes[p] for p in unsettled}, cuts, GRID[[0, -1]], ways) - cuts
        unsettled = {path for path, _, _ in new}
        cuts |= new
    corners, volumes, owner = [], [], []
    for p in range(num_paths):
        middles = np.meshgrid(*probes[p], indexing="ij")
        sizes = np.meshgrid(*[np.diff(s) / LATTICE for s in sides[p]], indexing="ij")
        corners.append(np.stack([m.ravel() for m in middles], -1))
        volumes.append(np.prod([s.ravel() for s in sizes], 0))
        owner.append(np.full(len(volumes[-1]), p))
    boxes, owners = np.concatenate(corners), np.concatenate(owner)
    return Pieces(run(owners, boxes), np.concatenate(volumes), owners, sides)


def _checked(run: Run) -> Run:
    """The same, which raises where it does not give an outcome for each point."""

    def checked(path: Int64, uniforms: Int64) -> Int64:
        codes = run(path, uniforms)
        if not isinstance(codes, np.ndarray) or codes.shape != path.shape:
            got = list(codes.shape) if isinstance(codes, np.ndarray) else type(codes).__name__
            raise ValueError(f"pieces: run must give an array [{len(path)}] of outcomes, got {got}")
        return codes

    return checked


def _distinct(rows: Int64) -> tuple[Int64, Int64]:
    """Where each distinct row comes first, in the order of values, and which of these each row is. (`numpy.unique`
    takes ten times as long over rows.)
    """
    key = np.zeros(len(rows), np.int64)
    for column in rows.T:
        values, rank = np.unique(column, return_inverse=True)
        key = np.unique(key * len(values) + rank.reshape(-1), return_inverse=True)[1].reshape(-1)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def _edges(cuts: set[Cut]) -> dict[tuple[int, int], list[int]]:
    """The cuts of each path and axis, in order."""
    edges: dict[tuple[int, int], list[int]] = {}
    for path, axis, point in sorted(cuts):
        edges.setdefault((path, axis), []).append(point)
    return edges


def _breakpoints(run: Run, probes: dict[int, list[Int64]], known: set[Cut], grid: Int64, ways: int) -> set[Cut]:
    """Where the outcome changes along lines of one uniform, the others at all combinations of ``probes[path][axis]``:
    between any two neighbours on `grid` or beside the cuts that are known, where most lines change again.
    """
    width = len(next(iter(probes.values())))
    lines = [
        (path, axis, (*others[:axis], 0, *others[axis:]))
        for path, values in probes.items()
        for axis in range(width)
        for others in itertools.product(*values[:axis], *values[axis + 1 :])
    ]
    path = np.array([line[0] for line in lines])
    axis = np.array([line[1] for line in lines])
    start = np.array([line[2] for line in lines], np.int64).reshape(len(lines), width)

    def at(line: Int64, position: Int64) -> Int64:
        points = np.concatenate([path[line, None], start[line]], 1)
        points[np.arange(len(line)), 1 + axis[line]] = position
        first, which = _distinct(points)  # lines meet
        return run(points[first, 0], points[first, 1:])[which]

    edges = _edges(known)
    of_axis = {
        place: np.union1d(grid, [c - i for c in edges.get(place, ()) for i in (0, 1)])
        for place in itertools.product(probes, range(width))
    }
    grids = [of_axis[line[:2]] for line in lines]
    line, position = np.repeat(np.arange(len(lines)), [len(g) for g in grids]), np.concatenate(grids).astype(np.int64)
    code = at(line, position)
    follows = line[1:] == line[:-1]
    line, low, high = line[1:][follows], position[:-1][follows], position[1:][follows]
    code_low, code_high = code[:-1][follows], code[1:][follows]
    cuts: set[Cut] = set()
    while True:
        differ = code_low != code_high
        line, low, high, code_low, code_high = (v[differ] for v in (line, low, high, code_low, code_high))
        done = high - low == 1
        cuts.update(zip(path[line[done]].tolist(), axis[line[done]].tolist(), high[done].tolist(), strict=True))
        line, low, high, code_low, code_high = (v[~done] for v in (line, low, high, code_low, code_high))
        if not len(line):
            return cuts
        between = low[:, None] + (high - low)[:, None] * np.arange(1, ways) // ways
        code_between = at(np.repeat(line, ways - 1), between.ravel()).reshape(between.shape)
        line = np.repeat(line, ways)
        low, high = (np.hstack(of).ravel() for of in ((low[:, None], between), (between, high[:, None])))
        code_low, code_high = (
            np.hstack(of).ravel() for of in ((code_low[:, None], code_between), (code_between, code_high[:, None]))
        )
