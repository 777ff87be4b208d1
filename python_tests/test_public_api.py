"""The public contract: names, signatures, dataclasses and what they refuse."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import inputs
from python_tests.ops.inputs import op_tests
from python_tests.public import modules
from python_tests.support import in_fresh_process
from specdec_kernels.backends import OPS, automatic, native

LOOPS = {  # keyword-only parameters after model and input_ids
    "generate": [
        "drafter", "attention_mask", "sampling", "processors", "grammar", "seeds", "max_new_tokens",
        "num_speculative_tokens", "acceptance", "target_law", "epsilon", "delta", "eos_token_id", "stop", "streamer",
        "return_logprobs", "progress",
    ],
    **{
        loop: ["draft_model", *own, "attention_mask", "sampling", "draft_sampling", "seeds", "max_new_tokens",
               "eos_token_id"]
        for loop, own in (
            ("token_cascade", ["target_law"]), ("oracle_cascade", ["target_law"]),
            ("seq_cascade", ["alpha", "confidence"]),
        )
    },
    "bild": [
        "draft_model", "fallback", "rollback", "max_draft_tokens", "attention_mask", "max_new_tokens", "eos_token_id",
    ],
}  # fmt: skip
SIGNATURES = {op: op_tests(op).SIGNATURE for op in inputs.OPS} | {
    name: (["model", "input_ids"], keyword) for name, keyword in LOOPS.items()
}


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in sk.__all__:
        thing = getattr(sk, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name
    assert len(set(sk.__all__)) == len(sk.__all__)
    assert set(SIGNATURES) <= set(sk.__all__)
    assert sk.PLACEHOLDER_TOKEN_ID == -1


def test_what_holds_arrays_is_equal_to_itself_alone() -> None:
    """Comparing tensors or arrays has no truth value: a dataclass that compared its fields would raise."""

    def holds(kind: Any) -> bool:
        of_arrays = kind in (torch.Tensor, np.ndarray) or typing.get_origin(kind) is np.ndarray
        return of_arrays or any(holds(part) for part in typing.get_args(kind))

    compared = {
        kind.__name__
        for kind in (getattr(module, name) for module in modules() for name in module.__all__)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__eq__ is not object.__eq__
        and any(map(holds, typing.get_type_hints(kind).values()))
    }  # fmt: skip
    assert compared == {"SamplingParams"}, "which mostly holds numbers"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(sk, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert (positional, keyword) == SIGNATURES[name]
    for section in ("Parameters", "Returns", "Raises"):
        assert f"{section}\n---" in inspect.getdoc(getattr(sk, name)), section  # type: ignore[operator]


@pytest.mark.parametrize("name", OPS)
def test_ops_are_registered_with_the_dispatcher(name: str) -> None:
    overload = getattr(torch.ops.specdec, name).default
    assert torch.Tag.pt2_compliant_tag in overload.tags and overload._schema.is_mutable == name.endswith("_")


def test_status_flags() -> None:
    values = {s.name: s.value for s in sk.Status}
    names = ("NAN", "INF", "EMPTY_ROW", "BAD_TOKEN", "BAD_PARAM", "BAD_TREE", "BAD_DRAFT")
    assert values == {name: 1 << bit for bit, name in enumerate(names)}


def test_row_stats_fields_are_views_and_stack() -> None:
    stats = sk.row_stats(torch.randn(3, 9))
    for i, field in enumerate(("max", "cutoff", "log_normalizer", "normalizer", "raw_log_normalizer", "raw_entropy")):
        view = getattr(stats, field)
        assert view.shape == (3,) and view.data_ptr() == stats.values[..., i].data_ptr()
    stacked = sk.RowStats.stack([stats, stats], 1)
    assert stacked.values.shape == (3, 2, 6) and stacked.argmax.shape == stacked.status.shape == (3, 2)


def test_results_are_frozen() -> None:
    for value, field in ((sk.row_stats(torch.randn(3, 9)), "argmax"), (sk.SamplingParams(), "temperature")):
        with pytest.raises(AttributeError):
            setattr(value, field, 1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": math.inf}, ValueError, "temperature must be finite"),
        ({"temperature": math.nan}, ValueError, "temperature must be finite"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number or a \\[batch\\] tensor, got str"),
        ({"temperature": True}, TypeError, "temperature must be a number"),
        ({"temperature": None}, TypeError, "temperature must be a number"),
        ({"temperature": torch.ones(2, 2)}, TypeError, "temperature must be a number or a \\[batch\\] real tensor"),
        ({"temperature": torch.tensor(1.0)}, TypeError, "temperature must be a number or a \\[batch\\] real tensor"),
        ({"min_p": torch.ones(2).bool()}, TypeError, "min_p must be a number or a \\[batch\\] real tensor"),
        ({"top_p": torch.ones(2).cfloat()}, TypeError, "top_p must be a number or a \\[batch\\] real tensor"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer or a \\[batch\\] tensor, got float"),
        ({"top_k": torch.ones(2)}, TypeError, "top_k must be a number or a \\[batch\\] integer tensor"),
        ({"top_k": torch.ones(2).bool()}, TypeError, "top_k must be a number or a \\[batch\\] integer tensor"),
        ({"top_p": -0.5}, ValueError, "top_p must be >= 0, got -0.5"),
        ({"top_p": math.nan}, ValueError, "top_p must be >= 0, got nan"),
        ({"min_p": 1.1}, ValueError, "min_p must be in \\[0, 1\\], got 1.1"),
        ({"min_p": -0.1}, ValueError, "min_p must be in \\[0, 1\\]"),
        ({"min_p": math.nan}, ValueError, "min_p must be in \\[0, 1\\]"),
        ({"temperature": 1e39}, ValueError, "temperature must be finite"),
        ({"min_p_first": 1}, TypeError, "min_p_first must be a bool, got int"),
    ],
)
def test_sampling_params_refuse(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^SamplingParams: {message}"):
        sk.SamplingParams(**fields)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_integer_tensors_are_numbers(field: str) -> None:
    x = torch.randn(2, 9)
    whole, real = (sk.SamplingParams(**{field: torch.tensor([0, 1], dtype=t)}) for t in (torch.int64, torch.float32))
    assert torch.equal(sk.warp_probs(x, whole), sk.warp_probs(x, real))


def test_an_unloadable_library_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_C_cpu.so").write_text("not a library")
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_problems", {})
    native.load(OPS)
    reason = native.why_missing("sample", "CPU") or ""
    assert reason.startswith("_C_cpu.so does not load: ") and "file too short" in reason, "what the loader says"
    assert (native.why_missing("sample", "CUDA") or "").startswith("_C_cuda.so was not built")


@pytest.mark.skipif("CPU" not in native._symbols, reason="nothing was compiled")
def test_parts_that_were_built_from_other_sources_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They might take one argument for another."""
    monkeypatch.setattr(native, "contract", lambda: 1)
    with pytest.raises(ImportError, match=r"_C_cpu\.so was built from other sources than these: build again"):
        native.load(OPS)
    monkeypatch.setattr(native, "_FOLDER", tmp_path)  # without libraries, the host module's
    monkeypatch.setattr(native, "_problems", {})
    with pytest.raises(ImportError, match="_host was built from other sources"):
        native.load(OPS)


@pytest.mark.skipif("CPU" not in native._symbols, reason="nothing was compiled")
def test_a_host_module_with_other_structs_than_the_libraries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _host = pytest.importorskip("specdec_kernels._host")
    monkeypatch.setattr(_host, "DIRECT_LAYOUT", _host.DIRECT_LAYOUT + 1)
    with pytest.raises(ImportError, match=r"_host or _C_cpu\.so was built from other sources than these: build again"):
        native.load(OPS)


def test_a_device_without_float64_has_no_reference() -> None:
    assert {row["reference"] for row in sk.backends("mps").values()} == {"torch has no float64 on it"}
    with pytest.raises(ValueError, match="sample: tensors must be on a device that a backend runs on, got mps: torch"):
        automatic("sample", torch.device("mps"))


def test_every_call_on_such_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = importlib.import_module("specdec_kernels.backends")  # not the function of this name
    monkeypatch.setattr(backends, "_announced", set())
    monkeypatch.setattr(backends, "_routes", {})
    for _ in range(2):
        with pytest.raises(ValueError, match="torch has no float64 on it"):
            backends.routed("row_stats", torch.device("mps"))


def test_sampling_params_accept_what_is_off() -> None:
    x = torch.randn(2, 9)
    for fields in (
        {"top_k": -5}, {"top_k": 10**9}, {"top_k": 10**30}, {"top_p": 7}, {"top_p": 1e300}, {"top_p": 0}, {"min_p": 0},
    ):  # fmt: skip
        probs = sk.warp_probs(x, sk.SamplingParams(**fields), backend="reference")  # type: ignore[arg-type]
        torch.testing.assert_close(probs, sk.warp_probs(x))
    assert sk.SamplingParams(temperature=0).is_greedy and sk.SamplingParams(temperature=1e-40).is_greedy
    assert not sk.SamplingParams(temperature=2.0**-126).is_greedy


def test_a_temperature_just_below_what_float32_holds_is_greedy() -> None:
    """Rounded to float32 it would become a number that is not greedy."""
    below, flat = math.nextafter(2.0**-126, 0.0), torch.zeros(1, 1, 8)
    for temperature in (below, torch.tensor([below], dtype=torch.float64)):
        params = sk.SamplingParams(temperature)  # type: ignore[arg-type]
        assert sk.sample(flat, params, uniform_samples=torch.tensor([[0.9]])).token.tolist() == [[0]]


def test_sampling_params_are_equal_where_their_fields_are() -> None:
    one, other = (sk.SamplingParams(torch.tensor([1.0, 2.0]), top_k=9) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one in [sk.SamplingParams(), other]
    assert one != sk.SamplingParams(torch.tensor([1.0, 3.0]), top_k=9) and one != sk.SamplingParams(1.0, top_k=9)
    assert sk.SamplingParams() == sk.SamplingParams(1.0) != sk.SamplingParams(0.5) and one != "greedy"


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: sk.SamplingParams(10**400), ValueError, "SamplingParams: temperature must fit in float64"),
        (lambda: sk.laws.Chow(10**400), ValueError, "Chow: alpha must be finite"),
        (lambda: sk.verify_chain(torch.zeros(1, 1, 4), torch.zeros(1, 0).long(), target_law=sk.laws.TargetLaw(1)),
         TypeError, "verify_chain: target_law must be"),
        (lambda: sk.laws.Lossy(0.7, beta=0.29), ValueError, "Lossy: beta must be in .1 - alpha"),
        (lambda: sk.DraftTree.from_parents([[-1, 0], 5]), TypeError, "DraftTree: parents must be a list of ints or"),
        (lambda: sk.DraftTree.from_parents([[]]), ValueError, "DraftTree: parents must hold a root"),
        (lambda: sk.Processors(stop_token_ids=[[1], [2]], min_tokens=torch.tensor([1, 2, 3]),
                               token_counts=sk.TokenCounts(torch.zeros(3, 1, dtype=torch.int64), 1)),
         ValueError, "Processors: min_tokens and stop_token_ids must agree on the number of sequences, got 3 and 2"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(made: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        made()


def test_numbers_that_round() -> None:
    assert sk.laws.Lossy(0.7, beta=0.3).flat().beta == 0.3
    given = torch.tensor([3, 1, 2])
    token_map = sk.TokenMap(given)
    given[0] = 7
    assert token_map.draft_to_target.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 1], TypeError, "draft_to_target must be an int32 or int64 tensor, got list"),
        (torch.tensor([0.0, 1.0]), TypeError, "draft_to_target must be an int32 or int64 tensor, got torch.float32"),
        (torch.tensor([[0, 1]]), ValueError, "draft_to_target must be \\[vocab_draft >= 2\\], got \\[1, 2\\]"),
        (torch.tensor([3]), ValueError, "draft_to_target must be \\[vocab_draft >= 2\\], got \\[1\\]"),
        (torch.tensor([3, -1]), ValueError, "draft_to_target must hold ids >= 0, got -1"),
        (torch.tensor([3, 1, 3]), ValueError, "draft_to_target must hold distinct ids"),
    ],
)
def test_token_map_refuses(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^TokenMap: {message}"):
        sk.TokenMap(ids)


def test_token_map_holds_its_inverse() -> None:
    ids = torch.tensor([4, 0, 7], dtype=torch.int32)
    mapped = sk.TokenMap(ids)
    assert len(mapped) == 3 and mapped.max_id == 7 and mapped.draft_to_target.tolist() == [4, 0, 7]
    assert mapped.target_to_draft.tolist() == [1, -1, -1, -1, 0, -1, -1, 2]


def test_backends_table() -> None:
    table = sk.backends()
    assert set(table) == set(inputs.OPS)
    for op, row in table.items():
        assert row["reference"] == "yes", op
        assert all(isinstance(reason, str) and reason for reason in row.values())
    text = str(table)
    assert all(op in text for op in OPS) and all(name in text for name in table["sample"])
    for name, answer in table["sample"].items():
        assert answer == "yes" or answer in text, f"the reason why {name} cannot run is printed"


def test_another_device_takes_the_reference() -> None:
    """Tensors without data run through the fake; nothing is read."""
    out = sk.verify_chain(
        torch.empty(4, 3, 9, device="meta"), torch.empty(4, 2, dtype=torch.int64, device="meta"),
        uniform_samples=torch.empty(4, 3, device="meta"),
    )  # fmt: skip
    assert out.tokens.shape == (4, 3) and out.tokens.device.type == "meta" and out.status.dtype == torch.int32


def test_an_import_touches_nothing_it_should_not() -> None:
    """No CUDA context, no random state consumed, no transformers until a loop is asked for."""
    code = """
import sys, torch
state = torch.get_rng_state()
import specdec_kernels as sk
assert torch.equal(state, torch.get_rng_state()), "the global generator moved"
assert not torch.cuda.is_initialized()
sk.verify_chain(torch.zeros(2, 2, 5), torch.zeros(2, 1, dtype=torch.int64), uniform_samples=torch.zeros(2, 2))
sk.sample(torch.zeros(2, 5), uniform_samples=sk.uniform_samples(torch.arange(2), 0, 1)[:, 0].contiguous())
assert torch.equal(state, torch.get_rng_state()), "an op moved the global generator"
print("transformers" in sys.modules)
"""
    assert in_fresh_process(code).strip() == "False"
