"""verify_chain with the target's probabilities instead of its logits, on every backend."""

from __future__ import annotations

import math

import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.chains import DRAFT_PARAMS, run
from python_tests.ops.inputs import same_bits
from python_tests.support import Backend

OP = "verify_chain"


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("acceptance", ["token", "block", "greedy"])
@pytest.mark.parametrize("vocab", [3, 900, 2500])
def test_target_probabilities(backend: Backend, vocab: int, acceptance: str, kind: str) -> None:
    """What the logits give, where `params` cut by top-k, top-p and min-p alone; no row is flagged."""
    rng, params = torch.Generator().manual_seed(vocab), sk.SamplingParams(top_k=60, top_p=0.95, min_p=0.01)
    arguments = chains.make(
        rng, backend.batch(12), 3, vocab, kind=kind, acceptance=acceptance, params=params, draft_params=DRAFT_PARAMS,
        by=backend,
    )  # fmt: skip
    out = run(backend, chains.with_target_probs(arguments, params))
    assert (out.status == 0).all()
    assert chains.check(arguments, out) <= 1


def test_a_temperature_that_is_read_as_0_may_stand_beside_them(backend: Backend) -> None:
    """Also of `sample`."""
    arguments = chains.make(torch.Generator().manual_seed(3), 4, 2, 50, kind="one_hot")
    steps, draws = [], []
    for temperature in (0.0, 1e-39):
        params = sk.SamplingParams(temperature)
        steps.append(run(backend, chains.with_target_probs(arguments, params)))
        draws.append(backend.sample(None, params, probs=backend(arguments["target_logits"].softmax(-1))))
    same_bits(*steps)
    same_bits(*draws)


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_target_probabilities_that_are_none(backend: Backend, acceptance: str) -> None:
    """Rows are divided by their sum; one that is far from 1, or that there is none of, is flagged."""
    s = sk.Status
    arguments = chains.make(torch.Generator().manual_seed(3), 9, 1, 1100, kind="one_hot", acceptance=acceptance)
    arguments = chains.with_target_probs(arguments, sk.SamplingParams(top_k=50))
    whole = run(backend, arguments)
    probs = arguments["target_probs"]
    probs[1] *= 0.98
    probs[2] *= 1.02
    probs[3] *= 1.009
    probs[4, :, 1050], probs[5], probs[7, :, 1050] = -0.25, 0.0, math.inf
    probs[6, :, probs[6].sum(0).argmin()] = math.nan
    out = run(backend, arguments)
    bad = s.BAD_PARAM
    assert out.status.tolist() == [0, bad, bad, 0, bad, s.EMPTY_ROW, s.NAN, s.INF, 0]
    for b in (0, 1, 2, 3, 8):
        same_bits(out.tokens[b], whole.tokens[b])
    for b, likeliest in ((4, int(probs[4, 0].argmax())), (5, 0), (7, 1050)):
        drafted = int(arguments["draft_tokens"][b, 0])
        assert out.tokens[b, 0] == likeliest and out.num_accepted[b] == (drafted == likeliest)
