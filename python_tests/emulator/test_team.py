"""Threads that share out the rows of a CPU op: csrc/emulator/tests/team.cpp. `make sanitize` runs it under TSan."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "csrc/emulator/tests"

pytestmark = [
    pytest.mark.skipif(not TESTS.exists(), reason="an installed package has no kernel sources"),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("c++")), reason="there is no make, or no C++ compiler"
    ),
    pytest.mark.xdist_group("emulator"),  # one build
]


def test_every_part_of_a_row_is_done_once_by_whoever_is_free() -> None:
    program = ROOT / "build/emulator/plain/team"
    subprocess.run(["make", "-s", "-C", str(TESTS), "KIND=plain", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
