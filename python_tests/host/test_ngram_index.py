"""The n-gram index: both implementations against the definition, written down naively."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests.host.indexes import IMPLEMENTATIONS, ints, naive_match
from specdec_kernels import _host_py, host


def proposal(index: Any, num_tokens: int, sequence: int = 0) -> list[int]:
    tokens, counts = index.propose(num_tokens)
    assert (tokens[sequence, counts[sequence] :] == -1).all()
    return tokens[sequence, : counts[sequence]].tolist()


def naive_proposal(text: list[int], documents: list[list[int]], lengths: range, num_tokens: int) -> list[int]:
    """The definition, in O(text ** 2)."""
    n = len(text)
    for length in reversed(lengths):
        if length > n:
            continue
        suffix = text[n - length :]
        for end in range(n - 1, length - 1, -1):
            if text[end - length : end] == suffix:
                extended = list(text)
                for i in range(num_tokens):
                    extended.append(extended[end + i])
                return extended[n:]
        for document in reversed(documents):
            for end in range(len(document) - 1, length - 1, -1):
                if document[end - length : end] == suffix:
                    return document[end : end + num_tokens]
    return []


# ---------------------------------------------------------------- what is proposed


def test_proposes_what_followed_the_longest_suffix(new_index: Any) -> None:
    index = new_index(1, max_ngram=3)
    index.append(0, ints(1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3))
    assert proposal(index, 2) == [4, 5]  # "1 2 3", not the more recent "2 3"


def test_of_equal_matches_the_most_recent_wins(new_index: Any) -> None:
    index = new_index(1, max_ngram=2)
    index.append(0, ints(1, 2, 3, 1, 2, 4, 1, 2))
    assert proposal(index, 1) == [4]


def test_max_ngram_bounds_the_suffix_looked_up(new_index: Any) -> None:
    index = new_index(1, max_ngram=2)
    index.append(0, ints(1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3))
    assert proposal(index, 1) == [7]


def test_min_ngram_refuses_short_matches(new_index: Any) -> None:
    text = ints(1, 2, 3, 9, 3)
    for min_ngram, expected in ((1, [9]), (2, [])):
        index = new_index(1, max_ngram=3, min_ngram=min_ngram)
        index.append(0, text)
        assert proposal(index, 1) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5, 5], [5, 5, 5, 5, 5]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2]),
        ([7, 1, 2, 1], [2, 1, 2, 1, 2]),
        ([4, 8, 6, 4], [8, 6, 4, 8, 6]),
    ],
)
def test_a_continuation_wraps_into_its_match(new_index: Any, text: list[int], expected: list[int]) -> None:
    index = new_index(1)
    index.append(0, ints(*text))
    assert proposal(index, 5) == expected


@pytest.mark.parametrize("text", [[], [3], [1, 2, 3]])
def test_nothing_is_proposed_where_nothing_matches(new_index: Any, text: list[int]) -> None:
    index = new_index(2)
    index.append(1, ints(*text))
    tokens, counts = index.propose(3)
    assert tokens.tolist() == [[-1] * 3] * 2 and counts.tolist() == [0, 0]


def test_sequences_do_not_see_each_other(new_index: Any) -> None:
    index = new_index(3)
    index.append_batch(np.array([[1, 2, 1], [1, 9, 9], [4, 5, 6]]), ints(3, 1, 3))
    assert [index.length(b) for b in range(3)] == [3, 1, 3]
    assert [proposal(index, 2, b) for b in range(3)] == [[2, 1], [], []]


def test_limits_bound_single_sequences(new_index: Any) -> None:
    index = new_index(4)
    index.append_batch(np.full((4, 3), 6))
    for dtype in (np.int32, np.int64):
        tokens, counts = index.propose(2, limits=np.array([-1, 0, 1, 9], dtype))
        assert counts.tolist() == [0, 0, 1, 2]
        assert tokens.tolist() == [[-1, -1], [-1, -1], [6, -1], [6, 6]]


def test_no_tokens_asked_for(new_index: Any) -> None:
    index = new_index(2)
    index.append_batch(np.full((2, 3), 6))
    tokens, counts = index.propose(0)
    assert tokens.shape == (2, 0) and counts.tolist() == [0, 0]


def test_results_have_the_dtypes_of_the_contract_and_out_is_filled(new_index: Any) -> None:
    index = new_index(2)
    index.append_batch(ints(1, 2, 1, 3, 4, 5).reshape(2, 3))
    tokens, counts = index.propose(3)
    assert (tokens.dtype, counts.dtype) == (np.int64, np.int32)
    wide = np.full((2, 6), 77)
    out = (wide[:, ::2], np.full(2, 77, np.int32))
    returned = index.propose(3, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    np.testing.assert_array_equal(out[0], tokens)
    np.testing.assert_array_equal(out[1], counts)
    assert (wide[:, 1::2] == 77).all()


# ---------------------------------------------------------------- the corpus


def test_corpus_serves_every_sequence_after_its_own_text(new_index: Any) -> None:
    index = new_index(3, max_ngram=3)
    index.add_corpus(ints(1, 2, 3, 4, 5, 6))
    index.append(0, ints(2, 3))  # only the corpus knows it
    index.append(1, ints(3, 8, 3))  # equal length: own text
    index.append(2, ints(3, 8, 2, 3))  # the corpus match is longer
    assert [proposal(index, 2, b) for b in range(3)] == [[4, 5], [8, 3], [4, 5]]


def test_a_match_never_spans_documents_and_stops_at_their_end(new_index: Any) -> None:
    index = new_index(1, max_ngram=3)
    index.add_corpus(ints(1, 2))
    index.add_corpus(ints(3, 4))
    index.append(0, ints(1))
    assert proposal(index, 5) == [2]
    index.append(0, ints(2))  # "2" ends its document: nothing follows it
    assert proposal(index, 5) == []


# ---------------------------------------------------------------- growth, truncation, re-use


def test_appending_in_pieces_equals_appending_at_once(new_index: Any) -> None:
    text = np.random.default_rng(0).integers(0, 5, 3000)
    pieces, whole = new_index(1), new_index(1)
    whole.append(0, text)
    for start in range(0, len(text), 7):
        pieces.append(0, text[start : start + 7])
    assert pieces.length(0) == whole.length(0) == 3000
    assert proposal(pieces, 50) == proposal(whole, 50)


def test_reset_empties_one_slot(new_index: Any) -> None:
    index = new_index(2)
    index.append_batch(np.full((2, 40), 6))
    index.reset(0)
    assert (index.length(0), index.length(1)) == (0, 40)
    assert (proposal(index, 1, 0), proposal(index, 1, 1)) == ([], [6])
    index.append(0, ints(6))
    assert proposal(index, 1, 0) == []


def test_truncation_is_an_exact_undo(new_index: Any) -> None:
    text = np.random.default_rng(1).integers(0, 4, 400)
    index, before = new_index(1), []
    for token in text:
        index.append(0, ints(token))
        before.append(proposal(index, 6))
    for length in range(400, 0, -1):
        index.truncate(0, length)
        assert proposal(index, 6) == before[length - 1]
    index.truncate(0, 0)
    assert proposal(index, 6) == []


@st.composite
def edits(draw: st.DrawFn) -> tuple[int, int, list[tuple[Any, ...]]]:
    min_ngram = draw(st.integers(1, 3))
    max_ngram = draw(st.integers(min_ngram, 6))
    token = st.integers(0, draw(st.sampled_from([0, 1, 3, 2**31 - 1])))
    tokens = st.lists(token, max_size=40)
    sequence = st.integers(0, 2)
    edit = st.one_of(
        st.tuples(st.just("append"), sequence, tokens),
        st.tuples(st.just("append_batch"), st.lists(tokens, min_size=3, max_size=3)),
        st.tuples(st.just("truncate"), sequence, st.floats(0, 1)),
        st.tuples(st.just("reset"), sequence),
        st.tuples(st.just("add_corpus"), tokens),
    )
    return min_ngram, max_ngram, draw(st.lists(edit, max_size=12))


@settings(max_examples=300)
@given(edits=edits(), num_tokens=st.integers(0, 12), limits=st.lists(st.integers(-2, 14), min_size=3, max_size=3))
def test_both_implementations_follow_the_definition(edits: Any, num_tokens: int, limits: list[int]) -> None:
    min_ngram, max_ngram, steps = edits
    indices = [each.NgramIndex(3, max_ngram, min_ngram) for each in IMPLEMENTATIONS.values()]
    texts: list[list[int]] = [[], [], []]
    documents: list[list[int]] = []
    for name, *arguments in steps:
        if name == "append":
            b, tokens = arguments
            texts[b] += tokens
            arguments = [b, ints(*tokens)]
        elif name == "append_batch":
            rows = arguments[0]
            padded = np.full((3, max(map(len, rows))), -1)
            for b, row in enumerate(rows):
                texts[b] += row
                padded[b, : len(row)] = row
            arguments = [padded, np.array([len(row) for row in rows], np.int32)]
        elif name == "truncate":
            b, share = arguments
            texts[b] = texts[b][: int(share * len(texts[b]))]
            arguments = [b, len(texts[b])]
        elif name == "reset":
            texts[arguments[0]] = []
        else:
            documents.append(arguments[0])
            arguments = [ints(*arguments[0])]
        for index in indices:
            getattr(index, name)(*arguments)
        expected = [
            naive_proposal(text, documents, range(min_ngram, max_ngram + 1), max(0, min(limit, num_tokens)))
            for text, limit in zip(texts, limits, strict=True)
        ]
        matched = [naive_match(text, documents, range(min_ngram, max_ngram + 1)) for text in texts]
        for index in indices:
            assert [index.length(b) for b in range(3)] == [len(text) for text in texts]
            assert index.matched().dtype == np.int64 and index.matched().tolist() == matched
            tokens, counts = index.propose(num_tokens, limits=np.array(limits))
            assert [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)] == expected
            assert all((row[count:] == -1).all() for row, count in zip(tokens, counts, strict=True))


# ---------------------------------------------------------------- arrays


def test_any_layout_is_read_in_place(new_index: Any) -> None:
    plain, strided = new_index(2), new_index(2)
    tokens = ints(1, 2, 3, 1, 4, 5, 6, 4).reshape(2, 4)
    plain.append_batch(tokens)
    wide = np.full((4, 8), -9)
    wide[::-2, ::2] = tokens
    view = wide[::-2, ::2]
    view.flags.writeable = False
    strided.append_batch(view)
    np.testing.assert_array_equal(plain.propose(4)[0], strided.propose(4)[0])


def test_unaligned_arrays(new_index: Any) -> None:
    unaligned = np.zeros(1 + 8 * 3, np.uint8)[1:].view(np.int64)
    unaligned[:] = [1, 2, 1]
    index = new_index(1)
    index.append(0, unaligned)
    assert proposal(index, 1) == [2]


# ---------------------------------------------------------------- refusals

BIG = 2**31


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda new: new(0), ValueError, "NgramIndex: num_sequences must be in [1, 1048576], got 0"),
        (lambda new: new(10**30), ValueError, f"NgramIndex: num_sequences must be in [1, 1048576], got {10**30}"),
        (lambda new: new(1.0), TypeError, "NgramIndex: num_sequences must be an integer, got float"),
        (lambda new: new(1, 0), ValueError, "NgramIndex: max_ngram must be in [1, 64], got 0"),
        (lambda new: new(1, 65), ValueError, "NgramIndex: max_ngram must be in [1, 64], got 65"),
        (lambda new: new(1, 3, 4), ValueError, "NgramIndex: min_ngram must be in [1, 3], got 4"),
    ],
)
def test_construction_refuses(new_index: Any, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call(new_index)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: i.append(2, ints(1)), ValueError, "append: sequence must be in [0, 1], got 2"),
        (lambda i: i.append(-1, ints(1)), ValueError, "append: sequence must be in [0, 1], got -1"),
        (lambda i: i.append("0", ints(1)), TypeError, "append: sequence must be an integer, got str"),
        (lambda i: i.append(np.float64(0), ints(1)), TypeError, "append: sequence must be an integer, got float64"),
        (lambda i: i.append(0, [1]), TypeError, "append: tokens must be a numpy array, got list"),
        (lambda i: i.append(0, np.array([1.0])), ValueError, "append: tokens must be int64 [n], got float64 [1]"),
        (lambda i: i.append(0, ints(1).astype(">i8")), ValueError, "append: tokens must be int64 [n], got >i8 [1]"),
        (lambda i: i.append(0, np.array(1)), ValueError, "append: tokens must be int64 [n], got int64 []"),
        (lambda i: i.append(0, ints(1, 2)[None]), ValueError, "append: tokens must be int64 [n], got int64 [1, 2]"),
        (lambda i: i.append(0, ints(4, -1)), ValueError, "append: tokens must be in [0, 2147483647], got -1 at [1]"),
        (lambda i: i.append(0, ints(BIG)), ValueError, f"append: tokens must be in [0, 2147483647], got {BIG} at [0]"),
        (
            lambda i: i.append_batch(np.zeros((3, 1), np.int64)),
            ValueError,
            "append_batch: tokens must be int64 [num_sequences=2, n], got int64 [3, 1]",
        ),
        (
            lambda i: i.append_batch(np.zeros((2, 1), np.int32)),
            ValueError,
            "append_batch: tokens must be int64 [num_sequences=2, n], got int32 [2, 1]",
        ),
        (
            lambda i: i.append_batch(np.zeros((2, 1), np.int64), np.zeros(2)),
            ValueError,
            "append_batch: counts must be int32 or int64 [num_sequences=2], got float64 [2]",
        ),
        (
            lambda i: i.append_batch(np.zeros((2, 1), np.int64), ints(0, 2)),
            ValueError,
            "append_batch: counts must be in [0, n=1], got 2 at [1]",
        ),
        (
            lambda i: i.append_batch(ints(5, 6, 7, -3).reshape(2, 2)),
            ValueError,
            "append_batch: tokens must be in [0, 2147483647], got -3 at [1, 1]",
        ),
        (lambda i: i.add_corpus(ints(-1)), ValueError, "add_corpus: tokens must be in [0, 2147483647], got -1 at [0]"),
        (lambda i: i.truncate(0, 4), ValueError, "truncate: length must be in [0, 3], got 4"),
        (lambda i: i.truncate(0, -1), ValueError, "truncate: length must be in [0, 3], got -1"),
        (lambda i: i.truncate(0, 10**30), ValueError, f"truncate: length must be in [0, 3], got {10**30}"),
        (lambda i: i.truncate(0, None), TypeError, "truncate: length must be an integer, got NoneType"),
        (lambda i: i.reset(9), ValueError, "reset: sequence must be in [0, 1], got 9"),
        (lambda i: i.length(9), ValueError, "length: sequence must be in [0, 1], got 9"),
        (lambda i: i.length(torch.tensor(9)), ValueError, "length: sequence must be in [0, 1], got 9"),
        (lambda i: i.length(np.array(1.5)), TypeError, "length: sequence must be an integer, got ndarray"),
        (lambda i: i.truncate(0, torch.tensor([1, 2])), TypeError, "truncate: length must be an integer, got Tensor"),
        (lambda i: i.truncate(0, torch.tensor(9)), ValueError, "truncate: length must be in [0, 3], got 9"),
        (lambda i: i.propose(-1), ValueError, "propose: num_tokens must be in [0, 2147483647], got -1"),
        (
            lambda i: i.propose(1, limits=ints(1)),
            ValueError,
            "propose: limits must be int32 or int64 [num_sequences=2], got int64 [1]",
        ),
        (
            lambda i: i.propose(1, out=np.zeros((2, 1), np.int64)),
            TypeError,
            "propose: out must be a pair (tokens, counts) of numpy arrays",
        ),
        (
            lambda i: i.propose(1, out=(np.zeros((2, 2), np.int64), np.zeros(2, np.int32))),
            ValueError,
            "propose: out[0] must be int64 [num_sequences=2, 1], got int64 [2, 2]",
        ),
        (
            lambda i: i.propose(1, out=(np.zeros((2, 1), np.int64), np.zeros(2, np.int64))),
            ValueError,
            "propose: out[1] must be int32 [num_sequences=2], got int64 [2]",
        ),
        (
            lambda i: i.propose(1, out=(np.broadcast_to(np.int64(0), (2, 1)), np.zeros(2, np.int32))),
            ValueError,
            "propose: out[0] must be writeable",
        ),
    ],
)
def test_a_refused_call_names_its_argument_and_changes_nothing(
    new_index: Any, call: Any, error: type[Exception], message: str
) -> None:
    index = new_index(2)
    index.append_batch(ints(1, 2, 1, 3, 4, 3).reshape(2, 3))
    before = index.propose(4)
    with pytest.raises(error) as caught:
        call(index)
    assert str(caught.value) == message
    assert [index.length(b) for b in range(2)] == [3, 3]
    for got, expected in zip(index.propose(4), before, strict=True):
        np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- threads and the choice of implementation


def test_threads_may_share_an_index(new_index: Any) -> None:
    index = new_index(4)
    rng = np.random.default_rng(2)
    texts = rng.integers(0, 6, (4, 3000))
    failures: list[BaseException] = []

    def work(b: int) -> None:
        try:
            for start in range(0, 3000, 10):
                index.append(b, texts[b, start : start + 10])
                index.propose(5)
                index.truncate(b, start + 5)
                index.append(b, texts[b, start + 5 : start + 10])
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(b,)) for b in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    alone = new_index(4)
    alone.append_batch(texts)
    np.testing.assert_array_equal(index.propose(9)[0], alone.propose(9)[0])


def test_host_takes_the_compiled_index_where_there_is_one() -> None:
    assert host.COMPILED == ("compiled" in IMPLEMENTATIONS)
    assert host.NgramIndex is IMPLEMENTATIONS["compiled" if host.COMPILED else "python"].NgramIndex


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("broken", "expected"),
    [(None, "[] False"), ("ImportError('undefined symbol: x')", "['undefined symbol'] False")],
    ids=["not built", "does not load"],
)
def test_host_falls_back(broken: str | None, expected: str) -> None:
    error = broken or "ModuleNotFoundError('no module')"
    code = f"""
import importlib, importlib.abc, importlib.util, sys, types, warnings
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "specdec_kernels._host":
            raise {error}
sys.meta_path.insert(0, Refuse())
package = types.ModuleType("specdec_kernels")  # without running __init__, which may need torch
package.__path__ = [{str(Path(_host_py.__file__).parent)!r}]
sys.modules["specdec_kernels"] = package
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from specdec_kernels import host
print([w for c in caught for w in ["undefined symbol"] if w in str(c.message)], host.COMPILED)
assert host.NgramIndex.__module__ == "specdec_kernels._host_py"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == expected, result.stderr
