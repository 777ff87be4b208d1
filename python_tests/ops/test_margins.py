"""`decision_margins`: on every backend nothing flips by an error below its margin, and what is below one often does.

Logits are nudged by eps, towards a flip: up where that helps the token and down elsewhere, or its neighbours. The
uniforms stay. A margin that forgets one kind of decision is found out by the same nudges.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.chains import ACCEPTANCES, mixed
from python_tests.ops.inputs import logits, per_row, refuses, same_bits, seeded, uniforms
from python_tests.ops.nudges import (
    CUTS,
    EPS,
    ERROR,
    FAR,
    SLOW,
    VOCAB,
    directions,
    in_the_middle,
    nudged,
    of_laws,
    worst,
)
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.backends.reference import intervals, loose_laws, margins
from specdec_kernels.backends.reference.intervals import LooseRows
from specdec_kernels.backends.reference.loose_laws import LooseStep
from specdec_kernels.backends.reference.margins import LooseChain
from specdec_kernels.testing import float64_gumbel

OP = "verify_chain"
BATCH, NUM_DRAFT = 256, 3
KINDS = ("full", "plain", "one_hot", "reduced", "probs", "odd", "target_probs")
LAWS = {repr(law): law for law in chains.LAWS}
CASES = [
    *((a, kind) for a in ACCEPTANCES for kind in KINDS if (a, kind) != ("match", "target_probs")),
    *(("token", name) for name in LAWS),
    *(("block", name) for name in list(LAWS)[2::3]),
]
Case = tuple[chains.Arguments, sk.Margins]


@functools.cache
def case(acceptance: str, kind: str) -> Case:
    """Sequences that each have some of the cuts; "plain": none has. "odd": draft tokens that are often cut. A target
    law by its name, some of them with a reduced vocabulary.
    """
    number, law = CASES.index((acceptance, kind)), LAWS.get(kind)
    seed = 1000 + number if law is not None else 100 * ACCEPTANCES.index(acceptance) + KINDS.index(kind)
    rng = torch.Generator().manual_seed(seed)
    cuts = CUTS[:1] if kind == "plain" else CUTS
    params, draft_params = (mixed(cuts, BATCH, first, rng) for first in (kind == "probs", False))
    draft = {"plain": "full", "odd": "full", "target_probs": "probs"}.get(kind, kind)
    if law is not None:
        draft = "reduced" if number % 3 == 0 and chains.fits(law, acceptance, "reduced") else "full"
    made = chains.make(
        rng, BATCH, NUM_DRAFT, VOCAB, kind=draft, acceptance=acceptance, params=params, draft_params=draft_params,
        law=law,
    )  # fmt: skip
    if kind == "odd":
        other = torch.randint(0, VOCAB, (BATCH, NUM_DRAFT), generator=rng)
        made["draft_tokens"] = torch.where(
            torch.rand(BATCH, NUM_DRAFT, generator=rng) < 0.3, other, made["draft_tokens"]
        )
    if kind == "target_probs":
        made = chains.with_target_probs(made, sk.SamplingParams(top_k=7, top_p=0.9, min_p=0.02))
    return made, sk.decision_margins(sk.verify_chain, **made)


def nudges(arguments: chains.Arguments, tokens: Tensor, eps: float) -> Iterator[chains.Arguments]:
    """Aimed at the tokens emitted, and behind them at the draft's."""
    drafted = torch.nn.functional.pad(arguments["draft_tokens"], (0, 1))
    signs = directions(torch.where(tokens < 0, drafted, tokens))
    for sign in itertools.chain(signs, of_laws(arguments) if "target_law" in arguments else ()):
        for draft_sign in (-1.0, 1.0):
            yield nudged(arguments, eps, sign, draft_sign)
            if arguments["acceptance"] in ("match", "greedy") or not {"draft_logits", "draft_probs"} & set(arguments):
                break


@pytest.mark.short(cases=1, emulated=1, triton=1)
@pytest.mark.parametrize(("acceptance", "kind"), CASES)
def test_nothing_flips_beyond_its_margin(backend: Backend, acceptance: str, kind: str) -> None:
    arguments, exact = case(acceptance, kind)
    size, every = backend.batch(BATCH), SLOW.get(backend.name, 1)
    for turn, eps in enumerate((0.0, EPS[-1]) if backend.interpreted else (0.0, *EPS, FAR)):
        ways = nudges(arguments, exact.tokens, eps) if eps else iter([arguments])
        steps = itertools.islice(ways, turn % every, None, every)
        largest, _ = worst(exact, lambda **given: backend.verify_chain(**chains.on(backend, given)), steps, size)
        assert largest <= eps + ERROR, f"{backend}: logits moved by {eps} flipped a margin of {largest}"


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("acceptance", "with_law", "least"),
    [
        ("token", False, 0.1), ("token", True, 0.1), ("block", False, 0.1), ("block", True, 0.1), ("match", False, 0.3),
        ("greedy", False, 0.9),
    ],
)  # fmt: skip
def test_margins_are_not_idle(acceptance: str, with_law: bool, least: float) -> None:
    """Of the sequences whose smallest margin lies in (eps/8, eps] so many flip by eps; the others are false alarms."""
    near = flips = 0
    for kind in [kind for rule, kind in CASES if rule == acceptance and (kind in LAWS) == with_law]:
        arguments, exact = case(acceptance, kind)
        _, flipped = worst(exact, sk.verify_chain, nudges(arguments, exact.tokens, EPS[-1]), BATCH)
        smallest = exact.margins.amin(-1)
        alarm = (smallest > EPS[-1] / 8) & (smallest <= EPS[-1])
        near, flips = near + int(alarm.sum()), flips + int((alarm & flipped).sum())
    print(f"\n{acceptance}: {near} sequences with a margin near {EPS[-1]}, of which {flips} flip", end="")
    assert near >= 30 and flips >= least * near, f"{flips} of {near}"


# --- margins that are known -------------------------------------------------------------------------------------------

HALF, QUARTERS = [0.0, 0.0], [0.0] * 4


def one_row(row: list[float], u: float, token: int, **more: Any) -> chains.Arguments:
    """One draft token, judged by the coin `u`, and a bonus row that is all on one id."""
    bonus = [0.0] + [-math.inf] * (len(row) - 1)
    return {
        "target_logits": torch.tensor([[row, bonus]]), "draft_tokens": torch.tensor([[token]]),
        "uniform_samples": torch.tensor([[0.3, u]], dtype=torch.float64), **more,
    }  # fmt: skip


def drawn(row: list[float], u: float, **more: Any) -> chains.Arguments:
    """No draft token; the bonus is drawn by `u`."""
    return {
        "target_logits": torch.tensor([[row]]), "draft_tokens": torch.empty(1, 0, dtype=torch.int64),
        "uniform_samples": torch.tensor([[u]], dtype=torch.float64), **more,
    }  # fmt: skip


def matched() -> tuple[chains.Arguments, float]:
    keys = torch.tensor([[12345]])
    best, second = sorted(float64_gumbel(keys[0], 4)[0].tolist())[:-3:-1]
    arguments = drawn(QUARTERS, 0.0, acceptance="match", noise_keys=keys)
    return {k: v for k, v in arguments.items() if k != "uniform_samples"}, (best - second) / 2


def greedy(row: list[float], **more: Any) -> chains.Arguments:
    return {**drawn(row, 0.0, **more), "acceptance": "greedy", "uniform_samples": None}


LOGS = [math.log(p) for p in (0.5, 0.3, 0.2)]
HALVES = torch.tensor([[HALF]])
KNOWN: dict[str, tuple[chains.Arguments, float]] = {
    "greedy": (greedy([0.0, 0.5, -1.0]), 0.25),
    "greedy, a tie": (greedy([0.5, 0.5, -1.0]), 0.0),
    "greedy, one id": (greedy([0.5, -math.inf, -math.inf]), math.inf),
    "greedy, NaN alone": (greedy([math.nan, math.nan]), math.inf),
    "greedy, an infinite logit": (greedy([1.0, math.inf, 2.0]), math.inf),
    "temperature": (drawn([0.0, 0.5], 0.1, params=sk.SamplingParams(0.0)), 0.25),
    "match": matched(),
    "a coin": (one_row(HALF, 0.4, 1), math.log(0.5 / 0.4) / 2),
    "a coin that rejects": (one_row(HALF, 0.6, 1), math.log(0.6 / 0.5) / 2),
    "a coin, with a draft of logits": (one_row(HALF, 0.9, 1, draft_logits=HALVES), math.log(1 / 0.9) / 4),
    "a coin, with a draft of probabilities": (
        one_row(HALF, 0.9, 1, draft_probs=HALVES.softmax(-1)), math.log(1 / 0.9) / 4,
    ),
    "block, a coin": (
        one_row([0.0, -1.0], 0.3, 1, acceptance="block", draft_logits=HALVES),
        math.log(2 / (1 + math.e) / 0.3) / 4,
    ),
    "a draw": (drawn(QUARTERS, 0.3), math.log(0.3 / 0.25) / 2),
    "a draw, nothing before it": (drawn(QUARTERS, 0.2), math.log(0.25 / 0.2) / 2),
    "a draw, nothing after it": (drawn(QUARTERS, 0.9), math.log(0.9 / 0.75) / 2),
    "a draw of what is left": (one_row(QUARTERS, 0.99, 0, uniform_samples=torch.tensor([[0.4, 0.99]])),
                               math.log(0.4 * 3) / 2),
    "min_p": (one_row([0.0, -1.0], 0.0, 1, params=sk.SamplingParams(min_p=math.exp(-1.02))), 0.01),
    "top_k": (one_row([0.0, -1.0, -1.03], 0.0, 1, params=sk.SamplingParams(top_k=2)), 0.015),
    "top_p": (one_row(LOGS, 0.0, 2, params=sk.SamplingParams(top_p=0.81)), math.log(0.81 * (1 - 2.0**-18) / 0.8) / 2),
    "a lossy coin": (one_row(HALF, 0.8, 1, target_law=laws.Lossy(0.5)), math.log(1 / 0.8) / 2),
    "a lossy coin that rejects": (
        one_row(LOGS, 0.8, 1, target_law=laws.Lossy(0.5), uniform_samples=torch.tensor([[0.5, 0.8]])),
        math.log(0.8 / 0.6) / 2,
    ),
    "a deferral": (
        one_row([0.0, -1.0], 0.9999, 1, draft_logits=HALVES, target_law=laws.Chow(0.48)), math.log(0.52 / 0.5) / 2,
    ),
    "an id that is kept": (
        one_row([0.0, -1.0], 0.9999, 1, draft_logits=torch.tensor([[[0.0, 3.0]]]), target_law=laws.TokenV3(0.64)),
        (-1 - math.log(0.36)) / 4,
    ),
    "the draft's top_k": (
        one_row(HALF, 0.0, 1, draft_logits=torch.tensor([[[0.0, 0.01]]]), draft_params=sk.SamplingParams(top_k=1)),
        0.005,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_margin(name: str) -> None:
    arguments, expected = KNOWN[name]
    exact = sk.decision_margins(sk.verify_chain, **arguments)
    margin = float(exact.margins[0, 0])
    assert exact.tokens[0, 0] >= 0 and (margin == expected or 0.985 * expected < margin < expected * 1.0001)


# --- a margin that forgets something ----------------------------------------------------------------------------------


of_token, kept, coin_of_block = loose_laws.of_token, LooseRows.kept, LooseChain.coin_of_block
position, mixtures = LooseStep._position, LooseStep._mixtures
MUTATIONS: dict[str, tuple[Any, str, Any, tuple[str, str]]] = {
    # what is forgotten: where, its name, what stands there, the case that finds it out
    "coins": (loose_laws, "of_token", lambda *given: in_the_middle(of_token(*given)), ("token", "full")),
    "coins, block": (loose_laws, "of_token", lambda *given: in_the_middle(of_token(*given)), ("block", "full")),
    "later coins": (
        LooseChain, "coin_of_block",
        lambda *given: (coin_of_block(*given)[0], torch.zeros_like(given[2], dtype=torch.bool)), ("block", "plain"),
    ),
    "draws": (margins, "surely_drawn", lambda weights, u, token: token >= 0, ("token", "one_hot")),
    "draws, block": (margins, "surely_drawn", lambda weights, u, token: token >= 0, ("block", "probs")),
    "the second best, match": (margins, "surely_best", lambda rows, noise, m, token: token >= 0, ("match", "full")),
    "the second best, greedy": (margins, "surely_best", lambda rows, noise, m, token: token >= 0, ("greedy", "full")),
    "cuts": (LooseRows, "kept", lambda rows, m: kept(rows, 0 * m), ("token", "full")),
    "cuts, match": (LooseRows, "kept", lambda rows, m: kept(rows, 0 * m), ("match", "full")),
    "the draft": (LooseStep, "draft", lambda step, j, m: ((step.Q[:, j],) * 2,) * 2, ("token", "full")),
    "where a law defers": (
        LooseStep, "_position", lambda step, j, m, P, Q, end: position(step, j, 0 * m, P, Q, end),
        ("token", repr(laws.Diff(0.05))),
    ),
    "what a law makes of P and Q": (
        LooseStep, "_mixtures",
        lambda step, j, m, P, Q: mixtures(step, j, 0 * m, in_the_middle(P), in_the_middle(Q)),
        ("token", repr(laws.TokenV2(0.3))),
    ),
    "what the draft can give": (loose_laws, "gives", lambda exact, q: (exact > 0, exact == 0), ("token", "odd")),
}  # fmt: skip


@pytest.mark.short(cases=5)
@pytest.mark.parametrize("forgotten", MUTATIONS)
def test_a_margin_that_forgets_is_found_out(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead, (acceptance, kind) = MUTATIONS[forgotten]
    arguments, exact = case(acceptance, kind)
    monkeypatch.setattr(where, name, instead)
    wrong = sk.decision_margins(sk.verify_chain, **arguments)
    assert torch.equal(wrong.tokens, exact.tokens)
    found = {
        eps: worst(wrong, sk.verify_chain, nudges(arguments, exact.tokens, eps), BATCH)[0] for eps in (EPS[-1], FAR)
    }
    assert any(largest > eps + ERROR for eps, largest in found.items()), found


# --- every form of a call ---------------------------------------------------------------------------------------------


def of(arguments: chains.Arguments, verify: Callable[..., Any] = sk.verify_chain, **more: Any) -> sk.Margins:
    return sk.decision_margins(verify, **{**arguments, **more})


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_packed_drafts_have_the_same_margins(acceptance: str) -> None:
    arguments, _ = case(acceptance, "full")
    counts = torch.arange(BATCH) % (NUM_DRAFT + 1)
    expected = of(arguments, num_draft_tokens=counts)
    same_bits(of(chains.packed(arguments, counts), sk.verify_packed), expected)
    assert torch.equal(
        expected.margins[expected.tokens < 0], torch.full_like(expected.margins, math.inf)[expected.tokens < 0]
    )


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_a_wider_bound_of_packed_drafts_adds_placeholders(acceptance: str) -> None:
    arguments = chains.packed(chains.select(case(acceptance, "full")[0], slice(0, 4)), torch.arange(4))
    narrow = of(arguments, sk.verify_packed)
    wide = of({**arguments, "max_num_draft_tokens": 2**20 - 1}, sk.verify_packed)
    assert wide.tokens.shape == wide.margins.shape == (4, 2**20)
    same_bits([t[:, :4] for t in (wide.tokens, wide.margins)], [narrow.tokens, narrow.margins])
    assert (wide.tokens[:, 4:] == -1).all() and (wide.margins[:, 4:] == math.inf).all()


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_a_batch_is_looked_at_in_parts(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in float64 is wider than the rows of a part; what comes out does not depend on it."""
    arguments = chains.select(case(acceptance, "full")[0], slice(0, 40))
    arguments["processors"] = sk.Processors(logit_bias=[{3: 0.5}] * 40)
    expected = of(arguments)
    most, width = 0, (NUM_DRAFT + 1) * VOCAB

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            out = function(*args, **(kwargs or {}))
            wide = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and t.dtype == torch.float64]
            most = max([most, *wide])
            return out

    monkeypatch.setattr(margins, "CELLS", 16 * width + 1)
    with Watched():
        same_bits(of(arguments), expected)
    assert 16 * width <= most < 20 * width


def test_an_index_and_seeds_and_stats() -> None:
    arguments, expected = case("token", "full")
    given = {k: v for k, v in arguments.items() if k != "draft_logits"}
    index = torch.randperm(BATCH, generator=seeded())
    rows = torch.empty_like(arguments["draft_logits"])
    rows[index] = arguments["draft_logits"]
    same_bits(of(given, draft_logits=rows, draft_index=index), expected)
    same_bits(of(arguments, draft_stats=sk.row_stats(arguments["draft_logits"], arguments["draft_params"])), expected)
    same_bits(of(arguments, backend="reference", return_acceptance=True), expected)
    seeds = torch.arange(BATCH)
    made = sk.uniform_samples(seeds, 5, NUM_DRAFT + 1)
    same_bits(of(arguments, uniform_samples=None, seeds=seeds, step=5), of(arguments, uniform_samples=made))


def test_processed_logits_have_their_margins() -> None:
    arguments, _ = case("token", "one_hot")
    bias = torch.zeros(VOCAB)
    bias[3], bias[5] = 0.5, -math.inf
    processors = sk.Processors(logit_bias={3: 0.5}, banned_ids=[5])
    same_bits(of(arguments, processors=processors), of(arguments, target_logits=arguments["target_logits"] + bias))


@pytest.mark.parametrize("source", ["uniform_samples", "noise_keys", "greedy", "probs"])
def test_a_draw_has_the_margin_of_a_bonus(source: str) -> None:
    rng = seeded()
    x, keys = logits(rng, 8, 2, VOCAB), torch.randint(-(2**63), 2**63 - 1, (8, 2), generator=rng)
    u, params = uniforms(rng, 8, 2), per_row(8)
    rows: dict[str, Any] = {"logits": x}
    if source == "probs":
        rows, params = {"logits": None, "probs": x.softmax(-1)}, sk.SamplingParams(top_k=9, top_p=0.9)
    elif source == "greedy":
        params = sk.SamplingParams(0.0)
    numbers = {} if source == "greedy" else {"noise_keys": keys} if source == "noise_keys" else {"uniform_samples": u}
    drawn = sk.decision_margins(sk.sample, **rows, **numbers, params=params)
    for i in range(2):
        given: dict[str, Any] = {
            "target_logits": x[:, i : i + 1], "draft_tokens": torch.empty(8, 0, dtype=torch.int64), "params": params,
            "acceptance": "match" if source == "noise_keys" else "token",
            **{name: value[:, i : i + 1] for name, value in numbers.items()},
        }  # fmt: skip
        if source == "probs":
            given |= {"target_logits": None, "target_probs": x.softmax(-1)[:, i : i + 1].contiguous()}
        bonus = of(given)
        assert torch.equal(drawn.tokens[:, i], bonus.tokens[:, 0])
        torch.testing.assert_close(drawn.margins[:, i], bonus.margins[:, 0], rtol=1e-9, atol=0)
        alone = {k: v if v is None else v[:, i].contiguous() for k, v in {**rows, **numbers}.items()}
        same_bits(
            sk.decision_margins(sk.sample, params=params, **alone), sk.Margins(drawn.tokens[:, i], drawn.margins[:, i])
        )


def test_a_reduced_vocabulary_is_drawn_with_the_noise_of_target_ids() -> None:
    token_map, keys = sk.TokenMap(torch.tensor([7, 2, 11])), torch.tensor([5])
    drawn = sk.decision_margins(sk.sample, torch.zeros(1, 3), noise_keys=keys, draft_token_map=token_map)
    scores = float64_gumbel(keys, 12)[0][[7, 2, 11]]
    best, second = sorted(scores.tolist())[:-3:-1]
    assert drawn.tokens.item() == [7, 2, 11][scores.argmax()]
    assert 0.985 * (best - second) / 2 < drawn.margins.item() <= (best - second) / 2


def test_the_first_difference_counts() -> None:
    exact = sk.Margins(
        torch.tensor([[3, 1, 2], [3, 1, -1]]), torch.tensor([[0.5, 0.25, 1.0], [0.5, 0.75, math.inf]]).double()
    )
    for tokens, expected in (
        ([[3, 1, 2], [3, 1, -1]], [0.0, 0.0]), ([[3, 1, 4], [3, 2, -1]], [0.25, 0.5]),
        ([[4, 1, 2], [3, 1, 6]], [0.5, 0.5]), ([[3, -1, -1], [-1, -1, -1]], [0.25, 0.5]),
    ):  # fmt: skip
        assert exact.of_difference(torch.tensor(tokens)).tolist() == expected
    for tokens, error, message in (
        (torch.zeros(2, 3), TypeError, "tokens must be int64, got float32"),
        (torch.zeros(2, 2).long(), ValueError, "tokens must be [batch=2, max_tokens=3], got [2, 2]"),
    ):
        refuses(exact.of_difference, {}, {"tokens": tokens}, error, f"Margins.of_difference: {message}")


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_nothing_to_decide(acceptance: str) -> None:
    """No sequence; idle ones; rows without a number."""
    arguments = chains.select(case(acceptance, "full")[0], slice(0, 6))
    empty = of(chains.select(arguments, slice(0, 0)))
    assert empty.tokens.shape == empty.margins.shape == (0, NUM_DRAFT + 1)
    idle = of(arguments, num_draft_tokens=torch.full((6,), -1))
    assert (idle.tokens == -1).all() and (idle.margins == math.inf).all()
    spoilt = of(arguments, target_logits=torch.full_like(arguments["target_logits"], math.nan))
    assert not spoilt.margins.isnan().any() and (spoilt.margins >= 0).all()


@pytest.mark.parametrize(
    ("verify", "change", "error", "message"),
    [
        (
            sk.row_stats,
            {},
            TypeError,
            "decision_margins: verify must be one of verify_chain, verify_packed, verify_tree, sample, got",
        ),
        (sk.verify_chain, {"acceptance": "best"}, ValueError, "verify_chain: acceptance must be one of"),
        (
            sk.verify_chain,
            {"draft_tokens": torch.zeros(5, 2).long()},
            ValueError,
            "verify_chain: draft_tokens must be [",
        ),
    ],
)
def test_what_is_refused(
    verify: Callable[..., Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    refuses(functools.partial(sk.decision_margins, verify), chains.small("token", "full"), change, error, message)


# --- several samples of a row -----------------------------------------------------------------------------------------

SAMPLES = 3
FEW: list[dict[str, Any]] = [{**CUTS[0], **cut} for cut in ({"top_k": SAMPLES - 1}, {"min_p": 0.4}, {"top_p": 0.4})]
"""What leaves fewer ids than are asked for, or may."""


@functools.cache
def several() -> Case:
    rng = seeded()
    keys = torch.randint(-(2**63), 2**63 - 1, (BATCH,), generator=rng)
    params = mixed([*CUTS, *FEW], BATCH, False, rng)
    given = {"logits": logits(rng, BATCH, VOCAB), "params": params, "noise_keys": keys, "num_samples": SAMPLES}
    return given, sk.decision_margins(sk.sample, **given)


def of_samples(given: dict[str, Any], tokens: Tensor, eps: float) -> Iterator[dict[str, Any]]:
    """Aimed at each token, the ids drawn after it and the cuts."""
    by, x = given["params"].temperature, given["logits"]
    ids = torch.arange(VOCAB)
    drawn = [ids == tokens[:, [i]] for i in range(SAMPLES)]
    every = torch.stack(drawn).any(0)
    borders = [x >= x.topk(n, -1).values[:, -1:] for n in (1, 2, 5)]
    for there in (*drawn, drawn[0] | drawn[2], every, *borders):
        for sign in (1.0, -1.0):
            moved = torch.where(there, sign, -sign) * torch.where(by == 0, 1.0, by)[:, None]
            yield {**given, "logits": x + eps * moved}


def some_rows(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    given = {name: value[rows] if isinstance(value, Tensor) else value for name, value in given.items()}
    fields = {name: getattr(given["params"], name)[rows] for name in CUTS[0]}
    return {**given, "params": sk.SamplingParams(**fields)}


@dataclasses.dataclass
class Drawn:
    tokens: Tensor


@pytest.mark.short(cases=2, emulated=2, triton=1)
def test_no_sample_of_several_flips_beyond_its_margin(backend: Backend) -> None:
    given, exact = several()
    for eps in (0.0, EPS[-1]) if backend.interpreted else (0.0, *EPS, FAR):
        steps = of_samples(given, exact.tokens, eps) if eps else iter([given])
        largest, _ = worst(
            exact, lambda **step: Drawn(backend.sample(**{k: backend(v) for k, v in step.items()}).token), steps,
            backend.batch(BATCH), some_rows,
        )  # fmt: skip
        assert largest <= eps + ERROR, f"{backend}: logits moved by {eps} flipped a margin of {largest}"


def test_margins_of_several_samples_are_not_idle() -> None:
    given, exact = several()
    _, flipped = worst(exact, lambda **step: Drawn(sk.sample(**step).token), of_samples(given, exact.tokens, EPS[-1]),
                       BATCH, some_rows)  # fmt: skip
    smallest = exact.margins.amin(-1)
    alarm = (smallest > EPS[-1] / 8) & (smallest <= EPS[-1])
    near, flips = int(alarm.sum()), int((alarm & flipped).sum())
    print(f"\nsamples: {near} rows with a margin near {EPS[-1]}, of which {flips} flip", end="")
    assert near >= 10 and flips >= 0.3 * near, f"{flips} of {near}"
    assert {int(n) for n in (exact.tokens >= 0).sum(-1)} == {1, 2, 3}


best_of = intervals.surely_best


def without_those_after(rows: LooseRows, noise: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
    """Each sample is held against what was not drawn alone."""
    columns = []
    for i in range(tokens.shape[1]):
        hidden = noise.scatter(-1, tokens[:, i + 1 :].clamp_min(0), -math.inf)
        columns.append(best_of(rows, hidden, m, tokens)[:, i])
    return torch.stack(columns, 1)


def whatever_is_left(rows: LooseRows, noise: Tensor, m: Tensor, tokens: Tensor) -> Tensor:
    """That nothing is left is no decision."""
    return best_of(rows, noise, m, tokens) | (tokens < 0)


@pytest.mark.parametrize("instead", [without_those_after, whatever_is_left])
def test_a_margin_of_several_samples_that_forgets_is_found_out(
    instead: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, exact = several()
    monkeypatch.setattr(margins, "surely_best", instead)
    wrong = sk.decision_margins(sk.sample, **given)
    assert torch.equal(wrong.tokens, exact.tokens)
    steps = of_samples(given, exact.tokens, FAR)
    largest, _ = worst(wrong, lambda **step: Drawn(sk.sample(**step).token), steps, BATCH, some_rows)
    assert largest > FAR + ERROR


def test_the_known_margins_of_several_samples() -> None:
    """Half the distance to the next; the last one's to the best that is left; what is not there is none's."""
    token_map, keys = sk.TokenMap(torch.tensor([7, 2, 11, 5])), torch.tensor([[5], [6]])
    rows = torch.zeros(2, 1, 4)
    for num in (1, 2, 4, 6):
        drawn = sk.decision_margins(sk.sample, rows, noise_keys=keys, num_samples=num, draft_token_map=token_map)
        assert drawn.tokens.shape == drawn.margins.shape == ((2, 1) if num == 1 else (2, 1, num))
        for b, key in enumerate(keys):
            scores = float64_gumbel(key, 12)[0][[7, 2, 11, 5]]
            best = sorted(scores.tolist(), reverse=True)
            expected = [(x - y) / 2 for x, y in zip(best, best[1:], strict=False)] + [math.inf] * 3
            for margin, wanted in zip(drawn.margins[b].flatten().tolist(), expected, strict=False):
                assert margin == wanted == math.inf or 0.985 * wanted < margin <= wanted
    greedy = sk.decision_margins(
        sk.sample, torch.tensor([[1.0, 0.0]]), sk.SamplingParams(0.0), noise_keys=keys[0], num_samples=2
    )
    assert greedy.tokens.tolist() == [[0, -1]] and greedy.margins[0, 1] == math.inf
    assert 0.49 < float(greedy.margins[0, 0]) <= 0.5
    nowhere = sk.decision_margins(
        sk.sample, torch.zeros(1, 3), row_index=torch.tensor([1]), noise_keys=keys[0], num_samples=2, backend="cpu"
    )
    assert nowhere.tokens.tolist() == [[-1, -1]] and (nowhere.margins == math.inf).all()
