"""Every provider does the work it is timed for: lawful tokens, equal ones where nothing is drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.stats
import torch

import specdec_kernels as sk
from bench import inputs
from bench.inputs import Case
from bench.providers import PROVIDERS, hf
from bench.providers.eager import law, narrow_warp, warp
from bench.registry import REGISTRY
from bench.run import build
from python_tests.ops.inputs import OPS
from specdec_kernels.testing import float64_target_law

VOCAB = 96
PLAIN = sk.SamplingParams()
FAST = [name for name in PROVIDERS if name != "compile"]  # compiling takes seconds a case: one test has it


def cases(op: str) -> list[Case]:
    """The registry's cases at a tiny size, each law once."""
    return list({c.name: replace(c, cache="cold") for c in REGISTRY[op].cases([VOCAB], [3])}.values())


def a_set(case: Case) -> object:
    return REGISTRY[case.op].make(case, torch.Generator().manual_seed(1))


def test_registry_has_every_op() -> None:
    assert set(REGISTRY) == set(OPS)


@pytest.mark.parametrize("op", REGISTRY)
def test_every_case_has_this_package_and_a_peer(op: str) -> None:
    for case in cases(op):
        offered = build(case, FAST)
        assert "reference" in offered
        # Block verification of a tree is nobody else's.
        assert any(name.startswith("eager") for name in offered) or case.acceptance == "traversal"


@pytest.mark.parametrize("case", cases("verify_tree"), ids=lambda case: case.name)
def test_trees_emit_a_path_and_one_token_in_the_targets_law(case: Case) -> None:
    """Every provider: the first token of many steps, over their roots' laws (typical acceptance has another)."""
    case = replace(case, vocab=7, batch=3000)
    step = REGISTRY["verify_tree"].make(case, torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    P = law(step.target_logits[:, 0], case.params).double()
    if case.greedy:
        P = torch.nn.functional.one_hot(step.target_logits[:, 0].argmax(-1), 7).double()
    for name, call in build(case, FAST).items():
        tokens, accepted = call(step)
        assert tokens.shape == (3000, step.tree.max_depth + 1) and 0.3 < accepted.float().mean() < 3, name
        assert torch.equal((tokens >= 0).sum(-1), accepted + 1), name
        node = torch.zeros(3000, dtype=torch.int64)
        for d in range(step.tree.max_depth):  # down the tree along the accepted tokens
            is_it = (step.tree.parents == node[:, None]) & (step.node_tokens == tokens[:, d, None])
            inside = d < accepted
            assert is_it[inside].any(-1).all(), name
            node = torch.where(inside, is_it.int().argmax(-1), node)
        if case.acceptance != "typical":
            off = tokens[:, 0].bincount(minlength=7) - P.sum(0)
            assert (off.abs() <= 5 * (P * (1 - P)).sum(0).sqrt()).all(), name


@pytest.mark.parametrize("op", ["verify_chain", "verify_packed"])
@pytest.mark.parametrize("name", FAST)
def test_verify_emits_the_accepted_prefix_and_one_token(op: str, name: str) -> None:
    for case in cases(op):
        call = build(case, [name]).get(name)
        if call is None:
            continue
        step = a_set(case)
        tokens, accepted = call(step)
        drafted = step.draft_tokens
        if op == "verify_packed":
            drafted = drafted.split(step.cu_num_draft_tokens.diff().tolist())
        assert tokens.shape == (case.batch, case.num_draft + 1)
        for row, count, draft in zip(tokens.tolist(), accepted.tolist(), drafted, strict=True):
            assert row[:count] == draft.tolist()[:count]
            assert 0 <= row[count] < case.vocab
            assert set(row[count + 1 :]) <= {-1}
        assert REGISTRY[op].bytes_read(case, step, (tokens, accepted)) <= step.target_logits.nbytes


def greedy_outputs(names: list[str]) -> dict[str, tuple[list[int], list[int]]]:
    case = next(c for c in cases("verify_chain") if c.greedy)
    case = replace(case, batch=16)
    step = a_set(case)
    return {n: tuple(t.tolist() for t in call(step)) for n, call in build(case, names).items()}


def test_greedy_outputs_are_equal() -> None:
    outputs = greedy_outputs(FAST)
    assert {"reference", "eager", "transformers"} <= set(outputs)
    first = outputs["reference"]
    assert 0 < sum(first[1]) < 16 * 5
    for name, output in outputs.items():
        assert output == first, name


@pytest.mark.long
@pytest.mark.slow
def test_compiled_outputs_are_equal() -> None:
    outputs = greedy_outputs(["reference", "compile"])
    assert outputs["compile"] == outputs["reference"]


def sampled() -> list[tuple[str, str]]:
    """The case and provider of every way there is to verify with coins."""
    drawn = [c for c in cases("verify_chain") if not (c.greedy or c.drawn_before)]
    return [(c.name, name) for c in drawn for name in build(c, FAST)]


@pytest.mark.short(cases=10)
@pytest.mark.parametrize(("rule", "name"), sampled())
def test_first_token_has_the_target_law(rule: str, name: str) -> None:
    """Many sequences with one and the same pair of laws: the first token emitted is a draw from the target's."""
    torch.manual_seed(7)
    case = next(c for c in cases("verify_chain") if c.name == rule)
    count = 2500 if name == "transformers" else 20000  # it verifies one sequence at a time
    params = sk.SamplingParams(temperature=0.8, top_k=5, top_p=0.9) if rule == "truncated" else case.params
    case = replace(case, vocab=7, batch=count, num_draft=2, params=params)
    call = build(case, [name])[name]
    target = torch.randn(1, 3, 7).expand(count, 3, 7)
    draft = torch.randn(1, 2, 7).expand(count, 2, 7)
    if case.one_hot:
        tokens, draft, stats, probs = torch.tensor([[2, 4]]).expand(count, 2), None, None, None
    else:
        probs = law(draft, params)
        tokens, stats = torch.multinomial(probs.flatten(0, 1), 1).view(count, 2), sk.row_stats(draft, params)
    seeds = torch.randint(0, 2**62, (count,))
    target_probs = law(target, params) if case.of_probs else None
    step = inputs.ChainInputs(
        target, tokens, draft, stats, probs, seeds, torch.rand(count, 3), target_probs=target_probs
    )
    first, accepted = call(step)
    assert 0 < accepted.float().mean() < 2 or case.target_law is not None  # a cascade may accept everything
    expected = law(target[0, 0], params).double()
    if case.target_law is not None:
        rows = (law(t[0, 0], p).double().numpy() for p in (params, PLAIN) for t in (target, draft))
        expected = torch.from_numpy(float64_target_law(case.target_law, *rows))
    possible = expected > 0
    seen = first[:, 0].bincount(minlength=7)
    assert seen[~possible].sum() == 0
    assert scipy.stats.chisquare(seen[possible], count * expected[possible] / expected.sum()).pvalue > 1e-4


def test_transformers_is_given_the_packed_draft_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it keeps it from drafting: a timed call warps the target's rows alone."""
    case = replace(next(c for c in cases("verify_packed") if c.name == "truncated"), batch=60)
    case = replace(case, params=sk.SamplingParams(0.8, 6, 0.7))
    step = a_set(case)
    warp, warped = hf.warpers(case.params), []

    def counting(scores: torch.Tensor) -> torch.Tensor:
        warped.append(scores.clone())
        return warp(scores)

    monkeypatch.setattr(hf, "warpers", lambda params: counting)
    torch.manual_seed(5)
    tokens, accepted = hf.verify_packed(case)(step)
    assert torch.equal(torch.cat(warped), step.target_logits)
    torch.manual_seed(5)
    cu = step.cu_num_draft_tokens.tolist()
    for b, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        target = step.target_logits[None, start + b : end + b + 1]
        draft = hf.prepare(step.draft_logits[None, start:end], warp)
        wanted, count = hf.verify_one(target, step.draft_tokens[None, start:end], draft, warp, False)
        assert tokens[b, : count + 1].tolist() == wanted[0].tolist() and accepted[b] == count


@pytest.mark.parametrize("params", [PLAIN, sk.SamplingParams(0.8, 50, 0.9), sk.SamplingParams(0.8, 6, 0.7)])
def test_warps_are_the_reference_law(params: sk.SamplingParams) -> None:
    logits = inputs.rows(40, VOCAB, torch.Generator().manual_seed(3))
    expected = sk.warp_probs(logits, params, backend="reference")
    torch.testing.assert_close(law(logits, params), expected, atol=1e-6, rtol=1e-4)
    if params.top_k:
        torch.testing.assert_close(narrow_warp(logits, params), warp(logits, params))
    case = Case("warp_probs", "any", VOCAB, 40, params=params)
    step = inputs.RowInputs(logits[:, None], torch.zeros(40, dtype=torch.int64), torch.zeros(40, 1))
    calls = build(case, FAST)
    assert {"eager", "transformers", "reference"} <= set(calls)
    for call in calls.values():
        torch.testing.assert_close(call(step)[:, 0], expected, atol=1e-6, rtol=1e-4)


def test_every_provider_masks_the_same() -> None:
    case = next(c for c in cases("mask_logits_") if c.name == "truncated")
    step = a_set(case)
    calls = build(case, FAST)
    assert {"reference", "eager"} <= set(calls)
    expected = torch.where(law(step.logits, case.params) > 0, step.logits, -torch.inf)
    assert expected.isinf().any()
    for name, call in calls.items():
        out = call(step)
        assert torch.equal(out if name == "eager" else out[1], expected), name


@pytest.mark.parametrize("params", [PLAIN, sk.SamplingParams(0.8, 6, 0.7)])
def test_eager_statistics_are_row_stats(params: sk.SamplingParams) -> None:
    case = Case("row_stats", "any", VOCAB, 4, params=params)
    rows = a_set(case)
    calls = build(case, ["eager", "reference"])
    stats, eager = calls["reference"](rows), calls["eager"](rows)
    wanted = stats.max, stats.argmax, stats.cutoff, stats.log_normalizer, stats.raw_log_normalizer, stats.raw_entropy
    for got, expected in zip(eager, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", ["shard_stats", "merge_shards", "shard_draw"])
def test_eager_shards_are_the_ops(op: str) -> None:
    case = next(c for c in cases(op) if c.name == "T=1")
    step = a_set(replace(case, vocab=5000))
    calls = build(replace(case, vocab=5000), ["eager", "reference"])
    ours, eager = calls["reference"](step), calls["eager"](step)
    if op == "merge_shards":
        ours = (ours[0][..., 0], ours[0][..., 3], ours[1])
    for got, expected in zip(eager, ours, strict=False):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_eager_likelihoods_are_token_logprobs() -> None:
    for case in cases("token_logprobs"):
        step = a_set(case)
        calls = build(case, ["eager", "reference"])
        raw, law, rank, _, *top = calls["reference"](step)
        for got, expected in zip(calls["eager"](step), (raw, law, rank, *top), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5, check_dtype=False)


def test_every_provider_counts_the_same() -> None:
    case = next(c for c in cases("count_tokens_") if c.name == "T=1")
    after = {}
    for name, call in build(case, FAST).items():
        step = a_set(case)
        call(step)
        call(replace(step, tokens=step.tokens.roll(1).index_fill(1, torch.tensor([2]), -1) + 90))
        after[name] = step.token_counts
    assert {"reference", "eager"} <= set(after)
    for name, counts in after.items():
        for field in ("ids", "counts", "num_output"):
            assert torch.equal(getattr(counts, field), getattr(after["eager"], field)), (name, field)


@pytest.mark.parametrize("batch", [1, 3])
def test_every_provider_moves_the_same_rows(batch: int) -> None:
    case = next(c for c in REGISTRY["gather_kv_"].cases([VOCAB], [batch]) if c.batch == batch)
    step = a_set(case)
    marked = [tuple(torch.rand(t.shape).to(t.dtype) for t in layer) for layer in step.cache]
    after = {}
    for name, call in build(case, FAST).items():
        mine = replace(step, cache=[tuple(t.clone() for t in layer) for layer in marked])
        call(mine)
        after[name] = mine.cache
    assert {"reference", "eager"} <= set(after)
    moved = sum(int((a != b).any(-1).sum()) for a, b in zip(after["eager"][0], marked[0], strict=True))
    row = step.cache[0][0][0, 0, 0].nbytes
    assert moved * row * len(marked) == REGISTRY["gather_kv_"].bytes_read(case, step, None)
    for name, cache in after.items():
        for layer, expected in zip(cache, after["eager"], strict=True):
            assert torch.equal(layer[0], expected[0]) and torch.equal(layer[1], expected[1]), name
