"""Cascades without speculation: the laws that they draw from, who writes what, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, full_law, prompts, tiny, unlike_pair
from python_tests.law.generate_cases import (
    BATCH,
    CUT,
    LENGTH,
    NUM_TESTS,
    SHARPER,
    Case,
    draft_table,
    expected_windows,
    target_table,
)
from python_tests.law.generate_cases import VOCAB as SMALL_VOCAB
from python_tests.law.windows import check_windows
from specdec_kernels import laws
from specdec_kernels.comparison import seq_cascade as whole_answers
from specdec_kernels.comparison import two_models
from specdec_kernels.decoding import Provenance
from specdec_kernels.testing import float64_law
from specdec_kernels.testing.counts import g_test

END = 3  # the id that leaves most answers some length
GREEDY = sk.SamplingParams(temperature=0.0)


def token_cascade(rule: laws.Chow) -> Callable[..., Any]:
    return lambda model, ids, **kw: sk.token_cascade(model, ids, target_law=rule, **kw)


def oracle_cascade(law: laws.TargetLaw) -> Callable[..., Any]:
    return lambda model, ids, **kw: sk.oracle_cascade(model, ids, target_law=law, **kw)


def seq_cascade(alpha: float, confidence: str = "mean") -> Callable[..., Any]:
    return lambda model, ids, **kw: sk.seq_cascade(model, ids, alpha=alpha, confidence=confidence, **kw)


LOOPS = {
    "token": token_cascade(laws.Chow(0.7)),
    "token-log": token_cascade(laws.Chow(2.0, "log")),
    "oracle-Opt": oracle_cascade(laws.Opt(0.3)),
    "oracle-TokenV3": oracle_cascade(laws.TokenV3(0.6)),
    "seq": seq_cascade(0.87),
    "seq-sum": seq_cascade(1 - 1e-4, "sum"),
}


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("ends", [(), (END,)], ids=["endless", "ends"])
@pytest.mark.parametrize("law", [laws.Chow(0.4), laws.Chow(1.0, "log"), laws.Opt(0.3), laws.TokenV3(0.6)], ids=repr)
def test_joint_law(law: laws.TargetLaw, ends: tuple[int, ...]) -> None:
    loop = token_cascade(law) if isinstance(law, laws.Chow) else oracle_cascade(law)
    out = loop(
        TableRunner(target_table), torch.zeros(BATCH, 2, dtype=torch.int64), draft_model=TableRunner(draft_table),
        sampling=CUT, draft_sampling=SHARPER, seeds=torch.arange(BATCH) * 7919 + 13, max_new_tokens=LENGTH,
        eos_token_id=ends,
    )  # fmt: skip
    if isinstance(law, laws.Chow):
        assert 0.2 < out.stats.acceptance_rate < 0.8
    case = Case("token", sk.NoDrafter, CUT, ends=ends, target_law=law, draft_sampling=SHARPER)
    tokens = out.tokens.numpy()
    check_windows(np.where(tokens < 0, SMALL_VOCAB, tokens), expected_windows(case), NUM_TESTS)


def answers(confidence: str, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """How often `seq_cascade` wrote each answer of four tokens, and the law of them."""
    length = 4
    out = sk.seq_cascade(
        TableRunner(target_table), torch.zeros(BATCH, 2, dtype=torch.int64), draft_model=TableRunner(draft_table),
        alpha=alpha, confidence=confidence, sampling=CUT, draft_sampling=SHARPER,
        seeds=torch.arange(BATCH) * 7919 + 13, max_new_tokens=length, eos_token_id=[],
    )  # fmt: skip
    counts = np.zeros((SMALL_VOCAB,) * length)
    np.add.at(counts, tuple(out.tokens.numpy().T), 1)

    every = np.array(list(itertools.product(range(SMALL_VOCAB), repeat=length)))
    text = np.pad(every, ((0, 0), (2, 0)))
    places = tuple(np.stack([text[:, i : i + 3] for i in range(length)], 1).transpose(2, 0, 1))  # 3 × [answers, length]
    P, Q, q = (
        float64_law(table, params)[places].prod(1)
        for table, params in ((target_table, CUT), (draft_table, SHARPER), (draft_table, None))
    )
    kept = q ** (1 / length if confidence == "mean" else 1) >= 1 - alpha
    assert 0.2 < Q[kept].sum() < 0.8
    law = np.where(kept, Q, 0) + Q[~kept].sum() * P
    return counts, law.reshape(counts.shape)


@pytest.mark.parametrize(("confidence", "alpha"), [("mean", 0.4), ("sum", 0.87)])
def test_law_of_whole_answers(confidence: str, alpha: float) -> None:
    assert g_test(*answers(confidence, alpha)) > 1e-8


def test_the_target_drawing_with_the_drafts_coins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        whole_answers, "uniform_samples", lambda seeds, step, num, purpose: sk.uniform_samples(seeds, step, num)
    )
    assert g_test(*answers("mean", 0.4)) < 1e-8


# --- who writes what --------------------------------------------------------------------------------------------------


def plain(model: Any, ids: Tensor, sampling: sk.SamplingParams, **kw: Any) -> Any:
    return sk.generate(model, ids, drafter=sk.NoDrafter(), sampling=sampling, eos_token_id=[], **kw)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_always_or_never_deferring(family: str) -> None:
    target, draft = tiny(family, 1), tiny(family, 2)
    ids, mask = prompts(3, 9, 6)
    kw: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20}
    targets, drafts = plain(target, ids, GREEDY, **kw), plain(draft, ids, GREEDY, **kw)
    kw |= {"draft_model": draft, "sampling": GREEDY, "eos_token_id": []}
    for loop in (token_cascade(laws.Chow(-1.0)), oracle_cascade(laws.Chow(-1.0)), seq_cascade(-1.0)):
        out = loop(target, ids, **kw)
        assert torch.equal(out.sequences, targets.sequences) and out.stats.num_accepted == 0
        assert out.stats.target_forwards == 20
    for loop in (token_cascade(laws.Chow(1.0)), oracle_cascade(laws.Chow(1.0)), seq_cascade(1.0)):
        out = loop(target, ids, **kw)
        assert torch.equal(out.sequences, drafts.sequences)
        if out.stats.num_drafted:  # the oracle asks both, whatever it does with the answers
            assert out.stats.num_drafted == out.stats.num_accepted == out.stats.num_tokens == 60
            assert out.stats.target_forwards == 0 and out.stats.draft_steps == 20
            assert bool((out.provenance == Provenance.ACCEPTED).all())


@pytest.mark.parametrize(
    ("family", "rule", "max_rows"),
    [
        ("llama", laws.Chow(0.78), 64),
        ("llama", laws.Chow(3.2, "log"), 2),
        ("t5", laws.Chow(0.55), 2),
        ("t5", laws.Chow(1.65, "log"), 64),
    ],
    ids=str,
)
def test_token_cascade_token_by_token(
    family: str, rule: laws.Chow, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against full forwards of single sequences; the target has to catch up with several tokens at a time."""
    monkeypatch.setattr(two_models, "MAX_ROWS", max_rows)
    target, draft = unlike_pair(family)
    lengths = (3, 1, 6)
    ids, mask = prompts(*lengths)
    ends = [4, 21]
    out = sk.token_cascade(
        target, ids, attention_mask=mask, draft_model=draft, target_law=rule, sampling=GREEDY, max_new_tokens=30,
        eos_token_id=ends,
    )  # fmt: skip
    fates = set()
    deferring = torch.zeros(30, dtype=torch.bool)
    for row, length in enumerate(lengths):
        prompt = ids[row, -length:]
        text: list[int] = []
        origin: list[int] = []
        while len(text) < 30 and not set(text) & set(ends):
            p, q = (full_law(model, prompt, text)[-1] for model in (target, draft))
            unsure = float(-(q * q.log()).sum()) > rule.alpha if rule.loss == "log" else float(q.max()) < 1 - rule.alpha
            deferring[len(origin)] |= unsure
            origin.append(int(Provenance.RECOVERED if unsure else Provenance.ACCEPTED))
            text.append(int((p if unsure else q).argmax()))
        fates |= set(origin)
        assert out.tokens[row, : out.num_tokens[row]].tolist() == text
        assert out.provenance[row, : out.num_tokens[row]].tolist() == origin
    assert len(fates) == 2 and out.stats.num_accepted + out.stats.num_rejected == out.stats.num_drafted
    assert out.stats.target_forwards == int(deferring.sum()) < out.stats.draft_steps
    apart = np.diff(np.flatnonzero(deferring.numpy())).max()
    assert apart > 2, "the target never has to catch up"


def test_the_target_reads_each_token_once() -> None:
    target, draft = TableRunner.random(seed=1), TableRunner.random(seed=2)
    out = sk.token_cascade(
        target, torch.tensor([[3]]), draft_model=draft, target_law=laws.Chow(0.7), seeds=torch.tensor([5]),
        max_new_tokens=40, eos_token_id=[],
    )  # fmt: skip
    deferred = np.flatnonzero(out.provenance[0] == Provenance.RECOVERED)
    assert target.forwards == np.diff(deferred, prepend=-1).tolist() and draft.forwards == [1] * 40
    assert 5 < len(deferred) < 35


@pytest.mark.parametrize("confidence", ["mean", "sum"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_seq_cascade_chooses_by_confidence(family: str, confidence: str) -> None:
    target, draft = tiny(family, 1), tiny(family, 2)
    lengths = (3, 1, 6, 4, 9, 2)
    ids, mask = prompts(*lengths)
    kw: dict[str, Any] = {
        "attention_mask": mask, "seeds": torch.arange(6), "max_new_tokens": 12, "sampling": sk.SamplingParams(0.7),
        "eos_token_id": [4, 5, 6],
    }  # fmt: skip
    drafted = sk.seq_cascade(target, ids, draft_model=draft, alpha=2.0, **kw)
    confidences = []
    for row, length in enumerate(lengths):
        answer = drafted.tokens[row, : drafted.num_tokens[row]]
        law = full_law(draft, ids[row, -length:], answer.tolist())
        log_probs = law[:-1].gather(1, answer[:, None]).log()
        confidences.append(float((log_probs.mean() if confidence == "mean" else log_probs.sum()).exp()))
    border = np.exp(np.log(sorted(confidences)[2:4]).mean())  # between the two in the middle
    targets = sk.generate(target, ids, drafter=sk.NoDrafter(), **kw)
    out = sk.seq_cascade(target, ids, draft_model=draft, alpha=1 - border, confidence=confidence, **kw)
    kept = torch.tensor(confidences) >= border
    assert int(kept.sum()) == 3
    for row, keep in enumerate(kept.tolist()):
        source = drafted if keep else targets
        n = int(source.num_tokens[row])
        assert out.tokens[row].tolist() == source.tokens[row, :n].tolist() + [-1] * (out.tokens.shape[1] - n)
        origin = Provenance.ACCEPTED if keep else Provenance.BONUS
        assert set(out.provenance[row, :n].tolist()) == {int(origin)}
    assert out.stats.num_drafted == int(drafted.num_tokens.sum())
    assert out.stats.num_accepted == int(drafted.num_tokens[kept].sum())
    assert out.stats.num_rejected == int(drafted.num_tokens[~kept].sum())
    assert out.stats.target_forwards == int(targets.num_tokens[~kept].max())
    assert out.stats.draft_steps == int(drafted.num_tokens.max())


# --- batches, ends, flags ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_a_sequence_does_not_depend_on_its_batch(name: str) -> None:
    target, draft = TableRunner.random(seed=1), TableRunner.random(seed=2)
    ids, mask = prompts(1, 5, 3, 8, 2, vocab=23)
    seeds = torch.tensor([5, -1, 2**62, 0, 77])
    kw: dict[str, Any] = {
        "draft_model": draft, "sampling": sk.SamplingParams(0.9, top_k=15), "max_new_tokens": 24,
        "eos_token_id": [2, 3],
    }  # fmt: skip
    out = LOOPS[name](target, ids, attention_mask=mask, seeds=seeds, **kw)
    assert len(set(out.num_tokens.tolist())) > 2
    if out.stats.num_drafted:
        assert 0 < out.stats.num_accepted < out.stats.num_drafted
    for row in range(5):
        alone = LOOPS[name](target, ids[row : row + 1, mask[row] > 0], seeds=seeds[row : row + 1], **kw)
        n = int(alone.num_tokens)
        assert n == out.num_tokens[row] and torch.equal(alone.tokens[0], out.tokens[row, :n])
        assert torch.equal(alone.provenance[0], out.provenance[row, :n])
        assert n == 24 or alone.tokens[0, -1] in (2, 3)
        assert not set(alone.tokens[0, :-1].tolist()) & {2, 3}


@pytest.mark.parametrize("name", LOOPS)
def test_ends_may_come_from_an_iterator_and_what_is_returned_can_be_written_to(name: str) -> None:
    target, draft = TableRunner.random(seed=1), TableRunner.random(seed=2)
    ids, ends = prompts(5, 5, vocab=23)[0], [3, 4, 5, 6, 7]
    kw: dict[str, Any] = {"draft_model": draft, "max_new_tokens": 30, "seeds": torch.tensor([1, 2])}
    listed, iterated = (LOOPS[name](target, ids, eos_token_id=given, **kw) for given in (ends, iter(ends)))
    assert torch.equal(listed.tokens, iterated.tokens) and int(listed.num_tokens.min()) < 30
    for tensor in (listed.sequences, listed.tokens, listed.num_tokens, listed.provenance, listed.status):
        assert not tensor.is_inference()
        tensor[...] = 0


def test_flags_of_the_rows_that_were_looked_at() -> None:
    target, draft = TableRunner.random(seed=1), TableRunner.random(seed=2)
    target.table[..., 0], draft.table[..., 1] = torch.nan, torch.inf
    ids = torch.tensor([[3, 4]])
    for loop in (token_cascade(laws.Chow(1.0)), seq_cascade(1.0)):
        out = loop(target, ids, draft_model=draft, max_new_tokens=4, eos_token_id=[])
        assert out.tokens.tolist() == [[1, 1, 1, 1]] and out.status.tolist() == [int(sk.Status.INF)]
    for loop in (token_cascade(laws.Chow(-1.0)), seq_cascade(-1.0), oracle_cascade(laws.Opt(0.1))):
        out = loop(target, ids, draft_model=draft, max_new_tokens=4, eos_token_id=[])
        assert out.status.tolist() == [int(sk.Status.INF | sk.Status.NAN)]


# --- what they refuse -------------------------------------------------------------------------------------------------

IDS = torch.tensor([[3, 4, 5], [3, 6, 7]])
BASELINES: dict[str, Callable[..., Any]] = {
    "token_cascade": token_cascade(laws.Chow(0.1)),
    "seq_cascade": seq_cascade(0.1),
    "bild": sk.bild,
}


@pytest.mark.parametrize("caller", BASELINES)
def test_bad_arguments(caller: str) -> None:
    target, draft = TableRunner.random(), TableRunner.random(seed=1)
    loop = BASELINES[caller]
    three = torch.ones(3, dtype=torch.int64)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"input_ids": IDS.float()}, TypeError, "input_ids must be an int64 or int32 tensor, got torch.float32"),
        ({"attention_mask": IDS[:, :2]}, ValueError, r"attention_mask must be \[batch=2, prompt=3\], got \[2, 2\]"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be in"),
        ({"eos_token_id": 23}, ValueError, r"eos_token_id must be in \[0, vocab=23\), got 23"),
        ({"draft_model": target}, ValueError, "draft_model must be a Runner of its own, got the target's"),
        ({"draft_model": TableRunner.random(9)}, ValueError, "target and draft must share one tokenizer"),
        ({"draft_model": torch.nn.Linear(2, 2)}, ValueError, "Linear cannot be served"),
    ]
    if caller != "bild":
        cases += [
            ({"sampling": 0.7}, TypeError, "sampling must be a SamplingParams, got float"),
            ({"draft_sampling": 0.7}, TypeError, "draft_sampling must be a SamplingParams or None, got float"),
            (
                {"draft_sampling": sk.SamplingParams(torch.ones(3))},
                ValueError,
                r"draft_sampling.temperature must be \[batch=2\], got \[3\]",
            ),
            ({"seeds": three}, ValueError, r"seeds must be \[batch=2\], got \[3\]"),
        ]
    for changes, kind, message in cases:
        arguments = {"input_ids": IDS, "draft_model": draft, "max_new_tokens": 4, **changes}
        with pytest.raises(kind, match=f"^{caller}: {message}"):
            loop(target, arguments.pop("input_ids"), **arguments)
    assert target.forwards == draft.forwards == []


def test_bad_rules() -> None:
    target, draft = TableRunner.random(), TableRunner.random(seed=1)
    with pytest.raises(TypeError, match=r"^token_cascade: target_law must be sk.laws.Chow .*, got Diff"):
        sk.token_cascade(target, IDS, draft_model=draft, target_law=laws.Diff(0.1))  # type: ignore[arg-type]
    for law in (laws.Lossy(0.1), None):
        got = type(law).__name__
        with pytest.raises(TypeError, match=f"^oracle_cascade: target_law must be one of sk.laws but Lossy, got {got}"):
            sk.oracle_cascade(target, IDS, draft_model=draft, target_law=law)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^seq_cascade: confidence must be one of mean, sum, got 'max'"):
        sk.seq_cascade(target, IDS, draft_model=draft, alpha=0.1, confidence="max")
    with pytest.raises(TypeError, match="^seq_cascade: alpha must be a number, got str"):
        sk.seq_cascade(target, IDS, draft_model=draft, alpha="0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^seq_cascade: alpha must be in .*, got nan"):
        sk.seq_cascade(target, IDS, draft_model=draft, alpha=float("nan"))
    assert target.forwards == draft.forwards == []


def test_models_must_fit() -> None:
    target = tiny("llama")
    ids, _ = prompts(4)
    for caller, loop in BASELINES.items():
        with pytest.raises(ValueError, match=f"^{caller}: target and draft .* must both be decoders"):
            loop(target, ids, draft_model=tiny("t5"))
        with pytest.raises(ValueError, match=rf"^{caller}: the draft \(GPT2LMHeadModel\) holds 32 positions, 44 are"):
            loop(target, ids, draft_model=tiny("gpt2", n_positions=32), max_new_tokens=40)
