"""The programs in examples/: what they emit has the target's distribution."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import near, prompts, tiny
from python_tests.support import example
from specdec_kernels.assets import model_dir
from specdec_kernels.decoding import Prompt
from specdec_kernels.testing.counts import g_test

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_every_example_is_tested() -> None:
    assert {"plain_loop", "compiled_step", "llama_cpp_loop", "own_loop", "sharded_vocabulary"} == set(PROGRAMS)


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


def test_the_plain_loop_reads_no_position_behind_the_answer() -> None:
    """A model may have none. Its own drafts are all accepted: three are left to come when the last step begins."""
    target, ids = tiny("gpt2", 1, n_positions=6 + 23), prompts(6)[0]
    made = example("plain_loop").speculate(target, target, ids, sk.SamplingParams(0.0), max_new_tokens=23)
    expected = sk.generate(
        target, ids, drafter=sk.NoDrafter(), acceptance="greedy", max_new_tokens=23, eos_token_id=[]
    )  # fmt: skip
    assert torch.equal(made, expected.sequences)


@pytest.mark.slow
def test_the_plain_loop_has_the_targets_distribution() -> None:
    """The first two tokens of many answers, compared with both steps of the target's own distribution."""
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
    assert (expected * runs >= 5).sum() >= 8 and g_test(counts.numpy(), expected.numpy(), 5.0) > 1e-6


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_own_loop_is_the_model_s(compiled: bool) -> None:
    """Prompts of different lengths, plainly and with drafts, compared with the same model in transformers."""
    target = tiny("llama", 1)
    ids, mask = prompts(3, 9, 6)
    lean = example("own_loop").LeanLlama(target, compile=compiled)
    expected = sk.generate(target, ids, attention_mask=mask, drafter=sk.NoDrafter(), acceptance="greedy")
    guess = near("llama", 1, 0.15)
    trees = [sk.ModelTreeDrafter(of, 12, 4) for of in (guess, example("own_loop").LeanLlama(guess))]
    for drafter in (sk.NoDrafter(), sk.NgramDrafter(), sk.ModelDrafter(guess), *trees):
        out = sk.generate(
            lean, ids, attention_mask=mask, drafter=drafter, acceptance="greedy", num_speculative_tokens=4,
            eos_token_id=lean.end_ids,
        )  # fmt: skip
        assert torch.equal(out.tokens, expected.tokens)
        if drafter in trees:
            assert out.stats.mean_acceptance_length > 1.5, "what was accepted stands where the text's rows stand"


def test_the_own_loop_s_ends_are_the_model_s() -> None:
    target, lean = tiny("llama", 1), example("own_loop").LeanLlama
    for ends, expected in ((None, ()), (7, (7,)), ([7, 9], (7, 9))):
        target.generation_config.eos_token_id = ends
        assert lean(target).end_ids == expected
    with pytest.raises(ValueError, match="model must be without biases"):
        lean(tiny("llama", 1, mlp_bias=True))


def test_the_own_loop_s_logits_are_the_model_s_in_half_precision() -> None:
    target = tiny("llama", 1).bfloat16()
    lean = example("own_loop").LeanLlama(target)
    ids = prompts(40)[0]
    lean.start(Prompt(ids, torch.tensor([40]), [ids[0].numpy()]), 64)
    with torch.inference_mode():
        found = torch.cat([lean.forward(ids[:, :32], torch.tensor([0]), 32)] + [
            lean.forward(ids[:, i : i + 1], torch.tensor([i]), i + 1) for i in range(32, 40)
        ], 1)  # fmt: skip
        expected = target(ids).logits
    assert found.dtype == torch.bfloat16 and (found - expected).abs().max() < 0.03 * expected.abs().max()


class Markov(ModuleType):
    """Stands in for the module `llama_cpp`: a model whose next token depends only on the last one, and a cache that
    must be fed in order. `make test-llama-cpp` runs the same program in llama.cpp itself.
    """

    n_batch = 8
    n_ctx = 64
    forgets = True

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__("llama_cpp")
        self.table, self.cache, self.ctx, self.calls = table, list[int](), self, 0

    def n_vocab(self) -> int:
        return self.table.shape[1]

    def token_eos(self) -> int:
        return self.n_vocab() - 1

    def llama_batch_init(self, size: int, *_: int) -> SimpleNamespace:
        lists = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[9] for _ in range(size)], **lists)

    def llama_batch_free(self, batch: SimpleNamespace) -> None:
        batch.n_tokens = -1

    def llama_decode(self, ctx: object, batch: SimpleNamespace) -> int:
        taken = range(batch.n_tokens)
        if len(self.cache) + len(taken) > self.n_ctx:
            return 1
        assert [batch.pos[i] for i in taken] == [len(self.cache) + i for i in taken]
        assert all(batch.n_seq_id[i] == 1 and batch.seq_id[i] == [0] for i in taken)
        self.cache += batch.token[: batch.n_tokens]
        rows = self.table[[batch.token[i] for i in taken if batch.logits[i]]].contiguous()
        self.rows = (ctypes.c_float * rows.numel())(*rows.flatten().tolist())
        self.calls += 1
        return 0

    def llama_get_logits(self, ctx: object) -> Any:
        return self.rows

    def llama_get_memory(self, ctx: object) -> list[int]:
        return self.cache

    def llama_memory_clear(self, memory: list[int], data: bool) -> None:
        memory.clear()

    def llama_memory_seq_rm(self, memory: list[int], sequence: int, first: int, end: int) -> bool:
        assert sequence == 0 and end == -1
        if self.forgets:
            del memory[first:]
        return self.forgets


@pytest.fixture
def markov(monkeypatch: pytest.MonkeyPatch) -> Markov:
    rng = torch.Generator().manual_seed(1)
    module = Markov(torch.randn(5, 5, generator=rng) + torch.tensor([0.0, 0, 0, 0, -1]))
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    return module


def test_the_loop_around_llama_cpp_is_greedy_decoding_at_temperature_0(markov: Markov) -> None:
    """Four tokens that follow one another in a cycle: what lookup drafts is accepted."""
    markov.table = 9 * torch.eye(5)[[1, 2, 3, 0, 0]]
    prompt = [0, 1, 2, 3] * 3 + [0]
    text, steps = example("llama_cpp_loop").speculate(markov, prompt, sk.SamplingParams(0.0), max_new_tokens=12)
    assert text == [0, 1, 2, 3] * 6 + [0] and steps == 2
    assert markov.calls == steps + 2  # the prompt took two
    markov.table[0, 4] = 10  # now the end follows the 0
    text, _ = example("llama_cpp_loop").speculate(markov, prompt, sk.SamplingParams(0.0), max_new_tokens=12)
    assert text == [*prompt, 4]


@pytest.mark.parametrize("n_batch", [8, 3])
def test_the_loop_around_llama_cpp_needs_no_more_room_than_the_answer(markov: Markov, n_batch: int) -> None:
    markov.table = 9 * torch.eye(5)[[1, 2, 3, 0, 0]]
    prompt = [0, 1, 2, 3] * 3 + [0]
    markov.n_ctx, markov.n_batch = len(prompt) + 8 - 1, n_batch  # the last token is emitted, not read
    text, steps = example("llama_cpp_loop").speculate(markov, prompt, sk.SamplingParams(0.0), max_new_tokens=8)
    assert text == [0, 1, 2, 3] * 5 + [0] and steps == {8: 2, 3: 3}[n_batch]


def test_a_memory_that_cannot_forget_is_refused(markov: Markov) -> None:
    markov.forgets = False
    with pytest.raises(RuntimeError, match="this model's memory cannot forget tokens"):
        example("llama_cpp_loop").speculate(markov, [0, 1, 0, 1], sk.SamplingParams(), max_new_tokens=4)


@pytest.mark.slow
def test_the_loop_around_llama_cpp_has_the_models_distribution(markov: Markov) -> None:
    loop, params = example("llama_cpp_loop").speculate, sk.SamplingParams(0.9)
    law, runs = (markov.table.double() / 0.9).softmax(-1), 3000
    counts, drafted = torch.zeros(5, 5), 0
    for seed in range(runs):
        text, steps = loop(markov, [1, 2, 0, 1], params, seed=seed, max_new_tokens=2)
        first, second = (*text[4:], 4)[:2]
        counts[first, second] += 1
        drafted += steps == 1
    expected = law[1][:, None] * law
    expected[4] = torch.tensor([0, 0, 0, 0, law[1, 4]])  # the end ends it
    assert g_test(counts.numpy(), expected.numpy(), 0.0) > 1e-6 and drafted > 100


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


def test_the_sharded_vocabulary_emits_what_whole_rows_give() -> None:
    program = ROOT / "examples/sharded_vocabulary.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    example_ = example("sharded_vocabulary")
    ranks, seeds = [example_.Rank(rank, 2) for rank in range(2)], torch.arange(example_.BATCH)
    expected = []
    for step in range(3):
        target, draft = (torch.cat(columns, -1) for columns in zip(*(rank.logits() for rank in ranks), strict=True))
        tokens = example_.draft_tokens(draft, seeds, step)
        out = sk.verify_chain(
            target, tokens, draft, seeds=seeds, step=step, params=example_.SAMPLING, draft_params=example_.SAMPLING
        )
        expected.append(str(out.tokens.tolist()))
    assert done.stdout.split("\n")[:-1] == expected


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("name", ["llama_cpp_loop", "own_loop", "plain_loop", "sharded_vocabulary"])
def test_a_program_that_is_called_wrongly_says_how_it_is_called(name: str) -> None:
    program = ROOT / f"examples/{name}.py"
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and f"examples/{name}.py" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.model
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"), [("own_loop", 4 * ["tokens/s"] + 4 * [" ms"]), ("plain_loop", ["A robin is"])]
)
def test_a_program_runs_with_the_real_model(name: str, said: list[str]) -> None:
    arguments = [model_dir(), model_dir(), "A robin is"] if name == "plain_loop" else []
    done = subprocess.run(
        [sys.executable, ROOT / f"examples/{name}.py", *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= len(said) and all(words in line for words, line in zip(said, lines, strict=False))


@pytest.mark.long
def test_the_compiled_step_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/compiled_step.py"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    words, mean = done.stdout.rsplit(maxsplit=1)
    assert words == "tokens a step:" and 1 <= float(mean) <= 6
