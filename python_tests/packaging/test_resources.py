"""The gate on registers: .ci/resources.py on what ptxas says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci/resources.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no .ci")

NAME = "_ZN7specdec4cuda51_GLOBAL__N__4f9af0cc_18_uniform_samples_cu_dbc7eee622uniform_samples_kernelEi"
ENTRY = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for '{arch}'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers{shared}
ptxas info    : Compile time = 3.9 ms
"""
CALLED = """\
ptxas info    : Function properties for helper
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
"""


def entry(arch: str, stack: int = 0, stores: int = 0, loads: int = 0, registers: int = 40, shared: str = "") -> str:
    return ENTRY.format(
        name=NAME, arch=arch, stack=stack, stores=stores, loads=loads, registers=registers, shared=shared
    )


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "cuda_op.cu.log").write_text(text)
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)


def test_prints_a_row_a_kernel_and_a_column_an_architecture(tmp_path: Path) -> None:
    text = entry("sm_120", registers=64) + entry("sm_80", shared=", 1040 bytes smem, 400 bytes cmem[0]")
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stdout
    _, head, row, verdict = done.stdout.splitlines()
    assert head.split() == ["kernel", "sm_80", "sm_120"]
    assert row.split()[-2:] == ["40/1040/0/0", "64/0/0/0"] and "uniform_samples_kernel" in row
    assert verdict == "no spills in 2 compiled kernels"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (entry("sm_80") + entry("sm_90a", stores=16, loads=24), "spills 40 bytes on sm_90a"),
        (entry("sm_80", stack=32), "keeps 32 bytes in local memory on sm_80, 0 are granted"),
        (entry("sm_100").replace("ptxas info    : Used", CALLED + "ptxas info    : Used"), "spills 12 bytes on sm_100"),
        (
            entry("sm_89", shared=", 31745 bytes smem").replace(NAME, "_ZN7specdec4cuda18verify_tree_kernelILb1EEEvi"),
            "may be launched with 101377 bytes of shared memory on sm_89, a block has 101376",
        ),
    ],
    ids=["spill", "stack", "spill in a function called", "shared memory"],
)
def test_fails_on_spills_local_memory_and_too_much_shared_memory(tmp_path: Path, text: str, sentence: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == 1 and sentence in done.stdout


def test_most_shared_memory_is_that_of_the_sources() -> None:
    csrc = SCRIPT.parents[1] / "csrc/cuda"
    for file, constant in {"law.cuh": "kMaxListed = 4096;", "walk.cuh": "kMostSharedNumbers = 13 << 10;"}.items():
        assert constant in (csrc / file).read_text()
    assert "4 * (4096 + (13 << 10))" in SCRIPT.read_text()


def test_fails_where_there_is_nothing_to_read(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.returncode == 1 and "holds no log of ptxas" in done.stderr


def test_fails_for_more_folders_than_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "FOLDER, got 2" in done.stderr


def test_fails_on_words_it_does_not_know(tmp_path: Path) -> None:
    done = run(tmp_path, entry("sm_80").replace("registers", "regs"))
    assert done.returncode == 1 and "not known here" in done.stderr
