"""Writes the figures of bench/results into the pages' tables, in the form that `test_docs_figures` expects.

    python -m python_tests.write_figures

The other contents of a cell stay, and so does its number of figures: if results have more or fewer, the test says so.
What the text says about the figures, and whether a goal is reached, is left to a person.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence

from python_tests.docs_figures import NAMES, PAGES
from python_tests.docs_tables import FIGURE, ROOT, Expected, agrees

RULER = re.compile(r"[|:\- ]+")


def shown(value: float, old: str) -> str:
    """As the figure it replaces is written: with two digits or all before the point, or with as many decimals."""
    if agrees(old, value):
        return old
    decimals = len(old.partition(".")[2])
    if (decimals == 0) == (float(old) >= 10) and decimals < 2:
        decimals = int(round(value, 1) < 10)
    return f"{value:.{decimals}f}"


def filled(cell: str, values: Expected) -> str:
    if len(re.findall(FIGURE, cell)) != len(values):
        return cell
    left = iter(values)
    return re.sub(FIGURE, lambda old: shown(next(left), old[0]), cell)


def written(text: str, names: dict[str, Callable[[str, str], Expected]] = NAMES) -> str:
    """A page with the figures that `names` has for its tables."""
    lines, name, columns = text.split("\n"), None, list[str]()
    for number, line in enumerate(lines):
        if announced := re.fullmatch(r"<!-- figures: (.*) -->", line):
            name, columns = announced[1], []
        elif not line.startswith("|"):
            name = None
        elif name and not columns:
            columns = [cell.strip() for cell in line.strip("|").split("|")]
        elif name and not RULER.fullmatch(line):
            label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            row = [filled(cell, names[name](label, column)) for column, cell in zip(columns[1:], cells, strict=True)]
            lines[number] = "| " + " | ".join([label, *row]) + " |"
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
