"""Interleaved timing, and the memory that a call takes in addition to its inputs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

Call = Callable[[Any], Any]
Key = TypeVar("Key", bound=Hashable)

SHORTEST_TIMING = 200e-6  # seconds: several shorter calls are timed together
LEAST_REPEATS = 5


class Samples:
    """The timings of one provider: seconds per call, and bytes that the rule had to read per call."""

    def __init__(self, call: Call, number: int, repeats: int, first_set: int) -> None:
        self.call, self.number, self.repeats, self.cursor = call, number, repeats, first_set
        self.seconds: list[float] = []
        self.bytes: list[float] = []

    def summary(self) -> dict[str, float | int]:
        """`summarize`, and the median rate in 1e9 bytes a second."""
        rates = [b / s / 1e9 for b, s in zip(self.bytes, self.seconds, strict=True)]
        return {**summarize(self.seconds, self.number), "gb_per_s": statistics.median(rates)}


def summarize(seconds: Sequence[float], number: int) -> dict[str, float | int]:
    """Median, mean, quartiles and minimum, in microseconds, of timings of `number` calls each: seconds a call."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else list(seconds) * 3
    return {
        "median_us": statistics.median(seconds) * 1e6,
        "mean_us": statistics.fmean(seconds) * 1e6,
        "q25_us": quartiles[0] * 1e6,
        "q75_us": quartiles[2] * 1e6,
        "min_us": min(seconds) * 1e6,
        "repeats": len(seconds),
        "calls_per_repeat": number,
    }


def interleave(
    calls: dict[str, Call],
    sets: Sequence[Any],
    bytes_of: Callable[[Any, Any], int],
    *,
    hot: bool,
    repeats: int,
    seconds_each: float,
) -> dict[str, Samples]:
    """Time every call in turn, in an order shuffled each round, so that a busy moment of the machine hits all alike.

    Cold: each timing takes the next input sets, and providers begin at sets far from one another. Hot: the same
    provider runs on the set, untimed, just before. A slow provider takes part in fewer rounds, spread evenly: as many
    as fit in `seconds_each`, at least `LEAST_REPEATS`.
    """
    samples = {}
    for index, (name, call) in enumerate(calls.items()):
        call(sets[0])
        start = time.perf_counter()
        call(sets[-1])
        once = time.perf_counter() - start
        number = max(1, round(SHORTEST_TIMING / once))
        rounds = min(repeats, max(LEAST_REPEATS, round(seconds_each / (once * number))))
        samples[name] = Samples(call, number, rounds, index * len(sets) // len(calls))
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            names = [n for n, s in samples.items() if (turn + 1) * s.repeats // repeats > turn * s.repeats // repeats]
            order.shuffle(names)
            for name in names:
                _time(samples[name], sets, bytes_of, hot)
    finally:
        gc.enable()
    return samples


def take_turns(
    calls: Mapping[Key, Callable[[], Any]], rounds: int, *, warm_up: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Key, list[float]]:
    """The seconds of each of `calls`, all of which run once a round, in an order shuffled each time.

    So a busy moment of the machine hits all alike. The first `warm_up` rounds are not among `rounds`.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    order, shuffled = list(calls), random.Random(0)
    for turn in range(warm_up + rounds):
        shuffled.shuffle(order)
        for key in order:
            began = clock()
            calls[key]()
            if turn >= warm_up:
                seconds[key].append(clock() - began)
    return seconds


def _time(sample: Samples, sets: Sequence[Any], bytes_of: Callable[[Any, Any], int], hot: bool) -> None:
    if hot:
        chosen = [sets[sample.cursor % len(sets)]] * sample.number
        sample.call(chosen[0])
    else:
        chosen = [sets[(sample.cursor + i) % len(sets)] for i in range(sample.number)]
    sample.cursor += 1 if hot else sample.number
    call, outputs = sample.call, []
    start = time.perf_counter()
    for inputs in chosen:
        outputs.append(call(inputs))
    sample.seconds.append((time.perf_counter() - start) / sample.number)
    total = sum(bytes_of(inputs, output) for inputs, output in zip(chosen, outputs, strict=True))
    sample.bytes.append(total / sample.number)


def peak_memory(call: Callable[[], Any]) -> dict[str, int | None]:
    """The most memory that one call held in addition to its inputs, outputs included.

    ``torch_peak_bytes`` counts torch's CPU allocator exactly. ``rss_peak_bytes`` is the growth of the resident peak,
    which includes allocations that torch does not know of, to about 256 KiB; None if the system does not offer it.
    """
    return {"torch_peak_bytes": _torch_peak(call), "rss_peak_bytes": _rss_peak(call)}


def _torch_peak(call: Callable[[], Any]) -> int:
    with quiet(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    assert profiler.kineto_results is not None
    events = [(e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what native code writes to standard error: the profiler announces its start and stop there."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _rss_peak(call: Callable[[], Any]) -> int | None:
    try:
        ctypes.CDLL(None).malloc_trim(0)  # pages left behind by earlier calls would hide what this one takes
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size
        before = resident_peak()
        call()
        return max(0, resident_peak() - before)
    except (OSError, AttributeError):
        return None


def resident_peak() -> int:
    """The most memory that this process has held, in bytes. Not getrusage's figure: there a program started by another
    one begins with the other's peak.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM")
