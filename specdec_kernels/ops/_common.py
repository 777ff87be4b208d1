"""What every op file uses: the library, checks across an op's arguments, and dispatch to a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..backends import FUNCTIONS, OPS, direct, has_kernel, implementation, in_python, routed
from ..checks import FLOAT32, INT32, check_contiguous_rows, check_given, check_logits, check_shape
from ..config import settings
from ..processors import Processors
from ..sampling import DEFAULT_PARAMS, SamplingParams
from ..types import Status
from .arguments import A, Definition, Processing

LIBRARY = torch.library.Library("specdec", "DEF")

Shape = tuple[tuple[str, ...], tuple[int, ...]]
"""The names of the dimensions, and their sizes."""

# What a tensor must be: the argument's name, its value, dtypes, the names of its dimensions and its shape.
Expected = tuple[str, Tensor | None, tuple[torch.dtype, ...], tuple[str, ...], tuple[int, ...]]


def define(name: str, arguments: type[A], returns: str, fake: Callable[[A], Any]) -> tuple[Any, Callable[..., Any]]:
    """Define ``specdec::name``; returns the op and `Definition.call`, which calls it with arguments by name.

    The reference is its implementation wherever no library registers a faster one. What an interrupted import has
    already defined is not defined again.
    """
    definition = OPS[name] = Definition(arguments)
    FUNCTIONS[name] = name
    if not hasattr(torch.ops.specdec, name):
        LIBRARY.define(f"{name}({definition.schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    if not has_kernel(name, "CompositeExplicitAutograd"):
        LIBRARY.impl(name, in_python("reference", name), "CompositeExplicitAutograd")

    def run_fake(*given: Any) -> Any:
        # If one tensor has no data and others do, the dispatcher runs the fake, whose results would be arbitrary.
        devices = {tensor.device for tensor in pytree.tree_leaves(given) if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"specdec: {name} takes tensors of one device, got {names}")
        return fake(definition.unpack(*given))

    if not has_kernel(name, "Meta"):
        torch.library.register_fake(f"specdec::{name}", run_fake, lib=LIBRARY)
    return getattr(torch.ops.specdec, name).default, definition.call


class Instead(NamedTuple):
    """Inside the package, takes the place of a backend's name: `run` runs an op's validated call from its arguments."""

    run: Callable[[Any], Any]


def dispatch(
    name: str, overload: Any, backend: str | Instead | None, device: torch.device, caller: str | None = None
) -> Any:
    """The callable that runs op `name` on `device`: torch's dispatcher, or the shortcut past it (`backends.direct`),
    unless a backend in Python is asked for by name or is the one that can run.
    """
    overload = direct.call(name, overload)
    if backend is None:
        backend = settings().backend
        if backend is None:
            backend = routed(name, device)
            if backend is None:
                return overload
    elif isinstance(backend, Instead):
        run, unpack = backend.run, OPS[name].unpack
        return lambda *given: run(unpack(*given))
    return implementation(name, overload, backend, device, caller or name)


def check_tensors(op: str, like: Tensor, expected: list[Expected]) -> None:
    """`check_given` for each, on `like`'s device; a dimension "vocab" or "vocab_draft" must also be contiguous.

    Nearly always all of them are right, which a single check in C++ confirms.
    """
    if direct.all_fit(like, expected):
        return
    for argument, value, dtypes, names, shape in expected:
        check_given(op, argument, value, dtypes, like.device, names, shape)
        if names[-1] in ("vocab", "vocab_draft"):
            assert isinstance(value, Tensor)
            check_contiguous_rows(op, argument, value)


def check_rows(op: str, argument: str, logits: object, probs: object) -> tuple[Tensor, str, torch.Size]:
    """The given rows, their name and their shape: logits, named `argument`, or probabilities in their place."""
    if probs is None:
        shape = check_logits(op, argument, logits)
    else:
        name = argument.replace("logits", "probs")
        if logits is not None:
            raise ValueError(f"{op}: give {argument} or {name}, got both")
        logits, argument = probs, name
        shape = check_logits(op, name, probs, dtypes=FLOAT32)
    assert isinstance(logits, Tensor)
    return logits, argument, shape


def check_beside_probs(op: str, name: str, params: SamplingParams, others: Mapping[str, object]) -> None:
    """ValueError if something that acts on logits is given together with rows of probabilities."""
    if isinstance(params.temperature, Tensor) or not (params.is_greedy or params.temperature == 1):
        given = "a tensor" if isinstance(params.temperature, Tensor) else params.temperature
        raise ValueError(f"{op}: params.temperature must be 1 or 0 beside {name}, got {given}")
    for other, value in others.items():
        if value is not None:
            raise ValueError(f"{op}: {other} must be None beside {name}, got one")


def check_params(
    op: str, argument: str, params: SamplingParams | None, batch: int, device: torch.device
) -> SamplingParams:
    """The sampling parameters, or those that None stands for; per-sequence tensors are checked against the batch."""
    if params is None:
        return DEFAULT_PARAMS
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{op}: {argument} must be a SamplingParams or None, got {type(params).__name__}")
    if params._tensors is not None:
        for name, tensor in zip(("temperature", "top_k", "top_p", "min_p"), params._tensors, strict=True):
            if tensor is not None:
                check_shape(op, f"{argument}.{name}", tensor, ("batch",), (batch,))
                if tensor.device != device:
                    raise ValueError(f"{op}: {argument}.{name} must be on {device}, got {tensor.device}")
    return params


def check_processors(
    op: str, processors: object, logits: Tensor, names: tuple[str, ...] | None, batch: int,
    shape: tuple[int, ...] | None = None,
) -> Processing:  # fmt: skip
    """The processors as the op takes them for `logits`; None if none is on. The rows' dimensions are called `names`
    (None: by number), and tokens are drawn from rows of this `shape` (None: that of `logits`).
    """
    if not isinstance(processors, Processors):
        raise TypeError(f"{op}: processors must be a Processors or None, got {type(processors).__name__}")
    vocab, rows = logits.shape[-1], tuple(logits.shape[:-1]) if shape is None else shape
    bitmask, lists = processors.token_bitmask, processors._lists(logits.device, vocab)
    if bitmask is not None:
        names = names or tuple(map(str, range(len(rows))))
        shape = (*rows, (vocab + 31) // 32)
        check_given(op, "processors.token_bitmask", bitmask, INT32, logits.device, (*names, "words"), shape)
    if lists.num not in (1, batch):
        raise ValueError(f"{op}: processors must be of 1 or batch={batch} sequences, got {lists.num}")
    if lists.elsewhere is not None:
        raise ValueError(f"{op}: processors.token_counts must be on {logits.device}, got {lists.elsewhere}")
    return [bitmask, *lists.flat] if bitmask is not None or lists.any else None


def as_rows(logits: Tensor) -> Tensor:
    """``[..., vocab]`` as ``[batch, n, vocab]``, where `batch` is the first leading dimension (1 if there is none)."""
    if logits.dim() == 3:
        return logits
    if logits.dim() <= 2:
        return logits.unsqueeze(-2) if logits.dim() == 2 else logits[None, None]
    return logits.flatten(1, -2)


def places_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, int]:
    """For a tensor that is written to: whether each stride is at least the span of the smaller ones, so that no two
    elements share memory; and how many elements all strides span.
    """
    find = _places_of if torch.compiler.is_compiling() else _known_places_of  # Dynamo warns of a cache
    return find(shape, strides)


def _places_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bool, int]:
    # Compared pair by pair: Dynamo sorts no sizes that may change.
    dims = list(enumerate(zip(strides, shape, strict=True)))
    nested = True
    for i, (stride, size) in dims:
        within = [(s, n) for j, (s, n) in dims if s < stride or (s == stride and j < i)]
        nested &= stride > sum(s * (n - 1) for s, n in within) or size <= 1
    return nested, 1 + sum(stride * (size - 1) for _, (stride, size) in dims)


_known_places_of = functools.lru_cache(maxsize=64)(_places_of)


def written(*tensors: Tensor) -> None:
    """Tell autograd that an op is about to write to these tensors, because kernels write without its knowledge. It is
    told beforehand, as a kernel that fails may also have written.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


_checks: ContextVar[bool] = ContextVar("specdec_checks", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """Within this context SPECDEC_CHECK=1 never raises: internal callers inspect the status themselves."""
    before = _checks.set(False)
    try:
        yield
    finally:
        _checks.reset(before)


def raise_for_status(op: str, status: Tensor) -> None:
    """With SPECDEC_CHECK=1 (a host synchronisation): RuntimeError naming the flags and the first offending row, by all
    its indices in `status`.
    """
    # While it compiles, torch does not take a ContextVar.
    if not torch.compiler.is_compiling() and settings().check and _checks.get() and bool(status.any()):
        first = tuple(status.nonzero()[0].tolist())
        row = list(first) if len(first) > 1 else (*first, 0)[0]  # without dimensions there is but one
        raise RuntimeError(f"{op}: row {row} set {Status(int(status[first]))!r} (raised because SPECDEC_CHECK is set)")
