"""A roofline of our rows, and the times of all providers relative to ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Row, subject
from .grid import LAUNCH_US
from .summary import groups


def draw(result: dict[str, Any], folder: Path, stem: str = "verify_chain") -> list[Path]:
    """``roofline.png`` and ``ratios.png`` in `folder`, if there are rows for them; for a result file other than
    ``verify_chain.json``, with its `stem` before these names.
    """
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for name, function in (("roofline", roofline), ("ratios", ratios)):
        path = folder / (f"{name}.png" if stem == "verify_chain" else f"{stem}_{name}.png")
        if function(result, path):
            drawn.append(path)
    return drawn


def named(row: Row) -> str:
    """The case, with its op unless that is the usual one."""
    return row["case"] if row["op"] == "verify_chain" else f"{row['op']} {row['case']}"


def title(result: dict[str, Any], what: str) -> str:
    """The figure's title: what, and on which GPU."""
    return f"{result['benchmark']}: {what}, cold L2, graph replay ({result['settings']['gpu']['name']})"


def roofline(result: dict[str, Any], path: Path) -> bool:
    """Bytes that a call needs against its rate of reading them; the roof is the launch and a large copy's rate."""
    import numpy as np
    from matplotlib import pyplot

    own = [row for group in groups(result["rows"], "cold", "graph") if (row := subject(group)) is not None]
    if not own:
        return False
    rate = result["settings"]["copy_gb_per_s"]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(named(row) for row in own):
        some = [row for row in own if named(row) == name]
        axes.scatter([r["needed_bytes"] for r in some], [r["gb_per_s"] for r in some], s=14, label=name)
    sizes = np.geomspace(min(r["needed_bytes"] for r in own), max(r["needed_bytes"] for r in own), 100)
    axes.plot(sizes, sizes / (LAUNCH_US * 1e3 + sizes / rate), color="black", label=f"launch + copy at {rate:.0f} GB/s")
    axes.set(xscale="log", yscale="log", xlabel="bytes of logits that a call needs, early exit", ylabel="GB/s")
    axes.legend(fontsize=8)
    figure.suptitle(title(result, "rate of needed bytes"), fontsize="medium")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def ratios(result: dict[str, Any], path: Path, num_draft: int = 5) -> bool:
    """One panel per law and vocabulary: time over ours, by batch size."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    panels: dict[tuple[str, int], list[tuple[Row, Sequence[Row]]]] = {}
    for group in groups(result["rows"], "cold", "graph"):
        own = subject(group)
        if own is not None and own["num_draft"] == num_draft and len(group) > 1:
            panels.setdefault((named(own), own["vocab"]), []).append((own, group))
    if not panels:
        return False
    names, vocabs = list(dict.fromkeys(n for n, _ in panels)), sorted({v for _, v in panels})
    size = (3.4 * len(vocabs) + 1.5, 2.3 * len(names) + 1)
    figure, grid = pyplot.subplots(len(names), len(vocabs), figsize=size, layout="constrained", squeeze=False)
    providers = list(dict.fromkeys(row["provider"] for groups_ in panels.values() for _, g in groups_ for row in g))
    for (name, vocab), measured in panels.items():
        axes = grid[names.index(name)][vocabs.index(vocab)]
        for number, provider in enumerate(providers):
            points = sorted((own["batch"], row["median_us"] / own["median_us"]) for own, group in measured
                            for row in group if row["provider"] == provider and row is not own)  # fmt: skip
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{number}", label=provider)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xscale="log", yscale="log", title=f"{name}, V={vocab}", xlabel="batch")
        axes.set_ylabel(f"time / {measured[0][0]['provider']}")
        batches = sorted({own["batch"] for own, _ in measured})
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.xaxis.set_minor_locator(NullLocator())
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title(result, f"K={num_draft}"), fontsize="medium")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True
