"""`verify_tree` as Triton kernels: the laws of all nodes at once, then a program a sequence for its path.

Launches: ``plan`` (the trees as the rules see them), ``scan`` and ``law`` of the target's rows and, where the rule or a
target law asks for it, of the draft's; then the rule: ``choose`` (a token after every node at once) and ``walk_tree``,
``typical`` or ``try_siblings``. "match" takes one more before ``choose``, the scores, a target law two, ``mixtures``
and ``law_masses``.

Sources: Miao et al. 2024 (arXiv 2305.09781) and Chen et al. 2024 (arXiv 2402.12374) for sampled children, Weng et al.
2025 (arXiv 2505.12398) for traversal, Cai et al. 2024 (arXiv 2401.10774) for typical acceptance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tree import MAX_DEPTH, MAX_NODES
from .bundles import NO_DRAFT, NO_NOISE, Output, Siblings, TargetLaw, Trees, Wanted
from .draft import Draft, draft_laws
from .launch import power_of_2, run, tiles_a_program, tiles_at_once, tiles_of
from .law import Found, find_laws
from .mixture import NO_MIXTURE, find_mixtures
from .noise import best_scores
from .siblings import try_siblings
from .tree import make_trees
from .tree_walk import choose, law_masses, typical, walk_tree
from .verify import Layout, contiguous

SAMPLE, GREEDY, MATCH, TYPICAL, RECURSIVE, TRAVERSAL = range(6)


class Call(NamedTuple):
    """What `verify_tree` is called with beside the trees and the target's logits."""

    draft_logits: Tensor | None
    draft_probs: Tensor | None
    draft_stats: tuple[Tensor | None, Tensor | None, Tensor | None]
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    target_to_draft: Tensor | None
    eos_token_ids: Tensor | None
    acceptance: int
    epsilon: float
    delta: float
    law: TargetLaw
    cascade_bonus: bool
    params: tuple[Any, ...]  # flat sampling parameters
    draft_params: tuple[Any, ...]

    @staticmethod
    def of(flat: tuple[Any, ...]) -> Call:
        """From the op's arguments."""
        tensors = [contiguous(tensor) for tensor in flat[5:9]]
        law = TargetLaw(*flat[12:16])
        return Call._make((*flat[:2], flat[2:5], *tensors, *flat[9:12], law, flat[16], flat[17:26], flat[26:]))


def verify_tree(
    target_logits: Tensor, node_tokens: Tensor, parents: Tensor, first_child: Tensor, next_sibling: Tensor,
    tree_status: Tensor, max_depth: int, *flat: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """tokens ``[batch, max_depth + 1]``, num_accepted, num_tokens, status ``[batch]``, accepted_nodes ``[batch,
    max_depth]``.
    """
    return verify(target_logits, node_tokens, parents, tree_status, max_depth, Call.of(flat))


def verify(
    target_logits: Tensor, node_tokens: Tensor, parents: Tensor, tree_status: Tensor, max_depth: int, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `verify_tree`."""
    batch, num_nodes, vocab = target_logits.shape
    if not (1 <= num_nodes <= MAX_NODES and 0 <= max_depth <= MAX_DEPTH):  # what a program holds in registers
        raise RuntimeError(f"specdec: a tree has 1 to {MAX_NODES} nodes and is at most {MAX_DEPTH} deep")
    device = target_logits.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # a sequence's nodes lie as the rows of num_nodes - 1 draft tokens and the bonus do
    layout = Layout(batch, num_nodes - 1, None, node_tokens.numel())
    trees = make_trees(node_tokens, parents, tree_status, call.eos_token_ids, vocab, draft_at_leaves=call.cascade_bonus)
    is_typical, sampled = call.acceptance == TYPICAL, call.acceptance in (RECURSIVE, TRAVERSAL)
    has_law = call.law.number > 0
    raw = has_law or is_typical
    found = find_laws(
        layout.rows(target_logits, 1), batch, num_nodes, call.params, values=raw, raw=raw, tempered=is_typical,
        greedy=call.acceptance == GREEDY, wanted=Wanted(trees.spans, tl.constexpr(False)),
    )  # fmt: skip
    draft = Draft(NO_DRAFT)
    if has_law or sampled:
        draft = draft_laws(
            layout, Wanted(trees.draft_spans, tl.constexpr(False)), call.draft_logits, call.draft_probs,
            call.draft_stats, call.target_to_draft, call.draft_params, bonus=1, raw=has_law,
        )  # fmt: skip
    tokens, nodes = empty(batch, max_depth + 1, dtype=torch.int64), empty(batch, max_depth, dtype=torch.int64)
    slots = tl.constexpr(power_of_2(max_depth + 1))
    out = Output(tokens, empty(batch), empty(batch), empty(batch), nodes, slots)
    row_tiles = tiles_at_once(vocab)
    if sampled:
        scratch = Siblings(
            empty(batch, tiles_of(vocab), dtype=torch.float32), empty(batch, num_nodes),
            empty(batch, max_depth + 1, 5, dtype=torch.float32),
        )  # fmt: skip
        run(
            try_siblings, (batch,), found.target, found.tile_mass, draft.laws, trees, num_nodes, call.uniform_samples,
            scratch, out, max_depth, TRAVERSAL=call.acceptance == TRAVERSAL, TILES=tiles_a_program(vocab, 2),
            ROW_TILES=row_tiles, warps=16, registers=128,
        )  # fmt: skip
    elif is_typical:
        reached = empty(batch, 2, num_nodes, dtype=torch.float32)
        run(
            typical, (batch,), found.target, found.tile_mass, found.values, trees, num_nodes, call.uniform_samples,
            call.epsilon, call.delta, reached, out, max_depth, TILES=row_tiles,
        )  # fmt: skip
    else:
        chosen = _choose(found, trees, draft, call)
        run(walk_tree, (batch,), trees, num_nodes, chosen, found.target.laws.status, out, max_depth, warps=1)
    return tokens, out.num_accepted, out.num_tokens, out.status, nodes


def _choose(found: Found, trees: Trees, draft: Draft, call: Call) -> Tensor:
    """The token ``[batch, num_nodes]`` that the walk looks for after each node."""
    argmax, has_law = found.target.laws.argmax, call.law.number > 0
    assert argmax is not None
    if found.tile_mass is None and not has_law:
        return argmax
    batch, num_nodes, tiles = found.tile_max.shape
    vocab = found.target.rows.vocab
    best, mixtures, masses = NO_NOISE, NO_MIXTURE, None
    if call.noise_keys is not None:
        best = best_scores(found, call.noise_keys, spans=trees.spans)
    if has_law:
        mixtures = find_mixtures(call.law, found, draft, num_nodes, trees.draft_spans)
        masses = torch.empty_like(found.tile_max)
        a_program = tiles_a_program(vocab, 2)
        run(
            law_masses, (batch * num_nodes * triton.cdiv(tiles, a_program),), found.target, num_nodes, trees,
            draft.laws, mixtures, masses, EVERYWHERE=call.cascade_bonus, TILES=a_program,
        )  # fmt: skip
    chosen = torch.empty_like(argmax)
    run(
        choose, (batch * num_nodes,), found.target, num_nodes, trees, draft.laws, mixtures, masses, found.tile_mass,
        call.uniform_samples, best, chosen, EVERYWHERE=call.cascade_bonus, TILES=tiles_at_once(vocab),
        registers=128 if has_law else None,
    )  # fmt: skip
    return chosen
