"""Ops give the same bits however many threads torch has, and whatever dtype and device tensors have by default."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench.inputs import Case
from bench.providers import own
from bench.registry import REGISTRY
from python_tests.decoding.fake_cuda import Refusing
from python_tests.ops.inputs import OPS, op_tests, same_bits, tensors
from python_tests.support import Backend

WIDE = 131075  # one row of so many ids is worth two threads


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def dtype(given: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(given)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def called(case: Case, backend: str, inputs: Any) -> list[torch.Tensor]:
    """What an op gives and what becomes of its arguments."""
    call = own.builders(backend)[case.op](case)
    if call is None:
        pytest.skip("the backend does not have the case")
    inputs = copy.deepcopy(inputs)
    return tensors((call(inputs), inputs))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [t.device for t in found] == [t.device for t in expected]
    same_bits(found, expected)


def cases(vocab: int) -> list[Any]:
    """Of every op: in float32 and of so many ids, where it has such."""
    every: list[Case] = []
    for entry in REGISTRY.values():
        found = list(entry.cases((vocab,), (1,)))
        found = [case for case in found if case.dtype == torch.float32] or found
        every += [case for case in found if case.vocab == vocab] or found
    once = {(case.op, case.name, case.batch): case for case in every}  # with a cold cache and a warm one
    return [pytest.param(case, id="-".join(map(str, key))) for key, case in once.items()]


def made(case: Case) -> Any:
    """Inputs; caches, in which a bench has zeros, hold numbers, so that what was moved shows."""
    rng = torch.Generator(case.device).manual_seed(3)
    inputs = REGISTRY[case.op].make(case, rng)
    for one in tensors(getattr(inputs, "cache", ())):
        one.normal_(generator=rng)
    return inputs


@pytest.mark.short(cases=5)
@pytest.mark.parametrize("case", cases(WIDE))
def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    inputs = made(case)
    with threads(1):
        expected = called(case, "cpu", inputs)
    for count in (2, 16):
        with threads(count):
            assert_same(called(case, "cpu", inputs), expected)


def noisy_chain(batch: int) -> tuple[torch.Tensor, ...]:
    """Verified with the noise of "match"."""
    logits = torch.randn(batch, 3, WIDE)
    keys = torch.arange(3 * batch).view(batch, 3)
    return sk.verify_chain(logits, logits[:, :2].argmax(-1), noise_keys=keys, acceptance="match", backend="cpu")


def chain_of_probabilities(batch: int) -> tuple[torch.Tensor, ...]:
    """Of a draft that is given as probabilities, a row of which is none."""
    logits, probs = torch.randn(batch, 3, WIDE), torch.randn(batch, 2, WIDE).softmax(-1)
    probs[-1, 0, WIDE - 1] = torch.nan
    draft, uniforms = probs.nan_to_num().argmax(-1), torch.rand(batch, 3, dtype=torch.float64)
    return sk.verify_chain(logits, draft, draft_probs=probs, uniform_samples=uniforms, backend="cpu")


def noisy_samples(batch: int) -> tuple[torch.Tensor, ...]:
    """Several of each row, without replacement."""
    keys = torch.arange(batch).view(batch, 1)
    return sk.sample(torch.randn(batch, 1, WIDE), noise_keys=keys, num_samples=5, backend="cpu")


def shards_of_probabilities(batch: int) -> tuple[torch.Tensor, ...]:
    return sk.shard_stats(torch.randn(batch, 2, WIDE).softmax(-1), probs=True, backend="cpu")


CALLS = [noisy_chain, chain_of_probabilities, noisy_samples, shards_of_probabilities]


@pytest.mark.parametrize("batch", [1, 2, 5])  # threads without a row, or with none left, take part in others'
@pytest.mark.parametrize("call", CALLS)
def test_threads_that_join_change_no_bit(call: Callable[[int], Any], batch: int) -> None:
    def outcome() -> list[torch.Tensor]:
        torch.manual_seed(batch)
        return tensors(call(batch))

    with threads(1):
        expected = outcome()
    for count in (2, 3, 16):
        with threads(count):
            assert_same(outcome(), expected)


@pytest.mark.parametrize("case", cases(1500))
def test_defaults_of_torch_change_no_bit(case: Case, backend: Backend) -> None:
    case = replace(case, device=backend.device)
    inputs = made(case)
    expected = called(case, backend.name, inputs)
    for default in (torch.float64, torch.bfloat16):
        with dtype(default):
            assert_same(called(case, backend.name, inputs), expected)
    with torch.device("meta"):
        assert_same(called(case, backend.name, inputs), expected)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_waits_for_no_device(op: str) -> None:
    """A step of it can be captured in a CUDA graph, as the docstrings of ops promise."""
    for given in op_tests(op).CALLS.values():
        arguments = given()
        with Refusing():
            getattr(sk, op)(**arguments, backend="reference")
