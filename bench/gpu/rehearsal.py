"""Stand-ins for what only a GPU has, so that the rest of the report runs without one, on CPU tensors.

Nothing is timed: any two events are `MILLISECONDS` apart, so that no figure of a rehearsal can be taken for a
measurement. A captured graph runs once, during capture, and not at all on replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .. import machine
from ..providers import PROVIDERS, Provider, own

SIZES: Mapping[str, Sequence[int]] = {"vocabs": (300,), "batches": (1, 8), "drafts": (5,)}
COPY_BYTES = 2**22
NAME = "rehearsal"
MILLISECONDS = 1.0
TRACE = [
    {"cat": "kernel", "name": "void specdec::cuda::rehearsed_kernel<1>(int)", "ts": 1, "dur": 1.0,
     "args": {"grid": [1, 1, 1], "block": [32, 1, 1], "registers per thread": 1, "shared memory": 0}},
]  # fmt: skip
"""What torch's profiler would write of a call."""
NOTICE = "REHEARSAL: nothing was timed, every figure stands for a measurement that was not made"


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.recorded = False

    def record(self) -> None:
        """Now."""
        self.recorded = True

    def synchronize(self) -> None:
        """Nothing is under way."""
        assert self.recorded

    def elapsed_time(self, end: Event) -> float:
        """The same whatever happened."""
        assert self.recorded and end.recorded
        return MILLISECONDS


class Stream:
    """``torch.cuda.Stream``."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing is under way."""
        assert isinstance(other, Stream)


class Graph:
    """``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Nothing."""


@contextlib.contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    """``torch.cuda.graph``."""
    assert isinstance(graph, Graph)
    yield


def set_sync_debug_mode(mode: str) -> None:
    """``torch.cuda.set_sync_debug_mode``."""
    assert mode in ("default", "error")


def nothing(*arguments: Any) -> None:
    """Stands in for functions that only wait or free."""


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Within: ``torch.cuda`` has a device of this kind."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=4, L2_cache_size=2**16, total_memory=2**30
    )
    stream = Stream()
    with mock.patch.multiple(
        torch.cuda, Event=Event, Stream=Stream, CUDAGraph=Graph, graph=capturing, synchronize=nothing,
        stream=contextlib.nullcontext, current_stream=lambda: stream, set_sync_debug_mode=set_sync_debug_mode,
        empty_cache=nothing, reset_peak_memory_stats=nothing, memory_allocated=lambda: 0,
        max_memory_allocated=lambda: 4096, get_device_properties=lambda device: properties,
    ), mock.patch.multiple(torch.cuda.profiler, start=nothing, stop=nothing):  # fmt: skip
        yield


def stand_ins() -> contextlib.AbstractContextManager[Any]:
    """Within: the CPU's kernels under the names of all providers that need a GPU through the CUDA library."""
    cpu = Provider(own.builders("cpu"), lambda op, device: None)
    return mock.patch.dict(PROVIDERS, {name: cpu for name in PROVIDERS if name.split(",")[0] == "cuda"})


@contextlib.contextmanager
def device(rehearse: bool) -> Iterator[str]:
    """Within: the device to measure, "cuda", or in a rehearsal "cpu" as if it were one."""
    if not rehearse:
        yield "cuda"
        return
    with pretended(), stand_ins():
        yield "cpu"


def folder(asked: Path | None, rehearse: bool) -> Path:
    """Where results go: as asked, else into the GPU's folder; a rehearsal's are kept apart from results."""
    if not rehearse:
        return asked or machine.RESULTS / machine.label(gpu=True)
    if asked is None or asked.resolve().is_relative_to(machine.RESULTS):
        raise SystemExit("a rehearsal needs --folder, outside bench/results: its figures are no results")
    return asked


def untimed(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Within: every run that `module` (`bench.gpu.decode`) looks at seems to take a millisecond per step."""
    ran = module.Ran
    return mock.patch.object(
        module, "Ran", lambda seconds, steps, tokens: ran(MILLISECONDS / 1e3 * steps, steps, tokens)
    )
