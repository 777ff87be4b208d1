"""Calls of several tiles, with ties, rows in which more ids compete than are listed, and all outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import specdec_kernels as sk
from python_tests.ops import chains, trees
from python_tests.ops.inputs import TRUNCATED, logits, uniforms
from python_tests.ops.processing import of_any_kind
from specdec_kernels import laws
from specdec_kernels.laws import TargetLaw
from specdec_kernels.ops.arguments import ACCEPTANCES


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def long_chain(acceptance: str, law: TargetLaw | None = None, **more: Any) -> chains.Arguments:
    made = chains.make(
        rng(),
        3,
        3,
        5200,
        acceptance=acceptance,
        dtype=torch.bfloat16,
        params=TRUNCATED,
        draft_params=TRUNCATED,
        law=law,
    )
    return {**made, **more}


def wide_tree(acceptance: str, law: TargetLaw | None = None) -> trees.Arguments:
    return trees.make(
        17, 3, 7, 5200, acceptance=acceptance, dtype=torch.bfloat16, params=TRUNCATED, draft_params=TRUNCATED, law=law
    )


def processed(n: int | None, vocab: int) -> dict[str, Any]:
    """Processors for three sequences of `n` rows."""
    return {"processors": of_any_kind(rng(), 3, (3,) if n is None else (3, n), vocab)}


WIDE: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "row_stats-flat": lambda: (
        sk.row_stats, {"logits": logits(rng(), 2, 3, 5200, spread=0.01), "params": sk.SamplingParams(top_p=0.9)},
    ),
    "row_stats-ties": lambda: (sk.row_stats, {"logits": logits(rng(), 2, 3, 3100).round(), "params": TRUNCATED}),
    "warp_probs-wide": lambda: (sk.warp_probs, {"logits": logits(rng(), 3, 3100), "params": TRUNCATED}),
    "mask_logits_-wide": lambda: (sk.mask_logits_, {"logits": logits(rng(), 3, 3100).half(), "params": TRUNCATED}),
    "sample-wide": lambda: (
        sk.sample, {"logits": logits(rng(), 3, 2, 3100), "uniform_samples": uniforms(rng(), 3, 2), "params": TRUNCATED},
    ),
    "sample-several": lambda: (
        sk.sample, {"logits": logits(rng(), 3, 3100), "noise_keys": torch.arange(3), "num_samples": 70},
    ),
    **{
        f"verify_chain-{acceptance}-wide": lambda acceptance=acceptance: (
            sk.verify_chain, long_chain(acceptance, return_acceptance=acceptance == "block"),
        )
        for acceptance in ACCEPTANCES
    },
    **{
        f"verify_chain-{type(law).__name__}-wide": lambda law=law, acceptance=acceptance: (
            sk.verify_chain, long_chain(acceptance, law),
        )
        for law, acceptance in (
            (laws.Lossy(0.3, beta="exact"), "token"), (laws.Opt(0.3, bonus="cascade"), "block"),
            (laws.TokenV1(0.1), "block"), (laws.TokenV3(0.7, bonus="cascade"), "token"),
            (laws.BiLD(1.0), "token"), (laws.BiLD(1.0, distance="argmax"), "block"),
        )
    },
    **{
        f"verify_tree-{acceptance}-wide": lambda acceptance=acceptance: (sk.verify_tree, wide_tree(acceptance))
        for acceptance in trees.ACCEPTANCES
    },
    "sample-processed": lambda: (
        sk.sample,
        {"logits": logits(rng(), 3, 2, 3100), "noise_keys": torch.arange(6).view(3, 2), **processed(2, 3100)},
    ),
    "warp_probs-processed": lambda: (sk.warp_probs, {"logits": logits(rng(), 3, 3100), **processed(None, 3100)}),
    "verify_chain-processed": lambda: (
        sk.verify_chain, long_chain("block", return_acceptance=True, **processed(4, 5200)),
    ),
    "verify_tree-processed": lambda: (sk.verify_tree, {**wide_tree("traversal"), **processed(7, 5200)}),
    "verify_chain-bonus-wide": lambda: (sk.verify_chain, chains.with_bonus(long_chain("block"), torch.arange(3))),
    "verify_tree-BiLD-wide": lambda: (sk.verify_tree, wide_tree("sample", laws.BiLD(1.0, bonus="cascade"))),
}  # fmt: skip
