"""Draw the results of a folder: ``python -m bench.plot bench/results/<machine>`` writes one PNG per op."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_kernels.options import existing

from . import report
from .gpu import plot as gpu_plot

SHOWN = ("median_us", "q25_us", "q75_us")


def ratios(result: dict[str, Any], path: Path) -> bool:
    """Each provider's time as a multiple of this package's, one line per case; False if there is none."""
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
    names = [name for name in names if name != "reference"]  # a specification, hundreds of times slower: not a peer
    figure, all_axes = pyplot.subplots(
        len(panels), figsize=(9, 0.27 * sum(map(len, panels.values())) + 0.4 * len(panels) + 1.2), layout="constrained",
        squeeze=False, sharex=True, height_ratios=[len(panel) + 0.5 for panel in panels.values()],
    )  # fmt: skip
    for axes, (title, panel) in zip(all_axes[:, 0], panels.items(), strict=True):
        for i, name in enumerate(names):
            found = [
                (y + (i + 0.5) / len(names) * 0.7 - 0.35, *(row[key] / own["median_us"] for key in SHOWN))
                for y, (own, group) in enumerate(panel) for row in group if row["provider"] == name
            ]  # fmt: skip
            for y, median, low, high in found:
                axes.plot([low, high], [y, y], color=f"C{i % 10}", linewidth=1.2)
                axes.plot(median, y, "o", color=f"C{i % 10}", markersize=4.5)
            axes.plot([], [], "o-", color=f"C{i % 10}", label=name)
        for y, (own, _) in enumerate(panel):
            axes.axhspan(y - 0.5, y + 0.5, color="0.95" if y % 2 else "white", zorder=0)
            if goal := report.ratio_goal(result["benchmark"], own):
                axes.plot([goal] * 2, [y - 0.5, y + 0.5], "k:", linewidth=1.5)
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(panel)), ["{case}, V={vocab}, B={batch}".format_map(own) for own, _ in panel])
        axes.set_ylim(len(panel) - 0.5, -0.5)
        axes.set_title(title, fontsize="medium")
    dotted = ", dotted: the goal" if any(report.ratio_goal(result["benchmark"], own) for own, _ in groups) else ""
    all_axes[-1, 0].set_xlabel(f"time / time of {groups[0][0]['provider']}: median and quartiles{dotted}")
    device = result["machine"]["gpu"] or result["machine"]["cpu"]
    figure.suptitle(f"{result['benchmark']}: {device}, {result['settings']['threads']} threads")
    figure.legend(*all_axes[0, 0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, ncols=3)
    figure.savefig(path, dpi=100, metadata={"Description": revision(result)})
    pyplot.close(figure)
    return True


def revision(result: Mapping[str, Any]) -> str:
    """A hash of a result's rows, which a figure drawn from them carries as its description."""
    return hashlib.sha256(json.dumps(result["rows"], sort_keys=True).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parse.add_argument("folder", type=existing)
    folder: Path = parse.parse_args(arguments).folder
    results = sorted(folder.glob("*.json"))
    if not results:
        raise SystemExit(f"bench.plot: no result file in {folder}")
    for file in results:
        result = json.loads(file.read_text())
        if not result.get("rows") or "provider" not in result["rows"][0]:  # another script's result, in another form
            continue
        if "gpu" in result["settings"]:
            print("wrote", *gpu_plot.draw(result, folder, file.stem))
            continue
        if ratios(result, file.with_suffix(".png")):
            print("wrote", file.with_suffix(".png"))


if __name__ == "__main__":
    main()
