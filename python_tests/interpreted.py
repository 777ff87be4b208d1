"""Triton kernels on the CPU, by Triton's interpreter, with what it does not look at: bounds and the order of programs.

`prepare` must run before anything imports triton. `checked` holds for the launches inside of it:

- every address that a mask lets through must lie in a tensor that was passed to the kernel (the interpreter itself
  reads and writes whatever memory is there);
- the programs of a launch run in a random order, so that one that reads what another writes shows;
- a module's language functions are exchanged once a launch, not at each call of a device function: half the time.

An operation on a block takes about 50 µs here, and a verify step of four sequences half a second. So the op tests take
smaller batches and vocabularies (`support.Backend`), and of a test with many cases some run (`some_cases`).
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

CASES = 6  # of each test, unless pytest is given --every-case
ADDRESS_OPS = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


def prepare() -> None:
    """Switch the interpreter on where no GPU could run compiled kernels."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def why_not() -> str | None:
    """None if kernels are interpreted in this process, else the reason."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "Triton compiles its kernels here"


def some_cases(items: Sequence[Any]) -> list[Any]:
    """`CASES` of a test's parametrised items (more if it takes more for every value of every parameter to occur)."""
    if len(items) <= CASES:
        return list(items)
    shuffled = random.Random(len(items)).sample(list(items), len(items))
    seen: set[tuple[str, str]] = set()
    chosen, others = [], []
    for item in shuffled:
        values = {(name, repr(value)) for name, value in item.callspec.params.items()}
        (others if values <= seen else chosen).append(item)
        seen |= values
    return chosen + others[: max(0, CASES - len(chosen))]


class Memory:
    """Address ranges that a launch may touch."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ranges = [(t.data_ptr(), t.data_ptr() + _extent(t) * t.element_size()) for t in tensors if t.numel()]
        self.low = np.array([low for low, _ in ranges], np.uint64)
        self.high = np.array([high for _, high in ranges], np.uint64)

    def check(self, what: str, program: object, pointers: Any, mask: Any) -> None:
        """IndexError unless every address that `mask` lets through lies in one of the ranges."""
        addresses = np.asarray(pointers.data, np.uint64)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        if addresses.size == 0:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        if ((addresses.min() >= self.low) & (addresses.max() + size <= self.high)).any():
            return  # all in one tensor
        flat = addresses.ravel()[:, None]
        outside = ~((flat >= self.low) & (flat + size <= self.high)).any(1)
        if outside.any():
            raise IndexError(f"{what} out of bounds in program {program}: {outside.sum()} of {flat.size} addresses")


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first of a view to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def checked(seed: int = 0) -> Iterator[None]:
    """Within: launches are checked, and run their programs in the random order of `seed`."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    launch, patch, place = executor.__call__, interpreter._patch_lang, type(builder).set_grid_idx
    order = random.Random(seed)
    memory = Memory([])
    patched: set[int] = set()
    turns: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal memory
        memory = Memory([a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)])
        patched.clear()
        turns.clear()
        return launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def shuffled(self: Any, *index: int) -> None:
        if not turns:
            programs = list(np.ndindex(*self.grid_dim))
            turns.update(zip(programs, order.sample(programs, len(programs)), strict=True))
        place(self, *turns[index])

    def guarded(name: str) -> Any:
        original = getattr(type(builder), name)
        # the mask is the argument after the pointers of a load, and the one after the values elsewhere
        position = {"create_masked_load": 0, "create_masked_store": 1, "create_atomic_rmw": 2}.get(name)

        def op(self: Any, *args: Any) -> Any:
            pointers, rest = (args[1], args[1:]) if name == "create_atomic_rmw" else (args[0], args[1:])
            mask = None if position is None else rest[position]
            memory.check(name.removeprefix("create_"), self.grid_idx, pointers, mask)
            return original(self, *args)

        return op

    with (
        mock.patch.object(executor, "__call__", run),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(type(builder), "set_grid_idx", shuffled),
        mock.patch.multiple(type(builder), **{name: guarded(name) for name in ADDRESS_OPS}),
        np.errstate(all="ignore"),  # infinities meet in lanes that no result keeps
    ):
        yield
