"""Peers in a folder beside the checkout, for machines without a package registry.

``python -m bench.peers`` fills the folder ``peers`` with what their verify step needs and no more; missing modules that
they import are made up on demand. A peer that is installed takes precedence. ``python -m bench.providers.beside``
compiles those that compile themselves.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..gpu.process import ROOT

FOLDER = ROOT / "peers"
MADE_UP = ("vllm", "flashinfer", "pynvml")
"""Packages of which modules may be missing."""


class Nothing:
    """The content of a made-up module: false, empty, callable, and a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and not options and callable(arguments[0]) else Nothing()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__


class MadeUp(ModuleType):
    """Stands in for a missing module; it has no ``__file__``."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: finds what no other finder has of these packages."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in MADE_UP else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MadeUp(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def mount(folder: Path = FOLDER) -> bool:
    """Make the folder's packages importable; False if there is no folder."""
    if not folder.is_dir():
        return False
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # after what is installed
        sys.meta_path.append(Finder())
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{folder / 'bin'}"  # ninja
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    if not mount():
        print(f"there is no folder {FOLDER.name}: python -m bench.peers makes it where there is a package registry")
        return 0
    sampling = importlib.import_module("flashinfer.sampling")
    sampling.get_sampling_module()
    print("flashinfer's sampling kernels are compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
