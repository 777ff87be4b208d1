"""Which layout of `verify_chain` is best at which batch: ``python -m bench.gpu.crossovers bench/results/GPU``.

Reads ``crossovers.json`` in a folder (``make gpu-report ARGS=crossovers``), prints every layout's time and the
thresholds that csrc/cuda/strategy.cu should have; ``--write`` writes them there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence

from specdec_kernels.files import write_whole
from specdec_kernels.options import existing

from ..report import Row
from . import rehearsal, strategy
from .process import ROOT

SOURCE = ROOT / "csrc/cuda/strategy.cu"
LIST = re.compile(r"(\} kLayouts\[\] = \{\n)(.*?)(\n\};)", re.DOTALL)
CLOSE = 1.02
"""A layout that is this close to the best keeps its place: a border is no matter of noise."""


def layout_of(provider: str) -> tuple[str, bool] | None:
    """The layout, and whether kernels overlap, from ``cuda, split, no overlap``; None for another provider."""
    parts = provider.split(", ")
    return (parts[1], len(parts) == 2) if parts[0] == "cuda" and parts[1:2] and parts[1] in strategy.LAYOUTS else None


def times(rows: Sequence[Row], overlap: bool = True) -> dict[tuple[str, int, int], dict[str, float]]:
    """``{(case, vocab, batch): {layout: µs}}``, cold, by graph replay."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        layout = layout_of(row["provider"])
        if layout is not None and layout[1] == overlap and (row["cache"], row["launch"]) == ("cold", "graph"):
            found.setdefault((row["case"], row["vocab"], row["batch"]), {})[layout[0]] = row["median_us"]
    return found


def losses(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """``{batch: {layout: time over the best}}``: the geometric mean over cases in which all were measured."""
    ratios: dict[int, dict[str, list[float]]] = {}
    for (_, _, batch), by_layout in times(rows).items():
        if set(by_layout) == set(strategy.LAYOUTS):
            best = min(by_layout.values())
            for layout, time in by_layout.items():
                ratios.setdefault(batch, {}).setdefault(layout, []).append(time / best)
    return {
        batch: {layout: math.exp(sum(map(math.log, values)) / len(values)) for layout, values in by_layout.items()}
        for batch, by_layout in sorted(ratios.items())
    }


def thresholds(rows: Sequence[Row], multiprocessors: int) -> list[tuple[float, str]]:
    """``[(below, layout)]`` in sequences per multiprocessor, as in csrc/cuda/strategy.cu: the last has no upper end."""
    found: list[tuple[float, str]] = []
    present, last = "", 0
    for batch, by_layout in losses(rows).items():
        best = min(by_layout, key=lambda layout: by_layout[layout])
        if present and by_layout[present] > CLOSE * by_layout[best]:
            found.append((round(math.sqrt(last * batch) / multiprocessors, 3), present))
            present = best
        present, last = present or best, batch
    return [*found, (math.inf, present)] if present else []


def as_source(found: Sequence[tuple[float, str]]) -> str:
    """The lines of ``kLayouts``."""
    return "\n".join(
        f"    {{{'INFINITY' if math.isinf(below) else f'{below:g}'}, Strategy::k{layout.capitalize()}}},"
        for below, layout in found
    )


def written(source: str, found: Sequence[tuple[float, str]]) -> str:
    """`source` with these thresholds."""
    text, count = LIST.subn(lambda m: m[1] + as_source(found) + m[3], source)
    assert count == 1, f"{SOURCE} has no list kLayouts"
    return text


def table(rows: Sequence[Row]) -> str:
    """One line per case: each layout's µs, with the time without overlapping kernels in brackets."""
    alone = times(rows, overlap=False)
    lines = [f"{'µs a call, cold L2, graph replay (no overlap)':46}" + "".join(f"{n:>20}" for n in strategy.LAYOUTS)]
    for key, by_layout in sorted(times(rows).items()):
        cells = [_cell(by_layout, alone.get(key, {}), layout) for layout in strategy.LAYOUTS]
        lines.append(f"{key[0]} V={key[1]} B={key[2]}".ljust(46) + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def _cell(by_layout: Mapping[str, float], alone: Mapping[str, float], layout: str) -> str:
    if layout not in by_layout:
        return "-"
    best = "*" if by_layout[layout] == min(by_layout.values()) else ""
    return f"{by_layout[layout]:.1f}{best}" + (f" ({alone[layout]:.1f})" if layout in alone else "")


def told(rows: Sequence[Row], multiprocessors: int) -> str:
    """The thresholds in words."""
    found = thresholds(rows, multiprocessors)
    if not found:
        return "no case was measured in every layout: no thresholds"
    return f"kLayouts of csrc/cuda/strategy.cu should be:\n{as_source(found)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.crossovers", description=__doc__)
    parse.add_argument("folder", type=existing, help="of the results, such as bench/results/nvidia-h200")
    parse.add_argument("--write", action="store_true", help="change csrc/cuda/strategy.cu")
    options = parse.parse_args(arguments)
    result = json.loads((options.folder / "crossovers.json").read_text())
    if result["settings"]["gpu"]["name"] == rehearsal.NAME:
        print(rehearsal.NOTICE)
        return 1
    multiprocessors = result["settings"]["gpu"]["multiprocessors"]
    print(table(result["rows"]), told(result["rows"], multiprocessors), sep="\n")
    found = thresholds(result["rows"], multiprocessors)
    if options.write and found:
        changed = written(SOURCE.read_text(), found)
        write_whole(SOURCE, lambda made: made.write_text(changed))
        print("wrote", SOURCE.relative_to(ROOT))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
