from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec_kernels import config
from specdec_kernels.backends import BACKENDS


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))  # there may be none
    ours = ("SPECDEC_CHECK", "SPECDEC_BACKEND", "SPECDEC_CPU_CAPABILITY", "SPECDEC_CACHE", "SPECDEC_VLLM")
    for name in (*ours, "XDG_CACHE_HOME", "NO_COLOR", "CC"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    config.reload()


def test_defaults() -> None:
    cache = Path.home() / ".cache" / "specdec_kernels"
    assert config.reload() == config.Settings(
        check=False, cpu_capability=None, backend=None, cache=cache, vllm=False, no_color=False, c_compiler=None
    )


def test_every_backend_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BACKENDS:
        monkeypatch.setenv("SPECDEC_BACKEND", name)
        assert config.reload().backend == name


def test_read_once_until_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    config.reload()
    monkeypatch.setenv("SPECDEC_BACKEND", "reference")
    assert config.settings().backend is None
    assert config.reload().backend == "reference"
    assert config.settings() is config.settings() and config.settings().backend == "reference"


@pytest.mark.parametrize("name", ["check", "vllm"])
@pytest.mark.parametrize("value, on", [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_switches(monkeypatch: pytest.MonkeyPatch, name: str, value: str, on: bool) -> None:
    monkeypatch.setenv(f"SPECDEC_{name.upper()}", value)
    assert getattr(config.reload(), name) is on


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_cpu_capability(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setenv("SPECDEC_CPU_CAPABILITY", capability)
    assert config.reload().cpu_capability == capability


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("SPECDEC_CHECK", "maybe", "SPECDEC_CHECK must be 0 or 1, got 'maybe'"),
        ("SPECDEC_VLLM", "forward", "SPECDEC_VLLM must be 0 or 1, got 'forward'"),
        ("SPECDEC_BACKEND", "cpp", f"SPECDEC_BACKEND must be empty or one of {', '.join(config.BACKENDS)}, got 'cpp'"),
        (
            "SPECDEC_CPU_CAPABILITY",
            "sse",
            "SPECDEC_CPU_CAPABILITY must be empty or one of default, avx2, avx512, got 'sse'",
        ),
    ],
)
def test_refusals_keep_the_settings(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    before = config.reload()
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        config.reload()
    assert config.settings() == before


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.reload().cache == tmp_path / "specdec_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.reload().cache == Path.home() / ".cache" / "specdec_kernels"
    monkeypatch.setenv("SPECDEC_CACHE", "~/models")
    assert config.reload().cache == Path.home() / "models"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the package does not need one to be imported."""

    def unknown(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)
    assert config.reload().cache == Path(tempfile.gettempdir()) / f"specdec_kernels-{os.getuid()}"
    with monkeypatch.context() as patch:

        def none() -> str:
            raise FileNotFoundError("No usable temporary directory found")

        patch.setattr(tempfile, "gettempdir", none)
        assert config.reload().cache == Path("/tmp") / f"specdec_kernels-{os.getuid()}"
    monkeypatch.setenv("SPECDEC_CACHE", "~nobody/models")
    with pytest.raises(ValueError, match="SPECDEC_CACHE must be a folder, got '~nobody/models'"):
        config.reload()


@pytest.mark.parametrize("home", ["/", "/nonexistent"])
def test_a_home_that_is_none(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """As for a container's user: a folder that cannot be written to, or created."""
    monkeypatch.setenv("HOME", home)
    assert config.reload().cache == Path(tempfile.gettempdir()) / f"specdec_kernels-{os.getuid()}"


@pytest.mark.parametrize("named", [None, "", "clang-20"])
def test_the_c_compiler_is_what_triton_takes(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    if named is not None:
        monkeypatch.setenv("CC", named)
    assert config.reload().c_compiler == named
