"""The examples in docs/ and README.md work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specdec_kernels as sk

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


def test_the_readme_s_example_of_a_tree_runs() -> None:
    """As it stands, on the names that it takes for granted."""
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "sk.verify_tree(" in block
    )  # fmt: skip
    rng, batch = torch.Generator().manual_seed(1), 3
    names = {
        "sk": sk, "torch": torch, "seeds": torch.arange(batch), "step": 4, "sampling": sk.SamplingParams(0.8, top_k=50),
        "positions": torch.arange(7).expand(batch, 7), "target_logits": torch.randn(batch, 7, 60, generator=rng),
        "draft_logits": torch.randn(batch, 7, 60, generator=rng),
    }  # fmt: skip
    exec(example, names)
    out, tree = names["out"], names["tree"]
    assert isinstance(out, sk.VerifyOutput) and isinstance(tree, sk.DraftTree)
    assert tree.num_nodes == 7 and out.tokens.shape == (batch, 3) and (out.status == 0).all()
