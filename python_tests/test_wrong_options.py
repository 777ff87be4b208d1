"""Every option of every command refuses wrong text with status 2 and a sentence that names it, before any work.

The parsers are found: those of `specdec` and of every module of bench and of the tests that makes one.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specdec_kernels import cli

ROOT = Path(__file__).resolve().parents[1]
BEFORE_THE_PACKAGE = (  # the package may be missing when these run, or is not used: their numbers are argparse's own
    "bench.gpu_report", "bench.gpu.build", "bench.gpu.suite", "bench.gpu.sanitizer", "bench.vllm_engine",
)  # fmt: skip
WRITTEN = {"backbone", "draft", "figure", "folder", "heads", "journal", "json", "logs", "output", "save"}
"""Options with paths that are made; what is read from must be there."""
FREE = {  # text that is checked where its meaning is known, and what checks it
    "prompt": "any text", "verifier": "test_audit", "drafter": "test_audit", "cases": "test_audit",
    "arguments": "their own",
    "case": "test_run", "providers": "test_run", "parts": "test_gpu_report", "name": "a file's", "tool": "a program's",
    "provider": "bench.providers", "backend": "the op", "capability": "nvcc", "python": "pip", "measure": "its own",
    "worker": "its own",
}  # fmt: skip
NUMBERS = ["x", "", "nan", "inf", "-1", "1e400", "9" * 5000]


class Found(Exception):
    """Carries the parser that was about to read its arguments."""


def parser_of(run: Callable[[list[str]], object]) -> argparse.ArgumentParser:
    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise Found(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught), pytest.raises(Found) as found:
        run([])
    parser: argparse.ArgumentParser = found.value.args[0]
    return parser


def modules() -> list[str]:
    files = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "python_tests").rglob("__main__.py")]
    with_parsers = [path for path in files if re.search(r"\bparse_(known_)?args\(", path.read_text(encoding="utf-8"))]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in with_parsers)


def parsers(name: str) -> dict[str, argparse.ArgumentParser]:
    """A command's parser, and those of its subcommands."""
    words = name.split()
    if words[0] == "specdec":
        found = {name: parser_of(cli._COMMANDS[words[1]].run if words[1:] else cli.main)}
    else:
        main: Callable[..., Any] = importlib.import_module(name).main
        found = {name: parser_of(main if main.__code__.co_argcount else lambda _: main())}
    for action in found[name]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"{name} {sub}": of_sub for sub, of_sub in action.choices.items()}
    return found


def wrong(name: str, action: argparse.Action) -> list[str]:
    """Texts that an argument must refuse."""
    kind = action.type
    if action.choices is not None:
        return ["no such name"]
    if kind in (int, float):
        assert name in BEFORE_THE_PACKAGE, f"{name} {action.dest}: takes any number"
        return ["x"]
    if kind is Path:
        assert action.dest in WRITTEN, f"{name} {action.dest}: takes a path that may not be there"
        return []
    if kind is None:
        assert action.dest in FREE, f"{name} {action.dest}: takes any text"
        return []
    if kind.__name__ == "existing":  # type: ignore[union-attr]
        return ["/no such/file"]
    return ["no such device"] if kind.__name__ == "device" else NUMBERS  # type: ignore[union-attr]


# Names only: a benchmark's imports are left to its own test.
COMMANDS = ["specdec", *(f"specdec {name}" for name in cli._COMMANDS), *modules()]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_text_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, parser in parsers(command).items():
        places = [a for a in parser._actions if not a.option_strings]
        for action in parser._actions:
            if action.nargs == 0 or isinstance(action, argparse._SubParsersAction):
                continue
            earlier = places[: places.index(action)] if action in places else []
            before = [next(iter(a.choices or ["x"])) for a in earlier]
            what = re.escape("/".join(action.option_strings) or str(action.metavar or action.dest))
            for text in wrong(name, action):
                with pytest.raises(SystemExit, match="2"):
                    parser.parse_args(
                        [f"{action.option_strings[-1]}={text}"] if action.option_strings else [*before, text]
                    )
                said = capsys.readouterr().err.splitlines()[-1]
                form = r"(must be|invalid (choice|int|float))\b"
                assert re.search(rf"error: argument {what}: {form}", said) and len(said) < 1000, said


@pytest.mark.parametrize("command", [f"specdec {name}" for name in cli._COMMANDS])
def test_every_option_says_what_it_is_and_its_default(command: str) -> None:
    for name, parser in parsers(command).items():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            said = parser._get_formatter()._expand_help(action) if action.help else ""
            assert said, f"{name} {action.dest}: no help"
            usual = action.default if action.option_strings and action.nargs != 0 else None
            assert usual is None or "default" in said, f"{name} {action.dest}: no default"
