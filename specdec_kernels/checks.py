"""Checks of arguments, and the one form of their messages: ``function: argument must be …, got …``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOAT32, INT32, INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
UNIFORM_DTYPES = (torch.float64, torch.float32)
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int64, torch.int32)
MAX_VOCAB = 1 << 30  # ids are int32 inside kernels
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(
    op: str, argument: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device | None
) -> None:
    """TypeError unless a strided tensor of one of `dtypes`; ValueError unless on `device`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {argument} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {argument} must be {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {argument} must be a strided tensor, got {value.layout}")
    if device is not None and value.device != device:
        raise ValueError(f"{op}: {argument} must be on {device}, got {value.device}")


def describe(value: object) -> str:
    """A tensor as its shape, anything else as its type."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def shape_error(op: str, argument: str, expected: str, got: object) -> ValueError:
    """``op: argument must be expected, got …``, the one form of message."""
    return ValueError(f"{op}: {argument} must be {expected}, got {describe(got)}")


def check_given(
    op: str, argument: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device,
    names: tuple[str, ...], shape: tuple[int, ...],
) -> None:  # fmt: skip
    """TypeError or ValueError unless of one of `dtypes`, on `device` and of exactly `shape`, whose dimensions have
    `names`.
    """
    if (
        type(value) is Tensor
        and value.shape == shape
        and value.dtype in dtypes
        and value.device == device
        and value.layout is torch.strided
    ):
        return
    check_tensor(op, argument, value, dtypes, device)
    assert isinstance(value, Tensor)
    check_shape(op, argument, value, names, shape)


def check_shape(op: str, argument: str, value: Tensor, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """ValueError that names every dimension unless `value` has exactly `shape`."""
    if tuple(value.shape) != shape:
        expected = ", ".join(f"{n}={s}" for n, s in zip(names, shape, strict=True))
        raise shape_error(op, argument, f"[{expected}]", value)


def check_contiguous_rows(op: str, argument: str, value: Tensor) -> None:
    """ValueError unless contiguous in the last dimension."""
    if not value.is_contiguous() and value.stride(-1) != 1:
        raise ValueError(f"{op}: {argument} must be contiguous in its last dimension, got strides {value.stride()}")


def contiguous_rows(rows: Tensor) -> Tensor:
    """`rows`, copied only where their ids lie apart."""
    return rows if rows.dim() == 0 or rows.stride(-1) == 1 else rows.contiguous()


def check_logits(
    op: str, argument: str, value: object, device: torch.device | None = None, least: int = 2,
    dtypes: tuple[torch.dtype, ...] = LOGIT_DTYPES,
) -> torch.Size:  # fmt: skip
    """Dtype, device, a vocabulary of at least so many ids and a contiguous last dimension; the shape."""
    if (
        type(value) is not Tensor
        or value.dtype not in dtypes
        or value.layout is not torch.strided
        or (device is not None and value.device != device)
    ):
        check_tensor(op, argument, value, dtypes, device)
    assert isinstance(value, Tensor)
    shape = value.shape
    if not shape or not least <= shape[-1] <= MAX_VOCAB:
        raise shape_error(op, argument, f"[..., vocab] with {least} <= vocab <= {MAX_VOCAB}", value)
    check_contiguous_rows(op, argument, value)
    return shape


def check_id_tensor(caller: str, name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """TypeError unless a strided tensor of one of the integer `dtypes`, in words for those who hold ids."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes or value.layout is not torch.strided:
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = str(value.dtype if value.layout is torch.strided else value.layout)
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{caller}: {name} must be an {names} tensor, got {got}")


def items(value: Any) -> list[Any]:
    """What a sequence or an array holds; a text, a 0-d array and whatever else is a lone item."""
    alone = isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    return [value] if alone else list(value)


def integer_kind(value: object) -> str:
    """What something is that should be a Python integer."""
    name = type(value).__name__
    return f"NumPy's {name} (int() converts it)" if isinstance(value, np.integer) else name


def check_int(caller: str, name: str, value: object, lowest: int, highest: int | None) -> int:
    """`value`; raises unless it is an integer in ``[lowest, highest]``; without `highest`, the 64-bit maximum."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}: {name} must be an integer, got {integer_kind(value)}")
    most = 2**63 - 1 if highest is None else highest
    if not lowest <= value <= most:
        wanted = f">= {lowest}" if highest is None and value < lowest else f"in [{lowest}, {most}]"
        raise ValueError(f"{caller}: {name} must be {wanted}, got {value}")
    return value


def check_is_number(caller: str, name: str, value: object, words: str = "a number") -> None:
    """TypeError unless `value` is an int or a float, which the message calls `words`; a bool is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{caller}: {name} must be {words}, got {type(value).__name__}")


def check_number(caller: str, name: str, value: object, lowest: float, highest: float) -> float:
    """`value`; raises unless it is a number in ``[lowest, highest]``."""
    check_is_number(caller, name, value)
    assert isinstance(value, (int, float))
    if not lowest <= value <= highest:
        raise ValueError(f"{caller}: {name} must be in [{lowest}, {highest}], got {value}")
    return value


def check_flag(caller: str, name: str, value: object) -> None:
    """TypeError unless `value` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{caller}: {name} must be a bool, got {type(value).__name__}")


def check_one_of(caller: str, name: str, value: object, names: Collection[str]) -> None:
    """ValueError unless `value` is one of these names."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{caller}: {name} must be one of {', '.join(names)}, got {value!r}")


def check_instance(caller: str, name: str, value: object, kind: type | tuple[type, ...], words: str) -> None:
    """TypeError unless `value` is of `kind`, which the message calls `words`."""
    if not isinstance(value, kind):
        raise TypeError(f"{caller}: {name} must be {words}, got {type(value).__name__}")


def check_model(caller: str, name: str, value: object) -> None:
    """TypeError unless `value` looks like a language model of transformers."""
    if not hasattr(value, "get_output_embeddings"):
        raise TypeError(f"{caller}: {name} must be a transformers model, got {type(value).__name__}")


def check_callable(caller: str, name: str, value: object) -> None:
    """TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{caller}: {name} must be callable, got {type(value).__name__}")


def check_device(caller: str, name: str, value: object) -> torch.device:
    """The device; ValueError unless `value` is one, or the name of one."""
    try:
        if isinstance(value, (str, torch.device)):
            return torch.device(value)
    except RuntimeError:
        pass
    raise ValueError(f"{caller}: {name} must be a torch.device or its name, got {value!r:.40}")


def check_path(caller: str, name: str, value: object, kind: type | tuple[type, ...] = Path) -> None:
    """TypeError unless a `Path`, or of `kind`."""
    check_instance(caller, name, value, kind, "a Path" if kind is Path else "a Path or str")


def check_sequence(
    caller: str, name: str, value: object, kind: type | tuple[type, ...], words: str, least: int = 1
) -> None:
    """Raise unless a sequence of at least `least` of `kind`, called `words`; text is no sequence, a bool no integer."""
    wrong = not isinstance(value, Sequence) or isinstance(value, (str, bytes))
    if wrong or any(not isinstance(one, kind) or isinstance(one, bool) for one in value):  # type: ignore[attr-defined]
        raise TypeError(f"{caller}: {name} must be a sequence of {words}, got {value!r:.80}")
    if len(value) < least:  # type: ignore[arg-type]
        raise ValueError(f"{caller}: {name} must be {least} or more, got {len(value)}")  # type: ignore[arg-type]


def check_mapping(caller: str, name: str, value: object, key: type, kind: type, words: str) -> None:
    """TypeError unless a mapping of `key` to `kind`, which the message calls `words`."""
    wrong = not isinstance(value, Mapping)
    if wrong or not all(isinstance(k, key) and isinstance(v, kind) for k, v in value.items()):  # type: ignore[attr-defined]
        raise TypeError(f"{caller}: {name} must be a mapping of {words}, got {value!r:.80}")


def check_array(caller: str, name: str, value: object, kind: str, words: str, width: int | None = None) -> None:
    """Raise unless a numpy array of 8-byte numbers of `kind` ("f", "i", "u") and a last dimension of `width`."""
    check_instance(caller, name, value, np.ndarray, f"an array, {words}")
    assert isinstance(value, np.ndarray)
    shaped = width is None or (value.ndim > 0 and value.shape[-1] == width)
    if value.dtype != np.dtype(f"{kind}8") or not shaped:
        raise ValueError(f"{caller}: {name} must be {words}, got {list(value.shape)} {value.dtype}")
