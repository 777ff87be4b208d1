"""Draw the results of a folder: ``python -m bench.plot bench/results/<machine>`` writes one PNG an op."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .gpu import plot as gpu_plot


def ratio_bars(result: dict[str, Any], path: Path) -> bool:
    """Each provider's time as a multiple of this package's, a group of bars a case; False if there is none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [(own, g) for g in report.cases(result["rows"]) if (own := report.subject(g)) is not None and len(g) > 1]
    if not groups:
        return False
    kind = "{dtype}, {cache} cache".format_map
    kinds = dict.fromkeys(kind(own) for own, _ in groups)
    panels = {title: [(own, group) for own, group in groups if kind(own) == title] for title in kinds}
    names = list(dict.fromkeys(row["provider"] for own, g in groups for row in g if row is not own))
    names = [name for name in names if name != "reference"]  # a specification, hundreds of times slower: no peer
    width = 0.8 / max(len(names), 1)
    widest = max(map(len, panels.values()))
    size = (max(7.0, 0.8 * widest), 3.6 * len(panels))
    figure, all_axes = pyplot.subplots(len(panels), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axes, (title, panel) in zip(all_axes[:, 0], panels.items(), strict=True):
        for i, name in enumerate(names):
            offset = (i - (len(names) - 1) / 2) * width
            bars = {
                x + offset: row["median_us"] / own["median_us"]
                for x, (own, group) in enumerate(panel) for row in group if row["provider"] == name
            }  # fmt: skip
            axes.bar(list(bars), list(bars.values()), width, label=name)
        axes.set_yscale("log")
        axes.axhline(1, color="black", linewidth=1)
        if result["benchmark"] == "verify_chain":
            for case, target in report.RATIO_TARGETS.items():
                axes.axhline(target, color="grey", linewidth=1, linestyle="--")
                axes.text(1, target, f"target, {case}", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
        labels = ["{case}\nV={vocab}\nB={batch}".format_map(own) for own, _ in panel]
        axes.set_xticks(range(len(panel)), labels, fontsize=7)
        axes.set_xlim(-0.6, widest - 0.4)
        axes.set_ylabel(f"time / time of {groups[0][0]['provider']}")
        axes.set_title(title, fontsize="medium")
    device = result["machine"]["gpu"] or result["machine"]["cpu"]
    figure.suptitle(f"{result['benchmark']}: {device}, {result['settings']['threads']} threads")
    all_axes[0, 0].legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=100)
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
        if not result.get("rows") or "provider" not in result["rows"][0]:  # another script's result, of another shape
            continue
        if "gpu" in result["settings"]:
            print("wrote", *gpu_plot.draw(result, folder))
            continue
        if ratio_bars(result, file.with_suffix(".png")):
            print("wrote", file.with_suffix(".png"))


if __name__ == "__main__":
    main()
