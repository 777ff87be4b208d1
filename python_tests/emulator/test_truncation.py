"""What finding a cut-off costs on a GPU, counted by the emulator, and that what it finds is a cut-off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from bench.gpu import model
from python_tests import emulated
from specdec_kernels import SamplingParams

VOCAB = 128256  # 126 tiles, 1002 groups of ids and 6 that are empty
COUNTS = ("shared_atomics", "rounds", "barriers", "bytes")

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))


def spread(vocab: int = VOCAB) -> Tensor:
    return 2.5 * torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(3))


def peaked() -> Tensor:
    """As models have them: a few ids far above all others."""
    row = spread()
    row[..., 1000::6000] += torch.linspace(8, 20, row[..., 1000::6000].numel())
    return row


def counts(row: Tensor, params: SamplingParams, strategy: str) -> dict[str, float]:
    with emulated.running(strategy):
        launches = model.counted(lambda: sk.row_stats(row, params=params, backend=emulated.NAME))
    assert sum(x.counts["atomics"] for x in launches) == 0  # on device memory
    return {name: sum(x.counts[name] for x in launches) for name in COUNTS}


def test_rounds_are_the_tiles_of_a_warp() -> None:
    """16 tiles of a row for each of the 8 warps of a block, and the largest logit's tile again; or 1 if it is split."""
    assert counts(spread(), SamplingParams(), "walk") == {
        "shared_atomics": 0, "rounds": 17, "barriers": 18, "bytes": pytest.approx(4 * VOCAB, rel=0.02),
    }  # fmt: skip
    assert counts(spread(), SamplingParams(), "split")["rounds"] == 2


@pytest.mark.parametrize("strategy", ["walk", "split"])
@pytest.mark.parametrize(
    ("row", "params", "most"),
    [
        # at most: atomics, rounds of loads, barriers, rows read, all on top of those of the uncut row
        (spread, SamplingParams(0.8, top_k=50), (32, 2, 16, 0.1)),
        (spread, SamplingParams(0.8, top_k=50, top_p=0.9), (32, 2, 16, 0.1)),
        (peaked, SamplingParams(0.8, top_k=50, top_p=0.9), (32, 2, 16, 0.1)),
        (spread, SamplingParams(0.8, min_p=0.05), (32, 1, 6, 0.1)),
        (peaked, SamplingParams(0.8, top_p=0.9), (128, 10, 40, 0.4)),
        (spread, SamplingParams(0.8, top_p=0.9), (512, 48, 48, 8)),  # 10^4 ids are kept
        (spread, SamplingParams(1.0, top_k=1000, top_p=0.9), (1024, 90, 60, 6)),  # more groups than k hardly are
    ],
)
def test_a_cut_takes_few_atomics_and_waits(
    strategy: str, row: object, params: SamplingParams, most: tuple[float, ...]
) -> None:
    logits = row()  # type: ignore[operator]
    uncut, cut = (counts(logits, p, strategy) for p in (SamplingParams(0.8), params))
    more = [cut[name] - uncut[name] for name in COUNTS]
    more[-1] /= 4 * VOCAB
    assert all(x <= limit for x, limit in zip(more, most, strict=True)), dict(zip(COUNTS, more, strict=True))


def one_in_each_eight_threads() -> Tensor:
    """The 32 largest are of groups that threads 0, 8, 16, … of a block look at, the next 32 of their neighbours'."""
    row = spread() - 40
    for group in range(256):  # 4 ids of a group stand together, 8 runs of them 32 ids apart
        row[..., group // 8 * 1024 + group % 8 * 32] = {0: 10.0, 1: 5.0}.get(group % 8, -20.0)
    return row


ROWS = {
    "one in each eight threads": one_in_each_eight_threads(),
    "spread": spread(9000),
    "flat": spread(9000) * 0.004,  # more ids compete than are listed
    "ties": spread(9000).round(),
    "bfloat16": spread(9000).bfloat16(),
    "float16": spread(9000).half(),
    "zeros": (spread(9000) - 1).clamp_min(0),
    "masked": spread(9000).masked_fill(spread(9000) > -4, -1e9),
    "few possible": spread(9000).masked_fill(spread(9000) < 5.5, float("-inf")),
    "saturated": spread(9000).clamp_max(1),
    "tiny": spread(9000) * 1e-36,
}
PARAMS = [
    SamplingParams(0.8, top_k=50),
    SamplingParams(0.8, top_k=2000),
    SamplingParams(0.8, top_k=5000),
    SamplingParams(0.8, top_p=0.9),
    SamplingParams(1.5, top_p=0.9999),
    SamplingParams(0.05, top_p=0.5),
    SamplingParams(1.0, top_k=300, top_p=0.9),
    SamplingParams(3.0, top_k=5000, top_p=0.9),
]


@pytest.mark.parametrize("strategy", ["walk", "split"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_what_is_found_is_the_cut(name: str, params: SamplingParams, strategy: str) -> None:
    """By the definition, in float64: the largest cut-off with which k ids, and then so much mass, are kept."""
    row = ROWS[name].flatten().double()
    with emulated.running(strategy):
        stats = sk.row_stats(ROWS[name], params=params, backend=emulated.NAME)
    cutoff = stats.cutoff.double().item()
    assert (row == cutoff).any()
    weights = ((row - row.max()) / params.temperature).exp()
    floor = -torch.inf
    if 0 < params.top_k < row.numel():
        floor = row.topk(params.top_k).values[-1].item()
    weights = weights.where(row >= floor, 0.0)
    above, until = (weights[mask].sum() / weights.sum() for mask in (row > cutoff, row >= cutoff))
    if params.top_p < 1:
        assert above < params.top_p + 1e-6 and until > params.top_p - 1e-5
    else:
        assert cutoff == max(floor, row[row > -torch.inf].min().item())
    assert stats.normalizer.item() == pytest.approx(weights[row >= cutoff].sum().item(), rel=1e-5)
