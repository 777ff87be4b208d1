"""Wrong values for each kind of argument, and how a function refuses them.

A public function's signature is walked: in an otherwise good call, each parameter is given values that its annotation
excludes. They must be refused by TypeError or ValueError, in a message that begins with the function's name and
contains the parameter's.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Calls = dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]]
"""Of each function, or of a function-variant: itself, and what makes the arguments of a good call."""

PLAIN = {
    "str": ["no such name", b"token"],
    "int": [3, -(2**70), 2**70],
    "float": [2.5, float("nan"), float("inf")],
    "bool": [True],
    "None": [None],
    "list": [["token"], [[]], (0.5,), {}],
    "other": [object(), torch.float32, print],
}
SEQUENCES = ("Sequence", "Iterable", "list", "tuple", "NDArray")


def excluded(annotation: str) -> list[Any]:
    """Values of no type that `annotation` names; numbers outside every range, and strings that are not valid names."""
    kinds = set(re.findall(r"\w+", annotation))
    if "ArrayLike" in kinds:
        kinds |= {"float", "list"}
    out = list(PLAIN["other"])
    if "Callable" in kinds:
        out.pop()
    out += PLAIN["str"]
    if not kinds & {"int", "float"}:
        out += PLAIN["int"][:1]
    if "int" in kinds:
        out += PLAIN["int"][1:]
    out += PLAIN["float"][1:2] if "float" in kinds else PLAIN["float"]
    for kind in ("bool", "None"):
        if kind not in kinds:
            out += PLAIN[kind]
    if not kinds & set(SEQUENCES):
        out += PLAIN["list"]
    return out


def spoilt(x: Tensor) -> Iterator[Tensor]:
    """Tensors of another dtype or layout than `x`; no function takes any of them."""
    yield x.to(torch.complex64)
    yield x.to(torch.complex64).conj()
    yield x.to(torch.int16)
    yield x.to_sparse()
    if x.dim() == 2:
        yield x.to_sparse_csr()
    yield torch.quantize_per_tensor(torch.zeros(x.shape), 0.1, 0, torch.qint8)


def elsewhere(x: Tensor) -> Iterator[Tensor]:
    """Of another shape or device than `x`: wrong, or at odds with another argument, unless the function takes any."""
    yield x.to("meta")
    yield x[None, None, None]
    yield x.reshape(-1)[:0].reshape(0, 0, 0, 0)


def names_in_messages(call: Callable[..., Any]) -> str:
    """A pattern for what a message may begin with: the name of a function, or of a method or its class."""
    owner = getattr(call, "__self__", None)
    names = (
        [call.__qualname__.partition(".")[0]]
        if owner is None
        else [(owner if inspect.isclass(owner) else type(owner)).__name__, call.__name__]
    )
    return rf"(\w+\.)*({'|'.join(names)}): "


def parameters(calls: Calls) -> list[Any]:
    """Each parameter once, in the first good call that passes it, or else in the first call."""
    found: dict[tuple[str, str], str] = {}
    names = {key: set(make()) for key, (_, make) in calls.items()}
    for key, (call, _) in calls.items():
        given = names[key]
        for parameter, of in inspect.signature(call).parameters.items():
            if of.kind in (of.VAR_POSITIONAL, of.VAR_KEYWORD):
                continue
            known = found.get((key.partition("-")[0], parameter))
            if known is None or (parameter in given and parameter not in names[known]):
                found[key.partition("-")[0], parameter] = key
    return [pytest.param(key, parameter, id=f"{name}-{parameter}") for (name, parameter), key in found.items()]


TAKEN = "taken"


def complaints(
    call: Callable[..., Any],
    make: Callable[[], dict[str, Any]],
    parameter: str,
    allowed: Callable[[Any], bool],
    also: str = "",
) -> str:
    """One line for each wrong value of `parameter` that is not refused as it should be, in the name of `call` or
    `also`; values in `allowed` are accepted.
    """
    signature = inspect.signature(call).parameters[parameter]
    good = make().get(parameter, signature.default)
    wrong, other = excluded(str(signature.annotation)), []
    if isinstance(good, Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong += spoilt(good)
            other = list(elsewhere(good))
    found = [
        (value, complaint_of(call, make() | {parameter: value}, parameter, also))
        for value in wrong
        if not allowed(value)
    ]
    for value in other:
        complaint = complaint_of(call, make() | {parameter: value}, r"\w+", also)
        found.append((value, None if complaint == TAKEN else complaint))
    return "\n".join(f"{_shown(value)}: {complaint}" for value, complaint in found if complaint)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.layout} {value.dtype} {list(value.shape)} {value.device}"


def complaint_of(call: Callable[..., Any], given: dict[str, Any], parameter: str, also: str) -> str | None:
    """What is wrong with how a bad `parameter` is refused; None if nothing is."""
    try:
        call(**given)
    except (TypeError, ValueError) as error:
        text = str(error)
        named = re.search(rf"\b{parameter}\b", text) or (
            parameter in ("model", "draft_model") and "cannot be served" in text
        )
        good = re.match(names_in_messages(call) + (also and f"|{also}: "), text) and named
        return None if good else f"{type(error).__name__}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return TAKEN


def logits(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tables() -> Iterator[Calls]:
    """`GOOD` of each test file for wrong arguments."""
    for file in sorted(Path(__file__).parent.glob("test_wrong_arguments*.py")):
        good: Calls = importlib.import_module(f"python_tests.{file.stem}").GOOD
        yield good
