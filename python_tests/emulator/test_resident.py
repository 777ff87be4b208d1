"""What it costs to verify few sequences in one launch, counted by the emulator beside the other layouts."""

from __future__ import annotations

import pytest
import torch

import specdec_kernels as sk
from bench.gpu import model
from python_tests import emulated
from specdec_kernels import SamplingParams

VOCAB, K = 128256, 5
ROW = 2 * VOCAB  # bytes
CUT = SamplingParams(0.8, top_k=50, top_p=0.9)
H100 = 132  # multiprocessors

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))


def counted(
    strategy: str, params: SamplingParams | None = None, acceptance: str = "token", batch: int = 1, drafted: bool = True
) -> list[model.Launch]:
    """The launches of a step that makes its own coins; the draft is near the target."""
    generator = torch.Generator().manual_seed(1)
    draft = 2.5 * torch.randn(batch, K, VOCAB, generator=generator)
    near = draft + 0.3 * torch.randn(batch, K, VOCAB, generator=generator)
    target = torch.cat([near, 2.5 * torch.randn(batch, 1, VOCAB, generator=generator)], 1).to(torch.bfloat16)
    tokens = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1, generator=generator).view(batch, K)
    coins = {} if acceptance == "greedy" else {"seeds": torch.arange(batch), "step": 3}
    logits = draft.to(torch.bfloat16) if drafted else None
    law = (
        {}
        if acceptance == "greedy"
        else {"params": params or SamplingParams(), "draft_params": params if drafted else None}
    )
    with emulated.running(strategy, multiprocessors=H100):
        return model.counted(
            lambda: sk.verify_chain(
                target, tokens, logits, acceptance=acceptance, backend=emulated.NAME, **coins, **law
            )
        )


def rounds_of(strategy: str, params: SamplingParams | None, acceptance: str) -> float:
    return sum(launch.counts["rounds"] for launch in counted(strategy, params, acceptance))


@pytest.mark.parametrize(
    ("params", "acceptance", "rounds", "split", "cluster", "walk"),
    [
        (None, "token", 1, 4, 94, 182),
        (None, "block", 2, 5, 134, 262),
        (CUT, "token", 1, 9, 36, 64),
        (CUT, "block", 2, 9, 40, 72),
    ],
)
def test_each_row_is_read_once_and_waited_for_once(
    params: SamplingParams | None, acceptance: str, rounds: int, split: int, cluster: int, walk: int
) -> None:
    """All of a step in one launch, coins and truncation included. The block rule waits once more, for what the
    positions before have found. The others wait so often, as docs/benchmarks.md says.
    """
    (launch,) = counted("resident", params, acceptance)
    assert launch.kernel == "verify_resident_kernel"
    rows = (2 * K + 1) * ROW
    assert rows <= launch.counts["bytes"] <= 1.001 * rows and launch.counts["rounds"] == rounds
    assert launch.counts["most_copied"] <= launch.counts["most_bytes"] < rows / 40
    others = [rounds_of(strategy, params, acceptance) for strategy in ("split", "cluster", "walk")]
    assert others == [split, cluster, walk]


@pytest.mark.parametrize(("acceptance", "drafted"), [("greedy", False), ("token", False)])
def test_only_rows_that_matter_are_read(acceptance: str, drafted: bool) -> None:
    (launch,) = counted("resident", acceptance=acceptance, drafted=drafted)
    rows = (K + 1) * ROW
    assert rows <= launch.counts["bytes"] <= 1.001 * rows and launch.counts["rounds"] == 1
