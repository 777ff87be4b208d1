"""Random numbers that interpreted Triton kernels make from seeds, replaced by given ones."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..testing import Float64, Int64
from .noise import UnknownNoise, favourites

Label = tuple[Hashable, ...]
"""A number, or a block of them, apart from its seed: the function's name and what it is called with."""
_VLLM = "vllm.v1.worker.gpu.sample.gumbel"
_ANSWERED = {
    ("triton.language.random", "rand"): np.float32,
    (_VLLM, "murmur3_uniform32"): np.float32,
    (_VLLM, "murmur3_uniform64"): np.float64,
}
"""Functions ``(seed, ...)`` of uniforms, by module and name, and what they give."""
_UNKNOWN = ("philox", "randint", "randint4x", "rand4x", "randn", "randn4x")


class KernelNoise:
    """Within it, ``tl.rand`` and vLLM's ``murmur3_uniform32`` and 64 answer interpreted kernels with given numbers.

    A number's row is identified by its seed, its column by its `Label`. A single number takes its column's; a block is
    a race of ids, lane by lane: uniforms whose ``-log(1 - u)`` are times of arrival, like `Noise`'s exponentials.

    Parameters
    ----------
    uniforms, vocab, races
        As `Noise` has them.
    seeds : ndarray
        ``[rows]``, all different.
    labels : dict of Label to int
        The columns known; new ones are added.
    kinds : list of str
        Of the columns, "uniform" or "race"; new ones are added.

    Attributes
    ----------
    asked : list of list of int
        The columns that each row asked for, in order.
    interpreted : bool
        Whether a kernel ran.
    """

    def __init__(
        self, uniforms: Float64, seeds: Int64, vocab: int, labels: dict[Label, int], kinds: list[str],
        races: Mapping[int, Float64] | None = None,
    ) -> None:  # fmt: skip
        self.uniforms, self.vocab, self.races, self.labels, self.kinds = uniforms, vocab, races or {}, labels, kinds
        self.rows = {int(seed): row for row, seed in enumerate(seeds)}
        self.asked: list[list[int]] = [[] for _ in seeds]
        self.interpreted = False
        self._undo = ExitStack()

    def __enter__(self) -> KernelNoise:
        interpreter: Any = sys.modules.get("triton.runtime.interpreter")
        if interpreter is None:
            return self
        function, patch = interpreter.InterpretedFunction, interpreter._patch_lang
        call, patched = function.__call__, set[int]()

        def answer(called: Any, *args: Any, **kwargs: Any) -> Any:
            name = called.fn.__module__, called.fn.__name__
            if name in _ANSWERED:
                if kwargs:  # in the order of the function's own
                    args = inspect.signature(called.fn).bind(*args, **kwargs).args
                return self._answer(interpreter, name, args)
            if name[0] == "triton.language.random" and name[1] in _UNKNOWN:
                raise UnknownNoise(f"Triton's {name[1]}")
            return call(called, *args, **kwargs)

        def patch_once(of: Any) -> Any:  # Triton does it again at each call of a function, which takes most of the time
            self.interpreted = True
            if id(of.__globals__) not in patched:
                patched.add(id(of.__globals__))
                self._undo.callback(patch(of).restore)
            return SimpleNamespace(restore=lambda: None)

        self._undo.callback(setattr, function, "__call__", call)
        self._undo.callback(setattr, interpreter, "_patch_lang", patch)
        function.__call__, interpreter._patch_lang = answer, patch_once
        self._undo.enter_context(np.errstate(all="ignore"))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _answer(self, interpreter: Any, name: tuple[str, str], args: tuple[Any, ...]) -> Any:
        seed, *rest = (np.asarray(getattr(getattr(arg, "handle", None), "data", arg)) for arg in args)
        row = self.rows.get(int(seed.item()) if seed.size == 1 else -1)
        if row is None:
            raise UnknownNoise("a number of a seed that was not given")
        values = np.broadcast_arrays(*rest)
        block = values[0].size > 1
        if block and (values[0].ndim > 1 or values[0].size < self.vocab):
            raise UnknownNoise(f"a block of the shape {list(values[0].shape)} for {self.vocab} ids")
        ids = [value.reshape(-1)[: self.vocab].tolist() for value in values]
        label = (name[1], *zip(*ids, strict=True)) if block else (name[1], *(value[0] for value in ids))
        if label not in self.labels:
            self.labels[label] = len(self.kinds)
            self.kinds.append("race" if block else "uniform")
        column = self.labels[label]
        self.asked[row].append(column)
        number = self.uniforms[row, column] if column < self.uniforms.shape[1] else 0.5
        dtype = _ANSWERED[name]
        out = np.full(values[0].shape, number, dtype)
        if block:
            times = self.races[column][row] if column in self.races else favourites(number, self.vocab)
            out[: self.vocab] = np.minimum(-np.expm1(-times), 1 - np.finfo(out.dtype).epsneg)
        tl = interpreter.tl
        kind = tl.float32 if dtype == np.float32 else tl.float64
        return tl.tensor(interpreter.TensorHandle(out, kind), tl.block_type(kind, list(out.shape)) if block else kind)


def elements(label: Label) -> set[Label]:
    """The single numbers of a label's block, or the one that it is."""
    name, *rest = label
    if rest and isinstance(rest[0], tuple):
        return {(name, *of) for of in rest if isinstance(of, tuple)}
    return {label}
