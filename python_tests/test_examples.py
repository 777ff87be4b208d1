"""The programs in examples/: what they emit has the target's distribution."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy import stats

import specdec_kernels as sk
from python_tests.decoding.models import near, prompts, tiny

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    assert {"plain_loop", "compiled_step"} == set(PROGRAMS)


def test_the_plain_loop_is_greedy_decoding_at_temperature_0() -> None:
    target, draft = tiny("llama", 1), near("llama", 1, 0.15)
    ids = prompts(6)[0]
    expected = target.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)
    loop = example("plain_loop").speculate
    assert loop(target, draft, ids, sk.SamplingParams(0.0), max_new_tokens=24).tolist() == expected.tolist()
    end = expected[0, 6 + 10 : 6 + 11]
    cut = loop(target, draft, ids, sk.SamplingParams(0.0), max_new_tokens=24, eos_token_ids=end)
    first = int((expected[0, 6:] == end).nonzero()[0])
    assert cut.tolist() == expected[:, : 6 + first + 1].tolist()


@pytest.mark.slow
def test_the_plain_loop_has_the_targets_distribution() -> None:
    """The first two tokens of many answers, against both steps of the target's own distribution."""
    vocab, runs, ids = 4, 400, torch.tensor([[1, 2]])
    target = tiny("llama", 1, vocab_size=vocab, initializer_range=0.25)
    draft = tiny("llama", 2, vocab_size=vocab, initializer_range=0.25)
    with torch.inference_mode():
        first = target(ids).logits[0, -1].double().softmax(-1)
        longer = torch.cat([ids.expand(vocab, -1), torch.arange(vocab)[:, None]], 1)
        second = target(longer).logits[:, -1].double().softmax(-1)
    expected = (first[:, None] * second).flatten()
    assert expected.max() < 0.6
    counts = torch.zeros(vocab**2)
    loop = example("plain_loop").speculate
    for seed in range(runs):
        made = loop(target, draft, ids, sk.SamplingParams(), seed=seed, num_draft=2, max_new_tokens=2)[0, 2:].tolist()
        counts[made[0] * vocab + made[1]] += 1
    order = expected.argsort(descending=True)
    often = int((expected[order] * runs >= 5).sum())  # the others count as one
    found, theirs = ([*x[order[:often]].tolist(), float(x[order[often:]].sum())] for x in (counts, expected * runs))
    assert often >= 8 and stats.power_divergence(found, theirs, lambda_="log-likelihood").pvalue > 1e-6


def test_the_compiled_step_is_the_ops_one_by_one() -> None:
    torch.compiler.reset()
    program = example("compiled_step")
    rng, batch, num_draft, vocab = torch.Generator().manual_seed(0), 3, 4, 97
    text, lengths = torch.zeros(batch, 20, dtype=torch.int64), torch.tensor([2, 0, 5])
    seeds, steps = torch.arange(batch), torch.tensor([0, 7, 1])
    target = torch.randn(batch, num_draft + 1, vocab, generator=rng)
    draft = target[:, :-1] + 0.3 * torch.randn(batch, num_draft, vocab, generator=rng)
    written, grown, later = program.verify(target, draft, seeds, steps, text, lengths)
    uniforms = sk.uniform_samples(seeds, steps, num_draft, "draft")
    tokens = sk.sample(draft, program.SAMPLING, uniform_samples=uniforms).token
    out = sk.verify_chain(
        target, tokens, draft, uniform_samples=sk.uniform_samples(seeds, steps, num_draft + 1), acceptance="block",
        params=program.SAMPLING, draft_params=program.SAMPLING,
    )  # fmt: skip
    assert grown.tolist() == (lengths + out.num_tokens).tolist() and later.tolist() == (steps + 1).tolist()
    for b, (begin, end) in enumerate(zip(lengths.tolist(), grown.tolist(), strict=True)):
        assert written[b, begin:end].tolist() == out.tokens[b, : end - begin].tolist()
    assert len(set(itertools.chain(*out.tokens.tolist()))) > 3
