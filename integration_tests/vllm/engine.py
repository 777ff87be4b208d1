"""One vLLM engine, in a process of its own, and what it answers: ``python -m integration_tests.vllm.engine NAME OUT``.

`answers` says what an engine is asked for, `DRAFTS` how it speculates; the answers are written as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[2] / "build" / "vllm"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the engine has a process of its own, its worker another
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    # threads that wait do not spin: the processes share few cores
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}
DRAFTS = ("none", "ngram", "model")
LAW_SAMPLES, LAW_TOKENS = 2000, 4
"""Continuations of one prompt, and tokens of each."""
LAWS = {"T=1": {"temperature": 1.0}, "cut": {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.02}}
REPEATING = [1, 28, 33, 34, 28, 33, 34, 28]
"""A prompt with repeats: lookup drafts from the first step on."""
_DRAFT_LAYERS = 8


def speculation(name: str) -> dict[str, Any] | None:
    """The ``speculative_config`` of one of `DRAFTS`."""
    if name == "none":
        return None
    if name == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    asked = {"method": "draft_model", "model": str(draft()), "num_speculative_tokens": 3}
    return {**asked, "draft_sample_method": "probabilistic"}


def draft() -> Path:
    """A draft model: the first layers of the target; made once."""
    from specdec_kernels.assets import load_model

    folder = BUILD / f"draft-{_DRAFT_LAYERS}-layers"
    if not folder.exists():
        model, tokenizer = load_model()
        model.model.layers = model.model.layers[:_DRAFT_LAYERS]
        model.config.num_hidden_layers = _DRAFT_LAYERS
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:_DRAFT_LAYERS]
        unfinished = folder.with_suffix(".new")
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def start(name: str) -> Any:
    from vllm import LLM

    from specdec_kernels.assets import model_dir

    return LLM(
        model=str(model_dir()), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=64, seed=0,
        speculative_config=speculation(name), disable_log_stats=False, enable_prefix_caching=False,
    )  # fmt: skip


def prompts() -> list[list[int]]:
    """Three that repeat themselves more, and less."""
    from transformers import AutoTokenizer

    from specdec_kernels.assets import model_dir
    from specdec_kernels.assets.prompts import load_prompts

    tokenizer = AutoTokenizer.from_pretrained(model_dir(), local_files_only=True)
    texts = [load_prompts(name, tokenizer, 1)[0] for name in ("code-edit", "humaneval", "quote")]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def answers(name: str) -> dict[str, Any]:
    """What the engine of this name says to everything that the tests ask."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    engine, asked = start(name), prompts()

    def generate(texts: list[list[int]], params: Any) -> list[Any]:
        given = [{"prompt_token_ids": text} for text in texts]
        return [out for request in engine.generate(given, params, use_tqdm=False) for out in request.outputs]

    def tokens(texts: list[list[int]], params: Any) -> list[list[int]]:
        return [list(out.token_ids) for out in generate(texts, params)]

    def greedy(**options: Any) -> Any:
        return SamplingParams(**{"temperature": 0, "max_tokens": 32, "ignore_eos": True} | options)

    said: dict[str, Any] = {
        "greedy": tokens(asked, greedy()),
        "penalties": tokens(asked, greedy(repetition_penalty=1.3, frequency_penalty=0.2)),
        "min tokens, bad words": tokens(asked, greedy(ignore_eos=False, min_tokens=32, bad_words=[" the", "def"])),
        "allowed ids": tokens(asked, greedy(allowed_token_ids=list(range(1000, 9000)))),
    }
    with_logprobs = generate(asked[:1], greedy(max_tokens=12, logprobs=3))[0]
    said["logprobs"] = [
        {str(token): [entry.rank, entry.logprob] for token, entry in row.items()} for row in with_logprobs.logprobs
    ]
    mixed = [
        greedy(),
        greedy(temperature=0.8, top_k=20, top_p=0.9, seed=7),
        greedy(temperature=1.2, min_p=0.05, seed=9),
    ]
    said["mixed"] = tokens(asked, mixed)
    said["mixed, other slots"] = tokens(asked[::-1], mixed[::-1])[::-1]
    said["alone"] = [tokens([text], params)[0] for text, params in zip(asked, mixed, strict=True)]
    said["min-p 1"] = tokens(asked, greedy(temperature=1.0, min_p=1.0))  # leaves the likeliest alone
    try:
        tokens(asked[:1], greedy(logit_bias={5: 1.0}))
    except VLLMValidationError as error:
        said["logit bias"] = str(error)
    for law, params in LAWS.items():
        many = [SamplingParams(n=50, max_tokens=LAW_TOKENS, ignore_eos=True, **params)]
        said[law] = [row for _ in range(LAW_SAMPLES // 50) for row in tokens([REPEATING], many)]
    said["metrics"] = {m.name: m.value for m in engine.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    return said


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    Path(sys.argv[2]).write_text(json.dumps(answers(sys.argv[1])))
