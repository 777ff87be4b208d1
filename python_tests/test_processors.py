"""`Processors` and `TokenCounts` by themselves."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels.types import MASK_DTYPES, NO_ID

COUNTS = sk.TokenCounts(torch.tensor([[3, 5], [4, 4]]), 4)


def lists(counts: sk.TokenCounts, b: int) -> dict[int, int]:
    ids, numbers = counts.ids[b].tolist(), counts.counts[b].tolist()
    known = [i for i in ids if i != NO_ID]
    assert known == sorted(set(known)) and ids[: len(known)] == known
    assert all(n == 0 for i, n in zip(ids, numbers, strict=True) if i == NO_ID)
    return {i: n for i, n in zip(ids, numbers, strict=True) if i != NO_ID}


def test_counts_are_those_of_python() -> None:
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(-1, 9, (3, 7), generator=rng)
    mask = torch.randint(0, 2, (3, 7), generator=rng)
    counts = sk.TokenCounts(prompt, 40, mask)
    output: list[list[int]] = [[], [], []]
    for step in range(9):
        tokens = torch.randint(-1, 12, (3, step % 5), generator=rng)
        assert counts.add_(tokens.int() if step % 2 else tokens) is counts
        for row, new in zip(output, tokens.tolist(), strict=True):
            row += [t for t in new if t >= 0]
        for b in range(3):
            inside = {t for t, kept in zip(prompt[b].tolist(), mask[b].tolist(), strict=True) if kept and t >= 0}
            times = Counter(output[b])
            assert lists(counts, b) == {t: 2 * times[t] + (t in inside) for t in inside | set(output[b])}
            assert counts.num_output[b] == len(output[b])


def test_counting_keeps_its_tensors_and_its_bounds() -> None:
    counts = sk.TokenCounts(torch.tensor([[3]]), 2)
    before = [x.data_ptr() for x in (counts.ids, counts.counts, counts.num_output)]
    counts.add_(torch.tensor([[9, 8, 7, 6, 5]]))
    assert lists(counts, 0) == {3: 1, 5: 2, 6: 2} and counts.num_output.tolist() == [5]
    assert before == [x.data_ptr() for x in (counts.ids, counts.counts, counts.num_output)]


def test_a_request_takes_the_slot_of_another() -> None:
    counts = sk.TokenCounts(torch.tensor([[3, 5, 9], [1, 2, 4]]), 2).add_(torch.tensor([[5, 6], [7, 8]]))
    before = [x.data_ptr() for x in (counts.ids, counts.counts, counts.num_output)]
    assert counts.restart_(0, torch.tensor([7, -1, 7, 0, 7, 7])) is counts
    assert lists(counts, 0) == {0: 1, 7: 1} and lists(counts, 1) == {1: 1, 2: 1, 4: 1, 7: 2, 8: 2}
    assert counts.add_(torch.tensor([[7, 1], [-1, -1]])).num_output.tolist() == [2, 2]
    assert lists(counts, 0) == {0: 1, 1: 2, 7: 3}
    assert before == [x.data_ptr() for x in (counts.ids, counts.counts, counts.num_output)]
    alone = sk.TokenCounts(torch.tensor([[7, 0, 0]]), 2).add_(torch.tensor([[7, 1]]))
    assert torch.equal(alone.ids[0], counts.ids[0]) and torch.equal(alone.counts[0], counts.counts[0])
    with pytest.raises(ValueError, match="restart_: prompt_ids must hold at most 3 distinct ids, got 4"):
        counts.restart_(1, torch.arange(4))
    assert lists(counts.restart_(1, torch.arange(0)), 1) == {}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sk.TokenCounts(torch.zeros(3).long(), 2), ValueError, r"TokenCounts: prompt_ids must be \[batch, n\]"),
        (lambda: sk.TokenCounts(torch.zeros(3, 1), 2), TypeError, "TokenCounts: prompt_ids must be an int32 or int64"),
        (lambda: sk.TokenCounts(torch.zeros(3, 1).long(), -1), ValueError, "TokenCounts: max_new_tokens must be in"),
        (
            lambda: sk.TokenCounts(torch.zeros(3, 1).long(), 2**30 - 1), ValueError,
            r"TokenCounts: max_new_tokens must be in \[0, 1073741822\], got 1073741823",
        ),
        (
            lambda: sk.TokenCounts(torch.zeros(3, 1).long(), 1, torch.ones(3).long()),
            ValueError, r"TokenCounts: attention_mask must be \[3, 1\], got \[3\]",
        ),
        (lambda: COUNTS.add_(torch.zeros(2).long()), ValueError, r"add_: tokens must be \[batch=2, n\], got"),
    ],
)  # fmt: skip
def test_counts_refuse(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_a_mask_is_what_generate_takes(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 1]]).to(dtype)
    assert lists(sk.TokenCounts(torch.tensor([[3, 5, 7]]), 2, mask), 0) == {3: 1, 7: 1}


def test_a_clone_counts_by_itself() -> None:
    counts = sk.TokenCounts(torch.tensor([[3, 5]]), 4)
    other = counts.clone().add_(torch.tensor([[5, 7]]))
    assert lists(counts, 0) == {3: 1, 5: 1} and lists(other, 0) == {3: 1, 5: 3, 7: 2}
    assert counts.num_output.tolist() == [0] and other.max_new_tokens == 4 and len(other) == 1


def test_processors_with_other_counts() -> None:
    x, counts = torch.randn(2, 9), sk.TokenCounts(torch.tensor([[3, 5], [4, 4]]), 4)
    fields: dict[str, Any] = {"logit_bias": {3: 0.5}, "stop_token_ids": [8], "min_tokens": 2, "presence_penalty": 0.7}
    given = sk.Processors(**fields, token_counts=counts)
    before = sk.warp_probs(x, processors=given)
    other = counts.clone().add_(torch.tensor([[5, 1], [2, 4]]))
    changed = sk.warp_probs(x, processors=given.with_counts(other))
    assert torch.equal(changed, sk.warp_probs(x, processors=sk.Processors(**fields, token_counts=other)))
    assert torch.equal(before, sk.warp_probs(x, processors=given)) and not torch.equal(before, changed)
    again, held = given, []
    for _ in range(2000):  # as in a loop that makes its own anew at each step
        held = [*held[-1:], weakref.ref(again.token_counts)]
        again = again.with_counts(counts.clone())
    assert torch.equal(before, sk.warp_probs(x, processors=again)) and held[0]() is None
    plain = sk.Processors(logit_bias={3: 0.5}, token_counts=counts)  # nothing that counts
    assert torch.equal(*(sk.warp_probs(x, processors=each) for each in (plain, plain.with_counts(other))))


@pytest.mark.parametrize(
    ("given", "counts", "error", "message"),
    [
        (COUNTS, 3, TypeError, "token_counts must be a TokenCounts, got int"),
        (None, COUNTS, ValueError, "token_counts must replace existing ones, and these processors have none"),
        (
            COUNTS, sk.TokenCounts(torch.zeros(3, 1).long(), 4), ValueError,
            "token_counts must be of 2 sequences on cpu, got 3 on cpu",
        ),
    ],
)  # fmt: skip
def test_other_counts_refused(given: Any, counts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^with_counts: {message}"):
        sk.Processors(token_counts=given).with_counts(counts)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be finite and > 0 in float32, got 0.0"),
        ({"repetition_penalty": math.nan}, ValueError, "repetition_penalty must be finite and > 0"),
        ({"frequency_penalty": math.inf}, ValueError, "frequency_penalty must be finite, got inf"),
        ({"presence_penalty": "much"}, TypeError, r"presence_penalty must be a number or a \[batch\] tensor, got str"),
        ({"presence_penalty": True}, TypeError, "presence_penalty must be a number"),
        ({"presence_penalty": torch.ones(2, 2)}, TypeError, "presence_penalty must be a number or a .* real tensor"),
        ({"presence_penalty": 0.5}, ValueError, "token_counts must be given where there is a penalty, got None"),
        ({"min_tokens": 2, "stop_token_ids": [1]}, ValueError, "token_counts must be given where there is a min_tok"),
        (
            {"banned_ids": [[], []], "logit_bias": [{1: 1.0}, None, None]}, ValueError,
            "logit_bias, banned_ids and stop_token_ids must agree on the number of sequences, got",
        ),
        ({"min_tokens": 2, "token_counts": COUNTS}, ValueError, "stop_token_ids must be given where there are min_tok"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be in"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens must be an integer, got float"),
        ({"min_tokens": torch.ones(2)}, TypeError, "min_tokens must be an int32 or int64 tensor"),
        ({"logit_bias": 3}, TypeError, "logit_bias must be a mapping, mappings or tensors, got int"),
        ({"logit_bias": [3]}, TypeError, "logit_bias must hold mappings or None, got int"),
        ({"logit_bias": {3: "a"}}, TypeError, "logit_bias must map ids to numbers, got str"),
        ({"logit_bias": {3: math.inf}}, ValueError, "logit_bias must map ids to float32 numbers or -inf, got inf"),
        ({"logit_bias": {3: 1e39}}, ValueError, "logit_bias must map ids to float32 numbers or -inf, got 1e"),
        ({"logit_bias": {3: -1e39}}, ValueError, "logit_bias must map ids to float32 numbers or -inf, got -1e"),
        ({"logit_bias": {-3: 1.0}}, ValueError, "logit_bias must be in"),
        ({"logit_bias": (torch.ones(2).long(), torch.ones(3))}, TypeError, "logit_bias must hold as many real values"),
        ({"banned_ids": 3}, TypeError, "banned_ids must be ids, lists of ids or a tensor, got int"),
        ({"banned_ids": ["ab"]}, TypeError, "banned_ids must be ids or lists of ids, got str among lists"),
        ({"banned_ids": [-1]}, ValueError, "banned_ids must be in"),
        ({"banned_ids": torch.ones(2)}, TypeError, "banned_ids must be an int32 or int64 tensor"),
        ({"allowed_ids": torch.ones(1, 1, 1).long()}, TypeError, "allowed_ids must be a tensor"),
        ({"token_bitmask": torch.ones(2).long()}, TypeError, "token_bitmask must be an int32 tensor"),
        ({"token_counts": 3}, TypeError, "token_counts must be a TokenCounts, got int"),
        (
            {"banned_ids": [[1], [2]], "allowed_ids": [[1]] * 3},
            ValueError, "all fields must agree on the number of sequences",
        ),
        (
            {"banned_ids": [[1], [2]], "logit_bias": [{1: 2.0}] * 3},
            ValueError, "logit_bias, banned_ids and stop_token_ids must agree on the number of sequences, got",
        ),
        (
            {"frequency_penalty": torch.ones(2), "presence_penalty": torch.ones(3), "token_counts": COUNTS},
            ValueError, "the penalties must agree on the number of sequences, got",
        ),
    ],
)  # fmt: skip
def test_processors_refuse(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Processors: {message}"):
        sk.Processors(**fields)


def test_where_nothing_stops_nothing_is_counted() -> None:
    """Whatever `min_tokens` is, with or without other biases."""
    for more in ({}, {"logit_bias": {3: 1.0}}):
        processors = sk.Processors(min_tokens=1, stop_token_ids=[], **more)
        assert int(sk.sample(torch.eye(5)[2:3], sk.SamplingParams(0.0), processors=processors).token) == 2


@pytest.mark.parametrize(
    ("processors", "error", "message"),
    [
        ("mask", TypeError, "processors must be a Processors or None, got str"),
        (
            sk.Processors(token_bitmask=torch.zeros(2, 3, 1).int()),
            ValueError, r"processors.token_bitmask must be \[batch=2, num_draft \+ 1=3, words=2\], got \[2, 3, 1\]",
        ),
        (sk.Processors(banned_ids=[[1]] * 3), ValueError, "processors must be of 1 or batch=2 sequences, got 3"),
    ],
)  # fmt: skip
def test_ops_refuse(processors: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^verify_chain: {message}"):
        sk.verify_chain(
            torch.zeros(2, 3, 40), torch.zeros(2, 2).long(), uniform_samples=torch.zeros(2, 3), processors=processors
        )


def test_tensors_are_copied_but_for_those_of_a_step() -> None:
    """Values given several times for one id add up."""
    x, counts = torch.randn(2, 9, generator=torch.Generator().manual_seed(2)), COUNTS.clone()
    ids, values, bitmask = torch.tensor([3, 3]), torch.tensor([0.5, 0.25]), torch.full((2, 1), -1, dtype=torch.int32)
    tensors = {
        "banned_ids": torch.tensor([[1], [2]], dtype=torch.int32), "stop_token_ids": torch.tensor([5]),
        "allowed_ids": torch.tensor([[1, 2, 3, 4, 5, 7]] * 2), "min_tokens": torch.tensor([1, 0]),
        "repetition_penalty": torch.tensor([1.5, 2.0]), "frequency_penalty": torch.tensor([0.5, 0.0]),
    }  # fmt: skip
    rest: dict[str, Any] = {"token_bitmask": bitmask, "token_counts": counts}
    given = sk.Processors(logit_bias=(ids, values), **tensors, **rest)
    kept: dict[str, Any] = {name: tensor.clone() for name, tensor in tensors.items()}
    before = sk.warp_probs(x, processors=sk.Processors(logit_bias={3: 0.75}, **kept, **rest))
    for tensor in (ids, values, *tensors.values()):
        tensor.zero_()
    assert torch.equal(sk.warp_probs(x, processors=given), before)
    counts.add_(torch.tensor([[3], [3]]))
    counted = sk.warp_probs(x, processors=given)
    assert not torch.equal(counted, before)
    bitmask.fill_(1 << 4)
    assert sk.warp_probs(x, processors=given)[:, 4].tolist() == [1.0, 1.0] and counted[0, 4] < 1


def test_a_cascade_emits_what_is_barred_where_the_draft_is_kept() -> None:
    target, draft = torch.zeros(1, 2, 9), torch.zeros(1, 2, 9)
    draft[..., 3] = 50.0
    given: dict[str, Any] = {"processors": sk.Processors(banned_ids=[3]), "uniform_samples": torch.full((1, 2), 0.5)}
    for law, kept in ((None, False), (sk.laws.Chow(0.5), True)):
        out = sk.verify_chain(target, torch.tensor([[3]]), draft[:, :1], target_law=law, **given)
        assert (out.tokens[0, 0] == 3) == kept and out.num_accepted == kept
        tree = sk.DraftTree.from_parents([-1, 0])
        tokens = sk.verify_tree(target, tree, torch.tensor([[7, 3]]), draft, target_law=law, **given).tokens
        assert (tokens[0, 0] == 3) == kept


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_a_copy_counts_for_itself(copied: Callable[[Any], Any]) -> None:
    given = sk.Processors(presence_penalty=100.0, token_counts=sk.TokenCounts(torch.tensor([[1]]), 4))
    other, x = copied(given), torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    assert other.token_counts is not None and given.token_counts is not None
    other.token_counts.add_(torch.tensor([[2]]))
    drawn = [int(sk.sample(x, sk.SamplingParams(0.0), processors=each).token) for each in (given, other)]
    assert drawn == [2, 3]


def test_a_minimum_below_every_int32_is_none() -> None:
    counts = sk.TokenCounts(torch.zeros(3, 1, dtype=torch.int64), 4)
    given = sk.Processors(stop_token_ids=[2], min_tokens=torch.tensor([-(2**31) - 1, -1, 2**40]), token_counts=counts)
    assert sk.warp_probs(torch.zeros(3, 4), processors=given)[:, 2].tolist() == [0.25, 0.25, 0.0]


def test_of_no_sequence() -> None:
    counts, none = sk.TokenCounts(torch.zeros(0, 1, dtype=torch.int64), 4), torch.zeros(0)
    given = sk.Processors(
        repetition_penalty=none + 1, min_tokens=none.long(), stop_token_ids=[3], banned_ids=[4], token_counts=counts
    )
    assert sk.warp_probs(torch.zeros(0, 40), processors=given).shape == (0, 40)
