"""token_logprobs on every backend: against float64, over shapes, rows, ties, dtypes, parameters and bad values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops.inputs import DTYPES, PARAMS, logits, per_row, refuses, same_bits, seeded, strided
from python_tests.ops.logprobs import check, described
from python_tests.ops.processing import EACH, Request, bits, of_any_kind, processors
from python_tests.support import Backend
from specdec_kernels.testing import float64_law

OP = "token_logprobs"
SIGNATURE = (["logits", "tokens", "params"], ["processors", "rows", "num_tokens", "num_top", "backend"])


def tokens(rng: torch.Generator, *shape: int, vocab: int) -> Tensor:
    """Ids, and now and then none."""
    return torch.randint(-1, vocab, shape, generator=rng)


CALLS = {
    "": lambda: {
        "logits": logits(seeded(), 4, 3, 50), "tokens": torch.tensor([[1, 49, -1], [0, -1, -1], [7, 8, 9], [2, 2, 2]]),
        "params": per_row(4), "num_top": 3,
    },
    "rows": lambda: {
        "logits": logits(seeded(), 3, 5, 1050, dtype=torch.bfloat16),
        "tokens": torch.tensor([[5, 1049], [0, 7], [1, -1]]), "rows": torch.tensor([[0, 4], [0, 2], [0, -1]]),
        "num_tokens": torch.tensor([2, 1, 1], dtype=torch.int32),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab", [2, 3, 1024, 1025, 4097, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_describes_the_float64_law(
    backend: Backend, dtype: torch.dtype, vocab: int, name: str, rng: torch.Generator
) -> None:
    vocab, params = backend.vocab(vocab), PARAMS[name]
    x, ids = logits(rng, 2, 2, vocab, dtype=dtype), torch.randint(0, vocab, (2, 2), generator=rng)
    ids[0, 0] = x[0, 0].float().argmax()
    out = backend.token_logprobs(*backend(x, ids, params), num_top=20)
    assert (out.status == 0).all() and out.raw_log_prob.dtype == out.log_prob.dtype == torch.float32
    assert out.rank.dtype == out.status.dtype == torch.int32 and out.top_ids.dtype == torch.int64
    check(out, described(x, ids, params, 20))
    fewer = backend.token_logprobs(*backend(x, ids, params), num_top=1)
    same_bits(fewer[:4], out[:4])
    same_bits(fewer[4:], tuple(t[..., :1].contiguous() for t in out[4:]))


@pytest.mark.parametrize("vocab", [7, 1100, 4097])
def test_ties_go_by_the_lowest_id(backend: Backend, vocab: int, rng: torch.Generator) -> None:
    x = torch.stack([logits(rng, 3, vocab).round(), torch.zeros(3, vocab), logits(rng, 3, vocab).sign() * 0.0])
    x[1, 1, vocab // 2 :] = -math.inf
    ids = torch.randint(0, vocab, (3, 3), generator=rng)
    ids[1, 1] = vocab - 1
    out = backend.token_logprobs(*backend(x, ids), num_top=20)
    check(out, described(x, ids, sk.SamplingParams(), 20))
    assert out.raw_log_prob[1, 1] == -math.inf and out.rank[1].tolist() == (ids[1] + 1).tolist()


def test_fewer_possible_ids_than_are_listed(backend: Backend, rng: torch.Generator) -> None:
    x = torch.full((1, 2, 3000), -math.inf)
    x[0, 0, [2990, 5, 1500]], x[0, 1, 2] = torch.tensor([1.0, 0.5, 0.0]), math.nan
    x[0, 1, 1030:1045] = logits(rng, 15)
    out = backend.token_logprobs(*backend(x, torch.tensor([[5, 1030]])), num_top=6)
    check(out, described(x, torch.tensor([[5, 1030]]), sk.SamplingParams(), 6))
    assert out.top_ids[0, 0].tolist() == [2990, 5, 1500, 0, 1, 2] and out.status.tolist() == [[0, sk.Status.NAN]]


def test_tokens_come_from_their_rows(backend: Backend, rng: torch.Generator) -> None:
    """As of a tree: 0, then the accepted nodes. Other rows are not read: they hold NaN."""
    x, path = logits(rng, 3, 6, 1500), torch.tensor([[0, 2, 5], [0, 4, -1], [0, -1, -1]])
    ids = tokens(rng, 3, 3, vocab=1500).clamp_min(0).masked_fill(path < 0, -1)
    read = torch.zeros(3, 6, dtype=torch.bool).scatter(1, path.clamp_min(0), True)
    chosen = x.gather(1, path.clamp_min(0)[..., None].expand(-1, -1, 1500))
    x[~read] = math.nan
    params = per_row(3)
    out = backend.token_logprobs(*backend(x, ids, params), rows=backend(path), num_top=4)
    same_bits(out, backend.token_logprobs(*backend(chosen, ids, params), num_top=4))
    assert (out.status == 0).all() and (out.rank > 0).cpu().equal(path >= 0)
    same_bits(out, backend.token_logprobs(*backend(strided(x), ids, params), rows=backend(path), num_top=4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(backend: Backend, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, ids = logits(rng, 3, 2, 1100, dtype=dtype), tokens(rng, 3, 2, vocab=1100)
    dense = backend.token_logprobs(*backend(x, ids, PARAMS["all"]), num_top=5)
    same_bits(dense, backend.token_logprobs(strided(backend(x)), backend(ids), PARAMS["all"], num_top=5))
    turned = backend(x).transpose(0, 1).contiguous().transpose(0, 1)
    same_bits(dense, backend.token_logprobs(turned, backend(ids.T.contiguous()).T, PARAMS["all"], num_top=5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_without_a_token(backend: Backend, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, ids = logits(rng, 4, 3, 40), torch.tensor([[1, 2, 3], [4, -1, 5], [40, -2, 6], [7, 8, 9]])
    rows = torch.tensor([[0, 1, 2], [0, 9, 1], [0, 9, 0], [3, -1, 2]])
    num = torch.tensor([2, 7, 3, 3], dtype=dtype)
    out = backend.token_logprobs(*backend(x, ids), rows=backend(rows), num_tokens=backend(num), num_top=2)
    s = sk.Status
    both = s.BAD_TOKEN | s.BAD_PARAM
    flags = [[0, 0, 0], [0, 0, 0], [s.BAD_TOKEN, both, 0], [s.BAD_PARAM, s.BAD_PARAM, 0]]
    assert out.status.tolist() == flags
    there = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [0, 0, 1]]).bool()
    assert (out.rank > 0).cpu().equal(there) and (out.raw_log_prob > -math.inf).cpu().equal(there)
    for values, none in zip(out, (-math.inf, -math.inf, 0, None, -1, -math.inf, -math.inf), strict=True):
        assert none is None or (values.cpu()[~there] == none).all()
    negative = backend.token_logprobs(*backend(x, ids[:, :2].abs()), num_tokens=backend(num - 9))
    assert (negative.rank == 0).all() and (negative.status == 0).all()


def test_bad_rows_are_flagged_and_alone(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 5, 1, 1100)
    ids = torch.tensor([[3], [5], [0], [7], [7]])
    clean = backend.token_logprobs(*backend(x, ids), num_top=3)
    x[1, 0, 5], x[2] = math.nan, -math.inf
    x[3, 0, [7, 1050]] = x[4, 0, [6, 7]] = math.inf
    out = backend.token_logprobs(*backend(x, ids), num_top=3)
    s = sk.Status
    assert out.status[:, 0].tolist() == [0, s.NAN, s.EMPTY_ROW, s.INF, s.INF]
    same_bits([t[0] for t in out], [t[0] for t in clean])
    assert out.raw_log_prob[1:, 0].tolist() == [-math.inf, 0, 0, -math.inf]
    assert out.log_prob[1:, 0].tolist() == [-math.inf, 0, 0, -math.inf]
    assert out.rank[1:, 0].tolist() == [1100, 1, 1, 2]
    assert out.top_ids[2:, 0, :2].tolist() == [[0, 1], [7, 1050], [6, 7]] and out.top_ids[2, 0, 2] == 2
    certain = [[0.0, -math.inf, -math.inf]] * 3
    assert out.top_log_prob[2:, 0].tolist() == out.top_processed_log_prob[2:, 0].tolist() == certain


def test_what_is_cut_and_what_is_small(backend: Backend) -> None:
    """−inf where cut; where the probability itself is below float32, its logarithm."""
    x = torch.tensor([[[0.0, -200.0, -300.0, -0.1]]]).expand(3, 3, 4).contiguous()
    params = sk.SamplingParams(torch.tensor([0.5, 1.0, 0.0]), top_k=torch.tensor([3, 0, 0]))
    out = backend.token_logprobs(*backend(x, torch.tensor([[1, 2, 3]] * 3), params), num_top=4)
    z, z_half = math.log1p(math.exp(-0.1)), math.log1p(math.exp(-0.2))
    raw = [-200 - z, -300 - z, -0.1 - z]
    np.testing.assert_allclose(out.raw_log_prob.cpu(), [raw] * 3, rtol=1e-6)
    np.testing.assert_allclose(
        out.log_prob.cpu(), [[-400 - z_half, -math.inf, -0.2 - z_half], raw, [-math.inf] * 3], rtol=1e-6
    )
    assert out.rank.tolist() == [[3, 4, 2]] * 3 and out.top_ids.tolist() == [[[0, 3, 1, 2]] * 3] * 3
    np.testing.assert_allclose(out.top_processed_log_prob[2, 0].cpu(), [0] + [-math.inf] * 3)


@pytest.mark.parametrize("vocab", [7, 3000])
def test_a_token_does_not_depend_on_its_batch(backend: Backend, vocab: int, rng: torch.Generator) -> None:
    batch = backend.batch(70)
    x, ids = logits(rng, batch, 3, vocab), tokens(rng, batch, 3, vocab=vocab)
    whole = backend.token_logprobs(*backend(x, ids, PARAMS["all"]), num_top=2)
    for i in (0, batch // 5, batch - 1):
        one = backend.token_logprobs(*backend(x[i : i + 1], ids[i : i + 1], PARAMS["all"]), num_top=2)
        same_bits(one, [t[i : i + 1] for t in whole])


@pytest.mark.parametrize("name", ["default", "all"])
def test_widest_vocabulary(backend: Backend, name: str, rng: torch.Generator) -> None:
    vocab = backend.vocab(262144)
    x, ids = logits(rng, 1, 2, vocab, dtype=torch.bfloat16), tokens(rng, 1, 2, vocab=vocab).clamp_min(0)
    out = backend.token_logprobs(*backend(x, ids, PARAMS[name]), num_top=20)
    check(out, described(x, ids, PARAMS[name], 20))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)], ids=str)
def test_nothing_to_describe(backend: Backend, shape: tuple[int, int]) -> None:
    x = torch.zeros(shape[0], 2, 9)
    out = backend.token_logprobs(*backend(x, torch.zeros(shape, dtype=torch.int64)), num_top=2)
    assert out.rank.shape == shape and out.top_ids.shape == (*shape, 2)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_what_a_verify_step_emitted(backend: Backend, kind: str, rng: torch.Generator) -> None:
    x, u = logits(rng, 3, 5, 200), torch.rand(3, 5, generator=rng)
    drafted = x.argmax(-1)
    if kind == "chain":
        out = backend.verify_chain(*backend(x, drafted[:, :-1]), uniform_samples=backend(u), params=PARAMS["all"])
        rows = None
    else:
        tree = sk.DraftTree.from_parents([-1, 0, 0, 1, 3])
        tree_tokens = drafted.gather(1, torch.tensor([[0, 0, 1, 1, 3]] * 3))
        out = backend.verify_tree(
            backend(x), backend(tree), backend(tree_tokens), uniform_samples=backend(u), params=PARAMS["all"]
        )
        rows = torch.nn.functional.pad(out.accepted_nodes, (1, 0))
    got = backend.token_logprobs(backend(x), out.tokens, PARAMS["all"], rows=rows, num_tokens=out.num_tokens, num_top=1)
    emitted = out.tokens >= 0
    assert (got.rank > 0).equal(emitted) and (got.log_prob[emitted] > -math.inf).all() and (got.status == 0).all()


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("rows", [None, [[0, 2, 1], [1, 0, 4], [0, 1, 2]]], ids=["chain", "tree"])
def test_processed_is_what_processors_make(backend: Backend, rows: list[list[int]] | None, name: str) -> None:
    """Beside each token the tokens before it are counted, and its row's mask is meant; raw is raw."""
    rng, vocab, one, params = seeded(), 40, EACH[name], sk.SamplingParams(0.7, top_k=30)
    batch, n, width = 3, 5, 3
    requests = [one, replace(one, prompt=[3, 9], output=[]), replace(one, output=[5, 5, 7, 1], stop=[], min_tokens=0)]
    x, ids = logits(rng, batch, n, vocab), torch.randint(0, 3, (batch, width), generator=rng)
    ids[1, 1] = -1  # none: it counts as nothing
    at = torch.tensor(rows or [[0, 1, 2]] * batch)
    masks = [[one.grammar([i], vocab) if one.grammar else [True] * vocab for i in range(n)] for _ in range(batch)]
    mask = torch.stack([bits(each) for each in masks])
    out = backend.token_logprobs(
        *backend(x, ids, params), rows=None if rows is None else backend(at), num_top=6,
        processors=backend(processors(requests, mask)),
    )  # fmt: skip
    made = torch.empty(batch, width, vocab, dtype=torch.float64)
    for b, request in enumerate(requests):
        for j in range(width):
            before = [token for token in ids[b, :j].tolist() if token >= 0]
            allowed = np.array(masks[b][at[b, j]])
            row = replace(request, grammar=None).row(x[b, at[b, j]], before)
            made[b, j] = torch.from_numpy(np.where(allowed, row, -math.inf))
    given = x.gather(1, at[..., None].expand(-1, -1, vocab))
    raw, _, rank, top, top_raw, _ = described(given, ids.clamp_min(0), params, 6)
    with np.errstate(divide="ignore"):
        law = np.log(float64_law(made, params))
    own, top_law = (np.take_along_axis(law, i, -1) for i in (ids.clamp_min(0).numpy()[..., None], top))
    there = ids.numpy() >= 0
    check(
        sk.TokenLogprobs(*(t.cpu()[torch.from_numpy(there)] for t in out)),
        tuple(v[there] for v in (raw, own[..., 0], rank, top, top_raw, top_law)),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [33, 1025, 4097])
@pytest.mark.parametrize("params", [sk.SamplingParams(), sk.SamplingParams(0.8, 9, 0.9, 0.01), sk.SamplingParams(0.0)])
def test_processed_is_the_reference(
    backend: Backend, dtype: torch.dtype, vocab: int, params: sk.SamplingParams, rng: torch.Generator
) -> None:
    vocab = backend.vocab(vocab)
    x, ids = logits(rng, 3, 4, vocab, dtype=dtype), tokens(rng, 3, 5, vocab=vocab)
    x[0, 0, 0], x[1, 1, 1], x[2, 2, 1], ids[2, :3] = math.nan, math.inf, -math.inf, torch.tensor([1, vocab, 2**40])
    rows, num = torch.randint(0, 4, (3, 5), generator=rng), torch.tensor([5, 3, 4])
    given = of_any_kind(rng, 3, (3, 4), vocab)
    expected = sk.token_logprobs(
        x, ids, params, processors=given, rows=rows, num_tokens=num, num_top=7, backend="reference"
    )
    out = backend.token_logprobs(
        *backend(x, ids, params), processors=backend(given), rows=backend(rows), num_tokens=backend(num),
        num_top=7,
    )  # fmt: skip
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
    plain = backend.token_logprobs(*backend(x, ids, params), rows=backend(rows), num_tokens=backend(num), num_top=7)
    for name in ("raw_log_prob", "rank", "top_ids", "top_log_prob"):
        same_bits([getattr(plain, name)], [getattr(out, name)])
    assert ((plain.status | out.status) == out.status).all()
    assert not torch.equal(plain.top_processed_log_prob, out.top_processed_log_prob)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_what_was_emitted_with_processors_was_possible(backend: Backend, kind: str, rng: torch.Generator) -> None:
    """Barred after it was drafted once, an id is not emitted twice; the step's own processors say how likely it was."""
    x = torch.zeros(2, 4, 12)
    x[..., 5] = 9.0
    request = Request(prompt=[1], presence=40.0)
    given, u = backend(processors([request])), torch.rand(2, 4, generator=rng)
    drafted = torch.tensor([[5, 3, 5], [5, 5, 5]])
    if kind == "chain":
        out = backend.verify_chain(*backend(x, drafted), uniform_samples=backend(u), processors=given)
        rows = None
    else:
        tree = sk.DraftTree.from_parents([-1, 0, 1, 2])
        nodes = torch.nn.functional.pad(drafted, (1, 0))
        out = backend.verify_tree(*backend(x, tree, nodes), uniform_samples=backend(u), processors=given)
        rows = torch.nn.functional.pad(out.accepted_nodes, (1, 0))
    got = backend.token_logprobs(backend(x), out.tokens, rows=rows, num_tokens=out.num_tokens, processors=given)
    assert out.tokens[:, 0].tolist() == [5, 5] and (out.num_tokens > 1).all()
    np.testing.assert_allclose(got.raw_log_prob[:, 0].cpu(), -math.log(1 + 11 * math.exp(-9)), atol=1e-5)
    np.testing.assert_allclose(got.log_prob[:, 0].cpu(), -math.log(1 + 11 * math.exp(-9)), atol=1e-5)
    np.testing.assert_allclose(got.log_prob[:, 1].cpu(), -math.log(11), rtol=1e-4)  # 5 was emitted before


def test_ids_and_rows_may_have_32_bits(backend: Backend) -> None:
    x, tokens, rows = logits(seeded(), 2, 3, 50), torch.tensor([[4, -1], [7, 49]]), torch.tensor([[2, -1], [1, 0]])
    wide = backend.token_logprobs(backend(x), backend(tokens), rows=backend(rows), num_top=2)
    narrow = backend.token_logprobs(backend(x), backend(tokens.int()), rows=backend(rows.int()), num_top=2)
    same_bits(wide, narrow)


GOOD = {"logits": torch.zeros(4, 3, 9), "tokens": torch.zeros(4, 3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [1.0, 2.0]}, TypeError, "token_logprobs: logits must be a tensor, got list"),
        ({"logits": torch.zeros(4, 9)}, ValueError, "token_logprobs: logits must be [batch, n >= 1, vocab], got"),
        ({"logits": torch.zeros(4, 0, 9)}, ValueError, "token_logprobs: logits must be [batch, n >= 1, vocab], got"),
        ({"logits": torch.zeros(4, 9, 3).mT}, ValueError, "token_logprobs: logits must be contiguous in its last"),
        ({"tokens": torch.zeros(4, 3)}, TypeError, "token_logprobs: tokens must be int64 or int32, got float32"),
        ({"tokens": torch.zeros(3, 3).long()}, ValueError, "token_logprobs: tokens must be [batch=4, width=3], got"),
        ({"tokens": torch.zeros(4).long()}, ValueError, "token_logprobs: tokens must be [batch=4, width=3], got [4]"),
        (
            {"tokens": torch.zeros(4, 5).long()}, ValueError,
            "token_logprobs: tokens must be [batch=4, width <= n=3] where no rows are given, got [4, 5]",
        ),
        ({"rows": torch.zeros(4, 2).long()}, ValueError, "token_logprobs: rows must be [batch=4, width=3], got [4, 2]"),
        ({"rows": torch.zeros(4, 3)}, TypeError, "token_logprobs: rows must be int64 or int32, got float32"),
        ({"num_tokens": torch.zeros(3).int()}, ValueError, "token_logprobs: num_tokens must be [batch=4], got [3]"),
        ({"num_top": 21}, ValueError, "token_logprobs: num_top must be in [0, 20], got 21"),
        ({"num_top": -1}, ValueError, "token_logprobs: num_top must be in [0, 20], got -1"),
        ({"num_top": True}, TypeError, "token_logprobs: num_top must be an integer, got bool"),
        ({"processors": 3}, TypeError, "token_logprobs: processors must be a Processors or None, got int"),
        (
            {"processors": sk.Processors(token_bitmask=torch.zeros(4, 2, 1).int())}, ValueError,
            "token_logprobs: processors.token_bitmask must be [batch=4, n=3, words=1], got [4, 2, 1]",
        ),
        ({"params": 0.7}, TypeError, "token_logprobs: params must be a SamplingParams or None, got float"),
        ({"backend": "fastest"}, ValueError, "token_logprobs: backend must be one of"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.token_logprobs, GOOD, change, error, message)
