"""row_stats on every backend: against float64, over shapes, strides, dtypes, parameters and bad values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops.inputs import DTYPES, PARAMS, VOCABS, logits, per_row, refuses, same_bits, seeded, strided
from python_tests.support import Backend
from specdec_kernels.testing import float64_law

OP = "row_stats"
SIGNATURE = (["logits", "params"], ["processors", "backend"])
CALLS = {
    "": lambda: {"logits": logits(seeded(), 4, 3, 50), "params": per_row(4)},
    "1d": lambda: {"logits": logits(seeded(), 50, dtype=torch.bfloat16)},
}


def law_of(x: torch.Tensor, stats: sk.RowStats, temperature: float) -> np.ndarray:
    """The formula in RowStats' docstring, in float64."""
    x64 = x.double().cpu()
    maximum, cutoff, normalizer = (v.double().cpu()[..., None] for v in (stats.max, stats.cutoff, stats.normalizer))
    probs = torch.where(x64 >= cutoff, ((x64 - maximum) / temperature).exp() / normalizer, 0.0)
    return probs.numpy()


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_describes_the_float64_law(
    backend: Backend, dtype: torch.dtype, vocab: int, name: str, rng: torch.Generator
) -> None:
    vocab = backend.vocab(vocab)
    params, x = PARAMS[name], logits(rng, 2, 2, vocab, dtype=dtype)
    stats = backend.row_stats(backend(x), params)
    expected = float64_law(x, params)
    assert (stats.status == 0).all() and stats.values.dtype == torch.float32 and stats.argmax.dtype == torch.int64
    np.testing.assert_array_equal(stats.argmax.cpu().numpy(), x.double().numpy().argmax(-1))
    assert torch.equal(stats.max.cpu(), x.float().amax(-1))
    x64 = x.double()
    raw = x64.softmax(-1)
    np.testing.assert_allclose(stats.raw_log_normalizer.cpu(), x64.logsumexp(-1), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(stats.raw_entropy.cpu(), -(raw * raw.log()).sum(-1), rtol=1e-5, atol=1e-5)
    if params.is_greedy:
        assert (stats.cutoff == -math.inf).all() and (stats.normalizer == 1).all()
        return
    np.testing.assert_allclose(law_of(x, stats, float(params.temperature)), expected, rtol=1e-5, atol=1e-9)
    kept = np.where(expected > 0, x64.numpy(), np.inf).min(-1)
    cuts = params.min_p > 0 or 0 < params.top_p < 1 or 0 < params.top_k < vocab
    np.testing.assert_array_equal(stats.cutoff.cpu().numpy(), kept.astype(np.float32) if cuts else -np.inf)
    normalizer = np.where(
        expected > 0, np.exp((x64.numpy() - x64.amax(-1, keepdim=True).numpy()) / params.temperature), 0
    )
    np.testing.assert_allclose(stats.normalizer.cpu(), normalizer.sum(-1), rtol=2e-6)
    log_normalizer = np.log(normalizer.sum(-1)) + x64.amax(-1).numpy() / params.temperature
    np.testing.assert_allclose(stats.log_normalizer.cpu(), log_normalizer, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["default", "all"])
def test_widest_vocabulary(backend: Backend, name: str, rng: torch.Generator) -> None:
    x, params = logits(rng, 2, backend.vocab(262144), dtype=torch.bfloat16), PARAMS[name]
    stats = backend.row_stats(backend(x), params)
    np.testing.assert_allclose(
        law_of(x, stats, float(params.temperature)), float64_law(x, params), rtol=2e-5, atol=1e-9
    )


@pytest.mark.parametrize("shape", [(9,), (3, 9), (2, 3, 9), (2, 3, 4, 9), (1, 1, 9), (3, 0, 9)], ids=str)
def test_leading_dimensions(backend: Backend, shape: tuple[int, ...], rng: torch.Generator) -> None:
    x = logits(rng, *shape)
    stats = backend.row_stats(backend(x), PARAMS["all"])
    assert stats.values.shape == (*shape[:-1], 6) and stats.argmax.shape == stats.status.shape == shape[:-1]
    if x.numel():
        flat = backend.row_stats(backend(x.reshape(-1, 9)), PARAMS["all"])
        same_bits(stats.values.reshape(-1, 6), flat.values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, 1025, 5000])
def test_strides_do_not_matter(backend: Backend, dtype: torch.dtype, vocab: int, rng: torch.Generator) -> None:
    x = backend(logits(rng, 3, 2, vocab, dtype=dtype))
    dense = backend.row_stats(x, PARAMS["all"])
    same_bits(dense, backend.row_stats(strided(x), PARAMS["all"]))
    same_bits(dense, backend.row_stats(x.transpose(0, 1).contiguous().transpose(0, 1), PARAMS["all"]))
    row = backend.row_stats(x[:1], PARAMS["all"])
    same_bits(backend.row_stats(x[:1].expand(4, 2, vocab), PARAMS["all"]).values, row.values.expand(4, 2, 6))


@pytest.mark.parametrize("vocab", [3, 1500])
def test_each_row_has_its_own_parameters(backend: Backend, vocab: int, rng: torch.Generator) -> None:
    x = logits(rng, 5, 2, vocab)
    params = sk.SamplingParams(
        temperature=torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0]), top_k=torch.tensor([0, 0, 2, vocab, 1]),
        top_p=torch.tensor([1.0, 0.9, 0.5, 0.8, 0.0]), min_p=torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0]),
    )  # fmt: skip
    whole = backend.row_stats(*backend(x, params))
    for i in range(5):
        one = sk.SamplingParams(*(f[i : i + 1] for f in (params.temperature, params.top_k, params.top_p, params.min_p)))
        same_bits(backend.row_stats(*backend(x[i : i + 1], one)).values[0], whole.values[i])
        scalar = sk.SamplingParams(
            float(one.temperature),
            int(one.top_k),
            float(one.top_p),
            float(one.min_p),  # type: ignore[arg-type]
        )
        same_bits(backend.row_stats(backend(x[i : i + 1]), scalar).values[0], whole.values[i])


def test_ties_survive_together(backend: Backend) -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 1.0]])
    for params, smallest in [
        (sk.SamplingParams(top_k=1), 3.0),
        (sk.SamplingParams(top_k=3), 2.0),
        (sk.SamplingParams(top_p=0.01), 3.0),
        (sk.SamplingParams(top_p=0.8), 2.0),
        (sk.SamplingParams(top_p=0.99), 1.0),
    ]:
        stats = backend.row_stats(backend(x), params)
        assert stats.cutoff.item() == smallest and stats.argmax.item() == 1


def normal(rng: torch.Generator, vocab: int) -> torch.Tensor:
    return torch.randn(2, vocab, generator=rng)


WIDE: dict[str, Callable[[torch.Generator, int], torch.Tensor]] = {
    "flat": normal,
    "halves": lambda rng, vocab: normal(rng, vocab).bfloat16(),
    "heavy": lambda rng, vocab: normal(rng, vocab) * 3,
    "bands": lambda rng, vocab: normal(rng, vocab) + 8 * (torch.arange(vocab) % 2048 < 256),  # a sample is misled
    "equal": lambda rng, vocab: torch.ones(2, vocab),
    "ties": lambda rng, vocab: normal(rng, vocab).round(),
    "near": lambda rng, vocab: 1000 + normal(rng, vocab) * 1e-3,
    "holes": lambda rng, vocab: normal(rng, vocab).masked_fill(torch.rand(vocab, generator=rng) < 0.6, -math.inf),
    "cliff": lambda rng, vocab: normal(rng, vocab) - 300 * (torch.arange(vocab) > 2),  # what is below weighs nothing
    "zeros": lambda rng, vocab: (
        torch.where(normal(rng, vocab) < 0.5, -0.0, 0.0) - (torch.arange(vocab) % 5 == 0) * 1e-30
    ),
}
CUTS: dict[str, Callable[[int], sk.SamplingParams]] = {
    "p": lambda vocab: sk.SamplingParams(top_p=0.9),
    "most": lambda vocab: sk.SamplingParams(top_p=0.999),
    "k": lambda vocab: sk.SamplingParams(top_k=vocab // 8),
    "k-p": lambda vocab: sk.SamplingParams(top_k=vocab // 4, top_p=0.7),
    "p-m": lambda vocab: sk.SamplingParams(top_p=0.95, min_p=0.02),
    "m-p": lambda vocab: sk.SamplingParams(min_p=1e-3, top_p=0.8, min_p_first=True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", WIDE)
def test_wide_cuts(backend: Backend, kind: str, cut: str, rng: torch.Generator) -> None:
    """Where what is kept is too much to list: what is kept, its normaliser, and draws by the tiles' masses."""
    vocab, u = backend.vocab(70_000), torch.tensor([[0.03], [0.71]])
    x, params = WIDE[kind](rng, vocab)[:, None], CUTS[cut](vocab)
    draw = backend.sample(*backend(x, params), uniform_samples=backend(u))
    x64, cutoff = x.double().numpy(), draw.stats.cutoff.double().cpu().numpy()[..., None]
    got = (x64 >= cutoff) & (x64 > -math.inf)
    assert (np.where(got, x64, math.inf).min(-1, keepdims=True) == cutoff).all()
    fewer, more = (
        float64_law(x, replace(params, top_p=params.top_p * (1 + by), min_p=params.min_p * (1 - by))) > 0
        for by in (-1e-6, 1e-6)
    )
    assert (fewer <= got).all() and (got <= more).all()
    weights = np.where(got, np.exp(x64 - x64.max(-1, keepdims=True)), 0.0)
    np.testing.assert_allclose(draw.stats.normalizer.cpu(), weights.sum(-1), rtol=2e-6)
    share, token = weights / weights.sum(-1, keepdims=True), draw.token.cpu().numpy()[..., None]
    until, own = (np.take_along_axis(v, token, -1)[..., 0] for v in (share.cumsum(-1), share))
    assert (until > u.numpy() - 1e-5).all() and (until - own < u.numpy() + 1e-5).all()


def decimal_borders() -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Distributions of tenths and of hundredths in a random order, as logits ``[rows, 10]``; of each every top-p that
    some of its largest reach exactly; and the shares, out of all, that are kept.
    """
    choose, logits, top_p, kept = random.Random(1), [], [], []
    for whole in [10] * 40 + [100] * 40:
        ends = [0, *sorted(choose.sample(range(1, whole), choose.randint(2, 9))), whole]
        shares = [b - a for a, b in itertools.pairwise(ends)]
        row = torch.tensor(shares + [0] * (10 - len(shares))).double() / whole
        for share in set(shares) - {min(shares)}:
            logits.append(row.float().log())
            kept.append([s for s in shares if s >= share])
            top_p.append(sum(kept[-1]) / whole)
    return torch.stack(logits), torch.tensor(top_p), kept


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_decimal_borders_are_reached(backend: Backend, temperature: float) -> None:
    x, top_p, kept = decimal_borders()
    params = sk.SamplingParams(torch.full((len(x),), temperature), top_p=top_p)
    stats = backend.row_stats(*backend(x * temperature, params))
    smallest = torch.tensor([min(k) / max(k) for k in kept]).log()
    torch.testing.assert_close((stats.cutoff - stats.max).cpu() / temperature, smallest)
    np.testing.assert_array_equal((float64_law(x * temperature, params) > 0).sum(-1), [len(k) for k in kept])


def test_bad_rows_are_flagged_and_alone(backend: Backend, rng: torch.Generator) -> None:
    x = logits(rng, 6, 1100)
    clean = backend.row_stats(backend(x), PARAMS["all"])
    x[1, 5] = math.nan
    x[2] = -math.inf
    x[3] = math.nan
    x[4, 7] = x[4, 1050] = math.inf
    stats = backend.row_stats(backend(x), PARAMS["all"])
    s = sk.Status
    assert stats.status.tolist() == [0, s.NAN, s.EMPTY_ROW, s.NAN | s.EMPTY_ROW, s.INF, 0]
    assert stats.argmax[2:5].tolist() == [0, 0, 7]
    for i in (0, 5):
        same_bits(stats.values[i], clean.values[i])
    x[1, 5] = -math.inf
    same_bits(stats.values[1], backend.row_stats(backend(x), PARAMS["all"]).values[1])


def test_bad_parameters_are_flagged_and_read_as_off(backend: Backend, rng: torch.Generator) -> None:
    x = backend(logits(rng, 7, 50))
    t = torch.tensor([1.0, -1.0, math.nan, math.inf, 1.0, 1.0, 1.0])
    p = torch.tensor([1.0, 1.0, 1.0, 1.0, -0.5, math.nan, 1.0])
    m = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5])
    stats = backend.row_stats(x, backend(sk.SamplingParams(temperature=t, top_p=p, min_p=m)))
    assert stats.status.tolist() == [0] + [sk.Status.BAD_PARAM] * 6
    np.testing.assert_allclose(stats.normalizer.cpu(), backend.row_stats(x).normalizer.cpu(), rtol=1e-6)


@pytest.mark.parametrize("vocab", [7, 1025, 3000])
def test_a_row_does_not_depend_on_its_batch(backend: Backend, vocab: int, rng: torch.Generator) -> None:
    batch = backend.batch(70)
    x = backend(logits(rng, batch, 3, vocab))
    whole = backend.row_stats(x, PARAMS["all"])
    for i in (0, 1, batch // 5, batch - 1):
        same_bits(backend.row_stats(x[i : i + 1, 1:2], PARAMS["all"]).values, whole.values[i : i + 1, 1:2])


def test_large_magnitudes(backend: Backend) -> None:
    x = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [1e-30, 0.0, -1e-30]])
    stats = backend.row_stats(backend(x))
    assert stats.status.tolist() == [0, 0, 0]
    np.testing.assert_allclose(stats.normalizer.cpu(), [1.0, 3.0, 3.0], rtol=1e-6)


def test_top_k_counts_ids_whose_distance_is_no_float(backend: Backend) -> None:
    """More of them than a list holds: they are counted, not weighed."""
    x = torch.full((1, 5000), -3e38)
    x[:, :2000] = 3e38
    stats = backend.row_stats(backend(x), sk.SamplingParams(top_k=4500))
    assert stats.cutoff.item() == x.min().item()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": [1.0, 2.0]}, TypeError, "row_stats: logits must be a tensor, got list"),
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, TypeError, "row_stats: logits must be float32 or"),
        ({"logits": torch.zeros(2, 9, dtype=torch.int64)}, TypeError, "row_stats: logits must be float32"),
        ({"logits": torch.tensor(1.0)}, ValueError, "row_stats: logits must be [..., vocab]"),
        ({"logits": torch.zeros(3, 1)}, ValueError, "row_stats: logits must be [..., vocab]"),
        ({"logits": torch.zeros(3, 0)}, ValueError, "row_stats: logits must be [..., vocab]"),
        ({"logits": torch.zeros(9, 4).T}, ValueError, "row_stats: logits must be contiguous in its last dimension"),
        ({"params": 0.7}, TypeError, "row_stats: params must be a SamplingParams or None, got float"),
        ({"params": sk.SamplingParams(torch.ones(3))}, ValueError, "row_stats: params.temperature must be [batch=4],"),
        ({"params": sk.SamplingParams(top_k=torch.ones(5, dtype=torch.int32))}, ValueError, "row_stats: params.top_k"),
        ({"params": sk.SamplingParams(top_p=torch.ones(4, device="meta"))}, ValueError, "row_stats: params.top_p"),
        ({"backend": "fastest"}, ValueError, "row_stats: backend must be one of"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    refuses(sk.row_stats, {"logits": torch.zeros(4, 9)}, change, error, message)


def test_a_named_backend_never_falls_back() -> None:
    for name, answer in sk.backends()[OP].items():
        if answer != "yes":
            with pytest.raises(ValueError, match=f"row_stats: backend='{name}' cannot run here"):
                sk.row_stats(torch.zeros(4, 9), backend=name)


@pytest.mark.parametrize("how", ["min-p first", "top-p", "top-k and top-p"])
def test_a_cut_off_that_a_sample_of_the_row_does_not_see(backend: Backend, how: str) -> None:
    """The mass lies beside the ids that are looked at first, every eighth 256: cut-offs are the reference's."""
    generator, vocab = seeded(), 40960
    if how == "top-p":
        x = torch.full((8, vocab), -torch.inf)
        x[:, 300:2000] = torch.randn(8, 1700, generator=generator) * 0.01
        x[:, [10, 100, 200]] = torch.rand(8, 3, generator=generator) + 0.1
    else:
        x = torch.randn(8, vocab, generator=generator) * 0.01
        seen = torch.arange(vocab) % 2048 < 256
        x[:, seen] = -5 + 0.1 * torch.randn(8, int(seen.sum()), generator=generator)
    params = {
        "min-p first": sk.SamplingParams(top_p=0.9, min_p=0.1, min_p_first=True),
        "top-p": sk.SamplingParams(top_p=0.9),
        "top-k and top-p": sk.SamplingParams(top_k=30000, top_p=0.9),
    }[how]
    rows = backend.batch(8) if backend.strategy is None else 2
    found = backend.row_stats(backend(x[:rows]), params)
    expected = sk.row_stats(x[:rows], params, backend="reference")
    torch.testing.assert_close(found.normalizer.cpu(), expected.normalizer, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.cutoff.cpu(), expected.cutoff, rtol=0, atol=2e-4)
