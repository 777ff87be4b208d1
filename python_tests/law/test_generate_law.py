"""The joint law of what `generate` emits over several verify steps, against the target's, for every rule and drafter.

A G-test of every window of three tokens; one family-wise level over all windows of all cases (Holm: whether any
hypothesis is rejected is decided by the smallest p-value against level / number of tests). Each planted defect must be
found.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, tiny
from python_tests.law.generate_cases import (
    BATCH,
    CASES,
    END,
    LENGTH,
    NUM_TESTS,
    PROCESSED_LENGTH,
    SHARPER,
    TRANSFORMER,
    VOCAB,
    Case,
    draft_table,
    expected_windows,
    target_table,
)
from python_tests.law.windows import check_windows, windows_of_joint
from python_tests.ops.processing import Request
from specdec_kernels.drafters import Draft, Drafter
from specdec_kernels.testing import float64_law


def emitted(case: Case) -> np.ndarray:
    """``[BATCH, LENGTH]``: what `generate` emits after the context 0, 0; VOCAB stands after an end."""
    return decoded(case, BATCH)[0]


def decoded(case: Case, batch: int, first_seed: int = 0) -> tuple[np.ndarray, set[int]]:
    """The same of another batch, and the draft lengths that were verified."""
    ids = torch.zeros(batch, 2, dtype=torch.int64)
    target = TableRunner(target_table)
    mask = torch.ones_like(ids)
    mask[1::2, 0] = 0  # what is before the first token counts as 0, so a prompt of one token has the same context
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=case.drafter(), sampling=case.sampling,
        seeds=torch.arange(first_seed, first_seed + batch) * 7919 + 13, max_new_tokens=LENGTH,
        acceptance=case.acceptance,
        num_speculative_tokens=case.num_speculative_tokens, eos_token_id=case.ends, target_law=case.target_law,
    )  # fmt: skip
    tokens = out.tokens.numpy()
    return np.where(tokens < 0, VOCAB, tokens), {rows - 1 for rows in target.forwards[1:]}


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("name", CASES)
def test_joint_law(name: str) -> None:
    check_windows(emitted(CASES[name]), expected_windows(CASES[name]), NUM_TESTS)


@pytest.mark.long
@pytest.mark.parametrize("name", ["model-token", "model-block", "ngram-token"])
def test_joint_law_where_lengths_follow_from_one_text(name: str) -> None:
    """A batch of thousands drafts what suits its average; here each call's two texts alone decide, at once."""
    case = replace(
        CASES[name], num_speculative_tokens=sk.CostTable(np.zeros(1, int), np.array([[1, 1.05, 1.12, 1.145]]))
    )
    chosen = set()
    texts = []
    for call in range(3000):
        tokens, lengths = decoded(case, 2, 2 * call)
        texts.append(tokens)
        chosen |= lengths
    assert chosen == {0, 1, 3, 7}
    check_windows(np.concatenate(texts), expected_windows(case), NUM_TESTS)


@pytest.mark.long
@pytest.mark.parametrize("acceptance", TRANSFORMER)
def test_joint_law_of_a_transformer(acceptance: str) -> None:
    """A model with a real cache, whose laws depend on everything before."""
    vocab, length = 3, 8
    small = {"vocab_size": vocab, "num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    target, draft = tiny("llama", 1, **small, initializer_range=0.6), tiny("llama", 2, **small, initializer_range=0.6)
    prompt = torch.tensor([[1, 0, 2]])
    out = sk.generate(
        target, prompt.expand(16384, -1).contiguous(), drafter=sk.ModelDrafter(draft, SHARPER),
        sampling=sk.SamplingParams(0.9), acceptance=acceptance, seeds=torch.arange(16384) * 31 + 7,
        max_new_tokens=length, num_speculative_tokens=2, eos_token_id=[],
    )  # fmt: skip
    every = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    with torch.inference_mode():
        logits = target(torch.cat([prompt.expand(len(every), -1), every], 1)).logits[:, 2:-1]
    laws = float64_law(logits, sk.SamplingParams(0.9))
    joint = np.take_along_axis(laws, every.numpy()[:, :, None], 2)[:, :, 0].prod(1).reshape((vocab,) * length)
    assert abs(joint.sum() - 1) < 1e-9
    check_windows(out.tokens.numpy(), windows_of_joint(joint), NUM_TESTS)


REQUEST = Request(
    logit_bias={1: 0.8}, stop=[END], min_tokens=3, repetition=1.4, frequency=0.5, presence=0.3, prompt=[0, 0]
)
PROCESSED = {
    "model": lambda: sk.ModelDrafter(TableRunner(draft_table), SHARPER),
    "confident": lambda: sk.ModelDrafter(TableRunner(draft_table), None, 0.4),
    "greedy": lambda: sk.ModelDrafter(TableRunner(draft_table), sk.SamplingParams(0.0)),
    "ngram": lambda: sk.NgramDrafter(2),
}


def decoded_processed(drafter: Drafter, acceptance: str, batch: int = BATCH) -> sk.GenerationOutput:
    ids = torch.zeros(batch, 2, dtype=torch.int64)
    return sk.generate(
        TableRunner(target_table), ids, attention_mask=torch.ones_like(ids), drafter=drafter,
        seeds=torch.arange(batch) * 7919 + 13, max_new_tokens=PROCESSED_LENGTH, acceptance=acceptance,
        num_speculative_tokens=3, eos_token_id=[], sampling=sk.SamplingParams(0.9), processors=sk.Processors(
            logit_bias=REQUEST.logit_bias, stop_token_ids=REQUEST.stop, min_tokens=REQUEST.min_tokens,
            repetition_penalty=REQUEST.repetition, frequency_penalty=REQUEST.frequency,
            presence_penalty=REQUEST.presence, token_counts=sk.TokenCounts(ids, PROCESSED_LENGTH),
        ),
    )  # fmt: skip


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
@pytest.mark.parametrize("name", PROCESSED)
def test_joint_law_with_processors(name: str, acceptance: str) -> None:
    """Every token's logits depend on all before it, of the target and of the draft."""
    joint = np.ones(())
    for length in range(PROCESSED_LENGTH):
        made = torch.empty((VOCAB,) * length + (VOCAB,), dtype=torch.float64)
        for text in np.ndindex((VOCAB,) * length):
            before, last = (0, 0, *text)[-2:]
            made[text] = torch.from_numpy(REQUEST.row(target_table[before, last], text))
        joint = joint[..., None] * float64_law(made, sk.SamplingParams(0.9))
    tokens = decoded_processed(PROCESSED[name](), acceptance).tokens.numpy()
    check_windows(tokens, windows_of_joint(joint), NUM_TESTS)


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_a_draft_model_is_told_of_the_processors(acceptance: str) -> None:
    """The target itself drafts: nothing that it drafts is rejected, and without them much would be."""
    stats = decoded_processed(sk.ModelDrafter(TableRunner(target_table)), acceptance, 64).stats
    assert stats.num_drafted == stats.num_accepted > 0


# --- planted defects: each must be found ------------------------------------------------------------------------------

step = importlib.import_module("specdec_kernels.decoding.step")
drafting = importlib.import_module("specdec_kernels.drafters.model")
uniforms, keys = sk.uniform_samples, sk.noise_keys


def randomness(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any], int], dict[str, Any]]) -> None:
    """Let verify steps have what `change` makes of their random numbers' arguments, for so many rows."""
    made = step._randomness
    patch.setattr(step, "_randomness", lambda *given: change(made(*given), given[2]))


def one_step_for_ever(patch: pytest.MonkeyPatch) -> None:
    randomness(patch, lambda given, num: given | {"step": 0})
    patch.setattr(drafting, "uniform_samples", lambda seeds, step, num, purpose: uniforms(seeds, 0, num, purpose))


def constant_uniform(patch: pytest.MonkeyPatch) -> None:
    def same(given: dict[str, Any], num: int) -> dict[str, Any]:
        return {"uniform_samples": uniforms(given["seeds"], given["step"], 1).expand(-1, num).contiguous()}

    randomness(patch, same)


def shared_stream(patch: pytest.MonkeyPatch) -> None:
    """The drafter draws with the verifier's coins."""

    def shared(seeds: Tensor, step: Tensor, num: int, purpose: str) -> Tensor:
        return uniforms(seeds, step, num + 1, "accept")[:, 1:].contiguous()

    patch.setattr(drafting, "uniform_samples", shared)


def wrong_draft_law(patch: pytest.MonkeyPatch) -> None:
    verify = step.verify_chain
    patch.setattr(step, "verify_chain", lambda *a, draft_params, draft_stats, **k: verify(*a, draft_params=None, **k))


def discards_after_looking(patch: pytest.MonkeyPatch) -> None:
    """Drops a draft token that looks unlikely: a stopping rule that reads the drawn token."""
    propose = sk.ModelDrafter.propose

    def choosy(self: sk.ModelDrafter, state: Any, num_tokens: int) -> Draft:
        draft = propose(self, state, num_tokens)
        return replace(draft, num_draft_tokens=(draft.tokens != 1).long().cumprod(1).sum(1))

    patch.setattr(sk.ModelDrafter, "propose", choosy)


def doubts_the_token_itself(patch: pytest.MonkeyPatch) -> None:
    """A draft that stops early leaves out the token that it doubts, too."""
    propose = sk.ModelDrafter.propose

    def doubtful(self: sk.ModelDrafter, state: Any, num_tokens: int) -> Draft:
        draft = propose(self, state, num_tokens)
        assert draft.stats is not None and draft.logits is not None
        law = draft.logits.softmax(-1).gather(2, draft.tokens[..., None])[..., 0]
        return replace(draft, num_draft_tokens=(law >= 0.4).long().cumprod(1).sum(1))

    patch.setattr(sk.ModelDrafter, "propose", doubtful)


def noise_without_position(patch: pytest.MonkeyPatch) -> None:
    def from_first(positions: Tensor) -> Tensor:
        return positions - positions[:, :1]

    randomness(patch, lambda given, num: given | {"positions": from_first(given["positions"])})
    patch.setattr(drafting, "noise_keys", lambda seeds, positions: keys(seeds, from_first(positions)))


def stale_rows(patch: pytest.MonkeyPatch) -> None:
    """Rejected draft tokens stay in the cache: every step writes one row too far on."""
    forward = TableRunner.forward

    def late(self: TableRunner, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        if tokens.shape[1] == 1 or not need_logits:
            return forward(self, tokens, starts, bound, need_logits)
        logits = forward(self, tokens, starts + 1, bound + 1)
        forward(self, tokens, starts, bound)
        return logits

    patch.setattr(TableRunner, "forward", late)


def draft_law_without_processors(patch: pytest.MonkeyPatch) -> None:
    law = drafting.warp_probs
    patch.setattr(drafting, "warp_probs", lambda logits, params, processors: law(logits, params))


def draft_law_without_the_draft_before(patch: pytest.MonkeyPatch) -> None:
    """Its counts are those of the text alone, which the draws are not."""
    counts: list[sk.Processors] = []
    law, of = drafting.warp_probs, sk.Processors.with_counts

    def told(self: sk.Processors, token_counts: sk.TokenCounts) -> sk.Processors:
        counts.append(of(self, token_counts.clone()))
        return of(self, token_counts)

    patch.setattr(sk.Processors, "with_counts", told)
    patch.setattr(drafting, "warp_probs", lambda logits, params, processors: law(logits, params, processors=counts[-1]))


@pytest.mark.parametrize("defect", [draft_law_without_processors, draft_law_without_the_draft_before])
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_a_planted_defect_of_a_processed_draft_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], acceptance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="TV about"):
        test_joint_law_with_processors("model", acceptance)


@pytest.mark.short(cases=2)
@pytest.mark.parametrize(
    ("defect", "case"),
    [
        (one_step_for_ever, "model-token"),
        (one_step_for_ever, "model-block"),
        (doubts_the_token_itself, "model-confident-token"),
        (doubts_the_token_itself, "model-confident-block"),
        (one_step_for_ever, "ngram-token"),
        (constant_uniform, "model-token"),
        (constant_uniform, "model-block"),
        (shared_stream, "model-token"),
        (shared_stream, "model-sharper-block"),
        (wrong_draft_law, "model-sharper-token"),
        (wrong_draft_law, "model-cut-block"),
        (discards_after_looking, "model-token"),
        (noise_without_position, "model-match"),
        (noise_without_position, "none-match"),
        (stale_rows, "model-token"),
    ],
)
def test_a_planted_defect_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="TV about"):
        test_joint_law(case)
