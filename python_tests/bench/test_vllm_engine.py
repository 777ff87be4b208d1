from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import vllm_engine


def test_ratios_are_against_the_plug_in_of_the_same_case(capsys: pytest.CaptureFixture[str]) -> None:
    def row(engine: str, batch: int, sampler: float, rate: float) -> vllm_engine.Row:
        times = {"sampler_cpu_us": sampler, "tokens_per_cpu_s": rate}
        return {"case": "T=1", "batch": batch, "engine": engine, **times}

    rows = [
        row("stock", 8, 6000.0, 20.0), row("plug-in", 8, 500.0, 50.0),
        row("stock", 1, 900.0, 10.0), row("plug-in", 1, 300.0, 11.0),
        {"case": "truncated", "batch": 8, "engine": "stock", "failed": "RuntimeError: index out of bounds"},
        {"case": "truncated", "batch": 8, "engine": "none", "sampler_cpu_us": 1.0, "tokens_per_cpu_s": 1.0},
    ]  # fmt: skip
    vllm_engine.add_ratios(rows)
    assert [(r.get("sampler_ratio"), r.get("speedup")) for r in rows] == [
        (12.0, 2.5), (1.0, 1.0), (3.0, 1.1), (1.0, 1.0), (None, None), (None, None),
    ]  # fmt: skip
    vllm_engine.print_table(rows)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [
        ["T=1", "1", "stock"], ["T=1", "1", "plug-in"], ["T=1", "8", "stock"], ["T=1", "8", "plug-in"],
        ["truncated", "8", "stock"], ["truncated", "8", "none"],
    ]  # fmt: skip
    assert lines[2].split()[3:] == ["6.00", "12.0", "20.0", "2.50"] and lines[4].endswith("index out of bounds")


@pytest.mark.parametrize("broken", ["stock", "plug-in"])
def test_an_engine_that_does_not_start_leaves_the_others_rows(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only our own failing is a failure of the command."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        engine = command[command.index("--engines") + 1]
        if engine == broken:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no such kernel\n")
        row = {"case": "T=1", "batch": 4, "engine": engine, "sampler_cpu_us": 1.0, "tokens_per_cpu_s": 1.0}
        Path(command[command.index("--measure") + 1]).write_text(json.dumps([row]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    status = vllm_engine.main(["--engines", "none", "stock", "plug-in", "--batch", "4"])
    assert status == (broken == "plug-in")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    failed = [line[:3] for line in lines if line[-4:] == ["RuntimeError:", "no", "such", "kernel"]]
    assert failed == [[case, "4", broken] for case in vllm_engine.CASES]
    assert sorted(line[2] for line in lines if line[:2] == ["T=1", "4"]) == ["none", "plug-in", "stock"]
