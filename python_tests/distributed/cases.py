"""Verify steps of every rule and cut, for vocabularies that are sharded."""

from __future__ import annotations

from typing import Any

import torch

import specdec_kernels as sk
from python_tests.ops import chains

S = sk.SamplingParams
PER_ROW = S(  # the first and the last are cut
    torch.tensor([0.8, 0.0, 1.0, 1.2]), top_k=torch.tensor([9, 0, 0, 40]), top_p=torch.tensor([0.9, 1.0, 1.0, 1.0])
)
TOP_P_PER_ROW = S(
    torch.tensor([0.8, 1.0, 1.0, 1.2]),
    top_k=torch.tensor([0, 9, 0, 0]),
    top_p=torch.tensor([0.9, 1.0, 0.5, 1 - 2.0**-24]),
)
RULES: dict[str, dict[str, Any]] = {
    "token": {},
    "block": {"acceptance": "block"},
    "token one-hot": {"kind": "one_hot"},
    "token probs": {"kind": "probs"},
    "block probs": {"acceptance": "block", "kind": "probs"},
    "temperatures": {"params": S(0.8), "draft_params": S(1.3), "acceptance": "block"},
    "match": {"acceptance": "match", "params": S(0.9)},
    "greedy": {"acceptance": "greedy", "params": S(0.7, top_p=0.5)},
    "flat": {"spread": 0.05, "acceptance": "block"},
    "some drafts greedy": {
        "draft_params": S(torch.tensor([1.0, 0.0, 1.0, 0.0])),
        "acceptance": "block",
        "spread": 1.5,
    },
    "top-k": {"params": S(0.8, top_k=20), "draft_params": S(0.8, top_k=20)},
    "top-k, top-p, block": {"params": S(0.8, top_k=50, top_p=0.9, min_p=0.01), "acceptance": "block"},
    "top-k one-hot": {"params": S(top_k=20, top_p=0.8), "kind": "one_hot"},
    "top-k probs": {"params": S(top_k=20), "kind": "probs", "acceptance": "block"},
    "min-p": {"params": S(1.1, min_p=0.01), "draft_params": S(1.1, min_p=0.02)},
    "min-p first": {"params": S(min_p=0.02, top_p=0.8, min_p_first=True)},
    "top-p": {"params": S(0.8, top_p=0.9), "draft_params": S(0.8, top_p=0.95)},
    "top-p, block": {"params": S(top_p=0.95), "acceptance": "block"},
    "top-p one-hot": {"params": S(top_p=0.7), "kind": "one_hot"},
    "top-p probs": {"params": S(top_p=0.9), "kind": "probs", "acceptance": "block"},
    "top-p, min-p": {"params": S(1.1, top_p=0.95, min_p=0.01), "draft_params": S(1.1, top_p=0.9, min_p_first=True)},
    "top-p, flat": {"spread": 0.05, "params": S(top_p=0.9), "acceptance": "block"},
    "match top-p": {"acceptance": "match", "params": S(0.9, top_p=0.8)},
    "each its top-p": {"params": TOP_P_PER_ROW, "draft_params": S(top_p=0.9), "acceptance": "block"},
    "top-k of many": {"params": S(top_k=1500, top_p=0.9), "draft_params": S(top_k=1500)},
    "match top-k": {"acceptance": "match", "params": S(0.9, top_k=7)},
    "draft cut": {"draft_params": S(0.9, top_k=30, top_p=0.9)},
    "draft cut, block": {"draft_params": S(min_p=0.01), "acceptance": "block"},
    "each its own": {
        "params": PER_ROW,
        "draft_params": S(torch.tensor([1.0, 1.0, 0.0, 0.9]), top_k=torch.tensor([0, 5, 0, 50])),
    },
}


def make(name: str, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0, batch: int = 4) -> chains.Arguments:
    rng = torch.Generator().manual_seed(seed)
    return chains.make(rng, batch, 3, vocab, dtype=dtype, **{"spread": 5.0, **RULES[name]})
