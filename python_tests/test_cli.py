"""The specdec command, and the environment report of installations good and broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import specdec_kernels as sk
from specdec_kernels import cli, collect_env, demo

FOLDER = Path(collect_env.__file__).parent


def report(python: Path, script: Path) -> str:
    done = subprocess.run([python, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_backends_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    assert capsys.readouterr().out == f"{sk.backends()}\n"


def test_backends_of_an_unknown_device_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["backends", "--device", "abacus"])
    assert "abacus" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["prove"]])
def test_an_unknown_command_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage: specdec" in capsys.readouterr().err


def test_demo_gets_its_arguments_and_its_exit_status_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fake(arguments: list[str]) -> int:
        seen.append(arguments)
        return 3

    monkeypatch.setattr(demo, "main", fake)
    assert cli.main(["demo", "--batch", "2", "--help"]) == 3
    assert seen == [["--batch", "2", "--help"]]


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "main", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "specdec: stopped\n"


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec_kernels", "--help"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "backends" in done.stdout


def test_report_names_this_installation() -> None:
    rows = dict(collect_env.collect())
    assert rows["specdec_kernels"].endswith(str(FOLDER))
    assert f"imports: specdec_kernels {sk.__version__}" in rows["package"] and "verify_chain" in rows["package"]
    for path in FOLDER.glob("*.so"):
        assert path.name in rows["compiled parts"]


def test_report_without_any_package(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    text = report(tmp_path / "bin/python", FOLDER / "collect_env.py")
    assert "torch not installed" in text
    assert text.count("FAILED: ModuleNotFoundError: No module named 'torch'") >= 2


def test_report_of_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    folder = tmp_path / "specdec_kernels"
    folder.mkdir()
    shutil.copy(FOLDER / "collect_env.py", folder)
    shutil.copy(FOLDER / "types.py", folder)  # must not hide the standard library's
    (folder / "__init__.py").write_text("raise ImportError('half an upgrade')\n")
    text = report(Path(sys.executable), folder / "collect_env.py")
    assert "FAILED: ImportError: half an upgrade" in text
    assert "imports: torch" in text


@pytest.mark.skipif(not (FOLDER / "_C_cuda.so").exists(), reason="the CUDA library was not built")
def test_cuda_library_says_what_it_was_built_for() -> None:
    info = collect_env.cuda_build_info()  # it loads beside a torch without CUDA
    archs, runtime = (field.split("=")[1] for field in info.split())
    assert archs and int(runtime) >= 12000
