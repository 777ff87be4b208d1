"""With ``-q``, a line of progress instead of a mark for each of thousands of tests.

On a terminal the line is rewritten; in a log, lines follow one another at intervals of at least `LOG_SECONDS`. A
failure is named when it happens and shown in full at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 30.0


class Progress:
    """A plugin of the process that has the terminal, whether the tests run in it or in others."""

    def __init__(self, terminal: Any) -> None:
        self.terminal, self.rewriting = terminal, bool(terminal.isatty)
        self.total, self.counts, self.marking = 0, Counter[str](), False
        self.began = self.shown = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Any, Any]:
        status = yield
        return (status[0], "", "") if self.marking else status  # counted as usual, but without a mark

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, Any, Any]:
        self.marking = True
        yield
        self.marking = False
        self.counts["done"] += report.when == "teardown"
        self.counts[report.outcome] += report.when == "call" or not report.passed
        if report.failed:
            self.write(f"FAILED {report.nodeid}", red=True, bold=True)
        if time.monotonic() - self.shown >= (TERMINAL_SECONDS if self.rewriting else LOG_SECONDS):
            self.show()

    def pytest_sessionfinish(self) -> None:
        if self.total:
            self.show()
        if self.rewriting:
            self.terminal.line("")

    def show(self) -> None:
        self.shown = time.monotonic()
        done, minutes, seconds = self.counts["done"], *divmod(int(self.shown - self.began), 60)
        line = f"{100 * done // max(1, self.total):3d} % of {self.total} tests in {minutes}:{seconds:02d}"
        line += f" (passed {self.counts['passed']}, failed {self.counts['failed']}, skipped {self.counts['skipped']})"
        self.terminal.rewrite(line, erase=True) if self.rewriting else self.write(line)

    def write(self, line: str, **markup: bool) -> None:
        self.terminal.rewrite("", erase=True) if self.rewriting else None
        self.terminal.write_line("\r" * self.rewriting + line, **markup)
