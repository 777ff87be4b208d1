"""Triton kernels on the CPU, by Triton's interpreter, plus what it does not check: bounds and the order of programs.

`prepare` must run before anything imports triton. Within `checked`, for every launch:

- every address that a mask lets through must lie in a tensor that was passed to the kernel (the interpreter itself
  reads and writes whatever memory is there);
- the programs of a launch run in a random order, so that one that reads what another writes is noticed;
- prefix sums are added in a tree, as on a GPU: added one after the other, a thousand equal weights are rounded to the
  same side each time, and tokens change;
- a module's language functions are replaced once, not at each call of a device function;
- a language function decides only once what to do with operands of given types, not at each call (`Plans`).

The last two make it eight times as fast: an operation on a tensor takes about 10 µs, and a verify step of four
sequences an eighth of a second. Still, the op tests use smaller batches and vocabularies here (`support.Backend`), and
of a test with many cases only some run (`some_cases`).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from specdec_kernels.laws import TargetLaw

CASES = 4  # per test, unless pytest is given --every-case
MEMORY_OPS = ("create_load", "create_masked_load", "create_store", "create_masked_store")
ADDRESS_OPS = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
# Language functions that `Plans` covers, besides the operators: no atomics, and nothing that asks for the program's id.
PLANNED = frozenset(
    "to cast where minimum maximum full arange load store expand_dims broadcast_to reshape abs exp exp2 log log2 floor "
    "ceil sqrt sqrt_rn div_rn fma umulhi add sub mul logical_and logical_or".split()
)
MOST_PLANS = 1 << 12  # for one function: a loop's counter is a constant, too
LARGEST_CONSTANT = 1 << 14  # bytes that a plan may keep


def prepare() -> None:
    """Switch the interpreter on if no GPU could run compiled kernels."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def why_not() -> str | None:
    """None if kernels are interpreted in this process, else the reason."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "Triton compiles its kernels here"


def some_cases(items: Sequence[Any], most: int = CASES, seed: str = "") -> list[Any]:
    """`most` of a test's parametrised items, different ones for each `seed` (more if it takes more for every value of
    every parameter to occur; for target laws, every class and every word among their fields).
    """
    if len(items) <= most:
        return list(items)
    shuffled = random.Random(f"{len(items)}{seed}").sample(list(items), len(items))
    seen: set[tuple[str, str]] = set()
    chosen, others = [], []
    for item in shuffled:
        values = values_of(item)
        (others if values <= seen else chosen).append(item)
        seen |= values
    return chosen + others[: max(0, most - len(chosen))]


def values_of(item: Any) -> set[tuple[str, str]]:
    """The parameters of a parametrised item, without the backend: names, and words for the values."""
    given = item.callspec.params.items()
    return {(name, part) for name, value in given if name != "backend" for part in _parts(value)}


def _parts(value: Any) -> set[str]:
    if not isinstance(value, TargetLaw):
        return {repr(value)}
    return {type(value).__name__, *(word for word in vars(value).values() if isinstance(word, str))}


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
            chosen = np.asarray(mask.data, bool)
            if chosen.shape != addresses.shape:
                chosen = np.broadcast_to(chosen, addresses.shape)
            addresses = addresses[chosen]
        if addresses.size == 0:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        if ((addresses.min() >= self.low) & (addresses.max() + size <= self.high)).any():
            return  # all in one tensor
        flat = addresses.ravel()[:, None]
        outside = ~((flat >= self.low) & (flat + size <= self.high)).any(1)
        if outside.any():
            raise IndexError(f"{what} out of bounds in program {program}: {outside.sum()} of {flat.size} addresses")


class Reads:
    """How often each element of a tensor is loaded; `counts` has its shape."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.first, self.size = tensor.data_ptr(), tensor.element_size()
        self.counts = np.zeros(tuple(tensor.shape), np.int64)

    def add(self, pointers: Any, mask: Any) -> None:
        """Adds those of one load."""
        addresses = np.asarray(pointers.data, np.uint64)
        chosen = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)].astype(np.int64)
        places = (chosen - self.first) // self.size
        places = places[(places >= 0) & (places < self.counts.size)]
        self.counts.ravel()[:] += np.bincount(places, minlength=self.counts.size)


watched: list[Reads] = []


@contextmanager
def reads_of(tensor: torch.Tensor) -> Iterator[Reads]:
    """Within: loads by `checked` launches are counted."""
    watched.append(Reads(tensor))
    try:
        yield watched[-1]
    finally:
        watched.pop()


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among a launch's arguments, including those in tuples and those reinterpreted as another dtype."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensors(argument)
        elif isinstance(tensor := getattr(argument, "base", argument), torch.Tensor):
            yield tensor


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first of a view to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class Refused(Exception):
    """What a language function does may depend on more than its operands' types and constants."""


class Recorder:
    """Stands in for the interpreter's builder, and records what it is asked to do.

    `values` are the inputs, then whatever else occurred; those at the places in `varying` depend on the inputs.
    """

    def __init__(self, builder: Any, inputs: list[Any]) -> None:
        self.builder, self.values, self.inputs = builder, list(inputs), len(inputs)
        self.varying = set(range(len(inputs)))
        self.steps: list[tuple[str, list[int], int]] = []  # method, places of its arguments, place of its result

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.builder, name)

        def call(*args: Any) -> Any:
            places = [self.place(a) for a in args]
            out = method(*args)
            self.values.append(out)
            large = getattr(getattr(out, "data", None), "nbytes", 0) > LARGEST_CONSTANT
            if large or name in MEMORY_OPS or not self.varying.isdisjoint(places):
                self.varying.add(len(self.values) - 1)
                self.steps.append((name, places, len(self.values) - 1))
            return out

        return call if callable(method) else method

    def place(self, value: Any) -> int:
        for i, known in enumerate(self.values):
            if known is value:
                return i
        if hasattr(value, "data"):
            raise Refused  # built without our knowledge
        self.values.append(value)
        return len(self.values) - 1

    def plan(self, result: Any) -> tuple[list[Any], list[tuple[str, list[int], int]], int]:
        """The constants in their places, the steps that `result` takes, and its place."""
        place = self.place(result)
        needed, steps = {place}, []
        for step in reversed(self.steps):
            if step[0] in MEMORY_OPS or step[2] in needed:
                needed.update(step[1])
                steps.insert(0, step)
        needed -= self.varying
        constants = [v if i in needed else None for i, v in enumerate(self.values)]
        return constants, steps, place


class Plans:
    """Language functions run once for operands of given types; after that only their calls of the builder are repeated.

    Triton's language layers are those of its compiler: the operands' types and the constants decide what a builder is
    asked to do, and only the builder, here numpy, sees data. Deciding would take nine tenths of the time.
    """

    def __init__(self, interpreter: ModuleType) -> None:
        from triton.language import core, semantic

        self.core, self.semantic, self.handle = core, semantic.TritonSemantic, interpreter.TensorHandle
        self.builder = interpreter.interpreter_builder
        self.plain = {int, bool, str, type(None), core.dtype}
        self.known: dict[Any, dict[Any, Any]] = {}
        self.ufuncs: dict[str, np.ufunc | None] = {}

        def truth(tensor: Any) -> bool:
            if tensor.handle.data.size == 1:
                raise Refused  # the function looks at data
            return True

        self.stand_in = type("tensor", (core.tensor,), {"__bool__": truth, "__index__": truth})

    def planned(self, member: Any) -> Any:
        """`member`, a language function, run by plans."""
        known, plain = self.known.setdefault(member, {}), self.semantic(self.builder)

        def function(*args: Any, **kwargs: Any) -> Any:
            semantic = kwargs.pop("_semantic", None)
            if semantic is not None:  # called by another language function
                return member(*args, **kwargs, _semantic=semantic)
            inputs: list[Any] = []
            try:
                key = self.signature(args, inputs)
                if kwargs:
                    key = *key, *kwargs, *self.signature(kwargs.values(), inputs)
            except Refused:
                return member(*args, **kwargs, _semantic=plain)
            plan = known.get(key, False)
            if plan:
                return plan(inputs)
            if plan is False and len(known) < MOST_PLANS:
                known[key] = None  # permanently, if this fails
                with suppress(Exception):  # an error in the operands will be raised again below
                    known[key], result = self.record(member, args, kwargs)
                    return result
            return member(*args, **kwargs, _semantic=plain)

        return function

    def signature(self, values: Iterable[Any], inputs: list[Any] | None = None) -> tuple[Any, ...]:
        """The types of the tensors among `values`, whose handles go to `inputs`, and the constants."""
        core, key = self.core, []
        for value in values:
            kind = type(value)
            if kind is core.tensor and inputs is not None:
                inputs.append(value.handle)
                key.append(value.type.name)
            elif kind is float or kind is slice:
                key.append(repr(value))  # 0.0 equals -0.0, and slices cannot be hashed
            elif kind in self.plain:
                key += kind, value
            elif kind is core.constexpr:
                key.append((kind, self.signature((value.value,))))
            elif kind is tuple or kind is list or kind is core.tuple:
                key.append((kind, self.signature(value)))
            else:
                raise Refused
        return tuple(key)

    def record(self, member: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A function that does the same for other operands, and the call's result."""
        inputs: list[Any] = []

        def stand_in(value: Any) -> Any:
            if type(value) is not self.core.tensor:
                return value
            inputs.append(self.handle(value.handle.data, value.handle.dtype))  # a new one if a tensor is given twice
            return self.stand_in(inputs[-1], value.type)

        args, kwargs = [stand_in(value) for value in args], {name: stand_in(value) for name, value in kwargs.items()}
        recorder = Recorder(self.builder, inputs)
        semantic = self.semantic(recorder)
        semantic.tensor = self.stand_in
        result = member(*args, **kwargs, _semantic=semantic)
        return self.compiled(recorder, result), self.core.tensor(result.handle, result.type)

    def compiled(self, recorder: Recorder, result: Any) -> Callable[[list[Any]], Any]:
        """A function of the operands' handles that repeats what was recorded and builds a tensor like `result`."""
        constants, steps, place = recorder.plan(result.handle)
        known: dict[str, Any] = {f"v{i}": value for i, value in enumerate(constants)}
        known |= {"builder": self.builder, "new": object.__new__, "tensor": self.core.tensor, "handle": self.handle}
        known["attributes"] = {name: value for name, value in vars(result).items() if name != "handle"}
        lines = []
        for name, places, out in steps:
            slow = f"v{out} = builder.{name}({', '.join(f'v{i}' for i in places)})"
            operation = self.elementwise(name)
            found = [recorder.values[i] for i in (*places, out)]
            dtypes = [getattr(getattr(value, "data", None), "dtype", None) for value in found]
            if operation is None or set(dtypes[:2]) == {np.dtype(bool)}:
                lines.append(slow)
                continue
            left, right = (f"v{i}" for i in places)
            known |= {f"op{out}": operation, f"dtype{out}": dtypes[-1]}
            lines += [
                f"data = op{out}({left}.data, {right}.data)",
                f"if data.dtype is not dtype{out}: {slow}",
                "else:",
                f"    v{out} = new(handle)",
                f"    v{out}.data, v{out}.dtype, v{out}.attr = data, {left}.dtype.scalar, {{}}",
            ]
        inputs = "".join(f"v{i}, " for i in range(recorder.inputs))
        lines = [
            *([f"{inputs}= inputs"] if inputs else []), *lines, "result = new(tensor)",
            "result.__dict__.update(attributes)", f"result.handle = v{place}", "return result",
        ]  # fmt: skip
        exec("def call(inputs):\n" + "\n".join(f"    {line}" for line in lines), known)
        call: Callable[[list[Any]], Any] = known["call"]
        return call

    def elementwise(self, name: str) -> Any:
        """The ufunc that this method of the builder applies to two operands, if that is all it does."""
        if name not in self.ufuncs:
            found = None
            with suppress(Exception):
                probe = SimpleNamespace(binary_op=lambda left, right, operation: operation)
                found = getattr(type(self.builder), name)(probe, None, None)
            self.ufuncs[name] = found if isinstance(found, np.ufunc) else None
        return self.ufuncs[name]


@functools.cache
def faster(interpreter: ModuleType) -> dict[str, Any]:
    """Faster replacements for the interpreter's own functions; none if these are not as expected."""
    patch_attr, np_dtype = getattr(interpreter, "_patch_attr", None), getattr(interpreter, "_get_np_dtype", None)
    if not patch_attr or not np_dtype:
        return {}
    if [*inspect.signature(patch_attr).parameters] != ["obj", "name", "member", "builder", "scope"]:
        return {}
    plans, np_dtypes = Plans(interpreter), {}

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if name in PLANNED or name.startswith("__"):
            scope.set_attr(obj, name, plans.planned(member))
        else:
            patch_attr(obj, name, member, builder, scope)

    def known_np_dtype(dtype: Any) -> Any:  # the original builds a table of all dtypes at each call
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    return {"_patch_attr": patch, "_get_np_dtype": known_np_dtype}


def prefix_sums(self: Any, values: Any) -> list[Any]:
    """Replaces the interpreter's ``ScanOps.cumsum``."""
    sums = values.handle.data.copy()
    last = np.moveaxis(sums, self.axis, -1)
    distance = 1
    while distance < last.shape[-1]:
        last[..., distance:] += last[..., :-distance]
        distance *= 2
    return [self.to_tensor(sums, dtype=values.dtype)]


def unwritten(empty: Any, *shape: Any, **options: Any) -> torch.Tensor:
    """Like `torch.empty` or `torch.empty_like`, filled with what no kernel may take for something else: NaN, the bits
    of infinity, or no id.
    """
    made: torch.Tensor = empty(*shape, **options)
    integers = {torch.int32: 0x7F800000, torch.int64: -(2**62)}
    return made.fill_(math.nan if made.is_floating_point() else integers.get(made.dtype, 0))


@contextmanager
def checked(seed: int = 0) -> Iterator[None]:
    """Within: launches are checked, and run their programs in the random order of `seed`."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    launch, patch, place = executor.__call__, interpreter._patch_lang, type(builder).set_grid_idx
    patch_tensor = interpreter._patch_lang_tensor
    order = random.Random(seed)
    memory = Memory([])
    patched: set[int] = set()
    turns: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal memory
        memory = Memory([*_tensors((*args, *kwargs.values()))])
        turns.clear()
        return launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            scopes.callback(patch(function).restore)
        return SimpleNamespace(restore=lambda: None)  # what a launch calls at its end

    def patch_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # Triton 3.6's fails with NumPy 2.4

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
            if name == "create_masked_load":
                for reads in watched:
                    reads.add(pointers, mask)
            return original(self, *args)

        return op

    with (
        ExitStack() as scopes,
        mock.patch.object(executor, "__call__", run),
        mock.patch.object(torch, "empty", functools.partial(unwritten, torch.empty)),
        mock.patch.object(torch, "empty_like", functools.partial(unwritten, torch.empty_like)),
        mock.patch.multiple(interpreter, _patch_lang=patch_once, _patch_lang_tensor=patch_index, **faster(interpreter)),
        mock.patch.object(type(builder), "set_grid_idx", shuffled),
        mock.patch.object(interpreter.ScanOps, "cumsum", prefix_sums),
        mock.patch.multiple(type(builder), **{name: guarded(name) for name in ADDRESS_OPS}),
        np.errstate(all="ignore"),  # infinities meet in lanes whose results are discarded
    ):
        yield
