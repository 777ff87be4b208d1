"""The CUDA kernels on the CPU: the same bits for every strategy, order of threads and blocks, and device size."""

from __future__ import annotations

import pytest

from python_tests import emulated
from python_tests.ops.calls import CALLS
from python_tests.ops.inputs import outcome, same_bits
from python_tests.ops.wide_calls import WIDE

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))
SCHEDULES = 8


@pytest.mark.short(cases=8)
@pytest.mark.parametrize("name", [*CALLS, *WIDE])
def test_the_same_bits_whatever_the_strategy_and_schedule(name: str) -> None:
    call, arguments = (CALLS | WIDE)[name]()
    with emulated.running():
        expected = outcome(call, **arguments, backend=emulated.NAME)
    for strategy in emulated.strategies(name.split("-")[0]):
        for schedule in (None, *range(1, SCHEDULES + 1)):
            with emulated.running(strategy, schedule):
                same_bits(outcome(call, **arguments, backend=emulated.NAME), expected)


@pytest.mark.short(cases=20)
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_the_same_bits_on_every_device(name: str, multiprocessors: int) -> None:
    """The size of the device decides the strategy, and how many blocks share a row."""
    call, arguments = WIDE[name]()
    with emulated.running():
        expected = outcome(call, **arguments, backend=emulated.NAME)
    for strategy in ("auto", "split"):
        with emulated.running(strategy, multiprocessors=multiprocessors):
            same_bits(outcome(call, **arguments, backend=emulated.NAME), expected)


@pytest.mark.short(cases=100)
@pytest.mark.parametrize("name", [*CALLS, *WIDE])
@pytest.mark.parametrize("strategy", emulated.STRATEGIES)
def test_at_most_three_launches_and_one_allocation(name: str, strategy: str) -> None:
    """A fourth is there for `return_acceptance`, and for a target law; a tree takes one, and so do chains whose rows
    stay in shared memory, but for `return_acceptance`. And all scratch memory is one allocation.
    """
    call, arguments = (CALLS | WIDE)[name]()
    measured = bool(arguments.get("return_acceptance"))
    with emulated.running(strategy):
        before = emulated.library().specdec_emulated_allocations()
        call(**arguments, backend=emulated.NAME)
        launches = emulated.library().specdec_emulator_launches()
        allocations = emulated.library().specdec_emulated_allocations() - before
    most = 3 + measured + bool(arguments.get("target_law"))
    if name.startswith("verify_tree"):
        most = 1
    elif strategy == "resident" and name.startswith(("verify_chain", "verify_packed")):
        most = 1 + measured
    assert 1 <= launches <= most
    assert allocations <= 1
