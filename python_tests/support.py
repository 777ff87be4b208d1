"""Backends present, and processes with another environment: what several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import specdec_kernels as sk
from specdec_kernels.backends import native

CAPABILITIES = native._CAPABILITIES


@dataclass(frozen=True)
class Backend:
    """A backend on a device; `capability` is the instruction set of the CPU kernels, None elsewhere."""

    name: str
    device: str
    capability: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.capability, self.device if self.device != "cpu" else None)))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Within: the CPU kernels run with this backend's instruction set."""
        if self.capability is None:
            yield
            return
        before = native.cpu_capability()
        limit(self.capability)
        yield
        limit(before)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_") or not hasattr(sk, op):
            raise AttributeError(op)
        return partial(getattr(sk, op), backend=self.name)

    def __call__(self, *values: Any) -> Any:
        """`values` moved to the backend's device."""
        moved = tuple(_to(v, self.device) for v in values)
        return moved[0] if len(moved) == 1 else moved


def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        # a move to the same device keeps strides; so does one to another of an expanded or strided tensor's values
        return value if value.device.type == device else value.to(device)
    if isinstance(value, sk.SamplingParams):
        fields = {f: _to(getattr(value, f), device) for f in ("temperature", "top_k", "top_p", "min_p", "min_p_first")}
        return sk.SamplingParams(**fields)
    return value.to(device) if isinstance(value, sk.TokenMap) else value


def present(op: str) -> list[Backend]:
    """Every way `op` can run here, the CPU library once for each instruction set of this machine."""
    found = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name, answer in sk.backends(device)[op].items():
            if answer == "yes" and name == "cpu":
                found += [Backend(name, device, c) for c in capabilities()]
            elif answer == "yes":
                found.append(Backend(name, device))
    return found


def capabilities() -> list[str]:
    """The instruction sets that the CPU library can really be limited to here."""
    before = native.cpu_capability()
    found = []
    for capability in CAPABILITIES:
        limit(capability)
        if native.cpu_capability() == capability:
            found.append(capability)
    limit(before)
    return found


def limit(capability: str) -> None:
    native._symbols[0].specdec_limit_cpu_capability(CAPABILITIES.index(capability))


def in_fresh_process(code: str, **environment: str) -> str:
    """Run Python `code` in a process with `environment`; its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
