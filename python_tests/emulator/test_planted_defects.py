"""The emulator of CUDA kernels sees the defects it exists to see, and lets right kernels pass.

csrc/emulator/tests/planted_defects.cpp holds the kernels and says who must see what: the emulator alone ("plain"), ASan
with UBSan ("asan"), or TSan ("tsan"). The sanitizers take minutes: they run with ``--sanitizers`` (``make sanitize``).
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache

import pytest

from python_tests.emulator.programs import MARKS, program

REPORTS = {"asan": ("AddressSanitizer", "runtime error:"), "tsan": ("ThreadSanitizer: data race",)}
SANITIZER_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
LINE = re.compile(r"\bplanted_\w+\.(cpp|h):\d+")  # of a kernel
SCHEDULES = 10  # of `planted_defects all`

pytestmark = MARKS


def output(kind: str, *arguments: str) -> str:
    done = subprocess.run(
        [program("planted_defects", kind), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | SANITIZER_OPTIONS,
    )
    return done.stdout + done.stderr


@cache
def defects() -> dict[str, tuple[set[str], str]]:
    """Who sees each defect, and in which words the emulator alone reports it."""
    rows = [line.split("|") for line in output("plain", "list").splitlines()]
    return {name: (set(seen_by.split(",")), words) for name, seen_by, words in rows}


@cache
def outcomes() -> dict[tuple[str, str], list[str]]:
    """By defect and variant ("good", "bad"): what each schedule gave, without a sanitizer."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in output("plain", "all").splitlines():
        name, variant, _, result = line.split("|", 3)
        found.setdefault((name, variant), []).append(result)
    return found


def test_right_kernels_pass_in_every_schedule() -> None:
    wrong = {name: outcomes().get((name, "good")) for name in defects()}
    assert wrong == {name: ["ok"] * SCHEDULES for name in defects()}


def test_defects_are_seen_in_some_schedule() -> None:
    unseen = {}
    for name, (seen_by, words) in defects().items():
        if "plain" in seen_by and not any(words in result for result in outcomes()[name, "bad"]):
            unseen[name] = outcomes()[name, "bad"]
    assert unseen == {}


def test_collective_errors_are_seen_in_every_schedule() -> None:
    """What the rules of CUDA forbid is refused whatever the order, with the line of the kernel."""
    unseen = {}
    for name, (_, words) in defects().items():
        if words and words != "wrong result":
            missed = [r for r in outcomes()[name, "bad"] if words not in r or not LINE.search(r)]
            if missed:
                unseen[name] = missed
    assert unseen == {}


def test_other_way_to_switch_stacks(request: pytest.FixtureRequest) -> None:
    """What processors other than x86-64 use gives the same in every schedule."""
    if not request.config.getoption("sanitizers"):
        pytest.skip("needs --sanitizers")
    assert output("ucontext", "all") == output("plain", "all")


@pytest.mark.parametrize("kind", ["asan", "tsan"])
def test_sanitizers(kind: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("sanitizers"):
        pytest.skip("needs --sanitizers")
    failures = {}
    for name, (seen_by, _) in defects().items():
        for order, seed in ((0, 0), (2, 1)):
            good = output(kind, name, "good", str(order), str(seed))
            if good != "ok\n":
                failures[name, "good", order] = good
        if kind in seen_by:
            reports = [output(kind, name, "bad", str(order), str(seed)) for order, seed in ((0, 0), (2, 1), (2, 2))]
            if not any(word in report for report in reports for word in REPORTS[kind]):
                failures[name, "bad", "any"] = reports[0]
    assert failures == {}
