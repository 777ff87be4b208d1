"""Defects of the peers' verify steps, shown not to exist here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.law.cases import check_zero_probability
from python_tests.ops import chains
from python_tests.ops.chains import run
from python_tests.support import Backend

OP = "verify_chain"


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_empty_residual_draws_from_the_target(backend: Backend, acceptance: str) -> None:
    """P equal to Q and a rejection forced by rounding or a stale coin: peers give token 0, V−1, garbage or an
    exception.
    """
    n, vocab = backend.draws(2048), 1100
    row = torch.full((1, 1, vocab), -math.inf)
    row[..., 300:800] = 0.0
    draft = torch.full((n, 1), 5)  # impossible for both: rejected with an empty residual
    u = torch.rand(n, 2, generator=torch.Generator().manual_seed(1))
    out = run(backend, {
        "target_logits": row.expand(n, 2, vocab), "draft_tokens": draft, "draft_logits": row.expand(n, 1, vocab),
        "uniform_samples": u, "acceptance": acceptance,
    })  # fmt: skip
    token = out.tokens[:, 0].cpu()
    assert (out.num_accepted == 0).all() and ((token >= 300) & (token < 800)).all()
    np.testing.assert_array_equal(token, 300 + (u[:, 0].double() * 500).long())


def test_zero_probability_accepted_at_u_0(backend: Backend) -> None:
    check_zero_probability(backend.verify_chain, backend.device)


def test_slots_past_the_end_are_defined(backend: Backend) -> None:
    """A peer leaves them uninitialised; here −1, in every shape of outcome (torch.empty is filled with garbage in this
    test).
    """
    rng = torch.Generator().manual_seed(71)
    n = backend.draws(200)
    arguments = chains.make(rng, n, 6, 30)
    arguments["num_draft_tokens"] = torch.randint(-1, 7, (n,), generator=rng, dtype=torch.int32)
    out = run(backend, arguments, return_acceptance=True)
    slots = torch.arange(7, device=out.tokens.device)
    assert torch.equal(out.tokens == -1, slots >= out.num_tokens[:, None])
    lengths = arguments["num_draft_tokens"].clamp_min(0).to(out.tokens.device)
    assert torch.equal(out.acceptance == -1, slots[:6] >= lengths[:, None])


def test_top_k_1_with_tied_maxima(backend: Backend) -> None:
    """Only a maximum is ever emitted or accepted."""
    n = backend.batch(64)
    x = torch.tensor([1.0, 4.0, 2.0, 4.0]).repeat(n, 3, 1)
    u = torch.rand(n, 3, generator=torch.Generator().manual_seed(2))
    draft = torch.arange(2 * n).view(n, 2) % 4
    out = run(backend, {
        "target_logits": x, "draft_tokens": draft, "uniform_samples": u, "params": sk.SamplingParams(top_k=1),
    })  # fmt: skip
    assert set(out.tokens.flatten().tolist()) <= {-1, 1, 3}


def test_sampling_stays_sampling_off_cuda(backend: Backend) -> None:
    """A peer silently turns greedy off CUDA: at temperature 1 a flat row emits every id."""
    n = backend.draws(512)
    u = torch.rand(n, 1, generator=torch.Generator().manual_seed(3))
    out = run(
        backend, {"target_logits": torch.zeros(n, 1, 8), "draft_tokens": torch.zeros(n, 0).long(), "uniform_samples": u}
    )
    assert set(out.tokens.flatten().tolist()) == set(range(8))


def test_block_noise_reuse_needs_a_step() -> None:
    """The generator's numbers are fresh at each step: noise re-used across steps biases the block rule."""
    seeds = torch.arange(200)
    first, second = sk.uniform_samples(seeds, 0, 6), sk.uniform_samples(seeds, 1, 6)
    assert (first == second).float().mean() < 1e-3
