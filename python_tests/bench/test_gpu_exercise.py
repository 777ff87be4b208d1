"""The ops as the sanitizer runs them: every one is compared with the reference, and what differs is reported."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench.gpu import exercise, strategy
from bench.providers import own
from python_tests.ops.inputs import OPS


def test_exercise_reaches_every_op_and_sees_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert exercise.main("--backend cpu --device cpu --most-shapes 1".split()) == 0
    names = [name for name, _ in exercise.calls((1, 1, 33), torch.float32, "cpu", "cpu")]
    words = {*OPS, "token", "block", "match", "one-hot", "packed", "greedy", "tree"}
    floats = {"warp_probs", "merge_shards"}  # they give no integers: they are only run
    missing = words - floats - {name.split()[0] for name in names}
    assert not missing, (
        f"bench.gpu.exercise compares no integers of {missing}: only what gives none is to be in `floats`"
    )


def test_exercise_sees_what_is_written_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only(shape: tuple[int, int, int], *others: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return exercise.registered(min(shape[0], 3), shape[2], *others)

    builders = own.builders
    some = ("mask_logits_", "gather_kv_")
    monkeypatch.setattr(exercise, "own", SimpleNamespace(builders=lambda of: {op: builders(of)[op] for op in some}))
    monkeypatch.setattr(exercise, "calls", only)
    command = "--backend cpu --device cpu --most-shapes 2".split()
    assert exercise.main(command) == 0
    mask_logits_, gather_kv_ = sk.mask_logits_, sk.gather_kv_

    @functools.wraps(mask_logits_)
    def masks_nothing(logits: torch.Tensor, *others: Any, **given: Any) -> Any:
        return mask_logits_(logits if given["backend"] == "reference" else logits.clone(), *others, **given)

    @functools.wraps(gather_kv_)
    def skips_the_last_layer(cache: Any, *others: Any, **given: Any) -> Any:
        return gather_kv_(cache if given["backend"] == "reference" else cache[:-1], *others, **given)

    monkeypatch.setattr(sk, "mask_logits_", masks_nothing)
    monkeypatch.setattr(sk, "gather_kv_", skips_the_last_layer)
    capsys.readouterr()
    assert exercise.main(command) == 1
    wrong = {line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")}
    assert wrong == {
        "WRONG: mask_logits_ truncated masked, 4 of 4", "WRONG: gather_kv_ overhead cache 0, 4 of 4",
        "WRONG: gather_kv_ 32 layers cache 31, 4 of 4",
    }  # fmt: skip


def test_exercise_fails_where_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(shape: Any, dtype: Any, device: str, backend: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield "any", torch.zeros(4, 2) if backend == "reference" else torch.ones(4, 2)

    monkeypatch.setattr(exercise, "calls", calls)
    assert exercise.main("--backend cpu --device cpu".split()) == 1


def test_exercise_does_not_let_one_name_hide_among_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def calls(shape: Any, dtype: Any, device: str, backend: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"right {i}", torch.zeros(4, 2)) for i in range(200))
        yield "wrong", torch.zeros(4, 2) if backend == "reference" else torch.ones(4, 2)

    monkeypatch.setattr(exercise, "calls", calls)
    assert exercise.main("--backend cpu --device cpu".split()) == 1
    assert f"WRONG: wrong, {4 * len(exercise.SHAPES)} of {4 * len(exercise.SHAPES)}" in capsys.readouterr().out


def test_exercise_wants_the_same_of_every_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def calls(shape: Any, dtype: Any, device: str, backend: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield "any", torch.full((500, 1), int(device == "cpu" and backend == "cuda" and used[-1] == "early"))

    @contextlib.contextmanager
    def forced(way: str) -> Iterator[None]:
        used.append(way)
        yield

    monkeypatch.setattr(exercise, "calls", calls)
    monkeypatch.setattr(strategy, "forced", forced)
    assert exercise.main("--device cpu --most-shapes 1".split()) == 1


def test_exercise_goes_through_the_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        def __init__(self, path: str) -> None:
            assert path.endswith("_C_cuda.so")

        def specdec_cuda_force_strategy(self, number: int) -> None:
            asked.append(number)

        def specdec_cuda_allow_overlap(self, allow: int) -> None:
            assert allow == 1

    monkeypatch.setattr(strategy.ctypes, "CDLL", Library)
    monkeypatch.setattr(strategy, "_library", strategy._library.__wrapped__)
    monkeypatch.setattr(exercise, "calls", lambda *arguments: iter([("any", torch.zeros(1, 1))]))
    assert exercise.main(["--device", "cpu"]) == 0
    assert asked == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0] * len(exercise.SHAPES)
