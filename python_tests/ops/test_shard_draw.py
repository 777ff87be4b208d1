"""shard_draw on every backend: shards draw what the whole row does, and their masses are what float64 says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import oracle
from python_tests.ops.inputs import logits, refuses, same_bits, seeded, uniforms
from python_tests.support import Backend

OP = "shard_draw"
SIGNATURE = (
    ["logits", "stats", "weights", "params"],
    ["first", "draft_logits", "draft_stats", "draft_params", "draft_probs", "draft_status", "point_tokens", "masses",
     "uniform_samples", "noise_keys", "backend"],
)  # fmt: skip
TILE, BORDER = 1024, 2048


def call(
    kind: str = "logits", batch: int = 3, n: int = 2, vocab: int = 1100, rng: torch.Generator | None = None
) -> dict[str, Any]:
    """Whole rows and what their stats are; `kind` of draft, or "none"."""
    rng = rng or seeded()
    x, y = logits(rng, batch, n, vocab), logits(rng, batch, n, vocab)
    made: dict[str, Any] = {"logits": x, "stats": sk.row_stats(x), "weights": torch.full((batch, n), 0.7)}
    if kind == "logits":
        made |= {"draft_logits": y, "draft_stats": sk.row_stats(y)}
    if kind == "probs":
        made |= {"draft_probs": y.softmax(-1), "draft_status": torch.zeros(batch, n, dtype=torch.int32)}
    if kind == "points":
        made["point_tokens"] = x.argmax(-1)
    return made


def with_masses(kind: str) -> dict[str, Any]:
    made = call(kind)
    return made | {"masses": torch.rand(3, 2, 2, generator=seeded()), "uniform_samples": torch.full((3, 2), 0.4)}


CALLS = {
    "": call,
    "probs": lambda: call("probs"),
    "points": lambda: call("points"),
    "drawn": lambda: with_masses("logits"),
    "drawn without points": lambda: with_masses("points"),
    "noise": lambda: {**call("none"), "noise_keys": torch.arange(6).view(3, 2)},
}


def shards(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of the ids below `BORDER`, and of those from it on."""
    wide = ("logits", "draft_logits", "draft_probs")
    return [
        {k: v[..., part] if k in wide else v for k, v in arguments.items()} | {"first": first}
        for first, part in ((0, slice(BORDER)), (BORDER, slice(BORDER, None)))
    ]


def on(backend: Backend, kind: str, rng: torch.Generator, vocab: int = 3500) -> dict[str, Any]:
    """A call on the backend's device, with its own stats."""
    made = call(kind, vocab=vocab, rng=rng)
    for rows, stats in (("logits", "stats"), ("draft_logits", "draft_stats")):
        if rows in made:
            made[stats] = backend.row_stats(backend(made[rows]))
    return {k: v if isinstance(v, sk.RowStats) else backend(v) for k, v in made.items()}


def masses_of(backend: Backend, arguments: dict[str, Any]) -> torch.Tensor:
    return torch.cat([backend.shard_draw(**part).masses for part in shards(arguments)], -1)


def float64_weights(arguments: dict[str, Any]) -> np.ndarray:
    """``(w P − Q)+``, or P, in float64."""
    p = arguments["logits"].double().softmax(-1).cpu()
    q, w = torch.zeros_like(p), arguments["weights"].double().cpu()[..., None]
    if "draft_logits" in arguments:
        q = arguments["draft_logits"].double().softmax(-1).cpu()
    if "draft_probs" in arguments:
        q = arguments["draft_probs"].double().cpu()
    if "point_tokens" in arguments:
        q.scatter_(-1, arguments["point_tokens"].cpu()[..., None], 1.0)
    return torch.where(w < 0, p, (w * p - q).clamp_min(0)).numpy()


@pytest.mark.parametrize("weight", [-1.0, 1.0, 0.6])
@pytest.mark.parametrize("kind", ["none", "logits", "probs", "points"])
def test_masses_and_draws_are_the_float64_weights(
    backend: Backend, kind: str, weight: float, rng: torch.Generator
) -> None:
    arguments = on(backend, kind, rng)
    arguments["weights"] = torch.full_like(arguments["weights"], weight)
    weights, masses = float64_weights(arguments), masses_of(backend, arguments)
    tiles = np.stack([part.sum(-1) for part in np.split(weights, range(TILE, weights.shape[-1], TILE), -1)], -1)
    share = tiles / tiles.sum(-1, keepdims=True)
    np.testing.assert_allclose((masses / masses.sum(-1, keepdim=True)).cpu(), share, rtol=2e-5, atol=1e-6)
    if kind in ("logits", "probs") and weight >= 0:  # then a rule may add them up
        np.testing.assert_allclose(masses.cpu(), tiles, rtol=2e-5, atol=1e-6)
    for u in (0.0, 0.2, 0.83, 1 - 2.0**-24):
        given = {"masses": masses, "uniform_samples": backend(torch.full((3, 2), u))}
        parts = [backend.shard_draw(**part, **given).token.cpu() for part in shards(arguments)]
        assert ((parts[0] >= 0) ^ (parts[1] >= 0)).all() and (parts[0] < BORDER).all()
        assert ((parts[1] == -1) | (parts[1] >= BORDER)).all()
        token = torch.maximum(*parts)
        for index in np.ndindex(token.shape):
            law = weights[index] / weights[index].sum()
            assert law[token[index]] > 0
            assert oracle.brackets(law, u, int(token[index])), (index, u)


@pytest.mark.parametrize("depth", [86.9, 87.2])
def test_a_tile_without_an_id_that_can_be_has_no_mass(backend: Backend, depth: float, rng: torch.Generator) -> None:
    """As a uniform number of 0 would be drawn there."""
    arguments = on(backend, "none", rng)
    x = arguments["logits"]
    x[..., :TILE] -= x[..., :TILE].amax(-1, keepdim=True) - (x[..., TILE:].amax(-1, keepdim=True) - depth)
    arguments["stats"] = backend.row_stats(x)
    assert ((masses_of(backend, arguments)[..., 0] > 0) == (depth < 87)).all()


@pytest.mark.parametrize("kind", ["none", "logits", "probs", "points"])
def test_nothing_is_left_of_a_weight_of_0(backend: Backend, kind: str, rng: torch.Generator) -> None:
    """Neither a mass nor, whatever masses are given, a token; of other rows both are as ever."""
    arguments = on(backend, kind, rng)
    arguments["logits"][0, 0, 3000] = torch.inf
    arguments["stats"] = backend.row_stats(arguments["logits"])
    given = {"masses": backend(torch.ones(3, 2, 4)), "uniform_samples": backend(uniforms(rng, 3, 2))}
    found = []
    for weight in (0.7, 0.0):
        arguments["weights"][:2] = weight
        tokens = torch.stack([backend.shard_draw(**part, **given).token for part in shards(arguments)])
        found.append((masses_of(backend, arguments).cpu(), tokens.cpu()))
    (masses, tokens), (without, none) = found
    assert (without[:2] == 0).all() and (none[:, :2] == -1).all()
    same_bits(without[2], masses[2])
    same_bits(none[:, 2], tokens[:, 2])
    assert (masses[1:].sum(-1) > 0).all() and (tokens[:, 1:].amax(0) >= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_all_of_p_is_drawn_as_sample_draws(backend: Backend, temperature: float, rng: torch.Generator) -> None:
    params, arguments = sk.SamplingParams(temperature), on(backend, "none", rng)
    u = backend(uniforms(rng, 3, 2))
    arguments |= {"stats": backend.row_stats(arguments["logits"], params), "params": params}
    arguments["weights"] = torch.full_like(arguments["weights"], -1.0)
    masses = masses_of(backend, arguments)
    parts = [backend.shard_draw(**p, masses=masses, uniform_samples=u).token for p in shards(arguments)]
    same_bits(torch.maximum(*parts), backend.sample(arguments["logits"], params, uniform_samples=u).token)


def test_noise_is_that_of_the_whole_vocabulary(backend: Backend, rng: torch.Generator) -> None:
    arguments, keys = on(backend, "none", rng), backend(torch.arange(6).view(3, 2) * 7919)
    parts = [backend.shard_draw(**part, noise_keys=keys) for part in shards(arguments)]
    best = torch.stack([p.score for p in parts]).argmax(0)
    token = torch.stack([p.token for p in parts]).gather(0, best[None])[0]
    same_bits(token, backend.sample(arguments["logits"], noise_keys=keys).token)
    assert (parts[0].token < BORDER).all() and (parts[1].token >= BORDER).all() and parts[0].masses is None


def test_greedy_rows_are_not_drawn_from(backend: Backend, rng: torch.Generator) -> None:
    x, params = backend(torch.randn(2, 1, 50, generator=rng)), backend(sk.SamplingParams(torch.tensor([0.0, 1.0])))
    given = {"stats": backend.row_stats(x, params), "weights": backend(torch.full((2, 1), -1.0)), "params": params}
    out = backend.shard_draw(x, noise_keys=backend(torch.zeros(2, 1, dtype=torch.int64)), **given)
    assert out.token[0, 0] == -1 and out.score[0, 0] == -math.inf and out.token[1, 0] >= 0


def test_what_is_no_uniform_is_read_as_0(backend: Backend, rng: torch.Generator) -> None:
    arguments = on(backend, "none", rng)
    masses = masses_of(backend, arguments)
    (part, *_) = shards(arguments)
    tokens = [
        backend.shard_draw(**part, masses=masses, uniform_samples=backend(torch.full((3, 2), u))).token
        for u in (0.0, 1.0, -0.5, math.nan)
    ]
    assert all(torch.equal(tokens[0], each) for each in tokens[1:])


def test_rows_that_have_all_on_one_id(backend: Backend, rng: torch.Generator) -> None:
    arguments = on(backend, "logits", rng)
    x = arguments["logits"]
    x[0, 0, 3000] = torch.inf
    arguments["stats"] = backend.row_stats(x)
    q = float64_weights({**arguments, "logits": arguments["draft_logits"], "weights": arguments["weights"] - 9})
    masses = masses_of(backend, arguments)[0, 0].cpu()
    np.testing.assert_allclose(masses, [0, 0, 0.7 - q[0, 0, 3000], 0], rtol=1e-5)
    given = {"masses": masses_of(backend, arguments), "uniform_samples": backend(torch.zeros(3, 2))}
    assert all(backend.shard_draw(**part, **given).token[0, 0] == -1 for part in shards(arguments))


def test_a_draft_that_is_no_distribution_counts_as_0(backend: Backend, rng: torch.Generator) -> None:
    for kind in ("logits", "probs"):
        arguments = on(backend, kind, rng)
        bad = torch.full((3, 2), int(sk.Status.BAD_DRAFT), dtype=torch.int32)
        if kind == "logits":
            arguments["draft_stats"] = arguments["draft_stats"]._replace(status=backend(bad))
        else:
            arguments["draft_status"] = backend(bad)
        np.testing.assert_allclose(masses_of(backend, arguments).sum(-1).cpu(), np.full((3, 2), 0.7), rtol=1e-5)


def test_nothing_to_draw_from(backend: Backend, rng: torch.Generator) -> None:
    arguments = on(backend, "none", rng)
    given = {"masses": backend(torch.zeros(3, 2, 4)), "uniform_samples": backend(torch.zeros(3, 2))}
    assert all((backend.shard_draw(**part, **given).token == -1).all() for part in shards(arguments))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(3, 9)}, ValueError, "shard_draw: logits must be [batch, n, width], got [3, 9]"),
        ({"first": 5}, ValueError, "shard_draw: first must be a multiple of 1024 in"),
        ({"first": True}, ValueError, "shard_draw: first must be a multiple of 1024 in"),
        ({"stats": 3}, TypeError, "shard_draw: stats must be a RowStats, got int"),
        ({"weights": torch.zeros(3, 3)}, ValueError, "shard_draw: weights must be [batch=3, n=2], got [3, 3]"),
        ({"draft_stats": None}, ValueError, "shard_draw: draft_logits and draft_stats go together"),
        ({"draft_status": torch.zeros(3, 2).int()}, ValueError, "shard_draw: draft_probs and draft_status go together"),
        ({"point_tokens": torch.zeros(3, 2).long()}, ValueError, "shard_draw: give draft_logits, draft_probs or point"),
        ({"draft_logits": torch.zeros(3, 2, 9)}, ValueError, "shard_draw: draft_logits must be [batch=3"),
        ({"masses": torch.zeros(3, 2, 2)}, ValueError, "shard_draw: masses and uniform_samples go together"),
        (
            {"masses": torch.zeros(3, 2, 1), "uniform_samples": torch.zeros(3, 2)}, ValueError,
            "shard_draw: masses must be [batch, n, tiles] with tiles >= 2, got [3, 2, 1]",
        ),
        (
            {**with_masses("logits"), "noise_keys": torch.zeros(3, 2).long()}, ValueError,
            "shard_draw: give masses or noise_keys, got both",
        ),
        (
            {"noise_keys": torch.zeros(3, 2).long()}, ValueError,
            "shard_draw: give a draft or noise_keys, got both",
        ),
        ({"noise_keys": torch.zeros(3, 2)}, TypeError, "shard_draw: noise_keys must be int64, got float32"),
        ({"params": 3}, TypeError, "shard_draw: params must be a SamplingParams or None, got int"),
        ({"draft_params": 3}, TypeError, "shard_draw: draft_params must be a SamplingParams or None, got int"),
        ({"backend": "nope"}, ValueError, "shard_draw: backend must be one of"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.shard_draw, call(), change, error, message)


@pytest.mark.parametrize("kind", ["logits", "probs", "points"])
def test_tensors_may_lie_in_any_order(backend: Backend, kind: str) -> None:
    """As long as rows are contiguous: what is one number a row may be a transposed view."""

    def turned(value: Any) -> Any:
        if isinstance(value, sk.RowStats):
            return sk.RowStats(*map(turned, value))
        if isinstance(value, torch.Tensor) and value.shape[:2] == (3, 2) and (value.dim() == 2 or value.shape[2] == 6):
            return value.transpose(0, 1).contiguous().transpose(0, 1)
        return value

    for drawn in (False, True):
        arguments = with_masses(kind) if drawn else call(kind)
        expected = backend.shard_draw(**{name: backend(value) for name, value in arguments.items()})
        found = backend.shard_draw(**{name: turned(backend(value)) for name, value in arguments.items()})
        same_bits(found, expected)
