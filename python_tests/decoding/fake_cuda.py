"""What the captured loop uses of `torch.cuda`, played on the CPU, so that its very code runs without a GPU.

A capture records the aten calls of a step and takes back what they did; a replay makes the same calls on the same
tensors, and no Python of the step runs again: what a real graph would bake in is baked in here. Whatever would make the
host wait for a device, or would copy a number of the host to it, raises during a capture and under the check for
synchronisations. What is copied to pinned memory is garbage there until the event recorded after it has been waited
for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner
from specdec_kernels.decoding import GenerationOutput, graph

WAITS = frozenset(
    "_local_scalar_dense item is_nonzero equal allclose nonzero nonzero_static masked_select unique _unique2 "
    "unique_dim unique_consecutive bincount".split()
)
UPLOADS = frozenset({"lift_fresh"})  # torch.tensor(…)
GARBAGE = -(10**12)
EOS, LAST_WORDS = 4, (21, 22)
TARGET = TableRunner.random().table
TARGET[..., EOS] -= 3  # so rare that most sequences last until steps are captured, whatever a machine's roundings are,
TARGET[(*LAST_WORDS, EOS)] += 30  # and certain to one of `unequal` in test_graph.py
NEAR = TARGET + TableRunner.random(seed=9, spread=1.0).table


class WouldWait(RuntimeError):
    """What torch raises as a RuntimeError on a GPU."""


class Refusing(TorchDispatchMode):
    """Raises for calls that wait for the device, or copy from the host; or warns of them."""

    def __init__(self, warn: bool = False) -> None:
        super().__init__()
        self.warn = warn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
        # torch.repeat_interleave(x, tensor) adds up the tensor to know how much comes out
        counted = name == "repeat_interleave" and func._overloadname != "self_int" and not kwargs.get("output_size")
        if name in WAITS | UPLOADS or by_mask or counted:
            what = f"{name} is a synchronizing CUDA operation"
            if not self.warn:
                raise WouldWait(what)
            warnings.warn(what, stacklevel=2)
        return func(*args, **kwargs)


class Recording(Refusing):
    """Keeps the calls made within, and what they overwrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs[argument.name]
                tensors = written if isinstance(written, list) else [written]
                self.overwritten += [(tensor, tensor.clone()) for tensor in tensors]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def take_back(self) -> None:
        for tensor, before in reversed(self.overwritten):
            tensor.copy_(before)
        self.overwritten.clear()


class FakeCuda:
    """Stands in for `torch.cuda`, and keeps a log of what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: list[Tensor] = []
        self.fail_captures = False
        self.current = Stream()
        self.capture_arguments: list[dict[str, Any]] = []
        self._check: Refusing | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put everything in place, and let CPU tensors pass for those of a GPU."""
        monkeypatch.setattr(graph, "_is_cuda", lambda device: True)
        monkeypatch.setattr(graph, "_pinned", self.pin)
        monkeypatch.setattr(graph, "_streams", graph._Streams())
        monkeypatch.setattr(graph, "_refusals", set())
        for name in ("stream", "graph", "set_sync_debug_mode", "get_sync_debug_mode"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        for name, stand_in in (("Stream", Stream), ("Event", Event), ("CUDAGraph", Graph)):
            # a class, as others use these names in annotations
            monkeypatch.setattr(torch.cuda, name, type(name, (stand_in,), {"cuda": self}))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def pin(self, size: int, device: torch.device) -> Tensor:
        self.pinned.append(torch.empty(size, dtype=torch.int64))
        return self.pinned[-1]

    def set_sync_debug_mode(self, mode: int | str) -> None:
        if self._check is not None:
            self._check.__exit__(None, None, None)
            self._check = None
        if mode not in ("default", 0):
            self.log.append("check")
            self._check = Refusing(warn=mode in ("warn", 1))
            self._check.__enter__()

    def get_sync_debug_mode(self) -> int:
        return 0 if self._check is None else 1 if self._check.warn else 2

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, made: Graph, **arguments: Any) -> Iterator[None]:
        assert arguments["stream"] is self.current
        self.capture_arguments.append(arguments)
        self.log.append("capture")
        assert self._check is None, "to begin a capture, torch waits for the device"
        if self.fail_captures:
            raise RuntimeError("operation not permitted when stream is capturing\nand a second line")
        with made.recording:
            yield
        made.recording.take_back()

    def captures(self) -> int:
        return self.log.count("capture")


class Graph:
    cuda: FakeCuda

    def __init__(self) -> None:
        self.recording = Recording()

    def replay(self) -> None:
        self.cuda.log.append("replay")
        for func, args, kwargs, out in self.recording.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    cuda: FakeCuda

    def __init__(self, device: torch.device | None = None) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append("streams meet")

    def synchronize(self) -> None:
        self.cuda.log.append("drain")


class Event:
    """Keeps back what was copied to pinned memory before it."""

    cuda: FakeCuda
    kept: list[Tensor]

    def record(self, stream: Stream) -> None:
        assert stream is self.cuda.current
        self.cuda.log.append("record")
        self.kept = [buffer.clone() for buffer in self.cuda.pinned]
        for buffer in self.cuda.pinned:
            buffer.fill_(GARBAGE)

    def synchronize(self) -> None:
        self.cuda.log.append("wait")
        for buffer, kept in zip(self.cuda.pinned, self.kept, strict=True):
            buffer.copy_(kept)


def same(one: GenerationOutput, other: GenerationOutput) -> None:
    """Equal in all but the times."""
    for name in ("sequences", "tokens", "num_tokens", "provenance", "status"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.logprobs is None) == (other.logprobs is None)
    for mine, its in zip(one.logprobs or (), other.logprobs or (), strict=True):
        assert torch.equal(mine, its)
    for field in fields(one.stats):
        if not field.name.startswith(("seconds", "costs")):
            assert np.array_equal(getattr(one.stats, field.name), getattr(other.stats, field.name)), field.name


def both(target: Any, *args: Any, **kw: Any) -> tuple[GenerationOutput, GenerationOutput]:
    """As a GPU would run it, and op by op."""
    captured = sk.generate(target, *args, **kw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_is_cuda", lambda device: False)
        return captured, sk.generate(target, *args, **kw)
