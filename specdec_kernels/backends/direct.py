"""Eager calls of the compiled ops past torch's dispatcher, which costs more than a small op does.

All that such a call needs from torch is its exchange of tensors (DLPack's C exchange API), an allocation (its stable
ABI) and the one function that makes a Python tensor. The dispatcher is still called where a mode, a transform, the
profiler or the tracer is active, where an argument is not a plain tensor, is differentiated or is a view that negates,
where something is wrong with the arguments, and always where torch lacks one of the three.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_calls: dict[str, Callable[..., Any]] = {}
_all_fit: Callable[..., bool] | None = None


def load(ops: Iterable[str], libraries: Mapping[str, ctypes.CDLL]) -> None:
    """Let eager calls of `ops` take this way, to `libraries` by their dispatch keys."""
    global _all_fit
    try:
        from .. import _host

        python = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
        known = _host.set_torch(
            torch.Tensor,
            torch.Tensor.__dlpack_c_exchange_api__,
            wrap=_address(python["_Z16THPVariable_WrapRKN2at10TensorBaseE"]),
            free=_address(next(iter(libraries.values())).aoti_torch_delete_tensor_object),
            busy=[
                torch._C._len_torch_dispatch_stack,
                torch._C._len_torch_function_stack,
                torch._C._functorch.peek_interpreter_stack,
                torch._C._get_tracing_state,
                torch._C._autograd._profiler_enabled,
            ],
            grad_enabled=torch.is_grad_enabled,
            out_of_memory=torch.OutOfMemoryError,
            dtypes=[  # as DirectTensor::DType
                torch.float32,
                torch.bfloat16,
                torch.float16,
                torch.int64,
                torch.int32,
                torch.float64,
            ],
        )
    except (ImportError, OSError, AttributeError, StopIteration, ValueError):  # ValueError: a capsule of another name
        return
    if known:
        _all_fit = _host.all_fit
        tables = {key: _address(library.specdec_direct_op) for key, library in libraries.items()}
        for op in ops:
            overload = getattr(torch.ops.specdec, op).default
            _calls[op] = _host.direct(overload, op, cpu=tables.get("CPU", 0), cuda=tables.get("CUDA", 0))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def call(op: str, overload: Any) -> Any:
    """What to call for `overload`, the default one of `op`. An output that was not asked for may come as None."""
    return overload if torch.compiler.is_dynamo_compiling() else _calls.get(op, overload)


def all_fit(like: Tensor, expected: list[Any]) -> bool:
    """Whether all tensors surely pass `ops._common.check_tensors`; False where a quick look cannot tell."""
    return _all_fit is not None and not torch.compiler.is_dynamo_compiling() and _all_fit(like, expected)
