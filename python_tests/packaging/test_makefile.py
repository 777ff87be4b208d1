"""What `make build` would do in an environment that is there, and one whose Python has moved on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HANDED_ON = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "PYTHON", "TORCH", "TORCH_INDEX")
ROOT = Path(__file__).resolve().parents[2]
CHECKSUMMED = tuple(f"specdec_kernels/{name}" for name in ("flat.py", "ops/arguments.py", "backends/contract.py"))
NEEDS = ("requirements-test.txt", ".ci/pins.py", "setup.py", "pyproject.toml")

pytestmark = [
    pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="an installed package has no Makefile"),
    pytest.mark.skipif(shutil.which("make") is None, reason="no make"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With an environment whose Python says that it is of version 3.11."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (*NEEDS, *CHECKSUMMED, "csrc/op.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python_is(tmp_path, "3.11")
    return tmp_path


def python_is(checkout: Path, version: str) -> None:
    python = checkout / ".venv/bin/python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)


def dry_run(checkout: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Without what a `make test PYTHON=…` around this test hands on."""
    environment = {name: value for name, value in os.environ.items() if name not in HANDED_ON} | {"LC_ALL": "C"}
    command = ["make", "-n", "build", "VIRTUAL_ENV=", *settings]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=environment)


def would_run(checkout: Path, *settings: str) -> str:
    done = dry_run(checkout, *settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_installed_is_installed_again_for_another_python(checkout: Path) -> None:
    """A system whose Python was upgraded: the environment's is then the new one, and has none of our packages."""
    assert "installing the other packages" in would_run(checkout)
    (checkout / ".venv/.specdec-requirements-3.11").write_text("")
    (checkout / ".venv/.specdec-installed-3.11").write_text(f"{checkout}\n")
    assert "Nothing to be done" in would_run(checkout)
    python_is(checkout, "3.12")
    again = would_run(checkout)
    assert "installing the other packages" in again and "compiling and installing" in again


@pytest.mark.parametrize("name", CHECKSUMMED)
def test_what_the_compiled_parts_carry_a_checksum_of_builds_them_again(checkout: Path, name: str) -> None:
    """An ImportError says that `make build` does."""
    for stamp, text in (("requirements", ""), ("installed", f"{checkout}\n")):
        (checkout / f".venv/.specdec-{stamp}-3.11").write_text(text)
    assert "Nothing to be done" in would_run(checkout)
    later = (checkout / ".venv/.specdec-installed-3.11").stat().st_mtime + 9
    os.utime(checkout / name, (later, later))
    assert "compiling and installing" in would_run(checkout)


def test_a_make_around_it_changes_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", " -- PYTHON=/nonexistent/python TORCH_INDEX=https://index.org")
    assert "--extra-index-url" not in would_run(checkout)


def test_another_python_than_the_environments_is_refused(checkout: Path) -> None:
    for version in ("3.11", "3.13"):
        python = checkout / f"python{version}"
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
    assert "compiling and installing" in would_run(checkout, f"PYTHON={checkout}/python3.11")
    done = dry_run(checkout, f"PYTHON={checkout}/python3.13")
    assert done.returncode and "python3.13 is not the Python 3.11 of .venv: remove that folder first" in done.stderr


def test_an_environment_of_too_old_a_python_is_refused_before_anything_is_fetched(checkout: Path) -> None:
    python_is(checkout, "3.10")
    done = dry_run(checkout)
    assert done.returncode and "Python 3.11 or newer is needed, and .venv has Python 3.10: remove that" in done.stderr


def test_separate_environments_outlive_another_build(checkout: Path) -> None:
    for stamp, text in (("requirements", ""), ("installed", f"{checkout}\n")):
        (checkout / f".venv/.specdec-{stamp}-3.11").write_text(text)
    places = ("docs", "llama-cpp", "transformers-5.17.0", "transformers-5.24.0", "triton-3.6.0")
    for place in places:
        (checkout / f"build/{place}").mkdir(parents=True)
        (checkout / f"build/{place}/.installed").write_text("")
    later = (checkout / "build/docs/.installed").stat().st_mtime + 9
    os.utime(checkout / "csrc/op.cpp", (later, later))
    made = would_run(checkout, "docs", "test-llama-cpp", "test-transformers", "test-triton")
    assert "compiling and installing" in made and "==> installing" not in made and "rm -rf build" not in made


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="an installed package has no kernel sources")
def test_the_emulators_programs_are_built_with_the_compiler_that_there_is(tmp_path: Path) -> None:
    """make's own preset is g++."""
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    command = [shutil.which("make"), "-n", "-B", "-C", str(ROOT / "csrc/emulator/tests"), "all"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)})  # type: ignore[arg-type]
    assert (
        done.returncode == 0 and f"{compiler} " in done.stdout and "g++ -" not in done.stdout.replace(str(compiler), "")
    )


def test_an_environment_without_its_python_is_made_anew(checkout: Path) -> None:
    python = checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nonexistent/python3.11")
    made = would_run(checkout, "PYTHON=python3")
    assert "python3 -m venv --clear .venv" in made and ".specdec-requirements-3." in made


def test_torch_comes_from_the_index_that_is_named(checkout: Path) -> None:
    index = "https://download.pytorch.org/whl/cpu"
    assert f"install $quiet --extra-index-url={index} " in would_run(checkout, f"TORCH_INDEX={index}")
    assert "--extra-index-url" not in would_run(checkout)


def test_another_python_gets_the_pinned_torch(checkout: Path) -> None:
    (checkout / "requirements-test.txt").write_text("# torch first\ntorch==9.8.7\n\ntriton==1.0\n")
    assert ".ci/other_python python3 9.8.7" in would_run(checkout, "test-python", "PYTHON=python3")
    assert ".ci/other_python python3 2.0" in would_run(checkout, "test-python", "PYTHON=python3", "TORCH=2.0")
