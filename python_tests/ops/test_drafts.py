"""Long drafts, drafts that are given in one form or another, and how drafts overlap with the target."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests import emulated
from python_tests.ops import chains
from python_tests.ops.chains import DRAFT_PARAMS, run
from python_tests.ops.inputs import logits, same_bits, uniforms
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.laws import TargetLaw
from specdec_kernels.ops.arguments import ACCEPTANCES

OP = "verify_chain"
RATIO = ("token", "block")
PARAMS = sk.SamplingParams(0.9, top_k=60, top_p=0.95, min_p=0.01)


# --- more tokens than a warp has lanes, or than Triton's kernels look at in one go ------------------------------------

LONG = [(31, 30), (32, 31), (40, 33)]  # draft tokens, and where something happens; a warp has 32 lanes
LONGER = (70, 66)  # Triton's kernels look at 64 slots at once
EOS, NO_ID = 3, 99


def long_draft(num_draft: int, place: int, acceptance: str) -> tuple[chains.Arguments, list[int]]:
    """Five sequences whose drafts are all accepted, but that at a place one of them has an end, −1, an id that is
    none, and a token that the target cannot give; and how many are accepted.
    """
    rng = torch.Generator().manual_seed(num_draft)
    target = logits(rng, 5, num_draft + 1, 50)
    target[..., EOS] = -math.inf
    target[1, place, EOS] = 30.0
    made: chains.Arguments = {"target_logits": target, "acceptance": acceptance, "eos_token_ids": torch.tensor([EOS])}
    made["draft_logits"] = target[:, :-1].clone()
    if acceptance == "match":
        keys = made["noise_keys"] = torch.randint(-(2**63), 2**63 - 1, (5, num_draft + 1), generator=rng)
        tokens = sk.sample(target[:, :-1], noise_keys=keys[:, :-1], backend="reference").token
    elif acceptance == "greedy":
        tokens = target[:, :-1].argmax(-1)
    else:
        made["uniform_samples"] = uniforms(rng, 5, num_draft + 1)
        tokens = sk.sample(
            target[:, :-1], uniform_samples=uniforms(rng, 5, num_draft), backend="reference"
        ).token  # fmt: skip
    target[4, place, tokens[4, place]] = -math.inf
    tokens[2, place], tokens[3, place] = -1, NO_ID
    return {**made, "draft_tokens": tokens}, [num_draft, place + 1, place, place, place]


def check_long(out: sk.VerifyOutput, made: chains.Arguments, accepted: list[int]) -> None:
    expected = sk.verify_chain(**made, backend="reference")
    assert out.num_accepted.tolist() == accepted
    assert out.num_tokens.tolist() == [accepted[0] + 1, accepted[1], *(n + 1 for n in accepted[2:])]
    assert out.status.tolist() == [0, 0, 0, int(sk.Status.BAD_TOKEN), 0]
    assert torch.equal(out.tokens.cpu(), expected.tokens)


@pytest.mark.short(triton=2, emulated=4)
@pytest.mark.parametrize(("num_draft", "place"), LONG)
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_long_drafts(backend: Backend, acceptance: str, num_draft: int, place: int) -> None:
    made, accepted = long_draft(num_draft, place, acceptance)
    check_long(run(backend, made), made, accepted)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_longer_drafts(backend: Backend, acceptance: str) -> None:
    made, accepted = long_draft(*LONGER, acceptance)
    check_long(run(backend, made), made, accepted)


@pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))
@pytest.mark.short(cases=6)
@pytest.mark.parametrize(("num_draft", "place"), [*LONG, LONGER])
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("strategy", ["resident", "early", "cluster"])
def test_long_drafts_in_other_layouts(strategy: str, acceptance: str, num_draft: int, place: int) -> None:
    made, accepted = long_draft(num_draft, place, acceptance)
    with emulated.running(strategy):
        out = sk.verify_chain(**made, backend=emulated.NAME)
    check_long(out, made, accepted)


# --- the overlap with the target --------------------------------------------------------------------------------------

OVERLAPS: list[tuple[str, str, TargetLaw | None]] = [
    (kind, acceptance, law)
    for law in (None, laws.Opt(0.3, bonus="cascade"))
    for acceptance in ACCEPTANCES
    for kind in chains.KINDS
    if law is None or chains.fits(law, acceptance, kind)
]


@pytest.mark.short(triton=3, emulated=5)
@pytest.mark.parametrize(("kind", "acceptance", "law"), OVERLAPS, ids=str)
def test_acceptance_is_the_overlap_of_the_laws(
    backend: Backend, kind: str, acceptance: str, law: TargetLaw | None
) -> None:
    """By every rule, whatever the target law: a draft ends at its length, at what is no id, and with an EOS."""
    rng = torch.Generator().manual_seed(17)
    arguments = chains.make(
        rng, 7, 3, 1100, kind=kind, acceptance=acceptance, law=law, params=PARAMS, draft_params=DRAFT_PARAMS,
        by=backend,
    )  # fmt: skip
    lengths = [3, 3, 2, 1, 0, -1, 3]
    tokens = arguments["draft_tokens"]
    arguments |= {"num_draft_tokens": torch.tensor(lengths, dtype=torch.int32), "eos_token_ids": tokens[1, 1:2].clone()}
    tokens[6, 1] = -1
    P, Q = chains.laws(arguments)
    if Q is None:
        Q = np.eye(1100)[tokens]
    expected = np.minimum(P[:, :3], Q[:, :3]).sum(-1)
    out = run(backend, arguments, return_acceptance=True)
    assert out.acceptance.shape == (7, 3)
    for b, length in enumerate(lengths):
        n = next((i + (x >= 0) for i, x in enumerate(tokens[b].tolist()) if x in (-1, int(tokens[1, 1]))), 3)
        n = max(min(n, length), 0)
        np.testing.assert_allclose(out.acceptance[b, :n].cpu(), expected[b, :n], rtol=1e-5, atol=1e-6)
        assert (out.acceptance[b, n:] == -1).all()
    assert run(backend, arguments).acceptance is None


# --- forms of a draft -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", RATIO)
def test_a_reduced_draft_may_be_given_as_probabilities(backend: Backend, acceptance: str) -> None:
    rng = torch.Generator().manual_seed(31)
    given = chains.make(rng, backend.batch(24), 3, 1500, kind="reduced", acceptance=acceptance, spread=1.0)
    expected = sk.verify_chain(**given, backend="reference")
    given["draft_probs"] = given.pop("draft_logits").softmax(-1)
    out = run(backend, given)
    for name in ("tokens", "num_accepted", "num_tokens", "status"):
        assert torch.equal(getattr(out, name).cpu(), getattr(expected, name)), name
    assert 0 < int(out.num_accepted.sum()) < 3 * len(out.tokens)


@pytest.mark.parametrize("acceptance", RATIO)
def test_a_probability_of_minus_infinity_is_none(backend: Backend, acceptance: str) -> None:
    arguments = chains.make(torch.Generator().manual_seed(37), 6, 3, 1100, kind="probs", acceptance=acceptance)
    probs = arguments["draft_probs"]
    drafted = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, arguments["draft_tokens"][..., None], True)
    none = (probs < 1e-5) & ~drafted
    assert none.any(-1).all()
    outs = [
        run(backend, {**arguments, "draft_probs": probs.masked_fill(none, value)}, return_acceptance=True)
        for value in (0.0, -math.inf)
    ]
    same_bits(*outs)
    assert (outs[0].status == 0).all()


def with_normalizer(kind: str, normalizer: float) -> Any:
    """A step with stats of the draft, whose normalizer at position 1 of even sequences is changed."""
    arguments = chains.make(torch.Generator().manual_seed(41), 8, 3, 40, kind=kind)
    params = arguments["draft_params"]
    stats = sk.row_stats(arguments["draft_logits"], params, backend="reference")
    stats.values[::2, 1, 3] = normalizer
    arguments["uniform_samples"][:] = 0.0  # so that the first token is accepted
    return arguments | {"draft_stats": stats}


@pytest.mark.parametrize(
    ("kind", "normalizer", "flagged"),
    [("full", 0.98, True), ("full", 0.995, False), ("full", 40.3, False), ("full", 40.5, True),
     ("reduced", 26.2, False), ("reduced", 30.0, True)],
)  # fmt: skip
def test_a_normalizer_lies_between_1_and_the_drafts_vocabulary(
    backend: Backend, kind: str, normalizer: float, flagged: bool
) -> None:
    """Of 40 ids, or of 26 known ones, up to a hundredth."""
    out = run(backend, with_normalizer(kind, normalizer))
    assert ((out.status[::2] == int(sk.Status.BAD_DRAFT)) == flagged).all() and (out.status[1::2] == 0).all()
    assert not flagged or (out.num_accepted[::2] == 1).all()


def test_stats_of_a_certain_row_have_a_maximum(backend: Backend) -> None:
    """All mass is on the argmax, but a NaN maximum says that the row was none."""
    arguments = chains.make(
        torch.Generator().manual_seed(43), 8, 3, 40, kind="stats", draft_params=sk.SamplingParams(0.0)
    )
    arguments["uniform_samples"][:] = 0.0
    arguments["draft_stats"].values[::2, 1, 0] = math.nan
    out = run(backend, arguments)
    assert out.num_accepted.tolist() == [1, 3] * 4 and out.status.tolist() == [int(sk.Status.BAD_DRAFT), 0] * 4


def test_opt_weighs_a_loss_against_the_distance(backend: Backend) -> None:
    """With α < 0 a target that seems worse may still be kept: gain −0.2, TV 0.2. At a coin of 0.9 only Q accepts."""
    target = torch.tensor([0.6, 0.4]).log().expand(1, 2, 2).contiguous()
    draft = torch.tensor([0.8, 0.2]).log().expand(1, 1, 2).contiguous()
    for alpha, accepted in ((-0.5, 1), (-0.99, 1), (-1.01, 0), (-3.0, 0)):
        out = backend.verify_chain(
            *backend(target, torch.zeros(1, 1, dtype=torch.int64), draft),
            uniform_samples=backend(torch.tensor([[0.5, 0.9]])), target_law=laws.Opt(alpha),
        )  # fmt: skip
        assert out.num_accepted.tolist() == [accepted], alpha
