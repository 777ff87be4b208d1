"""What a call holds on to is free again after it, however it ended."""

from __future__ import annotations

import itertools
import linecache
import sys
from types import FrameType
from typing import Any

import pytest

from specdec_kernels.decoding import claims
from specdec_kernels.decoding.claims import claimed


def test_a_call_has_what_it_claims_alone_until_its_end() -> None:
    held = object()
    with pytest.raises(RuntimeError) as kept, claimed("first", drafter=held):
        with pytest.raises(ValueError, match="second: drafter serves one call at a time, got a object"):
            with claimed("second", drafter=held):
                pass
        raise RuntimeError
    with claimed("third", drafter=held):  # although that exception is kept, and with it its frames
        assert kept.value


def test_an_interrupt_between_any_two_lines_leaves_nothing_claimed() -> None:
    held = object()
    for number in itertools.count(1):
        left = number

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != claims.__file__:
                return None
            # A lock is left in one step: between its body and its release Python looks for no signal.
            left -= event == "line" and "with _lock" not in linecache.getline(claims.__file__, frame.f_lineno)
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return trace

        try:
            sys.settrace(trace)
            with claimed("interrupted", drafter=held):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        with claimed(f"after line {number}", drafter=held):
            pass
        if left > 0:
            break
    assert number > 5
