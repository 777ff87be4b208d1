"""What the drafters propose, and that they tell the truth about it."""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner
from specdec_kernels.decoding import DecodingState, Prompt
from specdec_kernels.decoding.state import Speculation
from specdec_kernels.drafters import Draft


def state(*texts: list[int], acceptance: str = "token", sampling: sk.SamplingParams | None = None) -> DecodingState:
    target = TableRunner.random()
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    prompt = Prompt(tokens, lengths, [row[:n].numpy() for row, n in zip(tokens, lengths, strict=True)])
    seeds = torch.arange(len(texts)) + 5
    how = Speculation(acceptance, 8)
    return DecodingState.begin(prompt, target, sampling or sk.SamplingParams(), seeds, 20, how)


def test_ngram_proposes_what_followed_before() -> None:
    drafter, at = sk.NgramDrafter(3), state([5, 6, 7, 8, 5, 6], [1, 2, 3], [4, 9, 4, 9, 9, 4])
    drafter.start(at)
    draft = drafter.propose(at, 4)
    assert draft.logits is None and draft.probs is None
    assert draft.tokens.tolist() == [[7, 8, 5, 6], [-1] * 4, [9, 9, 4, 9]]
    assert [drafter.foresee(at).tokens.tolist(), drafter.foresee(at).matched.tolist()] == [[7, -1, 9], [2, 0, 2]]
    at.host_limits[:] = [2, 3, 0]
    assert drafter.foresee(at).tokens.tolist() == [7, -1, -1]
    draft = drafter.propose(at, 3)
    assert draft.tokens.tolist() == [[7, 8], [-1, -1], [-1, -1]]
    strict = sk.NgramDrafter(4, 3)
    strict.start(at)
    assert strict.propose(at, 4).tokens.shape == (3, 0)
    assert [strict.foresee(at).tokens.tolist(), strict.foresee(at).matched.tolist()] == [[-1] * 3, [0] * 3]


def test_an_ngram_tree_foresees_its_first_child() -> None:
    texts = [5, 6, 7, 5, 6], [1, 2, 3], [4, 9, 4, 9, 9, 4], [7, 8, 5, 8, 8]
    at, drafter = state(*texts), sk.NgramTreeDrafter(num_nodes=5, max_depth=2)
    drafter.start(at)

    def foreseen() -> list[list[int]]:
        foresight = drafter.foresee(at)
        first = drafter.propose(at, 2).tokens[:, 0]
        assert foresight.tokens.tolist() == first.tolist()
        return [foresight.tokens.tolist(), foresight.matched.tolist()]

    assert foreseen() == [[7, -1, 9, 8], [2, 0, 2, 1]]
    at.host_limits[:] = [2, 3, 0, 1]
    assert foreseen() == [[7, -1, -1, 8], [2, 0, 0, 1]]
    at.processors = sk.Processors(banned_ids=[[7, 8]])
    drafter.start(at)
    assert foreseen() == [[-1, -1, -1, 5], [0, 0, 0, 1]], "what processors bar is passed over"


def test_an_ngram_tree_goes_on_as_the_chain_does() -> None:
    """Beyond the end of the text, periodically."""
    at = state([1, 2, 3, 1, 2, 3], [7, 7], [5, 6, 7, 8, 5, 6])
    chain, tree = sk.NgramDrafter(3), sk.NgramTreeDrafter(3, num_nodes=8)
    for drafter in (chain, tree):
        drafter.start(at)
    expected = chain.propose(at, 7).tokens.tolist()
    assert expected == [[1, 2, 3, 1, 2, 3, 1], [7] * 7, [7, 8, 5, 6, 7, 8, 5]]
    assert tree.propose(at, 7).tokens.tolist() == expected


def test_ngram_looks_into_the_source_of_an_encoder_decoder() -> None:
    at = state([0])
    source = torch.tensor([[9, 0, 7, 8]])
    prompt = Prompt(
        at.prompt.tokens, at.prompt.lengths, at.prompt.host_tokens, source, source * 0 + 1, [source[0].numpy()]
    )
    at.prompt = prompt
    drafter = sk.NgramDrafter(2)
    drafter.start(at)
    assert drafter.propose(at, 2).tokens.tolist() == [[7, 8]]


def test_model_drafter_tells_the_law_of_its_tokens() -> None:
    near = TableRunner.random(seed=3)
    own = sk.SamplingParams(0.7, top_k=5)
    for sampling in (None, own):
        drafter, at = sk.ModelDrafter(near, sampling), state([5, 6, 7], [8, 9], sampling=sk.SamplingParams(1.3))
        drafter.start(at)
        draft = drafter.propose(at, 4)
        assert draft.params == (own if sampling else at.sampling)
        context = torch.cat([at.tokens.gather(1, at.lengths[:, None] - torch.tensor([2, 1])), draft.tokens], 1)
        assert draft.logits is not None and draft.stats is not None
        assert torch.equal(draft.logits, near.table[context[:, :4], context[:, 1:5]])
        coins = sk.uniform_samples(at.seeds, at.step, 4, purpose="draft")
        assert torch.equal(draft.tokens, sk.sample(draft.logits, draft.params, uniform_samples=coins).token)
        expected = sk.row_stats(draft.logits, draft.params)
        assert torch.equal(draft.stats.values[..., :4], expected.values[..., :4])
        assert torch.equal(draft.stats.argmax, expected.argmax)


def test_model_drafter_is_one_hot_where_it_is_greedy_and_shares_the_noise_of_match() -> None:
    near = TableRunner.random(seed=3)

    def drafted(at: DecodingState, sampling: sk.SamplingParams | None = None) -> Draft:
        drafter = sk.ModelDrafter(near, sampling)
        drafter.start(at)
        return drafter.propose(at, 3)

    def chain(at: DecodingState, pick: object) -> Tensor:
        tokens = [at.tokens.gather(1, at.lengths[:, None] - 2), at.last_tokens()]
        for i in range(3):
            tokens.append(pick(near.table[tokens[-2], tokens[-1]], i))  # type: ignore[operator]
        return torch.cat(tokens[2:], 1)

    texts = ([5, 6, 7], [8, 9])
    greedy = chain(state(*texts), lambda logits, i: logits.argmax(-1))
    zero = sk.SamplingParams(0.0)
    for draft in (
        drafted(state(*texts, acceptance="greedy")), drafted(state(*texts), zero),
        drafted(state(*texts, sampling=zero)),
    ):  # fmt: skip
        assert draft.logits is None and torch.equal(draft.tokens, greedy)
    at = state(*texts, acceptance="match")
    keys = sk.noise_keys(at.seeds, at.lengths[:, None] + torch.arange(3))
    draft = drafted(at)
    assert draft.logits is None
    assert torch.equal(draft.tokens, chain(at, lambda x, i: sk.sample(x, noise_keys=keys[:, i : i + 1]).token))


def test_a_proposal_can_be_asked_for_twice() -> None:
    at = state([5, 6, 7], [8, 9, 8, 9])
    for drafter in (sk.NgramDrafter(2), sk.ModelDrafter(TableRunner.random(seed=3)), sk.NoDrafter()):
        drafter.start(at)
        first = drafter.propose(at, 3).tokens
        assert torch.equal(drafter.propose(at, 3).tokens, first)


def test_a_sequence_that_can_use_no_more_holds_up_no_early_stop() -> None:
    """One that has ended, or has no room left; how far each one's draft goes stays its own affair."""
    table = torch.zeros(23, 23, 23)
    table[:, 9, 9] = 99.0  # it is sure of 9 after 9, and of nothing else
    near = TableRunner(table)
    drafter, at = sk.ModelDrafter(near, min_confidence=0.5), state([5, 6, 7], [8, 9], sampling=sk.SamplingParams(0.8))
    drafter.start(at)

    def drafted(forwards: int) -> list[int]:
        near.forwards.clear()
        draft = drafter.propose(at, 6)
        assert draft.tokens.shape == (2, forwards) and len(near.forwards) == forwards
        assert draft.num_draft_tokens is not None
        lengths: list[int] = draft.num_draft_tokens.tolist()
        return lengths

    assert drafted(forwards=6) == [1, 6]
    at.host_limits[:] = [6, 2]
    assert drafted(forwards=2) == [1, 2]
    at.host_limits[:] = [6, 0]
    at.active[1] = at.host_active[1] = False
    assert drafted(forwards=1) == [1, 0]


def test_widening_changes_no_outcome() -> None:
    near = TableRunner.random(seed=3)
    drafter, at = sk.ModelDrafter(near, sk.SamplingParams(0.8, top_k=9)), state([5, 6, 7], [8, 9])
    drafter.start(at)
    draft = drafter.propose(at, 3)
    wide = draft.widened(7)
    assert draft.widened(3) is draft and wide.tokens.shape == (2, 7)
    logits = torch.randn(2, 8, 23, generator=torch.Generator().manual_seed(0))
    outcomes = []
    for d, width in ((draft, 3), (wide, 7)):
        for acceptance in ("token", "block"):
            out = sk.verify_chain(
                logits[:, : width + 1] if width == 3 else logits, d.tokens, d.logits, draft_stats=d.stats,
                draft_params=d.params, num_draft_tokens=d.num_draft_tokens, acceptance=acceptance,
                uniform_samples=sk.uniform_samples(at.seeds, 0, width + 1),
            )  # fmt: skip
            outcomes.append((out.tokens[:, :4].tolist(), out.num_accepted.tolist()))
    assert outcomes[:2] == outcomes[2:]
