from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    for project in ("flashinfer", "sglang"):
        parser.addoption(f"--{project}", default="", metavar="FOLDER", help=f"a checkout of {project}")
