"""Draft rows that are taken by an index out of those of all requests, on every backend: as if they had been copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.chains import run
from python_tests.ops.inputs import refuses, same_bits, strided
from python_tests.support import Backend
from specdec_kernels import laws

OP = "verify_chain"
KINDS = ("full", "reduced", "probs")


def requests(arguments: chains.Arguments, index: torch.Tensor, extra: int = 2) -> chains.Arguments:
    """The same step whose draft rows are those of requests, NaN but for the rows of the sequences."""
    name = "draft_probs" if "draft_probs" in arguments else "draft_logits"
    rows = arguments[name]
    kept = rows.new_full((int(index.max()) + 3, rows.shape[1] + extra, rows.shape[2]), torch.nan)
    kept[index, : rows.shape[1]] = rows
    return {**arguments, name: kept, "draft_index": index}


@pytest.mark.parametrize("law", [None, laws.Opt(0.3, bonus="cascade")], ids=["lossless", "Opt"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("vocab", [40, 1300])
def test_is_that_of_the_rows_themselves(
    backend: Backend, vocab: int, acceptance: str, kind: str, law: laws.TargetLaw | None
) -> None:
    if law is not None and kind == "probs":
        pytest.skip("a cascade needs logits")
    rng, batch = torch.Generator().manual_seed(vocab), backend.batch(12)
    arguments = chains.make(rng, batch, 3, vocab, kind=kind, acceptance=acceptance, law=law)
    index = torch.randperm(2 * batch, generator=rng)[:batch]
    expected = run(backend, arguments, return_acceptance=True)
    same_bits(run(backend, requests(arguments, index), return_acceptance=True), expected)
    made = requests(arguments, index, extra=0)
    name = "draft_probs" if kind == "probs" else "draft_logits"
    made |= {name: strided(made[name]), "draft_index": index.int()}
    same_bits(run(backend, made, return_acceptance=True), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_packed_is_that_of_the_rows_themselves(backend: Backend, acceptance: str, kind: str) -> None:
    rng, batch = torch.Generator().manual_seed(7), backend.batch(12)
    arguments = chains.make(rng, batch, 4, 1100, kind=kind, acceptance=acceptance)
    counts, index = torch.randint(0, 5, (batch,), generator=rng), torch.randperm(batch, generator=rng)
    packed = chains.packed(arguments, counts)
    expected = backend.verify_packed(**chains.on(backend, packed))
    name = "draft_probs" if kind == "probs" else "draft_logits"
    of_requests = requests(arguments, index)
    packed |= {key: of_requests[key] for key in (name, "draft_index")}
    same_bits(backend.verify_packed(**chains.on(backend, packed)), expected)


@pytest.mark.parametrize("acceptance", ["token", "block", "greedy"])
def test_an_index_outside_makes_an_idle_row(backend: Backend, acceptance: str) -> None:
    arguments = chains.make(torch.Generator().manual_seed(11), 6, 2, 50, acceptance=acceptance)
    index = torch.arange(6)
    good = run(backend, requests(arguments, index))
    made = requests(arguments, index)
    made["draft_index"] = torch.tensor([0, -1, 2, 8, 2**40, 5])
    out = run(backend, made)
    bad = sk.Status.BAD_PARAM
    assert out.status.tolist() == [0, bad, 0, bad, bad, 0]
    for b in (1, 3, 4):
        assert (out.tokens[b] == -1).all() and out.num_tokens[b] == 0
    for b in (0, 2, 5):
        same_bits(out.tokens[b], good.tokens[b])
    without = {**made, "draft_logits": made["draft_logits"][:0]}
    assert run(backend, without).status.tolist() == [bad] * 6


GOOD: dict[str, Any] = {
    "target_logits": torch.zeros(4, 3, 9), "draft_tokens": torch.zeros(4, 2).long(),
    "draft_logits": torch.zeros(7, 5, 9), "uniform_samples": torch.zeros(4, 3), "draft_index": torch.arange(4),
}  # fmt: skip
STATS = sk.RowStats(torch.zeros(7, 5, 6), torch.zeros(7, 5).long(), torch.zeros(7, 5).int())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"draft_index": torch.arange(3)}, ValueError, "draft_index must be [batch=4], got [3]"),
        ({"draft_index": torch.zeros(4)}, TypeError, "draft_index must be int64 or int32, got float32"),
        ({"draft_index": 3}, TypeError, "draft_index must be a tensor, got int"),
        ({"draft_logits": torch.zeros(7, 1, 9)}, ValueError, "draft_logits must be [requests, >= 2, vocab_draft], got"),
        ({"draft_logits": torch.zeros(7, 9)}, ValueError, "draft_logits must be [requests, >= 2, vocab_draft], got"),
        ({"draft_logits": torch.zeros(7, 5, 8)}, ValueError, "draft_logits must be [requests=7, rows=5, vocab=9], got"),
        ({"draft_logits": None}, ValueError, "draft_index needs draft_logits or draft_probs, got neither"),
        ({"draft_stats": STATS}, ValueError, "draft_stats must be None beside draft_index, got some"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.verify_chain, GOOD, change, error, f"verify_chain: {message}")
