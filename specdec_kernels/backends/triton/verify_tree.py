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
from torch import Tensor

from ...tree import MAX_DEPTH, MAX_NODES
from .draft import DraftLaws, draft_laws
from .launch import power_of_2, run, tiles_a_program, tiles_at_once, tiles_of
from .law import Laws, Rows, find_laws
from .mixture import TargetLaw
from .noise import best_scores
from .siblings import try_siblings
from .tree import Nodes, make_nodes
from .tree_walk import choose, law_masses, typical, walk_tree
from .verify import Layout

SAMPLE, GREEDY, MATCH, TYPICAL, RECURSIVE, TRAVERSAL = range(6)


def verify_tree(
    target_logits: Tensor, node_tokens: Tensor, parents: Tensor, first_child: Tensor, next_sibling: Tensor,
    tree_status: Tensor, max_depth: int, draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    eos_token_ids: Tensor | None, acceptance: int, epsilon: float, delta: float,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """tokens ``[batch, max_depth + 1]``, num_accepted, num_tokens, status ``[batch]``, accepted_nodes ``[batch,
    max_depth]``.
    """
    batch, num_nodes, vocab = target_logits.shape
    if not (1 <= num_nodes <= MAX_NODES and 0 <= max_depth <= MAX_DEPTH):  # what a program holds in registers
        raise RuntimeError(f"specdec: a tree has 1 to {MAX_NODES} nodes and is at most {MAX_DEPTH} deep")
    device, tiles = target_logits.device, tiles_of(vocab)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # a sequence's nodes lie as the rows of num_nodes - 1 draft tokens and the bonus do
    layout = Layout(batch, num_nodes - 1, None, node_tokens.numel())
    target = layout.rows(target_logits, 1)
    uniform_samples = None if uniform_samples is None else uniform_samples.contiguous()
    noise_keys = None if noise_keys is None else noise_keys.contiguous()
    target_to_draft = None if target_to_draft is None else target_to_draft.contiguous()
    nodes = make_nodes(node_tokens, parents, tree_status, eos_token_ids, vocab, draft_at_leaves=cascade_bonus)
    is_typical, sampled = acceptance == TYPICAL, acceptance in (RECURSIVE, TRAVERSAL)
    more = bool(law) or is_typical
    found = find_laws(
        target, params[:9], values=more, raw=more, tempered=is_typical, greedy=acceptance == GREEDY, blocks=nodes.blocks
    )
    draft: DraftLaws | None = None
    if law or sampled:
        given = (draft_values, draft_argmax, draft_status)
        draft = draft_laws(
            layout, nodes.draft_blocks, draft_logits, draft_probs, given, target_to_draft, params[9:], bonus=1,
            raw=bool(law),
        )  # fmt: skip
    tokens, out_nodes = empty(batch, max_depth + 1, dtype=torch.int64), empty(batch, max_depth, dtype=torch.int64)
    counts = (empty(batch), empty(batch), empty(batch))
    out = (tokens, *counts, out_nodes, max_depth)
    sizes = {"SLOTS": power_of_2(num_nodes), "DEPTHS": power_of_2(max_depth + 1)}
    rows = (found.laws, found.argmax, found.status, found.tile_mass)
    row_tiles = tiles_at_once(vocab)
    if sampled:
        assert draft is not None
        run(
            try_siblings, (batch,), *target.address, tiles, vocab, *rows, *draft.arguments, uniform_samples,
            *nodes.arguments, empty(batch, tiles, dtype=torch.float32), empty(batch, num_nodes),
            empty(batch, max_depth + 1, 5, dtype=torch.float32), *out,
            TRAVERSAL=acceptance == TRAVERSAL, TILES=tiles_a_program(vocab, 2), ROW_TILES=row_tiles, warps=16,
            registers=128, **sizes,
        )  # fmt: skip
    elif is_typical:
        run(
            typical, (batch,), *target.address, tiles, vocab, *rows, found.values, uniform_samples, *nodes.arguments,
            epsilon, delta, empty(batch, 2, num_nodes, dtype=torch.float32), *out, TILES=row_tiles, **sizes,
        )  # fmt: skip
    else:
        target_law = TargetLaw(law, law_variant, law_alpha, law_beta) if law else None
        chosen = _choose(target, found, nodes, draft, target_law, cascade_bonus, uniform_samples, noise_keys)
        run(walk_tree, (batch,), *nodes.arguments, chosen, found.status, *out, warps=1, **sizes)
    return tokens, *counts, out_nodes


def _choose(
    target: Rows, found: Laws, nodes: Nodes, draft: DraftLaws | None, law: TargetLaw | None, everywhere: bool,
    uniform_samples: Tensor | None, noise_keys: Tensor | None,
) -> Tensor:  # fmt: skip
    """The token ``[batch, num_nodes]`` that the walk looks for after each node."""
    if found.tile_mass is None and law is None:
        return found.argmax
    batch, num_nodes, vocab, tiles = target.batch, target.n, target.vocab, tiles_of(target.vocab)
    shape = (*target.address, num_nodes, tiles, nodes.blocks, found.laws, found.argmax)
    draft_args, law_args, masses = DraftLaws.NONE, TargetLaw.NONE, None
    best: tuple[Tensor | None, Tensor | None] = (None, None)
    if noise_keys is not None:
        best = best_scores(target, found, noise_keys, blocks=nodes.blocks)
    if law is not None:
        assert draft is not None
        draft_args = draft.arguments
        law_args = law.arguments(target, found, draft, num_nodes - 1, nodes.draft_blocks)
        masses = torch.empty(batch, num_nodes, tiles, dtype=torch.float32, device=target.data.device)
        a_program = tiles_a_program(vocab, 2)
        run(
            law_masses, (batch * num_nodes * triton.cdiv(tiles, a_program),), *shape, *draft_args, *law_args, vocab,
            nodes.inner, everywhere, masses, TILES=a_program,
        )  # fmt: skip
    chosen = torch.empty_like(found.argmax)
    run(
        choose, (batch * num_nodes,), *shape, *draft_args, *law_args, vocab, nodes.inner, everywhere, masses,
        found.tile_mass, uniform_samples, *best, found.status, chosen, TILES=tiles_at_once(vocab),
        registers=None if law is None else 128,
    )  # fmt: skip
    return chosen
