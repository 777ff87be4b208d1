"""The examples in docs/ work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patch")
def test_the_example_law_is_all_that_a_law_takes(tmp_path: Path) -> None:
    """The patch of docs/adding-a-law.md on a copy of the sources: the new law is exact on every backend that the copy
    has: the reference, the emulated CUDA kernels (built there) and interpreted Triton.
    """
    for folder in ("csrc", "specdec_kernels", "python_tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    patch = re.search(r"```diff\n(.*?)```", (ROOT / "docs/adding-a-law.md").read_text(), re.DOTALL)
    assert patch
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch[1], text=True, check=True)
    tests = ["python_tests/law/test_target_laws.py", "-k", "Sure and is_the_cascades and not cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and re.search(r"\d\d passed", done.stdout), done.stdout + done.stderr
