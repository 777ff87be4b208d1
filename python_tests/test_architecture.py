"""Which file may import which: the layers, stated once, and the imports that they forbid."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "specdec_kernels"

LAYERS: tuple[tuple[str, ...], ...] = (
    # values: what ops take and return
    ("checks", "config", "files", "flat", "options", "types", "sampling", "processors", "laws", "tree", "_host"),
    # theory; every other file of analysis/ is built with the package
    ("analysis", "analysis.theory"),
    # what ops are given; kernels; then every other file of ops/, which reaches them
    ("ops", "ops.arguments"),
    ("backends",),
    # what works on the host, and its specification
    ("host", "_host_py"),
    ("ops.*",),
    # what tells a tie from a fault
    ("margins",),
    # what drafters and runners are written against
    (
        "decoding",
        *(f"decoding.{file}" for file in ("costs", "grammar", "logprobs", "output", "request", "runner", "state")),
    ),
    ("integrations",),
    ("drafters",),
    # the loop; every other file of decoding/
    ("decoding.*",),
    # what offers the loop to other libraries' users
    tuple(
        f"integrations.transformers.{file}" for file in ("assisted", "following", "patch", "processors", "verification")
    ),
    ("comparison",),
    # ops of several ranks
    ("distributed",),
    # the package itself: `import specdec_kernels`
    ("",),
    # what is built with it
    ("assets",),
    ("commands",),
    ("medusa", "demo", "analysis.*", "audit"),
    ("cli", "collect_env", "__main__"),
)
"""From below: a file imports from its own layer and those before it. A name stands for a module and all in it, but
that of a package whose files stand in another layer ("ops.*") for the package's own file alone."""

INDEPENDENT = {
    "testing": ("checks", "laws", "sampling", "tree", "types"),
    "audit": ("checks", "options", "testing", "testing.counts", "sampling", "tree"),
}
"""Rooms that import these alone, and that nothing but each other and the command imports: what judges the package is
not made of it."""

LIBRARIES = {
    "transformers": ("integrations.transformers", "assets", "medusa", "demo"),
    "vllm": ("integrations.vllm",),
    "safetensors": ("drafters.medusa_heads", "medusa"),
    "triton": ("backends.triton",),
    "rich": ("demo",),
}
"""Who may know these libraries."""

READ_THE_ENVIRONMENT = ("config", "collect_env")
"""The second reports it, and runs by itself where the package does not import."""

MAX_LINES = 600


def sources() -> dict[str, str]:
    """The package's modules by their name within it; the ``__init__`` file of a package `x` is "x!"."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py*")):
        if path.suffix in (".py", ".pyi"):
            *above, name = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
            module = ".".join(above) + "!" if name == "__init__" else ".".join([*above, name])
            found[module] = path.read_text(encoding="utf-8")
    return found


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imported(name: str, source: str) -> Iterator[str]:
    """What a module imports anywhere, functions and annotations included; the package's own modules as ".name"."""
    package = name.removesuffix("!").split(".") if name.endswith("!") else name.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                own = alias.name == PACKAGE or alias.name.startswith(PACKAGE + ".")
                yield alias.name.removeprefix(PACKAGE).rjust(1, ".") if own else alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = "." + ".".join([*above, *base.split(".")] if base else above)
            elif base == PACKAGE or base.startswith(PACKAGE + "."):
                base = base.removeprefix(PACKAGE).rjust(1, ".")
            for alias in node.names:
                yield f"{base.rstrip('.')}.{alias.name}"


def edges(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Which modules each one imports, including packages entered on the way. "" is the package's own file."""
    names = {name.removesuffix("!") for name in modules}
    found: dict[str, set[str]] = {}
    for name, source in modules.items():
        module, reached = name.removesuffix("!"), set()
        for target in imported(name, source):
            if not target.startswith("."):
                continue
            path = target[1:]
            while path not in names:  # a name in a module
                path = path.rpartition(".")[0]
            reached.add(path)
            entered = path.rpartition(".")[0]
            while entered:
                if not inside(module, entered):
                    reached.add(entered)
                entered = entered.rpartition(".")[0]
        found[module] = reached - {module}
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that all reach each other."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for via in graph:
        for targets in reach.values():
            if via in targets:
                targets |= reach[via]
    rings = {frozenset(b for b in graph if b in reach[a] and a in reach[b]) for a in graph if a in reach[a]}
    return [sorted(ring) for ring in rings]


def layer(module: str) -> int | None:
    """Its index in `LAYERS`; the longest matching name counts."""
    fits = []
    for place, rooms in enumerate(LAYERS):
        for room in rooms:
            alone = room == "" or any(f"{room}.*" in others for others in LAYERS)
            if module == room or (not alone and inside(module, room.removesuffix(".*"))):
                fits.append((room != module and room.endswith(".*"), -len(room), place))
    return min(fits)[2] if fits else None


def layering(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports that no layer allows."""
    wrong = []
    for module, targets in graph.items():
        room = module.split(".")[0]
        for target in sorted(targets):
            if room in INDEPENDENT:
                if not inside(target, room) and target not in INDEPENDENT[room]:
                    wrong.append(f"{module} is independent and imports {target}")
                continue
            above, below = layer(module), layer(target)
            if above is None or below is None or below > above:
                wrong.append(f"{module} imports {target}")
    return wrong


def strangers(modules: Mapping[str, str]) -> list[str]:
    """Imports of libraries by modules that should not know them."""
    return [
        f"{name} imports {target}"
        for name, source in modules.items()
        for target in imported(name, source)
        for library, rooms in LIBRARIES.items()
        if inside(target, library) and not any(inside(name.removesuffix("!"), room) for room in rooms)
    ]


def environment_readers(modules: Mapping[str, str]) -> list[str]:
    found = []
    for name, source in modules.items():
        used = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        used |= {target.removeprefix("os.") for target in imported(name, source) if target.startswith("os.")}
        if used & {"environ", "environb", "getenv", "putenv"} and name not in READ_THE_ENVIRONMENT:
            found.append(name)
    return found


def too_long(folder: Path) -> list[str]:
    files = [path for room in ("csrc", PACKAGE, "python_tests", "bench") for path in (folder / room).rglob("*.*")]
    return [
        f"{path.relative_to(folder)} has {lines} lines"
        for path in files
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    ]


STREAMS = re.compile(r"#include <(?:io|s|o|f)\w*stream>|\b(?:STD_TORCH|TORCH_ERROR_CODE)_CHECK|\bstd::cerr")
"""What formats numbers by a C++ stream: beside a second C++ library in the process that can crash."""


def streamers(folder: Path) -> list[str]:
    """Files of the compiled libraries, apart from the emulator, that use a stream."""
    files = sorted(path for path in (folder / "csrc").rglob("*.*") if "emulator" not in path.parts)
    return [path.name for path in files if STREAMS.search(path.read_text(encoding="utf-8"))]


def libraries_of_tests(folder: Path) -> list[str]:
    """Imports of one test file by another file of `folder`; these should import a helper file instead."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for target in imported(name, path.read_text(encoding="utf-8")):
            if inside(target, folder.name) and any(part.startswith("test_") for part in target.split(".")):
                found.append(f"{name} imports {target}")
    return found


def test_no_compiled_library_uses_a_stream() -> None:
    assert streamers(ROOT) == []


def test_no_circle_among_files() -> None:
    assert circles(edges(sources())) == []


def test_layers() -> None:
    assert layering(edges(sources())) == []


def test_libraries_are_known_where_they_are_served() -> None:
    assert strangers(sources()) == []


def test_the_environment_is_read_in_one_place() -> None:
    assert environment_readers(sources()) == []


def test_no_file_of_tests_is_imported_by_another() -> None:
    assert libraries_of_tests(ROOT / "python_tests") == []


def test_no_file_is_too_long() -> None:
    assert too_long(ROOT) == []


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ({"laws": "from . import types", "types": "from .laws import Opt"}, ["laws", "types"]),
        ({"laws": "from .types import Status", "types": "def f():\n    from .laws import Opt"}, ["laws", "types"]),
        (
            {"laws": "from .types import Status", "types": "if TYPE_CHECKING:\n    import specdec_kernels.laws"},
            ["laws", "types"],
        ),
        # by way of a package's own file
        (
            {"ops!": "from . import a", "ops.a": "from ..tree import T", "ops.b": "", "tree": "from .ops.b import B"},
            ["ops", "ops.a", "tree"],
        ),
        ({"ops!": "", "ops.a": "from ..tree import T", "ops.b": "", "tree": "from .ops.b import B"}, None),
    ],
)
def test_a_circle_is_found(planted: dict[str, str], seen: list[str] | None) -> None:
    assert circles(edges(planted)) == ([] if seen is None else [seen])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.sample", "from ..decoding import Runner"),
        ("backends.native", "from ..ops._common import define"),
        ("decoding.runner", "from .step import verify_step"),
        ("decoding.state", "def f():\n    from ..drafters.base import Draft"),
        ("drafters.model", "from ..decoding.generate import generate"),
        ("decoding.step", "from ..comparison.bild import bild"),
        ("medusa.data", "from ..cli import main"),
        ("drafters.none", "import specdec_kernels as sk"),
        ("laws", "from .testing import laws"),
        ("testing.exact", "from ..ops.sample import sample"),
        ("audit.noise", "from ..ops.sample import sample"),
    ],
)
def test_an_import_from_above_is_found(module: str, source: str) -> None:
    modules = dict.fromkeys(sources(), "")
    assert layering(edges(modules)) == []
    assert layering(edges(modules | {module: source}))


def test_other_defects_are_found(tmp_path: Path) -> None:
    assert strangers({"backends.native": "from transformers import AutoModel"})
    assert environment_readers({"cli": "import os\nos.environ['HOME']"})
    assert environment_readers({"cli": "from os import getenv"})
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("from tests import test_b\nfrom tests.test_b import helper\n")
    assert len(libraries_of_tests(tmp_path / "tests")) == 2
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "bind.cpp").write_text("#include <sstream>")
    assert streamers(tmp_path) == ["bind.cpp"]
    (tmp_path / "csrc" / "long.cu").write_text("\n" * (MAX_LINES + 1))
    assert too_long(tmp_path) == ["csrc/long.cu has 601 lines"]
