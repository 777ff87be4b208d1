"""The C++ programs of csrc/emulator/tests: where they can be built, and building them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "csrc/emulator/tests"

MARKS = [
    pytest.mark.skipif(not TESTS.exists(), reason="an installed package has no kernel sources"),
    pytest.mark.skipif(
        not (shutil.which("make") and any(shutil.which(name) for name in ("c++", "g++", "clang++"))),
        reason="there is no make, or no C++ compiler",
    ),
    pytest.mark.xdist_group("emulator"),  # one build
]


@cache
def program(name: str, kind: str) -> str:
    """The path of one, built as a kind that the Makefile there lists."""
    path = ROOT / f"build/emulator/{kind}/{name}"
    make = ["make", "-s", "-C", str(TESTS), f"KIND={kind}", str(path)]
    done = subprocess.run(make, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(path)
