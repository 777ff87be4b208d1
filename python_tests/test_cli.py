"""The specdec command, and the environment report of intact and broken installations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import _specdec
import specdec_kernels as sk
from specdec_kernels import assets, cli, collect_env, demo

FOLDER = Path(collect_env.__file__).parent
ROOT = Path(__file__).resolve().parents[1]


def report(python: Path, script: Path) -> str:
    done = subprocess.run([python, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_backends_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    assert capsys.readouterr().out == f"{sk.backends()}\n"


def test_backends_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == sk.backends()


def test_env_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(collect_env, "collect", lambda: [("memory", "1 GiB"), ("torch", "two\nlines")])
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"memory": "1 GiB", "torch": "two\nlines"}


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


def test_a_command_s_own_arguments_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(demo, "main", seen.append)
    assert cli.main(["demo", "--", "-x"]) == cli.main(["demo", "--version"]) == cli.main(["--", "demo", "-x"]) == 0
    assert seen == [["--", "-x"], ["--version"], ["-x"]]


@pytest.mark.parametrize("name", cli._COMMANDS)
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "\n{}: stopped\n"),
        (BrokenPipeError(), 2, ""),
        (OSError(28, "No space left on device"), 2, "{}: the disk is full\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "{}: [Errno 2] No such file: 'x'\n"),
        (assets.AssetError("could not download x"), 2, "{}: could not download x\n"),
        (ValueError("generate: bad"), 2, "{}: generate: bad\n"),
        (MemoryError(), 2, "{}: out of memory\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), 2, "{}: out of memory\n"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9]"), 2, "{}: out of memory\n"),
        (ModuleNotFoundError("No module named 'x'"), 2, "{}: {}No module named 'x'\n"),
    ],
)
def test_every_command_ends_in_one_sentence(
    name: str,
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    command = cli._COMMANDS[name]
    monkeypatch.setitem(cli._COMMANDS, name, command._replace(run=fail))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a broken pipe takes it away
    assert cli.main([name]) == status
    extra = f"needs the '{command.extra}' extra (pip install 'specdec_kernels[{command.extra}]'): "
    sentence = said.format(name, extra if command.extra else "")
    assert capsys.readouterr().err == sentence.replace(f"{name}: {name}: ", f"{name}: ")


def test_a_reader_that_has_gone_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in ``specdec demo | head``, whichever print notices it first."""

    def gone(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr("specdec_kernels.demo.compare.run", gone)
    assert cli.main(["demo"]) == 2 and capsys.readouterr().err == ""


def test_a_fault_of_ours_is_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's own status after a traceback is 1, by which `audit` and `check` say that something is not lossless."""

    def fail() -> int:
        raise RuntimeError("no such thing was foreseen")

    monkeypatch.setattr(cli, "main", fail)
    assert _specdec.main() == 2
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize("name", ["generate", "plan", "demo"])
def test_help_names_a_default_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: None)" not in shown and "(default: False)" not in shown
    assert not re.search(r"\(default[^()]*\) \(default", shown)


def test_the_extras_that_commands_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {command.extra for command in cli._COMMANDS.values()} - {None} <= set(project["optional-dependencies"])


def test_the_benchmarks_get_their_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from bench import run

    seen: list[Any] = []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run, "main", seen.append)
    assert cli.main(["bench", "--op", "sample"]) == 0 and seen == [["--op", "sample"]]
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages/specdec_kernels/cli.py"))
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == (
        "bench: the benchmarks are in the package's sources and are not installed; run it in a checkout\n"
    )


IMPORTED = """
import sys, tomllib

class Interrupting:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            raise KeyboardInterrupt if len(sys.argv) == 2 else OSError(sys.argv[2])

sys.meta_path.insert(0, Interrupting())
module, _, name = tomllib.load(open("pyproject.toml", "rb"))["project"]["scripts"]["specdec"].partition(":")
sys.exit(getattr(__import__(module), name)())
"""


@pytest.mark.parametrize("module", ["torch", "specdec_kernels", "specdec_kernels.backends"])
def test_an_interrupt_while_the_command_is_imported_is_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, module], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (130, "specdec: stopped\n")


def test_a_torch_that_does_not_load_is_one_sentence() -> None:
    lacks = "libcudart.so.13: cannot open shared object file"
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, "torch", lacks], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (2, f"specdec: the package cannot be imported: {lacks}\n")


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec_kernels", "--help"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "backends" in done.stdout


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"]])
@pytest.mark.parametrize("raised", ["ImportError", "AttributeError"])
def test_the_report_is_had_where_the_package_cannot_be_imported(
    tmp_path: Path, arguments: list[str], raised: str
) -> None:
    folder = tmp_path / "specdec_kernels"
    folder.mkdir()
    shutil.copy(ROOT / "_specdec.py", tmp_path)
    shutil.copy(FOLDER / "collect_env.py", folder)
    (folder / "__init__.py").write_text(f"raise {raised}('half an upgrade')\n")
    code = "import sys; import _specdec; sys.exit(_specdec.main())"

    def run(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *given], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"FAILED: {raised}: half an upgrade" in done.stdout and (
        "--json" not in arguments or "packages" in json.loads(done.stdout)
    )
    done = run("backends")
    assert done.returncode == 2 and "half an upgrade" in done.stderr
    assert ("Traceback" in done.stderr) == (raised != "ImportError")


def test_the_module_ends_as_the_command_does() -> None:
    """With status 2 after a fault of ours, as Python's own status would be a verdict."""
    code = (
        "import runpy, specdec_kernels.cli as cli\n"
        "def fail(): raise RuntimeError('unforeseen')\n"
        "cli.main = fail; runpy.run_module('specdec_kernels', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "RuntimeError: unforeseen" in done.stderr


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
    assert len(re.findall(r"FAILED: ModuleNotFoundError: No module named '(?:torch|numpy)'", text)) >= 2


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


QUICK_ENV = """
import sys
from specdec_kernels import cli, collect_env
collect_env._PROBE_TORCH = collect_env._PROBE_PACKAGE = collect_env._PROBE_CUDA_LIBRARY = "print(1)"
sys.exit(cli.main(["env"]))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_streams_that_are_closed(closed: str) -> None:
    """`specdec env`, whose children here only print."""
    done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, QUICK_ENV], capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_an_output_on_a_full_disk_is_one_sentence() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$0" -m _specdec backends > /dev/full', sys.executable], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "backends: the disk is full\n")


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_that_computes_nothing_is_one_sentence(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["check", "--device", device]) == 2
    said = capsys.readouterr().err
    assert said.startswith("check: --device must be usable here") and said.count("\n") == 1


@pytest.mark.parametrize("way", ["help", "version"])
def test_the_command_alone_says_what_there_is(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"] if way == "version" else [])
    said = capsys.readouterr()
    if way == "version":
        assert said.out == f"specdec_kernels {sk.__version__}\n" and not ended.value.code
    else:
        assert "commands (each knows --help)" in said.err and ended.value.code == 2


@pytest.mark.long
def test_letters_that_the_terminal_cannot_encode_are_replaced() -> None:
    command = [sys.executable, "-m", "_specdec", "audit", "--help"]
    for narrow in ({"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | narrow, cwd=ROOT)
        assert done.returncode == 0 and "--samples" in done.stdout, done.stderr
