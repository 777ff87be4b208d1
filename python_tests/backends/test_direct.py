"""Calls past torch's dispatcher: the same results, and the dispatcher wherever something relies on it."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels as sk
from python_tests.ops.inputs import op_tests, outcome, same_bits, tensors
from specdec_kernels import checks
from specdec_kernels.backends import OPS, direct, native
from specdec_kernels.ops import _common

pytestmark = pytest.mark.skipif(
    "CPU" in native._problems or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="needs the compiled CPU library, and a torch that exchanges tensors by DLPack's C API",
)
PARAMS = sk.SamplingParams(0.8, top_k=20)


def overload(op: str) -> Any:
    return getattr(torch.ops.specdec, op).default


class Seen(TorchDispatchMode):
    """Names of our ops that the dispatcher ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.given: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "specdec":
            self.names.append(func._opname)
            self.given.append(args)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ops for which the dispatcher was asked, whatever the reason."""
    names: list[str] = []

    def counting(op: str) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            names.append(op)
            return overload(op)(*given)

        return run

    from specdec_kernels import _host

    table = direct._address(native._symbols["CPU"].specdec_direct_op)
    for op in OPS:
        monkeypatch.setitem(direct._calls, op, _host.direct(counting(op), op, cpu=table, cuda=0))
    yield names


@pytest.mark.parametrize("op", OPS)
def test_the_same_results_without_the_dispatcher(op: str, dispatched: list[str]) -> None:
    for make in op_tests(op).CALLS.values():
        given = make()
        with Seen() as seen:
            expected = outcome(getattr(sk, op), **given, backend="cpu")
        assert seen.names[-1:] == [op]
        dispatched.clear()
        got = outcome(getattr(sk, op), **given, backend="cpu")
        assert dispatched == []
        same_bits(got, expected)


def logits(**kwargs: Any) -> Tensor:
    return torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(0), **kwargs)


def chain_coins() -> Tensor:
    return torch.rand(2, 3, generator=torch.Generator().manual_seed(4))


def chain(**changes: Any) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(1)
    return {
        "target_logits": logits(), "draft_tokens": torch.tensor([[1, 2], [3, 4]]),
        "draft_logits": torch.randn(2, 2, 30, generator=rng), "uniform_samples": chain_coins(),
    } | changes  # fmt: skip


def test_a_dispatch_mode_sees_the_op(dispatched: list[str]) -> None:
    with Seen() as seen:
        sk.verify_chain(**chain())
    assert seen.names == ["verify_chain"]


def test_a_function_mode_sees_the_op(dispatched: list[str]) -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        sk.row_stats(logits())
    assert "specdec.row_stats.default" in seen and dispatched == ["row_stats"]


def test_the_profiler_sees_the_op() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sk.verify_chain(**chain())
    assert "specdec::verify_chain" in {event.key for event in profile.key_averages()}


def test_tracers_record_the_op(dispatched: list[str]) -> None:
    graph = make_fx(lambda x: sk.row_stats(x).values, tracing_mode="fake")(logits())
    assert "specdec.row_stats" in graph.code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: sk.row_stats(x).values, (logits(),), check_trace=False)
    assert "specdec::row_stats" in str(traced.graph)
    program = torch.export.export(torch.nn.ReLU(), (logits(),), strict=False)  # exporting sets no mode for good
    assert program is not None and direct.call("row_stats", None) is not None


def test_fake_tensors_stay_fake() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        out = sk.row_stats(torch.empty(2, 3, 30))
    assert isinstance(out.values, torch._subclasses.fake_tensor.FakeTensor)
    assert sk.row_stats(torch.empty(2, 3, 30, device="meta")).values.device.type == "meta"


def test_fake_caches_have_no_addresses_to_compare() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = [torch.empty(2, 2, 9, 4) for _ in range(2)]
        out = sk.gather_kv_(cache, torch.ones(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64), "bhsd")
    assert isinstance(out.lengths, torch._subclasses.fake_tensor.FakeTensor)


def test_a_first_use_that_is_traced_leaves_no_fake_tensors() -> None:
    processors = sk.Processors(allowed_ids=[1, 2])
    traced = torch.export.export(Warped(processors), (logits(),), strict=False)
    probs = sk.warp_probs(logits(), processors=processors)
    assert type(probs) is torch.Tensor and (probs[..., 1:3].sum(-1) - 1).abs().max() < 1e-6
    assert torch.equal(traced.module()(logits()), probs)


class Warped(torch.nn.Module):
    def __init__(self, processors: sk.Processors) -> None:
        super().__init__()
        self.processors = processors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sk.warp_probs(x, processors=self.processors)


def test_a_transform_is_obeyed() -> None:
    """A tensor of vmap's looks plain but is not: it has a dimension less than what lies in memory."""
    x = torch.randn(4, 2, 3, 30, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a loop
        got = torch.vmap(lambda rows: sk.row_stats(rows).values)(x)
    same_bits([got], [torch.stack([sk.row_stats(rows).values for rows in x])])


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("requires_grad", {"target_logits": logits(requires_grad=True)}),
        ("a parameter", {"target_logits": torch.nn.Parameter(logits(), requires_grad=False)}),
        ("a view that negates", {"uniform_samples": torch._neg_view(-chain_coins())}),
        ("not contiguous", {"draft_tokens": torch.tensor([[1, 3], [2, 4]]).T}),
    ],
)
def test_what_only_the_dispatcher_can_do(name: str, changed: dict[str, Any], dispatched: list[str]) -> None:
    expected = sk.verify_chain(**chain(), backend="reference")
    got = sk.verify_chain(**chain(**changed))
    assert dispatched == ["verify_chain"], name
    assert torch.equal(got.tokens, expected.tokens)
    if name == "requires_grad":
        with torch.no_grad():
            sk.verify_chain(**chain(**changed))
        assert dispatched == ["verify_chain"]


def test_a_compiled_call_is_one_op(dispatched: list[str]) -> None:
    torch.compiler.reset()
    graph = torch.compile(lambda x: sk.row_stats(x).values, fullgraph=True, backend="eager")
    same_bits([graph(logits())], [sk.row_stats(logits()).values])


def test_inference_mode_makes_inference_tensors(dispatched: list[str]) -> None:
    with torch.inference_mode():
        assert sk.row_stats(logits()).values.is_inference()
    assert not sk.row_stats(logits()).values.is_inference() and dispatched == []


def test_keywords_and_wrong_counts_reach_the_op() -> None:
    run = direct.call("row_stats", overload("row_stats"))
    given = OPS["row_stats"].pack(logits=logits(), params=PARAMS, processors=None)
    names = [argument.name for argument in overload("row_stats")._schema.arguments]
    same_bits(list(run(**dict(zip(names, given, strict=True)))), list(run(*given)))
    strings = ["x"] * len(given[-1])
    for wrong in (given[:-1], (*given, 1), (None, *given[1:]), ("x", *given[1:]), (*given[:-1], strings)):
        with pytest.raises(Exception) as theirs:
            overload("row_stats")(*wrong)
        with pytest.raises(type(theirs.value)):
            run(*wrong)
    seeds = torch.arange(2)
    with pytest.raises((RuntimeError, TypeError, OverflowError)):  # which of them is torch's affair
        direct.call("uniform_samples", overload("uniform_samples"))(seeds, None, 2**70, 3, 0)
    same_bits([sk.uniform_samples(seeds, 2**63 - 1, 3)], [sk.uniform_samples(seeds, 2**63 - 1, 3, backend="reference")])


def test_calls_leave_nothing_behind() -> None:
    given = chain()
    given["draft_stats"] = sk.row_stats(given["draft_logits"])
    before = [sys.getrefcount(t) for t in tensors(given)]
    kept = [sk.verify_chain(**given) for _ in range(100)]
    assert [sys.getrefcount(t) for t in tensors(given)] == before
    assert {sys.getrefcount(out.tokens) for out in kept} == {2}
    pointers = {out.tokens.data_ptr() for out in kept}
    assert len(pointers) == 100  # outputs of their own


def test_other_threads_run_meanwhile() -> None:
    """A long op does not hold the interpreter's lock: another thread gets on while it runs."""
    seeds = torch.arange(64)  # integers alone: what torch is asked of other tensors lets go of the lock too
    done, kept, ticks = threading.Event(), [], 0

    def work() -> None:
        for _ in range(3):
            kept.append(sk.uniform_samples(seeds, 0, 1 << 16))
        done.set()

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only an op that lets go of the lock lets this thread run
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            ticks += 1
            done.wait(1e-4)
        thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert ticks > 1


def test_what_fits_at_one_look_passes_the_checks() -> None:
    """`all_fit` may say no to anything, and yes only where `check_tensors` finds nothing wrong."""
    like = logits()
    values: list[Any] = [
        like, like[:, :2], like.double(), like.to(torch.bfloat16), like.transpose(1, 2), like.transpose(0, 1),
        like[..., ::2], torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2).T, torch.zeros(2, 3, dtype=torch.int16), torch.zeros(2, 3, device="meta"), torch.zeros(()),
        torch.zeros(0), torch.zeros(2, 3, 0), torch.nn.Parameter(torch.zeros(2, 3)), None, 3, [[1, 2, 3]] * 2, "x",
        torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3, dtype=torch.complex64),
    ]  # fmt: skip
    shapes = [(2, 3, 30), (2, 2, 30), (2, 3), (3, 2), (), (0,), (2, 3, 0), (2, 3, 15)]
    dtypes = [checks.FLOAT32, checks.INT64, checks.INT32, checks.ID_DTYPES, checks.LOGIT_DTYPES]
    yes = 0
    for value, shape, kinds, last in itertools.product(values, shapes, dtypes, ("vocab", "n")):
        names = tuple("abc"[: len(shape)])[:-1] + (last,) if shape else ("none",)
        expected = ("x", value, kinds, names, shape)
        for given in ((expected,), (("y", like, checks.FLOAT32, ("a", "b", "c"), (2, 3, 30)), expected)):
            try:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(direct, "_all_fit", None)
                    _common.check_tensors("op", like, list(given))
                passes = True
            except (TypeError, ValueError):
                passes = False
            fits = direct.all_fit(like, list(given))
            assert passes or not fits, (value, shape, kinds, names)
            yes += fits
    assert yes > 20


class Failing(ctypes.Structure):
    """A `DirectOp` of csrc/direct_ops.h whose kernel fails after it has begun."""

    RUN = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char * 512))
    _fields_ = [
        ("num_arguments", ctypes.c_int32), ("num_results", ctypes.c_int32), ("kinds", ctypes.c_void_p), ("run", RUN),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "error"), [("std::bad_alloc", torch.OutOfMemoryError), ("no more of it", RuntimeError)]
)
def test_a_kernel_that_had_begun_does_not_run_again(words: str, error: type[Exception]) -> None:
    """It may have written to what it was given: counted tokens would be counted twice."""
    from specdec_kernels import _host

    def fail(arguments: int, results: int, said: Any) -> int:
        said.contents.value = words.encode()
        return 2  # DirectEnd::kFailed

    find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
    address = ctypes.cast(native._symbols["CPU"].specdec_direct_op, find)(b"count_tokens_")
    real = Failing.from_address(address)
    failing = Failing(real.num_arguments, real.num_results, real.kinds, Failing.RUN(fail))
    table = find(lambda name: ctypes.addressof(failing))
    asked: list[Any] = []
    run = _host.direct(lambda *given: asked.append(given), "count_tokens_", cpu=direct._address(table), cuda=0)
    ids = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(error, match=words):
        run(ids, ids.clone(), ids[:, 0].contiguous(), ids.clone(), None)
    assert asked == []


def test_another_exchange_of_tensors_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capsule that has another name, or that lacks the function."""
    from specdec_kernels import _host

    class Table(ctypes.Structure):  # of DLPack: version, predecessor, and five functions
        _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("functions", ctypes.c_void_p * 6)]

    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    empty = Table(1, 3)
    before = dict(direct._calls)
    for name in (b"another", b"dlpack_exchange_api"):
        capsule = make(ctypes.addressof(empty), name, None)
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
        direct.load(OPS, native._symbols)
        assert direct._calls == before
    assert _host.all_fit is direct._all_fit
