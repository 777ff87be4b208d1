"""Inputs that the op tests share, and the one way to check a refusal."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels as sk
from specdec_kernels import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (2, 3, 1023, 1024, 1025, 4097, 50257)
OPS = [module.name for module in pkgutil.iter_modules(ops.__path__) if hasattr(sk, module.name)]  # public functions
TRUNCATED = sk.SamplingParams(0.9, top_k=300, top_p=0.9, min_p=1e-4)
SCALARS = sk.SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.01)
PURPOSES = {"draft": 0, "accept": 1, "final": 2, "sample": 3}
SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0, 2**32, 2**32 - 1])
PARAMS = {
    "default": sk.SamplingParams(),
    "temperature": sk.SamplingParams(0.7),
    "top_k": sk.SamplingParams(1.3, top_k=5),
    "top_p": sk.SamplingParams(top_p=0.6),
    "min_p": sk.SamplingParams(1.1, min_p=0.05),
    "all": sk.SamplingParams(0.9, top_k=40, top_p=0.9, min_p=0.02),
    "min_p_first": sk.SamplingParams(0.9, top_k=40, top_p=0.9, min_p=0.02, min_p_first=True),
    "off": sk.SamplingParams(1.0, top_k=-1, top_p=0.0, min_p=0.0),
    "tiny_top_p": sk.SamplingParams(top_p=1e-6),
    "certain_min_p": sk.SamplingParams(min_p=1.0),
    "greedy": sk.SamplingParams(0.0, top_k=3),
}


def op_tests(op: str) -> ModuleType:
    """The tests of an op. Tests of all ops find there its ``SIGNATURE``, positional parameters, then keyword-only ones;
    its ``CALLS``, named arguments that it is compiled with; and, where each backend gives the same bits, its
    ``random_call`` from a generator.
    """
    return importlib.import_module(f"python_tests.ops.test_{op}")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def per_row(batch: int) -> sk.SamplingParams:
    return sk.SamplingParams(torch.linspace(0, 1.5, batch), torch.arange(batch), torch.linspace(0.5, 1, batch), 0.01)


def logits(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 2.0) -> Tensor:
    return (torch.randn(*shape, generator=rng) * spread).to(dtype)


def strided(values: Tensor) -> Tensor:
    """The same values with every leading stride enlarged and NaN between the rows."""
    room = torch.full([2 * s + 1 for s in values.shape[:-1]] + [values.shape[-1] + 5], torch.nan, device=values.device)
    view = room.to(values.dtype)[(*[slice(0, 2 * s, 2) for s in values.shape[:-1]], slice(0, values.shape[-1]))]
    view.copy_(values)
    assert values[..., 0].numel() == 1 or not view.is_contiguous()
    return view


def uniforms(rng: torch.Generator, *shape: int) -> Tensor:
    """On the lattice of production uniforms."""
    return torch.rand(shape, generator=rng, dtype=torch.float64)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside arguments or a result."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [t for f in fields(value) if not f.name.startswith("_") for t in tensors(getattr(value, f.name))]
    if isinstance(value, sk.TokenCounts):
        value = vars(value)
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def outcome(call: Callable[..., Any], **arguments: Any) -> list[Tensor]:
    """What a call gives, then what becomes of the tensors among its arguments, which are copied for it."""
    given = copy.deepcopy(arguments)
    return [*tensors(call(**given)), *tensors(given)]


class Widest(TorchDispatchMode):
    """How many elements the largest tensor had that torch made within."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.most = max([self.most, *(t.numel() for t in tensors(out))])
        return out


def same_bits(a: Any, b: Any) -> None:
    """Every tensor of two results is equal bit by bit (NaN equal to NaN)."""
    first, second = tensors(a), tensors(b)
    assert len(first) == len(second) > 0
    for x, y in zip(first, second, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if not torch.equal(x, y):  # sooner said; it takes NaN for unequal
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def refuses(
    call: Callable[..., Any], good: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    """`call` refuses `good` with `change` by `error` and `message`, and leaves its inputs as they were."""
    arguments = {**good, **change}
    before = [t.clone() for t in tensors(arguments) if t.device.type != "meta"]
    with pytest.raises(error, match=f"^{re.escape(message)}" if not message.startswith("^") else message):
        call(**arguments)
    for was, now in zip(before, [t for t in tensors(arguments) if t.device.type != "meta"], strict=True):
        torch.testing.assert_close(was, now, rtol=0, atol=0, equal_nan=True)
