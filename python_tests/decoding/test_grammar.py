"""Grammars in `generate`: texts that obey them, and are those of plain decoding, whatever drafts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, near, prompts, tiny
from specdec_kernels.drafters import Drafter

GREEDY = sk.SamplingParams(temperature=0.0)
NEW, END = 24, 1
DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "plain": lambda draft: sk.NoDrafter(), "lookup": lambda draft: sk.NgramDrafter(), "model": sk.ModelDrafter,
}  # fmt: skip


class Residues(sk.Grammar):
    """Token t of a sequence leaves the sum of those before it, modulo 3 (the end may always come)."""

    def __init__(self, batch: int, vocab: int) -> None:
        self.vocab, self.texts, self.ended, self.looked_at = vocab, [[] for _ in range(batch)], [False] * batch, 0
        self.texts: list[list[int]]

    def allowed(self, text: list[int]) -> list[int]:
        return [v for v in range(self.vocab) if v == END or v % 3 == sum(text) % 3]

    def fill(self, rows: Tensor, drafts: list[np.ndarray]) -> None:
        assert rows.dtype == torch.int32 and bool((rows == -1).all())
        assert rows.shape[0] == len(drafts) == len(self.texts) and rows.shape[2] == -(-self.vocab // 32)
        for b, draft in enumerate(drafts):
            assert len(draft) < rows.shape[1] and not (self.ended[b] and len(draft))
            for i in range(len(draft) + 1):
                mask = sum(1 << v for v in self.allowed([*self.texts[b], *draft[:i].tolist()]))
                words = [mask >> 32 * k & 0xFFFFFFFF for k in range(rows.shape[2])]
                rows[b, i] = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)
            rows[b, len(draft) + 1 :] = 0  # whatever stands there
            self.looked_at += len(draft)

    def commit(self, tokens: list[np.ndarray]) -> None:
        for b, new in enumerate(tokens):
            assert not (self.ended[b] and len(new))
            for token in new.tolist():
                assert token in self.allowed(self.texts[b])
                self.texts[b].append(token)
            self.ended[b] = self.ended[b] or END in new or len(self.texts[b]) == NEW


def run(drafter: Drafter, **more: Any) -> tuple[sk.GenerationOutput, Residues]:
    ids, mask = prompts(3, 9, 6)
    target = more.pop("model", None) or tiny("llama", 1)
    grammar = Residues(3, target.vocab_size if isinstance(target, TableRunner) else target.config.vocab_size)
    out = sk.generate(
        target, ids % grammar.vocab, attention_mask=mask, drafter=drafter, grammar=grammar, max_new_tokens=NEW,
        eos_token_id=END, **more,
    )  # fmt: skip
    assert [out.tokens[b, :n].tolist() for b, n in enumerate(out.num_tokens)] == grammar.texts
    assert out.status.tolist() == [0] * 3
    return out, grammar


@pytest.mark.parametrize("processed", [False, True], ids=["alone", "with processors"])
@pytest.mark.parametrize("acceptance", ["greedy", "match"])
def test_drafts_change_nothing(acceptance: str, processed: bool) -> None:
    ids, mask = prompts(3, 9, 6)
    texts = []
    for make in DRAFTERS.values():
        given = sk.Processors(
            logit_bias={5: 1.0}, presence_penalty=0.4, stop_token_ids=[END], min_tokens=12,
            token_counts=sk.TokenCounts(ids, NEW, mask),
        )  # fmt: skip
        out, grammar = run(
            make(near("llama", 1, 0.05)), sampling=sk.SamplingParams(0.9), acceptance=acceptance,
            seeds=torch.tensor([5, -1, 2**40]), processors=given if processed else None, num_speculative_tokens=4,
        )  # fmt: skip
        texts.append(out.tokens)
        assert (out.stats.num_drafted > 0) == (grammar.looked_at > 0) and grammar.looked_at >= out.stats.num_drafted
    free = sk.generate(
        tiny("llama", 1), ids, attention_mask=mask, drafter=sk.NoDrafter(), max_new_tokens=NEW, eos_token_id=END,
        sampling=sk.SamplingParams(0.9), acceptance=acceptance, seeds=torch.tensor([5, -1, 2**40]),
    )  # fmt: skip
    assert out.stats.num_accepted > 0 and not torch.equal(free.tokens, texts[0])
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_draws_obey(name: str, acceptance: str) -> None:
    """And log-probabilities are those of the barred distribution."""
    out, _ = run(DRAFTERS[name](near("llama", 1, 0.05)), acceptance=acceptance, return_logprobs=0)
    assert out.logprobs is not None
    there = out.tokens >= 0
    likely, raw = out.logprobs.log_prob[there], out.logprobs.raw_log_prob[there]
    assert bool((likely > raw + 0.1).all()) and bool((likely > -math.inf).all())


@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_the_distribution_is_the_barred_one(acceptance: str) -> None:
    """Two tokens of many sequences, drafted by a model of another distribution, against the product of both laws."""
    count, vocab = 6000, 6
    rng = torch.Generator().manual_seed(3)
    table, other = (torch.randn(vocab, vocab, generator=rng) for _ in range(2))

    def of_last(rows: Tensor) -> TableRunner:
        return TableRunner(rows.expand(vocab, -1, -1))

    class Ordered(sk.Grammar):
        """No id twice in a row, and none that follows by two."""

        def __init__(self) -> None:
            self.last = [2] * count

        def fill(self, rows: Tensor, drafts: list[np.ndarray]) -> None:
            for b, draft in enumerate(drafts):
                for i, token in enumerate([self.last[b], *draft.tolist()]):
                    rows[b, i] = ~(1 << token) & ~(1 << (token + 2) % vocab)

        def commit(self, tokens: list[np.ndarray]) -> None:
            self.last = [int(new[-1]) if len(new) else last for last, new in zip(self.last, tokens, strict=True)]

    out = sk.generate(
        of_last(table), torch.full((count, 2), 2), drafter=sk.ModelDrafter(of_last(other)), grammar=Ordered(),
        seeds=torch.arange(count), max_new_tokens=2, num_speculative_tokens=2, acceptance=acceptance, eos_token_id=[],
    )  # fmt: skip
    barred = torch.zeros(vocab, vocab, dtype=torch.bool)
    for token in range(vocab):
        barred[token, [token, (token + 2) % vocab]] = True
    law = table.double().masked_fill(barred, -math.inf).softmax(-1)
    expected = (law[2][:, None] * law).flatten() * count
    seen = (out.tokens[:, 0] * vocab + out.tokens[:, 1]).bincount(minlength=vocab**2)
    possible = expected > 0
    assert int(seen[~possible].sum()) == 0
    chi2 = float(((seen - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), chi2


def test_only_what_is_put_to_the_test_is_shown() -> None:
    out, grammar = run(sk.ModelDrafter(near("llama", 1, 0.05)), sampling=GREEDY, num_speculative_tokens=7)
    assert grammar.looked_at == out.stats.num_drafted > 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"grammar": lambda rows: rows}, TypeError, "grammar must be a Grammar or None, got function"),
        ({"drafter": sk.NgramTreeDrafter()}, ValueError, "grammar must be None for the trees of NgramTreeDrafter"),
    ],
)
def test_refuses(given: dict[str, Any], error: type[Exception], message: str) -> None:
    ids, mask = prompts(3, 9, 6)
    whole = {"drafter": sk.NoDrafter(), "grammar": Residues(3, 60)} | given
    with pytest.raises(error, match=f"^generate: {message}"):
        sk.generate(tiny("llama", 1), ids, attention_mask=mask, **whole)
