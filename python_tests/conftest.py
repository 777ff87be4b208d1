"""Every backend present, as a fixture: tests name no backend, so a new one is tested the day it registers."""

from __future__ import annotations

import gc
import importlib
import itertools
import random
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch

from python_tests import emulated, interpreted, tiers

interpreted.prepare()  # before anything imports triton

from python_tests.progress import Progress  # noqa: E402
from python_tests.scheduling import Deadline, Scheduling  # noqa: E402
from python_tests.support import Backend, present, present_emulated  # noqa: E402

torch.set_num_threads(1)
hypothesis.settings.register_profile(  # the same cases in every run, and no machine too slow for them
    "steady", derandomize=True, database=None, deadline=None, print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("steady")
gc.disable()  # until everything is imported and collected: each scan of it takes half a second


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what exists by now from garbage collection."""
    gc.enable()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # or libraries report at the end what they take for leaks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=tiers.TIERS, default="short",
        help="which tests run: those of `make test`, those that it leaves out, or all (`make test-all`): see tiers.py",
    )  # fmt: skip
    parser.addoption(
        "--schedules", type=int, default=0, metavar="N",
        help="run the tests of the emulated CUDA kernels in N random schedules as well, each a share of a test's cases",
    )  # fmt: skip
    parser.addoption(
        "--cases", type=int, default=600, metavar="N",
        help="random cases of each op and backend in test_backends_agree.py and test_trees_agree.py, a tenth of it on "
        "layout split and on interpreted Triton (10000 in .ci/run)",
    )  # fmt: skip
    parser.addoption(
        "--seed", type=int, default=0, metavar="N",
        help="other random cases of them for each N (0 in .ci/run), and other numbers where tests draw without a seed",
    )  # fmt: skip
    parser.addoption(
        "--every-case", action="store_true",
        help="run all cases of a test on every backend, not some of them where that is slow",
    )  # fmt: skip
    parser.addoption(
        "--minutes", type=float, metavar="N",
        help="start no test after so many minutes; which tests are skipped changes daily (in .ci/run)",
    )  # fmt: skip
    parser.addoption(
        "--sanitizers", action="store_true",
        help="also find the emulator's planted defects with ASan, UBSan and TSan (minutes)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if minutes := config.getoption("--minutes"):
        config.pluginmanager.register(Deadline(config, minutes), Deadline.__name__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Scheduling(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal and session.config.get_verbosity() < 0 and not session.config.option.collectonly:
        session.config.pluginmanager.register(Progress(terminal))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    reason = emulated.unavailable()
    skipped = [pytest.mark.skip(reason=reason)] if reason else []
    op = getattr(metafunc.module, "OP", "verify_chain")
    emulations = present_emulated(op, metafunc.config.getoption("schedules"))
    on_the_cpu = [pytest.param(b, marks=skipped) for b in emulations]
    metafunc.parametrize("backend", [*present(op), *on_the_cpu], ids=str, indirect=True)


@pytest.hookimpl(trylast=True)  # among what -k and -m have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose cases and their order. Where kernels are interpreted, a test with many cases runs some of them: see
    `Backend.some_cases`; on other backends than the fastest, those in which each pair of values occurs. Then a tier is
    chosen: see tiers.py. Slow tests begin first, or one process would work on at the end while the others are done.
    """
    tests: dict[tuple[str, Backend | None], list[pytest.Item]] = {}
    for item in items:
        chosen = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        tests.setdefault((item.nodeid.split("[")[0], chosen), []).append(item)
    kept: set[int] = set()
    for (_, chosen), cases in tests.items():
        if chosen and not config.getoption("--every-case"):
            if tiers.kind_of(chosen) == "triton":
                cases = tiers.marked_for_triton(cases)
            if chosen.interpreted:
                cases = chosen.some_cases(cases, getattr(cases[0].module, "EMULATED_CASES", None))  # type: ignore[attr-defined]
            elif tiers.kind_of(chosen) == "narrow":
                cases = tiers.pairwise(cases, str(chosen))
        kept |= set(map(id, tiers.run(cases, config.getoption("--tier"))))
    if gone := [item for item in items if id(item) not in kept]:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if id(item) in kept]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if deadline := config.pluginmanager.getplugin(Deadline.__name__):
        items[:] = deadline.turned(items)


@pytest.fixture(scope="session", autouse=True)
def steady_clock() -> Iterator[None]:
    """Every step takes a second: what "auto" chooses, and so what a test sees, does not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("specdec_kernels.decoding.generate")
        patch.setattr(module, "time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Commands that run in this process may leave torch more: two processes' threads waiting for each other's cores
    take twenty times as long.
    """
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_numbers(request: pytest.FixtureRequest) -> None:
    """What a test draws without a seed of its own, as `generate` does, is the same in whatever order tests run."""
    seed = zlib.crc32(request.node.nodeid.encode()) + request.config.getoption("seed")
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend present (all of them in turn) for the op that the module names in ``OP``."""
    chosen: Backend = request.param
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN: unwritten outputs show
    try:
        with chosen.limited():
            yield chosen
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20240229)
