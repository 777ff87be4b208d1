"""What is sampled through transformers' assisted generation: folded parameters, joint distributions, seeds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

import specdec_kernels as sk
from python_tests.decoding.models import VOCAB, TableRunner, prompts, tiny
from python_tests.integrations.assistants import DRAFTED, PAIRS, NoEvenAfterOdd
from specdec_kernels.decoding import DecodingState, Prompt, StepResult
from specdec_kernels.drafters import Draft, TreeDrafter
from specdec_kernels.integrations.transformers import assisted, assisted_generation, generate, processors
from specdec_kernels.testing import float64_law
from specdec_kernels.testing.counts import g_test

TAIL = [
    hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(9), hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.1),
    hf.LogitNormalization(),
]  # fmt: skip
PENALTY = hf.RepetitionPenaltyLogitsProcessor(1.5)


@pytest.mark.parametrize(
    ("given", "num_kept", "sampling"),
    [
        (TAIL, 0, sk.SamplingParams(0.7, 9, 0.8, 0.1)),
        ([PENALTY, *TAIL], 1, sk.SamplingParams(0.7, 9, 0.8, 0.1)),
        ([TAIL[0], PENALTY, *TAIL[2:]], 2, sk.SamplingParams(top_p=0.8, min_p=0.1)),
        ([TAIL[1], TAIL[0]], 1, sk.SamplingParams(0.7)),
        ([TAIL[1], TAIL[1]], 1, sk.SamplingParams(top_k=9)),
        ([TAIL[0], hf.TypicalLogitsWarper(0.9)], 2, sk.SamplingParams()),
        ([TAIL[0], hf.TopPLogitsWarper(0.8, min_tokens_to_keep=2)], 2, sk.SamplingParams()),
        ([TAIL[0], hf.TopKLogitsWarper(9, filter_value=-5.0)], 2, sk.SamplingParams()),
        ([TAIL[4], PENALTY], 2, sk.SamplingParams()),
    ],
)
def test_the_longest_tail_folds(given: list[Any], num_kept: int, sampling: sk.SamplingParams) -> None:
    kept, folded, found = processors.split_processors(given, True)
    assert [*kept, *folded] == given and len(kept) == num_kept and found == sampling
    kept, folded, found = processors.split_processors(given, False)
    assert found.is_greedy and not any(type(p) in processors._WARPERS for p in folded)


def test_top_p_of_0_is_the_likeliest_only() -> None:
    """There; in `SamplingParams` it is "off"."""
    _, _, sampling = processors.split_processors([hf.TopPLogitsWarper(0.0)], True)
    rows = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0))
    draw = sk.sample(rows[:, None], sampling, uniform_samples=torch.rand(50, 1))
    assert torch.equal(draw.token[:, 0], rows.argmax(1))
    model, assistant = PAIRS["llama"]()
    ids, mask = prompts(4, 9)
    kw: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 15}
    with assisted_generation():
        found = model.generate(ids, assistant_model=assistant, do_sample=True, top_p=0.0, **kw)
    assert torch.equal(found, model.generate(ids, do_sample=False, **kw))


SAMPLED: dict[str, dict[str, Any]] = {
    "T = 0.9": {"temperature": 0.9, "top_k": 0},
    "cut": {"temperature": 1.2, "top_k": 3, "top_p": 0.9},
    "penalty, own, cut": {
        "temperature": 1.3, "top_k": 2, "min_p": 0.05, "repetition_penalty": 1.6,
        "logits_processor": [NoEvenAfterOdd()],
    },
    "typical": {"temperature": 1.1, "top_k": 0, "typical_p": 0.9},
}  # fmt: skip
SMALL = {"vocab_size": 4, "num_hidden_layers": 1, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
LENGTH, BATCH, FAMILY_WISE = 4, 8192, 1e-6


@functools.cache
def small_pair() -> tuple[Any, Any]:
    target, draft = (tiny("llama", seed, **SMALL, initializer_range=0.6) for seed in (1, 2))
    return target, draft


def joint(model: Any, prompt: Tensor, options: dict[str, Any]) -> np.ndarray:
    """``[vocab] * LENGTH`` float64: the law of plain sampling, from transformers' own scores along every text."""
    law = np.ones((4,) * LENGTH)
    every = torch.tensor(list(itertools.product(range(4), repeat=LENGTH)))
    prepared = model._get_logits_processor(
        GenerationConfig(do_sample=True, **{k: v for k, v in options.items() if k != "logits_processor"}),
        input_ids_seq_length=3, logits_processor=options.get("logits_processor"), device="cpu",
    )  # fmt: skip
    texts = torch.cat([prompt.expand(len(every), -1), every], 1)
    with torch.inference_mode():
        logits = model(texts).logits.float()
    for t in range(LENGTH):
        scores = prepared(texts[:, : 3 + t], logits[:, 2 + t].clone())
        probs = float64_law(scores)
        law *= np.take_along_axis(probs, every[:, t : t + 1].numpy(), 1).reshape(law.shape)
    return law


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("name", SAMPLED)
def test_joint_law_is_plain_sampling_s(name: str, acceptance: str, drafted: str) -> None:
    """A G-test of the joint of all tokens; one family-wise level over all cases."""
    model, assistant = small_pair()
    prompt = torch.tensor([[1, 0, 2]])
    rows = 1024 if "penalty" in name or "typical" in name else BATCH  # processors run row by row
    options = SAMPLED[name] | {"do_sample": True, "max_new_tokens": LENGTH}
    torch.manual_seed(11)
    with assisted_generation(num_speculative_tokens=2, acceptance=acceptance):
        out = model.generate(prompt.expand(rows, -1), **options, **DRAFTED[drafted](assistant))
    check_law(out[:, 3:], joint(model, prompt, SAMPLED[name]))


class BothAndBoth(TreeDrafter):
    """Two ids after the text, and two after the first of them."""

    num_nodes, max_depth = 5, 2

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        tokens = (state.last_tokens() + torch.tensor([1, 2, 1, 2])) % state.vocab_size
        return Draft(tokens, tree=sk.DraftTree.from_parents([-1, 0, 0, 1, 1]))

    def commit(self, state: DecodingState, result: StepResult) -> None: ...


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("name", SAMPLED)
def test_joint_law_of_trees(name: str) -> None:
    """Each node's row goes through the processors with the path that leads to it."""
    model, _ = small_pair()
    rows = 1024 if "penalty" in name or "typical" in name else BATCH
    torch.manual_seed(12)
    out = model.generate(
        torch.tensor([[1, 0, 2]]).expand(rows, -1), custom_generate=generate, drafter=BothAndBoth(), do_sample=True,
        max_new_tokens=LENGTH, **SAMPLED[name],
    )  # fmt: skip
    check_law(out[:, 3:], joint(model, torch.tensor([[1, 0, 2]]), SAMPLED[name]))


def check_law(tokens: Tensor, law: np.ndarray) -> None:
    assert abs(law.sum() - 1) < 1e-6
    counts = np.zeros_like(law)
    np.add.at(counts, tuple(tokens.numpy().T), 1)
    p_value = g_test(counts, law)
    distance = np.abs(counts / counts.sum() - law).sum() / 2
    assert p_value > FAMILY_WISE / 40, f"p = {p_value:.1e}, TV about {distance:.3f}"


def warpers_first(patch: pytest.MonkeyPatch) -> None:
    split = processors.split_processors

    def unordered(given: Any, do_sample: bool) -> Any:
        return split(sorted(given, key=lambda p: type(p) not in processors._WARPERS), do_sample)

    patch.setattr(assisted, "split_processors", unordered)


def nothing_written_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(processors.ProcessedRunner, "_note", lambda self, tokens, first: tokens)


def siblings_as_a_chain(patch: pytest.MonkeyPatch) -> None:
    process = processors.ProcessedRunner._process_one
    patch.setattr(
        processors.ProcessedRunner, "_process_one",
        lambda self, b, tokens, before, parents: process(self, b, tokens, before, [i - 1 for i in range(len(parents))]),
    )  # fmt: skip


def no_top_k(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(processors, "SamplingParams", lambda top_k=0, **others: sk.SamplingParams(**others))


DEFECTS = {warpers_first: "lookup", nothing_written_down: "lookup", no_top_k: "lookup", siblings_as_a_chain: "tree"}


@pytest.mark.short(cases=2)
@pytest.mark.parametrize(("defect", "drafted"), DEFECTS.items())
def test_a_planted_defect_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], drafted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match="TV about|EMPTY_ROW"):
        if drafted == "tree":
            test_joint_law_of_trees("penalty, own, cut")
        else:
            test_joint_law_is_plain_sampling_s("penalty, own, cut", "token", drafted)


def test_a_seed_of_torch_reproduces_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """So draft lengths are chosen by costs that are always the same, though seeds were not given."""
    model, _ = PAIRS["llama"]()
    decode, costs = assisted.decode, []

    def noted(*of: Any, **how: Any) -> Any:
        out = decode(*of, **how)
        costs.append(out.stats.costs.seconds.tolist())
        return out

    monkeypatch.setattr(assisted, "decode", noted)
    kw: dict[str, Any] = {"do_sample": True, "max_new_tokens": 15, "num_speculative_tokens": "auto"}
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        out = model.generate(prompts(4, 4)[0], custom_generate=generate, drafter=sk.NgramDrafter(), **kw)
        texts.append(out.tolist())
    assert texts[0] == texts[1]
    assert costs == [sk.decoding.CostTable.nominal(False, 2).seconds.tolist()] * 2


def test_seeds() -> None:
    model, assistant = PAIRS["llama"]()
    ids, mask = prompts(4, 9, 6)
    kw: dict[str, Any] = {"attention_mask": mask, "do_sample": True, "max_new_tokens": 15, "eos_token_id": None}

    def run(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        with assisted_generation():
            found: list[list[int]] = model.generate(ids, assistant_model=assistant, **kw).tolist()
        return found

    assert run(5) == run(5) != run(6)
    given = {"custom_generate": generate, "drafter": sk.NgramDrafter(), "acceptance": "match", **kw}
    seeds = torch.tensor([3, 1, 4])
    out = model.generate(ids, seeds=seeds, **given)
    assert torch.equal(out, model.generate(ids, seeds=seeds, num_speculative_tokens=1, **given))
    turned = model.generate(ids.flip(0), seeds=seeds.flip(0), **{**given, "attention_mask": mask.flip(0)})
    assert torch.equal(out, turned.flip(0))  # in any slot


def test_logits_that_cannot_be_sampled_from() -> None:
    model, _ = PAIRS["llama"]()
    broken = [lambda ids, row: torch.full_like(row, torch.nan)]
    with assisted_generation(), pytest.raises(RuntimeError, match="logits of sequence 0 cannot be sampled from: NAN"):
        model.generate(prompts(4)[0], prompt_lookup_num_tokens=2, do_sample=True, logits_processor=broken, top_k=0)
    assistant = tiny("llama", 2)
    assistant.get_output_embeddings().weight.data[7] = torch.nan  # the model itself is fine
    with assisted_generation(), pytest.raises(RuntimeError, match="cannot be sampled from: NAN.* or its assistant's$"):
        model.generate(prompts(4)[0], assistant_model=assistant, do_sample=True)
    # Nor is that hidden by a criterion that ends nothing, beside processors.
    never = [lambda ids, scores, **kwargs: torch.zeros(len(ids), dtype=torch.bool)]
    with assisted_generation(), pytest.raises(RuntimeError, match="cannot be sampled from: NAN.* or its assistant's$"):
        model.generate(
            prompts(4)[0], assistant_model=assistant, do_sample=True, repetition_penalty=1.1, stopping_criteria=never
        )


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("trees", [False, True])
def test_rows_behind_one_that_is_wholly_barred_are_processed(value: float, trees: bool) -> None:
    """Such a row emits id 0, or any where all have one finite logit: its drafted token may be accepted."""
    model, _ = PAIRS["llama"]()
    ids = torch.tensor([[9, 8, 7] + [0, 5, 6] * 3]).repeat(24, 1)
    if value > -torch.inf:
        ids[:, -3] = ids[:, -6] = torch.arange(24)  # lookups draft various ids there

    def bars(text: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, value)
        if text.shape[1] % 3:
            kept.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
            kept[:, 5:7] = scores[:, 5:7]
        return kept

    options: dict[str, Any] = {"logits_processor": [bars], "max_new_tokens": 12, "eos_token_id": -1, "top_k": 0}
    options |= {"do_sample": value > -torch.inf}
    torch.manual_seed(2)
    if trees:
        out = model.generate(ids, custom_generate=generate, drafter=sk.NgramTreeDrafter(max_depth=4), **options)
    else:
        with assisted_generation():
            out = model.generate(ids, prompt_lookup_num_tokens=4, **options)
    behind = out[:, 12:].view(24, 4, 3)[:, :, 1:]
    assert bool(((behind == 5) | (behind == 6)).all())
    if not options["do_sample"]:
        assert torch.equal(out, model.generate(ids, **options))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_draft_goes_on_from_a_token_that_it_bars(drafts: bool) -> None:
    """A recovered token may be one; as a draft token of the target's it would be impossible, and its row of no use."""
    bar = hf.SuppressTokensLogitsProcessor([3], device="cpu")
    table, vocab = TableRunner(torch.zeros(5, 5, 5)), 5 if drafts else None
    runner = processors.ProcessedRunner(table, [bar], torch.tensor([[1, 2]]), (), vocab)
    runner.start(Prompt(torch.tensor([[1, 2]]), torch.tensor([2]), [np.array([1, 2])], 2), 8)
    rows = runner.forward(torch.tensor([[2, 3]]), torch.tensor([1]), 8)
    assert rows is not None and rows[0, 0, 3] == -torch.inf and (rows[0, 1, 3] == -torch.inf) == drafts
