"""Bonus tokens that are given, on every backend: as if each were drawn from a row that has no other id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.chains import run
from python_tests.ops.inputs import refuses, same_bits, seeded, strided
from python_tests.support import Backend
from specdec_kernels import laws

OP = "verify_chain"
BATCH, NUM_DRAFT = 20, 4
FIELDS = ("tokens", "num_accepted", "num_tokens", "status", "acceptance")


def sure(arguments: chains.Arguments, bonus: Tensor, lengths: Tensor) -> chains.Arguments:
    """The same step whose row behind each draft has all on the bonus token."""
    name = "target_logits" if arguments["target_logits"] is not None else "target_probs"
    rows = arguments[name].clone()
    one = torch.nn.functional.one_hot(bonus.long(), rows.shape[-1]).to(rows.dtype)
    rows[torch.arange(len(rows)), lengths.clamp_min(0)] = one if name == "target_probs" else one.log()
    return {**arguments, name: rows}


def unread(arguments: chains.Arguments, lengths: Tensor) -> chains.Arguments:
    """The same step whose rows behind each draft are NaN."""
    name = "target_logits" if arguments["target_logits"] is not None else "target_probs"
    rows = arguments[name].clone()
    rows[torch.arange(rows.shape[1]) >= lengths[:, None]] = torch.nan
    return {**arguments, name: rows}


def ragged(
    backend: Backend, rng: torch.Generator, vocab: int, acceptance: str, kind: str, **more: Any
) -> tuple[chains.Arguments, Tensor]:
    """A step whose drafts end in every way, and how long they are without what the rules make of them."""
    batch, probs = backend.batch(BATCH), kind == "target_probs"
    params = sk.SamplingParams(torch.rand(batch, generator=rng).round(decimals=1) + 0.1, top_p=0.97)
    made = chains.make(
        rng, batch, NUM_DRAFT, vocab, kind="probs" if probs else kind, acceptance=acceptance, params=params,
        draft_params=sk.SamplingParams(0.9, top_k=20), by=backend, spread=1.0, **more,
    )  # fmt: skip
    if probs:
        made = chains.with_target_probs(made, sk.SamplingParams(top_p=0.97))
    tokens = made["draft_tokens"]
    for none in (-1, vocab + 3):
        tokens[torch.rand(tokens.shape, generator=rng) < 0.04] = none
    unlikely = torch.rand(tokens.shape, generator=rng) < 0.05  # some that Q cannot have given
    tokens[unlikely] = torch.randint(0, vocab, tokens.shape, generator=rng)[unlikely]
    made["eos_token_ids"] = torch.tensor([1])
    lengths = torch.randint(-1, NUM_DRAFT + 1, (batch,), generator=rng)
    lengths[:3] = torch.tensor([NUM_DRAFT, 0, -1])
    lengths[3:] = torch.where(torch.rand(batch - 3, generator=rng) < 0.5, NUM_DRAFT, lengths[3:])
    tokens[-1], lengths[-1] = tokens[-1].clamp(2, vocab - 1), NUM_DRAFT
    tokens[-1, -1] = 1  # an EOS where no row follows
    return made, lengths


def whole(out: sk.VerifyOutput, expected: Tensor) -> int:
    """How many sequences end in their bonus token behind an accepted draft."""
    last = out.tokens.gather(1, out.num_accepted[:, None].long())[:, 0].cpu()
    return int((last == expected).sum())


@pytest.mark.short(cases=12, emulated=5, triton=3)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [*chains.KINDS, "target_probs"])
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("vocab", [40, 1300])
def test_is_that_of_rows_without_another_id(
    backend: Backend, vocab: int, acceptance: str, kind: str, packed: bool
) -> None:
    if (kind, acceptance) == ("target_probs", "match"):
        pytest.skip("match needs logits")
    rng = seeded()
    made, lengths = ragged(backend, rng, vocab, acceptance, kind)
    bonus = torch.randint(2, vocab, lengths.shape, generator=rng)
    made["num_draft_tokens"] = lengths
    expected = run(backend, sure(made, bonus, lengths), return_acceptance=True)
    assert whole(expected, bonus) > 0 and (expected.num_accepted < lengths.to(expected.tokens.device)).any()
    step = chains.with_bonus(unread(made, lengths), bonus)
    if not packed:
        got = run(backend, {**step, "bonus_tokens": bonus.int()}, return_acceptance=True)
    else:
        step = chains.packed(step, lengths.clamp_min(0))
        got = backend.verify_packed(**chains.on(backend, step), return_acceptance=True)
    for field in FIELDS:
        same_bits(getattr(got, field), getattr(expected, field))


@pytest.mark.parametrize("law", [laws.Lossy(0.3, beta="exact"), laws.Opt(0.3), laws.TokenV3(0.6)], ids=str)
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_beside_a_target_law(backend: Backend, acceptance: str, law: laws.TargetLaw) -> None:
    made = chains.make(seeded(), 6, 2, 60, acceptance=acceptance, law=law)
    lengths, bonus = torch.arange(6) % 3, torch.arange(6) + 2
    made["num_draft_tokens"] = lengths
    expected = run(backend, sure(made, bonus, lengths))
    assert whole(expected, bonus) > 0
    same_bits(run(backend, chains.with_bonus(made, bonus)), expected)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_processors_have_the_rows_that_there_are(backend: Backend, packed: bool) -> None:
    rng, vocab = seeded(), 50
    made, lengths = ragged(backend, rng, vocab, "token", "one_hot")
    batch, words = len(lengths), (vocab + 31) // 32
    mask = torch.randint(-(2**31), 2**31 - 1, (batch, NUM_DRAFT + 1, words), generator=rng, dtype=torch.int32)
    mask[torch.arange(batch), lengths.clamp_min(0)] = -1  # the row that is given allows every id
    counts = sk.TokenCounts(torch.randint(0, vocab, (batch, 2), generator=rng), 8)
    common = {"repetition_penalty": torch.full((batch,), 1.3), "token_counts": counts, "min_tokens": 3,
              "stop_token_ids": [4]}  # fmt: skip

    def on_backend(bitmask: Tensor) -> sk.Processors:
        processors: sk.Processors = backend(sk.Processors(token_bitmask=bitmask, **common))
        return processors

    bonus = torch.randint(5, vocab, (batch,), generator=rng)
    made["num_draft_tokens"] = lengths
    expected = run(backend, sure(made, bonus, lengths), processors=on_backend(mask))
    assert whole(expected, bonus) > 0 and (expected.status == 0).any()
    step = chains.with_bonus(made, bonus)
    if packed:
        used = torch.arange(NUM_DRAFT) < lengths[:, None]
        step = chains.packed(step, lengths.clamp_min(0))
        got = backend.verify_packed(**chains.on(backend, step), processors=on_backend(mask[:, :-1][used]))
    else:
        got = run(backend, step, processors=on_backend(mask[:, :-1]))
    same_bits(got, expected)


def test_seeds_positions_and_an_index(backend: Backend) -> None:
    """Numbers are as many as without: those of the draft tokens are the same."""
    rng, batch = seeded(), 6
    lengths, bonus = torch.full((batch,), NUM_DRAFT), torch.arange(batch) + 2
    seeds = {"seeds": torch.arange(batch), "step": torch.arange(batch)}
    for acceptance, kind in (("token", "full"), ("block", "probs"), ("match", "one_hot")):
        made = chains.make(rng, batch, NUM_DRAFT, 30, acceptance=acceptance, kind=kind, spread=1.0)
        made = {**chains.without_numbers(made), **seeds}
        if acceptance == "match":
            made["positions"] = torch.arange(batch * (NUM_DRAFT + 1)).view(batch, -1)
        expected = run(backend, sure(made, bonus, lengths))
        step = chains.with_bonus(made, bonus)
        if kind != "one_hot":
            name = "draft_probs" if kind == "probs" else "draft_logits"
            step |= {name: strided(step[name].flip(0)), "draft_index": torch.arange(batch - 1, -1, -1)}
        same_bits(run(backend, step), expected)


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_no_draft_tokens(backend: Backend, acceptance: str) -> None:
    """Then there are no rows at all."""
    given = {"acceptance": acceptance, "bonus_tokens": backend(torch.tensor([3, 0, 8]))}
    u = torch.full((3, 1), torch.nan)  # nothing is drawn
    numbers = {} if acceptance == "greedy" else {"noise_keys": torch.zeros(3, 1).long()}
    numbers = {"uniform_samples": u} if acceptance in ("token", "block") else numbers
    none = torch.empty(3, 0, dtype=torch.int64)
    padded = {"target_logits": torch.empty(3, 0, 9), "draft_tokens": none, **numbers}
    if acceptance in ("token", "block"):
        padded["draft_logits"] = torch.empty(3, 0, 9)
    flat = {name: value.flatten(0, 1) for name, value in padded.items()}
    cu = {"cu_num_draft_tokens": torch.zeros(4, dtype=torch.int32)}
    for out, width in (
        (backend.verify_chain(**chains.on(backend, padded), **given), 1),
        (backend.verify_packed(**chains.on(backend, flat | cu), max_num_draft_tokens=2, **given), 3),
    ):
        assert out.tokens.tolist() == [[t, -1, -1][:width] for t in (3, 0, 8)]
        assert out.num_tokens.tolist() == [1, 1, 1] and (out.status == 0).all()
    empty = chains.select(padded, slice(0, 0)) | {"bonus_tokens": torch.empty(0).int(), "acceptance": acceptance}
    assert run(backend, empty).tokens.shape == (0, 1)


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_one_that_is_none_is_flagged_where_it_would_follow(backend: Backend, acceptance: str) -> None:
    vocab, rng = 11, seeded()
    ids = torch.tensor([-1, -2, vocab, 2**40, 5] * 4)
    made = chains.make(rng, 20, 2, vocab, acceptance=acceptance, kind="one_hot")
    made["draft_tokens"] = made["target_logits"][:, :-1].argmax(-1)
    made["draft_tokens"][5:10, 1] = made["target_logits"][5:10, 1].argmin(-1)  # mostly rejected
    made["params"] = sk.SamplingParams(0.2)
    made["eos_token_ids"] = made["draft_tokens"][10:11, 0]
    made["num_draft_tokens"] = torch.tensor([2] * 15 + [-1] * 5)
    good = run(backend, chains.with_bonus(made, torch.full((20,), 5)))
    out = run(backend, chains.with_bonus(made, ids))
    ends = (good.num_tokens == 3).cpu()
    assert ends[:5].any() and not ends.all() and (good.status == 0).all()
    none, bad = ends & (ids != 5), ends & (ids != 5) & (ids != -1)
    assert torch.equal(out.status.cpu(), torch.where(bad, int(sk.Status.BAD_TOKEN), 0).int())
    tokens = good.tokens.cpu()
    tokens[none, 2] = -1
    same_bits([out.tokens.cpu(), out.num_tokens.cpu()], [tokens, good.num_tokens.cpu() - none.int()])


def test_margins_are_those_of_rows_without_another_id() -> None:
    for acceptance, kind in (("token", "full"), ("block", "full"), ("match", "one_hot"), ("greedy", "one_hot")):
        made, bonus = chains.make(seeded(), 12, 3, 30, acceptance=acceptance, kind=kind), torch.arange(12)
        lengths = torch.tensor([3, 2, 1, 0] * 3)
        made["num_draft_tokens"] = lengths
        given = chains.with_bonus(made, bonus)
        found = sk.decision_margins(sk.verify_chain, **given)
        same_bits(found, sk.decision_margins(sk.verify_chain, **sure(made, bonus, lengths)))
        last = (found.tokens >= 0).sum(1) - 1
        ends = (last == lengths) & (found.tokens.gather(1, last[:, None])[:, 0] == bonus)
        assert ends.any() and (found.margins.gather(1, last[:, None])[ends] == torch.inf).all()
        flat = chains.packed(given, lengths)
        same_bits(sk.decision_margins(sk.verify_packed, **flat), found)


GOOD: dict[str, Any] = {
    "target_logits": torch.zeros(4, 2, 9), "draft_tokens": torch.zeros(4, 2).long(),
    "draft_logits": torch.zeros(4, 2, 9), "uniform_samples": torch.zeros(4, 3), "bonus_tokens": torch.arange(4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bonus_tokens": torch.arange(3)}, ValueError, "bonus_tokens must be [batch=4], got [3]"),
        ({"bonus_tokens": torch.zeros(4, 1).long()}, ValueError, "bonus_tokens must be [batch=4], got [4, 1]"),
        ({"bonus_tokens": torch.zeros(4)}, TypeError, "bonus_tokens must be int64 or int32, got float32"),
        ({"bonus_tokens": 3}, TypeError, "bonus_tokens must be a tensor, got int"),
        ({"bonus_tokens": torch.arange(4, device="meta")}, ValueError, "bonus_tokens must be on cpu, got meta"),
        ({"target_logits": torch.zeros(4, 9)}, ValueError, "target_logits must be [batch, num_draft, vocab], got"),
        (
            {"target_logits": torch.zeros(4, 3, 9)},
            ValueError,
            "draft_tokens must be [batch=4, num_draft (target's rows)=3], got",
        ),
        ({"uniform_samples": torch.zeros(4, 2)}, ValueError, "uniform_samples must be [batch=4, num_draft + 1=3], got"),
        (
            {"processors": sk.Processors(token_bitmask=torch.zeros(4, 3, 1, dtype=torch.int32))},
            ValueError,
            "processors.token_bitmask must be [batch=4, num_draft=2, words=1], got [4, 3, 1]",
        ),
        (
            {"target_law": laws.Opt(0.3, bonus="cascade")},
            ValueError,
            "bonus_tokens must be None beside a target_law with bonus='cascade', got some",
        ),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.verify_chain, GOOD, change, error, f"verify_chain: {message}")


def test_a_packed_target_has_a_row_for_each_draft_token() -> None:
    flat: dict[str, Any] = {
        "target_logits": torch.zeros(5, 9), "draft_tokens": torch.zeros(5).long(), "bonus_tokens": torch.arange(2),
        "uniform_samples": torch.zeros(7), "cu_num_draft_tokens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "max_num_draft_tokens": 3,
    }  # fmt: skip
    assert (sk.verify_packed(**flat).status == 0).all()
    change = {"target_logits": torch.zeros(7, 9)}
    refuses(sk.verify_packed, flat, change, ValueError, "verify_packed: target_logits must be [total=5, vocab=9], got")
