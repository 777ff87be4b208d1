"""sample on every backend: inverse CDF, Gumbel-max and Gumbel top-k against float64 on the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import oracle
from python_tests.ops.inputs import (
    DTYPES,
    PARAMS,
    VOCABS,
    logits,
    per_row,
    refuses,
    same_bits,
    seeded,
    strided,
    uniforms,
)
from python_tests.support import Backend
from specdec_kernels.testing import float64_gumbel, float64_law

OP = "sample"
SIGNATURE = (
    ["logits", "params"],
    ["probs", "row_index", "processors", "uniform_samples", "noise_keys", "num_samples", "draft_token_map", "backend"],
)  # fmt: skip
CALLS = {
    "": lambda: {
        "logits": logits(seeded(), 4, 50), "params": per_row(4), "uniform_samples": torch.rand(4, generator=seeded()),
    },
    "keys": lambda: {
        "logits": logits(seeded(), 4, 2, 50), "noise_keys": torch.arange(8).view(4, 2), "num_samples": 5,
    },
    "probs": lambda: {
        "logits": None, "probs": torch.rand(4, 50, generator=seeded()), "params": sk.SamplingParams(top_k=7),
        "uniform_samples": torch.rand(4, generator=seeded()),
    },
    "index": lambda: {
        "logits": logits(seeded(), 3, 2, 50), "params": per_row(4), "row_index": torch.tensor([2, 0, 2, 7]),
        "uniform_samples": torch.rand(4, 2, generator=seeded()),
    },
}  # fmt: skip


def check_by_uniforms(x: torch.Tensor, u: torch.Tensor, params: sk.SamplingParams, draw: sk.Draw) -> None:
    """Tokens are the float64 inverse CDF's, in borderline cases within float32 error; log-probabilities fit."""
    law, token = float64_law(x, params), draw.token.cpu().numpy()
    for index in np.ndindex(token.shape):
        expected, close = oracle.draw(law[index], float(u[index]))
        assert token[index] == expected or (close and oracle.brackets(law[index], float(u[index]), token[index])), index
    picked = np.take_along_axis(law, token[..., None], -1)[..., 0]
    np.testing.assert_allclose(draw.log_prob.cpu(), np.log(picked), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniforms_invert_the_cdf(
    backend: Backend, dtype: torch.dtype, vocab: int, name: str, rng: torch.Generator
) -> None:
    vocab = backend.vocab(vocab)
    x, u = logits(rng, 4, 2, vocab, dtype=dtype), uniforms(rng, 4, 2)
    u[0] = torch.tensor([0.0, 1 - 2.0**-24])
    u[1] = u[0]
    params = PARAMS[name]
    draw = backend.sample(*backend(x, params), uniform_samples=backend(u))
    assert draw.token.dtype == torch.int64 and draw.log_prob.dtype == torch.float32 and (draw.stats.status == 0).all()
    check_by_uniforms(x[2:], u[2:], params, sk.Draw(draw.token[2:], draw.log_prob[2:], draw.stats))
    law = float64_law(x[:2], params)
    tokens = draw.token[:2].cpu().numpy()
    assert (np.take_along_axis(law, tokens[..., None], -1) > 0).all(), "u = 0 or just below 1 drew an impossible id"
    np.testing.assert_array_equal(tokens[:, 0], (law > 0).argmax(-1)[:, 0])
    for at in range(2):  # the last possible id, where more mass than float32 error lies on it
        assert oracle.brackets(law[at, 1], float(u[at, 1]), tokens[at, 1]), (at, tokens[at, 1])
    stats = backend.row_stats(*backend(x, params))
    same_bits(draw.stats.argmax, stats.argmax)
    same_bits(draw.stats.values[..., :4], stats.values[..., :4])
    assert (draw.stats.values[..., 4:] == -torch.inf).all()


@pytest.mark.parametrize("name", ["default", "top_k", "top_p", "min_p", "all", "greedy"])
@pytest.mark.parametrize("vocab", [2, 1023, 1025, 4097, 50257])
def test_probabilities_of_any_sum(backend: Backend, vocab: int, name: str, rng: torch.Generator) -> None:
    """Ids that are impossible come in, too: 0, −0, −inf and NaN, which alone is flagged."""
    vocab = backend.vocab(vocab)
    probs, u = torch.rand(4, 3, vocab, generator=rng) ** 8 * 5, uniforms(rng, 4, 3)
    for number, none in enumerate((0.0, -0.0, -math.inf, math.nan)):
        hole = torch.rand(3, vocab, generator=rng) < 0.3
        probs[number][hole & (torch.arange(vocab) > 0)] = none
    params = PARAMS[name] if name == "greedy" else replace(PARAMS[name], temperature=1.0)
    draw = backend.sample(None, params, probs=backend(probs), uniform_samples=backend(u))
    nan = torch.where(probs.isnan().any(-1), int(sk.Status.NAN), 0).int()
    assert torch.equal(draw.stats.status.cpu(), nan)
    clean = probs.double().nan_to_num(0.0, 0.0, 0.0)
    law = float64_law(clean.log(), params)
    for index in np.ndindex(4, 3):
        expected, close = oracle.draw(law[index], float(u[index]))
        token = int(draw.token[index])
        assert token == expected or (close and oracle.brackets(law[index], float(u[index]), token)), index
        assert law[index][token] > 0
        np.testing.assert_allclose(draw.log_prob[index].cpu(), np.log(law[index][token]), rtol=1e-5, atol=1e-5)
    largest = clean.amax(-1).float()
    assert torch.equal(draw.stats.max.cpu(), largest)
    if name != "greedy":
        kept, stats = torch.where(torch.as_tensor(law) > 0, clean, 0.0), draw.stats
        torch.testing.assert_close(stats.normalizer.cpu() * largest, kept.sum(-1).float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(stats.log_normalizer.cpu(), kept.sum(-1).log().float(), rtol=1e-5, atol=1e-5)
    if name in ("top_p", "min_p", "all") or (name == "top_k" and vocab > params.top_k):
        least = torch.where(kept > 0, kept, math.inf).amin(-1).float()
        assert torch.equal(draw.stats.cutoff.cpu()[least < largest], least[least < largest])


def test_bad_rows_of_probabilities_are_flagged_and_alone(backend: Backend, rng: torch.Generator) -> None:
    """What has no sum, or no positive number, has all its mass on its largest, or on id 0."""
    s, probs, u = sk.Status, torch.rand(8, 1100, generator=rng), uniforms(rng, 8)
    clean = backend.sample(None, probs=backend(probs), uniform_samples=backend(u))
    probs[1, 3], probs[2], probs[3], probs[4, 1090], probs[5, 1050] = -0.1, 0.0, -1.0, math.inf, 3e38
    probs[5, 7], probs[6] = 2.9e38, 2.0**-130
    draw = backend.sample(None, probs=backend(probs), uniform_samples=backend(u))
    expected = [0, s.BAD_PARAM, s.EMPTY_ROW, s.EMPTY_ROW, s.INF, s.BAD_PARAM, s.EMPTY_ROW, 0]
    assert draw.stats.status.tolist() == expected
    assert draw.token[1:7].tolist() == [int(probs[1].argmax()), 0, 0, 1090, 1050, 0]
    assert (draw.log_prob[1:7] == 0).all()
    for i in (0, 7):
        same_bits(draw.token[i], clean.token[i])
    greedy = backend.sample(None, sk.SamplingParams(0.0), probs=backend(probs))
    assert greedy.token[1:7].tolist() == [int(probs[1].argmax()), 0, 0, 1090, 1050, 0]
    assert greedy.stats.status.tolist() == [0, 0, s.EMPTY_ROW, s.EMPTY_ROW, s.INF, 0, s.EMPTY_ROW, 0]


@pytest.mark.parametrize("name", ["default", "all", "greedy"])
def test_widest_vocabulary(backend: Backend, name: str, rng: torch.Generator) -> None:
    x, u = logits(rng, 2, backend.vocab(262144), dtype=torch.bfloat16), uniforms(rng, 2)
    check_by_uniforms(x, u, PARAMS[name], backend.sample(backend(x), PARAMS[name], uniform_samples=backend(u)))


@pytest.mark.parametrize("name", ["default", "temperature", "top_k", "top_p", "all", "greedy"])
@pytest.mark.parametrize("vocab", [2, 3, 1023, 1025, 4097, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_give_the_float64_argmax(
    backend: Backend, dtype: torch.dtype, vocab: int, name: str, rng: torch.Generator
) -> None:
    vocab = backend.vocab(vocab)
    x, params = logits(rng, 3, 3, vocab, dtype=dtype), PARAMS[name]
    keys = torch.randint(-(2**63), 2**63 - 1, (3, 3), generator=rng)
    draw = backend.sample(backend(x), params, noise_keys=backend(keys))
    with np.errstate(divide="ignore"):
        scores = np.log(float64_law(x, params)) + float64_gumbel(keys, vocab)
    top2 = np.partition(scores, -2)[..., -2:]
    close = top2[..., 1] - top2[..., 0] < 1e-4
    assert close.sum() <= 1
    np.testing.assert_array_equal(np.where(close, 0, draw.token.cpu()), np.where(close, 0, scores.argmax(-1)))


@pytest.mark.parametrize("vocab", [3, 40, 1500])
@pytest.mark.parametrize("num_samples", [2, 7, 64])
def test_several_samples_are_gumbel_top_k(backend: Backend, vocab: int, num_samples: int, rng: torch.Generator) -> None:
    """Without replacement, in the order drawn; −1 once the support is exhausted."""
    params = sk.SamplingParams(0.8, top_k=20)
    x, keys = logits(rng, 5, vocab), torch.randint(-(2**63), 2**63 - 1, (5,), generator=rng)
    draw = backend.sample(backend(x), params, noise_keys=backend(keys), num_samples=num_samples)
    assert draw.token.shape == draw.log_prob.shape == (5, num_samples)
    law = float64_law(x, params)
    with np.errstate(divide="ignore"):
        scores = np.log(law) + float64_gumbel(keys, vocab)
    for b in range(5):
        order = np.argsort(-scores[b], kind="stable")[: (law[b] > 0).sum()][:num_samples]
        expected = np.full(num_samples, -1)
        expected[: len(order)] = order
        np.testing.assert_array_equal(draw.token[b].cpu(), expected)
        np.testing.assert_allclose(draw.log_prob[b, : len(order)].cpu(), np.log(law[b][order]), rtol=1e-5, atol=1e-5)
        assert (draw.log_prob[b, len(order) :] == -math.inf).all()
    one = backend.sample(backend(x), params, noise_keys=backend(keys))
    same_bits(one.token, draw.token[:, 0].contiguous())


def test_reduced_vocabulary_draws_target_ids_with_their_noise(backend: Backend, rng: torch.Generator) -> None:
    """A reduced vocabulary draws as the full one does whose other logits are −inf."""
    ids = torch.randperm(3000, generator=rng)[:700]
    small = logits(rng, 6, 700)
    wide = torch.full((6, 3000), -math.inf)
    wide[:, ids] = small
    keys = torch.arange(6) * 7919
    token_map = backend(sk.TokenMap(ids))
    mapped = backend.sample(backend(small), noise_keys=backend(keys), draft_token_map=token_map)
    same_bits(mapped.token, backend.sample(backend(wide), noise_keys=backend(keys)).token)
    for params in (sk.SamplingParams(0.8), sk.SamplingParams(top_k=50), sk.SamplingParams(0.0)):
        for num_samples in (1, 5):
            how = {"params": params, "noise_keys": backend(keys), "num_samples": num_samples}
            narrow, full = (
                backend.sample(backend(small), draft_token_map=token_map, **how),
                backend.sample(backend(wide), **how),
            )
            same_bits(narrow.token, full.token)
            torch.testing.assert_close(narrow.log_prob, full.log_prob, rtol=1e-5, atol=1e-5)
    u = backend(uniforms(rng, 6))
    plain = backend.sample(backend(small), uniform_samples=u)
    mapped = backend.sample(backend(small), uniform_samples=u, draft_token_map=token_map)
    same_bits(mapped.token, token_map.draft_to_target[plain.token])


def test_greedy_beside_sampled_and_each_alone(backend: Backend, rng: torch.Generator) -> None:
    x, u = logits(rng, 64, 1200), uniforms(rng, 64)
    temperature = torch.where(torch.arange(64) % 3 == 0, 0.0, 0.9)
    params = sk.SamplingParams(temperature, top_p=torch.rand(64, generator=rng))
    keys = torch.randint(-(2**63), 2**63 - 1, (64,), generator=rng)
    for noise in ({"uniform_samples": backend(u)}, {"noise_keys": backend(keys)}):
        whole = backend.sample(*backend(x, params), **noise)
        assert torch.equal(whole.token[::3].cpu(), x[::3].argmax(-1))
        assert (whole.log_prob[::3] == 0).all()
        for i in (0, 1, 33, 62, 63):
            own = sk.SamplingParams(temperature[i : i + 1], top_p=params.top_p[i : i + 1])  # type: ignore[index]
            alone = backend.sample(*backend(x[i : i + 1], own), **{k: v[i : i + 1] for k, v in noise.items()})
            same_bits(alone.token[0], whole.token[i])
            same_bits(alone.log_prob[0], whole.log_prob[i])


def test_no_noise_is_needed_at_temperature_0(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 3, 2, 1100).round()  # with ties: the lowest id
    draw = backend.sample(backend(x), sk.SamplingParams(0.0))
    expected = np.argmax(x.numpy(), -1)
    np.testing.assert_array_equal(draw.token.cpu(), expected)


@pytest.mark.parametrize("noise", ["uniform_samples", "noise_keys"])
def test_top_k_1_with_tied_maxima_draws_a_maximum(backend: Backend, noise: str) -> None:
    """A peer draws something else. Ties survive top-k: tied maxima share the mass evenly, a lone one is certain."""
    n = backend.draws(2048)
    x = torch.tensor([2.0, 5.0, 1.0, 5.0, -1.0]).repeat(2 * n, 1)
    x[n:, 3] = 4.0
    given = torch.arange(2 * n) % n / n if noise == "uniform_samples" else torch.arange(2 * n) * 104729
    token = backend.sample(backend(x), sk.SamplingParams(top_k=1), **{noise: backend(given)}).token.cpu()
    assert set(token[:n].tolist()) == {1, 3} and (token[n:] == 1).all()
    assert abs((token[:n] == 1).double().mean() - 0.5) < 2.7 / n**0.5  # 5.4 standard deviations


def test_bad_rows_and_bad_uniforms_are_flagged_and_alone(backend: Backend, rng: torch.Generator) -> None:
    s, x, u = sk.Status, logits(rng, 9, 1100), uniforms(rng, 9)
    clean = backend.sample(backend(x), uniform_samples=backend(u))
    x[1, 3], x[2], x[3], x[4, 1090] = math.nan, -math.inf, math.nan, math.inf
    u[5], u[6], u[7] = math.nan, 1.0, -0.25
    draw = backend.sample(backend(x), uniform_samples=backend(u))
    expected = [0, s.NAN, s.EMPTY_ROW, s.NAN | s.EMPTY_ROW, s.INF, s.BAD_PARAM, s.BAD_PARAM, s.BAD_PARAM, 0]
    assert draw.stats.status.tolist() == expected
    assert ((draw.token >= 0) & (draw.token < 1100)).all()
    assert draw.token[[2, 3, 4]].tolist() == [0, 0, 1090] and draw.log_prob[[2, 3, 4]].tolist() == [0, 0, 0]
    for i in (0, 8):
        same_bits(draw.token[i], clean.token[i])
    keys = backend(torch.arange(9))
    by_keys = backend.sample(backend(x), noise_keys=keys)
    assert by_keys.token[[2, 3, 4]].tolist() == [0, 0, 1090]


def test_strides_do_not_matter(backend: Backend, rng: torch.Generator) -> None:
    x, u = backend(logits(rng, 3, 2, 1100, dtype=torch.float16), uniforms(rng, 3, 2))
    dense = backend.sample(x, PARAMS["all"], uniform_samples=u)
    same_bits(dense, backend.sample(strided(x), PARAMS["all"], uniform_samples=strided(u)[..., :2]))
    keys = backend(torch.arange(6).view(3, 2))
    turned = keys.t().contiguous().t()
    same_bits(backend.sample(x, noise_keys=keys), backend.sample(strided(x), noise_keys=turned))


PROBS = {"logits": None, "probs": torch.ones(4, 9)}
GOOD = {"logits": torch.zeros(4, 9), "uniform_samples": torch.zeros(4)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": 1}, TypeError, "sample: logits must be a tensor, got int"),
        ({"logits": torch.zeros(4, 9, dtype=torch.float64)}, TypeError, "sample: logits must be float32"),
        ({"logits": torch.zeros(9)}, ValueError, "sample: logits must be [batch, vocab] or [batch, n, vocab], got [9]"),
        ({"logits": torch.zeros(1, 2, 3, 9)}, ValueError, "sample: logits must be [batch, vocab] or [batch, n, vocab]"),
        ({"logits": torch.zeros(9, 4).T}, ValueError, "sample: logits must be contiguous in its last dimension"),
        ({"uniform_samples": torch.zeros(3)}, ValueError, "sample: uniform_samples must be [batch=4], got [3]"),
        ({"uniform_samples": torch.zeros(4, 1)}, ValueError, "sample: uniform_samples must be [batch=4], got [4, 1]"),
        (
            {"uniform_samples": torch.zeros(4).half()},
            TypeError,
            "sample: uniform_samples must be float64 or float32, got float16",
        ),
        (
            {"uniform_samples": torch.zeros(4, device="meta")},
            ValueError,
            "sample: uniform_samples must be on cpu, got meta",
        ),
        ({"uniform_samples": 0.5}, TypeError, "sample: uniform_samples must be a tensor, got float"),
        ({"uniform_samples": None}, ValueError, "sample: uniform_samples or noise_keys must be given"),
        ({"noise_keys": torch.arange(4)}, ValueError, "sample: give uniform_samples or noise_keys, got both"),
        (
            {"uniform_samples": None, "noise_keys": torch.zeros(4)},
            TypeError,
            "sample: noise_keys must be int64, got float32",
        ),
        (
            {"uniform_samples": None, "noise_keys": torch.arange(5)},
            ValueError,
            "sample: noise_keys must be [batch=4], got [5]",
        ),
        ({"num_samples": 0}, ValueError, "sample: num_samples must be in [1, 1024], got 0"),
        ({"num_samples": 1025}, ValueError, "sample: num_samples must be in [1, 1024], got 1025"),
        ({"num_samples": 2.0}, TypeError, "sample: num_samples must be an integer, got float"),
        ({"num_samples": 2}, ValueError, "sample: num_samples=2 needs noise_keys"),
        ({"params": 1}, TypeError, "sample: params must be a SamplingParams or None, got int"),
        (
            {"params": sk.SamplingParams(torch.ones(2))},
            ValueError,
            "sample: params.temperature must be [batch=4], got [2]",
        ),
        ({"draft_token_map": torch.arange(9)}, TypeError, "sample: draft_token_map must be a TokenMap, got Tensor"),
        (
            {"draft_token_map": sk.TokenMap(torch.arange(8))},
            ValueError,
            "sample: draft_token_map must be [vocab=9], got [8]",
        ),
        (
            {"draft_token_map": sk.TokenMap(torch.arange(9)).to("meta")},
            ValueError,
            "sample: draft_token_map must be on cpu",
        ),
        ({"backend": "nope"}, ValueError, "sample: backend must be one of"),
        ({"probs": torch.zeros(4, 9)}, ValueError, "sample: give logits or probs, got both"),
        ({"logits": None}, TypeError, "sample: logits must be a tensor, got NoneType"),
        (
            {"logits": None, "probs": torch.zeros(4, 9).bfloat16()},
            TypeError,
            "sample: probs must be float32, got bfloat16",
        ),
        ({**PROBS, "probs": torch.zeros(9)}, ValueError, "sample: probs must be [batch, vocab] or [batch, n, vocab]"),
        (
            {**PROBS, "params": sk.SamplingParams(0.7)},
            ValueError,
            "sample: params.temperature must be 1 or 0 beside probs, got 0.7",
        ),
        (
            {**PROBS, "params": sk.SamplingParams(torch.ones(4))},
            ValueError,
            "sample: params.temperature must be 1 or 0 beside probs, got a tensor",
        ),
        (
            {**PROBS, "uniform_samples": None, "noise_keys": torch.arange(4)},
            ValueError,
            "sample: noise_keys must be None beside probs, got one",
        ),
        (
            {**PROBS, "processors": sk.Processors(banned_ids=[1])},
            ValueError,
            "sample: processors must be None beside probs, got one",
        ),
        (
            {**PROBS, "draft_token_map": sk.TokenMap(torch.arange(9))},
            ValueError,
            "sample: draft_token_map must be None beside probs, got one",
        ),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.sample, GOOD, change, error, message)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize("depth", [86.0, 87.2, 88.0, 92.0, 100.0, 110.0])
def test_a_uniform_of_0_draws_an_id_that_can_be(backend: Backend, depth: float, temperature: float) -> None:
    """The first tiles weigh next to nothing, together more than each id of theirs: their first id is impossible."""
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(4))
    x[:, :2048] -= x[:, :2048].amax(-1, keepdim=True) - (x.amax(-1, keepdim=True) - depth * temperature)
    x[:, ::1024] = -torch.inf
    params, zeros = sk.SamplingParams(temperature), torch.zeros(2)
    token = backend.sample(backend(x), params, uniform_samples=backend(zeros)).token.cpu()
    assert (x.gather(1, token[:, None]) > -torch.inf).all()
    assert (sk.warp_probs(x, params, backend="reference").gather(1, token[:, None]) > 0).all()
    none = torch.zeros(2, 0, dtype=torch.int64)
    out = backend.verify_chain(*backend(x[:, None], none), params=params, uniform_samples=backend(zeros[:, None]))
    assert out.tokens[:, 0].tolist() == token.tolist()


def test_a_uniform_of_0_draws_a_weight_that_is_one(backend: Backend) -> None:
    """The first tile's weights are lost in the division by the largest, their sum is not."""
    weights = torch.zeros(2, 2048)
    weights[:, 1:1024], weights[:, 1500] = 2.0**-149, 3.0
    out = backend.sample(None, probs=backend(weights), uniform_samples=backend(torch.zeros(2)))
    assert out.token.tolist() == [1500, 1500] and out.stats.status.tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(4, 9), (2, 3, 9)])
def test_one_sample_of_each_row_is_decided_alone(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(2)
    x, coins = torch.randn(shape, generator=rng), torch.rand(shape[:-1], generator=rng)
    exact = sk.decision_margins(sk.sample, x, uniform_samples=coins)
    other = exact.tokens.clone()
    other[-1] = (other[-1] + 1) % 9
    expected = torch.zeros_like(exact.margins)
    expected[-1] = exact.margins[-1]
    assert torch.equal(exact.of_difference(other), expected)
    with pytest.raises(ValueError, match=r"tokens must be \[batch="):
        exact.of_difference(torch.zeros(7, dtype=torch.int64))
