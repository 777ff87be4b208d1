"""Programs that time a model set how torch's threads wait before torch is loaded."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
TIMED = {"bench.end_to_end", "bench.cascades", "examples.own_loop"}
"""Who imports one of these times a model."""


def imports(path: Path) -> list[str]:
    """Modules that a file imports, in their order."""
    found: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def programs() -> dict[str, list[str]]:
    """What each program that times a model imports."""
    found = {path: imports(path) for path in sorted((ROOT / "bench").rglob("*.py")) if '"__main__"' in path.read_text()}
    return {str(path.relative_to(ROOT)): names for path, names in found.items() if TIMED & {*names}}


@pytest.mark.parametrize("program", programs())
def test_programs_begin_with_it(program: str) -> None:
    first, *_ = (name for name in programs()[program] if name.partition(".")[0] != "__future__")
    assert first == "bench.waiting"


def test_programs_are_found() -> None:
    assert {"bench/end_to_end.py", "bench/replay.py", "bench/cascades/__main__.py"} <= {*programs()}


@pytest.mark.parametrize("given", ({}, {"OMP_WAIT_POLICY": "ACTIVE"}))
def test_it_is_set_and_torch_not_loaded(given: dict[str, str]) -> None:
    loaded = "{'torch', 'numpy'} & {*sys.modules}"
    says = f"import bench.waiting, os, sys; print(*map(os.environ.get, {VARIABLES}), *({loaded}))"
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    said = subprocess.run(
        [sys.executable, "-c", says], cwd=ROOT, env=others | given, capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [given.get("OMP_WAIT_POLICY", "PASSIVE"), "3000"]
