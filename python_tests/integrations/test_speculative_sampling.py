"""The drop-in for transformers' own verification: its exact law, and that transformers runs with it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import utils

import specdec_kernels as sk
from python_tests.decoding.models import prompts, unlike_pair
from specdec_kernels.integrations.transformers import speculative_sampling
from specdec_kernels.testing import ChainProblem, Verify, exact_law, float64_law, target_joint, total_variation
from specdec_kernels.testing.counts import g_test

VOCAB, DRAFTED = 3, 2


def logits(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Rows by the tokens before them, of the target and of the draft, with an impossible id."""
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.randn(*[VOCAB] * d, VOCAB, generator=rng) * 1.5 for d in range(DRAFTED + 1)]
    drafts = [torch.randn(*[VOCAB] * d, VOCAB, generator=rng) * 1.5 for d in range(DRAFTED)]
    rows[1][0, 1] = -torch.inf
    return rows, drafts


def verifier(monkeypatch: pytest.MonkeyPatch, weight: float | None = None) -> Verify:
    """The drop-in as a verifier whose uniforms are given: one call a sequence, ``torch.rand`` answers with them. With a
    `weight`, what it is given is the mixture's: of that and the draft's the target's own is made, which the drop-in
    mixes again.
    """

    def verify(
        target: Tensor, drafts: Tensor, *, draft_logits: Tensor, uniform_samples: Tensor, **_: Any
    ) -> sk.VerifyOutput:
        batch, width = drafts.shape
        if weight is not None:
            mixed, q = target[:, :-1].double().softmax(-1), draft_logits.double().softmax(-1)
            own = ((mixed - (1 - weight) * q) / weight).clamp(min=0).log().float()
            target = torch.cat([own, target[:, -1:].float()], 1)
        tokens = torch.full((batch, width + 1), -1)
        accepted = torch.zeros(batch, dtype=torch.int32)
        for b in range(batch):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "rand", lambda *shape, b=b, **_: uniform_samples[b : b + 1].view(shape))
                ids = torch.cat([torch.tensor([[0, 1]]), drafts[b : b + 1]], 1)
                valid, matches = speculative_sampling(
                    ids, draft_logits[b : b + 1], width, target[b : b + 1], assistant_ensemble_weight=weight
                )
            assert valid.shape == (1, int(matches) + 1) and torch.equal(valid[0, :-1], drafts[b, : int(matches)])
            tokens[b, : valid.shape[1]], accepted[b] = valid[0], int(matches)
        return sk.VerifyOutput(tokens, accepted, accepted + 1, torch.zeros_like(accepted))

    return verify


def test_the_exact_law_is_the_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ChainProblem(*logits(0))
    assert total_variation(exact_law(verifier(monkeypatch), problem, "token"), target_joint(problem)) < 1e-4


def test_the_exact_law_of_an_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    """w · p + (1 − w) · q where there is a draft token, p behind them."""
    target, drafts = logits(1)
    mixed = [
        torch.from_numpy(np.log(0.7 * float64_law(p) + 0.3 * float64_law(q)))
        for p, q in zip(target, drafts, strict=False)
    ]
    problem = ChainProblem([*mixed, target[-1].double()], drafts)
    law = exact_law(verifier(monkeypatch, 0.7), problem, "token")
    assert total_variation(law, target_joint(problem)) < 1e-4


def test_nothing_is_drawn_after_a_draft_that_ends_the_text() -> None:
    rows = torch.full((1, 3, 5), -30.0)
    rows[0, [0, 1, 2], [1, 2, 3]] = 30.0
    ids = torch.tensor([[4, 1, 2]])
    for done, expected in ((True, ([[1, 2]], 1)), (torch.tensor([True]), ([[1, 2]], 1)), (False, ([[1, 2, 3]], 2))):
        valid, matches = speculative_sampling(ids, rows[:, :2], 2, rows, done)
        assert (valid.tolist(), int(matches)) == expected
    ids[0, 2] = 0  # rejected: whatever the draft would have ended
    valid, matches = speculative_sampling(ids, torch.zeros(1, 2, 5), 2, rows, True)
    assert (valid.tolist(), int(matches)) == ([[1, 2]], 1)


def test_a_token_of_probability_0_is_not_accepted_at_u_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(shape))
    target = torch.tensor([[[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]])
    valid, matches = speculative_sampling(torch.tensor([[0, 1]]), torch.zeros(1, 1, 3), 1, target)
    assert int(matches) == 0 and valid.tolist() != [[1]]


def test_logits_may_be_float64_and_have_any_strides() -> None:
    target, draft = torch.randn(1, 3, 9), torch.randn(1, 2, 9)
    ids, answers = torch.tensor([[4, 1, 2]]), []
    for change in (lambda t: t, Tensor.double, lambda t: t.mT.contiguous().mT):
        torch.manual_seed(0)
        answers.append(speculative_sampling(ids, change(draft), 2, change(target))[0].tolist())
    assert answers[1:] == answers[:1] * 2


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"candidate_input_ids must be \[1, length\], got \[2, 3\]"):
        speculative_sampling(torch.zeros(2, 3).long(), torch.zeros(2, 1, 4), 1, torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match=r"assistant_ensemble_weight must be in \(0, 1\], got 1.5"):
        speculative_sampling(
            torch.zeros(1, 3).long(), torch.zeros(1, 1, 4), 1, torch.zeros(1, 2, 4), assistant_ensemble_weight=1.5
        )


def test_transformers_runs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own assisted generation, with the drop-in put where its function was: the law of the first two tokens."""
    model, assistant = unlike_pair("llama")
    assistant.generation_config.update(
        num_assistant_tokens=2, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    for name in inspect.signature(utils._speculative_sampling).parameters:
        assert name in inspect.signature(speculative_sampling).parameters
    calls = []

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return speculative_sampling(*given, **named)

    monkeypatch.setattr(utils, "_speculative_sampling", counted)
    ids, _ = prompts(5)
    torch.manual_seed(0)
    out = torch.cat([
        model.generate(ids, assistant_model=assistant, do_sample=True, top_k=2, max_new_tokens=3, eos_token_id=None)
        for _ in range(100)
    ])[:, 5:7]  # fmt: skip
    counts, law = np.zeros((61, 61)), np.zeros((61, 61))
    np.add.at(counts, tuple(out.numpy().T), 1)
    cut = sk.SamplingParams(top_k=2)
    with torch.inference_mode():
        first = float64_law(model(ids).logits[0, -1], cut)
        for token in first.nonzero()[0]:
            row = model(torch.cat([ids, torch.tensor([[token]])], 1)).logits[0, -1]
            law[token] = first[token] * float64_law(row, cut)
    assert len(calls) >= 100 and g_test(counts, law) > 1e-4


def test_one_weight_of_an_ensemble() -> None:
    ids, p, q = torch.tensor([[0, 1, 2]]), torch.zeros(1, 3, 5), torch.zeros(1, 2, 5)
    with pytest.raises(ValueError, match="must be a bool beside assistant_ensemble_weight, got 0.5"):
        speculative_sampling(ids, q, 2, p, 0.5, assistant_ensemble_weight=0.7)
    with pytest.raises(ValueError, match=r"is_done_candidate must be a bool, or a weight in \(0, 1\], got 1.5"):
        speculative_sampling(ids, q, 2, p, 1.5)


@pytest.mark.parametrize("given", [0.5, 1.0, None])
def test_the_fifth_argument_is_that_of_any_version(given: float | None) -> None:
    """Whether the draft is done, or since 5.20 the weight of an ensemble."""
    rng = torch.Generator().manual_seed(2)
    ids, p, q = torch.tensor([[0, 1, 2]]), torch.randn(1, 3, 5, generator=rng), torch.randn(1, 2, 5, generator=rng)
    results = []
    for how in ((given,), (False,)):
        torch.manual_seed(4)
        named = {} if len(results) == 0 else {"assistant_ensemble_weight": given}
        results.append(speculative_sampling(ids, q, 2, p, *how, **named))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_weight_of_1_is_none() -> None:
    rng = torch.Generator().manual_seed(3)
    p, q = torch.randn(1, 3, 5, generator=rng), torch.randn(1, 2, 5, generator=rng)
    for seed in range(20):
        results = []
        for weight in (None, 1, 1.0):
            torch.manual_seed(seed)
            results.append(speculative_sampling(torch.tensor([[0, 1, 2]]), q, 2, p, assistant_ensemble_weight=weight))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
