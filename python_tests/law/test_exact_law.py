"""The law that each backend really produces, extracted through the uniforms, is the target's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import (
    KINDS,
    SIZES,
    check_law,
    check_zero_probability,
    given_bonus,
    problem,
    size_on,
    stratified,
)
from python_tests.support import Backend
from specdec_kernels.testing import ChainProblem, exact_law, float64_law

OP = "verify_chain"


@pytest.mark.on_triton(kind="full")
@pytest.mark.short(emulated=6)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"V{s[0]}-K{s[1]}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_emitted_law_is_the_targets(backend: Backend, acceptance: str, kind: str, size: tuple[int, int]) -> None:
    check_law(backend.verify_chain, problem(kind, *size_on(backend, kind, size)), acceptance, backend.device)


@pytest.mark.parametrize("begin", [0.3, 0.4, 0.65, 0.8])
def test_a_narrow_defect_of_the_likeliest_draft_is_seen(begin: float) -> None:
    """Between two of the nine points, of one drafted token in 0.97 of all cases: 600 random uniforms miss it once in
    100,000 times if the tokens are drawn as the draft draws them, in one of five if each is drawn as often.
    """
    draft = torch.full((8,), 0.03 / 7)
    draft[0] = 0.97
    given = ChainProblem([torch.zeros(8), torch.zeros(8, 8)], [draft.log()])

    def defective(logits: Tensor, tokens: Tensor, *, uniform_samples: Tensor, **more: Any) -> sk.VerifyOutput:
        out = sk.verify_chain(logits, tokens, uniform_samples=uniform_samples, **more)
        coin = uniform_samples[:, 1]
        hit = (tokens[:, 0] == 0) & (coin >= begin) & (coin < begin + 0.02)
        emitted = torch.where(hit[:, None], torch.tensor([7, -1]), out.tokens)
        return out._replace(tokens=emitted, num_tokens=out.num_tokens.masked_fill(hit, 1))

    with pytest.raises(AssertionError, match="one outcome within a piece"):
        exact_law(defective, given, "token")


def test_zero_probability_is_never_accepted_at_u_0(backend: Backend) -> None:
    check_zero_probability(backend.verify_chain, backend.device)


@pytest.mark.on_triton(kind="full")
@pytest.mark.short(triton=0, emulated=4)
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize(
    "kind", ["full", "reduced_vocabulary", "both_truncated", "ragged", "eos", "given_probabilities"]
)
def test_emitted_law_of_the_packed_form(backend: Backend, acceptance: str, kind: str) -> None:
    def verify(target, tokens, draft_logits=None, *, uniform_samples, draft_probs=None, **rest):  # type: ignore[no-untyped-def]
        batch, num_draft = tokens.shape
        cu = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * num_draft
        flat = [
            None if t is None else t.flatten(0, 1) for t in (target, tokens, draft_logits, uniform_samples, draft_probs)
        ]
        return backend.verify_packed(
            *flat[:3], uniform_samples=flat[3], draft_probs=flat[4],
            cu_num_draft_tokens=cu, max_num_draft_tokens=num_draft, **rest,
        )  # fmt: skip

    size = size_on(backend, kind, SIZES[-1]) if backend.interpreted else (3, 2)
    check_law(verify, problem(kind, *size), acceptance, backend.device)


@pytest.mark.on_triton(kind="full")
@pytest.mark.short(triton=1, emulated=3)
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "one_hot", "target_top_k", "zero_supports", "given_probabilities", "ragged"])
def test_emitted_law_of_target_probabilities(backend: Backend, acceptance: str, kind: str) -> None:
    """Rows of probabilities instead of logits; that their sum is a little off changes nothing."""

    def verify(target, *rest, **more):  # type: ignore[no-untyped-def]
        return backend.verify_chain(None, *rest, target_probs=target.softmax(-1) * 0.995, **more)

    check_law(verify, problem(kind, *size_on(backend, kind, SIZES[1])), acceptance, backend.device)


@pytest.mark.on_triton(kind="full")
@pytest.mark.short(triton=0, emulated=4)
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "one_hot", "both_truncated", "ragged", "eos", "undrawable"])
def test_emitted_law_with_bonus_tokens_that_are_given(backend: Backend, acceptance: str, kind: str) -> None:
    case = problem(kind, *size_on(backend, kind, SIZES[1]))
    check_law(given_bonus(backend.verify_chain), case, acceptance, backend.device)


def sparse(vocab: int, alive: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    row = torch.full((vocab,), -torch.inf)
    row[alive] = torch.randn(len(alive), generator=rng)
    return row


@pytest.mark.short(cases=1, emulated=1)
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_emitted_law_over_several_tiles(backend: Backend, acceptance: str) -> None:
    """Ids spread over three tiles of 1024, seen through a small vocabulary."""
    size_on(backend, "several tiles", SIZES[0])
    vocab, rng = 2600, torch.Generator().manual_seed(5)
    alive = torch.tensor([0, 1, 1022, 1023, 1024, 1025, 2047, 2048, 2300, 2599])
    small = len(alive)
    target = torch.stack([sparse(vocab, alive, rng), sparse(vocab, alive[::2], rng)])
    draft = sparse(vocab, alive[2:8], rng)[None]

    def verify(small_target, small_tokens, draft_logits, **rest):  # type: ignore[no-untyped-def]
        """The op on the wide rows, seen through the ids that are alive."""
        batch, ids = len(small_tokens), alive.to(backend.device)
        out = backend.verify_chain(
            backend(target).expand(batch, -1, -1), ids[small_tokens], backend(draft).expand(batch, -1, -1), **rest
        )
        back = torch.full((vocab,), vocab, device=backend.device)
        back[ids] = torch.arange(small, device=backend.device)
        tokens = torch.where(out.tokens < 0, -1, back[out.tokens.clamp_min(0)])
        return sk.VerifyOutput(tokens, out.num_accepted, out.num_tokens, out.status)

    case = ChainProblem([target[0, alive], target[1, alive].expand(small, small)], [draft[0, alive]])
    check_law(verify, case, acceptance, backend.device)


@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 3000])
@pytest.mark.parametrize("form", ["bonus", "one_hot", "full"])
def test_final_draw_on_a_dense_row_is_the_inverse_cdf(backend: Backend, vocab: int, form: str) -> None:
    """Stratified uniforms: each drawn id brackets its uniform in the float64 CDF of the law it must come from."""
    n, rng = 2048 if not backend.interpreted else backend.batch(2048) // 4 * 4, torch.Generator().manual_seed(vocab)
    target, draft = torch.randn(1, vocab, generator=rng) * 2, torch.randn(1, vocab, generator=rng) * 2
    p, q = float64_law(target)[0], float64_law(draft)[0]
    x = int(q.argmax()) if form == "full" else 7
    uniforms = torch.from_numpy(stratified(n, np.random.default_rng(vocab)))
    drawn = []
    for u in uniforms.split(n // 4):
        rows, batch = (1 if form == "bonus" else 2), len(u)
        coins = torch.full((batch, rows), 1 - 2.0**-24)
        coins[:, 0] = u
        out = backend.verify_chain(
            backend(target).expand(batch, rows, vocab),
            backend(torch.full((batch, rows - 1), x)),
            backend(draft).expand(batch, 1, vocab) if form == "full" else None,
            uniform_samples=backend(coins),
        )
        assert (out.num_accepted == 0).all() and (out.status == 0).all()
        drawn.append(out.tokens[:, 0].cpu())
    token, u64 = torch.cat(drawn).numpy(), uniforms.double().numpy()
    weights = {"bonus": p, "one_hot": np.where(np.arange(vocab) == x, 0, p), "full": np.maximum(p - q, 0)}[form]
    ends = np.cumsum(weights / weights.sum())
    assert (weights[token] > 0).all()
    assert (u64 < ends[token] + 1e-6).all() and (u64 > ends[token] - (weights / weights.sum())[token] - 1e-6).all()
