"""Random verify steps of token trees."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops.inputs import logits, uniforms
from specdec_kernels import laws as laws_of
from specdec_kernels.laws import TargetLaw

ACCEPTANCES = ("sample", "greedy", "match", "typical", "recursive", "traversal")
LAWS: tuple[TargetLaw, ...] = (
    laws_of.Chow(0.5, bonus="cascade"), laws_of.Diff(0.1), laws_of.Opt(0.3, bonus="cascade"), laws_of.TokenV1(0.2),
    laws_of.TokenV2(0.2, bonus="cascade"), laws_of.TokenV3(0.6), laws_of.BiLD(1.2, bonus="cascade"),
    laws_of.BiLD(1.0, distance="argmax"),
)  # fmt: skip
Arguments = dict[str, Any]


def parents(choose: random.Random, num_nodes: int) -> list[int]:
    """A tree whose nodes hang from one of the last few before them."""
    return [-1, *(choose.randint(max(0, node - 4), node - 1) for node in range(1, num_nodes))]


def make(
    seed: int, batch: int, num_nodes: int, vocab: int, *, acceptance: str = "sample", kind: str = "full",
    dtype: torch.dtype = torch.float32, params: sk.SamplingParams | None = None,
    draft_params: sk.SamplingParams | None = None, spread: float = 2.0, law: TargetLaw | None = None,
    per_sequence: bool = True, spoil_tokens: float = 0.0,
) -> Arguments:  # fmt: skip
    """Arguments of verify_tree whose children were drawn from the draft, a noisy copy of the target, without
    replacement. `kind`: "full", "reduced", "probs", "stats" or "none" (no draft is given). `spoil_tokens`: the share
    of nodes with another token, among them ids that are none.
    """
    choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [parents(choose, num_nodes) for _ in range(batch if per_sequence else 1)]
    tree = sk.DraftTree.from_parents(shapes if per_sequence else shapes[0])
    target = logits(rng, batch, num_nodes, vocab, dtype=dtype, spread=spread)
    noisy = (target.float() + logits(rng, batch, num_nodes, vocab, spread=0.7)).to(dtype)
    made: Arguments = {"tree": tree, "acceptance": acceptance, "target_logits": target}
    made["params"] = params or sk.SamplingParams()
    draft_params = draft_params or sk.SamplingParams()
    token_map = None
    if kind == "reduced":
        token_map = sk.TokenMap(torch.randperm(vocab, generator=rng)[: max(2, vocab * 2 // 3)])
        noisy = noisy[..., token_map.draft_to_target].contiguous()
        made["draft_token_map"] = token_map
    keys = torch.randint(-(2**63), 2**63 - 1, (batch, num_nodes), generator=rng)
    drawn = sk.sample(
        noisy, draft_params, noise_keys=keys, num_samples=max(2, num_nodes), draft_token_map=token_map,
        backend="reference",
    ).token  # fmt: skip
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int64)
    for b in range(batch):
        tried: dict[int, int] = {}
        for node, above in enumerate(shapes[b if per_sequence else 0]):
            if node == 0:
                continue
            rank = tried.get(above, 0)
            tried[above] = rank + 1
            tokens[b, node] = drawn[b, above, rank]
            if choose.random() < spoil_tokens:
                tokens[b, node] = choose.choice([-1, vocab, -7, 0, 1])
    made["node_tokens"] = tokens
    if kind == "probs":
        made["draft_probs"] = sk.warp_probs(noisy, draft_params, backend="reference")
    elif kind != "none":
        made["draft_logits"], made["draft_params"] = noisy, draft_params
        if kind == "stats":
            made["draft_stats"] = sk.row_stats(noisy, draft_params, backend="reference")
    if acceptance == "match":
        made["noise_keys"] = torch.randint(-(2**63), 2**63 - 1, (batch, num_nodes), generator=rng)
    elif acceptance != "greedy":
        made["uniform_samples"] = uniforms(rng, batch, num_nodes)
    if law is not None:
        made["target_law"] = law
    return made


def select(arguments: Arguments, rows: Any) -> Arguments:
    """The arguments of some sequences alone, in the order of `rows` (a list)."""
    out: Arguments = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != "eos_token_ids":
            out[name] = value[rows]
        elif isinstance(value, sk.RowStats):
            out[name] = sk.RowStats(value.values[rows], value.argmax[rows], value.status[rows])
        elif isinstance(value, sk.DraftTree) and value.is_batched:
            out[name] = sk.DraftTree.from_parents(value.parents[rows], value.max_depth)
        else:
            out[name] = value
    return out
