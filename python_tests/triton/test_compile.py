"""Every Triton kernel, as the ops launch it, compiles for GPUs that are not here, and keeps its registers to itself."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import sass

SCRIPT = Path(__file__).with_name("compile_kernels.py")
CAPABILITIES = ("90", "80", "100")  # every form for the first, every kernel for the others
OLDER = sorted((SCRIPT.parents[2] / "build").glob("triton-*"))  # what `make test-triton` has fetched
SHARES = ("law[.].*", "(?!law[.]).*")  # of the kernels, one process each: about half of the time
MOST_SPILLED = 32  # bytes, by an older Triton: 3.6 spills up to 20
MOST_SHARED = 2048
"""Bytes of shared memory that a scan takes at most where each tile is a warp's. Where a version of Triton laid a tile
out over several warps it was 8192, and seven times as long on an H100.
"""
MOST_INSTRUCTIONS = {  # of a tile; "maxima" in float32 are those of probabilities, with their sums
    "maxima, 4 loads": 280, "maxima, 8 loads": 690, "mass, 4 loads": 630, "mass, 8 loads": 520,
    "mass and raw moments, 4 loads": 830, "mass and raw moments, 8 loads": 840,
}  # fmt: skip

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


Row = dict[str, object]


def compiled(folder: Path, *capabilities: str, share: str, triton: Path | None = None) -> list[Row]:
    """What each kernel of a share takes, by the Triton that is installed or another; its code goes to `folder`."""
    root = SCRIPT.parents[2]
    path = os.pathsep.join(str(folder) for folder in (triton, root) if folder)
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, SCRIPT, *capabilities, "--kernel", share, "--cubins", folder], env=environment,
        capture_output=True, text=True, timeout=1800, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print(table(rows))
    return rows


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("triton", OLDER, ids=lambda folder: folder.name)
def test_an_older_triton_compiles_every_kernel(triton: Path, share: str, tmp_path: Path) -> None:
    rows = compiled(tmp_path, CAPABILITIES[0], share=share, triton=triton)
    assert {row["kernel"] for row in rows} >= kernels(share)
    assert [row for row in rows if max(row["spill_stores"], row["spill_loads"]) > MOST_SPILLED] == []  # type: ignore
    assert_tiles_are_warps(rows)


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    """The first share, and where its machine code lies."""
    folder = tmp_path_factory.mktemp("laws")
    return compiled(folder, *CAPABILITIES, share=SHARES[0]), folder


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.xdist_group("laws")
def test_laws_compile_without_spills(laws: tuple[list[Row], Path]) -> None:
    assert_no_spills(laws[0], SHARES[0])


@pytest.mark.long
@pytest.mark.slow
def test_all_others_compile_without_spills(tmp_path: Path) -> None:
    assert_no_spills(compiled(tmp_path, *CAPABILITIES, share=SHARES[1]), SHARES[1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.xdist_group("laws")
def test_a_scan_keeps_to_its_instructions(laws: tuple[list[Row], Path]) -> None:
    if sass.find_tool("cuobjdump") is None:
        pytest.skip("needs cuobjdump")
    found: dict[str, list[int]] = {}
    scans = sass.triton_scans_in(laws[1])
    for kernel in scans:
        for what, count in sass.tile_of(kernel).items():
            found.setdefault(what, []).append(count)
    assert {what: max(counts) for what, counts in found.items() if max(counts) > MOST_INSTRUCTIONS[what]} == {}
    assert set(found) == set(MOST_INSTRUCTIONS)
    # no op's rows are loaded element by element, but the few that are as narrow as a test's
    assert sum(kernel.before_first_load() is None for kernel in scans) <= 4


def assert_no_spills(rows: list[Row], share: str) -> None:
    for capability in CAPABILITIES:
        found = {row["kernel"] for row in rows if row["capability"] == int(capability)}
        wanted = kernels(share) - (set() if capability == CAPABILITIES[0] else ONLY_IN_FULL)
        assert found >= wanted, wanted - found
    assert [row for row in rows if row["spill_stores"] or row["spill_loads"]] == []
    assert_tiles_are_warps(rows)


def test_every_kernel_is_in_a_share() -> None:
    shares = [kernels(share) for share in SHARES]
    assert all(shares) and set.union(*shares) == kernels() and "law.scan" in shares[0]


def assert_tiles_are_warps(rows: list[Row]) -> None:
    shared = [int(str(row["shared"])) for row in rows if row["kernel"] == "law.scan"]
    assert bool(shared) == any(row["kernel"] == "law.law" for row in rows) and max(shared, default=0) <= MOST_SHARED


# what the short list of calls, for the second and later capabilities, does not launch
ONLY_IN_FULL = {
    "warp_probs.kernel", "sample.draw_one", "sample.find_named", "draft.laws_from_stats", "draft.probs_status",
    "finish.match",
}  # fmt: skip


def kernels(share: str = ".*") -> set[str]:
    """Every function that is launched, found in the sources: those whose argument is the name of `run` calls."""
    found = set()
    folder = SCRIPT.parents[2] / "specdec_kernels" / "backends" / "triton"
    defined, launched = {}, set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                defined.setdefault(node.name, []).append(path.stem)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run":
                kernel = node.args[0]
                assert isinstance(kernel, ast.Name)
                launched.add((path.stem, kernel.id))
    for stem, name in launched:
        found.add(f"{stem if stem in defined[name] else defined[name][0]}.{name}")
    return {name for name in found if re.fullmatch(share, name)}


def table(rows: list[Row]) -> str:
    """Registers, shared memory and spills of every kernel: of its forms the one that takes most registers."""
    columns = ("kernel", "capability", "warps", "registers", "shared", "stack", "spill_stores", "spill_loads")
    most: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["capability"], row["kernel"])
        if key not in most or most[key]["registers"] < row["registers"]:  # type: ignore[operator]
            most[key] = row
    lines = ["".join(f"{c:>14}" if i else f"{c:28}" for i, c in enumerate(columns))]
    for row in most.values():
        lines.append("".join(f"{row[c]:>14}" if i else f"{row[c]:28}" for i, c in enumerate(columns)))
    return "\n".join(lines)
