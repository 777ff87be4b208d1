"""How fine draws are: what has a probability of 1e-8 happens as often as it should, to 1e-5 of that.

A draw's borders between ids, and the coin that a draft token's verdict turns at, are found by bisection on multiples of
2**-47: 1e-8 has some 10^6 of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import specdec_kernels as sk
from python_tests.support import Backend
from specdec_kernels.testing import Float64, Int64, float64_law

OP = "verify_chain"
LATTICE = 1 << 47
TILE, TAIL, RTOL = 1024, 1e-8, 1e-5
VOCAB = 4 * TILE + 77
HEAVY, DENSE = 1, slice(2 * TILE + 1, 3 * TILE - 1)
TAILS = {
    "the row's first id": 0, "between heavy ids": 500, "a tile's last id": TILE - 1, "alone in a tile": TILE + 300,
    "the first of many": 2 * TILE, "amid many": 2 * TILE + 512, "the last of many": 3 * TILE - 1,
    "after an empty tile": 4 * TILE + 1, "the row's last id": VOCAB - 1,
}  # fmt: skip
IDS = np.array(list(TAILS.values()))
Draw = Callable[[Tensor], Tensor]
"""Tokens ``[n]`` by uniforms ``[n]``: n is as many as asked about, in their order."""


def row() -> Tensor:
    """Logits of a few heavy ids, of a heavy tile of many and of an empty one, and the tails."""
    rng = np.random.default_rng(3)
    weights = np.zeros(VOCAB)
    weights[[HEAVY, 499, 501]] = 0.3, 0.05, 0.05
    weights[DENSE] = rng.exponential(size=DENSE.stop - DENSE.start)
    weights[DENSE] *= 0.35 / weights[DENSE].sum()
    weights[4 * TILE + 40] = 0.25
    weights[IDS] = TAIL
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(weights).astype(np.float32))


ROW = row()
LAW = float64_law(ROW)


def of_interest(backend: Backend) -> Int64:
    """The tails; under Triton's interpreter some of them."""
    return IDS[[1, 3, 8]] if backend.by_interpreter else IDS


def turning_points(happens: Callable[[Tensor], NDArray[np.bool_]], near: Float64, reach: float = 5e-7) -> Float64:
    """The least uniform from which on something happens, for each of those that are asked about, `near` some value."""
    low = np.clip(np.floor((near - reach) * LATTICE).astype(np.int64), -1, LATTICE)
    high = np.clip(np.ceil((near + reach) * LATTICE).astype(np.int64), 0, LATTICE)
    for end, expected in ((low, False), (high, True)):
        inside = (end >= 0) & (end < LATTICE)
        answer = happens(torch.from_numpy(np.clip(end, 0, LATTICE - 1) / LATTICE))
        assert (answer[inside] == expected).all(), f"a border lies farther than {reach} from where it should"
    while (high - low > 1).any():
        middle = (low + high) // 2
        yes = happens(torch.from_numpy(np.clip(middle, 0, LATTICE - 1) / LATTICE))
        low, high = np.where(yes, low, middle), np.where(yes, middle, high)
        high = np.maximum(high, low + 1)
    return high / LATTICE


def check_draw(draw: Callable[[Tensor], Tensor], ids: Int64, law: Float64) -> None:
    """That tokens drawn by uniforms ``[2 * len(ids)]`` have the probabilities of `law`."""
    ends = law.cumsum()
    ends /= ends[-1]
    twice, past = np.tile(ids, 2), np.repeat([False, True], len(ids))
    near = np.where(past, ends[twice], np.concatenate([[0.0], ends])[twice])

    def happens(uniforms: Tensor) -> NDArray[np.bool_]:
        tokens = draw(uniforms).cpu().numpy()
        return np.where(past, tokens > twice, tokens >= twice)

    below, above = np.split(turning_points(happens, near), 2)
    np.testing.assert_allclose(above - below, law[ids] / law.sum(), rtol=RTOL)


def rows(*each: Tensor, n: int) -> Tensor:
    return torch.stack(each).expand(n, len(each), -1).contiguous()


def final(out: Any) -> Tensor:
    token: Tensor = out.tokens.gather(1, out.num_accepted[:, None].long())[:, 0]
    return token


def draft() -> Tensor:
    """Logits of a Q that has most of its mass on the heavy id, and less than P of all others."""
    logits = ROW + math.log(0.1)
    logits[HEAVY] = math.log(0.9)
    return logits


def drafted(ids: Int64) -> Tensor:
    """Logits ``[len(ids), vocab]`` of Qs that have a quarter of their mass on one id each."""
    logits = torch.full((len(ids), VOCAB), -math.inf)
    logits[:, HEAVY] = math.log(0.75)
    logits[np.arange(len(ids)), ids] = math.log(0.25)
    return logits


def left(P: Float64, Q: Float64) -> Float64:
    return np.maximum(P - Q, 0)


@pytest.mark.parametrize("params", [sk.SamplingParams(), sk.SamplingParams(min_p=1e-9)], ids=["whole", "cut"])
def test_sample(backend: Backend, params: sk.SamplingParams) -> None:
    ids = of_interest(backend)
    x = backend(ROW.expand(2 * len(ids), -1).contiguous())
    check_draw(lambda u: backend.sample(x, params, uniform_samples=backend(u)).token, ids, LAW)


@pytest.mark.short(cases=3, emulated=2, triton=1)
@pytest.mark.parametrize("last", ["recovered", "bonus"])
@pytest.mark.parametrize("kind", ["full", "one_hot"])
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_last_token_of_a_chain(backend: Backend, acceptance: str, kind: str, last: str) -> None:
    ids = of_interest(backend)
    n = 2 * len(ids)
    target, tokens = backend(rows(ROW, ROW, n=n), torch.full((n, 1), HEAVY))
    given = {"draft_logits": backend(rows(draft(), n=n))} if kind == "full" else {}
    Q = float64_law(draft()) if kind == "full" else np.eye(1, VOCAB, HEAVY)[0]
    coin = 0.0 if last == "bonus" else 1 - 2.0**-53

    def draw(u: Tensor) -> Tensor:
        uniforms = backend(torch.stack([u, torch.full_like(u, coin)], 1))
        out = backend.verify_chain(target, tokens, uniform_samples=uniforms, acceptance=acceptance, **given)
        assert (out.num_accepted == (last == "bonus")).all()
        return final(out)

    check_draw(draw, ids, LAW if last == "bonus" else left(LAW, Q) if kind == "full" else LAW * (Q == 0))


@pytest.mark.parametrize("kind", ["full", "one_hot"])
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_coin_of_a_chain(backend: Backend, acceptance: str, kind: str) -> None:
    """x is drafted with Q(x) = 1/4 or 1, and accepted with P(x) / Q(x)."""
    ids = of_interest(backend)
    target, tokens = backend(rows(ROW, ROW, n=len(ids)), torch.from_numpy(ids)[:, None])
    given, Q = {}, np.ones(len(ids))
    if kind == "full":
        given, Q = {"draft_logits": backend(drafted(ids)[:, None])}, float64_law(drafted(ids))[np.arange(len(ids)), ids]

    def rejected(u: Tensor) -> NDArray[np.bool_]:
        uniforms = backend(torch.stack([torch.full_like(u, 0.5), u], 1))
        out = backend.verify_chain(target, tokens, uniform_samples=uniforms, acceptance=acceptance, **given)
        return (out.num_accepted == 0).cpu().numpy()

    np.testing.assert_allclose(turning_points(rejected, LAW[ids] / Q), LAW[ids] / Q, rtol=RTOL)


TREE = sk.DraftTree.from_parents([-1, 0])
IMPOSSIBLE = 3 * TILE  # in the empty tile


@pytest.mark.short(cases=3, emulated=1, triton=1)
@pytest.mark.parametrize(
    "case", ["sample", "typical", "recursive", "recursive, bonus", "traversal", "traversal, bonus"]
)
def test_last_token_of_a_tree(backend: Backend, case: str) -> None:
    acceptance, _, bonus = case.partition(", ")
    ids = of_interest(backend)
    n, rejects = 2 * len(ids), acceptance in ("recursive", "traversal")
    target = backend(rows(ROW, ROW, n=n))
    tree, tokens = backend(TREE, torch.tensor([[0, HEAVY if rejects else IMPOSSIBLE]] * n))
    given = {"draft_logits": backend(rows(draft(), draft(), n=n))} if rejects else {}

    def draw(u: Tensor) -> Tensor:
        uniforms = backend(torch.stack([u, torch.full_like(u, 0.0 if bonus else 1 - 2.0**-53)], 1))
        out = backend.verify_tree(target, tree, tokens, uniform_samples=uniforms, acceptance=acceptance, **given)
        assert (out.num_accepted == bool(bonus)).all()
        return final(out)

    check_draw(draw, ids, left(LAW, float64_law(draft())) if rejects and not bonus else LAW)


@pytest.mark.short(emulated=1, triton=0)
@pytest.mark.parametrize("acceptance", ["recursive", "traversal"])
def test_coin_of_a_tree(backend: Backend, acceptance: str) -> None:
    ids = of_interest(backend)
    n, logits = len(ids), drafted(ids)
    target, given = backend(rows(ROW, ROW, n=n)), backend(torch.stack([logits, logits], 1))
    tree, tokens = backend(TREE, torch.from_numpy(np.stack([np.zeros_like(ids), ids], 1)))
    expected = LAW[ids] / float64_law(logits)[np.arange(n), ids]

    def rejected(u: Tensor) -> NDArray[np.bool_]:
        uniforms = backend(torch.stack([torch.full_like(u, 0.5), u], 1))
        out = backend.verify_tree(target, tree, tokens, given, uniform_samples=uniforms, acceptance=acceptance)
        return (out.num_accepted == 0).cpu().numpy()

    np.testing.assert_allclose(turning_points(rejected, expected), expected, rtol=RTOL)
