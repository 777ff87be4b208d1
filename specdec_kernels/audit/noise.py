"""A verifier's own random numbers, replaced by given ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..testing import Float64, Int64

_NAMES = ("rand", "rand_like", "uniform_", "exponential_", "multinomial", "bernoulli", "bernoulli_")
_UNKNOWN = (
    "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_", "random_", "geometric_",
    "cauchy_", "log_normal_", "poisson", "dropout",
)  # fmt: skip
_FAVOURED = 1e-30
"""The time of arrival of a race's favourite, where all others arrive at 1."""


def favourites(number: Any, vocab: int) -> Float64:
    """``[..., vocab]`` times of arrival at which the id that a number in [0, 1) stands for comes first."""
    times: Float64 = np.where(np.arange(vocab) == np.floor(number * vocab)[..., None], _FAVOURED, 1.0)
    return times


def differ(kinds: Sequence[str], others: Sequence[str]) -> bool:
    """Whether a column is a race in one of these lists and something else in the other."""
    return any((kind == "race") != (other == "race") for kind, other in zip(kinds, others, strict=False))


def _state(generator: torch.Generator | None) -> bytes:
    return (generator or torch.default_generator).get_state().numpy().tobytes()


class UnknownNoise(Exception):
    """A random number that `Noise` cannot answer for."""


class Noise(TorchFunctionMode):
    """Within it, torch's random functions answer with given numbers, row by row.

    Every call takes the next columns of `uniforms`: ``rand``, ``uniform_`` and ``bernoulli`` one for each number of a
    row, ``multinomial`` one for each draw, by the inverse distribution function, and ``exponential_`` over the
    vocabulary one for each race: the exponentials of ``argmax(weights / exponentials)``. There the column's number x
    stands for a favourite, id ⌊x · vocab⌋, which arrives first, unless `races` has the times of arrival themselves. A
    generator in a state that one was in before takes the columns that were taken then.

    Parameters
    ----------
    uniforms : ndarray
        ``[rows, columns]`` in [0, 1). A column that is missing is 0.5, and counted.
    lengths : ndarray
        ``[rows]``, the draft tokens of each row. The first dimension of a tensor tells which elements belong to which
        row: it is rows, draft tokens, or both. With one row all of them belong to it.
    vocab : int
        Ids.
    races : dict of int to ndarray, optional
        ``[rows, vocab]`` times of arrival, by column.

    Attributes
    ----------
    kinds : list of str
        What the columns were taken for: "uniform", "choice" or "race".
    dtypes : set of torch.dtype
        Of the uniforms asked for.
    """

    def __init__(
        self, uniforms: Float64, lengths: Int64, vocab: int, races: Mapping[int, Float64] | None = None
    ) -> None:
        super().__init__()
        self.uniforms, self.lengths, self.vocab, self.races = uniforms, lengths, vocab, races or {}
        self.kinds: list[str] = []
        self.dtypes: set[torch.dtype] = set()
        self._taken: dict[bytes, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _UNKNOWN:
            raise UnknownNoise(f"torch's {name}")
        if name not in _NAMES:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if name in ("rand", "rand_like"):
            before = _state(generator)
            out = func(*args, **kwargs)
            return out.copy_(self._numbers(out, generator, before))
        if name == "uniform_":
            out, low, high = args[0], *(float(v) for v in _bounds(args[1:], kwargs))
            return out.copy_(low + (high - low) * self._numbers(out, generator))
        if name == "exponential_":
            rate = float(args[1] if len(args) > 1 else kwargs.get("lambd", 1.0))
            return args[0].copy_(self._exponentials(args[0], generator) / rate)
        given = args[0] if args else kwargs["input"]
        if name == "multinomial":
            if (args[1] if len(args) > 1 else kwargs["num_samples"]) != 1:
                raise UnknownNoise("a multinomial of several draws")
            return self._choice(given, generator)
        probability = args[1] if len(args) > 1 else kwargs.get("p", given if name == "bernoulli" else 0.5)
        return (given if name == "bernoulli_" else torch.empty_like(given)).copy_(
            self._numbers(given, generator).to(given.device) < probability
        )

    def _columns(self, shape: torch.Size) -> tuple[Int64, Int64]:
        """The row of each element, and its place among that row's."""
        rows, numel = len(self.lengths), shape.numel()
        first = shape[0] if shape else 1
        if rows == 1:
            return np.zeros(numel, np.int64), np.arange(numel)
        alike = (self.lengths == self.lengths[0]).all()
        if first == rows or (alike and first and first % rows == 0):
            return np.arange(numel) // (numel // rows), np.arange(numel) % (numel // rows)
        for sizes in (self.lengths, self.lengths + 1):  # packed: a number for each draft token, or one more
            if first == sizes.sum():
                each = numel // first
                starts = np.repeat(sizes.cumsum() - sizes, sizes * each)
                return np.repeat(np.arange(rows), sizes * each), np.arange(numel) - starts * each
        raise UnknownNoise(f"numbers of the shape {list(shape)} for {rows} sequences")

    def _take(
        self, count: int, kind: str, generator: torch.Generator | None, drawn: int, before: bytes | None = None
    ) -> int:
        """The first of the columns for these numbers. Moves the generator on as `drawn` numbers do, unless it was moved
        already from the state `before`.
        """
        state = _state(generator) if before is None else before
        start = self._taken.setdefault(state, len(self.kinds))
        if differ(self.kinds[start:], [kind] * count):
            raise UnknownNoise("a race with the numbers of another draw")
        self.kinds += [kind] * (start + count - len(self.kinds))
        missing = len(self.kinds) - self.uniforms.shape[1]
        if missing > 0:
            self.uniforms = np.pad(self.uniforms, ((0, 0), (0, missing)), constant_values=0.5)
        if before is None:
            torch.rand(drawn, generator=generator, device="cpu" if generator is None else generator.device)
        return start

    def _numbers(self, like: Tensor, generator: torch.Generator | None, before: bytes | None = None) -> Tensor:
        row, place = self._columns(like.shape)
        if not len(row):
            return torch.empty(like.shape)
        start = self._take(int(place.max()) + 1, "uniform", generator, like.numel(), before)
        self.dtypes.add(like.dtype)
        return torch.from_numpy(self.uniforms[row, start + place].reshape(like.shape))

    def _exponentials(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        if not like.dim() or like.shape[-1] != self.vocab or (like.dim() == 1 and len(self.lengths) > 1):
            return -torch.log1p(-self._numbers(like, generator))
        row, place = self._columns(like.shape)
        if not len(row):  # as where a verifier draws for the rejected rows alone, and there is none
            return torch.empty(like.shape)
        row, place = row[:: self.vocab], place[:: self.vocab] // self.vocab
        start = self._take(int(place.max()) + 1, "race", generator, like.numel())
        times = favourites(self.uniforms[row, start + place], self.vocab)
        for column, given in self.races.items():
            here = start + place == column
            times[here] = given[row[here]]
        return torch.from_numpy(times.reshape(like.shape))

    def _choice(self, weights: Tensor, generator: torch.Generator | None) -> Tensor:
        w = weights.detach().double().cpu().numpy()
        if not np.isfinite(w).all() or (w < 0).any() or (w.sum(-1) <= 0).any():  # as torch itself refuses it
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or sums to 0")
        row, place = self._columns(weights.shape[:-1])
        if not len(row):
            return torch.empty((*weights.shape[:-1], 1), dtype=torch.int64, device=weights.device)
        start = self._take(int(place.max()) + 1, "choice", generator, len(row))
        flat = w.reshape(len(row), -1)
        ends = flat.cumsum(-1) / flat.sum(-1, keepdims=True)
        ids = (ends <= self.uniforms[row, start + place][:, None]).sum(-1)
        last = flat.shape[-1] - 1 - (flat[:, ::-1] > 0).argmax(-1)
        chosen = np.minimum(ids, last).reshape(*weights.shape[:-1], 1)
        return torch.from_numpy(chosen).to(weights.device)


def _bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """``from`` and ``to`` of ``uniform_``."""
    given = dict(zip(("from", "to"), args, strict=False)) | kwargs
    return given.get("from", 0.0), given.get("to", 1.0)
