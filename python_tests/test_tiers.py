"""The choice of cases that `make test` runs, and the line of progress."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from python_tests import tiers
from python_tests.progress import Progress
from python_tests.scheduling import Scheduling
from python_tests.support import Backend
from specdec_kernels.backends import native

ROOT = Path(__file__).resolve().parents[1]

SIZES = {"vocab": range(6), "kind": "abcde", "rule": ("token", "block"), "dtype": ("half", "float")}


def items(backend: Backend | None = None, names: Any = SIZES, **marks: Any) -> list[Any]:
    """Every combination of the parameters' values."""
    made = []
    for values in itertools.product(*(SIZES[name] for name in names)):
        params = dict(zip(names, values, strict=True)) | ({} if backend is None else {"backend": backend})
        found = {name: SimpleNamespace(kwargs=kwargs) for name, kwargs in marks.items()}
        made.append(SimpleNamespace(callspec=SimpleNamespace(params=params), get_closest_marker=found.get))
    return made


def shown(cases: list[Any], at_once: int) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(case.callspec.params.items(), at_once)}


@pytest.fixture(autouse=True)
def widest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_capability", lambda: "avx512")


@pytest.mark.parametrize("on", [None, Backend("cuda", "cuda"), Backend("cpu", "cpu", "avx512")], ids=str)
def test_every_pair_of_values_occurs(on: Backend | None) -> None:
    cases = items(on)
    chosen = tiers.short(cases)
    assert shown(chosen, 2) == shown(cases, 2) and 30 <= len(chosen) < 45 < len(cases) == 120
    assert tiers.short(cases) == chosen, "the processes of a run must choose alike"
    for names in (("vocab",), ("vocab", "kind")):
        few = items(on, names)
        assert len(tiers.short(few)) == len(few)


@pytest.mark.parametrize("on", [Backend("reference", "cpu"), Backend("cpu", "cpu", "avx2")], ids=str)
def test_a_test_with_a_backend_alone_runs_on_every_one(on: Backend) -> None:
    (only,) = items(on, ())
    assert tiers.pairwise([only], str(on)) == [only] == tiers.short([only])


def test_interpreted_triton_runs_what_there_is_time_for() -> None:
    cases = items(Backend("triton", "cpu"), on_triton={"kind": "b", "rule": "token"})
    found = tiers.marked_for_triton(cases)
    assert {case.callspec.params["kind"] + case.callspec.params["rule"] for case in found} == {"btoken"}
    assert len(found) == 12 and len(tiers.marked_for_triton(items(Backend("triton", "cpu")))) == 120


@pytest.mark.parametrize(
    "on",
    [Backend("cuda-emulated", "cpu", strategy="walk"), Backend("reference", "cpu"), Backend("cpu", "cpu", "avx2")],
    ids=str,
)
def test_every_value_occurs_on_other_backends(on: Backend) -> None:
    cases = items(on)
    chosen = tiers.short(cases)
    assert shown(chosen, 1) == shown(cases, 1) and len(chosen) <= 10
    assert len(tiers.short(items(Backend("triton", "cpu")))) == 1


def test_marks_are_kept() -> None:
    emulated = Backend("cuda-emulated", "cpu", strategy="walk")
    assert tiers.short(items(long={})) == []
    assert len(tiers.short(items(short={"cases": 3}))) == 3
    assert len(tiers.short(items(emulated, short={"emulated": 4, "triton": 1}))) == 4
    assert len(tiers.short(items(Backend("cpu", "cpu", "default"), short={"cases": 3}))) == 3
    assert len(tiers.short(items(short={"emulated": 4}))) >= 30


def test_the_tiers_are_the_whole() -> None:
    cases = items()
    short, rest = tiers.run(cases, "short"), tiers.run(cases, "long")
    assert sorted(map(id, short + rest)) == sorted(map(id, tiers.run(cases, "all"))) == sorted(map(id, cases))


@pytest.mark.long
def test_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    """What they build or compute together is made once, and no two of them write to one folder at a time."""
    (tmp_path / "test_group.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('x', range(6))\n"
        "def test(x):\n"
        "    pathlib.Path(__file__).with_name(os.environ['PYTEST_XDIST_WORKER']).touch()\n"
    )
    options = "-q -p no:cacheprovider -c /dev/null -n 2 --dist loadgroup".split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("gw*"))) == 1


CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from python_tests.scheduling import Deadline, Scheduling

def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)

def pytest_configure(config):
    config.pluginmanager.register(Deadline(config, {minutes}), Deadline.__name__)

def pytest_collection_modifyitems(config, items):
    items[:] = config.pluginmanager.getplugin(Deadline.__name__).turned(items)
"""
SOME = """
import os, pathlib, pytest

@pytest.mark.parametrize("x", range(30))
def test_some(x):
    assert not pathlib.Path(__file__).with_name(str(x)).exists(), "it ran before"
    pathlib.Path(__file__).with_name(str(x)).touch()

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("x", [0, 1, 2])
def test_group(x):
    if x == 1 and not pathlib.Path(__file__).with_name("died").exists():
        pathlib.Path(__file__).with_name("died").touch()
        os._exit(3)
"""


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("minutes", "said"), [(10, "1 failed, 33 passed"), (1e-9, "33 skipped")], ids=["a process dies", "no time"]
)
def test_every_test_runs_once_or_is_counted(minutes: float, said: str, tmp_path: Path) -> None:
    """Also if a process dies in the middle of a group: another one takes the rest, as with xdist's own scheduler."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT), minutes=minutes))
    (tmp_path / "test_some.py").write_text(SOME)
    options = "-q -p no:cacheprovider -c /dev/null -n 2 --dist loadgroup".split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert said in done.stdout.splitlines()[-1], done.stdout


class Terminal:
    """Records what is written."""

    def __init__(self, isatty: bool) -> None:
        self.isatty, self.text = isatty, ""

    def write_line(self, line: str, **markup: bool) -> None:
        self.text += line + "\n"

    line = write_line

    def rewrite(self, line: str, erase: bool = False) -> None:
        assert erase
        self.text += "\r" + line


@pytest.mark.parametrize("isatty", [True, False])
def test_progress_is_one_line_and_failures_are_named(isatty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    terminal = Terminal(isatty)
    progress = Progress(terminal)
    progress.pytest_xdist_node_collection_finished([str(number) for number in range(200)])
    for number in range(200):
        now[0] += 1
        for when in ("setup", "call", "teardown"):
            outcome = "failed" if (number, when) == (99, "call") else "passed"
            report: Any = SimpleNamespace(
                nodeid=f"test_{number}",
                when=when,
                outcome=outcome,
                passed=outcome == "passed",
                failed=outcome == "failed",
            )
            for _ in progress.pytest_runtest_logreport(report):
                pass
    progress.pytest_sessionfinish()
    assert terminal.text.count("FAILED test_99\n") == 1
    assert "100 % of 200 tests in 3:20 (passed 199, failed 1, skipped 0)" in terminal.text
    assert terminal.text.count("\n") == (2 if isatty else 8)


def test_work_for_a_process_that_has_just_died_is_handed_out_again() -> None:
    """Nothing can be sent to it between its end and the moment when that is noticed."""
    one = Mock(spec=["send_runtest_some"])
    one.send_runtest_some.side_effect = BrokenPipeError
    scheduling = object.__new__(Scheduling)
    scheduling.workqueue, scheduling.assigned_work = OrderedDict(group={"a": False, "b": False}), {one: {}}
    scheduling.registered_collections = {one: ["a", "b"]}
    scheduling._assign_work_unit(one)
    assert scheduling.remove_node(one) == "a" and list(scheduling.workqueue) == ["group"]
