"""vLLM's own tests of its rejection samplers, from its source distribution, run on a CPU under the plug-in.

What synthetic acceptance, FLy, watermarks and Triton kernels are tested by is left out: those are vLLM's own, and
cannot run on a CPU. The V2 runner's tests, which want a GPU, are moved to the CPU with a smaller vocabulary and fewer
trials.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from .engine import BUILD, ENVIRONMENT

VERSION = "0.32.0"
V1, V2 = "tests/v1/sample/test_rejection_sampler.py", "tests/v1/spec_decode/test_rejection_sampler_utils.py"
CONFTEST = """
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

load_general_plugins()
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()

from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils

assert RejectionSampler.forward.__specdec__
assert rejection_sampler.rejection_sample.__specdec__ and rejection_sampler_utils.rejection_sample.__specdec__
"""
BELOW = "RejectionSampler.forward = RejectionSampler.forward.__wrapped__  # only the functions below it are replaced\n"


@pytest.fixture(scope="module")
def sources() -> Path:
    """The folder of vLLM's tests, without the package itself."""
    root = BUILD / f"vllm-{VERSION}"
    archive = BUILD / f"{root.name}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", str(BUILD)]
        options = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", f"vllm=={VERSION}"]
        given = {"VLLM_VERSION_OVERRIDE": VERSION, "VLLM_TARGET_DEVICE": "empty"}
        subprocess.run([*pip, *options], env=os.environ | given, check=True)
    wanted = re.compile(rf"{root.name}/tests/(v1/(sample|spec_decode)/.*|(v1/)?__init__\.py)")
    with tarfile.open(archive) as packed:
        packed.extractall(BUILD, [m for m in packed.getmembers() if wanted.fullmatch(m.name)], filter="data")
    return root


def run(root: Path, path: str, conftest: str, without: str) -> int:
    """How many tests passed; AssertionError with what pytest said where one did not."""
    (root / path).with_name("conftest.py").write_text(conftest)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path, "-k", f"not ({without})"]
    given = ENVIRONMENT | {"SPECDEC_VLLM": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0


@pytest.mark.parametrize("conftest", [CONFTEST, CONFTEST + BELOW], ids=["forward", "functions"])
def test_v1(sources: Path, conftest: str) -> None:
    assert run(sources, V1, conftest, "synthetic or fly") >= 70


def test_v2(sources: Path) -> None:
    text = (sources / V2).read_text()
    skip = text[text.index("# Skip if no CUDA") : text.index("def _build_rejection_sample_inputs")]
    moved = text.replace(skip, "").replace('"cuda"', '"cpu"').replace("VOCAB_SIZE = 4096", "VOCAB_SIZE = 1024")
    moved = moved.replace("NUM_TRIALS = 200_000", "NUM_TRIALS = 50_000")
    path = V2.replace("utils", "utils_cpu")
    (sources / path).write_text(moved)
    without = "watermark or repeated or synthetic or fly or gumbel_drafted or unproposed"
    assert run(sources, path, CONFTEST, without) >= 30
