"""The plug-in's stand-ins for vLLM's functions, called with vLLM's signatures and stand-ins of its metadata.

`make test-vllm` runs them inside vLLM.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law import steps
from python_tests.law.windows import FAMILY_WISE, WINDOW, counted
from python_tests.ops.inputs import Widest
from python_tests.support import environment
from specdec_kernels.integrations import vllm as plugin
from specdec_kernels.integrations.vllm import replacing, v1, v2
from specdec_kernels.testing import ChainProblem, Verify, exact_law, target_joint, total_variation
from specdec_kernels.testing.counts import g_test

TOLERANCE = 1e-4


# ---------------------------------------------------------------- stand-ins of vLLM's objects


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def sampling_metadata(temperature: Tensor, **given: Any) -> SimpleNamespace:
    """``SamplingMetadata``; `min_p` ``[batch]`` stands in a logits processor, as it does there."""
    min_p = given.pop("min_p", None)
    processors = [] if min_p is None else [SimpleNamespace(min_p_count=1, min_p=min_p[:, None])]
    known = {
        "temperature": temperature, "all_greedy": False, "all_random": False, "top_k": None, "top_p": None,
        "generators": {}, "max_num_logprobs": None, "no_penalties": True, "bad_words_token_ids": {},
        "allowed_token_ids_mask": None, "thinking_budget_state_holder": None,
        "logitsprocs": SimpleNamespace(argmax_invariant=processors, non_argmax_invariant=[]),
    }  # fmt: skip
    return SimpleNamespace(**known | given)


def spec_metadata(tokens: Tensor, lengths: Sequence[int]) -> SimpleNamespace:
    """``SpecDecodeMetadata`` of packed draft tokens."""
    sampled = cumulative([length + 1 for length in lengths])
    bonus = sampled.long() - 1
    rows = torch.arange(int(sampled[-1]))
    return SimpleNamespace(
        draft_token_ids=tokens, num_draft_tokens=list(lengths), cu_num_draft_tokens=cumulative(lengths),
        cu_num_sampled_tokens=sampled, max_spec_len=max(lengths), bonus_logits_indices=bonus,
        target_logits_indices=rows[~torch.isin(rows, bonus)],
    )  # fmt: skip


def sampler(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"synthetic_mode": False, "is_processed_logprobs_mode": False} | given)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("vLLM's own function was called")


def constraints(logits: Tensor, cu: Tensor, sampling: Any) -> Tensor:
    """What vLLM's ``apply_sampling_constraints`` does, by the plug-in's functions below it."""

    def expand(x: Tensor | None, **options: int) -> Tensor | None:
        return None if x is None else v1.expand_batch_to_tokens(x, cu, len(logits), **options)

    temperature = expand(sampling.temperature, replace_from=0, replace_to=1)
    assert temperature is not None
    logits.div_(temperature[:, None])
    return v1.apply_top_k_top_p(logits, expand(sampling.top_k), expand(sampling.top_p))


V1_FORWARD = v1.make_forward(refuse, SimpleNamespace)
V1_REJECTION_SAMPLE = v1.make_rejection_sample(refuse)
V1_CONSTRAINTS = v1.make_apply_sampling_constraints(constraints)
V2_REJECTION_SAMPLE = v2.make_rejection_sample(refuse)


# ---------------------------------------------------------------- a verify step by each, called as `verify_chain` is


class Step:
    """A padded verify step, laid out as vLLM has it. Its uniforms take the place of those that are drawn there."""

    def __init__(self, target: Tensor, tokens: Tensor, num_draft_tokens: Tensor | None) -> None:
        self.batch, self.num_draft = tokens.shape
        given = [self.num_draft] * self.batch if num_draft_tokens is None else num_draft_tokens.tolist()
        self.lengths: list[int] = given
        self.rows = self.pack(target, 1)
        self.tokens = self.pack(tokens).int()

    def pack(self, padded: Tensor, more: int = 0) -> Tensor:
        """``[batch, num_draft (+ 1), …]`` to the rows that count, end to end."""
        places = torch.arange(padded.shape[1])
        return padded[places < torch.tensor(self.lengths)[:, None] + more]

    def sampling(self, params: sk.SamplingParams) -> SimpleNamespace:
        def per_request(value: Any, off: Any) -> Tensor | None:
            return None if value == off else torch.full((self.batch,), value)

        temperature = torch.full((self.batch,), float(params.temperature))
        cuts = {n: per_request(getattr(params, n), off) for n, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
        return sampling_metadata(temperature, **cuts)

    def result(self, tokens: Tensor) -> SimpleNamespace:
        assert tokens.shape == (self.batch, max(self.lengths) + 1)
        tokens = torch.nn.functional.pad(tokens, (0, self.num_draft + 1 - tokens.shape[1]), value=-1)
        return SimpleNamespace(tokens=tokens, num_tokens=(tokens >= 0).sum(1))


def probabilities(given: dict[str, Any], step: Step) -> Tensor | None:
    probs = given.get("draft_probs")
    return None if probs is None else step.pack(probs)


def v1_forward(
    target: Tensor, tokens: Tensor, *, uniform_samples: Tensor, params: sk.SamplingParams, acceptance: str,
    num_draft_tokens: Tensor | None = None, **given: Any,
) -> SimpleNamespace:  # fmt: skip
    step = Step(target, tokens, num_draft_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1, "coins", lambda *_: step.pack(uniform_samples, 1))
        metadata = spec_metadata(step.tokens, step.lengths)
        out = V1_FORWARD(sampler(), metadata, probabilities(given, step), step.rows, step.sampling(params))
    assert out.sampled_token_ids.dtype == torch.int32
    return step.result(out.sampled_token_ids)


def v1_functions(
    target: Tensor, tokens: Tensor, *, uniform_samples: Tensor, params: sk.SamplingParams, acceptance: str,
    num_draft_tokens: Tensor | None = None, **given: Any,
) -> SimpleNamespace:  # fmt: skip
    step = Step(target, tokens, num_draft_tokens)
    metadata, sampling = spec_metadata(step.tokens, step.lengths), step.sampling(params)
    bonus = sk.sample(step.rows[metadata.bonus_logits_indices], params, uniform_samples=uniform_samples[:, 0]).token
    rows = V1_CONSTRAINTS(step.rows[metadata.target_logits_indices], metadata.cu_num_draft_tokens, sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1, "coins", lambda *_: step.pack(uniform_samples, 1))
        out = V1_REJECTION_SAMPLE(
            step.tokens, step.lengths, metadata.max_spec_len, metadata.cu_num_draft_tokens, probabilities(given, step),
            rows, bonus[:, None], sampling,
        )  # fmt: skip
    return step.result(out)


def v2_rejection_sample(
    target: Tensor, tokens: Tensor, *, uniform_samples: Tensor, params: sk.SamplingParams, acceptance: str,
    num_draft_tokens: Tensor | None = None, draft_logits: Tensor | None = None, **given: Any,
) -> SimpleNamespace:  # fmt: skip
    """Requests lie in twice as many slots, the first one last; slots that are not asked for hold NaN, and so do three
    rows behind the last request's.
    """
    step = Step(target, tokens, num_draft_tokens)
    slots = torch.arange(step.batch).flip(0) * 2 + 1
    temperature = torch.full((2 * step.batch,), torch.nan).index_fill(0, slots, float(params.temperature))
    kept = None
    if draft_logits is not None:
        kept = torch.full((2 * step.batch, *draft_logits.shape[1:]), torch.nan)
        kept[slots] = draft_logits
    lengths = torch.tensor(step.lengths)
    owner = torch.repeat_interleave(lengths + 1)
    cu = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)).int()
    places = torch.arange(len(owner)) - cu[owner]
    drafted = torch.cat([torch.full((step.batch, 1), 2**30), tokens], 1)  # first of a segment: the last token, sampled

    def verify_packed(*args: Any, seeds: Tensor, step: Tensor, **options: Any) -> Any:
        assert seeds.tolist() == (slots * 7).tolist() and step.tolist() == (100 + slots).tolist()
        return sk.verify_packed(*args, uniform_samples=coins, **options)

    coins = torch.nn.functional.pad(step.pack(uniform_samples, 1), (0, 3), value=0.5)
    rows = torch.nn.functional.pad(step.rows / float(params.temperature), (0, 0, 0, 3), value=torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2, "verify_packed", verify_packed)
        sampled, num_sampled = V2_REJECTION_SAMPLE(
            rows, kept, torch.nn.functional.pad(step.pack(drafted, 1), (0, 3)), cu, 100 + slots[owner] + places, slots,
            slots[owner], places, temperature, torch.arange(2 * step.batch) * 7, step.num_draft,
            use_block_verification=acceptance == "block",
        )  # fmt: skip
    assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
    return SimpleNamespace(tokens=sampled, num_tokens=num_sampled)


# ---------------------------------------------------------------- exact distributions


def random_logits(vocab: int, depth: int, generator: torch.Generator, vocab_draft: int | None = None) -> list[Tensor]:
    width = vocab_draft or vocab
    return [torch.randn(*[vocab] * d, width, generator=generator) * 1.2 for d in range(depth)]


def problem(draft: str | None, params: sk.SamplingParams, num_draft: int = 2, **given: Any) -> ChainProblem:
    """`draft`: "probs", "logits" (with the target's temperature, as in vLLM), or None (one-hot)."""
    generator = torch.Generator().manual_seed(3)
    target = random_logits(4, num_draft + 1, generator)
    rows = random_logits(4, num_draft, generator) if draft else None
    if rows is not None and draft == "probs":
        rows = [row.softmax(-1) for row in rows]
    at_temperature = sk.SamplingParams(temperature=params.temperature)
    return ChainProblem(target, rows, params, at_temperature, as_probs=draft == "probs", **given)


PLAIN = sk.SamplingParams()
CUT = sk.SamplingParams(temperature=0.8, top_k=3, top_p=0.7, min_p=0.3, min_p_first=True)  # each of them cuts
GREEDY = sk.SamplingParams(temperature=0.0)
WARM = sk.SamplingParams(temperature=0.7)


@pytest.mark.parametrize("verify", [v1_forward, v1_functions])
@pytest.mark.parametrize("params", [PLAIN, CUT, GREEDY], ids=["T=1", "cut", "greedy"])
@pytest.mark.parametrize(
    "given",
    [
        {"draft": "probs"},
        {"draft": None},
        {"draft": "probs", "num_draft": 3, "num_draft_tokens": 1},
        {"draft": None, "stop": 1},
        {"draft": "probs", "num_draft_tokens": 0},
    ],
    ids=["probs", "one-hot", "ragged", "placeholder", "none drafted"],
)
def test_v1_is_exact(verify: Verify, params: sk.SamplingParams, given: dict[str, Any]) -> None:
    case = problem(params=params, **given)
    assert total_variation(exact_law(verify, case, "token"), target_joint(case)) < TOLERANCE


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("params", [PLAIN, WARM], ids=["T=1", "T=0.7"])
@pytest.mark.parametrize(
    "given",
    [
        {"draft": "logits"},
        {"draft": None},
        {"draft": "logits", "num_draft": 3, "num_draft_tokens": 1},
        {"draft": "logits", "stop": 1},
    ],
    ids=["logits", "one-hot", "ragged", "placeholder"],
)
def test_v2_is_exact(acceptance: str, params: sk.SamplingParams, given: dict[str, Any]) -> None:
    case = problem(params=params, **given)
    assert total_variation(exact_law(v2_rejection_sample, case, acceptance), target_joint(case)) < TOLERANCE


@pytest.mark.parametrize("vocab_draft", [3, 6])
def test_v2_takes_a_draft_vocabulary_of_another_size(vocab_draft: int) -> None:
    """Of a wider one, padded, the ids past the target's have no logits."""
    generator = torch.Generator().manual_seed(5)
    draft = random_logits(4, 2, generator, min(vocab_draft, 4))
    token_map = sk.TokenMap(torch.arange(3)) if vocab_draft < 4 else None
    case = ChainProblem(random_logits(4, 3, generator), draft, token_map=token_map)

    def verify(*args: Any, draft_logits: Tensor, **given: Any) -> Any:
        padded = torch.nn.functional.pad(draft_logits, (0, max(0, vocab_draft - 4)), value=float("-inf"))
        return v2_rejection_sample(*args, draft_logits=padded, **given)

    assert total_variation(exact_law(verify, case, "token"), target_joint(case)) < TOLERANCE


def test_sampler_of_steps_without_drafts_is_exact() -> None:
    """Its logits have been divided by the temperature."""
    cut = sk.SamplingParams(top_k=3, top_p=0.8)
    forward = v1.make_sampler_forward(refuse)

    def verify(target: Tensor, tokens: Tensor, *, uniform_samples: Tensor, **_: Any) -> SimpleNamespace:
        k, p = torch.full((len(target),), 3, dtype=torch.int32), torch.full((len(target),), 0.8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(v1.torch, "rand", lambda *_, **__: uniform_samples[:, 0].contiguous())
            token, logprobs = forward(SimpleNamespace(logprobs_mode="raw_logprobs"), target[:, 0], {}, k, p)
        assert logprobs is None
        return SimpleNamespace(tokens=token[:, None], num_tokens=torch.ones(len(target)))

    case = problem(None, cut, num_draft=0)
    assert total_variation(exact_law(verify, case, "token"), target_joint(case)) < TOLERANCE


@pytest.mark.parametrize("rows_each", [1, 3])
def test_drafts_are_drawn_from_the_distribution_given_and_by_seeds(rows_each: int) -> None:
    draw = v1.make_sample_from_logits(refuse)
    own, temperature = SimpleNamespace(_enable_probabilistic_draft_probs=True), torch.tensor([0.0, 0.5, 1.5])
    logits = torch.randn(3 * rows_each, 40)
    many = [draw(own, logits, sampling_metadata(temperature)) for _ in range(400)]
    expected = (logits.double() / temperature.clamp_min(1e-4).repeat_interleave(rows_each)[:, None]).softmax(-1)
    probs = many[0][1]
    assert torch.allclose(probs.double(), expected, atol=1e-6)
    drawn = torch.stack([tokens for tokens, _ in many])
    seen = torch.nn.functional.one_hot(drawn, 40).double().mean(0)
    assert (seen - expected).abs().max() < 6 * (0.25 / 400) ** 0.5  # six standard deviations at the most
    assert torch.equal(drawn[0, :rows_each], logits[:rows_each].argmax(-1))

    def of_request(request: int, slot: int) -> list[int]:
        order = [request if place == slot else place for place in range(3)]
        rows = logits.unflatten(0, (3, -1))[order].flatten(0, 1)
        seeded = sampling_metadata(temperature[order], generators={slot: torch.Generator().manual_seed(8)})
        return draw(own, rows, seeded)[0].unflatten(0, (3, -1))[slot].tolist()

    assert of_request(2, 2) == of_request(2, 0) == of_request(2, 1)


# ---------------------------------------------------------------- V2: noise over several steps


def gumbel_sample(
    logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, seed: Tensor, pos: Tensor,
    apply_temperature: bool, is_drafting: bool, logits_cache: Tensor, logits_cache_col: Tensor,
) -> Tensor:  # fmt: skip
    """As vLLM's: noise keyed by seed and position, the row kept as it is."""
    logits_cache[expanded_idx_mapping, logits_cache_col] = logits
    keys = sk.noise_keys(seed[expanded_idx_mapping], pos[:, None])[:, 0]
    return sk.sample(logits, noise_keys=keys).token


def v2_windows(draw: Callable[..., Tensor], step_stands_still: bool = False) -> float:
    """The least p-value of the windows of texts written by block verification; `draw` draws the drafts' tokens."""
    case = steps.StepCase("block", spread=0.3)
    V, K, length, batch = case.vocab, case.num_draft, steps.LENGTH, 2048 * 8
    target_table, draft_table = case.tables()
    draft_table = draft_table * 2.5  # nearly a point mass against a flat target: where re-used noise does most harm
    slots, rows = torch.arange(batch), torch.arange(batch)
    seeds = torch.arange(batch) * 3 + 1
    text, count = torch.zeros(batch, length + 3 + 2 * K, dtype=torch.int64), torch.full((batch,), 2)
    kept, temperature = torch.empty(batch, K, V), torch.ones(batch)
    cu = torch.arange(batch + 1, dtype=torch.int32) * (K + 1)
    places = torch.arange(K + 1).repeat(batch)
    while int(count.min()) < length + 2:
        for i in range(K):
            logits = draft_table[text[rows, count + i - 2], text[rows, count + i - 1]]
            column = torch.tensor(i)
            text[rows, count + i] = draw(
                logits, slots, temperature, seeds, count - 1 + i, True, is_drafting=True, logits_cache=kept,
                logits_cache_col=column,
            )  # fmt: skip
        at = count[:, None] + torch.arange(K + 1)
        target = target_table[text.gather(1, at - 2), text.gather(1, at - 1)]
        pos = torch.zeros_like(at) if step_stands_still else at - 1
        sampled, emitted = V2_REJECTION_SAMPLE(
            target.flatten(0, 1), kept, text.gather(1, at - 1).flatten(), cu, pos.flatten(), slots,
            slots.repeat_interleave(K + 1), places, temperature, seeds, K, use_block_verification=True,
        )  # fmt: skip
        unfinished = count < length + 2
        new = (torch.arange(K + 1) < emitted[:, None]) & unfinished[:, None]
        text.scatter_(1, at, torch.where(new, sampled, text.gather(1, at)))
        count += emitted * unfinished
    windows = steps.expected_windows(case)
    return min(map(g_test, counted(text[:, 2 : 2 + length].numpy(), windows), windows))


LEVEL = FAMILY_WISE / (steps.LENGTH - WINDOW + 1)


def test_v2_block_verification_has_fresh_noise_at_every_step() -> None:
    assert v2_windows(v2.make_gumbel_sample(gumbel_sample)) > LEVEL


def test_noise_that_is_used_again_would_be_seen() -> None:
    assert v2_windows(gumbel_sample) < LEVEL
    assert v2_windows(v2.make_gumbel_sample(gumbel_sample), step_stands_still=True) < LEVEL


def test_noise_of_the_target_stays_as_it_is() -> None:
    seen: list[Any] = []
    draw = v2.make_gumbel_sample(lambda *args, **_: seen.append(args[4]))
    position = torch.tensor([9])
    draw(None, None, None, None, position, True, False)
    draw(None, None, None, None, position, True, True, None, None)
    assert seen == [position, position]


# ---------------------------------------------------------------- requests beside each other


def mixed(order: Sequence[int], generators: bool = True) -> dict[int, list[int]]:
    """The tokens of four requests with parameters, draft lengths and seeds of their own, in the slots of `order`."""
    generator = torch.Generator().manual_seed(11)
    vocab, lengths = 50, [3, 0, 2, 1]
    target, tokens = torch.randn(4, 4, vocab, generator=generator), torch.randint(vocab, (4, 3), generator=generator)
    probs = torch.randn(4, 3, vocab, generator=generator).softmax(-1)
    tokens[0, :2] = target[0, :2].argmax(-1)  # greedy: two are accepted
    index = torch.tensor(order)
    step = Step(target[index], tokens[index], torch.tensor(lengths)[index])
    sampling = sampling_metadata(
        torch.tensor([0.0, 0.8, 1.2, 1.0])[index], top_k=torch.tensor([50, 5, 50, 20])[index],
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.7])[index], min_p=torch.tensor([0.0, 0.0, 0.1, 0.05])[index],
        generators={order.index(r): torch.Generator().manual_seed(r) for r in range(4) if generators},
    )  # fmt: skip
    metadata = spec_metadata(step.tokens, step.lengths)
    out = V1_FORWARD(sampler(), metadata, step.pack(probs[index]), step.rows, sampling).sampled_token_ids
    return {request: out[slot].tolist() for slot, request in enumerate(order)}


def test_seeds_reproduce_in_any_slot() -> None:
    first = mixed([0, 1, 2, 3])
    assert first[0][:2] == [t for t in first[0][:2] if t >= 0] and first[0][3] == -1
    torch.manual_seed(1)
    assert mixed([2, 3, 1, 0]) == first
    assert any(mixed([0, 1, 2, 3], generators=False) != first for _ in range(4))


def test_a_generator_moves_no_further_for_others_drafts() -> None:
    """A step of one token takes one number, whether it is verified without a draft or sampled."""
    logits, generators = torch.randn(2, 30), [torch.Generator().manual_seed(4) for _ in range(3)]
    one = sampling_metadata(torch.ones(2), generators={1: generators[0]})
    metadata = spec_metadata(torch.tensor([3], dtype=torch.int32), [1, 0])
    rows = torch.cat([torch.randn(2, 30), logits[1:]])
    beside = V1_FORWARD(sampler(), metadata, None, rows, one).sampled_token_ids[1, 0]
    mode = SimpleNamespace(logprobs_mode="raw_logprobs")
    alone, _ = v1.make_sampler_forward(refuse)(mode, logits, {1: generators[1]}, None, None)
    assert alone[1] == beside
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
    before = generators[2].get_state()
    sampling = sampling_metadata(torch.ones(2), generators={1: generators[2]})
    V1_REJECTION_SAMPLE(metadata.draft_token_ids, [1, 0], 1, metadata.cu_num_draft_tokens, None, rows[:1],
                        torch.tensor([[1], [2]]), sampling)  # fmt: skip
    assert torch.equal(before, generators[2].get_state())  # the bonus token has been drawn with it


def test_v1_rejection_sample_copies_no_row() -> None:
    """Drafts of no tokens among them, which end in their bonus."""
    rows = torch.randn(5, 900) * 1e3
    metadata = spec_metadata(rows.argmax(-1).int(), [2, 0, 3, 0])

    for sampling in (sampling_metadata(torch.ones(4)), sampling_metadata(torch.zeros(4), all_greedy=True)):
        with Widest() as made:
            out = V1_REJECTION_SAMPLE(
                metadata.draft_token_ids, metadata.num_draft_tokens, 3, metadata.cu_num_draft_tokens, None, rows,
                torch.tensor([[7], [0], [899], [3]], dtype=torch.int32), sampling,
            )  # fmt: skip
        best = rows.argmax(-1).tolist()
        assert out.tolist() == [[*best[:2], 7, -1], [0, -1, -1, -1], [*best[2:], 899], [3, -1, -1, -1]]
        assert 0 < made.most < 900


def test_all_greedy_draws_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1, "coins", refuse)
    rows = torch.randn(5, 20).bfloat16()
    tokens = rows[[0, 1, 3]].argmax(-1).int()
    sampling = sampling_metadata(torch.zeros(2), all_greedy=True)
    out = V1_FORWARD(sampler(), spec_metadata(tokens, [2, 1]), None, rows, sampling).sampled_token_ids
    best = rows.argmax(-1).tolist()
    assert out.tolist() == [best[:3], [*best[3:], -1]]


def test_logits_that_are_changed_are_changed_by_vllm() -> None:
    """Each kind of row by the function for it, on a copy; what is sampled follows."""
    rows, banned = torch.zeros(5, 6), [1, 2]
    rows[:, banned] = 9.0
    before = rows.clone()

    def ban(column: int) -> Callable[..., Tensor]:
        return lambda logits, *_: logits.index_fill(1, torch.tensor([column]), float("-inf"))

    own = sampler(apply_logits_processors=ban(1), sampler=SimpleNamespace(apply_logits_processors=ban(2)))
    metadata = spec_metadata(torch.tensor([2, 2, 2], dtype=torch.int32), [2, 1])
    order: list[str] = []

    def noted(which: str, change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: (order.append(which), change(*given))[1]

    first = sampler(
        apply_logits_processors=noted("drafted", ban(1)),
        sampler=SimpleNamespace(apply_logits_processors=noted("bonus", ban(2))),
    )
    v1.changed_logits(first, metadata, rows, None)
    assert order == ["bonus", "drafted"], "as in vLLM, whose thinking budget counts on it"
    for change in (
        {"no_penalties": False},
        {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.zeros(2, 6, dtype=torch.bool)},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
        {"logitsprocs": SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[SimpleNamespace(min_toks={0: 1})])},
    ):
        sampling = sampling_metadata(torch.zeros(2), all_greedy=True, **change)
        out = V1_FORWARD(own, metadata, None, rows, sampling).sampled_token_ids
        assert out.tolist() == [[2, 2, 1], [2, 1, -1]], change
    assert torch.equal(rows, before)
    idle = SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[SimpleNamespace(min_toks={})])
    sampling = sampling_metadata(torch.zeros(2), all_greedy=True, logitsprocs=idle)
    assert V1_FORWARD(own, metadata, None, rows, sampling).sampled_token_ids.tolist() == [[1, -1, -1], [1, -1, -1]]


def test_logprobs_are_vllms_own() -> None:
    seen: list[Any] = []

    def logprobs(*args: Any) -> str:
        seen.extend(args)
        return "logprobs"

    rows, metadata = torch.randn(3, 8).bfloat16(), spec_metadata(torch.tensor([1, 2], dtype=torch.int32), [2])
    sampling = sampling_metadata(torch.ones(1), max_num_logprobs=3)
    out = V1_FORWARD(sampler(_get_logprobs_tensors=logprobs), metadata, None, rows, sampling)
    number, given, raw, target, bonus, tokens = seen
    assert (out.logprobs_tensors, number, given) == ("logprobs", 3, metadata)
    assert torch.equal(raw, rows.float()) and torch.equal(torch.cat([target, bonus]), raw)
    assert torch.equal(tokens, out.sampled_token_ids)


# ---------------------------------------------------------------- what is left to vLLM, and refused


def test_what_is_not_served_goes_to_vllm() -> None:
    forward = v1.make_forward(lambda *_: "stock", SimpleNamespace)
    rows, metadata = torch.randn(3, 8), spec_metadata(torch.tensor([1, 2], dtype=torch.int32), [2])
    sampling = sampling_metadata(torch.ones(1))
    assert forward(sampler(synthetic_mode=True), metadata, None, rows, sampling) == "stock"
    assert forward(sampler(use_fly=True), metadata, None, rows, sampling) == "stock"
    assert forward(sampler(), metadata, None, rows[:2], sampling) == "stock"
    processed = sampling_metadata(torch.ones(1), max_num_logprobs=0)
    assert forward(sampler(is_processed_logprobs_mode=True), metadata, None, rows, processed) == "stock"
    assert (
        forward(sampler(is_processed_logprobs_mode=True), metadata, None, rows, sampling) == "stock"
    )  # as without drafts
    below = functools.partial(v1.make_rejection_sample(lambda *_, **__: "stock"), *[None] * 8)
    assert below(synthetic_mode=True) == below(fly_window_size=4) == "stock"
    second = functools.partial(v2.make_rejection_sample(lambda *_, **__: "stock"), *[None] * 10, 3)
    for option in ("synthetic_conditional_rates", "contexts", "fly_window_size"):
        assert second(**{option: 1}) == "stock"
    drafts = v1.make_sample_from_logits(lambda *_: "stock")
    for probabilistic, all_greedy in ((False, False), (True, True)):
        own = SimpleNamespace(_enable_probabilistic_draft_probs=probabilistic)
        assert drafts(own, rows, sampling_metadata(torch.ones(3), all_greedy=all_greedy)) == "stock"
    processed_mode = SimpleNamespace(logprobs_mode="processed_logits")
    assert v1.make_sampler_forward(lambda *_: "stock")(processed_mode, rows, {}, None, None) == "stock"


def test_min_p_passes_where_it_is_served() -> None:
    seen: list[Any] = []
    validate = v1.make_validate_spec_decode(lambda params, config: seen.append((params.min_p, params.other, config)))
    standard, block, synthetic = (
        SimpleNamespace(rejection_sample_method=m) for m in ("standard", "block", "synthetic")
    )
    params = SimpleNamespace(min_p=0.1, other="refused by vLLM alone")
    for given in (standard, block, synthetic):
        validate(params, given)
    assert seen == [(0.0, params.other, standard), (0.0, params.other, block), (0.1, params.other, synthetic)]
    assert params.min_p == 0.1


def test_expand_batch_to_tokens() -> None:
    x, cu = torch.tensor([0.0, 0.5, 2.0]), cumulative([2, 0, 3])
    assert v1.expand_batch_to_tokens(x, cu, 5).tolist() == [0, 0, 2, 2, 2]
    assert v1.expand_batch_to_tokens(x, cu, 5, replace_from=0, replace_to=1).tolist() == [1, 1, 2, 2, 2]
    assert v1.expand_batch_to_tokens(x.int(), cu, 5).dtype == torch.int32


def test_nothing_is_imported_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it raises
    monkeypatch.delenv("SPECDEC_VLLM", raising=False)
    with environment(SPECDEC_VLLM=None):
        plugin.register()
    patched: list[str] = []
    monkeypatch.setattr(v1, "patch", lambda: patched.append("V1"))
    monkeypatch.setattr(v2, "patch", lambda: patched.append("V2"))
    with environment(SPECDEC_VLLM="1"):
        with pytest.raises(ImportError):
            plugin.register()
        other = ModuleType("vllm")
        other.__version__ = "0.31.2"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", other)
        with pytest.raises(RuntimeError, match=r"serves vLLM 0\.32 to 0\.33, got 0\.31\.2"):
            plugin.register()
        other.__version__ = "0.33.1"  # type: ignore[attr-defined]
        with caplog.at_level("INFO", "vllm"):
            plugin.register()
    assert patched == ["V1", "V2"] and "specdec_kernels verifies drafts in vLLM 0.33.1" in caplog.text


@pytest.mark.parametrize(
    "version, known",
    [
        ("0.32.0", True), ("0.32.1rc1", True), ("0.33.1+cpu", True), ("0.33.0+gdev1234", True),
        ("0.33.1rc1.dev301+g3a2bf16da", False), ("0.34.0rc1", False), ("1.0", False),
    ],
)  # fmt: skip
def test_known_versions(version: str, known: bool) -> None:
    if known:
        plugin.check_version(version)
    else:
        why = r" \(no pre-release of 0\.33\)" if version.startswith("0.33") else ""
        with pytest.raises(RuntimeError, match=rf"0\.32 to 0\.33{why}, got"):
            plugin.check_version(version)


def test_replaced_once() -> None:
    owner = SimpleNamespace(double=lambda x: 2 * x)
    for _ in range(2):
        replacing.replace(owner, "double", lambda stock: lambda x: stock(x) + 1)
    assert owner.double(3) == 7 and owner.double.__wrapped__(3) == 6
