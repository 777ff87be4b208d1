"""What the compiled libraries say of themselves, and where a GPU goes that they hold no code for."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import config
from specdec_kernels.backends import _routes as routes
from specdec_kernels.backends import direct, native, route, triton
from specdec_kernels.ops import _common

backends = importlib.import_module("specdec_kernels.backends")  # sk.backends is the function
GPU = torch.device("cuda", 0)


class BuildInfo:
    restype: object = None

    def __call__(self) -> bytes:
        return b"archs=80;90a runtime=13000"


@pytest.fixture
def volta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU older than everything the library was built for."""
    library = SimpleNamespace(specdec_cuda_build_info=BuildInfo(), specdec_cuda_binary_version=lambda index: -209)
    monkeypatch.setitem(native._symbols, "CUDA", library)  # type: ignore[misc]
    real = native.why_missing
    monkeypatch.setattr(native, "why_missing", lambda op, key: None if key == "CUDA" else real(op, key))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    native._versions.clear()
    routes.clear()
    yield
    native._versions.clear()
    routes.clear()


def test_a_gpu_without_code_is_named_with_what_there_is(volta: None) -> None:
    reason = "_C_cuda.so was built for 80;90a, this GPU is sm_70"
    for device in ("cuda", "cuda:0"):
        assert all(row["cuda"] == reason for row in sk.backends(device).values())
    with pytest.raises(ValueError, match=f"sample: backend='cuda' cannot run here: {reason}"):
        _common.dispatch("sample", None, "cuda", GPU)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(35, "the driver is too old for its CUDA toolkit, CUDA error 35"), (2, "CUDA error 2")],
)
def test_what_else_cuda_says_is_not_taken_for_another_architecture(
    volta: None, error: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native._symbols["CUDA"], "specdec_cuda_binary_version", lambda index: -error)
    assert native.why_no_code(GPU) == f"_C_cuda.so does not run on GPU 0: {reason}"


def test_a_gpu_that_is_not_there_is_said(volta: None) -> None:
    assert native.why_no_code(torch.device("cuda:9")) == "torch finds no GPU 9"


def test_a_gpu_without_code_is_served_by_another_backend(volta: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def overload() -> None: ...

    assert _common.dispatch("sample", overload, None, GPU) is not direct.call("sample", overload)
    assert route("sample", GPU) == ("triton" if sk.backends(GPU)["sample"]["triton"] == "yes" else "reference")
    assert route("sample", torch.device("cpu")) is None
    routes.clear()
    native._versions.clear()
    monkeypatch.setattr(native._symbols["CUDA"], "specdec_cuda_binary_version", lambda index: 70)
    assert route("sample", GPU) is None
    assert _common.dispatch("sample", overload, None, GPU) is direct.call("sample", overload)


def test_an_error_that_passes_is_not_kept(volta: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose memory is full takes another backend until it is not; one without code takes it for good."""
    answers, warned = [-2], list[str]()
    library = native._symbols["CUDA"]
    monkeypatch.setattr(library, "specdec_cuda_binary_version", lambda index: answers[0])
    monkeypatch.setattr(backends.logger, "warning", lambda text, *of: warned.append(text % of))
    monkeypatch.setattr(backends, "_warned", set())
    for op in ("sample", "sample", "row_stats"):
        assert backends.routed(op, GPU) is not None
    assert len(warned) == 1 and "CUDA error 2" in warned[0]
    answers[0] = 70
    assert backends.routed("sample", GPU) is None
    for lasting in (-209, -222, -999):
        routes.clear()
        native._versions.clear()
        answers[0] = lasting
        assert backends.routed("sample", GPU) is not None and len(warned) == 1
        answers[0] = 70
        assert backends.routed("sample", GPU) is not None


def test_an_error_that_passes_while_it_is_looked_at_is_not_kept(volta: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real = [-2], native.may_pass
    monkeypatch.setattr(native._symbols["CUDA"], "specdec_cuda_binary_version", lambda index: answers[0])

    def passed(device: torch.device) -> bool:
        answers[0] = 70
        return real(device)

    monkeypatch.setattr(native, "may_pass", passed)
    assert backends.routed("sample", GPU) is None


def test_the_first_call_is_routed_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call that is compiled must not have a library without code for the device compiled into it."""
    torch._dynamo.reset()
    monkeypatch.setattr(backends, "_routes", {})
    monkeypatch.setattr(backends, "route", lambda op, device: "reference")
    called = []
    real = backends.in_python("reference", "noise_keys")
    reference = (lambda op, device: None, lambda op, overload: lambda *given: (called.append(op), real(*given))[1])
    monkeypatch.setitem(backends.BACKENDS, "reference", reference)
    seeds, positions = torch.arange(2), torch.arange(4).view(2, 2)
    compiled = torch.compile(lambda: sk.noise_keys(seeds, positions), fullgraph=False, backend="eager")
    assert torch.equal(compiled(), real(seeds, positions, None, -1, 3)) and called == ["noise_keys"]


def test_the_first_op_on_a_device_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_announced", set())
    monkeypatch.setattr(backends, "_routes", {})
    logged: list[str] = []
    monkeypatch.setattr(backends.logger, "info", lambda text, *of: logged.append(text % of))
    for op in ("sample", "sample", "row_stats"):
        assert backends.routed(op, torch.device("cpu")) is None
    assert len(logged) == 1 and logged[0].startswith("sample takes ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_table_says_so() -> None:
    row = sk.backends("cuda")["sample"]
    assert row["cuda"] in ("torch finds no GPU", native.why_missing("sample", "CUDA")) and "cuda" in row["cpu"]


@pytest.mark.skipif("CUDA" not in native._symbols, reason="built without CUDA")
def test_the_library_says_what_it_was_built_for() -> None:
    assert isinstance(native._symbols["CUDA"], ctypes.CDLL)
    assert all(part.removesuffix("+PTX").rstrip("af").isdigit() for part in native.cuda_architectures().split(";"))
    if not torch.cuda.is_available():
        assert native._binary_version(0) < 0  # a cudaError_t, not a crash


@pytest.mark.skipif("CPU" in native._problems, reason="nothing was compiled")
def test_a_checkout_that_hides_the_installed_package_is_named(tmp_path: Path) -> None:
    """Python in a checkout finds its sources before what was installed from them, not in place."""
    package = Path(sk.__file__).parent
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    shutil.copytree(package, checkout / "specdec_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (installed / "specdec_kernels").mkdir(parents=True)
    (installed / "specdec_kernels/_C_cpu.so").symlink_to(package / "_C_cpu.so")
    done = subprocess.run(
        [sys.executable, "-c", "import specdec_kernels"], cwd=checkout, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    there, here = installed / "specdec_kernels", checkout / "specdec_kernels"
    assert f"_C_cpu.so is in {there}, and the sources in {here} hide that package" in done.stderr
    assert f"`pip install --no-build-isolation -e {checkout}`" in done.stderr


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine with a GPU and Triton whose programs are in the folder given, and Python's headers in its `include`."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: name if name == "triton" else real(name, *of))
    monkeypatch.setattr(sysconfig, "get_path", lambda *of: str(tmp_path / "include"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "include").mkdir()
    triton._why_no_launcher.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    triton._why_no_launcher.cache_clear()
    config.reload()


def compiler(path: Path, status: int = 1) -> None:
    path.write_text(f"#!/bin/sh\necho $* >> {path}.calls\nexit {status}\n")
    path.chmod(0o755)


def why_no_triton() -> str | None:
    config.reload()
    return triton.why_not(GPU)


def test_triton_without_a_compiler_is_not_taken(launching: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles what starts its kernels: without a compiler the first call would be an error."""
    (launching / "include/Python.h").write_text("")
    reason = "Triton needs a C compiler, and gcc and clang are not found"
    assert why_no_triton() == reason
    assert sk.backends(GPU)["sample"]["triton"] == reason
    for named in ("no-such-compiler", ""):
        monkeypatch.setenv("CC", named)
        assert why_no_triton() == f"Triton needs a C compiler, and CC={named} is not found"
    monkeypatch.delenv("CC")
    compiler(launching / "clang")
    triton._why_no_launcher.cache_clear()
    assert why_no_triton() is None
    monkeypatch.setenv("CC", str(launching / "clang"))
    assert why_no_triton() is None
    monkeypatch.setenv("SPECDEC_CHECK", "maybe")  # an error where an op is called, not where backends are listed
    monkeypatch.setattr(config, "_settings", None)
    assert triton.why_not(GPU) is None


@pytest.mark.parametrize(("status", "reason"), [(1, "Triton needs Python.h, which is not in "), (0, None)])
def test_triton_without_pythons_headers_is_not_taken(launching: Path, status: int, reason: str | None) -> None:
    """Unless the compiler finds them by itself, as by CPATH; it is asked once a process."""
    compiler(launching / "gcc", status)
    for _ in range(2):
        said = why_no_triton()
        assert said is None if reason is None else said is not None and said.startswith(reason)
    assert len((launching / "gcc.calls").read_text().splitlines()) == 1
