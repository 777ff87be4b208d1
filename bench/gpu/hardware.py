"""The GPU, in numbers that matter for speed."""

from __future__ import annotations

import statistics
import subprocess
from typing import Any

import torch

from .clock import Clock

COPY_BYTES = 2**31


def cache_bytes() -> int:
    """Size of the L2 cache."""
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def describe() -> dict[str, Any]:
    """Name, compute capability, multiprocessors, cache, memory, driver."""
    p = torch.cuda.get_device_properties(0)
    return {
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
        "l2_bytes": cache_bytes(),
        "memory_bytes": p.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def copy_gb_per_s(device: str, clock: Clock, num_bytes: int = COPY_BYTES) -> float:
    """Bytes read and written a second, in 1e9, by a device-to-device copy of random bytes; the median of nine."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    seconds = [clock.seconds(lambda: copy.copy_(source), 1, "warm", "graph") for _ in range(9)]
    return 2 * num_bytes / statistics.median(seconds) / 1e9


def read_gb_per_s(device: str, clock: Clock, num_bytes: int = COPY_BYTES) -> float:
    """Bytes read a second, in 1e9, by the fastest of torch's reductions over random numbers; the median of nine."""
    source = torch.rand(num_bytes // 4, device=device)
    found = []
    for reduce in (torch.sum, torch.amax):
        seconds = [clock.seconds(lambda: reduce(source), 1, "warm", "graph") for _ in range(9)]  # noqa: B023
        found.append(num_bytes / statistics.median(seconds) / 1e9)
    return max(found)


STATE = (
    "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu",
    "pstate",
)  # fmt: skip
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Newer and older name of why the clocks are below their maximum."""


def state() -> dict[str, str] | None:
    """Clocks, power, temperature and what holds the clocks down, as nvidia-smi reports them of torch's first GPU;
    nothing is changed.
    """
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None) if torch.cuda.is_available() else None
    which = [] if uuid is None else [f"--id=GPU-{uuid}"]  # nvidia-smi does not look at CUDA_VISIBLE_DEVICES
    for reasons in REASONS:
        fields = (*STATE, reasons)
        command = ["nvidia-smi", *which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        values = [value.strip() for value in said.splitlines()[0].split(",")]
        return dict(zip((*STATE, "held_down_by"), values, strict=False))
    return None
