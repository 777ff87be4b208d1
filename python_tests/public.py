"""Finds the public names that the tests of the reference and of wrong arguments go through."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOT_FOR_USERS = ("specdec_kernels.demo", "specdec_kernels.backends.")  # a command; what ops choose from


def modules() -> list[ModuleType]:
    """Every package with a list of public names, and the modules with such a list that these lists name or that are
    integrations (importing that package imports none of them).
    """
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "specdec_kernels").rglob("__init__.py")]
    names = {".".join(folder.parts) for folder in folders}
    names |= {
        f"specdec_kernels.integrations.{path.stem}" for path in ROOT.glob("specdec_kernels/integrations/[!_]*.py")
    }
    packages = [importlib.import_module(name) for name in sorted(names) if not name.startswith(NOT_FOR_USERS)]
    found = {package.__name__: package for package in packages if hasattr(package, "__all__")}
    for package in list(found.values()):
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.ismodule(thing) and hasattr(thing, "__all__"):
                found[thing.__name__] = thing
    return list(found.values())


def callables() -> dict[str, Callable[..., Any]]:
    """Every public function, constructor and method that takes an argument, by its shortest name."""
    found: dict[int, tuple[str, Any]] = {}
    for module in modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                full = f"{module.__name__}.{name}".removeprefix("specdec_kernels.")
                if id(thing) not in found or len(full) < len(found[id(thing)][0]):
                    found[id(thing)] = full, thing
    parts = (part for full, thing in found.values() for part in _parts(full, thing))
    return {name: call for name, call in parts if takes_arguments(call)}


def _parts(full: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """A function, or a class and its own public methods; no constructors of exceptions."""
    if not issubclass(type(thing), type) or not issubclass(thing, BaseException):
        yield full, thing
    if inspect.isclass(thing):
        for name, value in vars(thing).items():
            if not name.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))
            ):
                yield f"{full}.{name}", getattr(thing, name)


def takes_arguments(call: Any) -> bool:
    names = list(inspect.signature(call).parameters)
    return bool(set(names) - {"self"})
