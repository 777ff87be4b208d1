"""What runs on a GPU alone: adapters of peers against stand-ins, and nothing that waits or lands on another device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import specdec_kernels as sk
from bench import inputs
from bench.gpu import drafts, grid, measure, strategy
from bench.inputs import Case
from bench.providers import PROVIDERS, _gpu_peer, eager, flashinfer, own, sglang, vllm
from bench.providers.eager import law
from bench.registry import MATCH, REGISTRY
from python_tests import emulated
from python_tests.bench import fake_peers

PEERS = ("flashinfer", "vllm V1", "vllm V2", "sglang")
WAITING = (
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, torch.nonzero,
    torch.masked_select, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
)  # fmt: skip


@pytest.fixture(autouse=True, params=[False, True], ids=["newer", "older"])
def peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        flashinfer.MODULE: fake_peers.FLASHINFER,
        vllm.V1: fake_peers.v1(takes_probs=request.param),
        vllm.V2: fake_peers.v2(),
        vllm.CUT: fake_peers.TOP_K_TOP_P,
        sglang.MODULES[request.param]: fake_peers.SGLANG,
        sglang.KERNELS: fake_peers.SGL_KERNEL,
    }
    for name in fakes:
        for parent in [name.rsplit(".", i)[0] for i in range(name.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    if request.param:
        monkeypatch.setitem(sys.modules, sglang.MODULES[0], None)  # importing it raises


def cases(vocab: int, batch: int) -> list[Case]:
    return grid.cases("cpu", grid.Sizes([vocab], [batch], [3]))


def offered(case: Case) -> dict[str, Callable[[Any], Any]]:
    calls = {name: PROVIDERS[name].builders["verify_chain"](case) for name in PEERS}
    return {name: call for name, call in calls.items() if call is not None}


@pytest.mark.parametrize("case", cases(96, 5), ids=lambda case: case.name)
def test_adapters_do_the_whole_work(case: Case) -> None:
    step = inputs.chain(case, torch.Generator().manual_seed(1))
    before = step.target_logits.clone()
    calls = offered(case)
    assert set(calls) == {"greedy": {"vllm V1", "vllm V2", "sglang"}, "block": {"vllm V2"}}.get(case.name, set(PEERS))
    for call in calls.values():
        output = call(step)
        measure.check(case, step, output)
        assert torch.equal(step.target_logits, before)  # peers may work in place: not on the input
        if case.greedy:
            wanted = own.builders("reference")["verify_chain"](case)
            assert wanted is not None
            tokens, accepted = wanted(step)
            emitted = torch.arange(case.num_draft + 1) <= accepted[:, None]
            assert torch.equal(output[0][emitted].long(), tokens[emitted])


@pytest.mark.parametrize("name", ["sample", "greedy", "T=1"])
def test_sglang_walks_trees(name: str) -> None:
    (case,) = [c for c in REGISTRY["verify_tree"].cases([16], [400]) if c.name == name]
    step, call = inputs.tree(case, torch.Generator().manual_seed(1)), sglang.verify_tree(case)
    if call is None:
        assert name == "T=1"  # siblings drawn from a draft's law: not in its kernels
        return
    tokens, accepted = call(step)
    assert torch.equal((tokens >= 0).sum(-1), accepted + 1) and accepted.max() > 1
    if case.greedy:
        wanted = own.builders("reference")["verify_tree"](case)
        assert wanted is not None and torch.equal(wanted(step)[0], tokens.long())
    else:
        off = tokens[:, 0].long().bincount(minlength=16) - (P := law(step.target_logits[:, 0], case.params)).sum(0)
        assert (off.abs() <= 5 * (P * (1 - P)).sum(0).sqrt()).all()


def test_peers_refuse_target_laws_and_the_match_rule() -> None:
    for case in (
        grid.cases("cpu", grid.Sizes([96], [5], [5], ["Opt"]))[0],
        Case("verify_chain", "match", 96, 5, **MATCH),
    ):
        assert offered(case) == {}


@pytest.mark.parametrize("case", [c for c in cases(7, 8000) if not c.greedy], ids=lambda case: case.name)
def test_adapters_keep_the_law(case: Case) -> None:
    torch.manual_seed(5)
    case = replace(case, params=replace(case.params, top_k=5) if case.params.top_k else case.params)
    target, draft = torch.randn(1, 4, 7).expand(8000, 4, 7), torch.randn(1, 3, 7).expand(8000, 3, 7)
    probs = law(draft, case.params)
    tokens = torch.multinomial(probs.flatten(0, 1), 1).view(8000, 3)
    if case.one_hot:
        tokens, draft, probs = torch.tensor([[2, 4, 1]]).expand(8000, 3), None, None
    step = inputs.ChainInputs(
        target.contiguous(), tokens, draft, None, probs, torch.randint(0, 2**62, (8000,)), torch.rand(8000, 4)
    )
    expected = law(target[0, 0], case.params).double()
    possible = expected > 0
    for name, call in offered(case).items():
        first = call(step)[0][:, 0].long().bincount(minlength=7)
        assert first[~possible].sum() == 0, name
        assert scipy.stats.chisquare(first[possible], 8000 * expected[possible] / expected.sum()).pvalue > 1e-4, name


class OnAGpu(TorchFunctionMode):
    """Refuses what would be made on the CPU because no device was named, and what waits for the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        placed = function not in _device_constructors() or kwargs.get("device") is not None
        assert placed, f"{function}: on which device?"
        assert function not in WAITING, f"{function} waits"
        return function(*args, **kwargs)


@pytest.mark.parametrize("case", cases(96, 5), ids=lambda case: case.name)
def test_timed_calls_name_their_device_and_do_not_wait(case: Case) -> None:
    """As far as this package's code goes: kernels and peers are theirs."""
    step = inputs.chain(case, torch.Generator().manual_seed(1))
    step.steps = torch.zeros(5, dtype=torch.int64)
    for builders in (eager.BUILDERS, eager.NARROW_BUILDERS, eager.KEPT_BUILDERS, own.builders("reference")):
        call = builders["verify_chain"](case)
        if call is not None:
            with OnAGpu():
                call(step)
    for name in PEERS:
        with OnAGpu():
            PROVIDERS[name].builders["verify_chain"](case)


def test_the_device_mode_sees_what_it_is_for() -> None:
    with OnAGpu(), pytest.raises(AssertionError, match="which device"):
        torch.arange(3)
    with OnAGpu(), pytest.raises(AssertionError, match="waits"):
        torch.ones(1, device="cpu").item()


def test_inputs_name_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs may wait, but everything is made where the generator is; by the reference, where that is a GPU."""
    monkeypatch.setattr(sys.modules[__name__], "WAITING", ())
    monkeypatch.setattr(inputs, "backend", lambda device: "reference")
    inputs._pool.cache_clear()
    for case in (*cases(64, 3), replace(cases(64, 3)[0], batch=300)):
        with OnAGpu():
            step = inputs.chain(case, torch.Generator().manual_seed(1), drafts.drafted)
        assert step.target_logits.shape == (case.batch, 4, 64)
        measure.check(case, step, eager.BUILDERS["verify_chain"](case)(step))


@pytest.mark.parametrize("case", [c for c in cases(600, 40) if not c.one_hot], ids=lambda case: case.name)
def test_drafting_on_a_gpu_is_that_of_the_package(case: Case) -> None:
    logits = inputs.rows(120, 600, torch.Generator().manual_seed(2)).view(40, 3, 600).to(case.dtype)
    logits[0, 0, 7] = logits[0, 0].amax()  # of equal maxima the first
    tokens, stats, probs = drafts.drafted(logits, case, torch.Generator().manual_seed(3))
    wanted = sk.sample(logits, case.params, uniform_samples=torch.rand(40, 3), backend="reference")
    torch.testing.assert_close(stats.values, wanted.stats.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(stats.argmax, wanted.stats.argmax) and torch.equal(stats.status, wanted.stats.status)
    if case.greedy:
        assert probs is None and torch.equal(tokens, wanted.token)
        return
    assert probs is not None
    law_of_it = sk.warp_probs(logits, case.params, backend="reference")
    torch.testing.assert_close(probs, law_of_it, rtol=1e-5, atol=1e-6)
    assert (law_of_it.gather(-1, tokens[..., None]) > 0).all()


def test_many_rows_are_drawn_from_a_pool() -> None:
    generator = torch.Generator().manual_seed(3)
    assert inputs.some_rows(inputs.POOL, 16, generator).unique(dim=0).shape[0] == inputs.POOL
    many = inputs.some_rows(4 * inputs.POOL, 16, generator)
    assert many.shape == (4 * inputs.POOL, 16) and many.unique(dim=0).shape[0] <= inputs.POOL


@pytest.mark.parametrize(
    ("name", "asked"),
    [("split", [("strategy", 1), ("overlap", 1)]), ("cluster, no overlap", [("strategy", 3), ("overlap", 0)])],
)  # fmt: skip
def test_strategies_are_set_for_the_call_alone(
    name: str, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    library = SimpleNamespace(
        specdec_cuda_force_strategy=lambda number: seen.append(("strategy", number)),
        specdec_cuda_allow_overlap=lambda allow: seen.append(("overlap", allow)),
    )
    monkeypatch.setattr(strategy, "_library", lambda: library)
    backends = {"verify_chain": lambda case: lambda step: seen.append("cuda")}
    monkeypatch.setattr(own, "builders", lambda backend: backends)
    call = PROVIDERS[f"cuda, {name}"].builders["verify_chain"](cases(96, 5)[0])
    assert call is not None
    call(None)
    assert seen == [*asked, "cuda", ("strategy", 0), ("overlap", 1)]


def test_strategies_are_those_of_the_header() -> None:
    assert strategy.STRATEGIES == {name: number for number, name in enumerate(emulated.STRATEGIES)}
    more = strategy.HEADER.read_text().replace("  kCluster = 3,", "  kCluster = 3,\n  kAnother = 9,")
    assert strategy.numbered(more)["another"] == 9
    assert {f"cuda, {name}" for name in strategy.LAYOUTS} <= set(PROVIDERS)


def test_a_missing_peer_says_why() -> None:
    assert PROVIDERS["vllm V1"].why_missing("verify_chain", "cpu") == "it needs a GPU"
    assert _gpu_peer("no_such_package.part")("verify_chain", "cuda") == "no_such_package is not installed"
    assert "bench.no_such_part cannot be imported" in str(_gpu_peer("bench.no_such_part")("verify_chain", "cuda"))
    assert _gpu_peer("bench.no_such_part", "bench.machine")("verify_chain", "cuda") is None
