"""Rows that `sample` takes by an index, on every backend: as if they had been copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops.inputs import logits, refuses, same_bits, seeded, strided, uniforms
from python_tests.support import Backend

OP = "sample"
NAN = torch.nan


def named(rows: Tensor, index: Tensor, extra: int = 2) -> Tensor:
    """The same rows with those that no index names NaN, and so many more."""
    kept = rows.new_full((len(rows) + extra, *rows.shape[1:]), NAN)
    kept[index] = rows[index]
    return kept


@pytest.mark.parametrize("noise", ["uniform_samples", "noise_keys", "several", "greedy", "probs", "processors"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("vocab", [40, 1300, 9000])
def test_is_that_of_the_rows_themselves(backend: Backend, vocab: int, flat: bool, noise: str) -> None:
    """Sequences of different parameters share rows; no other row is looked at."""
    rng, batch, num = seeded(), backend.batch(12), 7
    lead = (batch,) if flat else (batch, 2)
    vocab = backend.vocab(vocab)
    x = logits(rng, num, *lead[1:], vocab, dtype=torch.bfloat16 if vocab == 1300 else torch.float32)
    index = torch.randint(0, num, (batch,), generator=rng)
    top = {"top_k": torch.randint(0, 9, (batch,), generator=rng), "top_p": torch.rand(batch, generator=rng)}
    given: dict[str, Any] = {"params": sk.SamplingParams(torch.rand(batch, generator=rng) + 0.5, **top)}
    name = "probs" if noise == "probs" else "logits"
    if noise == "probs":
        x, given["params"] = x.float().softmax(-1), sk.SamplingParams(**top)
    if noise == "greedy":
        given["params"] = sk.SamplingParams(0.0)
    elif noise in ("noise_keys", "several"):
        given["noise_keys"] = torch.randint(-(2**63), 2**63 - 1, lead, generator=rng)
        given["num_samples"] = 5 if noise == "several" else 1
    else:
        given["uniform_samples"] = uniforms(rng, *lead)
    if noise == "processors":
        mask = torch.randint(-(2**31), 2**31 - 1, (*lead, (vocab + 31) // 32), generator=rng, dtype=torch.int32)
        given["processors"] = sk.Processors(token_bitmask=backend(mask), logit_bias=[{i: 1.0} for i in range(batch)])

    def drawn(rows: Tensor, **more: Any) -> sk.Draw:
        arguments = {"logits": None, name: rows, **given, **more}
        draw: sk.Draw = backend.sample(**{key: backend(value) for key, value in arguments.items()})
        return draw

    expected = drawn(x[index])
    assert (expected.stats.status == 0).all() and (expected.log_prob > -torch.inf).any(-1).all()
    same_bits(drawn(named(x, index), row_index=index), expected)
    same_bits(drawn(strided(x), row_index=strided(index[:, None])[:, 0].int()), expected)


@pytest.mark.parametrize("form", ["logits", "probs"])
def test_each_sequence_has_the_distribution_of_its_row_and_its_own_parameters(backend: Backend, form: str) -> None:
    """48 uniforms a sequence, between which all borders lie: of P in sixteenths, of its two likeliest in twelfths."""
    sixteenths = torch.tensor([[8, 4, 2, 2, 0], [0, 2, 2, 4, 8], [2, 8, 0, 4, 2]])
    grid = (torch.arange(48, dtype=torch.float64) + 0.5) / 48
    row, top_k = torch.tensor([2, 0, 1, 0]).repeat(2, 1).flatten(), torch.tensor([0, 2]).repeat_interleave(4)
    rows = (sixteenths / 16).log() if form == "logits" else sixteenths / 16
    params = sk.SamplingParams(top_k=top_k.repeat_interleave(48))
    draw = backend.sample(
        None if form == "probs" else backend(rows), backend(params), probs=backend(rows) if form == "probs" else None,
        row_index=backend(row.repeat_interleave(48)), uniform_samples=backend(grid.repeat(8)),
    )  # fmt: skip
    counts = torch.stack([torch.bincount(t, minlength=5) for t in draw.token.cpu().view(8, 48)])
    kept = torch.where((top_k[:, None] == 0) | (sixteenths[row] >= 4), sixteenths[row], 0)
    assert torch.equal(counts, kept * (48 // kept.sum(-1, keepdim=True)))


@pytest.mark.parametrize("vocab", [50, 9000])
@pytest.mark.parametrize("noise", ["uniform_samples", "noise_keys", "several", "greedy", "probs"])
def test_an_index_outside_gives_no_token(backend: Backend, noise: str, vocab: int) -> None:
    rng, vocab = seeded(), backend.vocab(vocab)
    x, u, keys = logits(rng, 4, 2, vocab), uniforms(rng, 6, 2), torch.arange(12).view(6, 2)
    x = x.softmax(-1) if noise == "probs" else x
    x[1] = NAN
    given: dict[str, Any] = {"params": sk.SamplingParams(0.0 if noise == "greedy" else 1.0, top_k=20)}
    if noise in ("noise_keys", "several"):
        given |= {"noise_keys": backend(keys), "num_samples": 3 if noise == "several" else 1}
    elif noise != "greedy":
        given["uniform_samples"] = backend(u)

    def drawn(rows: Tensor, index: list[int]) -> sk.Draw:
        name = "probs" if noise == "probs" else "logits"
        return backend.sample(
            **{"logits": None, name: backend(rows), "row_index": backend(torch.tensor(index)), **given}
        )

    def check_none(draw: sk.Draw, b: int) -> None:
        assert (draw.token[b] == -1).all() and (draw.log_prob[b] == -torch.inf).all()
        assert (draw.stats.values[b, :, 3] == 1).all() and (
            draw.stats.values[b][:, [0, 1, 2, 4, 5]] == -torch.inf
        ).all()
        assert (draw.stats.argmax[b] == 0).all() and (draw.stats.status[b] == sk.Status.BAD_PARAM).all()

    good, draw = drawn(x, [0, 2, 3, 3, 2, 0]), drawn(x, [0, -1, 3, 4, 2**40, 0])
    for b in (1, 3, 4):
        check_none(draw, b)
    kept = [0, 2, 5]
    same_bits([draw.token[kept], draw.log_prob[kept]], [good.token[kept], good.log_prob[kept]])
    same_bits(*([one.stats.values[kept], one.stats.argmax[kept], one.stats.status[kept]] for one in (draw, good)))
    none = drawn(x[:0], [0, -1, 3, 4, 2**40, 0])
    for b in range(6):
        check_none(none, b)


def test_flags_of_a_sequence_do_not_hide_that_it_has_no_row(backend: Backend) -> None:
    x = torch.zeros(2, 9)
    x[1, 3] = NAN
    params = sk.SamplingParams(torch.tensor([1.0, NAN, 1.0, NAN]), top_k=4)
    draw = backend.sample(
        *backend(x, params), row_index=backend(torch.tensor([1, 7, -1, 1])),
        uniform_samples=backend(torch.tensor([0.5, 0.5, NAN, 0.5])),
    )  # fmt: skip
    bad, nan = sk.Status.BAD_PARAM, sk.Status.NAN
    assert draw.stats.status.tolist() == [nan, bad, bad, nan | bad]
    assert draw.token[1:3].tolist() == [-1, -1]


def test_keys_are_the_sequences_own(backend: Backend) -> None:
    rng = seeded()
    x, index = logits(rng, 3, 2, 30), torch.tensor([2, 0, 2, 1])
    keys = torch.randint(-(2**63), 2**63 - 1, (4, 2), generator=rng)
    for num in (1, 3):
        given = {"noise_keys": backend(keys), "num_samples": num}
        same_bits(
            backend.sample(backend(x), row_index=backend(index), **given), backend.sample(backend(x[index]), **given)
        )


def test_no_sequences(backend: Backend) -> None:
    empty = backend(torch.zeros(0))
    for rows in (torch.zeros(3, 9), torch.zeros(0, 9)):
        draw = backend.sample(backend(rows), row_index=empty.int(), uniform_samples=empty)
        assert draw.token.shape == (0,) and draw.stats.values.shape == (0, 6)


@pytest.mark.parametrize("cells", [1, 1 << 20])
def test_margins_are_those_of_the_rows_themselves(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    from specdec_kernels.backends.reference import margins

    monkeypatch.setattr(margins, "CELLS", cells)
    rng = seeded()
    x, u, index = logits(rng, 5, 2, 30), uniforms(rng, 6, 2), torch.tensor([3, 3, 9, 0, -1, 4])
    params = sk.SamplingParams(torch.rand(6, generator=rng) + 0.5)
    found = sk.decision_margins(sk.sample, x, params, row_index=index, uniform_samples=u)
    expected = sk.decision_margins(sk.sample, x[index.clamp(0, 4)], params, uniform_samples=u)
    there = [0, 1, 3, 5]
    same_bits([found.tokens[there], found.margins[there]], [expected.tokens[there], expected.margins[there]])
    assert (found.tokens[[2, 4]] == -1).all() and (found.margins[[2, 4]] == torch.inf).all()


GOOD: dict[str, Any] = {
    "logits": torch.zeros(7, 9), "uniform_samples": torch.zeros(4), "row_index": torch.arange(4),
    "processors": sk.Processors(token_bitmask=torch.zeros(4, 1, dtype=torch.int32)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"row_index": torch.arange(3)}, ValueError, "uniform_samples must be [batch=3], got [4]"),
        ({"row_index": torch.zeros(4)}, TypeError, "row_index must be int64 or int32, got float32"),
        ({"row_index": 3}, TypeError, "row_index must be a tensor, got int"),
        ({"row_index": torch.zeros(4, 1).long()}, ValueError, "row_index must be [batch], got [4, 1]"),
        ({"row_index": torch.arange(4, device="meta")}, ValueError, "row_index must be on cpu, got meta"),
        ({"uniform_samples": torch.zeros(7)}, ValueError, "uniform_samples must be [batch=4], got [7]"),
        ({"params": sk.SamplingParams(torch.ones(7))}, ValueError, "params.temperature must be [batch=4], got [7]"),
        (
            {"processors": sk.Processors(token_bitmask=torch.zeros(7, 1, dtype=torch.int32))},
            ValueError,
            "processors.token_bitmask must be [batch=4, words=1], got [7, 1]",
        ),
        (
            {"processors": sk.Processors(logit_bias=[{1: 1.0}] * 7)},
            ValueError,
            "processors must be of 1 or batch=4 sequences, got 7",
        ),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.sample, GOOD, change, error, f"sample: {message}")
