"""Drafts of which some tokens are rejected, and how many rows a launch reads of them."""

from __future__ import annotations

from typing import Any

import torch

import specdec_kernels as sk
from bench.gpu import model
from python_tests import emulated
from python_tests.ops import chains

VOCAB, BATCH, K = 9000, 6, 4
ROW = 2 * VOCAB  # bytes


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(seed: int = 0, batch: int = BATCH, **given: Any) -> chains.Arguments:
    """Drafts of which some tokens are rejected."""
    usual = {"kind": "stats", "dtype": torch.bfloat16, "spread": 6.0 if given.get("kind") == "one_hot" else 3.0}
    arguments = chains.make(rng(seed), batch, K, VOCAB, **{**usual, **given})
    arguments["draft_tokens"][::2, :2] = arguments["target_logits"][::2, :2].argmax(-1)
    return arguments


def rows_read(arguments: chains.Arguments, strategy: str) -> tuple[float, sk.VerifyOutput]:
    """How many target rows' bytes the first launch loads, and the outcome."""
    outputs = []
    with emulated.running(strategy):
        scan, *_ = model.counted(lambda: outputs.append(sk.verify_chain(**arguments, backend=emulated.NAME)))
    assert scan.kernel == "scan_kernel"
    return scan.counts["bytes"] / ROW, outputs[0]
