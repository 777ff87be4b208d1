"""SGLang's verify kernels by their own names and arguments, on this package's ops: change the import.

    from specdec_kernels.integrations import sglang

Signatures are those of SGLang 0.5.23 (``sglang.kernels.ops.speculative``: ``sampling``, ``tree`` and
``reject_sampling``), in-place outputs and "retrive" included. They run on any device. In a batch of trees, node 0 is
the last token of each sequence; ``retrive_index`` says where a node stands in the flat outputs, ``retrive_next_token``
which is its first child and ``retrive_next_sibling`` its next sibling (-1: none), and a child stands after its parent
(at most 1024 nodes, 64 deep). For `batch` sequences with `num_nodes` nodes, all write:

- ``predicts``: ``[>= batch * num_nodes]`` int32, at the index of each accepted node (the root among them) the token
  after it; the rest is left as it was;
- ``accept_index``: ``[batch, max_accepted + 1]`` int32, the indices of the accepted nodes from the root on; the rest is
  left as it was. Its width bounds how many are accepted;
- ``accept_token_num``: ``[batch]`` int32, accepted nodes without the root.

Different on purpose: `deterministic` is accepted and changes nothing, as results never depend on scheduling; a token
that two siblings share counts once; a token of probability 0 is never accepted (older kernels accept one with a coin or
thresholds of 0); a coin of 1, which rounding makes in SGLang, is read as the largest below; where nothing is left to
draw from, the last token is drawn from the target's distribution instead of being a rejected one or the highest id, and
for a row that is not a distribution (NaN, infinite, negative) it is an id as in `verify_chain`; after a draft token
that its own distribution cannot have produced, the last token is drawn from the target's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    FLOAT32,
    ID_DTYPES,
    INT32,
    INT64,
    check_flag,
    check_given,
    check_int,
    check_number,
    check_tensor,
    contiguous_rows,
    shape_error,
)
from ..ops._common import unchecked
from ..ops.sample import sample
from ..ops.verify_chain import verify_chain
from ..ops.verify_tree import verify_tree
from ..tree import MAX_DEPTH, MAX_NODES, DraftTree, parents_of

__all__ = [
    "FULL_MASK",
    "QLEN_ONLY",
    "QLEN_ONLY_BITPACKING",
    "build_tree_kernel_efficient",
    "chain_block_speculative_sampling_triton",
    "chain_speculative_sampling_triton",
    "reconstruct_indices_from_tree_mask",
    "tree_speculative_sampling_target_only",
    "tree_speculative_sampling_target_only_triton",
    "verify_tree_greedy",
]

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = range(3)
"""Values of `tree_mask_mode`."""

LARGEST_COIN = 1 - 2.0**-24
MASK_DTYPES = (torch.bool, torch.uint8, torch.uint16, torch.uint32)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a path of each tree by the target's probabilities alone: a child is accepted with its own.

    From the root on, the children of a node are tried in their order with the node's one coin: a child is accepted
    where the coin lies below the summed probability of the children so far, divided by `threshold_acc`, or where its
    own probability is >= `threshold_single`. After the last accepted node a token is drawn that is none of its
    children, or at the depth limit any token. With both thresholds at 1 the emitted tokens have the target's
    distribution; below 1 more is accepted and they do not (typical acceptance).

    Parameters
    ----------
    predicts, accept_index, accept_token_num : Tensor
        Outputs, written in place: see above.
    candidates, retrive_index, retrive_next_token, retrive_next_sibling : Tensor
        ``[batch, num_nodes]`` int64.
    uniform_samples : Tensor
        ``[batch, num_nodes]`` float32 in [0, 1): each node's coin, for its children.
    uniform_samples_for_final_sampling : Tensor
        ``[batch]`` float32 in [0, 1), for the last token.
    target_probs : Tensor
        ``[batch, num_nodes, vocab]`` float32: of the token after each node, with the sampling parameters in it.
    draft_probs : Tensor
        ``[batch, num_nodes, vocab]`` float32, what is taken off the target's before the last draw: zeros in SGLang.
        Written in place, as there: the target's probability of each child that was tried and rejected, at its parent's
        row. An expanded tensor, which has no room for that, is left as it is.
    threshold_single, threshold_acc : float
        In [0, 1].

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, device or threshold.
    """
    op = "tree_speculative_sampling_target_only"
    check_number(op, "threshold_single", threshold_single, 0, 1)
    check_number(op, "threshold_acc", threshold_acc, 0, 1)
    nodes = _check_outputs(op, predicts, accept_index, accept_token_num, candidates, retrive_index)
    _check_rows(op, "target_probs", target_probs, candidates)
    batch, num_nodes, vocab = target_probs.shape
    check_given(
        op, "draft_probs", draft_probs, FLOAT32, candidates.device, ("batch", "num_nodes", "vocab"),
        (batch, num_nodes, vocab),
    )  # fmt: skip
    check_given(op, "uniform_samples", uniform_samples, FLOAT32, candidates.device, *nodes)
    check_given(
        op, "uniform_samples_for_final_sampling", uniform_samples_for_final_sampling, FLOAT32, candidates.device,
        ("batch",), (batch,),
    )  # fmt: skip
    tree, order = _tree(
        op, retrive_next_token, retrive_next_sibling, nodes, accept_index.shape[1] - 1, candidates.device
    )
    tokens = candidates.gather(1, order)
    ids = tokens.clamp(0, vocab - 1)
    children = _distinct_children(tree, order, tokens) & (ids == tokens)[:, None]
    own = target_probs.gather(-1, ids[:, None].expand(-1, num_nodes, -1)).masked_fill(~children, 0.0)
    sure = (own > 0) & (own >= threshold_single)
    reached = (own.cumsum(-1) / max(threshold_acc, 1e-9)).clamp_max(1.0)
    reached = torch.where(sure.cumsum(-1) > 0, 1.0, reached)
    taken = reached.diff(dim=-1, prepend=torch.zeros_like(reached[..., :1])).clamp_min(0.0)
    path = _walk(tree, order, taken, "sample", uniform_samples.clamp(max=LARGEST_COIN))
    last, full = _last(path)
    rows = torch.arange(batch, device=candidates.device)
    weights = target_probs[rows, last]
    less = (weights - draft_probs[rows, last]).clamp_min(0.0)
    less = less.scatter_reduce(1, ids, (~children[rows, last]).float(), "prod")
    weights = torch.where((~full & (less > 0).any(-1))[:, None], less, weights)
    coin = uniform_samples_for_final_sampling.clamp(max=LARGEST_COIN)
    final = sample(None, probs=weights, uniform_samples=coin).token
    _write(predicts, accept_index, accept_token_num, candidates, retrive_index, path, final)
    if all(step or size <= 1 for step, size in zip(draft_probs.stride(), draft_probs.shape, strict=True)):
        rejected, places = _rejected(path, order, children), ids[:, None].expand(-1, num_nodes, -1)
        draft_probs.scatter_reduce_(2, places, (~rejected).float(), "prod")  # a place may be that of several columns
        draft_probs.scatter_add_(2, places, own.masked_fill(~rejected, 0.0))


tree_speculative_sampling_target_only_triton = tree_speculative_sampling_target_only


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the path of each tree that the target's own greedy choices follow.

    Parameters
    ----------
    predicts, accept_index, accept_token_num : Tensor
        Outputs, written in place: see above.
    candidates, retrive_index, retrive_next_token, retrive_next_sibling : Tensor
        ``[batch, num_nodes]`` int64.
    target_predict : Tensor
        ``[batch, num_nodes]`` int64, the target's argmax after each node, at the node's ``retrive_index``.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    op = "verify_tree_greedy"
    nodes = _check_outputs(op, predicts, accept_index, accept_token_num, candidates, retrive_index)
    check_given(op, "target_predict", target_predict, ID_DTYPES, candidates.device, *nodes)
    chosen = target_predict.long().flatten()[retrive_index.clamp(0, max(target_predict.numel() - 1, 0))]
    tree, order = _tree(
        op, retrive_next_token, retrive_next_sibling, nodes, accept_index.shape[1] - 1, candidates.device
    )
    tokens = candidates.gather(1, order)
    follows = _distinct_children(tree, order, tokens) & (chosen[..., None] == tokens[:, None])
    path = _walk(tree, order, follows.float(), "greedy", None)
    last, _ = _last(path)
    final = chosen.gather(1, last[:, None])[:, 0]
    _write(predicts, accept_index, accept_token_num, candidates, retrive_index, path, final)


def chain_speculative_sampling_triton(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Speculative sampling of chains: `verify_chain` with acceptance "token", or with `block_verification` "block".

    Parameters
    ----------
    predicts, accept_index, accept_token_num : Tensor
        Outputs, written in place: see above; here `predicts` and `accept_index` may be int64.
    candidates, retrive_index : Tensor
        ``[batch, num_nodes]`` int32 or int64: the last token of each sequence, then its draft.
    retrive_next_token, retrive_next_sibling, threshold_single, threshold_acc, deterministic
        Not read: a chain has no links, and its rule no thresholds.
    uniform_samples : Tensor
        ``[batch, >= num_nodes - 1]`` float32 in [0, 1): column i is the coin of ``candidates[:, i + 1]``; further ones
        are not read. "block" needs fresh ones, and fresh draft noise, at every step.
    uniform_samples_for_final_sampling : Tensor
        ``[batch]`` float32 in [0, 1), for the last token.
    target_probs : Tensor
        ``[batch, num_nodes, vocab]`` float32, of any strides: rows whose ids do not lie side by side are copied.
    draft_probs : Tensor
        ``[batch, >= num_nodes - 1, vocab]`` float32, of any strides; further rows are not read.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    check_flag("chain_speculative_sampling_triton", "block_verification", block_verification)
    _verify_chains(
        "chain_speculative_sampling_triton", "block" if block_verification else "token", predicts, accept_index,
        accept_token_num, candidates, retrive_index, uniform_samples, uniform_samples_for_final_sampling, target_probs,
        draft_probs,
    )  # fmt: skip


def chain_block_speculative_sampling_triton(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """`chain_speculative_sampling_triton` with `block_verification`, under a name that a pull request gave it (#36516).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    _verify_chains(
        "chain_block_speculative_sampling_triton", "block", predicts, accept_index, accept_token_num, candidates,
        retrive_index, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs,
    )  # fmt: skip


def _verify_chains(
    op: str, acceptance: str, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrive_index: Tensor, uniform_samples: Tensor, final: Tensor, target_probs: Tensor, draft_probs: Tensor,
) -> None:  # fmt: skip
    _check_outputs(op, predicts, accept_index, accept_token_num, candidates, retrive_index, ID_DTYPES, ID_DTYPES)
    _check_rows(op, "target_probs", target_probs, candidates)
    drafted = min(candidates.shape[1], accept_index.shape[1]) - 1
    device = candidates.device
    check_given(op, "uniform_samples_for_final_sampling", final, FLOAT32, device, ("batch",), candidates.shape[:1])
    check_tensor(op, "uniform_samples", uniform_samples, FLOAT32, device)
    check_tensor(op, "draft_probs", draft_probs, FLOAT32, device)
    batch, _, vocab = target_probs.shape
    if uniform_samples.dim() != 2 or len(uniform_samples) != batch or uniform_samples.shape[1] < drafted:
        raise shape_error(op, "uniform_samples", f"[batch={batch}, >= {drafted}]", uniform_samples)
    if draft_probs.dim() != 3 or draft_probs.shape[::2] != (batch, vocab) or draft_probs.shape[1] < drafted:
        raise shape_error(op, "draft_probs", f"[batch={batch}, >= {drafted}, vocab={vocab}]", draft_probs)
    target, draft = map(contiguous_rows, (target_probs[:, : drafted + 1], draft_probs[:, :drafted]))
    out = verify_chain(
        None, candidates[:, 1 : drafted + 1], target_probs=target, draft_probs=draft,
        uniform_samples=torch.cat([final[:, None], uniform_samples[:, :drafted]], 1).clamp_(max=LARGEST_COIN),
        acceptance=acceptance,
    )  # fmt: skip
    places = torch.arange(drafted + 1, device=device)
    path = torch.where(places <= out.num_accepted[:, None], places, -1)
    token = out.tokens.gather(1, out.num_accepted.long()[:, None])[:, 0]
    _write(predicts, accept_index, accept_token_num, candidates, retrive_index, path, token)


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Make the trees of EAGLE's selected candidates: their links, positions and attention mask.

    Parameters
    ----------
    parent_list : Tensor
        ``[batch, >= topk * (depth - 1) + 1]`` int64: the candidate that each expanded node was.
    selected_index : Tensor
        ``[batch, draft_token_num - 1]`` int64, ascending: the candidates that became nodes 1, 2, …
        A node whose parent was not selected is left out, with all that hangs from it: it has no links, sees itself
        alone and stands at the root's position.
    verified_seq_len : Tensor
        ``[batch]`` int64, tokens before the tree.
    tree_mask : Tensor
        Output: bool, uint8, uint16 or uint32, whose bytes are written from the first on; a larger buffer keeps its
        rest. FULL_MASK: a row of ``verified_seq_len + draft_token_num`` bytes for each node of each sequence, laid end
        to end; only the tree's columns are written. QLEN_ONLY: ``[batch * draft_token_num ** 2]`` bytes.
        QLEN_ONLY_BITPACKING: one, two or four bytes a node, as few as hold `draft_token_num` <= 32 bits, of which bit i
        is for node i.
    positions, retrive_index, retrive_next_token, retrive_next_sibling : Tensor
        Outputs: ``[batch * draft_token_num]``, and three of ``[batch, draft_token_num]``; int64.
    topk, depth, draft_token_num : int
        Children of an expanded node, depth of the tree (at most 64), nodes with the root.
    tree_mask_mode : int
        0 FULL_MASK, 1 QLEN_ONLY, 2 QLEN_ONLY_BITPACKING.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device, or an unknown mode.
    """
    op = "build_tree_kernel_efficient"
    nodes = check_int(op, "draft_token_num", draft_token_num, 1, MAX_NODES)
    check_int(op, "topk", topk, 1, MAX_NODES)
    check_int(op, "depth", depth, 0, MAX_DEPTH)
    check_int(op, "tree_mask_mode", tree_mask_mode, FULL_MASK, QLEN_ONLY_BITPACKING)
    check_tensor(op, "verified_seq_len", verified_seq_len, INT64, None)
    if verified_seq_len.dim() != 1:
        raise shape_error(op, "verified_seq_len", "[batch]", verified_seq_len)
    batch, device = verified_seq_len.shape[0], verified_seq_len.device
    check_given(
        op, "selected_index", selected_index, INT64, device, ("batch", "draft_token_num - 1"), (batch, nodes - 1)
    )
    check_tensor(op, "parent_list", parent_list, INT64, device)
    least = topk * (depth - 1) + 1 if depth > 1 and nodes > 1 else 0
    if parent_list.dim() != 2 or parent_list.shape[0] != batch or parent_list.shape[1] < least:
        raise shape_error(op, "parent_list", f"[batch={batch}, >= topk * (depth - 1) + 1={least}]", parent_list)
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    _check_links(op, positions, *links, device, batch, nodes)
    width = 1 if nodes <= 8 else 2 if nodes <= 16 else 4
    if tree_mask_mode == QLEN_ONLY_BITPACKING and nodes > 32:
        raise ValueError(f"{op}: draft_token_num must be <= 32 where tree_mask_mode is 2, got {nodes}")
    check_tensor(op, "tree_mask", tree_mask, MASK_DTYPES, device)
    if tree_mask.dim() != 1 or not tree_mask.is_contiguous():
        raise ValueError(
            f"{op}: tree_mask must be 1-d and contiguous, got {list(tree_mask.shape)} with strides {tree_mask.stride()}"
        )
    size = batch * nodes * (width if tree_mask_mode == QLEN_ONLY_BITPACKING else nodes)
    if tree_mask_mode == FULL_MASK and device.type == "cpu":  # on a GPU the host would have to wait for it
        size += int(verified_seq_len.sum()) * nodes
    mask = tree_mask.view(torch.uint8)
    if len(mask) < size:
        raise ValueError(f"{op}: tree_mask must have {size} bytes or more, got {len(mask)}")
    above = selected_index // topk
    known = (above >= 0) & (above < parent_list.shape[1])  # a candidate that NaN scores led to may be any number
    if nodes > 1 and parent_list.shape[1]:
        candidate = parent_list.gather(1, above.clamp(0, parent_list.shape[1] - 1)).masked_fill(~known, -1)
    else:
        candidate = above
    same = (selected_index[:, None] == candidate[..., None]) & (candidate >= 0)[..., None]
    place = (same * torch.arange(1, nodes, device=device)).sum(-1)  # 0: nowhere
    parents = torch.where(place > 0, place, -1).masked_fill(above == 0, 0)
    tree = DraftTree(torch.nn.functional.pad(parents, (1, 0), value=-1), depth)
    _write_links(tree, verified_seq_len[:, None] + tree.depth.clamp_min(0), positions, *links)
    sees = tree.ancestors()
    if tree_mask_mode == FULL_MASK:
        before = (verified_seq_len.cumsum(0) - verified_seq_len) * nodes + torch.arange(batch, device=device) * nodes**2
        lanes = torch.arange(nodes, device=device)
        row = before[:, None] + (verified_seq_len[:, None] + nodes) * lanes + verified_seq_len[:, None]
        mask.scatter_(0, (row[..., None] + lanes).flatten(), sees.flatten().to(torch.uint8))
    elif tree_mask_mode == QLEN_ONLY:
        mask[:size].copy_(sees.flatten())
    else:
        bits = torch.nn.functional.pad(sees, (0, 8 * width - nodes)).view(-1, 8)
        mask[:size].copy_((bits << torch.arange(8, device=device)).sum(-1))


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The links and positions of trees that are given by their masks, as n-gram drafts are.

    Parameters
    ----------
    tree_mask : Tensor
        ``[>= batch_size * draft_token_num ** 2]`` bool or uint8, of any shape: row i of a tree has its ancestors and
        itself. Columns after i are not read.
    verified_seq_len : Tensor
        ``[batch_size]`` int64, tokens before the tree.
    positions, retrive_index, retrive_next_token, retrive_next_sibling : Tensor
        Outputs: ``[batch_size * draft_token_num]``, and three of ``[batch_size, draft_token_num]``; int64.
    batch_size, draft_token_num : int
        Trees, and nodes of each with the root. A node that is deeper than 64, that sees no other (a second root), or
        whose row is not its parent's row and itself, has no links, and neither has what hangs from it.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    op = "reconstruct_indices_from_tree_mask"
    batch = check_int(op, "batch_size", batch_size, 0, 2**31 - 1)
    nodes = check_int(op, "draft_token_num", draft_token_num, 1, MAX_NODES)
    check_tensor(op, "tree_mask", tree_mask, (torch.bool, torch.uint8), None)
    size = batch * nodes**2
    if tree_mask.numel() < size:
        raise shape_error(op, "tree_mask", f"[>= batch_size * draft_token_num ** 2={size}]", tree_mask)
    device = tree_mask.device
    check_given(op, "verified_seq_len", verified_seq_len, INT64, device, ("batch_size",), (batch,))
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    _check_links(op, positions, *links, device, batch, nodes)
    lanes = torch.arange(nodes, device=device)
    given = tree_mask.flatten()[:size].view(batch, nodes, nodes) != 0
    sees = given & (lanes < lanes[:, None]) | (lanes == lanes[:, None])
    tree = DraftTree.from_mask(sees, min(nodes - 1, MAX_DEPTH))
    _write_links(tree, verified_seq_len[:, None] + sees.sum(-1) - 1, positions, *links)


def _check_links(
    op: str, positions: Tensor, index: Tensor, first_child: Tensor, next_sibling: Tensor, device: torch.device,
    batch: int, nodes: int,
) -> None:  # fmt: skip
    """What the functions that make trees write to."""
    check_given(op, "positions", positions, INT64, device, ("batch * draft_token_num",), (batch * nodes,))
    for name, links in (
        ("retrive_index", index), ("retrive_next_token", first_child), ("retrive_next_sibling", next_sibling),
    ):  # fmt: skip
        check_given(op, name, links, INT64, device, ("batch", "draft_token_num"), (batch, nodes))


def _write_links(
    tree: DraftTree, places: Tensor, positions: Tensor, index: Tensor, first_child: Tensor, next_sibling: Tensor
) -> None:
    positions.copy_(places.flatten())
    index.copy_(torch.arange(index.numel(), device=index.device).view(index.shape))
    first_child.copy_(tree.first_child)
    next_sibling.copy_(tree.next_sibling)


def _check_outputs(
    op: str, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrive_index: Tensor, ids: tuple[torch.dtype, ...] = INT64, places: tuple[torch.dtype, ...] = INT32,
) -> tuple[tuple[str, ...], tuple[int, ...]]:  # fmt: skip
    """The names and sizes of what has a value a node; given are the types of its ids, and of what is written for it."""
    check_tensor(op, "candidates", candidates, ids, None)
    if candidates.dim() != 2 or not 1 <= candidates.shape[1] <= MAX_NODES:
        raise shape_error(op, "candidates", f"[batch, num_nodes] with 1 <= num_nodes <= {MAX_NODES}", candidates)
    batch, num_nodes = candidates.shape
    device, names = candidates.device, ("batch", "num_nodes")
    check_given(op, "retrive_index", retrive_index, ids, device, names, (batch, num_nodes))
    check_tensor(op, "predicts", predicts, places, device)
    if predicts.dim() != 1 or len(predicts) < batch * num_nodes:
        raise shape_error(op, "predicts", f"[>= batch * num_nodes={batch * num_nodes}]", predicts)
    check_given(op, "accept_token_num", accept_token_num, INT32, device, ("batch",), (batch,))
    check_tensor(op, "accept_index", accept_index, places, device)
    if accept_index.dim() != 2 or accept_index.shape[0] != batch or accept_index.shape[1] < 1:
        raise shape_error(op, "accept_index", f"[batch={batch}, max_accepted + 1]", accept_index)
    return names, (batch, num_nodes)


def _check_rows(op: str, name: str, probs: Tensor, candidates: Tensor) -> None:
    check_tensor(op, name, probs, FLOAT32, candidates.device)
    if probs.dim() != 3 or probs.shape[:2] != candidates.shape or probs.shape[2] < 2:
        raise shape_error(op, name, "[batch={}, num_nodes={}, vocab >= 2]".format(*candidates.shape), probs)


def _tree(
    op: str, first_child: Tensor, next_sibling: Tensor, nodes: tuple[tuple[str, ...], tuple[int, ...]], max_depth: int,
    device: torch.device,
) -> tuple[DraftTree, Tensor]:  # fmt: skip
    """The trees with these links, no deeper than `max_depth`; their nodes in an order that siblings are tried in."""
    for name, links in (("retrive_next_token", first_child), ("retrive_next_sibling", next_sibling)):
        check_given(op, name, links, INT64, device, *nodes)
    parents, rank = parents_of(first_child, next_sibling)
    return DraftTree(parents, min(max_depth, MAX_DEPTH)), rank.sort(dim=1, stable=True).indices


def _distinct_children(tree: DraftTree, order: Tensor, tokens: Tensor) -> Tensor:
    """``[batch, num_nodes, num_nodes]`` bool: is a column's node a row's child, and the first one with its token?

    Columns stand in this order, and have these tokens.
    """
    lanes = torch.arange(tree.num_nodes, device=tokens.device)
    above = tree.parents.gather(1, order)
    same = (above[:, None] == above[..., None]) & (tokens[:, None] == tokens[..., None])
    repeated = (same & (lanes < lanes[:, None])).any(-1)
    return (above[:, None] == lanes[:, None]) & ~repeated[:, None]


def _rejected(path: Tensor, order: Tensor, children: Tensor) -> Tensor:
    """``[batch, num_nodes, num_nodes]`` bool: of `children`, which were tried on this path, and rejected.

    Those of a node at the depth limit, which are not tried, are no `children` either.
    """
    on = (path[..., None] == torch.arange(order.shape[1], device=path.device)).any(1)
    accepted = children & on.gather(1, order)[:, None]
    return children & on[..., None] & (accepted.cumsum(-1) == 0)


def _walk(tree: DraftTree, order: Tensor, taken: Tensor, acceptance: str, uniform_samples: Tensor | None) -> Tensor:
    """``[batch, max_depth + 1]``: the accepted nodes from the root on, then -1.

    `verify_tree` on a vocabulary of its own: a node's token is its place in `order`, and one token more stands for all
    others, with the probability that the children's, `taken`, leave.
    """
    rest = 1 - taken.sum(-1, keepdim=True)
    rest = torch.where(rest < 2**-20, 0.0, rest)  # children with all the mass leave only rounding errors
    logits = torch.cat([taken, rest], -1).log()
    with unchecked():  # trees are cut here to what the outputs have room for
        out = verify_tree(logits, tree, order.argsort(1), acceptance=acceptance, uniform_samples=uniform_samples)
    assert out.accepted_nodes is not None
    return torch.nn.functional.pad(out.accepted_nodes, (1, 0))


def _last(path: Tensor) -> tuple[Tensor, Tensor]:
    """The last accepted node of each sequence, and whether there was no room for another."""
    return path.amax(1), path[:, -1] >= 0


def _write(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    path: Tensor,
    final: Tensor,
) -> None:
    """The outputs, in place: of accepted nodes and of the token after the last."""
    on, width = path >= 0, path.shape[1]  # at most as wide as accept_index
    index = retrive_index.long().gather(1, path.clamp_min(0))
    after = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    tokens = torch.where(after >= 0, candidates.gather(1, after.clamp_min(0)), final[:, None]).to(predicts.dtype)
    spare = torch.nn.functional.pad(predicts, (0, 1))  # a place for what is not on the path
    written = on & (index >= 0) & (index < len(predicts))
    spare.scatter_(0, torch.where(written, index, len(predicts)).flatten(), tokens.flatten())
    predicts.copy_(spare[:-1])
    accept_index[:, :width] = torch.where(on, index, -1).to(accept_index).where(on, accept_index[:, :width])
    accept_token_num.copy_(on.sum(1, dtype=torch.int32) - 1)
