"""On a real language model: what processors make of its text, and what is said of tokens, is what transformers has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import llguidance
import llguidance.hf
import llguidance.torch
import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels import assets, pack_linear_weights
from specdec_kernels.assets import prompts
from specdec_kernels.drafters import Drafter
from specdec_kernels.medusa import MedusaHeads

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.xdist_group("model")]

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return assets.load_model()


@pytest.mark.parametrize(
    "drafter",
    [sk.NgramTreeDrafter, *(pytest.param(each, marks=pytest.mark.long) for each in (sk.NoDrafter, sk.NgramDrafter))],
)
def test_log_probabilities_are_transformers(loaded: tuple[Any, Any], drafter: Callable[[], Drafter]) -> None:
    model, tokenizer = loaded
    ids, mask = prompts.encode(tokenizer, sorted(prompts.load_prompts("code-edit", tokenizer, 4), key=len)[:2])
    with pack_linear_weights(model):
        out = sk.generate(
            model, ids, attention_mask=mask, drafter=drafter(), sampling=sk.SamplingParams(0.0), acceptance="greedy",
            max_new_tokens=NEW_TOKENS, num_speculative_tokens=3, return_logprobs=5,
        )  # fmt: skip
    assert out.logprobs is not None and (drafter is sk.NoDrafter or out.stats.num_accepted > 0)
    for b, n in enumerate(out.num_tokens.tolist()):
        prompt = ids[b][mask[b] > 0]
        text = torch.cat([prompt, out.tokens[b, :n]])[None]
        with torch.inference_mode():
            logits = model(text).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        raw = out.logprobs.raw_log_prob[b, :n]
        torch.testing.assert_close(raw, expected.gather(1, out.tokens[b, :n, None])[:, 0], rtol=0, atol=2e-3)
        torch.testing.assert_close(
            out.logprobs.top_log_prob[b, :n], expected.gather(1, out.logprobs.top_ids[b, :n]), rtol=0, atol=2e-3
        )
        best = expected.topk(5).values
        torch.testing.assert_close(out.logprobs.top_log_prob[b, :n], best, rtol=0, atol=2e-3)
        assert (out.logprobs.rank[b, :n] == 1).all() and (out.logprobs.log_prob[b, :n] == 0).all()


SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "city"],
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Rome", "Lagos", "Lima"]},
    },
}  # fmt: skip
PEOPLE = """Extract the person as JSON.
Text: Ada is 36 and lives in Rome. JSON: {"name": "Ada", "age": 36, "city": "Rome"}
Text: Ben, who is 41, moved to Lima. JSON: {"name": "Ben", "age": 41, "city": "Lima"}
Text: {text} JSON:"""
TEXTS = ["In Lagos lives Chidi, aged 29.", "Mia is 7 years old. She is from Rome.", "Nobody knows who wrote this."]
REPETITION, BIAS = 1.08, -1.5


class Grammar:
    """A grammar engine's state of one text, and the rows of a verify step's mask."""

    def __init__(self, tokenizer: Any, vocab: int, end: int) -> None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
        known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab, eos_token=end)
        self.matcher, self.vocab = llguidance.LLMatcher(known, grammar), vocab

    def bitmask(self, drafted: list[int]) -> Tensor:
        """``[1, num_draft + 1, words]``: row i after the first i draft tokens, up to one that is barred."""
        rows = llguidance.torch.allocate_token_bitmask(len(drafted) + 1, self.vocab)
        consumed = 0
        for i, token in enumerate([*drafted, None]):
            llguidance.torch.fill_next_token_bitmask(self.matcher, rows, i)
            allowed = token is not None and bool(rows[i, token // 32] >> (token % 32) & 1)
            if token is None or not allowed or not self.matcher.consume_token(token):
                break
            consumed += 1
        assert self.matcher.rollback(consumed)
        return rows[None]


def in_transformers(model: Any, tokenizer: Any, ids: Tensor, ends: int, banned: int, biased: int) -> list[int]:
    """By transformers' own loop and processors, and the grammar as one of them."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Masking(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.grammar, self.length = Grammar(tokenizer, model.config.vocab_size, ends), ids.shape[1]

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            for token in input_ids[0, self.length :].tolist():
                assert self.grammar.matcher.consume_token(token)
            self.length = input_ids.shape[1]
            bits = (self.grammar.bitmask([])[0, 0, :, None] >> torch.arange(32)) & 1
            return scores.masked_fill(bits.flatten()[: scores.shape[1]] == 0, -math.inf)

    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, repetition_penalty=REPETITION,
        sequence_bias={(biased,): BIAS}, bad_words_ids=[[banned]], eos_token_id=ends, pad_token_id=ends,
        logits_processor=LogitsProcessorList([Masking()]),
    )  # fmt: skip
    text: list[int] = out[0, ids.shape[1] :].tolist()
    return text


def speculatively(
    model: Any, tokenizer: Any, ids: Tensor, ends: int, banned: int, biased: int
) -> tuple[list[int], int, int]:
    """By verify steps over looked-up drafts: the text, how many draft tokens were accepted, and how many tokens are not
    those that the model itself would have given.
    """
    grammar = Grammar(tokenizer, model.config.vocab_size, ends)
    counts = sk.TokenCounts(ids, 40)
    processors = sk.Processors(
        logit_bias={biased: BIAS}, banned_ids=[banned], repetition_penalty=REPETITION, token_counts=counts
    )
    prompt, text, accepted, changed = ids[0].tolist(), [], 0, 0
    while len(text) < 40 and ends not in text:
        so_far = prompt + text
        at = next((i for i in range(len(so_far) - 2, 0, -1) if so_far[i - 1 : i + 1] == so_far[-2:]), None)
        drafted = [] if at is None else so_far[at + 1 : at + 5]
        with torch.inference_mode():
            logits = model(torch.tensor([so_far + drafted]), logits_to_keep=len(drafted) + 1).logits
        out = sk.verify_chain(
            logits, torch.tensor([drafted], dtype=torch.int64).view(1, -1), acceptance="greedy",
            processors=processors.with_bitmask(grammar.bitmask(drafted)), eos_token_ids=torch.tensor([ends]),
        )  # fmt: skip
        assert out.status.tolist() == [0]
        counts.add_(out.tokens)
        new = out.tokens[0, : int(out.num_tokens)].tolist()
        assert grammar.matcher.consume_tokens([token for token in new if token != ends])
        text, accepted = text + new, accepted + int(out.num_accepted)
        changed += int((logits[0, : len(new)].argmax(-1) != torch.tensor(new)).sum())
    return text[:40], accepted, changed


@pytest.mark.parametrize("text", [TEXTS[0], *(pytest.param(text, marks=pytest.mark.long) for text in TEXTS[1:])])
def test_penalties_and_a_grammar_with_drafts_are_transformers(loaded: tuple[Any, Any], text: str) -> None:
    """Greedily, with a repetition penalty, a bias, a ban and a JSON schema: the same tokens, and the schema holds."""
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer.encode(PEOPLE.replace("{text}", text))])
    given = (ids, tokenizer.eos_token_id, tokenizer.encode(" Ben")[0], tokenizer.encode(" 36")[-1])
    with pack_linear_weights(model):
        own = in_transformers(model, tokenizer, *given)
        ours, accepted, changed = speculatively(model, tokenizer, *given)
    assert ours == own and accepted > 2 and changed > 0
    found = json.loads(tokenizer.decode(own, skip_special_tokens=True))
    assert set(found) == {"name", "age", "city"} and found["city"] in ("Rome", "Lagos", "Lima")


class Grammars(sk.Grammar):
    """An engine for each text, which is not asked beyond its end."""

    def __init__(self, tokenizer: Any, vocab: int, end: int, batch: int) -> None:
        self.engines, self.end = [Grammar(tokenizer, vocab, end) for _ in range(batch)], end
        self.over = [False] * batch

    def fill(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        for b, (engine, draft) in enumerate(zip(self.engines, drafts, strict=True)):
            if draft is not None:
                assert not self.over[b] and self.end not in draft
                rows[b, : len(draft) + 1] = engine.bitmask(draft.tolist())[0]

    def fill_last(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        for b, (engine, draft) in enumerate(zip(self.engines, drafts, strict=True)):
            if draft is not None:
                assert not self.over[b] and engine.matcher.consume_tokens(draft.tolist())
                llguidance.torch.fill_next_token_bitmask(engine.matcher, rows, b)
                assert engine.matcher.rollback(len(draft))

    def commit(self, tokens: list[np.ndarray]) -> None:
        for b, (engine, new) in enumerate(zip(self.engines, tokens, strict=True)):
            assert engine.matcher.consume_tokens([token for token in new.tolist() if token != self.end])
            self.over[b] = self.over[b] or self.end in new


@pytest.mark.long
def test_generate_with_a_grammar_is_transformers(loaded: tuple[Any, Any]) -> None:
    """The same of `generate`, for three texts at a time, drafts of every kind and plain decoding."""
    model, tokenizer = loaded
    texts = [tokenizer.encode(PEOPLE.replace("{text}", text)) for text in TEXTS]
    width, end = max(map(len, texts)), tokenizer.eos_token_id
    ids = torch.tensor([[end] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    banned, biased = tokenizer.encode(" Ben")[0], tokenizer.encode(" 36")[-1]
    with pack_linear_weights(model):
        expected = [in_transformers(model, tokenizer, torch.tensor([text]), end, banned, biased) for text in texts]
        ids_of_heads = sk.TokenMap(torch.arange(0, model.config.vocab_size, 3))
        heads = MedusaHeads.of_model(model, 2, ids_of_heads).requires_grad_(False)
        drafters = (
            sk.NgramDrafter(), sk.NgramTreeDrafter(), sk.NgramLMDrafter(), sk.NoDrafter(),
            sk.MedusaDrafter(heads, sk.DraftTree.cartesian([3, 2])),
        )  # fmt: skip
        for drafter in drafters:
            processors = sk.Processors(
                logit_bias={biased: BIAS}, banned_ids=[banned], repetition_penalty=REPETITION,
                token_counts=sk.TokenCounts(ids, 40, mask),
            )  # fmt: skip
            out = sk.generate(
                model, ids, attention_mask=mask, drafter=drafter, acceptance="greedy", processors=processors,
                grammar=Grammars(tokenizer, model.config.vocab_size, end, len(texts)), max_new_tokens=40,
                num_speculative_tokens=4, eos_token_id=end,
            )  # fmt: skip
            assert [out.tokens[b, :n].tolist() for b, n in enumerate(out.num_tokens)] == expected
            assert out.status.tolist() == [0] * len(texts)
            assert (out.stats.num_accepted > 6) != isinstance(drafter, sk.NoDrafter)
    for text in expected:
        assert set(json.loads(tokenizer.decode(text, skip_special_tokens=True))) == {"name", "age", "city"}
