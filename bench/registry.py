"""What is measured: one entry per op, with its cases, its inputs and the bytes that its rule has to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import specdec_kernels as sk

from . import inputs
from .inputs import OVERHEAD, Case

VOCABS = (49152, 128256)
BATCHES = (1, 8)
_TRUNCATED = sk.SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
_GREEDY = sk.SamplingParams(temperature=0.0)
VERIFY_CASES: Mapping[str, Mapping[str, Any]] = {
    "T=1": {},
    "truncated": {"params": _TRUNCATED},
    "greedy": {"params": _GREEDY, "acceptance": "greedy"},
    "one-hot": {"one_hot": True},
    "block": {"acceptance": "block"},
    "Opt": {"target_law": sk.laws.Opt(0.3)},
    "TokenV3": {"target_law": sk.laws.TokenV3(0.3)},
}
MATCH: Mapping[str, Any] = {"one_hot": True, "acceptance": "match"}

TREE_CASES: Mapping[str, Mapping[str, Any]] = {
    "T=1": {"acceptance": "recursive"},
    "truncated": {"acceptance": "recursive", "params": _TRUNCATED},
    "greedy": {"acceptance": "greedy", "params": _GREEDY},
    "sample": {"acceptance": "sample"},
    "traversal": {"acceptance": "traversal"},
    "typical": {"acceptance": "typical"},
}


@dataclass(frozen=True)
class Entry:
    """How one op is measured.

    Attributes
    ----------
    cases : callable
        ``(vocabs, batches)`` to the cases.
    make : callable
        ``(case, generator)`` to one input set.
    bytes_read : callable
        ``(case, inputs, output)`` to the bytes that the op has to read (rows, seeds, lists of ids) or, for a cache,
        move; for a verify op the target's rows up to the first rejection. Defined alike for all providers: useful
        bytes, not bytes that a peer reads twice.
    least_read : float
        The share of the logits that a call certainly reads: a walk that stops early reads about half of a chain.
    """

    cases: Callable[[Sequence[int], Sequence[int]], list[Case]]
    make: Callable[[Case, torch.Generator], Any]
    bytes_read: Callable[[Case, Any, Any], int]
    least_read: float = 0.5


def _grid(op: str, named: Mapping[str, Mapping[str, Any]], vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    cold = [Case(op, name, v, b, **extra) for v in vocabs for b in batches for name, extra in named.items()]
    return [Case(op, OVERHEAD, 64, 1, cache="hot", drawn_before=True), *cold]


def _verify_chain(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    cases = _grid("verify_chain", VERIFY_CASES, vocabs, batches)
    main = [c for c in cases if c.name in ("T=1", "truncated", "greedy")]
    hot = [replace(c, cache="hot") for c in main if c.batch == min(batches)]
    half = [replace(c, dtype=torch.bfloat16) for c in main if c.batch == max(batches)]
    probs = [Case("verify_chain", "probabilities", v, b, of_probs=True) for v in vocabs for b in batches]
    matches = [Case("verify_chain", "match", v, b, **MATCH) for v in vocabs for b in batches]
    return cases + hot + half + probs + matches


def _verify_tree(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """A tree's cases; `num_draft` is its number of nodes without the root."""
    num_draft = sk.DraftTree.cartesian(inputs.TREE_WIDTHS).num_nodes - 1
    cases = [replace(c, num_draft=num_draft) for c in _grid("verify_tree", TREE_CASES, vocabs, batches)]
    return [replace(c, acceptance="recursive") if c.name == OVERHEAD else c for c in cases]


def _law_cases(op: str) -> Callable[[Sequence[int], Sequence[int]], list[Case]]:
    return lambda vocabs, batches: _grid(op, {"T=1": {}, "truncated": {"params": _TRUNCATED}}, vocabs, batches)


def _draw_cases(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    indexed = [Case("sample", "indexed rows", v, b, indexed=True) for v in vocabs for b in batches]
    return [*_law_cases("sample")(vocabs, batches), *indexed]


def _likelihood_cases(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    op = "token_logprobs"
    processed = [Case(op, "processors", v, b, processed=True) for v in vocabs for b in batches]
    return [*_law_cases(op)(vocabs, batches), *processed]


def _uncut_cases(op: str) -> Callable[[Sequence[int], Sequence[int]], list[Case]]:
    return lambda vocabs, batches: _grid(op, {"T=1": {}}, vocabs, batches)


def _seed_cases(op: str) -> Callable[[Sequence[int], Sequence[int]], list[Case]]:
    """Nothing is as wide as the vocabulary: only the batch size counts."""

    def cases(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
        return [Case(op, OVERHEAD if b == 1 else "T=1", 64, b, cache="hot") for b in sorted({1, *batches, 256})]

    return cases


def _count_cases(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """Long lists of ids from the whole vocabulary, whose size does not matter here."""
    op = "count_tokens_"
    overhead = Case(op, OVERHEAD, 64, 1, cache="hot")
    return [overhead, *(Case(op, "T=1", max(vocabs), b, cache="hot") for b in batches)]


def _cache_cases(vocabs: Sequence[int], batches: Sequence[int]) -> list[Case]:
    half: Mapping[str, Any] = {"dtype": torch.bfloat16, "cache": "hot"}  # a forward pass has just written the rows
    overhead = Case("gather_kv_", OVERHEAD, 64, 1, **half)
    return [overhead, *(Case("gather_kv_", "32 layers", 64, b, **half) for b in batches)]


def _target_bytes(case: Case, step: Any, output: Any) -> int:
    """Rows 0 … num_accepted of each sequence; for a tree those on the accepted path. The block rule looks beyond the
    token where it stops.
    """
    accepted = output[1]
    if case.acceptance == "block":
        num_rows = int((accepted + 1).clamp_min(case.num_draft).sum())
    else:
        num_rows = int(accepted.sum()) + case.batch
    return num_rows * case.vocab * step.target_logits.element_size()


def _row_bytes(case: Case, rows: Any, output: Any) -> int:
    return int(rows.logits.nbytes) // (2 if case.indexed else 1)


def _shard_bytes(case: Case, shard: Any, output: Any) -> int:
    """The shard's part of both rows, for the masses; the tile in which the draw ends is read again."""
    return int(shard.logits.nbytes + shard.draft_logits.nbytes)


def _tile_bytes(case: Case, shard: Any, output: Any) -> int:
    return int(shard.tile_max.nbytes + shard.tile_mass.nbytes)


def _seed_bytes(case: Case, step: Any, output: Any) -> int:
    return int(step.seeds.nbytes)


def _listed_bytes(case: Case, step: Any, output: Any) -> int:
    """The ids of the lists, which are searched."""
    return int(step.token_counts.ids.nbytes)


def _moved_bytes(case: Case, step: Any, output: Any) -> int:
    """Rows that move, in all layers; each counts once, though it is read and written."""
    places = torch.arange(1, case.num_draft + 1, device=step.accepted_nodes.device)
    moving = int((step.accepted_nodes != places).sum())
    return moving * sum(t[0, :, 0].nbytes for layer in step.cache for t in layer)


REGISTRY: dict[str, Entry] = {
    "verify_chain": Entry(_verify_chain, inputs.chain, _target_bytes),
    "verify_packed": Entry(_law_cases("verify_packed"), inputs.packed, _target_bytes),
    "verify_tree": Entry(_verify_tree, inputs.tree, _target_bytes, least_read=0.2),
    "row_stats": Entry(_law_cases("row_stats"), inputs.verified_rows, _row_bytes),
    "warp_probs": Entry(_law_cases("warp_probs"), inputs.verified_rows, _row_bytes),
    "mask_logits_": Entry(_law_cases("mask_logits_"), inputs.verified_rows, _row_bytes),
    "shard_stats": Entry(_uncut_cases("shard_stats"), inputs.shard_rows, _row_bytes),
    "merge_shards": Entry(_uncut_cases("merge_shards"), inputs.shard, _tile_bytes),
    "shard_draw": Entry(_uncut_cases("shard_draw"), inputs.shard, _shard_bytes),
    "sample": Entry(_draw_cases, inputs.next_rows, _row_bytes),
    "token_logprobs": Entry(_likelihood_cases, inputs.emitted_tokens, _row_bytes),
    "uniform_samples": Entry(_seed_cases("uniform_samples"), inputs.seeds_and_positions, _seed_bytes),
    "noise_keys": Entry(_seed_cases("noise_keys"), inputs.seeds_and_positions, _seed_bytes),
    "count_tokens_": Entry(_count_cases, inputs.history, _listed_bytes),
    "gather_kv_": Entry(_cache_cases, inputs.tree_cache, _moved_bytes),
}
