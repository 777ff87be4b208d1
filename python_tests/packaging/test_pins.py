"""What `make` installs beside a torch that was there before: .ci/pins.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci/pins.py"
PINS = "# a comment\ntorch==2.13.0\n\nsetuptools==84.2.1\nnumpy==2.4.6\ntriton==3.9.0\n"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no .ci")


@pytest.mark.parametrize(
    ("version", "requires", "expected"),
    [
        ("2.13.0+cpu", ["setuptools"], ["torch==2.13.0+cpu", "setuptools==84.2.1", "numpy==2.4.6", "triton==3.9.0"]),
        ("2.11.0", ["setuptools<82", 'triton==3.6.0; sys_platform == "linux"'], ["torch==2.11.0", "numpy==2.4.6"]),
        (
            "2.12.0",
            ['numpy<2; extra == "old"'],
            ["torch==2.12.0", "setuptools==84.2.1", "numpy==2.4.6", "triton==3.9.0"],
        ),
    ],
)
def test_pins_that_torch_excludes_are_left_out(
    tmp_path: Path, version: str, requires: list[str], expected: list[str]
) -> None:
    metadata = tmp_path / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    metadata.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, SCRIPT], input=PINS, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == expected
