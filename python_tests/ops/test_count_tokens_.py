"""count_tokens_ on every backend: what Python's Counter gives, in lists that stay lists."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops.inputs import refuses, same_bits
from python_tests.support import Backend, environment
from specdec_kernels.types import NO_ID

OP = "count_tokens_"
SIGNATURE = (["token_counts", "tokens", "num_tokens"], ["backend"])
PROMPT = torch.tensor([[7, 3, 3, 9], [2, 2, 2, -1]])
CALLS = {
    "": lambda: {"token_counts": sk.TokenCounts(PROMPT, 6), "tokens": torch.tensor([[3, 5, -1], [9, 2, 9]])},
    "num_tokens": lambda: {
        "token_counts": sk.TokenCounts(PROMPT, 6), "tokens": torch.tensor([[3, 5, 4], [9, 2, 9]]).int(),
        "num_tokens": torch.tensor([2, 0], dtype=torch.int32),
    },
}  # fmt: skip


def tensors_of(counts: sk.TokenCounts) -> list[Tensor]:
    return [counts.ids, counts.counts, counts.num_output]


def expected(counts: sk.TokenCounts, tokens: Tensor, num_tokens: list[int] | None) -> list[Tensor]:
    """The three tensors after it, a token at a time, and the status."""
    made = counts.clone()
    status = torch.zeros_like(made.num_output)
    for b, row in enumerate(tokens.tolist()):
        row = [t for t in row[: None if num_tokens is None else max(0, num_tokens[b])] if 0 <= t < NO_ID]
        times = Counter(dict(zip(*(x[b].tolist() for x in tensors_of(counts)[:2]), strict=True)))
        for token in row:
            times[token] += 2
        times.pop(NO_ID, None)
        kept = sorted(times)[: made.ids.shape[1]]
        status[b] = int(sk.Status.BAD_PARAM) * (len(times) > len(kept))
        made.ids[b] = NO_ID
        made.ids[b, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        made.counts[b, : len(kept)] = torch.tensor([times[i] for i in kept], dtype=torch.int32)
        made.num_output[b] += len(row)
    return [*tensors_of(made), status]


def test_counts_made_in_inference_mode_are_added_to_outside_of_it(backend: Backend) -> None:
    with torch.inference_mode():
        counts = sk.TokenCounts(backend(torch.tensor([[1, 2]])), 4)
    status = backend.count_tokens_(counts, backend(torch.tensor([[3]])))
    assert status.tolist() == [0] and counts.ids.tolist() == [[1, 2, 3, NO_ID, NO_ID, NO_ID]]
    counts.restart_(0, backend(torch.tensor([5])))
    assert counts.ids.tolist() == [[5, *[NO_ID] * 5]] and counts.num_output.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("most", [9, 3000])
@pytest.mark.parametrize("n", [0, 1, 6, 32, 33, 100])
@pytest.mark.parametrize(("prompt", "room"), [(0, 40), (5, 7), (300, 20), (700, 300)])
def test_is_what_python_counts(
    backend: Backend, prompt: int, room: int, n: int, most: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Steps one after the other: short and full lists, ids of the list and others, twice and out of range."""
    batch = 5
    counts = backend(sk.TokenCounts(torch.randint(-1, most, (batch, prompt), generator=rng), room))
    for step in range(3):
        tokens = torch.randint(-1, most, (batch, n), generator=rng)
        tokens[torch.rand(tokens.shape, generator=rng) < 0.1] = torch.randint(most, (), generator=rng)
        if dtype == torch.int64 and n > 1:
            tokens[0, 0], tokens[1, 1] = -(2**40), 2**33 + 5
        elif n > 1:
            tokens[0, 0], tokens[1, 1] = NO_ID, NO_ID - 1
        lengths = torch.randint(-1, n + 2, (batch,), generator=rng) if step else None
        wanted = expected(backend_free(counts), tokens, None if lengths is None else lengths.tolist())
        given = backend(tokens.to(dtype).t().contiguous().t())
        status = backend.count_tokens_(counts, given, None if lengths is None else backend(lengths.to(dtype)))
        assert status.dtype == torch.int32
        same_bits([x.cpu() for x in (*tensors_of(counts), status)], wanted)


def backend_free(counts: sk.TokenCounts) -> sk.TokenCounts:
    """A copy on the CPU."""
    return Backend("reference", "cpu")(counts).clone()


def test_what_stands_behind_the_last_id_stays(backend: Backend) -> None:
    """Counts of no id, which nobody reads; an id that comes there has its own."""
    counts = backend(sk.TokenCounts(torch.tensor([[4, 6], [1, -1], [-1, -1]]), 5))
    for b, held in enumerate((2, 1, 0)):
        counts.counts[b, held:] = torch.arange(70, 77 - held)
    tokens, lengths = torch.tensor([[5, 9, 5], [1, 1, 1], [8, 3, 3]]), torch.tensor([3, 2, 0])
    for given in (None, lengths, lengths.flip(0)):
        wanted = expected(backend_free(counts), tokens, None if given is None else given.tolist())
        status = backend.count_tokens_(counts, backend(tokens), None if given is None else backend(given))
        same_bits([x.cpu() for x in (*tensors_of(counts), status)], wanted)
    assert (counts.counts >= 70).any(1).all()


@pytest.mark.parametrize("n", [0, 2])
def test_lists_without_room_stay_empty(backend: Backend, n: int) -> None:
    counts = backend(sk.TokenCounts(torch.zeros(2, 0, dtype=torch.int64), 0))
    status = backend.count_tokens_(counts, backend(torch.ones(2, n, dtype=torch.int64)))
    assert status.tolist() == 2 * [int(sk.Status.BAD_PARAM) * (n > 0)] and counts.num_output.tolist() == [n, n]


@pytest.mark.parametrize("few", [False, True], ids=["at 36", "at 3"])
def test_a_list_that_is_just_full_is_good_and_an_id_more_is_flagged(backend: Backend, few: bool) -> None:
    """An id more that is the largest, the lowest, and one between; and one that the list has. Then come known ones."""
    new = [10, 20] if few else [*range(10, 80, 2)]
    counts = backend(sk.TokenCounts(torch.tensor([[4, 6]] * 4), len(new)))
    tokens = torch.tensor([[*new, more, *[4] * 32] for more in (99, 1, 15, 4)])
    wanted = expected(backend_free(counts), tokens, None)
    assert wanted[-1].tolist() == [16, 16, 16, 0]
    status = backend.count_tokens_(counts, backend(tokens))
    same_bits([x.cpu() for x in (*tensors_of(counts), status)], wanted)


def test_what_is_no_list_is_flagged_and_stays(backend: Backend, rng: torch.Generator) -> None:
    """Ids that do not ascend, wherever the first does not; those of the other sequences are counted."""
    width, places = 600, [1, 2, 255, 256, 257, 300, 599]
    counts = backend(sk.TokenCounts(torch.arange(0, 2 * width, 2).expand(len(places) + 1, -1), 9))
    for b, place in enumerate(places):
        counts.ids[b, place] = counts.ids[b, place - 1]
    before, tokens = backend_free(counts), torch.randint(0, 1000, (len(places) + 1, 9), generator=rng)
    status = backend.count_tokens_(counts, backend(tokens))
    assert status.tolist() == [int(sk.Status.BAD_PARAM)] * len(places) + [0]
    after = [x.cpu() for x in tensors_of(counts)]
    same_bits([x[:-1] for x in after], [x[:-1] for x in tensors_of(before)])
    same_bits([x[-1] for x in after], [x[-1] for x in expected(before, tokens, None)[:3]])


def test_wild_lists_are_safe(backend: Backend, rng: torch.Generator) -> None:
    """Whatever stands in them nothing is written elsewhere, and what ascends is a list, of negative ids as well."""
    for _ in range(10):
        counts = backend(sk.TokenCounts(torch.zeros(4, 30).long(), 9))
        wild = torch.randint(-(2**31), 2**31, counts.ids.shape, generator=rng)
        wild[:2] = wild[:2].sort(-1).values
        counts.ids.copy_(wild)
        before, tokens = backend_free(counts), torch.randint(0, 2**31, (4, 40), generator=rng)
        tokens[:, ::3] = wild[:, :14]
        status = backend.count_tokens_(counts, backend(tokens))
        assert status[2:].tolist() == [16, 16]
        after = [x[:2].cpu() for x in (*tensors_of(counts), status)]
        same_bits(after, [x[:2] for x in expected(before, tokens, None)])


def test_compiles_whole() -> None:
    """In a compiled function the counts that were given have changed, and processors see it."""
    call = CALLS["num_tokens"]()
    eager = CALLS["num_tokens"]()["token_counts"].add_(call["tokens"], call["num_tokens"])
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tokens: Tensor, num_tokens: Tensor) -> Tensor:
        return call["token_counts"].add_(tokens, num_tokens).num_output * 2

    assert step(call["tokens"], call["num_tokens"]).tolist() == [4, 0]
    same_bits(tensors_of(call["token_counts"]), tensors_of(eager))


GOOD = {"token_counts": sk.TokenCounts(PROMPT, 6), "tokens": torch.tensor([[3], [5]])}


def with_tensor(**changed: Tensor) -> dict[str, Any]:
    counts = GOOD["token_counts"].clone()
    for name, tensor in changed.items():
        setattr(counts, name, tensor)
    return {"token_counts": counts}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token_counts": 3}, TypeError, "token_counts must be a TokenCounts, got int"),
        (with_tensor(ids=torch.zeros(2, 10)), TypeError, "token_counts.ids must be int32, got float32"),
        (with_tensor(ids=torch.zeros(2).int()), ValueError, "token_counts.ids must be [batch, capacity], got [2]"),
        (with_tensor(counts=torch.zeros(2, 9).int()), ValueError,
         "token_counts.counts must be [batch=2, capacity=10], got [2, 9]"),
        (with_tensor(num_output=torch.zeros(3).int()), ValueError,
         "token_counts.num_output must be [batch=2], got [3]"),
        (with_tensor(ids=torch.zeros(10, 2).int().t()), ValueError,
         "token_counts.ids must be contiguous, got strides (1, 2)"),
        ({"tokens": [[1], [2]]}, TypeError, "tokens must be a tensor, got list"),
        ({"tokens": torch.zeros(2, 1)}, TypeError, "tokens must be int64 or int32, got float32"),
        ({"tokens": torch.zeros(2).long()}, ValueError, "tokens must be [batch=2, n], got [2]"),
        ({"tokens": torch.zeros(3, 1).long()}, ValueError, "tokens must be [batch=2, n], got [3, 1]"),
        ({"tokens": torch.zeros(2, 1, device="meta").long()}, ValueError, "tokens must be on cpu, got meta"),
        ({"num_tokens": torch.zeros(2)}, TypeError, "num_tokens must be int64 or int32, got float32"),
        ({"num_tokens": torch.zeros(1).long()}, ValueError, "num_tokens must be [batch=2], got [1]"),
        ({"backend": "gpu"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.count_tokens_, GOOD, change, error, f"count_tokens_: {message}")


def test_check_raises() -> None:
    counts = sk.TokenCounts(torch.tensor([[1, 2]]), 1)
    counts.ids[0, 1] = 0
    with environment(SPECDEC_CHECK="1"), pytest.raises(RuntimeError, match="^add_: row 0 set <Status.BAD_PARAM: 16>"):
        counts.add_(torch.tensor([[4]]))


def test_counts_that_are_none_wrap_around(backend: Backend) -> None:
    """They are not TokenCounts' own; whatever stands there is added to, as int32 is."""
    counts = backend(sk.TokenCounts(torch.tensor([[3]]), 4))
    counts.counts[0, 0] = counts.num_output[0] = 2**31 - 1
    backend.count_tokens_(counts, backend(torch.tensor([[3, 5]])))
    assert counts.counts[0, :2].tolist() == [1 - 2**31, 2] and counts.num_output.tolist() == [1 - 2**31]
