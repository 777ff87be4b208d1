"""A pytest plug-in: what FlashInfer's and SGLang's tests import is this package's modules of their signatures."""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any

import torch

from specdec_kernels.integrations import flashinfer, flashinfer_pipeline, sglang


def module(name: str, **names: Any) -> None:
    """A module, and the packages that it stands in, that hold these names."""
    package = ""
    for part in name.split("."):
        package = f"{package}.{part}".removeprefix(".")
        made = sys.modules.setdefault(package, types.ModuleType(package))
        made.__path__ = []
    vars(made).update(names)


def nothing(*_: Any, **__: Any) -> None:
    """In the place of what registers a test, or waits for a GPU."""


samplers = {name: getattr(flashinfer, name) for name in flashinfer.__all__}
kernels = {name: getattr(sglang, name) for name in sglang.__all__}
module("flashinfer", sampling=flashinfer, logits_processor=flashinfer_pipeline, **samplers)
sys.modules["flashinfer.sampling"] = flashinfer
sys.modules["flashinfer.logits_processor"] = flashinfer_pipeline
# read while tests are collected that are left out: those of a sampler that no release has
vars(flashinfer).update({f"HY3_SAMPLER_SOFTMAX_{when}": when for when in ("NONE", "BEFORE_TOP_K", "AFTER_TOP_K")})
module("sgl_kernel", sampling=flashinfer, **samplers, **kernels)
for name in ("reject_sampling", "sampling", "tree", "tree_sampling"):
    module(f"sglang.kernels.ops.speculative.{name}", **kernels)
for name, used in (("draft", "DraftBlockResult"), ("verify", "accept_draft_tokens")):  # by a test that is left out
    module(f"sglang.srt.speculative.dspark_components.dspark_{name}", **{used: nothing})
module("sglang.test.ci.ci_register", register_amd_ci=nothing, register_cpu_ci=nothing, register_cuda_ci=nothing)
module("sglang.test.test_utils", CustomTestCase=unittest.TestCase)
torch.cuda.synchronize = nothing
