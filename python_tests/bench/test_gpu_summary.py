"""What is said of rows measured on a GPU: targets, the table, the plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import plot as draw_all
from bench.gpu import grid, plot, summary
from bench.report import VARIANTS
from python_tests.bench.rows import row


def reached(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {t["what"].split(": ")[-1]: t["reached"] for t in summary.targets(rows)}


def test_targets_of_a_gpu() -> None:
    rows = [row("cuda", 19.0), row("vllm V2", 30.0), row("flashinfer", 18.0), row("cuda, uniforms given", 17.0)]
    expected = {"× full-read floor": True, "× best peer (flashinfer)": False, "launches, given uniforms": True}
    assert reached(rows) == expected
    assert reached([row("cuda", 21.0)]) == {"× full-read floor": False}
    assert reached([row("cuda", 29.0, case="truncated")]) == {"× full-read floor": True}
    assert reached([row("cuda", 13.0, batch=1)]) == {"µs": False}
    assert reached([row("cuda", 11.0, batch=128)])["µs, full-read floor (early exit)"] is False
    assert reached([row("cuda", 11.0, case="block")]) == {"× floor": None}
    slow = row("cuda, uniforms given", 11.0, launches=4)
    assert reached([row("cuda", 11.0), slow])["launches, given uniforms"] is False
    larger = row("cuda", 11.0, id="y", vocab=9000, torch_peak_bytes=9000)
    assert reached([row("cuda", 11.0), larger]).popitem()[1] is False
    assert summary.targets([row("cuda", 1.0, launch="eager"), row("eager", 1.0)]) == []


def test_variants_are_told_and_are_no_peers() -> None:
    rows = [row("cuda", 19.0), row("eager", 90.0), *(row(name, 10.0) for name in VARIANTS)]
    told = reached(rows)
    assert told["× best peer (eager)"] is True
    assert [told[f"cuda × {name}"] for name in VARIANTS] == [None, None] and set(VARIANTS) < set(grid.PEERS)


def test_each_result_has_figures_of_its_own(tmp_path: Path) -> None:
    settings = {"gpu": {"name": "some gpu"}, "copy_gb_per_s": 4000.0}
    for name in ("verify_chain", "ops"):
        rows = [row(provider, 19.0, op=op, id=op) for op in ("sample", "verify_tree") for provider in ("cuda", "eager")]
        result = {"benchmark": name, "rows": rows, "settings": settings}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    draw_all.main([str(tmp_path)])
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {"roofline.png", "ratios.png", "ops_roofline.png", "ops_ratios.png"}


def test_the_table_and_the_plots(tmp_path: Path) -> None:
    rows = [row("cuda", 19.0), row("eager", 90.0), row("cuda", 25.0, launch="eager"), row("cuda", 15.0, cache="warm")]
    table = summary.table(rows)
    assert "90.0 eager" in table and "25.0" in table and "15.0" in table and "1.90" in table
    settings = {"gpu": {"name": "some gpu"}, "copy_gb_per_s": 4000.0}
    result = {"benchmark": "verify_chain", "rows": rows, "settings": settings}
    assert [path.name for path in plot.draw(result, tmp_path)] == ["roofline.png", "ratios.png"]
    assert plot.draw({**result, "rows": []}, tmp_path) == []
    assert "1 of 1 reached: × full-read floor" in summary.counts(summary.targets(rows))
