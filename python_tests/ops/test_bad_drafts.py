"""Draft tokens that their own distribution cannot have given, and draft distributions that are none, on every backend:
the sequence's draft ends before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains, trees
from python_tests.ops.chains import run
from python_tests.ops.inputs import same_bits
from python_tests.support import Backend
from specdec_kernels import laws

OP = "verify_chain"
RATIO = ("token", "block")
Change = Callable[[chains.Arguments, int], None]
"""Spoils the draft of one sequence at position 1."""


def _set(name: str, value: float, column: int | slice = slice(None)) -> Change:
    def change(arguments: chains.Arguments, b: int) -> None:
        arguments[name][b, 1, column] = value

    return change


def _at_token(name: str, value: float) -> Change:
    def change(arguments: chains.Arguments, b: int) -> None:
        arguments[name][b, 1, arguments["draft_tokens"][b, 1]] = value

    return change


def _scale(factor: float) -> Change:
    def change(arguments: chains.Arguments, b: int) -> None:
        arguments["draft_probs"][b, 1] *= factor

    return change


def _stats(column: int | slice, value: float) -> Change:
    def change(arguments: chains.Arguments, b: int) -> None:
        arguments["draft_stats"].values[b, 1, column] = value

    return change


def _not_the_argmax(arguments: chains.Arguments, b: int) -> None:
    arguments["draft_tokens"][b, 1] = arguments["draft_logits"][b, 1].argmin()


def _not_in_the_map(arguments: chains.Arguments, b: int) -> None:
    known = set(arguments["draft_token_map"].draft_to_target.tolist())
    arguments["draft_tokens"][b, 1] = next(id for id in range(40) if id not in known)


def _lower_max(arguments: chains.Arguments, b: int) -> None:
    """Stats of another row: the token's logit lies above their maximum, and Q(x) above 1."""
    logit = arguments["draft_logits"][b, 1, arguments["draft_tokens"][b, 1]]
    arguments["draft_stats"].values[b, 1, 0] = logit - 8


# A kind of draft, how it is spoiled, and the flag beside BAD_DRAFT.
IMPOSSIBLE: dict[str, tuple[str, Change, sk.Status]] = {
    "-inf logit": ("full", _at_token("draft_logits", -math.inf), sk.Status.OK),
    "outside top-k": ("full", _not_the_argmax, sk.Status.OK),
    "outside the reduced vocabulary": ("reduced", _not_in_the_map, sk.Status.OK),
    "no probability": ("probs", _at_token("draft_probs", 0.0), sk.Status.OK),
    "all probabilities 0": ("probs", _set("draft_probs", 0.0), sk.Status.OK),
    "a negative probability": ("probs", _set("draft_probs", -1e-6, -1), sk.Status.OK),
    "an infinite probability": ("probs", _set("draft_probs", math.inf, 3), sk.Status.OK),
    "a NaN probability": ("probs", _set("draft_probs", math.nan, 3), sk.Status.NAN),
    "probabilities that sum to 1.02": ("probs", _scale(1.02), sk.Status.OK),
    "probabilities that sum to 0.98": ("probs", _scale(0.98), sk.Status.OK),
    "NaN stats": ("stats", _stats(slice(None), math.nan), sk.Status.OK),
    "stats with a NaN maximum": ("stats", _stats(0, math.nan), sk.Status.OK),
    "stats with a NaN cutoff": ("stats", _stats(1, math.nan), sk.Status.OK),
    "stats with a NaN normalizer": ("stats", _stats(3, math.nan), sk.Status.OK),
    "stats whose cutoff exceeds the maximum": ("stats", _stats(1, 1e4), sk.Status.OK),
    "stats with a normalizer of 0": ("stats", _stats(3, 0.0), sk.Status.OK),
    "stats with a normalizer above the vocabulary": ("stats", _stats(3, 42.0), sk.Status.OK),
    "stats of another row": ("stats", _lower_max, sk.Status.OK),
}  # fmt: skip


def impossible(how: str, acceptance: str) -> tuple[chains.Arguments, sk.Status]:
    """A step of eight sequences, of which those of even number are spoiled, and what that flags."""
    kind, change, flag = IMPOSSIBLE[how]
    rng = torch.Generator().manual_seed(57)
    draft_params = sk.SamplingParams(top_k=20 if how == "outside top-k" else 0)
    arguments = chains.make(rng, 8, 3, 40, acceptance=acceptance, kind=kind, draft_params=draft_params)
    for b in range(0, 8, 2):
        change(arguments, b)
    return arguments, sk.Status.BAD_DRAFT | flag


@pytest.mark.short(triton=4, emulated=6)
@pytest.mark.parametrize("how", IMPOSSIBLE)
@pytest.mark.parametrize("acceptance", RATIO)
def test_the_draft_ends_before_what_it_cannot_have_given(backend: Backend, acceptance: str, how: str) -> None:
    """As if it had no more tokens; where the rule does not come there nothing is flagged."""
    arguments, flags = impossible(how, acceptance)
    out = run(backend, arguments, return_acceptance=True)
    shorter = run(backend, arguments, num_draft_tokens=torch.tensor([1, 3] * 4))
    same_bits(out[:3], shorter[:3])
    # a first token that P rejects for certain is the only reason for the block rule not to come to the second
    reached = shorter.num_accepted[::2] == 1 if acceptance == "token" else torch.ones(4, dtype=torch.bool)
    assert out.status[::2].tolist() == torch.where(reached.cpu(), int(flags), 0).tolist() and reached.any()
    assert (out.status[1::2] == 0).all()
    match = {"acceptance": "match", "noise_keys": torch.zeros(8, 4).long(), "uniform_samples": None}
    assert (run(backend, arguments, **match).status == 0).all()  # which asks no Q
    if flags & sk.Status.NAN or "sum to" in how or "stats with" in how:
        assert (out.acceptance[::2, 1] == 0).all()
    packed = chains.packed(arguments, torch.full((8,), 3))
    same_bits(backend.verify_packed(**chains.on(backend, packed))[:4], out[:4])


ABOVE_ONE = [2.0**-23, 5e-4, 0.0099]
ALMOST_ONE = 1 - 2.0**-24


@pytest.mark.parametrize("above", ABOVE_ONE)
@pytest.mark.parametrize("acceptance", RATIO)
def test_what_a_probability_exceeds_one_by_is_rounding(backend: Backend, acceptance: str, above: float) -> None:
    """Where both models are sure of the tokens no coin rejects them; where P is a half those from a half on do."""
    target, draft = torch.zeros(3, 4, 9), torch.zeros(3, 3, 9)
    draft[..., 5] = 1 + above
    target[0, :, 5] = 1.0
    target[1:, :, 4:6] = 0.5
    coins = torch.tensor([ALMOST_ONE, 0.5 * ALMOST_ONE, 0.5])[:, None].repeat(1, 4)
    given = {"target_probs": target, "draft_probs": draft, "uniform_samples": coins, "acceptance": acceptance}
    out = backend.verify_chain(None, backend(torch.full((3, 3), 5)), **chains.on(backend, given))
    accepted = out.num_accepted.tolist()
    if acceptance == "token":
        assert accepted == [3, 3, 0] and out.tokens[2, 0] == 4
    assert accepted[0] == 3 and (out.status == 0).all()


@pytest.mark.parametrize("above", ABOVE_ONE)
@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_so_it_is_in_trees(backend: Backend, acceptance: str, above: float) -> None:
    target, draft = torch.full((2, 4, 9), -100.0), torch.zeros(2, 4, 9)
    target[..., 5], draft[..., 5] = 0.0, 1 + above
    given = {
        "target_logits": target, "node_tokens": torch.full((2, 4), 5), "draft_probs": draft, "acceptance": acceptance,
        "tree": sk.DraftTree.from_parents([-1, 0, 1, 2]), "uniform_samples": torch.full((2, 4), ALMOST_ONE),
    }  # fmt: skip
    out = backend.verify_tree(**chains.on(backend, given))
    assert out.num_accepted.tolist() == [3, 3] and (out.status == 0).all()


@pytest.mark.parametrize("acceptance", RATIO)
def test_an_eos_that_cannot_have_been_drawn_ends_nothing(backend: Backend, acceptance: str) -> None:
    """A token follows what was accepted."""
    arguments, _ = impossible("no probability", acceptance)
    arguments = chains.select(arguments, torch.tensor([0, 2, 4, 6]))
    arguments["eos_token_ids"] = arguments["draft_tokens"][:, 1].clone()
    out = run(backend, arguments)
    shorter = run(backend, arguments, num_draft_tokens=torch.ones(4).int())
    same_bits(out[:3], shorter[:3])
    assert (out.status == sk.Status.BAD_DRAFT).any()


def test_a_greedy_target_asks_no_draft(backend: Backend) -> None:
    """In the token rule: all of P is on one id, so that whatever the draft is the tokens are the target's."""
    arguments, _ = impossible("no probability", "token")
    out = run(backend, arguments, params=sk.SamplingParams(0.0))
    assert (out.status == 0).all()
    same_bits(out.tokens[:, 0], backend(arguments["target_logits"][:, 0].argmax(-1)))


@pytest.mark.parametrize("argmax", [-5, 40, 2**32 + 1, -(2**40)])
@pytest.mark.parametrize("acceptance", RATIO)
def test_stats_with_an_argmax_outside_the_row(backend: Backend, acceptance: str, argmax: int) -> None:
    """Stats come from the caller: their argmax addresses nothing. A greedy row has all its mass there."""
    arguments = chains.make(torch.Generator().manual_seed(57), 40, 2, 40, acceptance=acceptance)
    stats = backend.row_stats(backend(arguments["draft_logits"]))
    stats = stats._replace(argmax=torch.full_like(stats.argmax, argmax))
    arguments |= {"draft_stats": stats, "draft_params": sk.SamplingParams(temperature=0.0)}
    out = run(backend, arguments, return_acceptance=True)
    assert (out.num_accepted == 0).all() and (out.status == sk.Status.BAD_DRAFT).all() and (out.acceptance == 0).all()
    same_bits(out[:3], run(backend, arguments, num_draft_tokens=torch.zeros(40).int())[:3])


@pytest.mark.parametrize("law", [laws.Chow(-1.0, bonus="cascade"), laws.TokenV2(0.2, bonus="cascade")], ids=str)
def test_a_cascade_without_a_draft_distribution_is_the_target(backend: Backend, law: laws.TargetLaw) -> None:
    """π is made of Q: where that is none, P has its place, for the bonus too."""
    arguments = chains.make(torch.Generator().manual_seed(59), 16, 2, 40, kind="stats", law=law)
    for row in (0, 2):
        stats = sk.RowStats(*(t.clone() for t in arguments["draft_stats"]))
        stats.values[:, row, 3] = math.nan
        out = run(backend, {**arguments, "draft_stats": stats})
        here = out.num_accepted == row
        assert here.any() and (out.status == torch.where(here, int(sk.Status.BAD_DRAFT), 0)).all()
        plain = {
            "target_logits": arguments["target_logits"][:, row : row + 1],
            "draft_tokens": arguments["draft_tokens"][:, :0], "uniform_samples": arguments["uniform_samples"][:, :1],
        }  # fmt: skip
        same_bits(out.tokens[here, row], run(backend, plain).tokens[here, 0])


@pytest.mark.parametrize("how", ["greedy", "inf"])
def test_a_cascades_bonus_of_one_id_is_that_id(backend: Backend, how: str) -> None:
    """Where there is no draft distribution P takes the law's place: all on one id of a long row, in which no masses are
    known.
    """
    target, draft = torch.zeros(2, 1, 4096), torch.randn(2, 1, 4096, generator=torch.Generator().manual_seed(3))
    target[:, 0, 3000] = math.inf if how == "inf" else 5.0
    stats = sk.row_stats(draft)
    stats.values[..., 3] = math.nan
    arguments = {
        "target_logits": target, "draft_tokens": torch.zeros(2, 0, dtype=torch.int64), "draft_logits": draft,
        "draft_stats": stats, "target_law": laws.TokenV3(0.1, bonus="cascade"),
        "uniform_samples": torch.full((2, 1), 0.5), "params": sk.SamplingParams(0.0 if how == "greedy" else 1.0),
    }  # fmt: skip
    out = run(backend, arguments)
    assert out.tokens.tolist() == [[3000], [3000]]
    assert (out.status & int(sk.Status.BAD_DRAFT)).all()


@pytest.mark.parametrize("over", [80.0, 95.0, 200.0, 260.0, 300.0, 354.9, 1e4, math.inf])
def test_a_logit_far_above_the_max_that_its_stats_claim(backend: Backend, over: float) -> None:
    """Of a drafted token: its Q is above 1. Of another: it leaves nothing of that id, and no more of what the target
    excludes.
    """
    never, temperature = -math.inf, 0.05
    target = torch.tensor([-3.0, 0.0, *[never] * 6]).expand(1, 2, 8)
    values = torch.tensor([[[0.0, never, 0.0, 4.0, never, never]]])
    stats = sk.RowStats(values, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32))
    for id in (0, 3):
        draft = torch.zeros(1, 1, 8)
        draft[..., id] = over * temperature
        out = backend.verify_chain(
            *backend(target, torch.tensor([[0]]), draft), draft_stats=sk.RowStats(*backend(*stats)),
            draft_params=sk.SamplingParams(temperature), uniform_samples=backend(torch.tensor([[0.5, 0.9]])),
        )  # fmt: skip
        assert (out.status.item() == sk.Status.BAD_DRAFT) == (id == 0)
        if id == 3:
            assert out.tokens.tolist() == [[1, -1]]


@pytest.mark.parametrize("over", [80.0, 95.0, 200.0])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_such_a_logit_leaves_the_rest_of_a_target_law_as_it_is(name: str, over: float) -> None:
    """Not NaN: what the law keeps and the draft has less of is drawn."""
    target = torch.tensor([0.1, 0.2, 0.6, 0.1]).log().expand(1, 2, 4)
    draft, values = torch.zeros(1, 1, 4), torch.tensor([[[0.0, -math.inf, 0.0, 4.0, -math.inf, -math.inf]]])
    draft[..., 2] = over
    stats = sk.RowStats(values, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32))
    out = sk.verify_chain(
        target, torch.tensor([[0]]), draft, draft_stats=stats, target_law=sk.laws.TokenV2(0.1),
        uniform_samples=torch.tensor([[0.9, 0.5]]), backend=name,
    )  # fmt: skip
    assert out.tokens.tolist() == [[2, -1]]
