"""Who is compared: one row per provider. It offers a builder per op; a builder turns a case into a call, or refuses it.

A call takes the case's inputs and does all the work: raw logits to tokens and counts, with its random numbers. Verify
calls return ``(tokens [batch, num_draft + 1], num_accepted [batch])`` (for a tree ``[batch, max_depth + 1]``); entries
after the last emitted token are −1, except for a peer that leaves them undefined.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import specdec_kernels as sk

from ..gpu import strategy
from ..inputs import Case
from ..timing import Call
from . import beside, compiled, eager, eager_tree, flashinfer, hf, own, sglang, vllm

Builder = Callable[[Case], Call | None]


@dataclass(frozen=True)
class Provider:
    """`why_missing` takes an op and a device; `peer`: whether a target's "best peer" may be this one; `gpu`: whether it
    needs one.
    """

    builders: Mapping[str, Builder]
    why_missing: Callable[[str, str], str | None]
    peer: bool = False
    gpu: bool = False


def _always(op: str, device: str) -> None:
    return None


def _backend(name: str) -> Callable[[str, str], str | None]:
    def why_missing(op: str, device: str) -> str | None:
        reason = sk.backends(device)[op].get(name, f"there is no backend {name}")
        return None if reason == "yes" else reason

    return why_missing


def _triton(op: str, device: str) -> str | None:
    return _backend("triton")(op, device) if torch.device(device).type == "cuda" else "interpreted: no time to measure"


def _compiler(op: str, device: str) -> str | None:
    return None if shutil.which("g++") or shutil.which("clang++") else "torch.compile needs a C++ compiler"


def _package(name: str) -> Callable[[str, str], str | None]:
    return lambda op, device: None if importlib.util.find_spec(name) else f"{name} is not installed"


def _gpu_peer(*modules: str) -> Callable[[str, str], str | None]:
    """Import such a peer to see whether it works: an installation often lacks what it was built against."""

    @functools.cache
    def why_missing() -> str | None:
        beside.mount()
        package = modules[0].split(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        reasons = []
        for module in modules:
            try:
                if not isinstance(importlib.import_module(module), beside.MadeUp):
                    return None
                reasons.append(f"{module} is not in {beside.FOLDER.name}")
            except Exception as error:  # whatever its import runs into
                reasons.append(f"{module} cannot be imported: {type(error).__name__}: {error}")
        return "; ".join(reasons)

    return lambda op, device: why_missing() if torch.device(device).type == "cuda" else "it needs a GPU"


def _lossless(builders: Mapping[str, Builder], matches: bool = False) -> Mapping[str, Builder]:
    """Builders that refuse to verify against any law but the target's, and refuse the match rule unless the peer has
    it. They are timed from logits.
    """

    def refusing(builder: Builder) -> Builder:
        def build(case: Case) -> Call | None:
            refused = case.target_law is not None or case.of_probs or (case.acceptance == "match" and not matches)
            return None if refused else builder(case)

        return build

    return {op: refusing(builder) for op, builder in builders.items()}


PROVIDERS: dict[str, Provider] = {
    "cuda": Provider(own.builders("cuda"), _backend("cuda"), gpu=True),
    "cuda, uniforms given": Provider(own.builders("cuda", uniforms=False), _backend("cuda"), gpu=True),
    "cuda, no draft_stats": Provider(own.builders("cuda", draft_stats=False), _backend("cuda"), gpu=True),
    **{f"cuda, {name}": Provider(own.with_strategy(name), _backend("cuda"), gpu=True) for name in strategy.LAYOUTS},
    **{
        f"cuda, {name}, no overlap": Provider(own.with_strategy(name, overlap=False), _backend("cuda"), gpu=True)
        for name in strategy.LAYOUTS
    },
    "triton": Provider(own.builders("triton"), _triton, gpu=True),
    "cpu": Provider(own.builders("cpu"), _backend("cpu")),
    "cpu, no draft_stats": Provider(own.builders("cpu", draft_stats=False), _backend("cpu")),
    "reference": Provider(own.builders("reference"), _backend("reference")),
    "eager": Provider({**eager.BUILDERS, "verify_tree": eager_tree.verify_tree}, _always, peer=True),
    "eager, top-p in top-k": Provider(eager.NARROW_BUILDERS, _always),
    "eager, kept draft_probs": Provider(eager.KEPT_BUILDERS, _always),
    "compile": Provider(compiled.BUILDERS, _compiler, peer=True),
    "transformers": Provider(_lossless(hf.BUILDERS, matches=True), _package("transformers"), peer=True),
    "flashinfer": Provider(_lossless(flashinfer.BUILDERS), _gpu_peer(flashinfer.MODULE), peer=True, gpu=True),
    "vllm V1": Provider(_lossless(vllm.V1_BUILDERS), _gpu_peer(vllm.V1), peer=True, gpu=True),
    "vllm V2": Provider(_lossless(vllm.V2_BUILDERS), _gpu_peer(vllm.V2), peer=True, gpu=True),
    "sglang": Provider(_lossless(sglang.BUILDERS), _gpu_peer(*sglang.MODULES), peer=True, gpu=True),
}
OWN = ("cuda", "triton", "cpu", "reference")
"""This package's backends, best first: the first one measured is what the others' times are divided by."""
