"""docs/reference describes every public name once, from its docstring; `make docs` builds it."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from python_tests import public

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference"
if not REFERENCE.exists():
    pytest.skip("a source distribution holds no docs", allow_module_level=True)


class Entry(NamedTuple):
    kind: str
    module: str
    name: str

    @property
    def thing(self) -> object:
        return getattr(importlib.import_module(self.module), self.name)


def described(text: str) -> tuple[set[str], list[Entry]]:
    """The modules and names that a page's directives describe."""
    modules, entries, current = set(), [], ""
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)$", text, flags=re.MULTILINE):
        if kind in ("automodule", "currentmodule"):
            current = name
            if kind == "automodule":
                modules.add(name)
        elif kind.startswith("auto"):
            entries.append(Entry(kind.removeprefix("auto"), current, name))
    return modules, entries


PAGES = [described(page.read_text()) for page in sorted(REFERENCE.glob("*.rst"))]
MODULES = set().union(*(modules for modules, _ in PAGES))
ENTRIES = [entry for _, entries in PAGES for entry in entries]


def test_every_public_name_is_described() -> None:
    things = {id(entry.thing) for entry in ENTRIES if entry.kind != "data"}
    values = {(entry.module, entry.name) for entry in ENTRIES if entry.kind == "data"}
    for module in public.modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                found = thing.__name__ in MODULES
            elif inspect.isclass(thing) or inspect.isfunction(thing):
                found = id(thing) in things
            else:
                found = (module.__name__, name) in values
            assert found, f"docs/reference does not describe {module.__name__}.{name}"


def test_nothing_is_described_twice_or_is_not_public() -> None:
    named = Counter((entry.module, entry.name) for entry in ENTRIES)
    things = Counter(id(entry.thing) for entry in ENTRIES if entry.kind != "data")
    twice = [entry for entry in ENTRIES if named[entry.module, entry.name] > 1 or things[id(entry.thing)] > 1]
    assert not twice
    for entry in ENTRIES:
        assert entry.name in importlib.import_module(entry.module).__all__, f"{entry} is not public"


def test_what_is_described_is_of_its_kind_and_has_a_docstring() -> None:
    for entry in ENTRIES:
        thing = entry.thing
        if entry.kind == "function":
            assert inspect.isfunction(thing) and inspect.getdoc(thing), entry
        elif entry.kind in ("class", "exception"):
            assert isinstance(thing, type) and thing.__doc__, entry
            assert issubclass(thing, BaseException) == (entry.kind == "exception")
            assert not thing.__doc__.startswith(f"{entry.name}("), f"{entry} has the docstring that Python makes"
        else:
            assert entry.kind == "data" and not inspect.isfunction(thing) and not inspect.isclass(thing), entry
    for name in MODULES:
        assert importlib.import_module(name).__doc__, name


def test_every_page_is_listed() -> None:
    listed = re.findall(r"^   ([\w/.-]+)$", (REFERENCE / "index.rst").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in REFERENCE.glob("*.rst") if page.stem != "index")


def test_the_notebook_is_committed_without_outputs() -> None:
    """They hold times, which no two runs share: `make docs` runs it and shows them in the built page."""
    notebook = json.loads((ROOT / "docs/ten-minutes.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "   ten-minutes\n" in (ROOT / "docs/index.rst").read_text()
    assert "nb_execution_raise_on_error = True" in (ROOT / "docs/conf.py").read_text()
