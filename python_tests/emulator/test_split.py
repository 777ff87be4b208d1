"""The layouts of verify_chain, where what one kernel leaves to the next, or reads at all, is a matter of the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import specdec_kernels as sk
from bench.gpu import model
from python_tests import emulated
from python_tests.emulator.drafts import BATCH, ROW, K, made, rng, rows_read
from python_tests.ops.inputs import same_bits, uniforms

H100 = 132  # multiprocessors

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))


@contextmanager
def without_overlap() -> Iterator[None]:
    library = emulated.library()
    library.specdec_cuda_allow_overlap(0)
    try:
        yield
    finally:
        library.specdec_cuda_allow_overlap(1)


@pytest.mark.parametrize("acceptance", ["match", "greedy"])
def test_rules_that_look_at_no_draft_read_none(acceptance: str) -> None:
    """Although its logits are given."""
    arguments = made(kind="full", acceptance=acceptance, params=sk.SamplingParams(top_k=20))
    alone = {name: value for name, value in arguments.items() if name not in ("draft_logits", "draft_params")}
    for strategy in ("split", "early"):
        found, out = rows_read(arguments, strategy)
        expected, same = rows_read(alone, strategy)
        same_bits(out, same)
        assert found == expected and found <= 1.001 * BATCH * (K + 1)
    with emulated.running("resident"):
        launch, *_ = model.counted(lambda: sk.verify_chain(**arguments, backend=emulated.NAME))
    assert launch.counts["bytes"] <= 1.001 * BATCH * (K + 1) * ROW


@pytest.mark.parametrize(("vocab", "first"), [(8192, "verify_walk_kernel<false>"), (8193, "scan_kernel")])
def test_calls_with_many_ids_are_split(vocab: int, first: str) -> None:
    """docs/benchmarks-gpu.md says from where on."""
    arguments = {"target_logits": torch.zeros(2, 3, vocab), "draft_tokens": torch.zeros(2, 2, dtype=torch.int64)}
    with emulated.running("auto"):
        launch, *_ = model.counted(
            lambda: sk.verify_chain(**arguments, uniform_samples=uniforms(rng(), 2, 3), backend=emulated.NAME)
        )
    assert launch.kernel == first


@pytest.mark.parametrize("packed", [False, True])
def test_a_kernel_that_nothing_was_launched_before_overlaps_nothing(packed: bool) -> None:
    """Where no row is scanned, the kernel before is another's, which may still be writing what this one looks at."""
    bonus, none = torch.tensor([3, 5]), torch.zeros(2, 0, dtype=torch.int64)
    coins = {"uniform_samples": uniforms(rng(), 2, 1), "bonus_tokens": bonus, "backend": emulated.NAME}

    def call() -> None:
        if packed:
            out = sk.verify_packed(
                torch.zeros(0, 9000), none[0], cu_num_draft_tokens=torch.zeros(3, dtype=torch.int32),
                max_num_draft_tokens=0, **{**coins, "uniform_samples": coins["uniform_samples"].flatten()},
            )  # fmt: skip
        else:
            limits = torch.zeros(2, dtype=torch.int32)
            out = sk.verify_chain(torch.zeros(2, 0, 9000), none, num_draft_tokens=limits, **coins)
        assert out.tokens.tolist() == [[3], [5]]

    for strategy in ("split", "early"):
        with emulated.running(strategy):
            first, *others = model.counted(call)
        assert first.kernel == "verify_laws_kernel" and first.counts["overlapping"] == 0
        assert all(other.counts["overlapping"] == 1 for other in others)


def test_overlap_can_be_switched_off_everywhere() -> None:
    x, keys = torch.randn(2, 3, 9000, generator=rng()), torch.arange(6).view(2, 3)
    calls = {
        "verify_chain": lambda: sk.verify_chain(**made(), backend=emulated.NAME),
        "sample": lambda: sk.sample(x, noise_keys=keys, backend=emulated.NAME),
        "warp_probs": lambda: sk.warp_probs(x, backend=emulated.NAME),
        "mask_logits_": lambda: sk.mask_logits_(x.clone(), sk.SamplingParams(top_k=20), backend=emulated.NAME),
    }
    for op, call in calls.items():
        with emulated.running("split"):
            overlapping = [launch.counts["overlapping"] for launch in model.counted(call)]
            with without_overlap():
                alone = [launch.counts["overlapping"] for launch in model.counted(call)]
        assert any(overlapping) and not any(alone), op


def test_a_bonus_is_the_same_however_many_blocks_share_its_row() -> None:
    """Of an uncut row the table tells the tiles' masses, whoever draws; coins lie where a bit picks another id."""
    vocab, count = 16384, 48
    target = torch.randn(1, 2, vocab, generator=rng(3))
    draft = target[:, :1].clone()
    tokens = draft.argmax(-1)
    ends = target[0, 1].double().softmax(-1).cumsum(0)[1023::1024][:-1]  # of the tiles
    for i in range(count):
        coins = torch.tensor([[ends[i % 15] * (1 + (i // 15 - 1) * 3e-8), 0.0]], dtype=torch.float64)
        outcomes = []
        for multiprocessors in (H100, 1):
            with emulated.running("split", multiprocessors=multiprocessors):
                outcomes.append(
                    sk.verify_chain(
                        target, tokens, draft, uniform_samples=coins, acceptance="block", backend=emulated.NAME
                    )
                )
        assert outcomes[0].num_accepted.tolist() == [1]
        same_bits(outcomes[0], outcomes[1])


@pytest.mark.parametrize("strategy", ["walk", "cluster"])
def test_rows_whose_numbers_do_not_fit_shared_memory_are_split(strategy: str) -> None:
    """Two tables of 480 tiles each, where walking kernels have room for 475."""
    target, draft = (torch.randn(1, n, 480 * 1024 - 7, generator=rng(n)) for n in (2, 1))
    coins, outcomes = torch.rand(1, 2, generator=rng(7)), []
    for layout in (strategy, "split"):
        with emulated.running(layout):
            outcomes.append(
                sk.verify_chain(target, draft.argmax(-1), draft, uniform_samples=coins, backend=emulated.NAME)
            )
    same_bits(*outcomes)


def test_the_last_coin_below_1_is_below_1() -> None:
    """Where P is Q every token is accepted: a coin is compared as it is given, in float64."""
    target = torch.randn(2, K + 1, 9000, generator=rng(5))
    coins = torch.full((2, K + 1), 1 - 2.0**-53, dtype=torch.float64)
    draft = target[:, :K].contiguous()
    for strategy in ("split", "walk", "cluster", "resident"):
        with emulated.running(strategy):
            out = sk.verify_chain(
                target, draft.argmax(-1), draft, uniform_samples=coins, acceptance="block", backend=emulated.NAME
            )
        assert out.num_accepted.tolist() == [K, K], strategy
