"""On a real language model: what is said of tokens is what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import assets, pack_linear_weights
from specdec_kernels.assets import prompts
from specdec_kernels.drafters import Drafter

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.xdist_group("model")]

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return assets.load_model()


@pytest.mark.parametrize("drafter", [sk.NoDrafter, sk.NgramDrafter, sk.NgramTreeDrafter])
def test_log_probabilities_are_transformers(loaded: tuple[Any, Any], drafter: Callable[[], Drafter]) -> None:
    model, tokenizer = loaded
    ids, mask = prompts.encode(tokenizer, sorted(prompts.load_prompts("code-edit", tokenizer, 4), key=len)[:2])
    with pack_linear_weights(model):
        out = sk.generate(
            model, ids, attention_mask=mask, drafter=drafter(), sampling=sk.SamplingParams(0.0), acceptance="greedy",
            max_new_tokens=NEW_TOKENS, return_logprobs=5,
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
