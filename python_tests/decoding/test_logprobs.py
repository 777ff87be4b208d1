"""Log-probabilities of `generate`: of every emitted token what the model itself says of it, whatever was drafted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.fake_cuda import NEAR, TARGET
from python_tests.decoding.models import TableRunner, near, prompts, tiny
from python_tests.decoding.tree_models import medusa
from python_tests.ops.logprobs import check, described
from python_tests.ops.processing import Request
from specdec_kernels.drafters import Drafter
from specdec_kernels.testing import float64_law

NEW, TOP = 20, 4


DRAFTERS: dict[str, Callable[[Any, Any], Drafter]] = {
    "none": lambda target, draft: sk.NoDrafter(),
    "ngram": lambda target, draft: sk.NgramDrafter(2),
    "ngram trees": lambda target, draft: sk.NgramTreeDrafter(2),
    "model": lambda target, draft: sk.ModelDrafter(draft),
    "model trees": lambda target, draft: sk.ModelTreeDrafter(draft),
    "medusa": lambda target, draft: medusa(target),
}
PLAIN = [Request()] * 3
ASKED = [
    Request(logit_bias={5: 1.0, 9: -2.0}, banned=[3, 4], stop=[1], min_tokens=6, repetition=1.2, frequency=0.4),
    Request(banned=[3, 4], stop=[1], min_tokens=6, frequency=0.4, presence=-0.2),
    Request(banned=[3, 4], stop=[1], min_tokens=6, repetition=0.9, frequency=0.4),
]


def as_processors(requests: list[Request], ids: torch.Tensor, mask: torch.Tensor) -> sk.Processors:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(request, name)) for request in requests])

    return sk.Processors(
        logit_bias=[request.logit_bias for request in requests], banned_ids=[request.banned for request in requests],
        stop_token_ids=[1], min_tokens=6, repetition_penalty=column("repetition"),
        frequency_penalty=column("frequency"), presence_penalty=column("presence"),
        token_counts=sk.TokenCounts(ids, NEW, mask),
    )  # fmt: skip


@pytest.mark.parametrize("requests", [PLAIN, ASKED], ids=["plain", "processors"])
@pytest.mark.parametrize("acceptance", ["token", "match", "greedy"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_is_what_the_model_says(name: str, acceptance: str, requests: list[Request]) -> None:
    """A forward of the model over the whole text, float64 and plain Python give the same numbers."""
    target, draft = tiny("llama", 1), near("llama", 1, 0.1)
    ids, mask = prompts(3, 9, 6)
    sampling = sk.SamplingParams(0.8, top_k=25)
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=DRAFTERS[name](target, draft), sampling=sampling,
        processors=None if requests is PLAIN else as_processors(requests, ids, mask), max_new_tokens=NEW,
        seeds=torch.tensor([5, -1, 2**40]), acceptance=acceptance, eos_token_id=1, return_logprobs=TOP,
        num_speculative_tokens=3,
    )  # fmt: skip
    assert out.logprobs is not None
    if acceptance == "greedy":
        sampling = sk.SamplingParams(0.0)
    for b, request in enumerate(requests):
        prompt, n = ids[b][mask[b] > 0].tolist(), int(out.num_tokens[b])
        text = out.tokens[b, :n].tolist()
        with torch.inference_mode():
            logits = target(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].double()
        history = replace(request, prompt=prompt)
        made = torch.stack([torch.from_numpy(history.row(row, text[:j])) for j, row in enumerate(logits)])
        own = torch.tensor(text)
        raw, _, rank, top, top_raw, _ = described(logits, own, sampling, TOP)
        with np.errstate(divide="ignore"):
            law = np.log(float64_law(made, sampling))
        one, its_top = (np.take_along_axis(law, i, -1) for i in (own.numpy()[:, None], top))
        of_text = sk.TokenLogprobs(*(t[b, :n] for t in out.logprobs))
        assert bool((of_text.log_prob > -math.inf).all()) and bool((of_text.status == 0).all())
        check(of_text, (raw, one[:, 0], rank, top, top_raw, its_top), atol=2e-4)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("num_speculative_tokens", [0, 4, "auto"])
def test_drafts_change_nothing(num_speculative_tokens: int | str, num_top: int) -> None:
    """Bit for bit those of plain decoding, where the model's forward is the same for any number of rows."""
    ids, mask = prompts(4, 2, 6, vocab=23)
    both = [
        sk.generate(
            TableRunner(TARGET), ids, attention_mask=mask, drafter=drafter, seeds=torch.arange(3), acceptance="match",
            max_new_tokens=30, num_speculative_tokens=num_speculative_tokens, eos_token_id=4, return_logprobs=num_top,
        )
        for drafter in (sk.NoDrafter(), sk.ModelDrafter(TableRunner(NEAR)))
    ]  # fmt: skip
    assert torch.equal(both[0].tokens, both[1].tokens)
    plain, drafted = (out.logprobs for out in both)
    assert plain is not None and drafted is not None and plain.top_ids.shape == (*both[0].tokens.shape, num_top)
    for one, other in zip(plain, drafted, strict=True):
        assert torch.equal(one, other)


def test_nothing_past_an_end() -> None:
    ids, mask = prompts(4, 2, 6, 3, vocab=23)
    limits = (7, 1, 100, 12)
    seen = [0] * 4

    def stop(tokens: list[np.ndarray]) -> list[int | None]:
        answers: list[int | None] = []
        for b, new in enumerate(tokens):
            kept = limits[b] - seen[b]
            seen[b] += len(new)
            answers.append(kept if 0 < kept <= len(new) else None)
        return answers

    def run(**more: Any) -> sk.GenerationOutput:
        return sk.generate(
            TableRunner(TARGET), ids, attention_mask=mask, drafter=sk.ModelDrafter(TableRunner(NEAR)),
            max_new_tokens=30, num_speculative_tokens=4, acceptance="match", seeds=torch.arange(4), eos_token_id=[],
            return_logprobs=2, **more,
        )  # fmt: skip

    def at_once(tokens: list[np.ndarray]) -> list[int | None]:
        return [min(len(new), 1 + b % 2) for b, new in enumerate(tokens)]

    whole = run()
    assert whole.logprobs is not None
    for out, expected in ((run(stop=stop), [7, 1, 30, 12]), (run(stop=at_once), None)):
        assert expected is None or out.num_tokens.tolist() == expected
        assert out.logprobs is not None and out.num_tokens.unique().numel() > 1
        there = out.tokens >= 0
        nothing = (-math.inf, -math.inf, 0, 0, -1, -math.inf, -math.inf)
        for ours, its, none in zip(out.logprobs, whole.logprobs, nothing, strict=True):
            assert torch.equal(ours[there], its[:, : there.shape[1]][there]) and bool((ours[~there] == none).all())


@pytest.mark.parametrize("kind", ["step", "callable", "put and end"])
def test_a_streamer_is_told_just_before_the_tokens(kind: str) -> None:
    """Of whatever kind it is: the same as in the end, and cut where `stop` cuts."""
    told: list[list[Any]] = []

    class Streamer:
        def logprobs(self, likely: list[sk.TokenLogprobs]) -> None:
            assert all(isinstance(one, sk.TokenLogprobs) for one in likely)
            told.append([likely])

    def lengths(self: Streamer, *given: Any) -> None:
        if told:  # else it is the prompt, or nobody asks
            told[-1].append([len(row) for row in given[0]] if isinstance(given[0], list) else [len(given[0])])

    methods: dict[str, Any] = {
        "step": {"step": lengths}, "callable": {"__call__": lengths},
        "put and end": {"put": lengths, "end": lambda self: None},
    }[kind]  # fmt: skip
    streamer = type("Whole", (Streamer,), methods)()
    ids, mask = prompts(4, 2, 6, vocab=23) if kind != "put and end" else prompts(4, vocab=23)
    limit = iter([0] * 2)
    given: dict[str, Any] = {
        "attention_mask": mask, "drafter": sk.ModelDrafter(TableRunner(NEAR)), "max_new_tokens": 9,
        "num_speculative_tokens": 3, "acceptance": "match", "seeds": torch.arange(len(ids)),
        "stop": lambda tokens: [None if next(limit, 1) == 0 else min(1, len(row)) for row in tokens],
    }  # fmt: skip
    out = sk.generate(TableRunner(TARGET), ids, streamer=streamer, return_logprobs=2, **given)
    assert out.logprobs is not None and len(told) > 1
    assert all([len(one.log_prob) for one in likely] == emitted for likely, emitted in told)
    for b, n in enumerate(out.num_tokens.tolist()):
        for place, whole in enumerate(out.logprobs):
            assert torch.equal(torch.cat([likely[b][place] for likely, _ in told]), whole[b, :n])
    told.clear()
    assert sk.generate(TableRunner(TARGET), ids, streamer=streamer, **given).logprobs is None and told == []


def test_not_asked_for() -> None:
    ids, mask = prompts(4, 2, vocab=23)
    out = sk.generate(TableRunner(TARGET), ids, attention_mask=mask, drafter=sk.NoDrafter(), max_new_tokens=3)
    assert out.logprobs is None
