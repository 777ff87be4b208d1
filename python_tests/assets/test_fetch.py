"""Fetching: what is in the cache is complete, made once, and every failure is one sentence."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from python_tests.support import environment
from specdec_kernels.assets import fetch


def silent(message: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with environment(SPECDEC_CACHE=str(tmp_path / "cache")):
        yield tmp_path / "cache"


def visible(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_thing_is_built_once(cache: Path) -> None:
    calls = []

    def build(path: Path) -> None:
        calls.append(path)
        path.write_text("hello")

    for _ in range(2):
        assert fetch.cached("thing", build, say=silent).read_text() == "hello"
    assert len(calls) == 1
    assert visible(cache) == ["thing"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), fetch.AssetError("no"), ValueError("bad")])
def test_an_interrupted_build_leaves_nothing(cache: Path, error: BaseException) -> None:
    def build(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(type(error)):
        fetch.cached("thing", build, say=silent)
    assert visible(cache) == []
    assert fetch.cached("thing", lambda path: path.write_text("whole"), say=silent).read_text() == "whole"


def test_what_a_killed_process_left_is_not_used_and_removed(cache: Path) -> None:
    (cache / ".thing-left").mkdir(parents=True)
    (cache / ".thing-left" / "thing").write_text("half")
    assert fetch.cached("thing", lambda path: path.write_text("whole"), say=silent).read_text() == "whole"
    assert visible(cache) == ["thing"]


def test_a_full_disk_is_one_sentence(cache: Path) -> None:
    def build(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(fetch.AssetError, match=r"^the disk is full: thing could not be written to "):
        fetch.cached("thing", build, say=silent)
    with pytest.raises(fetch.AssetError, match=r"^thing needs .* GB in .*, which has .* GB left"):
        fetch.cached("thing", build, needed_bytes=1 << 60, say=silent)


def test_a_cache_that_cannot_be_made_is_one_sentence(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(fetch.AssetError, match=r"could not be written to .* \(SPECDEC_CACHE names another folder\)"):
        fetch.cached("thing", lambda path: path.write_text(""), say=silent)


def _slow_build(path: Path) -> None:
    time.sleep(0.3)
    path.write_text(str(time.monotonic_ns()))


def _child(connection) -> None:  # type: ignore[no-untyped-def]
    connection.send(fetch.cached("thing", _slow_build, say=silent).read_text())


def test_two_processes_build_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for _ in range(2):
        here, there = context.Pipe()
        children.append(context.Process(target=_child, args=(there,)))
        children[-1].start()
        pipes.append(here)
    first, second = (pipe.recv() for pipe in pipes)
    for child in children:
        child.join()
    assert first == second


def wheel_of(folder: Path) -> Path:
    path = folder / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/data.jsonl", '{"a": "x\u2028y"}\n\n{"a": 2}\n')
    return path


def fake_pip(monkeypatch: pytest.MonkeyPatch, *, returncode: int = 0, stderr: str = "") -> list[list[str]]:
    commands = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        if returncode == 0:
            folder = next(part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
            wheel_of(Path(folder))
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch)
    with pytest.raises(fetch.AssetError, match=r"thing-1-py3-none-any.whl is not the expected file"):
        fetch.download(fetch.Wheel("thing==1", "0" * 64), tmp_path)
    assert commands[0][:3] == [sys.executable, "-m", "pip"] and "--no-deps" in commands[0]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found for thing==1\n", "No matching distribution found"),
        ("", "pip ended with status 1"),
    ],
)
def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str) -> None:
    fake_pip(monkeypatch, returncode=1, stderr=stderr)
    with pytest.raises(fetch.AssetError, match=rf"^could not download thing==1 with pip .*{message}"):
        fetch.download(fetch.Wheel("thing==1", ""), tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_in_any_language(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"ERROR: Could not install packages due to an OSError: [Errno {code}] Auf dem Gerät ist kein Platz mehr\n"
    fake_pip(monkeypatch, returncode=1, stderr=text)
    with pytest.raises(OSError, match=f"Errno {code}") as raised:
        fetch.download(fetch.Wheel("thing==1", ""), tmp_path)
    assert raised.value.errno == code


def test_without_pip_one_sentence_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that uv made."""
    fake_pip(monkeypatch, returncode=1, stderr=f"{sys.executable}: No module named pip\n")
    with pytest.raises(
        fetch.AssetError, match=r"^thing==1 is fetched with pip, .*ensurepip`, or `uv pip install pip`$"
    ):
        fetch.download(fetch.Wheel("thing==1", ""), tmp_path)


def test_setuptools_can_be_imported_after_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile imports it. Once something has looked for pip, setuptools' finder gives up its own distutils."""
    fake_pip(monkeypatch)
    with pytest.raises(fetch.AssetError):
        fetch.download(fetch.Wheel("thing==1", "0" * 64), tmp_path)
    finders = [finder for finder in sys.meta_path if type(finder).__module__ == "_distutils_hack"]
    assert not any("spec_for_distutils" in vars(finder) for finder in finders)


def test_json_lines_come_from_the_wheel_and_then_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch)
    folder = cache.parent / "made"
    folder.mkdir()
    # zip entries carry a time stamp: hash the very file that the fake hands out
    made = wheel_of(folder).read_bytes()
    monkeypatch.setattr(sys.modules[__name__], "wheel_of", lambda f: (f / "thing-1.whl").write_bytes(made))
    wheel = fetch.Wheel("thing==1", hashlib.sha256(made).hexdigest())
    for _ in range(2):
        assert fetch.json_lines("t.jsonl", wheel, "thing/data.jsonl", silent) == [{"a": "x\u2028y"}, {"a": 2}]
    assert len(commands) == 1
    (cache / "t.jsonl").write_text("{")
    with pytest.raises(fetch.AssetError, match="cannot be read .*; delete it and try again"):
        fetch.json_lines("t.jsonl", wheel, "thing/data.jsonl", silent)
