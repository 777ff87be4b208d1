"""Checks of arguments and the one form of what they say: ``function: argument must be …, got …``."""

from __future__ import annotations

import torch
from torch import Tensor

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


def check_integers(caller: str, name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """TypeError unless a strided tensor of one of the integer `dtypes`, in words for those who hold ids."""
    if not isinstance(value, Tensor) or value.dtype not in dtypes or value.layout is not torch.strided:
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = str(value.dtype if value.layout is torch.strided else value.layout)
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{caller}: {name} must be an {names} tensor, got {got}")


def check_int(caller: str, name: str, value: object, lowest: int, highest: int | None) -> int:
    """`value`; raises unless it is an integer in ``[lowest, highest]``; None: 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}: {name} must be an integer, got {type(value).__name__}")
    if highest is None and lowest <= value:
        highest = 2**63 - 1
    if highest is None or not lowest <= value <= highest:
        wanted = f">= {lowest}" if highest is None else f"in [{lowest}, {highest}]"
        raise ValueError(f"{caller}: {name} must be {wanted}, got {value}")
    return value


def check_number(caller: str, name: str, value: object, lowest: float, highest: float) -> float:
    """`value`; raises unless it is a number in ``[lowest, highest]``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{caller}: {name} must be a number, got {type(value).__name__}")
    if not lowest <= value <= highest:
        raise ValueError(f"{caller}: {name} must be in [{lowest}, {highest}], got {value}")
    return value


def check_flag(caller: str, name: str, value: object) -> None:
    """TypeError unless `value` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{caller}: {name} must be a bool, got {type(value).__name__}")


def check_choice(caller: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless `value` is one of a few names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{caller}: {name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_instance(caller: str, name: str, value: object, kind: type | tuple[type, ...], words: str) -> None:
    """TypeError unless `value` is of `kind`, in words for it."""
    if not isinstance(value, kind):
        raise TypeError(f"{caller}: {name} must be {words}, got {type(value).__name__}")
