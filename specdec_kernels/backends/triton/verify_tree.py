"""`verify_tree` as Triton kernels: the laws of all nodes at once, then a program a sequence for its path.

Launches: ``plan`` (the trees as the rules see them), ``scan`` and ``law`` of the target's rows and, where the rule or a
target law asks for it, of the draft's; then the rule: ``choose`` (a token after every node at once) and ``walk_tree``,
``typical`` or ``try_siblings``. "match" takes one more before ``choose``, the scores, a target law two, ``mixtures``
and ``law_masses``.

Sources: Miao et al. 2024 (arXiv 2305.09781) and Chen et al. 2024 (arXiv 2402.12374) for sampled children, Weng et al.
2025 (arXiv 2505.12398) for traversal, Cai et al. 2024 (arXiv 2401.10774) for typical acceptance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import TREE_ACCEPTANCES, VerifyArguments, VerifyTreeArguments, tiles_of
from ...tree import MAX_DEPTH, MAX_NODES
from ..reference.verify_tree import make_tree
from .bundles import LOGITS, NO_DRAFT, NO_NOISE, PROBS, Layout, Output, Siblings, Trees, Typical, Wanted
from .coins import with_numbers
from .draft import Draft, draft_laws
from .launch import empties, power_of_2, run, tiles_at_once, tiles_of_rows
from .law import Found, find_laws
from .mixture import NO_MIXTURE, find_mixtures
from .noise import best_scores
from .processors import with_processors
from .siblings import LEVEL, try_siblings
from .tree import make_trees
from .tree_walk import choose, law_masses, typical, walk_tree
from .verify_chain import in_order

SAMPLE, GREEDY, MATCH, TYPICAL, RECURSIVE, TRAVERSAL = TREE_ACCEPTANCES.values()


def verify_tree(args: VerifyTreeArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens ``[batch, max_depth + 1]``, num_accepted, num_tokens, status ``[batch]``, accepted_nodes ``[batch,
    max_depth]``.
    """
    args = args._replace(shared=with_numbers(in_order(args.shared), args.node_tokens.shape[1]))
    shared, node_tokens, max_depth = args.shared, args.node_tokens, args.max_depth
    target_logits, cascade_bonus = shared.target_logits, shared.law.cascade_bonus
    batch, num_nodes, vocab = target_logits.shape
    if not (1 <= num_nodes <= MAX_NODES and 0 <= max_depth <= MAX_DEPTH):  # what a program holds in registers
        raise RuntimeError(f"specdec: a tree has 1 to {MAX_NODES} nodes and is at most {MAX_DEPTH} deep")
    empty = empties(target_logits.device)
    # a sequence's nodes lie as the rows of num_nodes - 1 draft tokens and the bonus do
    layout = Layout(batch, num_nodes - 1, None, node_tokens.numel())
    trees = make_trees(
        node_tokens, args.links[0], args.tree_status, shared.eos_token_ids, vocab, draft_at_leaves=cascade_bonus
    )
    is_typical, sampled = args.acceptance == TYPICAL, args.acceptance in (RECURSIVE, TRAVERSAL)
    has_law = shared.law.number > 0
    raw = has_law or is_typical
    rows = layout.rows(target_logits, 1)._replace(kind=PROBS if shared.target_probs else LOGITS)
    if shared.processors is not None:
        before = make_tree(args).draft_before().flatten(0, 1)
        rows = with_processors(rows, layout, num_nodes, shared.processors, before)
    found = find_laws(
        rows, batch, num_nodes, shared.params, values=raw, raw=raw, tempered=is_typical,
        greedy=args.acceptance == GREEDY, wanted=Wanted(trees.spans, tl.constexpr(False)),
    )  # fmt: skip
    draft = Draft(NO_DRAFT)
    if has_law or sampled:
        draft_data = shared.draft_probs if shared.draft_logits is None else shared.draft_logits
        assert draft_data is not None
        wanted = Wanted(trees.draft_spans, tl.constexpr(False))
        draft = draft_laws(layout.rows(draft_data, 1), wanted, batch, layout.width, shared, bonus=1, raw=has_law)
    tokens, nodes = empty(batch, max_depth + 1, dtype=torch.int64), empty(batch, max_depth, dtype=torch.int64)
    slots = tl.constexpr(power_of_2(max_depth + 1))
    out = Output(tokens, empty(batch), empty(batch), empty(batch), nodes, slots)
    tiles, row_tiles = tiles_of(vocab), tiles_at_once(vocab)
    if sampled:
        scratch = Siblings(
            empty(batch, tiles, dtype=torch.float32), empty(batch, num_nodes),
            empty(batch, max_depth + 1, LEVEL.value, dtype=torch.float32), tl.constexpr(args.acceptance == TRAVERSAL),
        )  # fmt: skip
        run(
            try_siblings, (batch,), found.target, tiles, found.tile_mass, draft.laws, trees, num_nodes,
            shared.uniform_samples, scratch, out, max_depth, TILES=tiles_of_rows(rows, 2), ROW_TILES=row_tiles,
            warps=16, registers=128,
        )  # fmt: skip
    elif is_typical:
        reached = empty(batch, 2, num_nodes, dtype=torch.float32)
        run(
            typical, (batch,), found.target, tiles, found.tile_mass, found.values, trees, num_nodes,
            shared.uniform_samples, Typical(args.epsilon, args.delta), reached, out, max_depth, TILES=row_tiles,
            registers=None if shared.processors is None else 128,
        )  # fmt: skip
    else:
        chosen = _choose(found, trees, draft, shared)
        run(walk_tree, (batch,), trees, num_nodes, chosen, found.target.laws.status, out, max_depth, warps=1)
    return tokens, out.num_accepted, out.num_tokens, out.status, nodes


def _choose(found: Found, trees: Trees, draft: Draft, shared: VerifyArguments) -> Tensor:
    """The token ``[batch, num_nodes]`` that the walk looks for after each node."""
    argmax, has_law = found.target.laws.argmax, shared.law.number > 0
    assert argmax is not None
    if found.tile_mass is None and not has_law:
        return argmax
    batch, num_nodes, tiles = found.tile_max.shape
    vocab = found.target.rows.vocab
    best, mixtures, masses = NO_NOISE, NO_MIXTURE, None
    if shared.noise_keys is not None:
        best = best_scores(found, shared.noise_keys, spans=trees.spans)
    if has_law:
        mixtures = find_mixtures(shared.law, found, draft, num_nodes, trees.draft_spans)
        masses = torch.empty_like(found.tile_max)
        a_program = tiles_of_rows(found.target.rows, 2)
        run(
            law_masses, (batch * num_nodes * triton.cdiv(tiles, a_program),), found.target, num_nodes, tiles,
            trees, draft.laws, mixtures, masses, TILES=a_program,
        )  # fmt: skip
    chosen = torch.empty_like(argmax)
    run(
        choose, (batch * num_nodes,), found.target, num_nodes, tiles, trees, draft.laws, mixtures, masses,
        found.tile_mass, shared.uniform_samples, best, chosen, TILES=tiles_at_once(vocab),
        registers=128 if has_law else None,
    )  # fmt: skip
    return chosen
