"""Token trees: many candidate continuations scored in one forward pass.

Node 0 is the root: the token that was emitted last. Every other node is a drafted token that follows its parent's;
parents stand before their children, and siblings in the order in which they are tried.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import FLOAT_DTYPES, ID_DTYPES, check_device, check_int, check_one_of, check_tensor
from .types import Status

MAX_DEPTH = 64
MAX_NODES = 1024
MASK_FORMS = ("bool", "additive", "packed")


class DraftTree:
    """A tree of drafted tokens, one for the whole batch or one for each sequence; made by its class methods.

    Built from tensors, it is on their device; built from lists, on the CPU. `to` moves it.

    Attributes
    ----------
    parents : Tensor
        ``[num_nodes]``, or ``[batch, num_nodes]`` with a tree for each sequence; int64, −1 for the root and what was
        pruned. Except for `links`, the attributes below have these leading dimensions too.
    depth : Tensor
        ``[num_nodes]`` int64: 0 for the root; −1 for a node that was pruned.
    max_depth, max_leaves : int
        Upper bounds of a node's depth (at most 64) and of a tree's number of leaves.
    first_child, next_sibling : Tensor
        ``[num_nodes]`` int64, −1 for no such node (the layout of SGLang's kernels).
    links : Tensor
        ``[3, num_nodes]``, or ``[3, batch, num_nodes]``, int64: parents, first_child and next_sibling.
    ranks : Tensor or None
        ``[num_nodes]`` int64: which of its head's best tokens a node is, from 0; −1 for the root. None where only the
        parents were given.
    status : Tensor
        ``[]`` or ``[batch]`` int32: `Status.BAD_TREE` where nodes were pruned.
    expected_accepted_length : float or None
        Of a `calibrated` tree: the mean number of accepted tokens, by the accuracies given.

    Raises
    ------
    TypeError, ValueError
        `parents` of another type or shape; a number out of its range.
    """

    def __init__(self, parents: Tensor, max_depth: int, max_leaves: int | None = None) -> None:
        _check_tensor(parents)
        parents, num_nodes = parents.to(torch.int64), parents.shape[-1]
        self.max_depth = check_int("DraftTree", "max_depth", max_depth, 0, MAX_DEPTH)
        leaves = num_nodes if max_leaves is None else max_leaves
        self.max_leaves = check_int("DraftTree", "max_leaves", leaves, 1, num_nodes)
        self.ranks: Tensor | None = None
        self.expected_accepted_length: float | None = None
        nodes = torch.arange(parents.shape[-1], device=parents.device)
        follows = (parents >= 0) & (parents < nodes)  # only then can it have a depth
        above = parents.clamp(0, parents.shape[-1] - 1)
        depth = torch.where(nodes == 0, 0, -1).expand(parents.shape)
        for d in range(1, max_depth + 1):
            depth = torch.where(follows & (depth.gather(-1, above) == d - 1), d, depth)
        self.depth = depth
        kept = torch.where(depth > 0, parents, -1)
        bad = (depth < 0).any(-1) | (parents[..., 0] != -1)
        self.status = torch.where(bad, int(Status.BAD_TREE), 0).to(torch.int32)
        # In the order of parents, siblings stand side by side; what has no parent comes last.
        group = torch.where(kept >= 0, kept, parents.shape[-1])
        in_order, order = group.sort(dim=-1, stable=True)
        same = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] < parents.shape[-1])
        following = torch.where(same, order[..., 1:], -1)
        next_sibling = torch.full_like(parents, -1).scatter(-1, order[..., :-1], following)
        slots = torch.full((*parents.shape[:-1], parents.shape[-1] + 1), MAX_NODES, device=parents.device)
        first = slots.scatter_reduce(-1, group, nodes.expand(parents.shape), "amin")[..., :-1]
        first_child = torch.where(first < MAX_NODES, first, -1)
        self.links = torch.stack([kept, first_child, next_sibling])
        self.parents, self.first_child, self.next_sibling = self.links

    # --- how trees are made -------------------------------------------------------------------------------------------

    @classmethod
    def from_parents(
        cls, parents: Sequence[int] | Sequence[Sequence[int]] | Tensor, max_depth: int | None = None
    ) -> DraftTree:
        """A tree from each node's parent.

        Parameters
        ----------
        parents : list, or Tensor
            ``[num_nodes]`` or ``[batch, num_nodes]`` with at most 1024 nodes; −1 for node 0, the root, and no other.
            (A sequence with fewer nodes than its neighbours has placeholder tokens, −1, in the nodes that it lacks.)
            The values of a tensor, int32 or int64, are never looked at on the host: a node without a proper parent is
            pruned, with all that hangs from it, and `status` says so.
        max_depth : int, optional
            At most 64. Required with a tensor; found from lists.

        Raises
        ------
        TypeError, ValueError
            A wrong type, shape or size. For lists: a second root, a parent that does not exist or comes after its child
            (which includes every cycle), a tree that is too deep.
        """
        if isinstance(parents, Tensor):
            _check_tensor(parents)
            if max_depth is None:
                raise ValueError("DraftTree: parents as a tensor need max_depth, got None")
            return cls(parents, max_depth)
        if max_depth is not None:
            check_int("DraftTree", "max_depth", max_depth, 0, MAX_DEPTH)
        given = torch.tensor(_rectangular(parents), dtype=torch.int64, device="cpu")
        _check_tensor(given)
        rows = (given if given.dim() == 2 else given[None]).tolist()
        deepest = max(_host_depth(row) for row in rows)
        if max_depth is not None and deepest > max_depth:
            raise ValueError(f"DraftTree: parents must be at most max_depth={max_depth} deep, got {deepest}")
        leaves = max(len(set(range(len(row))) - set(row)) for row in rows)
        return cls(given, deepest if max_depth is None else max_depth, leaves)

    @classmethod
    def from_links(cls, first_child: Tensor, next_sibling: Tensor, max_depth: int) -> DraftTree:
        """A tree from each node's first child and next sibling, as SGLang's kernels have them.

        Parameters
        ----------
        first_child, next_sibling : Tensor
            ``[num_nodes]`` or ``[batch, num_nodes]`` int32 or int64, −1 for no such node. Never looked at on the host:
            a node that does not hang from the root, or that stands before its parent, is pruned, and `status` says
            so. Siblings are tried in the order of their indices.
        max_depth : int
            At most 64; deeper nodes are pruned.

        Raises
        ------
        TypeError, ValueError
            A wrong type, shape or size.
        """
        _check_tensor(first_child, "first_child")
        _check_tensor(next_sibling, "next_sibling")
        if next_sibling.shape != first_child.shape or next_sibling.device != first_child.device:
            raise ValueError(
                f"DraftTree: next_sibling must be {list(first_child.shape)} on {first_child.device}, as first_child is,"
                f" got {list(next_sibling.shape)} on {next_sibling.device}"
            )
        return cls(parents_of(first_child.long(), next_sibling.long())[0], max_depth)

    @classmethod
    def from_mask(cls, mask: Tensor, max_depth: int) -> DraftTree:
        """A tree from what its nodes attend to: the inverse of `attention_mask` within the tree.

        Parameters
        ----------
        mask : Tensor
            ``[num_nodes, num_nodes]`` or ``[batch, num_nodes, num_nodes]`` bool: row i says which nodes node i sees,
            its ancestors and itself. Never looked at on the host: a node that sees anything else is pruned, with all
            that hangs from it, and `status` says so.
        max_depth : int
            At most 64; deeper nodes are pruned.

        Raises
        ------
        TypeError, ValueError
            A wrong type, shape or size.
        """
        check_tensor("DraftTree", "mask", mask, (torch.bool,), None)
        if mask.dim() not in (2, 3) or mask.shape[-1] != mask.shape[-2] or not 1 <= mask.shape[-1] <= MAX_NODES:
            raise ValueError(
                f"DraftTree: mask must be [num_nodes, num_nodes] or [batch, num_nodes, num_nodes] with at most "
                f"{MAX_NODES} nodes, got {list(mask.shape)}"
            )
        nodes = torch.arange(mask.shape[-1], device=mask.device)
        before = nodes < nodes[:, None]
        parents = torch.where(mask & before, nodes, -1).amax(-1)  # the deepest ancestor is the last of them
        above = mask.gather(-2, parents.clamp_min(0)[..., None].expand(mask.shape)) & (parents >= 0)[..., None]
        right = (mask == above | (nodes == nodes[:, None])).all(-1)
        return cls(torch.where(right, parents, nodes), max_depth)

    @classmethod
    def from_choices(cls, medusa_choices: Sequence[Sequence[int]]) -> DraftTree:
        """A tree from Medusa's choices: ``[0, 2]`` is head 1's third best token after head 0's best. Nodes are in the
        order of their depths and then of their choices, whatever order these are given in.

        Raises
        ------
        TypeError, ValueError
            Not lists of integers, no choices, ranks outside [0, 2**31), repeated choices, a choice whose prefix is
            missing, or a tree of more than 1024 nodes or more than 64 deep.
        """
        rows = _lists_of_integers("medusa_choices", medusa_choices, nested=True)
        choices = sorted((tuple(c) for c in rows), key=lambda c: (len(c), c))
        index: dict[tuple[int, ...], int] = {(): 0}
        for choice in choices:
            if not choice or not 0 <= min(choice) <= max(choice) < 2**31 or choice in index:
                raise ValueError(
                    f"DraftTree: medusa_choices must be distinct lists of ranks in [0, 2**31), got {list(choice)}"
                )
            if choice[:-1] not in index:
                raise ValueError(
                    f"DraftTree: medusa_choices must hold {list(choice[:-1])}, on the way to {list(choice)}"
                )
            index[choice] = len(index)
        if len(index) > MAX_NODES or len(choices[-1]) > MAX_DEPTH:
            raise ValueError(
                f"DraftTree: medusa_choices must make at most {MAX_NODES} nodes, {MAX_DEPTH} deep, "
                f"got {len(index)} nodes, {len(choices[-1])} deep"
            )
        parents = [-1, *(index[c[:-1]] for c in choices)]
        tree = cls.from_parents(parents)
        tree.ranks = torch.tensor([-1, *(c[-1] for c in choices)], device="cpu")
        return tree

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> DraftTree:
        """Every combination of the best ``widths[k]`` tokens of head k (Cai et al., arXiv 2401.10774).

        Raises
        ------
        TypeError, ValueError
            Not a list of integers, an empty list, a width below 1, more than 64 widths, or a tree of more than 1024
            nodes.
        """
        _lists_of_integers("widths", widths, nested=False)
        if min(widths) < 1:
            raise ValueError(f"DraftTree: widths must be positive, at least one, got {list(widths)}")
        if len(widths) > MAX_DEPTH:
            raise ValueError(f"DraftTree: widths must be at most {MAX_DEPTH}, got {len(widths)}")
        sizes = itertools.accumulate(widths, lambda a, b: a * b)
        if 1 + sum(sizes) > MAX_NODES:
            raise ValueError(f"DraftTree: a tree must have at most {MAX_NODES} nodes, widths={list(widths)} make more")
        ranges = [range(w) for w in widths]
        return cls.from_choices([c for k in range(1, len(widths) + 1) for c in itertools.product(*ranges[:k])])

    @classmethod
    def calibrated(cls, accuracy: Tensor | Sequence[Sequence[float]], max_nodes: int) -> DraftTree:
        """The tree of `max_nodes` nodes, root included, with the largest expected accepted length (Cai et al., arXiv
        2401.10774, section 2.3); with fewer nodes if `accuracy` has no more. It is at most 64 deep.

        A node is worth the product of the accuracies on its path, and the expected length is the sum over all nodes.
        The tree is grown from the best node down, so that the first n nodes are the calibrated tree of n nodes.

        Parameters
        ----------
        accuracy : Tensor or list
            ``[heads, ranks]`` in [0, 1]: how often head k's token of rank i is right; not rising with i.
        max_nodes : int
            2 to 1024.

        Raises
        ------
        TypeError, ValueError
            Another type or shape, a number outside its range, or accuracies that rise with the rank.
        """
        if isinstance(accuracy, Tensor) and (
            accuracy.layout != torch.strided or accuracy.device.type == "meta" or accuracy.is_complex()
        ):
            kinds = (accuracy.layout, accuracy.dtype if accuracy.is_complex() else accuracy.device)
            kind = kinds[accuracy.layout == torch.strided]
            raise ValueError(f"DraftTree: accuracy must be a strided tensor of numbers, got one of {kind}")
        try:
            table = torch.as_tensor(accuracy, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"DraftTree: accuracy must be [heads, ranks] of numbers, got {error}") from None
        if table.dim() != 2 or 0 in table.shape:
            raise ValueError(f"DraftTree: accuracy must be [heads, ranks], got {list(table.shape)}")
        if len(outside := table[~((table >= 0) & (table <= 1))]):
            raise ValueError(f"DraftTree: accuracy must be in [0, 1], got {outside[0]:.6g}")
        if bool((table.diff(dim=-1) > 0).any()):
            raise ValueError("DraftTree: accuracy must fall, or stay, from rank to rank, got one that rises")
        check_int("DraftTree", "max_nodes", max_nodes, 2, MAX_NODES)
        values = table[:MAX_DEPTH].tolist()
        count = itertools.count()  # breaks ties: the node found first comes first
        parents, ranks, expected = [-1], [-1], 0.0
        waiting = [(-values[0][0], next(count), 1.0, 0, 0, 0)]  # (-worth, ..., parent's worth, parent, head, rank)
        while waiting and len(parents) < max_nodes:
            negative, _, before, parent, head, rank = heapq.heappop(waiting)
            node, worth = len(parents), -negative
            parents.append(parent)
            ranks.append(rank)
            expected += worth
            if head + 1 < len(values):
                heapq.heappush(waiting, (-worth * values[head + 1][0], next(count), worth, node, head + 1, 0))
            if rank + 1 < len(values[head]):
                heapq.heappush(waiting, (-before * values[head][rank + 1], next(count), before, parent, head, rank + 1))
        tree = cls.from_parents(parents)
        tree.ranks = torch.tensor(ranks, device="cpu")
        tree.expected_accepted_length = expected
        return tree

    # --- what is made of them -----------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return self.parents.shape[-1]

    @property
    def is_batched(self) -> bool:
        """Whether each sequence has a tree of its own."""
        return self.parents.dim() == 2

    @property
    def position_ids(self) -> Tensor:
        """``[num_nodes]`` int64: each node's depth; 0 for one that was pruned.

        For the model, add the number of tokens before the root; for the noise of the rule "match", which belongs to the
        tokens *after* the nodes, add one more. Nodes of the same depth share a position, so a tree is drafted with the
        noise of ``noise_keys(seeds, tree, step=step)`` instead.
        """
        return self.depth.clamp_min(0)

    @property
    def paths(self) -> Tensor:
        """``[num_nodes, max_depth + 1]`` int64: each node's ancestors from the root to itself, then −1."""
        node = torch.arange(self.num_nodes, device=self.parents.device).expand(self.parents.shape)
        node = torch.where(self.depth >= 0, node, -1)
        out = self.parents.new_full((*self.parents.shape, self.max_depth + 1), -1)
        for _ in range(self.max_depth + 1):
            at = node.clamp_min(0)
            slot = self.depth.gather(-1, at).clamp_min(0)[..., None]
            kept = out.gather(-1, slot)
            out = out.scatter(-1, slot, torch.where(node >= 0, node, kept[..., 0])[..., None])
            node = torch.where(node >= 0, self.parents.gather(-1, at), -1)
        return out

    @property
    def retrieve_indices(self) -> Tensor:
        """``[leaves, max_depth + 1]`` int64: the path to each leaf, padded with −1 (Medusa's layout).

        The leaves stand in node order; rows beyond a sequence's leaves are all −1. (A tree made from a tensor, whose
        leaves nobody has counted, has `num_nodes` rows.)
        """
        leaf = (self.depth >= 0) & (self.first_child < 0)
        order = (~leaf).sort(dim=-1, stable=True).indices[..., None]
        paths = torch.where(leaf[..., None], self.paths, -1)
        return paths.gather(-2, order.expand(paths.shape))[..., : self.max_leaves, :]

    def ancestors(self) -> Tensor:
        """``[num_nodes, num_nodes]`` bool: whether the row's node sees the column's, that is, itself or an ancestor."""
        nodes = torch.arange(self.num_nodes, device=self.parents.device)
        own = nodes[:, None] == nodes
        paths = self.paths
        on_path = torch.zeros((*self.parents.shape, self.num_nodes + 1), dtype=torch.bool, device=self.parents.device)
        slots = torch.where(paths >= 0, paths, self.num_nodes)
        return on_path.scatter(-1, slots, True)[..., :-1] | own

    def attention_mask(
        self, context_lengths: Tensor, kv_length: int, form: str = "bool", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """What each node may attend to: the context, its ancestors and itself.

        Parameters
        ----------
        context_lengths : Tensor
            ``[batch]`` int32 or int64, rows of the cache before the root's; node i's row stands at context_length + i.
        kv_length : int
            Rows of the cache that attention reads, ``>= context_length + num_nodes`` for every sequence.
        form : {"bool", "additive", "packed"}
            "bool": ``[batch, 1, num_nodes, kv_length]``, True where it attends, as `scaled_dot_product_attention` takes
            it. "additive": the same as 0 and −inf of `dtype`. "packed": ``[batch, ceil(num_nodes * kv_length / 8)]``
            uint8, eight entries per byte from the lowest bit up, as in FlashInfer's ``packed_custom_mask``.
        dtype : torch.dtype
            Of the additive form: float16, bfloat16, float32 or float64.

        Raises
        ------
        TypeError, ValueError
            A wrong type, dtype, shape or device, a `kv_length` below num_nodes. The lengths' values are not checked.
        """
        check_one_of("DraftTree", "form", form, MASK_FORMS)
        if dtype not in FLOAT_DTYPES:  # others may have no infinity
            raise TypeError(f"DraftTree: dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
        self._check_context(context_lengths)
        check_int("DraftTree", "kv_length", kv_length, 0, 2**31 - 1)
        if kv_length < self.num_nodes:
            raise ValueError(f"DraftTree: kv_length must be >= num_nodes={self.num_nodes}, got {kv_length}")
        batch = context_lengths.shape[0]
        offset = torch.arange(kv_length, device=context_lengths.device) - context_lengths[:, None]  # [batch, kv_length]
        inside = (offset >= 0) & (offset < self.num_nodes)
        columns = offset.clamp(0, self.num_nodes - 1)[:, None].expand(-1, self.num_nodes, -1)
        sees = self.ancestors().expand(batch, -1, -1).gather(-1, columns)
        mask = (offset < 0)[:, None] | (sees & inside[:, None])
        if form == "bool":
            return mask[:, None]
        if form == "additive":
            return torch.where(mask, 0.0, -torch.inf).to(dtype)[:, None]
        flat = mask.flatten(1)
        bits = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).unflatten(1, (-1, 8))
        return (bits * 2 ** torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)

    def mask_mod(self, context_lengths: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The attention mask for FlexAttention: ``mask_mod(b, h, q_idx, kv_idx)`` for `create_block_mask`.

        Raises
        ------
        TypeError, ValueError
            `context_lengths` of a wrong type, dtype, shape or device.
        """
        self._check_context(context_lengths)
        sees, nodes = self.ancestors(), self.num_nodes

        def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            offset = kv_idx - context_lengths[b]
            column = offset.clamp(0, nodes - 1)
            seen = sees[b, q_idx, column] if sees.dim() == 3 else sees[q_idx, column]
            return (offset < 0) | (seen & (offset >= 0) & (offset < nodes))

        return mod

    def to(self, device: torch.device | str) -> DraftTree:
        """The same tree on another device.

        Raises
        ------
        ValueError
            No device, nor the name of one.
        """
        device = check_device("DraftTree", "device", device)
        moved = object.__new__(DraftTree)
        moved.__dict__ = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        moved.parents, moved.first_child, moved.next_sibling = moved.links
        return moved

    def _check_context(self, context_lengths: Tensor) -> None:
        check_tensor("DraftTree", "context_lengths", context_lengths, ID_DTYPES, self.parents.device)
        if context_lengths.dim() != 1:
            raise ValueError(f"DraftTree: context_lengths must be a [batch] tensor, got {list(context_lengths.shape)}")
        if self.is_batched and context_lengths.shape != self.parents.shape[:1]:
            batch = self.parents.shape[0]
            raise ValueError(f"DraftTree: context_lengths must be [batch={batch}], got {list(context_lengths.shape)}")


def _rectangular(parents: object) -> Sequence[int] | Sequence[Sequence[int]]:
    if not isinstance(parents, Sequence) or isinstance(parents, (str, bytes)):
        raise TypeError(f"DraftTree: parents must be a list, a list of lists or a tensor, got {type(parents).__name__}")
    rows = parents if parents and isinstance(parents[0], Sequence) else [parents]
    if not all(isinstance(row, Sequence) and not isinstance(row, (str, bytes)) for row in rows):
        raise TypeError("DraftTree: parents must be a list of ints or a list of such lists, got both")
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise ValueError(f"DraftTree: parents must be lists of one length, got lengths {sorted(lengths)}")
    if any(isinstance(p, bool) or not isinstance(p, int) for row in rows for p in row):
        raise TypeError("DraftTree: parents must hold ints")
    if far := [p for row in rows for p in row if not -(2**31) <= p < 2**31]:
        raise ValueError(f"DraftTree: parents must hold nodes, or -1 for the root, got {far[0]}")
    if lengths == {0}:
        raise ValueError("DraftTree: parents must hold a root, -1, got an empty list")
    return parents


def parents_of(first_child: Tensor, next_sibling: Tensor) -> tuple[Tensor, Tensor]:
    """Each node's parent (−1 for none) and its place among its siblings (from 0) in trees with these links; both
    ``[..., num_nodes]`` int64.
    """
    num_nodes = first_child.shape[-1]
    lanes = torch.arange(num_nodes, device=first_child.device).expand(first_child.shape)

    def inverse(links: Tensor) -> Tensor:
        """Which node links here; −1: none."""
        room = torch.full((*links.shape[:-1], num_nodes + 1), -1, device=links.device)
        there = (links >= 0) & (links < num_nodes)
        return room.scatter(-1, torch.where(there, links, num_nodes), lanes)[..., :-1]

    parents, before = inverse(first_child), inverse(next_sibling)
    rank = (before >= 0).long()
    for _ in range(num_nodes.bit_length()):  # each round looks twice as far back along the siblings
        has, at = before >= 0, before.clamp_min(0)
        parents = torch.where(has & (parents < 0), parents.gather(-1, at), parents)
        rank = rank + torch.where(has, rank.gather(-1, at), 0)
        before = torch.where(has, before.gather(-1, at), -1)
    return parents, rank


def _check_tensor(given: object, name: str = "parents") -> None:
    check_tensor("DraftTree", name, given, (torch.int32, torch.int64), None)
    assert isinstance(given, Tensor)
    if given.dim() not in (1, 2) or not 1 <= given.shape[-1] <= MAX_NODES:
        raise ValueError(
            f"DraftTree: {name} must be [num_nodes] or [batch, num_nodes] with 1 <= num_nodes <= {MAX_NODES}, got "
            f"{list(given.shape)}"
        )


def _lists_of_integers(name: str, given: Any, nested: bool) -> Any:
    """`given`; TypeError or ValueError unless it is a non-empty list of integers, if `nested` of lists of integers."""
    what = "a list of lists of integers" if nested else "a list of integers"
    rows = given if nested else [given]
    if not isinstance(given, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in rows):
        raise TypeError(f"DraftTree: {name} must be {what}, got {given!r}")
    if not given:
        raise ValueError(f"DraftTree: {name} must be {what}, at least one, got none")
    if any(isinstance(i, bool) or not isinstance(i, int) for row in rows for i in row):
        raise TypeError(f"DraftTree: {name} must be {what}, got {given!r}")
    return given


def _host_depth(parents: Sequence[int]) -> int:
    """How deep a tree is."""
    if parents[0] != -1:
        raise ValueError(f"DraftTree: parents[0] must be -1, the root has no parent, got {parents[0]}")
    depth = [0]
    for node, parent in enumerate(parents[1:], 1):
        if parent == -1:
            raise ValueError(f"DraftTree: parents[{node}] must be a node, only node 0 is a root, got -1")
        if not 0 <= parent < node:
            raise ValueError(f"DraftTree: parents[{node}] must be a node before it, got {parent}")
        depth.append(depth[parent] + 1)
    deepest = max(depth)
    if deepest > MAX_DEPTH:
        raise ValueError(f"DraftTree: parents must make a tree at most {MAX_DEPTH} deep, got {deepest}")
    return deepest
