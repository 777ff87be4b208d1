"""verify_packed on every backend: bit for bit what verify_chain gives, without padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.inputs import DTYPES, refuses, same_bits, strided, tensors
from python_tests.support import Backend
from specdec_kernels import laws

OP = "verify_chain"  # of which it is a form
SIGNATURE = (
    ["target_logits", "draft_tokens", "draft_logits"],
    ["cu_num_draft_tokens", "max_num_draft_tokens", "uniform_samples", "noise_keys", "seeds", "step", "positions",
     "params", "draft_params", "processors", "acceptance", "target_law", "target_probs", "draft_probs", "draft_index",
     "draft_stats",
     "draft_token_map", "num_draft_tokens", "bonus_tokens", "eos_token_ids", "return_acceptance", "backend"],
)  # fmt: skip
CALLS = {
    "token": lambda: small("token", "probs"),
    "seeds": lambda: {**small("token", "full", seeds=torch.arange(5), step=7), "uniform_samples": None},
    "block": lambda: small("block", "stats", return_acceptance=True),
    "draft_index": lambda: {
        **small("token", "full"),
        "draft_logits": torch.zeros(6, 4, 40),
        "draft_index": torch.arange(5),
    },
    "target_probs": lambda: chains.with_target_probs(small("token", "probs"), sk.SamplingParams()),
    "bonus_tokens": lambda: chains.packed(
        chains.with_bonus(chains.small("block", "probs"), torch.arange(5).int()), torch.arange(5) % 4
    ),
    "cascade": lambda: small("block", "stats", laws.TokenV1(0.3, bonus="cascade")),
}
FIELDS = ("tokens", "num_accepted", "num_tokens", "status")


def small(*what: Any, **more: Any) -> chains.Arguments:
    return chains.packed(chains.small(*what, **more), torch.arange(5) % 4)


def run(backend: Backend, arguments: chains.Arguments, **more: Any) -> sk.VerifyOutput:
    out: sk.VerifyOutput = backend.verify_packed(**chains.on(backend, {**arguments, **more}))
    return out


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 1200])
def test_is_the_chains(backend: Backend, vocab: int, dtype: torch.dtype, acceptance: str, kind: str) -> None:
    rng = torch.Generator().manual_seed(vocab)
    n = backend.batch(20)
    params = sk.SamplingParams(torch.rand(n, generator=rng).round(decimals=1), top_p=0.95)
    arguments = chains.make(
        rng, n, 4, vocab, kind=kind, acceptance=acceptance, dtype=dtype, params=params,
        draft_params=sk.SamplingParams(0.9, top_k=torch.randint(0, 20, (n,), generator=rng)),
        by=backend,
    )  # fmt: skip
    arguments["eos_token_ids"] = torch.tensor([1])
    arguments["draft_tokens"][torch.rand(n, 4, generator=rng) < 0.05] = -1
    counts = torch.randint(0, 5, (n,), generator=rng)
    counts[:2] = torch.tensor([4, 0])
    chain = backend.verify_chain(
        **chains.on(backend, {**arguments, "num_draft_tokens": counts}), return_acceptance=True
    )
    flat = chains.packed(arguments, counts)
    out = run(backend, flat, return_acceptance=True)
    for field in (*FIELDS, "acceptance"):
        same_bits(getattr(out, field), getattr(chain, field))
    shorter = torch.minimum(counts, torch.randint(-1, 5, (n,), generator=rng))
    chain = backend.verify_chain(**chains.on(backend, {**arguments, "num_draft_tokens": shorter}))
    out = run(backend, flat, num_draft_tokens=shorter.int())
    for field in FIELDS:
        same_bits(getattr(out, field), getattr(chain, field))


def test_the_widest_batch(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(3)
    batch = backend.batch(1024)
    arguments = chains.make(rng, batch, 3, 40)
    counts = torch.randint(0, 4, (batch,), generator=rng)
    chain = backend.verify_chain(**chains.on(backend, {**arguments, "num_draft_tokens": counts}))
    out = run(backend, chains.packed(arguments, counts))
    for field in FIELDS:
        same_bits(getattr(out, field), getattr(chain, field))


def test_no_draft_at_all(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(5)
    arguments = chains.make(rng, 3, 2, 40)
    out = run(backend, {**chains.packed(arguments, torch.zeros(3, dtype=torch.int64)), "max_num_draft_tokens": 0})
    assert out.tokens.shape == (3, 1) and (out.num_tokens == 1).all() and (out.status == 0).all()
    wide = run(backend, chains.packed(arguments, torch.zeros(3, dtype=torch.int64)))
    same_bits(wide.tokens[:, :1].contiguous(), out.tokens)


def test_a_wider_result_is_padded(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(7)
    arguments = chains.packed(chains.make(rng, 9, 3, 40), torch.randint(0, 4, (9,), generator=rng))
    narrow = run(backend, arguments)
    wide = run(backend, {**arguments, "max_num_draft_tokens": 60})
    same_bits(wide.tokens[:, :4].contiguous(), narrow.tokens)
    assert (wide.tokens[:, 4:] == -1).all()


@pytest.mark.short(cases=1, emulated=1)
@pytest.mark.parametrize("processed", [False, True], ids=["plain", "processors"])
def test_a_bound_that_no_segment_comes_near_costs_only_placeholders(backend: Backend, processed: bool) -> None:
    """What is kept while the op runs is as wide as the tokens that there are: for all positions of the bound, with the
    larger vocabulary, it would take more than 100 gigabytes.
    """
    walks = backend.strategy is not None and (processed or backend.strategy in ("walk", "cluster"))
    at_once = walks or not backend.interpreted  # else a program or block runs for every position of the bound
    batch, bound = 8, 2**20 - 1 if at_once else 99
    rng = torch.Generator().manual_seed(8)
    for vocab, idle in ((128256 if at_once else 2400, True), (1200, False)):
        arguments = chains.packed(chains.make(rng, batch, 2, vocab), torch.tensor([0, 0, 2, 0, 0, 0, 0, 0]))
        if idle:  # nothing is read
            arguments["num_draft_tokens"] = torch.full((batch,), -1)
        if processed:
            counts = sk.TokenCounts(arguments["draft_tokens"].expand(batch, -1), 4)
            arguments["processors"] = backend(sk.Processors(frequency_penalty=0.5, token_counts=counts))
        narrow = run(backend, {**arguments, "max_num_draft_tokens": 2}, return_acceptance=True)
        wide = run(backend, {**arguments, "max_num_draft_tokens": bound}, return_acceptance=True)
        assert wide.tokens.shape == (batch, bound + 1) and wide.acceptance.shape == (batch, bound)
        same_bits([wide.tokens[:, :3], wide.acceptance[:, :2]], [narrow.tokens, narrow.acceptance])
        same_bits([wide.num_tokens, wide.status], [narrow.num_tokens, narrow.status])
        assert (wide.tokens[:, 3:] == -1).all() and (wide.acceptance[:, 2:] == -1).all()
        assert (narrow.status == 0).all() and (narrow.num_tokens == 0).all() == idle
        assert (narrow.acceptance[2] < 0).all() == idle


def test_a_bound_without_any_token(backend: Backend) -> None:
    """The placeholders are written although no position is anyone's."""
    target = backend(torch.zeros(2, 40))
    out = run(
        backend,
        {
            "target_logits": target, "draft_tokens": torch.zeros(0).long(), "max_num_draft_tokens": 700,
            "cu_num_draft_tokens": torch.zeros(3).int(), "uniform_samples": torch.full((2,), 0.5),
        },
        return_acceptance=True,
    )  # fmt: skip
    assert (out.tokens[:, 1:] == -1).all() and (out.tokens[:, 0] == 20).all() and (out.acceptance == -1).all()
    assert out.acceptance.shape == (2, 700)


def test_a_segment_longer_than_the_width_is_cut_and_flagged(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(11)
    arguments = chains.make(rng, 6, 4, 40)
    counts = torch.tensor([4, 1, 3, 2, 4, 0])
    out = run(backend, {**chains.packed(arguments, counts), "max_num_draft_tokens": 2})
    bad = sk.Status.BAD_PARAM
    assert out.status.tolist() == [bad, 0, bad, 0, bad, 0]
    chain = backend.verify_chain(**chains.on(backend, {**arguments, "num_draft_tokens": counts.clamp_max(2)}))
    same_bits(out.tokens, chain.tokens[:, :3].contiguous())


@pytest.mark.parametrize(
    ("cu", "broken"),
    [
        ([0, 3, 2, 6, 8], [1]),  # decreasing
        ([0, 3, 5, 9, 8], [2, 3]),  # past the end, and back
        ([-1, 3, 5, 6, 8], [0]),
        ([0, 3, 5, 6, 2**31 - 1], [3]),
        ([-(2**31), 3, 5, 6, 8], [0]),
        ([2**31 - 1, -(2**31), 5, 6, 8], [0, 1]),
    ],
)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_broken_segments_idle_and_are_flagged(
    backend: Backend, acceptance: str, cu: list[int], broken: list[int]
) -> None:
    """Nothing is read for them; the others are as they were."""
    rng = torch.Generator().manual_seed(13)
    arguments = chains.packed(chains.make(rng, 4, 3, 40, acceptance=acceptance), torch.tensor([3, 2, 1, 2]))
    good = run(backend, arguments)
    out = run(backend, {**arguments, "cu_num_draft_tokens": torch.tensor(cu, dtype=torch.int32)})
    original = [0, 3, 5, 6, 8]
    for b in range(4):
        if b in broken:
            assert out.status[b] == sk.Status.BAD_PARAM and out.num_tokens[b] == 0 and (out.tokens[b] == -1).all()
        elif cu[b : b + 2] == original[b : b + 2]:
            same_bits(out.tokens[b], good.tokens[b])
            assert out.status[b] == 0


def shares_rows(backend: Backend) -> bool:
    """CUDA's split layouts keep what they find of rows by the rows' number among all: of segments that overlap, which
    only a malformed batch has, that of one.
    """
    return backend.name == "cuda" or backend.strategy not in (None, "walk")


@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_segments_that_overlap_have_their_own_numbers(backend: Backend, acceptance: str) -> None:
    if shares_rows(backend):
        pytest.skip(str(shares_rows.__doc__))
    rng = torch.Generator().manual_seed(31)
    arguments: dict[str, Any] = {
        "target_logits": torch.randn(9, 40, generator=rng), "draft_tokens": torch.tensor([7, 7, 3, 7, 7, 7]),
        "cu_num_draft_tokens": torch.tensor([0, 5, 2, 6], dtype=torch.int32), "max_num_draft_tokens": 5,
        "acceptance": acceptance, "seeds": torch.tensor([4, 5, 6]),
    }  # fmt: skip
    arguments |= {"positions": torch.arange(9)} if acceptance == "match" else {"draft_logits": torch.zeros(6, 40)}
    for step in range(4):  # whichever is written last
        expected = sk.verify_packed(**arguments, step=step, backend="reference")
        out = run(backend, arguments, step=step)
        for field in FIELDS:
            same_bits(getattr(out, field), backend(getattr(expected, field)))
        assert out.status.tolist() == [0, int(sk.Status.BAD_PARAM), 0]


@pytest.mark.parametrize("acceptance", ["token", "block", "greedy"])
def test_processors_count_what_a_segment_has_itself(backend: Backend, acceptance: str) -> None:
    """Also where segments overlap, or the one before is broken."""
    vocab, rng = 40, torch.Generator().manual_seed(31)
    mask = torch.randint(-(2**31), 2**31, (9, 2), generator=rng).int() | torch.tensor(1 << 3 | 1 << 7).int()
    given = sk.Processors(
        repetition_penalty=1.5, presence_penalty=torch.tensor([3.0, 9.0, 2.5]), stop_token_ids=[9],
        min_tokens=torch.tensor([2, 0, 3]), token_bitmask=mask,
        token_counts=sk.TokenCounts(torch.tensor([[1, 2], [3, 7], [5, 6]]), 3),
    )  # fmt: skip
    target = torch.randn(9, vocab, generator=rng)
    target[:, [3, 7, 9]] += torch.tensor([9.0, 9.0, 6.0])
    arguments: dict[str, Any] = {
        "target_logits": target, "draft_tokens": torch.tensor([7, 7, 3, 7, 7, 7]), "acceptance": acceptance,
        "max_num_draft_tokens": 5,
    }  # fmt: skip
    if acceptance != "greedy":
        arguments["draft_logits"] = target[:6] + torch.randn(6, vocab, generator=rng)
        arguments["uniform_samples"] = torch.rand(9, generator=rng)
    bad = int(sk.Status.BAD_PARAM)
    cases = [([0, 9, 3, 6], [bad, bad, 0]), ([0, 5, 2, 6], [0, bad, 0])]
    for cu, flags in cases[:1] if shares_rows(backend) else cases:
        arguments["cu_num_draft_tokens"] = torch.tensor(cu, dtype=torch.int32)
        expected = sk.verify_packed(**arguments, processors=given, backend="reference")
        out = run(backend, arguments, processors=backend(given))
        for field in FIELDS:
            same_bits(getattr(out, field), backend(getattr(expected, field)))
        assert out.status.tolist() == flags


def test_no_sequence_at_all(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(5)
    arguments = chains.packed(chains.make(rng, 1, 3, 40, kind="one_hot"), torch.tensor([3]))
    arguments |= {"cu_num_draft_tokens": torch.zeros(1, dtype=torch.int32), "target_logits": torch.zeros(3, 40)}
    arguments["uniform_samples"] = torch.full((3,), 0.5)
    for given in (None, sk.Processors(banned_ids=[1]), sk.Processors(token_bitmask=torch.zeros(3, 2).int())):
        out = run(backend, arguments, processors=backend(given))
        assert out.tokens.shape == (0, 4) and out.status.shape == (0,)


@pytest.mark.parametrize(
    ("cu", "flagged"),
    [([1, 3, 5, 8], [0]), ([0, 3, 5, 7], [2]), ([2, 3, 5, 5], [0, 2]), ([0, 3, 5, 8], []), ([0, 0, 0, 0], [2])],
)
def test_draft_tokens_of_no_sequence_are_flagged(backend: Backend, cu: list[int], flagged: list[int]) -> None:
    rng = torch.Generator().manual_seed(14)
    arguments = chains.packed(chains.make(rng, 3, 3, 40), torch.tensor([3, 2, 3]))
    out = run(backend, {**arguments, "cu_num_draft_tokens": torch.tensor(cu, dtype=torch.int32)})
    assert [b for b in range(3) if out.status[b] & sk.Status.BAD_PARAM] == flagged


def test_bad_rows_are_flagged_and_neighbours_unaffected(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(17)
    arguments = chains.packed(chains.make(rng, 4, 3, 1100), torch.tensor([3, 2, 1, 2]))
    good = run(backend, arguments)
    arguments["target_logits"][4, 5] = math.nan  # the first row of sequence 1
    arguments["draft_tokens"][5] = 1100  # the only token of sequence 2
    out = run(backend, arguments)
    assert out.status.tolist() == [0, sk.Status.NAN, sk.Status.BAD_TOKEN, 0]
    for b in (0, 3):
        same_bits(out.tokens[b], good.tokens[b])


def test_strides_do_not_matter_and_inputs_are_untouched(backend: Backend) -> None:
    rng = torch.Generator().manual_seed(19)
    arguments = chains.on(backend, chains.packed(chains.make(rng, 5, 3, 1100), torch.tensor([3, 2, 0, 1, 3])))
    dense = backend.verify_packed(**arguments)
    for name in ("target_logits", "draft_logits"):
        arguments[name] = strided(arguments[name])
    arguments["draft_tokens"] = arguments["draft_tokens"].repeat_interleave(2)[::2]
    arguments["uniform_samples"] = arguments["uniform_samples"].repeat_interleave(3)[::3]
    before = [t.clone() for t in tensors(arguments)]
    same_bits(dense, backend.verify_packed(**arguments))
    same_bits(before, tensors(arguments))


GOOD: dict[str, Any] = {
    "target_logits": torch.zeros(9, 7), "draft_tokens": torch.zeros(6).long(), "draft_logits": torch.zeros(6, 7),
    "cu_num_draft_tokens": torch.tensor([0, 2, 5, 6], dtype=torch.int32), "max_num_draft_tokens": 3,
    "uniform_samples": torch.full((9,), 0.5),
}  # fmt: skip
CU = GOOD["cu_num_draft_tokens"]
STATS = sk.RowStats(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int32))
MATCH: dict[str, Any] = {"acceptance": "match", "uniform_samples": None}
MANY: dict[str, Any] = {
    "target_logits": torch.zeros(2048, 7), "draft_tokens": torch.zeros(0).long(), "draft_logits": None,
    "cu_num_draft_tokens": torch.zeros(2049).int(), "max_num_draft_tokens": 2**20 - 1, "acceptance": "greedy",
    "uniform_samples": None,
}  # fmt: skip
V, T = ValueError, TypeError
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target_logits": 3}, T, "target_logits must be a tensor, got int"),
    ({"target_logits": torch.zeros(8, 7)}, V, "target_logits must be [total + batch=9, vocab=7], got [8, 7]"),
    ({"target_logits": torch.zeros(3, 3, 7)}, V, "target_logits must be [total + batch=9, vocab=7], got [3, 3, 7]"),
    ({"target_logits": torch.zeros(9, 7).double()}, T, "target_logits must be float32"),
    ({"target_logits": torch.zeros(7, 9).T}, V, "target_logits must be contiguous in its last dimension"),
    ({"draft_tokens": torch.zeros(3, 2).long()}, V, "draft_tokens must be [total], got [3, 2]"),
    ({"draft_tokens": torch.zeros(6)}, T, "draft_tokens must be int64 or int32, got float32"),
    ({"draft_tokens": torch.zeros(6, device="meta").long()}, V, "draft_tokens must be on cpu, got meta"),
    ({"draft_logits": torch.zeros(9, 7)}, V, "draft_logits must be [total=6, vocab=7], got [9, 7]"),
    ({"draft_probs": torch.zeros(6, 7)}, V, "give draft_logits or draft_probs, got both"),
    ({"draft_stats": STATS}, V, "draft_stats.values must be [total=6, values=6], got [5, 6]"),
    ({"cu_num_draft_tokens": CU.long()}, T, "cu_num_draft_tokens must be int32, got int64"),
    ({"cu_num_draft_tokens": [0, 1]}, T, "cu_num_draft_tokens must be a tensor, got list"),
    ({"cu_num_draft_tokens": CU[None]}, V, "cu_num_draft_tokens must be [batch + 1], got [1, 4]"),
    ({"cu_num_draft_tokens": CU[:0]}, V, "cu_num_draft_tokens must be [batch + 1], got [0]"),
    ({"cu_num_draft_tokens": CU[:3]}, V, "target_logits must be [total + batch=8, vocab=7], got [9, 7]"),
    ({"cu_num_draft_tokens": CU.to("meta")}, V, "cu_num_draft_tokens must be on cpu, got meta"),
    ({"max_num_draft_tokens": -1}, V, "max_num_draft_tokens must be in [0, 1048575], got -1"),
    ({"max_num_draft_tokens": 2**20}, V, "max_num_draft_tokens must be in [0, 1048575]"),
    ({"max_num_draft_tokens": 3.0}, T, "max_num_draft_tokens must be an integer, got float"),
    ({"max_num_draft_tokens": True}, T, "max_num_draft_tokens must be an integer, got bool"),
    (MANY, V, "batch * (max_num_draft_tokens + 1) must be < 2**31, got 2048 * 1048576"),
    ({"uniform_samples": None}, V, "acceptance='token' needs uniform_samples"),
    ({"uniform_samples": torch.zeros(6)}, V, "uniform_samples must be [total + batch=9], got [6]"),
    ({"uniform_samples": torch.zeros(9).half()}, T, "uniform_samples must be float64 or float32, got float16"),
    (MATCH, V, "acceptance='match' needs noise_keys"),
    ({**MATCH, "noise_keys": torch.zeros(6).long()}, V, "noise_keys must be [total + batch=9], got [6]"),
    ({"params": sk.SamplingParams(torch.ones(6))}, V, "params.temperature must be [batch=3], got [6]"),
    ({"num_draft_tokens": torch.ones(6).int()}, V, "num_draft_tokens must be [batch=3], got [6]"),
    ({"eos_token_ids": torch.zeros(1)}, T, "eos_token_ids must be int64, got float32"),
    ({"target_law": "chow"}, T, "target_law must be None or one of sk.laws, got str"),
    ({"target_law": sk.laws.Opt(0.1, bonus="cascade")}, V, "draft_logits must be [total + batch=9, vocab=7], got [6"),
    ({"acceptance": "best"}, V, "acceptance must be one of"),
    ({"backend": "x"}, V, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[r[2][:60] for r in REFUSED])
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.verify_packed, GOOD, change, error, f"verify_packed: {message}")


def test_the_good_arguments_of_the_refusals_are_good(backend: Backend) -> None:
    assert (run(backend, GOOD).status == 0).all()
