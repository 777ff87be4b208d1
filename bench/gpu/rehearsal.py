"""Stand-ins for what only a GPU has: everything else of the report then runs without one, on tensors of the CPU.

Events read the host's clock; a captured graph is run once while it is captured, and a replay waits as long as that
took. The figures that come out mean nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

SIZES: Mapping[str, Sequence[int]] = {"vocabs": (300,), "batches": (1, 8), "drafts": (5,)}
COPY_BYTES = 2**22
NAME = "rehearsal"


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.time: float | None = None

    def record(self) -> None:
        """Now."""
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is under way."""
        assert self.time is not None

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self.time is not None and end.time is not None
        return (end.time - self.time) * 1e3


class Stream:
    """``torch.cuda.Stream``."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing is under way."""
        assert isinstance(other, Stream)


class Graph:
    """``torch.cuda.CUDAGraph``."""

    seconds = 0.0

    def replay(self) -> None:
        """Wait as long as the capture took."""
        time.sleep(self.seconds)


@contextlib.contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    """``torch.cuda.graph``."""
    start = time.perf_counter()
    yield
    graph.seconds = time.perf_counter() - start


def set_sync_debug_mode(mode: str) -> None:
    """``torch.cuda.set_sync_debug_mode``."""
    assert mode in ("default", "error")


def nothing(*arguments: Any) -> None:
    """For what only waits, or frees."""


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
