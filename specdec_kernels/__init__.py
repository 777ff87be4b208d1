"""The verify step of speculative decoding: raw logits in, accepted tokens out, with the target's distribution.

`verify_chain` is the heart, `verify_tree` the same for token trees; `sample`, `row_stats`, `uniform_samples` and
`noise_keys` serve them; `generate` is a thin decoding loop around them. ``sk.backends()`` says what runs where.
"""

from __future__ import annotations

from . import analysis, distributed, laws
from .backends import OPS, backends, native, register_triton
from .comparison.bild import bild
from .comparison.oracle_cascade import oracle_cascade
from .comparison.seq_cascade import seq_cascade
from .comparison.token_cascade import token_cascade
from .decoding.costs import CostTable
from .decoding.generate import generate
from .decoding.grammar import Grammar
from .decoding.output import GenerationOutput, GenerationStats, Provenance
from .decoding.plan_verify import plan_verify
from .drafters import (
    Draft,
    Drafter,
    Foresight,
    MedusaDrafter,
    ModelDrafter,
    ModelTreeDrafter,
    NgramDrafter,
    NgramLMDrafter,
    NgramTable,
    NgramTreeDrafter,
    NoDrafter,
    TreeDrafter,
)
from .integrations.transformers.packing import pack_linear_weights
from .margins import Margins, decision_margins
from .ops._common import LIBRARY
from .ops.count_tokens_ import count_tokens_
from .ops.gather_kv_ import gather_kv_
from .ops.mask_logits_ import mask_logits_
from .ops.merge_shards import merge_shards
from .ops.noise_keys import noise_keys
from .ops.row_stats import row_stats
from .ops.sample import sample
from .ops.shard_draw import shard_draw
from .ops.shard_stats import shard_stats
from .ops.token_logprobs import token_logprobs
from .ops.uniform_samples import uniform_samples
from .ops.verify_chain import verify_chain
from .ops.verify_packed import verify_packed
from .ops.verify_tree import verify_tree
from .ops.warp_probs import warp_probs
from .processors import Processors
from .sampling import SamplingParams
from .tree import DraftTree
from .types import (
    PLACEHOLDER_TOKEN_ID,
    Draw,
    GatherOutput,
    RowStats,
    ShardDraw,
    ShardStats,
    Status,
    TokenCounts,
    TokenLogprobs,
    TokenMap,
    VerifyOutput,
)

__version__ = "0.1.0"

native.load(OPS)
register_triton(LIBRARY)

__all__ = [
    "PLACEHOLDER_TOKEN_ID",
    "CostTable",
    "Draft",
    "DraftTree",
    "Drafter",
    "Foresight",
    "Draw",
    "GatherOutput",
    "GenerationOutput",
    "GenerationStats",
    "Grammar",
    "Margins",
    "MedusaDrafter",
    "ModelDrafter",
    "ModelTreeDrafter",
    "NgramDrafter",
    "NgramLMDrafter",
    "NgramTable",
    "NgramTreeDrafter",
    "NoDrafter",
    "Processors",
    "Provenance",
    "RowStats",
    "SamplingParams",
    "ShardDraw",
    "ShardStats",
    "Status",
    "TokenCounts",
    "TokenLogprobs",
    "TokenMap",
    "TreeDrafter",
    "VerifyOutput",
    "analysis",
    "backends",
    "bild",
    "count_tokens_",
    "decision_margins",
    "distributed",
    "gather_kv_",
    "generate",
    "laws",
    "mask_logits_",
    "merge_shards",
    "noise_keys",
    "oracle_cascade",
    "pack_linear_weights",
    "plan_verify",
    "row_stats",
    "sample",
    "seq_cascade",
    "shard_draw",
    "shard_stats",
    "token_cascade",
    "token_logprobs",
    "uniform_samples",
    "verify_chain",
    "verify_packed",
    "verify_tree",
    "warp_probs",
]
