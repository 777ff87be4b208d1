"""Draw the results of a folder: ``python -m bench.plot bench/results/<machine>`` writes one PNG an op."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report


def ratio_bars(result: dict[str, Any], path: Path) -> bool:
    """Each provider's time as a multiple of this package's, a group of bars a case; False if there is none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [(own, g) for g in report.cases(result["rows"]) if (own := report.subject(g)) is not None and len(g) > 1]
    if not groups:
        return False
    names = list(dict.fromkeys(row["provider"] for own, g in groups for row in g if row is not own))
    width = 0.8 / len(names)
    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.1 * len(groups)), 5.0), layout="constrained")
    for i, name in enumerate(names):
        bars = [
            (x + (i - (len(names) - 1) / 2) * width, row["median_us"] / own["median_us"])
            for x, (own, group) in enumerate(groups) for row in group if row["provider"] == name
        ]  # fmt: skip
        places, heights = zip(*bars, strict=True)
        axes.bar(places, heights, width, label=name)
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=1)
    if result["benchmark"] == "verify_chain":
        for case, target in report.RATIO_TARGETS.items():
            axes.axhline(target, color="grey", linewidth=1, linestyle="--")
            axes.text(1, target, f"target, {case}", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    axes.set_xticks(range(len(groups)), [own["id"].replace(" ", "\n") for own, _ in groups], fontsize=7)
    axes.set_ylabel(f"time / time of {groups[0][0]['provider']}")
    device = result["machine"]["gpu"] or result["machine"]["cpu"]
    axes.set_title(f"{result['benchmark']}: {device}, {result['settings']['threads']} threads")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parse.add_argument("folder", type=Path)
    folder: Path = parse.parse_args(arguments).folder
    results = sorted(folder.glob("*.json"))
    if not results:
        raise SystemExit(f"bench.plot: no result file in {folder}")
    for file in results:
        result = json.loads(file.read_text())
        if not result["rows"] or "provider" not in result["rows"][0]:  # another script's result, of another shape
            continue
        if ratio_bars(result, file.with_suffix(".png")):
            print("wrote", file.with_suffix(".png"))


if __name__ == "__main__":
    main()
