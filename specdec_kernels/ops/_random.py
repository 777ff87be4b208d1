"""The random numbers of a verify step: given as numbers, or as seeds from which it computes them."""

from __future__ import annotations

from torch import Tensor

from ..checks import (
    ID_DTYPES,
    INT64,
    UNIFORM_DTYPES,
    check_given,
    check_int,
    check_one_of,
    check_shape,
    check_tensor,
    integer_kind,
    shape_error,
)
from ._common import Expected
from .arguments import PURPOSES

RandomNumbers = tuple[Tensor | None, Tensor | None, Tensor | None, int | Tensor | None, Tensor | None]
"""uniform_samples, noise_keys, seeds, step, positions."""


def purpose_code(op: str, purpose: str) -> int:
    """The number of a stream; ValueError for an unknown name."""
    check_one_of(op, "purpose", purpose, PURPOSES)
    return PURPOSES[purpose]


def check_seeds(op: str, seeds: Tensor) -> None:
    """Raise unless they are ``[batch]`` int64."""
    check_tensor(op, "seeds", seeds, INT64, None)
    if seeds.dim() != 1:
        raise shape_error(op, "seeds", "[batch]", seeds)


def split_step(op: str, step: int | Tensor, seeds: Tensor) -> tuple[Tensor | None, int]:
    """A step as (per-sequence tensor or None, scalar)."""
    if isinstance(step, Tensor):
        check_tensor(op, "step", step, INT64, seeds.device)
        check_shape(op, "step", step, ("batch",), (seeds.shape[0],))
        return step, 0
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"{op}: step must be an integer or a [batch] int64 tensor, got {integer_kind(step)}")
    return None, check_int(op, "step", step, 0, None)


def noise_of(
    op: str, acceptance: str, numbers: RandomNumbers, like: Tensor, batch: int, names: tuple[str, ...],
    shape: tuple[int, ...],
) -> tuple[Expected, Tensor | None, int]:  # fmt: skip
    """What the rule `acceptance` draws with, and the step as `split_step` returns it; TypeError or ValueError unless
    they are given as the rule takes them. Rows have `shape`, with `names`, and are on the device of `like`.
    """
    uniform_samples, noise_keys, seeds, step, positions = numbers
    keys = ("noise_keys", noise_keys, INT64, names, shape)
    coins = ("uniform_samples", uniform_samples, UNIFORM_DTYPES, names, shape)
    noise, other = (keys, coins) if acceptance == "match" else (coins, keys)
    if seeds is None:
        if step is not None or positions is not None:
            raise ValueError(f"{op}: {'positions' if step is None else 'step'} needs seeds, got none")
        if other[1] is not None:
            if acceptance == "greedy":  # needs no noise, but tolerates uniforms
                raise ValueError(f"{op}: acceptance='greedy' must come without noise_keys, got some")
            raise ValueError(f"{op}: acceptance={acceptance!r} takes {noise[0]}, got {other[0]}")
        return noise, None, 0
    for given in (coins, keys):
        if given[1] is not None:
            raise ValueError(f"{op}: give {given[0]} or seeds, got both")
    check_given(op, "seeds", seeds, INT64, like.device, ("batch",), (batch,))
    noise = ("seeds", seeds, INT64, ("batch",), (batch,))
    if acceptance == "match":
        if positions is None:
            raise ValueError(f"{op}: acceptance='match' needs the positions beside seeds, got None")
        check_given(op, "positions", positions, ID_DTYPES, like.device, names, shape)
        if step is None:
            return noise, None, -1
    elif positions is not None:
        raise ValueError(f"{op}: acceptance={acceptance!r} takes seeds and a step, got positions")
    elif step is None:
        raise ValueError(f"{op}: seeds need a step, got None")
    return noise, *split_step(op, step, seeds)
