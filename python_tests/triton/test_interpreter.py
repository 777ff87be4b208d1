"""The checks on interpreted kernels see what they are for: planted defects of each kind."""

from __future__ import annotations

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


def test_correct_kernels_pass() -> None:
    x, out, count = torch.randn(4, 100), torch.empty(4), torch.zeros(2, dtype=torch.int32)
    with interpreted.checked():
        row_maxima[(4,)](x, out, 100, BLOCK=128, MASKED=True)
        counted[(6,)](count, 3)
    assert torch.equal(out, x.amax(1)) and count.tolist() == [3, 3]


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


def test_everything_is_put_back() -> None:
    from triton.runtime import interpreter

    before = (interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter.interpreter_builder.set_grid_idx)
    with interpreted.checked():
        pass
    after = (interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter.interpreter_builder.set_grid_idx)
    assert before == after
