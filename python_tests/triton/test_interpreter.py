"""The checks on interpreted kernels see what they are for: planted defects of each kind."""

from __future__ import annotations

import inspect

import pytest
import torch

from python_tests import interpreted

REASON = interpreted.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

if REASON is None:
    import triton
    import triton.language as tl

    @triton.jit
    def row_maxima(x, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
        ids = tl.arange(0, BLOCK)
        if MASKED:
            values = tl.load(x + tl.program_id(0) * n + ids, mask=ids < n, other=-float("inf"))
        else:
            values = tl.load(x + tl.program_id(0) * n + ids)
        tl.store(out + tl.program_id(0), tl.max(values, 0))

    @triton.jit
    def one_further(out, n, SHIFT: tl.constexpr):
        tl.store(out + tl.program_id(0) + SHIFT, 1.0)

    @triton.jit
    def chained(out):
        before = tl.zeros((), tl.int32)
        if tl.program_id(0) > 0:
            before = tl.load(out + tl.program_id(0) - 1)
        tl.store(out + tl.program_id(0), before + 1)

    @triton.jit
    def counted(out, n):
        tl.atomic_add(out + tl.program_id(0) // n, 1)

    @triton.jit
    def products(x, y, out, BLOCK: tl.constexpr):
        ids = tl.arange(0, BLOCK)
        a, b = tl.load(x + ids), tl.load(y + ids)
        tl.store(out + ids, a * a)  # one tensor twice, then two of the same types
        tl.store(out + BLOCK + ids, a * b)
        tl.store(out + 2 * BLOCK + ids, a * 0.0)
        tl.store(out + 3 * BLOCK + ids, a * -0.0)
        tl.store(out + 4 * BLOCK + ids, tl.where(a > 0, a, b.to(tl.float64)))

    @triton.jit
    def summed(x, out, AXIS: tl.constexpr):
        at = tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out + at, tl.cumsum(tl.load(x + at), AXIS))

    @triton.jit
    def added_up(x, out, BLOCK: tl.constexpr):
        ids = tl.arange(0, BLOCK)
        tl.store(out + ids, tl.cumsum(tl.load(x + ids), 0))

    @triton.jit
    def moved(x):
        tl.store(x, tl.load(x, mask=tl.load(x) < 0, other=tl.load(x + 1)))


def test_correct_kernels_pass() -> None:
    x, out, count = torch.randn(4, 100), torch.empty(4), torch.zeros(2, dtype=torch.int32)
    with interpreted.checked():
        row_maxima[(4,)](x, out, 100, BLOCK=128, MASKED=True)
        counted[(6,)](count, 3)
    assert torch.equal(out, x.amax(1)) and count.tolist() == [3, 3]


@pytest.mark.parametrize("axis", [0, 1])
def test_prefix_sums_run_along_their_axis(axis: int) -> None:
    x = torch.randint(-50, 50, (64, 16), dtype=torch.int32)
    out = torch.empty_like(x)
    with interpreted.checked():
        summed[(1,)](x, out, AXIS=axis)
    assert torch.equal(out, x.cumsum(axis, dtype=torch.int32))


def test_prefix_sums_of_equal_numbers_do_not_drift() -> None:
    x, out = torch.full((1024,), 1 / 940), torch.empty(1024)
    with interpreted.checked():
        added_up[(1,)](x, out, BLOCK=1024)
    assert (out.double() - x.double().cumsum(0)).abs().max() < 3e-7  # one after the other: 5.4e-6


def test_what_no_kernel_has_written_shows() -> None:
    with interpreted.checked():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(3)).isnan().all()
        assert (torch.empty(3, dtype=torch.int64) < 0).all() and (torch.empty_like(torch.zeros(3).int()) > 2**30).all()


def test_a_missing_mask_is_found() -> None:
    x, out = torch.randn(4, 100), torch.empty(4)
    with interpreted.checked(), pytest.raises(Exception, match="masked_load out of bounds"):
        row_maxima[(4,)](x, out, 100, BLOCK=128, MASKED=False)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_store_past_a_view_is_found(shift: int) -> None:
    memory = torch.zeros(6)
    with interpreted.checked(), pytest.raises(Exception, match="masked_store out of bounds"):
        one_further[(4,)](memory[1:5], 4, SHIFT=shift)


def test_an_atomic_out_of_bounds_is_found() -> None:
    with interpreted.checked(), pytest.raises(Exception, match="atomic_rmw out of bounds"):
        counted[(6,)](torch.zeros(1, dtype=torch.int32), 3)


def test_memory_that_was_not_passed_is_out_of_bounds() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    with interpreted.checked():
        one_further[(4,)](a, 4, SHIFT=0)
        with pytest.raises(Exception, match="out of bounds"):
            one_further[(4,)](b[:3], 4, SHIFT=0)
    assert a.tolist() == [1.0] * 4


def test_a_dependence_between_programs_shows() -> None:
    outcomes = set()
    for seed in range(4):
        out = torch.zeros(5, dtype=torch.int32)
        with interpreted.checked(seed):
            chained[(5,)](out)
        outcomes.add(tuple(out.tolist()))
    assert len(outcomes) > 1


@pytest.mark.parametrize("size", [1, 8])
def test_operations_follow_their_operands(size: int) -> None:
    x, y = torch.randn(2, size)
    with interpreted.checked():
        for _ in range(2):
            out = torch.empty(5, size)
            products[(1,)](x, y, out, BLOCK=size)
            assert torch.equal(out, torch.stack([x * x, x * y, x * 0.0, x * -0.0, torch.where(x > 0, x, y)]))
            if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):  # others make 0.0 of -0.0
                assert torch.equal(out[2:4].signbit(), torch.stack([x, -x]).signbit())
            x, y = y, -x


def test_scalars_decide_anew() -> None:
    with interpreted.checked():
        for value in (0.0, 5.0):
            x = torch.tensor([7.0, value])
            moved[(1,)](x)
            assert x.tolist() == [value, value]


def test_everything_is_put_back() -> None:
    from triton.runtime import interpreter

    def names(place: object) -> set[str]:
        return set(dir(place)) - {"__annotations__"}  # made when asked for

    def everything() -> list[object]:
        places = (tl, tl.core, tl.tensor, tl.math, tl.dtype, interpreter, interpreter.GridExecutor)
        builder = type(interpreter.interpreter_builder)
        return [(p, name, id(inspect.getattr_static(p, name))) for p in (*places, builder) for name in names(p)]

    before = everything()
    with interpreted.checked():
        row_maxima[(4,)](torch.randn(4, 100), torch.empty(4), 100, BLOCK=128, MASKED=True)
        assert everything() != before
    assert everything() == before
