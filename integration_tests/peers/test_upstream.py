"""FlashInfer's and SGLang's own tests of what `specdec_kernels.integrations` has by their names, on the CPU.

Their files are read where they lie, and nothing of them but the device and the largest sizes is changed. FlashInfer's
come from the last source distribution that has them, or from a checkout: `make test-peers FLASHINFER=FOLDER
SGLANG=FOLDER`. SGLang publishes its tests nowhere else.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "peers"
VERSION = "0.3.1.post1"
SMALLER = {
    '"cuda:0"': '"cpu"',
    '"cuda"': '"cpu"',
    "torch.cuda.is_available()": "True",
    "99, 989]": "9]",
    "32000, 128256]": "2000]",
    "111, 32000]": "111, 2000]",
    "num_trials = 5000000": "num_trials = 200000",
    "num_trails = 5000": "num_trails = 20",
    "num_trails = 1000": "num_trails = 20",
    "batch_size = 1024": "batch_size = 16",
}
FLASHINFER = {"sampling": "hy3", "logits_processor": "joint and freq"}
"""Files of tests, and which of them are left out: a sampler of no release's; those that copy 200 000 rows each."""
SPECULATIVE = "test/registered/kernels/ops/speculative"
AOT = "python/sglang/kernels/aot/tests/speculative"
SGLANG = {
    f"{SPECULATIVE}/test_speculative_sampling.py": "",
    f"{SPECULATIVE}/test_eagle_utils.py": "",
    f"{SPECULATIVE}/test_block_verification.py": "dflash",
    f"{SPECULATIVE}/test_spec_verify_distribution.py": "Dispatch or Renorm or FastPath",
    f"{SPECULATIVE}/test_tree_speculative_sampling_triton.py": "dflash",
    f"{SPECULATIVE}/test_reject_sampling_block.py": "",
    f"{SPECULATIVE}/test_ngram_utils.py": "",
    **{f"{AOT}/test_{name}.py": "" for name in ("speculative_sampling", "eagle_utils", "ngram_utils")},
}
"""Files of tests, and which of them are left out: those of SGLang's own modules."""


def run(file: Path, folder: Path, without: str = "") -> int:
    """How many of a file's tests passed; AssertionError with what pytest said where one did not."""
    text = file.read_text()
    for theirs, ours in SMALLER.items():
        text = text.replace(theirs, ours)
    (folder / file.name).write_text(text)
    options = "-q -p no:cacheprovider -p integration_tests.peers.substitutes -c /dev/null".split()
    options += ["--rootdir", str(folder), *(["-k", f"not ({without})"] if without else [])]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run([*command, str(folder / file.name)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0


def published() -> Path:
    """FlashInfer's tests as it last published them."""
    root = BUILD / f"flashinfer_python-{VERSION}"
    archive = root.with_name(f"{root.name}.tar.gz")
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", str(BUILD)]
        options = ["--no-deps", "--no-binary", "flashinfer-python", "--no-build-isolation"]
        subprocess.run([*pip, *options, f"flashinfer-python=={VERSION}"], check=True)
    with tarfile.open(archive) as packed:
        for name in FLASHINFER:
            packed.extract(f"{root.name}/tests/test_{name}.py", BUILD, filter="data")
    return root


@pytest.mark.parametrize("name", FLASHINFER)
def test_flashinfer(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--flashinfer")
    root = Path(folder) if folder else published()
    places = [root / folder / f"test_{name}.py" for folder in ("tests/utils", "tests")]
    found = [place for place in places if place.exists()]
    assert found, f"there is none of {', '.join(map(str, places))}"
    assert run(found[0], tmp_path, FLASHINFER[name]) >= 250


@pytest.mark.parametrize("name", SGLANG)
def test_sglang(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--sglang")
    if not folder:
        pytest.skip("SGLANG=FOLDER names no checkout")
    root = Path(folder)
    assert (root / SPECULATIVE).exists(), f"{root} has no {SPECULATIVE}"
    if not (root / name).exists():
        pytest.skip("this checkout has no such file")
    assert run(root / name, tmp_path, SGLANG[name]) >= 1
