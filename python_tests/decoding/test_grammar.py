"""Grammars in `generate`: texts that obey them, and are those of plain decoding, whatever drafts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.grammars import DRAFTERS, END, NEW, WIDE, Residues
from python_tests.decoding.models import NarrowTable, TableRunner, near, prompts, tiny
from python_tests.decoding.schedules import table
from python_tests.decoding.tree_models import Fixed, TreeTable
from python_tests.law.cases import FOUND
from specdec_kernels.decoding import DecodingState
from specdec_kernels.decoding.grammar import Masks
from specdec_kernels.drafters import Draft, Drafter
from specdec_kernels.testing.counts import g_test

GREEDY = sk.SamplingParams(temperature=0.0)
OF_TREES = ("trees", "medusa", "model trees", "any")
TOLD = [name for name in DRAFTERS if name not in ("plain", "any")]


class Engine(Residues):
    """One that can go back: it fills a row at a time, and none twice in a step."""

    def __init__(self, batch: int, vocab: int) -> None:
        super().__init__(batch, vocab)
        self.filled: set[tuple[int, bytes]] = set()
        self.num_filled = 0

    def fill_last(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        for b, draft in enumerate(drafts):
            if draft is not None:
                assert (b, draft.tobytes()) not in self.filled and bool((rows[b] == -1).all())
                self.filled.add((b, draft.tobytes()))
                rows[b] = self.row(b, draft)

    def commit(self, tokens: list[np.ndarray]) -> None:
        super().commit(tokens)
        self.num_filled += len(self.filled)
        self.filled.clear()


def run(drafter: Drafter, engine: type[Residues] = Residues, **more: Any) -> tuple[sk.GenerationOutput, Any]:
    ids, mask = more.pop("prompts", None) or prompts(3, 9, 6)
    target = tiny("llama", 1)
    grammar = engine(3, target.config.vocab_size)
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=drafter, grammar=grammar, max_new_tokens=NEW,
        eos_token_id=END, **{"num_speculative_tokens": 3, **more},
    )  # fmt: skip
    assert [out.tokens[b, :n].tolist() for b, n in enumerate(out.num_tokens)] == grammar.texts
    assert out.status.tolist() == [0] * 3
    return out, grammar


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("processed", [False, True], ids=["alone", "with processors"])
@pytest.mark.parametrize("acceptance", ["greedy", "match"])
def test_drafts_change_nothing(acceptance: str, processed: bool) -> None:
    ids, mask = prompts(3, 9, 6)
    texts = []
    for name, make in DRAFTERS.items():
        given = sk.Processors(
            logit_bias={5: 1.0}, presence_penalty=0.4, stop_token_ids=[END], min_tokens=12,
            token_counts=sk.TokenCounts(ids, NEW, mask),
        )  # fmt: skip
        out, grammar = run(
            make(near("llama", 1, 0.05)), sampling=sk.SamplingParams(0.9), acceptance=acceptance,
            seeds=torch.tensor([5, -1, 2**40]), processors=given if processed else None, num_speculative_tokens=4,
        )  # fmt: skip
        texts.append(out.tokens)
        assert (out.stats.num_drafted > 0) == (name != "plain")
        # at least twice in a row the random texts say what their beginnings foretell, but where nothing is known
        assert out.stats.num_accepted > 0 or name in ("plain", "any"), name
        assert grammar.looked_at > 0 or name == "plain"
    free = sk.generate(
        tiny("llama", 1), ids, attention_mask=mask, drafter=sk.NoDrafter(), max_new_tokens=NEW, eos_token_id=END,
        sampling=sk.SamplingParams(0.9), acceptance=acceptance, seeds=torch.tensor([5, -1, 2**40]),
    )  # fmt: skip
    assert not torch.equal(free.tokens, texts[0])
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize(
    ("name", "acceptance"),
    [*((name, rule) for name in DRAFTERS for rule in ("token", "block")), *((name, "typical") for name in OF_TREES)],
)
def test_draws_obey(name: str, acceptance: str) -> None:
    """And log-probabilities are those of the barred distribution."""
    drafter = DRAFTERS[name](near("llama", 1, 0.05))
    assert isinstance(drafter, sk.TreeDrafter) == (name in OF_TREES)
    out, _ = run(drafter, acceptance=acceptance, return_logprobs=0)
    assert out.logprobs is not None
    there = out.tokens >= 0
    likely, raw = out.logprobs.log_prob[there], out.logprobs.raw_log_prob[there]
    assert bool((likely > raw + 0.1).all()) and bool((likely > -math.inf).all())


# --- what is drafted --------------------------------------------------------------------------------------------------


class Watched:
    """Counts the draft tokens that a grammar bars; a drafter that is not `told` does not see it."""

    def __init__(self, drafter: Drafter, told: bool, patch: pytest.MonkeyPatch) -> None:
        self.grammar: Residues | None = None
        self.barred = self.drafted = 0
        start, propose = drafter.start, drafter.propose

        def of(state: DecodingState) -> DecodingState:
            return state if told else replace(state, masks=None)

        def watched(state: DecodingState, num_tokens: int) -> Draft:
            draft = propose(of(state), num_tokens)
            again = propose(of(state), num_tokens)
            assert torch.equal(draft.tokens, again.tokens)
            self.count(state, draft)
            return draft

        patch.setattr(drafter, "start", lambda state: start(of(state)))
        patch.setattr(drafter, "propose", watched)

    def count(self, state: DecodingState, draft: Draft) -> None:
        assert state.masks is not None
        grammar: Any = state.masks._grammar
        limits = state.host_limits
        if draft.num_draft_tokens is not None:
            limits = np.minimum(limits, draft.num_draft_tokens.numpy())
        for b, row in enumerate(draft.tokens.tolist()):
            paths: list[list[int]] = [[]]
            for node, token in enumerate(row, 1):
                parent = node - 1 if draft.tree is None else int(draft.tree.parents.expand(len(limits), -1)[b, node])
                paths.append([*paths[parent], token])
                if -1 in paths[-1] or len(paths[-1]) > limits[b]:
                    continue
                self.drafted += 1
                text = grammar.texts[b] + paths[-1][:-1]
                self.barred += END in paths[-1][:-1] or token not in grammar.allowed(text)


@pytest.mark.parametrize("name", TOLD)
def test_nothing_that_is_barred_is_drafted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of what is drafted is accepted, and the text is the same."""
    outcomes = []
    for told in (True, False):
        drafter = DRAFTERS[name](near("llama", 1, 0.05))
        watched = Watched(drafter, told, monkeypatch)
        out, _ = run(
            drafter, acceptance="match", seeds=torch.arange(3), sampling=sk.SamplingParams(0.9),
            num_speculative_tokens=4, prompts=prompts(30, 24, 27, vocab=12),
            processors=sk.Processors(logit_bias=dict.fromkeys(range(3, 12), 6.0)),
        )  # fmt: skip
        outcomes.append((out, watched))
    (out, watched), (untold, other) = outcomes
    assert watched.barred == 0 < watched.drafted and other.barred > 5
    assert torch.equal(out.tokens, untold.tokens)
    assert out.stats.mean_acceptance_length >= untold.stats.mean_acceptance_length
    assert out.stats.acceptance_rate > untold.stats.acceptance_rate


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_is_filled_once(name: str) -> None:
    """Only of what may be put to the test: each node that can be reached, and the text."""
    kw: dict[str, Any] = {
        "sampling": GREEDY, "num_speculative_tokens": 7, "processors": sk.Processors(banned_ids=[END])
    }  # fmt: skip
    out, engine = run(DRAFTERS[name](near("llama", 1, 0.05)), Engine, **kw)
    other, _ = run(DRAFTERS[name](near("llama", 1, 0.05)), **kw)
    assert torch.equal(out.tokens, other.tokens)
    if name in ("plain", "model"):
        assert engine.num_filled == out.stats.num_steps + out.stats.num_drafted and engine.looked_at == 0


@pytest.mark.parametrize("drafter", [sk.NgramDrafter(2), sk.NgramLMDrafter()], ids=["lookup", "n-grams"])
def test_no_row_is_filled_to_foresee_what_is_not_drafted(drafter: Any) -> None:
    ids, mask = prompts(9, 9, 9)
    foresee, found = drafter.foresee, 0

    def counted(state: DecodingState) -> sk.Foresight:
        nonlocal found
        foresight = foresee(state)
        found += int((foresight.tokens >= 0).sum())
        return foresight

    drafter.foresee = counted
    out, grammar = run(
        drafter, prompts=(ids.repeat(1, 2), mask.repeat(1, 2)), sampling=GREEDY, seeds=torch.arange(3),
        num_speculative_tokens=table(np.array([1.0, 9.0, 9.0, 9.0])),
    )  # fmt: skip
    assert out.stats.num_drafted == 0 < found and grammar.looked_at == 0


def test_a_sequence_whose_rows_are_known_is_not_asked_again() -> None:
    """While another's are not."""
    grammar, tokens = Residues(2, 61), np.array([[3, 6, 9], [6, 9, 12]])
    masks = Masks(grammar, 61, torch.tensor([END]))
    for limits in ([3, -1], [3, 2], [3, 3]):
        rows, reached, behind = masks.along(tokens, np.array(limits))
        assert not behind.any() and reached.sum(1).tolist() == [1 + limit for limit in limits]
    assert grammar.looked_at == 3 + 2 + 3
    assert all(torch.equal(rows[b, i], grammar.row(b, tokens[b, :i])) for b in range(2) for i in range(4))


class Narrow(sk.Grammar):
    """What may follow an id; nothing follows the last one."""

    def __init__(self, batch: int, vocab: int) -> None:
        self.last = [2] * batch
        self.rows = np.array([[~(1 << token) & ~(1 << (token + 2) % vocab)] for token in range(vocab)], dtype=np.int32)
        self.rows[-1] = 0

    def fill(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        for own, last, draft in zip(rows.numpy(), self.last, drafts, strict=True):
            if draft is not None:
                own[: len(draft) + 1] = self.rows[[last, *draft]]

    def fill_last(self, rows: Tensor, drafts: list[np.ndarray | None]) -> None:
        for own, last, draft in zip(rows.numpy(), self.last, drafts, strict=True):
            if draft is not None:
                assert all(self.rows[a, 0] >> b & 1 for a, b in itertools.pairwise([last, *draft]))
                own[:] = self.rows[[last, *draft][-1]]

    def commit(self, tokens: list[np.ndarray]) -> None:
        self.last = [int(new[-1]) if len(new) else last for last, new in zip(self.last, tokens, strict=True)]


BARS = sk.DraftTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0]])


def drafters_of(other: Tensor) -> dict[str, Drafter]:
    """Of another distribution ``[vocab, vocab]`` of the id after an id."""
    vocab = len(other)
    rows, some, few = other.expand(vocab, -1, -1), *(sk.TokenMap(torch.tensor(ids)) for ids in ([0, 3, 4], [2, 4]))
    return {
        "model": sk.ModelDrafter(TableRunner(rows)),
        "some ids": sk.ModelDrafter(NarrowTable(rows, some), token_map=some),
        "few ids": sk.ModelDrafter(NarrowTable(rows, few), token_map=few),  # after 2 there is none of them
        "counts": sk.NgramLMDrafter(),
        "lookup": sk.NgramDrafter(2),
        "trees": sk.NgramTreeDrafter(2, num_nodes=6),
        "model trees": sk.ModelTreeDrafter(TreeTable(rows), num_nodes=6),
        "any tree": Fixed(BARS, [3, 2, 5, 1, 5, 0, 1, 0]),  # 2 is barred at once, 5 after 3, 0 and its like later
    }


def check_law(name: str, acceptance: str, processors: sk.Processors | None = None) -> sk.GenerationOutput:
    """Three tokens of many sequences, drafted from another distribution, against the product of the barred ones."""
    count, vocab, new = 4000, 6, 3
    rng = torch.Generator().manual_seed(3)
    table, other = (torch.randn(vocab, vocab, generator=rng) for _ in range(2))
    table[:, vocab - 1] = -math.inf  # the target does not go where nothing follows, but drafts may
    prompt = torch.tensor([0, 2, 3, 2, 1, 0, 2, 3, 1, 2])
    out = sk.generate(
        TreeTable(table.expand(vocab, -1, -1)), prompt.expand(count, -1), drafter=drafters_of(other)[name],
        grammar=Narrow(count, vocab), seeds=torch.arange(count), max_new_tokens=new, num_speculative_tokens=2,
        acceptance=acceptance, eos_token_id=[], processors=processors,
    )  # fmt: skip
    assert not out.status.any()
    barred = torch.zeros(vocab, vocab, dtype=torch.bool)
    for token in range(vocab):
        barred[token, [token, (token + 2) % vocab]] = True
    logits = table.double().masked_fill(barred, -math.inf)
    if processors is not None:
        assert processors.logit_bias == {3: 1.5} and processors.banned_ids == [4]
        logits[:, 3] += 1.5
        logits[:, 4] = -math.inf
    law = logits.softmax(-1)[:-1, :-1]
    expected = (law[2][:, None, None] * law[:, :, None] * law[None]).flatten()
    weights = (vocab - 1) ** torch.arange(new - 1, -1, -1)
    seen = (out.tokens * weights).sum(1).bincount(minlength=(vocab - 1) ** new)
    p_value = g_test(seen.double().numpy(), expected.numpy(), 0.0)
    assert p_value > 1e-5, f"law off by a G-test of {p_value:.0e}"
    return out


@pytest.mark.short(cases=8)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "with processors"])
@pytest.mark.parametrize("name", drafters_of(torch.zeros(6, 6)))
def test_the_distribution_is_the_barred_one(name: str, acceptance: str) -> None:
    processed = acceptance == "with processors"
    given = sk.Processors(logit_bias={3: 1.5}, banned_ids=[4]) if processed else None
    out = check_law(name, "token" if processed else acceptance, given)
    assert out.stats.num_accepted > (0 if name == "few ids" else 200)


def uncut(logits: Tensor, params: Any, processors: sk.Processors) -> Tensor:
    return sk.warp_probs(logits, params, processors=processors.with_bitmask(None))


def of_the_parent(self: Masks, tokens: Any, limits: Any, parents: Any = None) -> Any:
    rows, *reached = ALONG(self, tokens, limits, parents)
    above = np.broadcast_to(np.arange(-1, rows.shape[1] - 1), rows.shape[:2]) if parents is None else parents
    index = torch.from_numpy(above.clip(0)).long()[..., None].expand(rows.shape)
    return rows.gather(1, index), *reached


ALONG = Masks.along


@pytest.mark.parametrize(
    ("place", "mutant", "name"),
    [
        ("specdec_kernels.drafters.model.warp_probs", uncut, "model"),
        ("specdec_kernels.drafters.model.warp_probs", uncut, "some ids"),
        ("specdec_kernels.decoding.grammar.Masks.along", of_the_parent, "any tree"),
        ("specdec_kernels.decoding.grammar.Masks.along", of_the_parent, "model"),
    ],
)  # fmt: skip
def test_planted_defects_are_caught(place: str, mutant: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that is not the one drawn from; the mask of another node."""
    monkeypatch.setattr(place, mutant)
    with pytest.raises(AssertionError, match=FOUND):
        check_law(name, "token")


def test_a_draft_that_knows_nothing_of_what_may_follow_is_empty() -> None:
    unknown = sk.TokenMap(torch.tensor([4, 5, 7]))  # the texts, which begin with nothing, have ids of remainder 0
    out, _ = run(sk.ModelDrafter(near("llama", 1, 0.05), token_map=unknown), num_speculative_tokens=3)
    plain, _ = run(sk.NoDrafter())
    assert out.stats.num_drafted == 0 and torch.equal(out.tokens, plain.tokens)


def test_a_barred_node_flags_nothing_and_a_text_without_a_way_on_does() -> None:
    vocab = 6
    table = torch.zeros(vocab, vocab, vocab)
    table[:, 2, 5] = 9.0  # the dead end comes first
    table[:, :, 4] += 1.0
    kw: dict[str, Any] = {
        "acceptance": "greedy", "max_new_tokens": 3, "num_speculative_tokens": 1, "eos_token_id": [],
    }  # fmt: skip
    ids = torch.full((2, 2), 2)
    for drafter in (sk.NoDrafter(), Fixed(BARS, [5, 2, 1, 5, 0, 1, 3, 0])):
        out = sk.generate(TreeTable(table), ids, drafter=drafter, grammar=Narrow(2, vocab), **kw)
        assert out.tokens[:, 0].tolist() == [5, 5]
        assert out.status.tolist() == [sk.Status.EMPTY_ROW] * 2
    free = sk.Processors(banned_ids=[5])
    for drafter in (sk.NoDrafter(), Fixed(BARS, [5, 2, 1, 5, 0, 1, 3, 0])):
        out = sk.generate(TreeTable(table), ids, drafter=drafter, grammar=Narrow(2, vocab), processors=free, **kw)
        assert out.status.tolist() == [0, 0]


class DeadEnds(Residues):
    """Bars every id after every third token."""

    def allowed(self, text: list[int]) -> list[int]:
        return super().allowed(text) if len(text) % 3 else []

    def commit(self, tokens: list[np.ndarray]) -> None:
        for b, new in enumerate(tokens):
            for token in new.tolist():
                assert token in (self.allowed(self.texts[b]) or [0])
                self.texts[b].append(token)
        self.asked.clear()


@pytest.mark.parametrize("token", [0, 5])
@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_texts_go_on_behind_dead_ends_as_without_drafts(drafter: str, token: int) -> None:
    """Where every id is barred, id 0 comes; what follows it is barred as ever."""
    ids, mask = prompts(3, 9, 6)
    target, vocab = tiny("llama", 1), tiny("llama", 1).config.vocab_size
    drafted = [token] * (WIDE.num_nodes - 1) if drafter == "tree" else [token] * 4
    tree = WIDE if drafter == "tree" else sk.DraftTree.cartesian([1] * 4)
    outs = [
        sk.generate(
            target, ids, attention_mask=mask, drafter=each, grammar=DeadEnds(3, vocab), max_new_tokens=NEW,
            num_speculative_tokens=4, eos_token_id=[], acceptance="greedy",
        )
        for each in (sk.NoDrafter(), Fixed(tree, drafted))
    ]  # fmt: skip
    assert torch.equal(outs[0].tokens, outs[1].tokens) and bool((outs[0].tokens[:, ::3] == 0).all())
    assert outs[0].status.tolist() == outs[1].status.tolist() == [sk.Status.EMPTY_ROW] * 3


class Through(Drafter):
    """What the texts go on with, and more after their ends."""

    def __init__(self, texts: Tensor) -> None:
        self.texts = torch.nn.functional.pad(texts, (0, 9), value=-1)
        self.texts[self.texts < 0] = 3

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        begin = state.lengths - state.prompt.lengths
        return Draft(self.texts.gather(1, begin[:, None] + torch.arange(num_tokens)))

    def commit(self, state: DecodingState, result: Any) -> None: ...


@pytest.mark.parametrize("engine", [Residues, Engine])
def test_nothing_is_asked_of_what_follows_a_drafted_end(engine: type[Residues]) -> None:
    """Nor of a sequence that has ended, while others go on."""
    kw: dict[str, Any] = {"sampling": GREEDY, "processors": sk.Processors(logit_bias={END: 1.5})}
    plain, _ = run(sk.NoDrafter(), engine, **kw)
    out, grammar = run(Through(plain.tokens), engine, num_speculative_tokens=4, **kw)
    assert torch.equal(out.tokens, plain.tokens) and grammar.looked_at > 0
    assert len(set(out.num_tokens.tolist())) > 1
    assert bool((out.provenance[out.tokens == END] == sk.Provenance.ACCEPTED).any())


def test_refuses() -> None:
    ids, mask = prompts(3, 9, 6)
    with pytest.raises(TypeError, match="^generate: grammar must be a Grammar or None, got function"):
        sk.generate(tiny("llama", 1), ids, attention_mask=mask, drafter=sk.NoDrafter(), grammar=lambda rows: rows)  # type: ignore[arg-type]
    drafter = sk.ModelDrafter(near("llama", 1, 0.05))
    with pytest.raises(ValueError, match=r"^generate: grammar must be None with a cascade, .* got Chow\(alpha=1.0"):
        run(drafter, target_law=sk.laws.Chow(1.0))
    run(drafter, target_law=sk.laws.Lossy(0.1))  # which emits nothing that the target cannot
