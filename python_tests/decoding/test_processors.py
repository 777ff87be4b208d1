"""Decoding with processors: the tokens are those of plain decoding, whatever is drafted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import NarrowTable, TableRunner, prompts, tiny
from python_tests.decoding.tree_models import medusa
from python_tests.ops.processing import Request
from python_tests.support import environment
from specdec_kernels.decoding.claims import claimed
from specdec_kernels.drafters import Drafter

GREEDY = sk.SamplingParams(temperature=0.0)
DRAFTERS: dict[str, Callable[[Any, Any], Drafter]] = {
    "none": lambda target, draft: sk.NoDrafter(),
    "ngram": lambda target, draft: sk.NgramDrafter(3),
    "trees": lambda target, draft: sk.NgramTreeDrafter(),
    "counts": lambda target, draft: sk.NgramLMDrafter(),
    "medusa": lambda target, draft: medusa(target),
    "model": lambda target, draft: sk.ModelDrafter(draft),
    "model trees": lambda target, draft: sk.ModelTreeDrafter(target, token_map=sk.TokenMap(torch.arange(40, 0, -1))),
    "itself": lambda target, draft: sk.ModelDrafter(target),
    "some ids": lambda target, draft: sk.ModelDrafter(target, token_map=sk.TokenMap(torch.arange(40, 0, -1))),
}
NEW = 24


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_equals_transformers_with_its_processors(family: str) -> None:
    target, draft = tiny(family, 1), tiny(family, 2)
    ids, mask = prompts(7, 7, 7)  # transformers counts padding as if it were a prompt's
    free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    common = free[:, -NEW:].flatten().mode().values.item()
    banned = [v for v in (int(free[0, -NEW]), int(free[1, -NEW])) if v != common]
    assert banned
    bias = {int(free[2, -NEW]): -3.0, common: 0.7}
    own = target.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, repetition_penalty=1.3,
        bad_words_ids=[[v] for v in banned], sequence_bias={(v,): b for v, b in bias.items()}, min_new_tokens=9,
        eos_token_id=common, pad_token_id=0,
    )  # fmt: skip
    assert not torch.equal(own[:, : free.shape[1]], free[:, : own.shape[1]]), "the processors change nothing"
    for name, make in DRAFTERS.items():
        out = sk.generate(
            target, ids, attention_mask=mask, drafter=make(target, draft), sampling=GREEDY, max_new_tokens=NEW,
            num_speculative_tokens=3, eos_token_id=common, processors=sk.Processors(
                logit_bias=bias, banned_ids=banned, stop_token_ids=[common], min_tokens=9, repetition_penalty=1.3,
                token_counts=counts(ids, mask),
            ),
        )  # fmt: skip
        for b, n in enumerate(out.num_tokens.tolist()):
            assert out.tokens[b, :n].tolist() == own[b, ids.shape[1] :][:n].tolist(), (name, b)
            assert n == NEW or int(own[b, ids.shape[1] + n - 1]) == common, (name, b)


@pytest.mark.parametrize("name", ["none", "ngram", "counts", "model", "itself"])  # it takes no trees
def test_an_encoder_decoder_counts_what_its_decoder_reads(name: str) -> None:
    target, draft = tiny("t5", 1), tiny("t5", 2)
    ids, mask = prompts(7, 4, 7)
    start = torch.full_like(ids[:, :1], target.config.decoder_start_token_id)
    own = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, repetition_penalty=1.5)
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=DRAFTERS[name](target, draft), sampling=GREEDY, max_new_tokens=NEW,
        processors=sk.Processors(repetition_penalty=1.5, token_counts=sk.TokenCounts(start, NEW)),
    )  # fmt: skip
    for b, n in enumerate(out.num_tokens.tolist()):
        assert n > 5 and out.tokens[b, :n].tolist() == own[b, 1:][:n].tolist(), b


def counts(ids: Tensor, mask: Tensor) -> sk.TokenCounts:
    return sk.TokenCounts(ids, NEW, mask)


def all_on(ids: Tensor, mask: Tensor) -> sk.Processors:
    return sk.Processors(
        logit_bias=[{5: 1.0}, None, {6: -1.0, 2: 0.5}], banned_ids=[3, 4], stop_token_ids=[1], min_tokens=6,
        repetition_penalty=torch.tensor([1.0, 1.2, 0.9]), frequency_penalty=0.4, presence_penalty=-0.2,
        token_counts=counts(ids, mask),
    )  # fmt: skip


@pytest.mark.parametrize("acceptance", ["match", "greedy"])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_drafts_change_nothing(name: str, acceptance: str) -> None:
    target, draft = tiny("llama", 1), tiny("llama", 2)
    ids, mask = prompts(3, 9, 6)
    seeds = torch.tensor([5, -1, 2**62])

    def text(make: Callable[[Any, Any], Drafter]) -> tuple[Tensor, sk.TokenCounts]:
        given = all_on(ids, mask)
        out = sk.generate(
            target, ids, attention_mask=mask, drafter=make(target, draft), max_new_tokens=NEW, acceptance=acceptance,
            sampling=sk.SamplingParams(1.3, top_p=0.95), seeds=seeds, eos_token_id=[1], processors=given,
            num_speculative_tokens=3,
        )  # fmt: skip
        assert given.token_counts is not None
        return out.tokens, given.token_counts

    (plain, counted), (tokens, other) = text(DRAFTERS["none"]), text(DRAFTERS[name])
    assert torch.equal(plain, tokens)
    for b, row in enumerate(plain.tolist()):  # and what was emitted is what was counted
        emitted = [token for token in row if token >= 0]
        for each in (counted, other):
            known = dict(zip(each.ids[b].tolist(), each.counts[b].tolist(), strict=True))
            assert {i: n // 2 for i, n in known.items() if n > 1} == {i: emitted.count(i) for i in emitted}
            assert each.num_output[b] == len(emitted)


class Watched:
    """What a drafter proposes, with the length of each text."""

    def __init__(self, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int, list[int]]] = []  # sequence, length, tokens from the root on
        propose = drafter.propose

        def watched(state: Any, num_tokens: int) -> Any:
            draft = propose(state, num_tokens)
            parents = None if draft.tree is None else draft.tree.parents.expand(state.batch_size, -1).tolist()
            for b, row in enumerate(draft.tokens.tolist()):
                paths: list[list[int]] = [[]]
                for node, token in enumerate(row, 1):
                    above = node - 1 if parents is None else parents[b][node]
                    paths.append([*paths[max(above, 0)], token])
                self.seen += [(b, int(state.host_lengths[b]), path) for path in paths[1:] if -1 not in path]
            return draft

        patch.setattr(drafter, "propose", watched)


@pytest.mark.parametrize("name", ["ngram", "trees", "counts", "medusa"])
def test_what_is_barred_is_not_drafted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of what is drafted is accepted, and the text is the same."""
    target = tiny("llama", 1)
    ids, mask = prompts(30, 24, 27, vocab=12)
    lengths = mask.sum(1).tolist()
    banned, allowed, ends, least = [5, 9], [None, range(1, 61), [*range(8), *range(9, 61)]], [7], 10
    outcomes = []
    for told in (True, False):
        drafter = DRAFTERS[name](target, None)
        watched = Watched(drafter, monkeypatch)
        if not told:
            monkeypatch.setattr("specdec_kernels.drafters.barred.Barred.of", lambda *given: None)
        out = sk.generate(
            target, ids, attention_mask=mask, drafter=drafter, acceptance="match", seeds=torch.arange(3),
            sampling=sk.SamplingParams(0.9), max_new_tokens=NEW, num_speculative_tokens=5, eos_token_id=[],
            processors=sk.Processors(
                banned_ids=banned, allowed_ids=allowed, stop_token_ids=ends, min_tokens=least,
                logit_bias=dict.fromkeys(range(3, 12), 6.0), token_counts=counts(ids, mask),
            ),
        )  # fmt: skip
        barred = 0
        for b, length, path in watched.seen:
            among = allowed[b]
            token, generated = path[-1], length - lengths[b] + len(path) - 1
            barred += token in banned or (among is not None and token not in among)
            barred += token in ends and generated < least
        outcomes.append((out, barred))
    (out, barred), (untold, would) = outcomes
    assert barred == 0 and would > 5
    assert torch.equal(out.tokens, untold.tokens)
    assert out.stats.num_drafted < untold.stats.num_drafted or name in ("counts", "medusa")  # they draft another id
    assert out.stats.num_accepted > 0
    assert out.stats.acceptance_rate > untold.stats.acceptance_rate


PENALISED = Request(
    logit_bias={5: 1.5, 9: -2.0}, banned=[7], stop=[6], min_tokens=10, repetition=1.6, frequency=0.7, presence=0.5
)


def test_medusa_guesses_are_penalised_as_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's children are the best of its head's logits as plain Python processes them, the tokens above counted;
    more of them is accepted than of guesses without penalties.
    """
    ids, mask = prompts(30, 24, 27, vocab=12)
    starts, drafter = mask.sum(1).tolist(), medusa(tiny("llama", 1))
    propose, looked_at, changed = drafter.propose, 0, 0

    def watched(state: Any, num_tokens: int) -> Any:
        nonlocal looked_at, changed
        draft = propose(state, num_tokens)
        assert draft.tree is not None and draft.tree.ranks is not None
        ranks, parents = draft.tree.ranks.tolist(), draft.tree.parents.tolist()
        for b, row in enumerate(draft.tokens.tolist()):
            text = state.tokens[b, : int(state.host_lengths[b])].tolist()
            request = dataclasses.replace(PENALISED, prompt=text[: starts[b]], output=text[starts[b] :])
            paths: list[list[int]] = [[]]
            for node, token in enumerate(row, 1):
                above = paths[parents[node]]
                paths.append([*above, token])
                if token < 0:
                    continue
                own = torch.full((61,), -math.inf)
                own[drafter.heads.token_map.draft_to_target] = drafter.heads(state.hidden[b])[len(above)]
                expected = request.row(own, above)
                assert expected[token] == pytest.approx(np.sort(expected)[-1 - ranks[node]], abs=1e-5)
                looked_at += 1
                changed += int(own.sort(descending=True).indices[ranks[node]] != token)
        return draft

    def decoded() -> sk.GenerationOutput:
        return sk.generate(
            tiny("llama", 1), ids, attention_mask=mask, drafter=drafter, acceptance="greedy", max_new_tokens=NEW,
            num_speculative_tokens=3, eos_token_id=[], processors=sk.Processors(
                logit_bias=PENALISED.logit_bias, banned_ids=PENALISED.banned, stop_token_ids=PENALISED.stop,
                min_tokens=PENALISED.min_tokens, repetition_penalty=PENALISED.repetition,
                frequency_penalty=PENALISED.frequency, presence_penalty=PENALISED.presence,
                token_counts=counts(ids, mask),
            ),
        )  # fmt: skip

    monkeypatch.setattr(drafter, "propose", watched)
    told = decoded()
    assert looked_at > 50 and changed > 10
    monkeypatch.setattr(drafter, "propose", propose)
    monkeypatch.setattr("specdec_kernels.drafters.medusa.penalised", lambda logits, penalties, counts: logits)
    untold = decoded()
    assert torch.equal(told.tokens, untold.tokens)
    assert told.stats.acceptance_rate > untold.stats.acceptance_rate


def test_a_draft_beyond_the_room_of_the_counts_is_no_fault() -> None:
    """A draft model counts its own draft, which may run on beyond the end of its sequence, and of the counts."""
    target, ids = TableRunner.random(seed=1), prompts(4, 4, vocab=23)[0]
    near = TableRunner(target.table + 2 * TableRunner.random(seed=2).table)
    with environment(SPECDEC_CHECK="1"):
        for seed in range(10):
            processors = sk.Processors(frequency_penalty=50.0, token_counts=sk.TokenCounts(ids, 12))
            out = sk.generate(
                target, ids, drafter=sk.ModelDrafter(near), num_speculative_tokens=5, processors=processors,
                seeds=torch.tensor([seed, seed + 100]), max_new_tokens=12, eos_token_id=[],
            )  # fmt: skip
            assert not out.status.any()


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_a_draft_ends_where_processors_leave_none_of_its_ids(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with no id that they bar, and to SPECDEC_CHECK=1 nothing is wrong."""
    few, target = sk.TokenMap(torch.tensor([2, 4])), TableRunner.random(seed=1)
    ids, mask = prompts(3, 5, vocab=23)
    banned = [[2, 4], [2]]  # by the first sequence both that are drafted, by the other one 4 as well to begin with

    def decoded(drafter: Drafter) -> sk.GenerationOutput:
        return sk.generate(
            target, ids, attention_mask=mask, drafter=drafter, acceptance=acceptance, seeds=torch.arange(2),
            max_new_tokens=NEW, num_speculative_tokens=3, eos_token_id=[], processors=sk.Processors(
                banned_ids=banned, stop_token_ids=[4], min_tokens=4, logit_bias={4: 3.0},
                token_counts=counts(ids, mask),
            ),
        )  # fmt: skip

    near = NarrowTable(TableRunner.random(seed=2).table, few)
    drafter = sk.ModelDrafter(near, token_map=few, min_confidence=0.01)
    propose, seen = drafter.propose, list[tuple[int, int]]()

    def watched(state: Any, num_tokens: int) -> Any:
        draft = propose(state, num_tokens)
        for b, (row, n) in enumerate(zip(draft.tokens.tolist(), draft.num_draft_tokens.tolist(), strict=True)):
            generated = int(state.host_lengths[b] - mask[b].sum())
            assert n == 0 if b == 0 or generated < 4 else set(row[:n]) <= {4}
            seen.append((b, n))
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    with environment(SPECDEC_CHECK="1"):
        out, plain = decoded(drafter), decoded(sk.NoDrafter())
        near.table[:] = torch.nan
        with pytest.raises(RuntimeError, match=r"^sample: row \[0, 0\] set <Status.NAN"):
            decoded(drafter)
    assert out.stats.num_accepted > 0 and (1, 3) in seen
    if acceptance in ("match", "greedy"):
        assert torch.equal(out.tokens, plain.tokens)


@pytest.mark.parametrize(
    ("processors", "error", "message"),
    [
        (3, TypeError, "processors must be a Processors or None, got int"),
        (sk.Processors(token_bitmask=torch.zeros(1, 1, 1).int()), ValueError, "processors must have no token_bitmask"),
        (sk.Processors(banned_ids=[[1], [2]]), ValueError, "processors must be of 1 or batch=3 sequences, got 2"),
        (
            sk.Processors(presence_penalty=1.0, token_counts=sk.TokenCounts(torch.zeros(1, 2).long(), 99)),
            ValueError, "processors.token_counts must be of batch=3 sequences on cpu, got 1 on cpu",
        ),
        (
            sk.Processors(presence_penalty=1.0, token_counts=sk.TokenCounts(torch.zeros(3, 2).long(), 9)),
            ValueError, "processors.token_counts must have room for max_new_tokens=24, got 9",
        ),
        (
            sk.Processors(
                presence_penalty=1.0,
                token_counts=sk.TokenCounts(torch.zeros(3, 2).long(), 99).add_(torch.tensor([[-1], [5], [-1]])),
            ),
            ValueError, "processors.token_counts must be new, made for this call's prompts, got some that a call has",
        ),
    ],
)  # fmt: skip
def test_refuses(processors: Any, error: type[Exception], message: str) -> None:
    ids, mask = prompts(3, 9, 6)
    with pytest.raises(error, match=f"^generate: {message}"):
        sk.generate(
            tiny("llama", 1), ids, attention_mask=mask, drafter=sk.NoDrafter(), max_new_tokens=NEW,
            processors=processors,
        )  # fmt: skip


def test_counts_serve_another_call_once_they_are_begun_again() -> None:
    target, (ids, mask) = tiny("llama", 1), prompts(3, 9)
    given = sk.Processors(stop_token_ids=[2], min_tokens=6, token_counts=sk.TokenCounts(ids, NEW, mask))

    def decoded() -> Tensor:
        kw: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "acceptance": "greedy"}
        return sk.generate(target, ids, drafter=sk.NgramDrafter(), processors=given, **kw).tokens

    first = decoded()
    with pytest.raises(ValueError, match="token_counts must be new"):
        decoded()
    assert given.token_counts is not None
    for slot, (prompt, real) in enumerate(zip(ids, mask, strict=True)):
        given.token_counts.restart_(slot, prompt[real > 0])
    assert torch.equal(decoded(), first)


def test_counts_serve_one_call_at_a_time() -> None:
    target, (ids, mask) = tiny("llama", 1), prompts(3, 9)
    given = sk.Processors(token_counts=sk.TokenCounts(ids, NEW, mask))
    with claimed("another", held=given.token_counts), pytest.raises(ValueError, match="processors.token_counts serves"):
        sk.generate(target, ids, drafter=sk.NoDrafter(), attention_mask=mask, processors=given, max_new_tokens=NEW)
