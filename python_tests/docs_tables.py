"""The tables of a page, and whether a figure in one is a result."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tables(page: str) -> list[tuple[str | None, list[list[str]]]]:
    """The tables of a page: the name in the comment above, if there is one, and the cells without the ruler."""
    found: list[tuple[str | None, list[list[str]]]] = []
    name, inside = None, False
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("|"):
            if not inside:
                found.append((name, []))
            inside = True
            if not re.fullmatch(r"[|:\- ]+", line):
                found[-1][1].append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        announced = re.fullmatch(r"<!-- figures: (.*) -->", line)
        name = announced[1] if announced else name if not line and not inside else None
        inside = False
    return found


def agrees(text: str, value: float) -> bool:
    """Whether `text` is `value`, rounded to the decimals that it shows."""
    decimals = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5 * 10.0**-decimals + 1e-9
