"""The tables of a page, the results that they show, and whether a figure in one is a result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/amd-epyc-2-cores-avx512"
INTEL = ROOT / "bench/results/intel-r-xeon-r-processor-2-cores-avx512"
ICE_LAKE = ROOT / "bench/results/intel-r-xeon-r-processor-2-80ghz-2-cores-avx512"
AVX2 = ROOT / "bench/results/amd-epyc-2-cores-avx2"
CASES = {  # from a heading's words to those of the results
    "T = 1": "T=1", "truncated": "truncated", "greedy": "greedy", "one-hot draft": "one-hot", "block": "block",
    "`Opt`": "Opt", "`TokenV3`": "TokenV3", "recursive": "T=1", "recursive, truncated": "truncated",
    "sample": "sample", "typical": "typical", "traversal": "traversal",
}  # fmt: skip

FIGURE = r"\d+(?:\.\d+)?"
Expected = list[float]
BENCHMARKS = ("docs/benchmarks.md", "docs/benchmarks-drafts.md", "docs/benchmarks-gpu.md")


@cache
def prose(*pages: str) -> str:
    """The pages' text in one line."""
    return " ".join(" ".join((ROOT / page).read_text() for page in pages).split())


@cache
def results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def row(name: str, folder: Path = RESULTS, **wanted: Any) -> dict[str, Any]:
    """The one row of a result file with these values."""
    rows = results(name, folder)["rows"]
    (found,) = (r for r in rows if all(r.get(key) == value for key, value in wanted.items()))
    return found


def micros(
    op: str, case: str, size: tuple[int, int], provider: str = "cpu", folder: Path = INTEL, dtype: str = "float32"
) -> float:
    wanted = {"case": case, "vocab": size[0], "batch": size[1], "provider": provider, "cache": "cold", "dtype": dtype}
    found: float = row(op, folder, **wanted)["median_us"]
    return found


def size_of(label: str) -> tuple[int, int]:
    vocab, batch = label.split(", ")
    return int(vocab), int(batch)


def against(op: str, case: str, size: tuple[int, int], peers: Iterable[str], **more: Any) -> Expected:
    """How many times as long each peer takes; then our own microseconds."""
    own = micros(op, case, size, **more)
    return [*(micros(op, case, size, peer, **more) / own for peer in peers), own]


def tables(page: str) -> list[tuple[str | None, list[list[str]]]]:
    """The tables of a page: the name in the comment above, if there is one, and the cells without the separator row."""
    found: list[tuple[str | None, list[list[str]]]] = []
    name, inside = None, False
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("|"):
            if not inside:
                found.append((name, []))
            inside = True
            if not re.fullmatch(r"[|:\- ]+", line):
                found[-1][1].append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        announced = re.fullmatch(r"<!-- figures: (.*) -->", line)
        name = announced[1] if announced else name if not line and not inside else None
        inside = False
    return found


def agrees(text: str, value: float) -> bool:
    """Whether `text` is `value`, rounded to the decimals that it shows."""
    decimals = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5 * 10.0**-decimals + 1e-9
