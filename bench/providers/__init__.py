"""Who is compared: one row a provider. It offers a builder per op; a builder turns a case into a call, or refuses it.

A call takes the case's inputs and does the whole work: raw logits to tokens and counts, with its random numbers. Verify
calls return ``(tokens [batch, num_draft + 1] padded with −1, num_accepted [batch])``.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import specdec_kernels as sk

from ..inputs import Case
from ..timing import Call
from . import compiled, eager, hf, own

Builder = Callable[[Case], Call | None]


@dataclass(frozen=True)
class Provider:
    """`peer`: whether a target's "best peer" may be this one."""

    builders: Mapping[str, Builder]
    why_missing: Callable[[str], str | None]
    peer: bool = False


def _always(op: str) -> None:
    return None


def _backend(name: str) -> Callable[[str], str | None]:
    def why_missing(op: str) -> str | None:
        reason = sk.backends()[op][name]
        return None if reason == "yes" else reason

    return why_missing


def _compiler(op: str) -> str | None:
    return None if shutil.which("g++") or shutil.which("clang++") else "torch.compile needs a C++ compiler"


def _package(name: str) -> Callable[[str], str | None]:
    return lambda op: None if importlib.util.find_spec(name) else f"{name} is not installed"


PROVIDERS: dict[str, Provider] = {
    "cpu": Provider(own.builders("cpu"), _backend("cpu")),
    "cpu, no draft_stats": Provider(own.builders("cpu", draft_stats=False), _backend("cpu")),
    "reference": Provider(own.builders("reference"), _backend("reference")),
    "eager": Provider(eager.BUILDERS, _always, peer=True),
    "eager, top-p in top-k": Provider(eager.NARROW_BUILDERS, _always),
    "eager, kept draft_probs": Provider(eager.KEPT_BUILDERS, _always),
    "compile": Provider(compiled.BUILDERS, _compiler, peer=True),
    "transformers": Provider(hf.BUILDERS, _package("transformers"), peer=True),
}
OWN = ("cpu", "reference")
"""This package's backends, best first: the first one measured is what the others' times are divided by."""
