"""How pytest-xdist hands out tests here, and when it stops doing so."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

KEY = "specdec_deadline"


class _Indexed(list[str]):
    """A list that knows the first position of each of its items."""

    def __init__(self, items: list[str]) -> None:
        super().__init__(items)
        self._places = {item: place for place, item in reversed(list(enumerate(items)))}

    def index(self, item: str, *bounds: Any) -> int:
        return super().index(item, *bounds) if bounds else self._places[item]


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """As ``--dist loadgroup``, which looks through all tests, and all finished ones, for each test that it hands out:
    with ten thousand tests that takes seconds.
    """

    def add_node_collection(self, node: Any, collection: Any) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = _Indexed(self.registered_collections[node])

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        test = self.registered_collections[node][item_index]
        scope = self._split_scope(test)
        unit = self.assigned_work[node][scope]
        unit[test] = True
        if all(unit.values()):
            del self.assigned_work[node][scope]
        self._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        # A process that has just died accepts nothing: `remove_node`, about to be called, hands its work out again.
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)


class Deadline:
    """Skips every test that would begin after a given moment.

    Which tests are left out then differs from day to day, as the run starts at another place in their order. (The one
    process of a run without xdist, or the one that hands out the tests, knows the moment; the others are told.)
    """

    def __init__(self, config: pytest.Config, minutes: float) -> None:
        given = getattr(config, "workerinput", {})
        self.at = given.get(KEY) or time.time() + 60 * minutes

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[KEY] = self.at

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() > self.at:
            pytest.skip("no time was left for it (--minutes)")

    def turned(self, items: list[pytest.Item]) -> list[pytest.Item]:
        first = round(len(items) * (self.at // 86400 * 0.618 % 1))  # the golden section: far from other days' starts
        return items[first:] + items[:first]
