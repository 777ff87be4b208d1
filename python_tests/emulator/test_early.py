"""Rows behind a rejected token are not read, and nothing else changes: the layout "early", held against "split"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench.gpu import model
from python_tests import emulated
from python_tests.emulator.drafts import BATCH, ROW, VOCAB, K, made, rng, rows_read
from python_tests.ops import chains
from python_tests.ops.inputs import same_bits, uniforms
from specdec_kernels import SamplingParams, laws

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))


def verified(arguments: chains.Arguments, strategy: str, **how: Any) -> sk.VerifyOutput:
    with emulated.running(strategy, **how):
        return sk.verify_chain(**arguments, backend=emulated.NAME)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kind": "one_hot"},
        {"kind": "reduced"},
        {"acceptance": "greedy", "kind": "one_hot"},
        {"params": SamplingParams(temperature=0.0)},
        {"params": SamplingParams(temperature=torch.tensor([0.0, 0.5, 1.0, 0.7, 0.0, 1.3]))},
        {"law": laws.Lossy(0.3)},
    ],
    ids=["stats", "one-hot", "reduced", "greedy", "zero", "each", "lossy"],
)
def test_no_row_behind_a_rejected_token_is_read(given: dict[str, Any]) -> None:
    """Blocks take their turns in index order here, so that a position is judged before the next one is begun."""
    arguments = made(**given)
    if given.get("kind") == "reduced":
        arguments["draft_stats"] = sk.row_stats(arguments["draft_logits"], arguments["draft_params"])
    every, expected = rows_read(arguments, "split")
    some, out = rows_read(arguments, "early")
    same_bits(out, expected)
    needed = (out.num_accepted + 1).sum().item()
    assert BATCH < needed < BATCH * (K + 1) == pytest.approx(every, rel=1e-3)
    assert needed <= some <= needed + 0.1  # blocks look at what was rejected, and at draft tokens


@pytest.mark.parametrize(
    "given",
    [
        {"params": SamplingParams(top_k=20)},
        {"kind": "full"},
        {"kind": "probs"},
        {"acceptance": "block"},
        {"acceptance": "match"},
        {"law": laws.TokenV1(0.1), "kind": "full"},
        {"law": laws.Lossy(0.3, beta="exact")},
    ],
    ids=["cut", "draft read", "probs", "block", "match", "cascade", "lossy, solved for"],
)
def test_where_a_row_does_not_tell_all_are_read(given: dict[str, Any]) -> None:
    arguments = made(**given)
    every, expected = rows_read(arguments, "split")
    some, out = rows_read(arguments, "early")
    same_bits(out, expected)
    assert some == every >= BATCH * (K + 1)


@pytest.mark.parametrize("kind", ["stats", "full"])
def test_no_cut_is_looked_for_behind_a_rejected_token(kind: str) -> None:
    arguments, bytes_of = made(kind=kind, params=SamplingParams(top_k=20)), {}
    for strategy in ("split", "early"):
        with emulated.running(strategy):
            _, laws_of_rows, _ = model.counted(lambda: sk.verify_chain(**arguments, backend=emulated.NAME))
        assert laws_of_rows.kernel == "verify_laws_kernel"
        bytes_of[strategy] = laws_of_rows.counts["bytes"]
    needed = (verified(arguments, "split").num_accepted + 1).sum().item() / (BATCH * (K + 1))
    assert needed < 0.9 and bytes_of["early"] / bytes_of["split"] == pytest.approx(needed, abs=0.1)


def nan(arguments: chains.Arguments) -> None:
    arguments["target_logits"][0, 1, 17] = float("nan")
    arguments["target_logits"][1, 0, 17] = float("inf")
    arguments["target_logits"][2, 0] = float("-inf")


def ends(arguments: chains.Arguments) -> None:
    arguments["eos_token_ids"] = arguments["draft_tokens"][0, 1:2].clone()
    arguments["draft_tokens"][1, 2], arguments["draft_tokens"][2, 0] = -1, VOCAB + 5
    arguments["num_draft_tokens"] = torch.tensor([K, K, K, 0, 2, -1])


def never_drafted(arguments: chains.Arguments) -> None:
    """A token that Q cannot have given ends the span before it."""
    arguments["draft_logits"][0, 1, arguments["draft_tokens"][0, 1]] = float("-inf")
    arguments["draft_logits"][1, 0, arguments["draft_tokens"][1, 0]] = float("-inf")
    arguments["draft_stats"] = sk.row_stats(arguments["draft_logits"], arguments["draft_params"])


def bad_coins(arguments: chains.Arguments) -> None:
    arguments["uniform_samples"][0, 1], arguments["uniform_samples"][1, 2] = float("nan"), 1.5


def a_bonus(arguments: chains.Arguments) -> None:
    arguments |= chains.with_bonus(arguments, torch.arange(BATCH))


def shifted(arguments: chains.Arguments) -> None:
    """Rows that start at no multiple of 16 bytes."""
    rows = arguments["target_logits"]
    wider = torch.zeros(*rows.shape[:-1], VOCAB + 3, dtype=rows.dtype)
    wider[..., 1 : VOCAB + 1] = rows
    arguments["target_logits"] = wider[..., 1 : VOCAB + 1]


@pytest.mark.parametrize("change", [nan, ends, never_drafted, bad_coins, a_bonus, shifted])
@pytest.mark.parametrize("schedule", [None, 1, 2])
def test_the_same_bits_whatever_rows_hold(change: Callable[[chains.Arguments], None], schedule: int | None) -> None:
    arguments = made(seed=3)
    change(arguments)
    same_bits(verified(arguments, "early", schedule=schedule), verified(arguments, "split"))


@pytest.mark.parametrize("acceptance", ["token", "greedy"])
def test_probabilities_of_too_little_mass_are_not_judged_by_their_largest(acceptance: str) -> None:
    """Greedily such a row has id 0, whatever is largest in it: only its law knows that."""
    arguments = made(kind="one_hot", acceptance=acceptance)
    probs = arguments["target_logits"].float().softmax(-1)
    probs[0, 1], probs[2, 0] = 0.0, 0.0
    probs[0, 1, 0], probs[2, 0, 5] = -1.0, 1e-39
    arguments["draft_tokens"][0, 1] = arguments["draft_tokens"][2, 0] = 0
    arguments |= {"target_logits": None, "target_probs": probs, "params": SamplingParams(temperature=0.0)}
    out = verified(arguments, "early")
    same_bits(out, verified(arguments, "split"))
    same_bits(out, sk.verify_chain(**arguments, backend="reference"))
    assert out.num_accepted[0] >= 2 and out.num_accepted[2] >= 1


@pytest.mark.parametrize("kind", ["stats", "one_hot"])
def test_packed_sequences_of_different_lengths(kind: str) -> None:
    arguments = chains.packed(made(seed=5, kind=kind), torch.tensor([K, 2, 0, K, 1, 3]))
    outputs, read = [], []
    for strategy in ("split", "early"):
        with emulated.running(strategy):
            scan, *_ = model.counted(lambda: outputs.append(sk.verify_packed(**arguments, backend=emulated.NAME)))
        read.append(scan.counts["bytes"] / ROW)
    same_bits(outputs[1], outputs[0])
    needed = (outputs[0].num_accepted + 1).sum().item()
    assert needed <= read[1] <= needed + 0.1 < read[0]


@pytest.mark.parametrize("multiprocessors", [1, 8, 132])
@pytest.mark.parametrize("kind", ["stats", "one_hot"])
@pytest.mark.parametrize("acceptance", ["token", "greedy"])
def test_the_same_bits_on_every_device(acceptance: str, kind: str, multiprocessors: int) -> None:
    """With few multiprocessors one block reads a row, with many each tile has a block."""
    for seed in range(4):
        arguments = made(seed, batch=3 + 6 * seed, acceptance=acceptance, kind=kind)
        if acceptance == "token":
            arguments["uniform_samples"] = uniforms(rng(seed + 50), 3 + 6 * seed, K + 1)
        out = verified(arguments, "early", schedule=seed, multiprocessors=multiprocessors)
        same_bits(out, verified(arguments, "split"))


def test_many_sequences_take_it() -> None:
    """Fewer than two in five multiprocessors are split whole, as the last border in csrc/cuda/strategy.cu says."""
    arguments = made()
    (every, _), (some, _) = rows_read(arguments, "split"), rows_read(arguments, "early")
    for multiprocessors, expected in ((BATCH * 5 // 2 + 1, every), (BATCH * 5 // 2 - 1, some)):
        with emulated.running(multiprocessors=multiprocessors):
            scan, *_ = model.counted(lambda: sk.verify_chain(**arguments, backend=emulated.NAME))
        assert scan.counts["bytes"] / ROW == pytest.approx(expected, rel=1e-3)
