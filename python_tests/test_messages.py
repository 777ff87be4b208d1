"""docs/troubleshooting.md quotes existing messages, and every message that does not explain itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/troubleshooting.md"
if not PAGE.exists():
    pytest.skip("a source distribution holds no docs", allow_module_level=True)
CALLS = {"warning", "warn", "AssetError"}
NOT_FOR_USERS = {"UnknownNoise", "AttributeError", "ArgumentTypeError", "shape_error", "OSError", "KeyError"}


def template(node: ast.AST) -> str | None:
    """A string, with … for its variable parts; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value.replace("%s", "…") if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [template(side) for side in (node.left, node.right)]
        return None if sides == [None, None] else "".join(side or "…" for side in sides)
    return None


@cache
def python() -> list[tuple[Path, ast.Module]]:
    files = [ROOT / "setup.py", *sorted((ROOT / "specdec_kernels").rglob("*.py"))]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in files]


@cache
def strings() -> list[str]:
    """All that could be printed: strings of Python, and lines of the Makefile."""
    found = [text for _, tree in python() for node in ast.walk(tree) if (text := template(node))]
    return found + (ROOT / "Makefile").read_text().splitlines()


def raised() -> Iterator[tuple[str, str]]:
    """Where the package raises or warns, and the message."""
    for path, tree in python()[1:]:
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            text = template(call.args[0])
            if text and name not in NOT_FOR_USERS and (isinstance(node, ast.Raise) or name in CALLS):
                if path.name != "noise.py":  # of `audit`, which speaks in torch's name
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def quotes() -> list[str]:
    cells = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), flags=re.MULTILINE)
    return [cell.strip("`") for cell in cells]


def fixed(text: str) -> list[str]:
    return [part for part in text.split("…") if part.strip()]


def says(text: str, quote: str) -> bool:
    """Whether the fixed parts of the quote follow one another in the text."""
    place = 0
    for part in fixed(quote):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_every_message_quoted_is_in_the_source() -> None:
    assert len(quotes()) == len(set(quotes())) > 80
    for quote in quotes():
        assert fixed(quote) and any(says(text, quote) for text in strings()), f"nothing says: {quote}"


def test_every_message_is_quoted_or_explains_itself() -> None:
    missing = [
        f"{place}: {text}"
        for place, text in raised()
        if " must " not in text and any(map(str.isalpha, text)) and not any(says(text, quote) for quote in quotes())
    ]
    assert not missing, "say what the argument must be (' must '), or explain it in docs/troubleshooting.md"


@pytest.mark.parametrize(
    ("text", "quote", "expected"),
    [
        ("…: give draft_logits or draft_probs, got both", "give draft_logits or draft_probs, got both", True),
        ("the … holds … positions", "… holds … positions", True),
        ("positions of what … holds", "… holds … positions", False),
        ("give draft_logits", "give draft_logits or draft_probs", False),
    ],
)
def test_a_quote_is_found_by_its_fixed_parts(text: str, quote: str, expected: bool) -> None:
    assert says(text, quote) == expected
