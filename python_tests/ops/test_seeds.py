"""Verify steps that make their own random numbers from seeds: bit for bit what they do with the numbers given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests import emulated
from python_tests.ops import chains, trees
from python_tests.ops.inputs import refuses, same_bits
from python_tests.support import Backend
from specdec_kernels import laws

OP = "verify_chain"
BATCH, NUM_DRAFT, VOCAB = 6, 5, 1100
SEEDS = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63), 77])
STEPS = {"number": 2**40 + 3, "tensor": torch.tensor([0, 1, 2, 3, 2**62, 5])}
Arguments = dict[str, Any]


def both_forms(acceptance: str, num_rows: int, step: int | torch.Tensor | None) -> tuple[Arguments, Arguments]:
    """The numbers themselves, and what they are made of; a "match" has a step or none."""
    if acceptance == "match":
        positions = torch.tensor([0, 3, 2**31, 2**40, 9, 100])[:, None] + torch.arange(num_rows)
        keys = sk.noise_keys(SEEDS, positions, step=step, backend="reference")
        return {"noise_keys": keys}, {"seeds": SEEDS, "step": step, "positions": positions}
    assert step is not None
    numbers = sk.uniform_samples(SEEDS, step, num_rows, backend="reference")
    return {"uniform_samples": numbers}, {"seeds": SEEDS, "step": step}


@pytest.mark.parametrize("step", [*STEPS, None])
@pytest.mark.parametrize("kind", ["full", "one_hot"])
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "Opt"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_chains(backend: Backend, packed: bool, acceptance: str, kind: str, step: str | None) -> None:
    law = laws.Opt(0.4, bonus="cascade") if acceptance == "Opt" else None
    if law is not None:
        acceptance, kind = "token", "full"
    if acceptance != "match" and step is None:
        step = "number"
    rng = torch.Generator().manual_seed(5)
    made = chains.make(rng, BATCH, NUM_DRAFT, VOCAB, acceptance=acceptance, kind=kind, law=law)
    numbers, seeds = both_forms(acceptance, NUM_DRAFT + 1, None if step is None else STEPS[step])
    given = {**chains.without_numbers(made), **numbers}
    asked = {**chains.without_numbers(made), **seeds}
    verify = backend.verify_chain
    if packed:
        verify, counts = backend.verify_packed, torch.tensor([5, 0, 3, 1, 4, 2])
        given = chains.packed(given, counts)
        if "positions" in seeds:
            used = torch.arange(NUM_DRAFT + 1) <= counts[:, None]
            seeds = {**seeds, "positions": seeds["positions"][used]}
        asked = {**chains.without_numbers(given), **seeds}
    same_bits(verify(**chains.on(backend, asked)), verify(**chains.on(backend, given)))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("acceptance", ["sample", "match", "recursive", "traversal", "typical"])
def test_trees(backend: Backend, acceptance: str, step: str) -> None:
    made = trees.make(11, BATCH, 7, VOCAB, acceptance=acceptance, params=sk.SamplingParams(0.9))
    numbers, seeds = both_forms(acceptance, 7, STEPS[step])
    given, asked = {**chains.without_numbers(made), **numbers}, {**chains.without_numbers(made), **seeds}
    same_bits(backend.verify_tree(**chains.on(backend, asked)), backend.verify_tree(**chains.on(backend, given)))


CHAIN = {"target_logits": torch.zeros(2, 3, 8), "draft_tokens": torch.zeros(2, 2, dtype=torch.int64)}
TWO, ROWS = torch.arange(2), torch.zeros(2, 3, dtype=torch.int64)
MATCH = {"acceptance": "match", "seeds": TWO}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": TWO, "step": 1, "uniform_samples": torch.zeros(2, 3)}, ValueError,
         "verify_chain: give uniform_samples or seeds, got both"),
        ({**MATCH, "positions": ROWS, "noise_keys": ROWS}, ValueError,
         "verify_chain: give noise_keys or seeds, got both"),
        ({"step": 1}, ValueError, "verify_chain: step needs seeds, got none"),
        ({"acceptance": "match", "positions": ROWS}, ValueError, "verify_chain: positions needs seeds, got none"),
        ({"seeds": TWO}, ValueError, "verify_chain: seeds need a step, got None"),
        ({"seeds": TWO, "step": 1, "positions": ROWS}, ValueError,
         "verify_chain: acceptance='token' takes seeds and a step, got positions"),
        (MATCH, ValueError, "verify_chain: acceptance='match' needs the positions beside seeds, got None"),
        ({**MATCH, "positions": ROWS[:, :2]}, ValueError,
         "verify_chain: positions must be [batch=2, num_draft + 1=3], got [2, 2]"),
        ({"seeds": TWO.int(), "step": 1}, TypeError, "verify_chain: seeds must be int64, got int32"),
        ({"seeds": torch.arange(3), "step": 1}, ValueError, "verify_chain: seeds must be [batch=2], got [3]"),
        ({"seeds": TWO, "step": -1}, ValueError, "verify_chain: step must be >= 0, got -1"),
        ({"seeds": TWO, "step": torch.arange(3)}, ValueError, "verify_chain: step must be [batch=2], got [3]"),
    ],
)  # fmt: skip
def test_refuses(change: Arguments, error: type[Exception], message: str) -> None:
    refuses(sk.verify_chain, CHAIN, change, error, message)


def test_a_tree_refuses_both() -> None:
    made = trees.make(3, 2, 4, 9)
    both = {"seeds": TWO, "step": 1}
    refuses(sk.verify_tree, made, both, ValueError, "verify_tree: give uniform_samples or seeds, got both")


@pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))
@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_a_chain_with_its_coins_takes_three_launches(acceptance: str) -> None:
    made = chains.make(torch.Generator().manual_seed(5), BATCH, NUM_DRAFT, 9000, acceptance=acceptance)
    _, seeds = both_forms(acceptance, NUM_DRAFT + 1, 3)
    with emulated.running("split"):
        sk.verify_chain(**chains.without_numbers(made), **seeds, backend=emulated.NAME)
        assert emulated.library().specdec_emulator_launches() == 3
