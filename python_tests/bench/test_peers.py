"""Peers laid beside the checkout: what is kept of their wheels, and that they import without the rest of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import peers
from bench.providers import _gpu_peer, beside

WHEELS = {
    "vllm": {
        "vllm/__init__.py": "raise ImportError('all of it')",
        "vllm/v1/sample/rejection_sampler.py": "from vllm.config.model import MODES\nfrom vllm.warm import up\n"
        "from vllm.triton_utils import triton\nimport pynvml\n\n@up(MODES, inputs=1)\ndef rejection_sample():\n"
        "    return 'verified', bool(MODES), list(MODES)\n",
        "vllm/_C.abi3.so": "large", "vllm-9.9.dist-info/METADATA": "Name: vllm\nVersion: 9.9\n",
    },
    "ninja": {"ninja-1.data/scripts/ninja": "#!/bin/sh\n"},
    "nvidia-curand<11": {"nvidia/cu13/include/curand.h": "//", "nvidia/cu13/lib/libcurand.so": "large"},
    "flashinfer-python": {
        "flashinfer/sampling.py": "", "flashinfer/jit/gemm/core.py": "", "flashinfer/gemm/large.py": "",
        "flashinfer/data/csrc/sampling.cu": "", "flashinfer/data/csrc/attention.cu": "",
    },
}  # fmt: skip
MODULE = "vllm.v1.sample.rejection_sampler"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheels = {}
    for package, files in WHEELS.items():
        wheels[package] = tmp_path / f"{len(wheels)}.whl"
        with zipfile.ZipFile(wheels[package], "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    made = tmp_path / "peers"
    assert 0 < peers.lay(made, wheels) < 10_000
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("PATH", "/bin")
    for name in list(sys.modules):
        if name.split(".")[0] in beside.MADE_UP:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # replaced below by what the test writes
    (made / "vllm/triton_utils/__init__.py").write_text("triton = None\n")
    yield made
    for name in list(sys.modules):
        if name.split(".")[0] in beside.MADE_UP:
            del sys.modules[name]


def test_only_what_a_verify_step_needs_is_kept(folder: Path) -> None:
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "peers.json", "bin/ninja", "flashinfer/data/include/curand.h", "flashinfer/sampling.py",
        "flashinfer/jit/gemm/core.py", "flashinfer/data/csrc/sampling.cu", f"{MODULE.replace('.', '/')}.py",
        "vllm-9.9.dist-info/METADATA", *peers.WRITTEN,
    }  # fmt: skip
    assert (folder / "vllm/__init__.py").read_text() == ""
    assert (folder / "bin/ninja").stat().st_mode & 0o100


def test_a_peer_imports_without_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "FOLDER", folder)
    monkeypatch.setattr(beside.mount, "__defaults__", (folder,))
    assert _gpu_peer(MODULE)("verify_chain", "cuda") is None
    assert importlib.import_module(MODULE).rejection_sample() == ("verified", False, [])
    assert _gpu_peer("vllm.v2.gone")("verify_chain", "cuda") == "vllm.v2.gone is not in peers"
    assert importlib.metadata.version("vllm") == "9.9"
    assert sys.path.count(str(folder)) == 1 and beside.mount() and sys.path.count(str(folder)) == 1


def test_without_the_folder_nothing_is_made_up(tmp_path: Path) -> None:
    before = list(sys.meta_path)
    assert not beside.mount(tmp_path / "none") and sys.meta_path == before


def test_a_folder_of_something_else_is_not_emptied(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/kept.json").touch()
    with pytest.raises(SystemExit, match="2"):
        peers.main(["--folder", str(tmp_path / "results")])
    assert (tmp_path / "results/kept.json").exists() and "which holds something else" in capsys.readouterr().err

    def fail(*_: object) -> None:  # as pip does without a network
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(peers, "download", fail)
    assert peers.main(["--folder", str(folder)]) == 2
    assert (folder / "peers.json").exists() and f"{folder} is as it was" in capsys.readouterr().err
