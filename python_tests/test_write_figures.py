"""Figures are written in the form of those that they replace."""

from __future__ import annotations

import pytest

from python_tests.docs_tables import agrees
from python_tests.write_figures import shown, written

PAGE = """<!-- figures: ratios -->
| batch | ours, µs | K |
|---|---:|---|
| 8, T = 1 | 9.5 / 11 (159) | 0.98 (K = 7) |
| 9, T = 1 | – | 0.98 |

| batch | ours |
|---|---|
| 8 | 5 |
"""


def test_the_cells_of_a_named_table_are_written() -> None:
    made = {
        ("8, T = 1", "ours, µs"): [10.21, 9.87, 98.4],
        ("8, T = 1", "K"): [1.018, 3.0],
        ("9, T = 1", "K"): [0.98, 2.0],
    }
    page = written(PAGE, {"ratios": lambda label, column: made.get((label, column), [])})
    assert page == PAGE.replace("9.5 / 11 (159) | 0.98 (K = 7)", "10 / 9.9 (98) | 1.02 (K = 3)")


@pytest.mark.parametrize("old", ["9.5", "10", "11", "159", "0.98", "20.8", "7", "7680"])
@pytest.mark.parametrize("value", [0.0, 0.349, 9.949, 9.951, 10.04, 99.6, 1234.5])
def test_what_is_written_agrees(old: str, value: float) -> None:
    text = shown(value, old)
    assert agrees(text, value) and shown(value, text) == text
