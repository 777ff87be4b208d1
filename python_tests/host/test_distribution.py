"""The distribution that an n-gram index counts, and the noise it is drawn with: both implementations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from python_tests.host.indexes import IMPLEMENTATIONS, ints
from specdec_kernels.drafters import NgramTable


def naive(text: list[int], lengths: range, table_text: list[int], table_lengths: range) -> dict[int, float]:
    """The definition: from the longest context to the shortest, of the text itself and then of another."""
    law: Counter[int] = Counter()
    rest = 1.0
    for source, allowed in ((text, lengths), (table_text, table_lengths)):
        for length in reversed(allowed):
            context = text[len(text) - length :]
            found = Counter(source[end] for end in range(length, len(source)) if source[end - length : end] == context)
            if length > len(text) or not found:
                continue
            share = rest / (found.total() + len(found))
            for token, count in found.items():
                law[token] += share * count
            rest = share * len(found)
    return dict(law)


TOKENS = st.lists(st.integers(0, 4), max_size=30)


@settings(max_examples=150)
@given(st.lists(TOKENS, min_size=2, max_size=2), st.lists(st.integers(0, 6), min_size=4, max_size=60), st.data())
def test_it_is_as_defined(texts: list[list[int]], table_text: list[int], data: st.DataObject) -> None:
    shortest = data.draw(st.integers(1, 3))
    longest, order = data.draw(st.integers(shortest, 4)), data.draw(st.integers(1, 3))
    table = NgramTable.from_tokens(ints(*table_text), order, 1) if data.draw(st.booleans()) else None
    found = []
    for each in IMPLEMENTATIONS.values():
        index = each.NgramIndex(2, longest, shortest)
        for sequence, text in enumerate(texts):
            index.append(sequence, ints(*text, 1, 2))
            index.truncate(sequence, len(text))
        index.add_corpus(ints(0, 1, 2, 3, 4))  # does not count
        found.append(index.distribution(table) if table is not None else index.distribution())
    for ids, probs in found:
        assert ids.dtype == np.int64 and probs.dtype == np.float64 and probs.shape == (2, len(ids))
        wanted = [
            naive(text, range(shortest, longest + 1), table_text if table else [], range(1, order + 1))
            for text in texts
        ]
        assert ids.tolist() == sorted({token for law in wanted for token in law})
        for law, row in zip(wanted, probs, strict=True):
            assert row == pytest.approx([law.get(token, 0.0) for token in ids.tolist()], rel=1e-12)
    assert all(np.array_equal(a, b) for one in found for a, b in zip(found[0], one, strict=True)), "to the last bit"


def test_large_ids(new_index: Any) -> None:
    index = new_index(1)
    index.append(0, ints(5, 2**31 - 1, 5))
    ids, probs = index.distribution()
    assert ids.tolist() == [2**31 - 1] and probs.tolist() == [[0.5]]


@pytest.mark.parametrize("field", ["keys", "totals", "kinds", "starts", "ids", "counts"])
def test_arrays_that_are_no_table_are_refused(field: str, implementation: Any) -> None:
    """Where the table is made; and what was changed later is not read past its end."""
    table = NgramTable.from_tokens(ints(*range(9), *range(9)), order=1)
    whole = getattr(table.orders[0], field)
    for array, error in ((whole[:-1], ValueError), (whole.astype(np.float32), TypeError), (whole[::2], TypeError)):
        with pytest.raises(error, match=r"^NgramTable: orders\[0\]\.\w+ must be "):
            NgramTable([replace(table.orders[0], **{field: array})])
    index = implementation.NgramIndex(1)
    index.append(0, ints(3))
    orders = [replace(table.orders[0], **{field: whole[:-1]})]
    table.orders[:] = orders
    if implementation is not IMPLEMENTATIONS.get("compiled"):
        return  # reads no memory that is not its own
    with pytest.raises(ValueError, match=r"^distribution: table must have arrays as long as Order says"):
        index.distribution(table)
    table.orders[:] = [replace(orders[0], **{field: whole.astype(np.float32)})]
    with pytest.raises(TypeError, match=rf"^distribution: table must have arrays as Order says, .* {field}$"):
        index.distribution(table)
    table.orders[:] = [replace(orders[0], **{field: whole})]
    (_, at), starts = table.contexts([3])[0], table.orders[0].starts
    for first, after, read in ((2**40, -(2**40), 0), (2**40, 2**40, 0), (-(2**40), 2**40, len(table.orders[0].ids))):
        starts[at : at + 2] = first, after
        assert index.distribution(table)[1].size == read


def test_values_that_are_no_counts_are_refused() -> None:
    (order,) = NgramTable.from_tokens(ints(*range(9)), order=1).orders
    for field, less, message in (
        ("ids", 2, "ids must be >= 0, got -1"),
        ("counts", 1, "counts must be >= 1, got 0"),
        ("totals", 1, "totals must be >= 1, got 0"),
        ("kinds", 1, "kinds must be >= 1, got 0"),
        ("starts", 1, "starts must rise from 0 to 8, got others"),
    ):
        with pytest.raises(ValueError, match=rf"^NgramTable: orders\[0\].{message}$"):
            NgramTable([replace(order, **{field: getattr(order, field) - less})])


def test_what_is_no_table_is_refused(new_index: Any) -> None:
    with pytest.raises(TypeError, match="^distribution: table must be an NgramTable or None, got int$"):
        new_index(1).distribution(5)


def test_sequences_that_are_left_out(new_index: Any) -> None:
    index = new_index(3)
    index.append_batch(ints(1, 2, 1).repeat(3).reshape(3, 3, order="F"))
    ids, probs = index.distribution(limits=ints(0, 7, -1))
    assert ids.tolist() == [2] and probs.tolist() == [[0], [0.5], [0]]
    assert index.distribution(limits=ints(0, 0, 0))[1].shape == (3, 0)
    with pytest.raises(
        ValueError, match=r"^distribution: limits must be int32 or int64 \[num_sequences=3\], got int64 \[1\]"
    ):
        index.distribution(limits=ints(1))


def test_the_noise_is_what_a_draw_adds(implementation: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 64, generator=generator)
    keys = sk.noise_keys(torch.arange(200), torch.full((200, 1), 7))[:, 0]
    drawn = sk.sample(logits, noise_keys=keys).token
    each = keys.repeat_interleave(64).numpy(), torch.arange(64).repeat(200).numpy()
    noise = implementation.gumbel_noise(*each)
    assert noise.dtype == np.float32
    assert (logits + torch.from_numpy(noise).view(200, 64)).argmax(1).tolist() == drawn.tolist()


def test_both_make_the_same_noise() -> None:
    random = np.random.default_rng(0)
    keys = random.integers(-(2**63), 2**63, 200_000, dtype=np.int64)
    tokens = random.integers(0, 2**31, 200_000, dtype=np.int64)
    first, *others = (each.gumbel_noise(keys, tokens) for each in IMPLEMENTATIONS.values())
    for other in others:
        np.testing.assert_allclose(other, first, rtol=2e-6, atol=2e-6)
    assert first.min() < -2.4 and first.max() > 11.1, "with fewer bits than kFewBits, too"
    backwards = keys[:9][::-1], tokens[:9][::-1]
    for each in IMPLEMENTATIONS.values():
        assert np.array_equal(each.gumbel_noise(*backwards), each.gumbel_noise(keys[:9], tokens[:9])[::-1])


@pytest.mark.parametrize(
    ("keys", "tokens", "message"),
    [
        (ints(1, 2), ints(1), r"^gumbel_noise: keys must be int64 \[n=1\], got int64 \[2\]$"),
        (ints(1), ints(-1), r"^gumbel_noise: tokens must be in \[0, 2147483647\], got -1 at \[0\]$"),
        (ints(1), np.zeros(1), r"^gumbel_noise: tokens must be int64 \[n\], got float64 \[1\]$"),
    ],
)
def test_bad_noise_arguments_are_refused(
    keys: np.ndarray, tokens: np.ndarray, message: str, implementation: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        implementation.gumbel_noise(keys, tokens)
