"""A row of a result as one of a GPU has it."""

from __future__ import annotations

from typing import Any


def row(provider: str, median: float, **other: Any) -> dict[str, Any]:
    base = {
        "id": "x", "op": "verify_chain", "case": "T=1",
        "vocab": 1000, "batch": 8, "num_draft": 5, "dtype": "bfloat16", "cache": "cold",
        "launch": "graph", "provider": provider, "median_us": median, "floor_us": 10.0, "floor_exit_us": 7.0,
        "gb_per_s": 900.0, "needed_bytes": 1e6, "torch_peak_bytes": 512, "launches": 3,
    }  # fmt: skip
    return {**base, **other}
