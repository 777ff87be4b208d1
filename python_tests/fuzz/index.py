"""Random work on an n-gram index in C++, beside the same in Python: the same results and the same refusals."""

from __future__ import annotations

from typing import Any

import numpy as np

from python_tests.fuzz.calls import INTEGERS, Case
from specdec_kernels import _host_py
from specdec_kernels.drafters import NgramTable

try:
    from specdec_kernels import _host
except ImportError:  # then it is held against itself
    _host = _host_py  # type: ignore[assignment]


METHODS = "append append append_batch add_corpus truncate reset length matched propose propose distribution".split()


def _tokens(case: Case, *shape: int) -> Any:
    """An array of few different tokens, so that n-grams come again; now and then of another kind."""
    made: Any = np.array(case.random.choices(range(3), k=int(np.prod(shape))), dtype=np.int64).reshape(shape)
    form = case.random.randrange(24)
    if form == 0:
        made = made.astype(case.random.choice((np.int32, np.float64, np.uint64, np.int16, ">i8")))
    elif form == 1 and made.size:
        made.reshape(-1)[case.random.randrange(made.size)] = case.random.choice(INTEGERS)
    elif form == 2:
        made = np.repeat(made, 2, -1)[..., ::2]
    elif form == 3:
        made = made[..., ::-1]
    elif form == 4:
        made = made.tolist()
    elif form == 5:
        made = np.ndarray(made.shape, made.dtype, b"\1" + bytes(made.nbytes), offset=1)  # misaligned, read-only
    elif form == 6:
        made = made[None] if case.chance(0.5) else made[..., :0]
    return made


ARRAYS = (np.array(1), np.array(1.5), np.array([0, 1]))  # which have __index__, and may refuse it


def _integer(case: Case, high: int) -> Any:
    if case.chance(0.9):
        return case.random.randint(0, high)
    return case.random.choice((*INTEGERS, 2**64, -(2**64), 1.0, None, "1", True, np.int32(1), np.float32(1), *ARRAYS))


def _call(case: Case, sequences: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    method = case.random.choice(METHODS)
    sequence = _integer(case, sequences - 1)
    if method == "append":
        return method, (sequence, _tokens(case, case.random.choice((0, 1, 3, 20)))), {}
    if method == "append_batch":
        width = case.random.randrange(5)
        counts = _tokens(case, sequences) if case.chance(0.5) else None
        return method, (_tokens(case, sequences, width), counts), {}
    if method == "add_corpus":
        return method, (_tokens(case, case.random.choice((0, 1, 9))),), {}
    if method == "truncate":
        return method, (sequence, _integer(case, 9)), {}
    if method == "matched":
        return method, (), {}
    if method == "distribution":
        text = np.array(case.random.choices(range(4), k=30), dtype=np.int64)
        table = NgramTable.from_tokens(text, case.random.randint(1, 3), case.random.randint(1, 2))
        given = {"limits": _tokens(case, sequences)} if case.chance(0.3) else {}
        return method, (case.random.choice((None, table, table, 5)),), given
    if method != "propose":
        return method, (sequence,), {}
    width = case.random.randrange(6)
    given: dict[str, Any] = {}
    if case.chance(0.4):
        given["limits"] = _tokens(case, sequences)
    if case.chance(0.3):
        counts = np.zeros(sequences, np.int32) if case.chance(0.8) else _tokens(case, sequences)
        given["out"] = (_tokens(case, sequences, width), counts)
    return method, (_integer(case, 0) if case.chance(0.05) else width,), given


def _run(index: Any, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, Any]:
    try:
        out = getattr(index, method)(*positional, **named)
    except (ValueError, TypeError, OverflowError) as error:
        return type(error).__name__, str(error)
    if isinstance(out, np.ndarray):
        out = (out,)
    return "", [array.tolist() for array in out] if isinstance(out, tuple) else out


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value


def fuzz_index(case: Case) -> None:
    """A life of one index."""
    sequences, longest = case.random.choice((1, 2, 3)), case.random.randint(1, 5)
    shortest = case.random.randint(1, longest)
    ours, theirs = (module.NgramIndex(sequences, longest, shortest) for module in (_host, _host_py))
    case.say(f"NgramIndex({sequences}, {longest}, {shortest})")
    for _ in range(case.random.choice((5, 30))):
        method, positional, named = _call(case, sequences)
        case.say(f"    .{method}({positional!r}, {named!r})")
        mirrored = {name: _copied(value) for name, value in named.items()}
        got, expected = _run(ours, method, positional, named), _run(theirs, method, positional, mirrored)
        assert got == expected, f"{got} in C++, {expected} in Python"
