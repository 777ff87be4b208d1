"""How many kernels a verify step launches, and with what."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import specdec_kernels as sk
from python_tests import interpreted
from python_tests.ops import chains, trees
from python_tests.support import Backend, present
from specdec_kernels import laws
from specdec_kernels.backends.triton.bundles import Overlay

pytestmark = pytest.mark.skipif(interpreted.why_not() is not None, reason=str(interpreted.why_not()))


def launched(backend: Backend, run: Callable[[], object]) -> list[tuple[object, ...]]:
    """The positional arguments of every launch."""
    from triton.runtime.interpreter import GridExecutor

    with backend.limited(), mock.patch.object(GridExecutor, "__call__", autospec=True) as launch:
        run()  # what comes out is not looked at: nothing runs
    return [call.args[1:] for call in launch.call_args_list]


@pytest.mark.parametrize(("vocab", "warps"), [(40, 1), (1500, 2), (5000, 4)])
def test_a_scan_has_a_warp_for_each_tile(vocab: int, warps: int) -> None:
    """So that a tile's sum of aligned rows has one order, whatever else they need: the remainder of equal laws is
    exactly 0.
    """
    from triton.runtime.interpreter import GridExecutor

    x = torch.randn(1, 2, vocab)
    for op in ("row_stats", "shard_stats"):
        (backend,) = [b for b in present(op) if b.name == "triton"]
        with backend.limited(), mock.patch.object(GridExecutor, "__call__", autospec=True) as launch:
            getattr(backend, op)(x)
        scans = [call.kwargs for call in launch.call_args_list if call.args[0].fn.__name__ == "scan"]
        assert [scan["num_warps"] for scan in scans] == [warps], op


def launches(backend: Backend, kind: str, acceptance: str, law: laws.TargetLaw | None) -> int:
    arguments = chains.make(torch.Generator().manual_seed(5), 2, 2, 40, kind=kind, acceptance=acceptance, law=law)
    return len(launched(backend, lambda: chains.run(backend, arguments)))


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("kind", ["full", "stats", "reduced", "probs", "one_hot"])
def test_a_target_law_takes_one_launch_more(kind: str, acceptance: str) -> None:
    (backend,) = [b for b in present("verify_chain") if b.name == "triton"]
    without = launches(backend, kind, acceptance, None)
    assert without > 3  # they are counted
    for law in chains.LAWS:
        if chains.fits(law, acceptance, kind):
            assert launches(backend, kind, acceptance, law) <= without + 1, law


def test_sizes_of_a_cache_compile_no_variant() -> None:
    """A text that grows past a multiple of 16 rows would wait for a compiler."""
    (backend,) = [b for b in present("gather_kv_") if b.name == "triton"]
    kernel = importlib.import_module("specdec_kernels.backends.triton.gather_kv_").kernel.fn
    (function,) = ast.parse(inspect.getsource(kernel)).body
    assert isinstance(function, ast.FunctionDef) and isinstance(decorator := function.decorator_list[0], ast.Call)
    spared = set(ast.literal_eval(decorator.keywords[0].value))
    names = [parameter.arg for parameter in function.args.args]
    strides: set[tuple[tuple[bool, bool], ...]] = set()
    for rows in (15, 16, 17):
        cache = torch.zeros(2, 3, rows, 64, dtype=torch.bfloat16)
        nodes, lengths = torch.tensor([[2], [2]]), torch.tensor([1, 1])
        (given,) = launched(backend, lambda c=cache, n=nodes, m=lengths: backend.gather_kv_([c], n, m))
        assert {name for name, value in zip(names, given, strict=False) if isinstance(value, int)} == spared
        (planes,) = (value for value in given if type(value).__name__ == "Planes")
        strides.add(tuple((stride == 1, stride % 16 == 0) for stride in planes.shapes))
    assert len(strides) == 1


def numbers(bundle: object) -> Iterator[str]:
    """Which fields of a bundle, and of those in it, are ints."""
    if isinstance(bundle, tuple):
        for name, value in zip(getattr(bundle, "_fields", ()), bundle, strict=True):
            if isinstance(value, int):
                yield f"{type(bundle).__name__}.{name}"
            yield from numbers(value)


def test_processors_compile_no_variant_as_requests_come_and_go() -> None:
    """Their numbers differ in nothing that Triton looks at, whatever the batch and the lengths of lists."""
    (backend,) = [b for b in present("verify_chain") if b.name == "triton"]
    seen: dict[str, set[tuple[bool, bool]]] = {}
    for batch, width, biases, written in (
        (2, 2, 3, 7), (4, 3, 16, 7), (3, 4, 17, 7), (16, 2, 33, 33000), (5, 5, 1, 7), (2, 2, 33000, 7),
    ):  # fmt: skip
        rng = torch.Generator().manual_seed(5)
        arguments = chains.make(rng, batch, width, 40 if biases < 40 else biases, kind="one_hot")
        history = torch.randint(0, 40, (batch, written), generator=rng)
        arguments["processors"] = sk.Processors(
            logit_bias=dict.fromkeys(range(biases), 0.5), presence_penalty=0.4,
            token_counts=sk.TokenCounts(history, 3 * batch, None),
        )  # fmt: skip
        for args in launched(backend, lambda arguments=arguments: chains.run(backend, arguments)):
            for bundle in args:
                for overlay in overlays(bundle):
                    for name, value in zip(overlay._fields, overlay, strict=True):
                        if isinstance(value, int) and name not in ("stride", "depth"):  # these are a draft's width
                            seen.setdefault(name, set()).add((value == 1, value % 16 == 0))
    assert set(seen) == {"words", "num_bias", "bias_steps", "capacity", "count_steps"}
    assert all(len(kinds) == 1 for kinds in seen.values()), seen


def overlays(bundle: Any) -> Iterator[Any]:
    """What processors make of rows, wherever it is in a bundle."""
    if isinstance(bundle, Overlay):
        yield bundle
    elif isinstance(bundle, tuple):
        for value in bundle:
            yield from overlays(value)


def test_bundles_hold_no_number_that_would_compile_a_variant() -> None:
    """Triton compiles anew for an int of a bundle that is 1, or divisible by 16 where it was not: see bundles.py."""
    (backend,) = [b for b in present("verify_chain") if b.name == "triton"]
    rng = torch.Generator().manual_seed(5)
    x, keys = torch.randn(2, 3, 40), torch.zeros(2, 3, dtype=torch.int64)
    calls = [lambda k=k: backend.sample(x, noise_keys=keys, num_samples=k) for k in (1, 2)]
    for acceptance in ("token", "block", "match"):
        made = chains.make(rng, 2, 2, 40, kind="reduced" if acceptance != "match" else "full", acceptance=acceptance)
        calls.append(lambda made=made: chains.run(backend, made, return_acceptance=True))
    for acceptance in ("match", "typical", "traversal"):
        made = trees.make(5, 2, 4, 40, acceptance=acceptance)
        calls.append(lambda made=made: trees.run(backend, made))
    cascade = trees.make(5, 2, 4, 40, law=laws.TokenV3(0.5, bonus="cascade"))
    calls.append(lambda: trees.run(backend, cascade))
    found = {name for run in calls for args in launched(backend, run) for bundle in args for name in numbers(bundle)}
    assert found == {"Rows.stride_batch", "Rows.stride_row", "Rows.vocab", "DraftLaws.map_size"}
