"""Timing on a CUDA device: events, a cold cache, captured graphs, memory and launches of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..timing import Call, quiet

Run = Callable[[], object]


class Clock:
    """Times runs of several calls with events.

    A graph is queued behind other work, so that the time the host needs to reach it does not count: a buffer as large
    as several caches is read (cold), or the same run is made once more (warm). Calls launched one by one start on an
    idle device, since the host's time is part of theirs. The buffer is read, not written: lines waiting to be written
    back would cost the timed calls bandwidth.
    """

    def __init__(self, device: str, cache_bytes: int) -> None:
        self._buffer = torch.ones(8 * cache_bytes // 4, device=device)

    def seconds(self, run: Run, calls: int, cache: str, launch: str) -> float:
        """Seconds per call of a `run` with `calls` of them, on a "cold" or "warm" cache, by "graph" or "eager"."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if cache == "cold":
            self._buffer.sum()
        else:
            run()
        if launch == "eager":
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls


def eager(call: Call, chosen: Sequence[Any]) -> Run:
    """Calls launched one by one."""

    def run() -> None:
        for inputs in chosen:
            call(inputs)

    return run


CALLS_BEFORE = 2
"""Calls that `capture` makes before those that it captures."""


def capture(call: Call, chosen: Sequence[Any], expected: Sequence[Any] | None = None) -> Run:
    """The same calls as one CUDA graph, whose replay must give what each call is `expected` to give, if that is given.

    Raises
    ------
    ValueError
        A replay gives something else.
    RuntimeError
        The call waits for the device. This is found out before the capture, which such a call would leave broken.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(chosen[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(chosen[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(inputs) for inputs in chosen]
    if expected is not None:
        graph.replay()
        torch.cuda.synchronize()
        if not all(map(same, outputs, expected)):
            raise ValueError("a replayed call gives something else than the call")
    return graph.replay


def same(one: Any, other: Any) -> bool:
    """Whether all tensors of two outputs are equal."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def peak_bytes(call: Call, inputs: Any) -> int:
    """The most memory that a call held in addition to its inputs, outputs included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(inputs)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def launches(call: Call, inputs: Any) -> int | None:
    """Kernels, copies and fills of one call; None where the profiler sees none."""
    activities = torch.profiler.supported_activities()
    with quiet(), torch.profiler.profile(activities=activities) as profiler:
        call(inputs)
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profiler.events() or ()) or None


def healthy(device: str) -> bool:
    """Whether the device still computes: after some errors nothing does until the process ends."""
    try:
        torch.cuda.synchronize()
        return bool((torch.rand(8, device=device) < 2).all())
    except RuntimeError:
        return False
