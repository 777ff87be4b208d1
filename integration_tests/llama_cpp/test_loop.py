"""`examples/llama_cpp_loop.py` in llama.cpp itself, with a real model: what comes out is plain decoding's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import llama_cpp
import numpy as np
import pytest

import specdec_kernels as sk
from python_tests.support import example
from specdec_kernels.assets.model import fetch_gguf
from specdec_kernels.testing.counts import g_test

TIE = 0.25  # in logits
BUILD = Path(__file__).resolve().parents[2] / "build/llama-cpp"
PROMPTS = [
    "Repeat after me: one two three four. one two three four. one two three four.",
    "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n    return",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
]


@pytest.fixture(scope="module")
def llama() -> Any:
    gguf = BUILD / "SmolLM2-135M-Instruct.gguf"
    if not gguf.exists():
        fetch_gguf(BUILD).rename(gguf)
    return llama_cpp.Llama(str(gguf), n_ctx=512, n_batch=64, n_threads=2, verbose=False)


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    return example("llama_cpp_loop")


def rows_after(loop: ModuleType, llama: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The logits after `tokens`, read from the start, one token a call: plain decoding."""
    batch, memory = llama_cpp.llama_batch_init(1, 0, 1), llama_cpp.llama_get_memory(llama.ctx)
    llama_cpp.llama_memory_clear(memory, True)
    for past, token in enumerate(tokens):
        logits = loop.scored(llama, batch, [token], past, 1)
    llama_cpp.llama_batch_free(batch)
    found: np.ndarray[Any, Any] = logits[0, 0].double().numpy().copy()
    return found


def test_greedy_is_that_of_plain_decoding(loop: ModuleType, llama: Any) -> None:
    """llama.cpp rounds otherwise for another number of rows, and its weights here have four bits: a token may differ
    where its rival stands that near.
    """
    saved = 0
    for prompt in PROMPTS:
        ids = llama.tokenize(prompt.encode())
        text, steps = loop.speculate(llama, ids, sk.SamplingParams(0.0), max_new_tokens=24)
        saved += len(text) - len(ids) - steps
        for end in range(len(ids), len(text)):
            row = rows_after(loop, llama, text[:end])
            assert row[text[end]] >= row.max() - TIE, (prompt, end, text[end], int(row.argmax()))
    assert saved > 4  # drafts were accepted


def test_what_is_sampled_has_the_models_distribution(loop: ModuleType, llama: Any) -> None:
    """Two tokens, of four each, against the exact distribution: what lookup drafts is taken and refused."""
    ids = llama.tokenize(b"red or blue or red or green or blue or red or")
    sampling, runs = sk.SamplingParams(1.5, top_k=4), 1500

    def law(tokens: list[int]) -> dict[int, float]:
        row = rows_after(loop, llama, tokens)
        best = row.argsort()[-4:]
        weights = np.exp((row[best] - row.max()) / 1.5)
        return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

    first = law(ids)
    expected = {(a, b): p * q for a, p in first.items() for b, q in law([*ids, a]).items()}
    answers = [loop.speculate(llama, ids, sampling, seed=seed, max_new_tokens=2) for seed in range(runs)]
    counts = Counter(tuple(text[len(ids) :]) for text, _ in answers)
    assert set(counts) <= set(expected)
    assert {steps for _, steps in answers} == {1, 2}
    probs = np.array(list(expected.values()))
    found = np.array([counts[pair] for pair in expected], float)
    assert (probs * runs >= 10).sum() >= 8 and g_test(found, probs) > 1e-6
