"""`DraftTree` compared with plain Python, and what is not a tree."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels import DraftTree

CHAIN = [-1, 0, 1, 2]
BUSHY = [-1, 0, 0, 1, 1, 2, 5, 0, 3]


@st.composite
def parents(draw: st.DrawFn, most: int = 24) -> list[int]:
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path(parents: list[int], node: int) -> list[int]:
    out = [node]
    while parents[out[0]] >= 0:
        out.insert(0, parents[out[0]])
    return out


@given(parents())
@settings(max_examples=80)
def test_everything_follows_from_the_parents(given: list[int]) -> None:
    tree, size = DraftTree.from_parents(given), len(given)
    paths = [path(given, node) for node in range(size)]
    children = [[c for c in range(size) if given[c] == node] for node in range(size)]
    assert tree.num_nodes == size and not tree.is_batched and int(tree.status) == 0
    assert tree.depth.tolist() == tree.position_ids.tolist() == [len(p) - 1 for p in paths]
    assert tree.max_depth == max(len(p) - 1 for p in paths)
    assert tree.first_child.tolist() == [c[0] if c else -1 for c in children]
    following = {a: b for c in children for a, b in itertools.pairwise(c)}
    assert tree.next_sibling.tolist() == [following.get(node, -1) for node in range(size)]
    padded = [p + [-1] * (tree.max_depth + 1 - len(p)) for p in paths]
    assert tree.paths.tolist() == padded
    assert tree.retrieve_indices.tolist() == [p for p, c in zip(padded, children, strict=True) if not c]
    sees = [[c in p for c in range(size)] for p in paths]
    assert tree.ancestors().tolist() == sees


@given(st.lists(st.lists(st.integers(-3, 12), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(0, 5))
@settings(max_examples=80)
def test_what_is_no_tree_is_pruned_on_the_device(given: list[list[int]], max_depth: int) -> None:
    """Cycles, orphans, second roots, nodes too deep, and everything below them."""
    tree = DraftTree.from_parents(torch.tensor(given), max_depth)
    for b, row in enumerate(given):
        depth = [0]
        for node in range(1, 9):
            above = depth[row[node]] if 0 <= row[node] < node else -1
            depth.append(above + 1 if 0 <= above < max_depth else -1)
        assert tree.depth[b].tolist() == depth and tree.position_ids[b].tolist() == [max(d, 0) for d in depth]
        assert bool(tree.status[b] == sk.Status.BAD_TREE) == (-1 in depth or row[0] != -1)
        alive = [node for node in range(9) if depth[node] >= 0]
        for node in range(9):
            children = [c for c in alive if c and row[c] == node]
            assert int(tree.first_child[b, node]) == (children[0] if children else -1)
            assert tree.ancestors()[b, node, node]
            if node not in alive:
                assert int(tree.next_sibling[b, node]) == -1 and tree.ancestors()[b, node].sum() == 1
        leaves = [node for node in alive if int(tree.first_child[b, node]) < 0]
        ends = [max(p) for p in tree.retrieve_indices[b].tolist()]
        assert ends == leaves + [-1] * (9 - len(leaves))


def test_trees_of_a_batch_are_those_of_each_alone() -> None:
    rows = [BUSHY, [-1, 0, 1, 2, 3, 4, 5, 6, 7], [-1] + [0] * 8]
    together = DraftTree.from_parents(rows)
    assert together.is_batched and together.max_depth == 8 and together.max_leaves == 8
    for b, row in enumerate(rows):
        alone = DraftTree.from_parents(row, max_depth=8)
        for name in ("depth", "first_child", "next_sibling", "paths"):
            assert torch.equal(getattr(together, name)[b], getattr(alone, name)), name
        used = together.retrieve_indices[b]
        assert torch.equal(used[: alone.max_leaves], alone.retrieve_indices) and (used[alone.max_leaves :] == -1).all()


def expected_mask(tree: DraftTree, lengths: list[int], kv_length: int) -> np.ndarray:  # type: ignore[type-arg]
    out = np.zeros((len(lengths), tree.num_nodes, kv_length), bool)
    for b, length in enumerate(lengths):
        for node in range(tree.num_nodes):
            out[b, node, :length] = True
            for above in path(tree.parents.tolist(), node):
                out[b, node, length + above] = True
    return out


def test_masks() -> None:
    tree, lengths = DraftTree.from_parents(BUSHY), [3, 0, 6]
    context, expected = torch.tensor(lengths), expected_mask(tree, lengths, 17)
    mask = tree.attention_mask(context, 17)
    assert mask.shape == (3, 1, 9, 17) and (mask[:, 0].numpy() == expected).all()
    additive = tree.attention_mask(context.int(), 17, form="additive", dtype=torch.bfloat16)
    assert additive.dtype == torch.bfloat16 and torch.equal(additive == 0, mask)
    assert torch.equal(additive == -torch.inf, ~mask)
    with pytest.raises(TypeError, match="DraftTree: dtype must be float16, bfloat16, float32 or float64, got torch.fl"):
        tree.attention_mask(context, 17, form="additive", dtype=torch.float8_e4m3fn)  # it has no infinity
    packed = tree.attention_mask(context, 17, form="packed").numpy()
    assert (packed == np.packbits(expected.reshape(3, -1), axis=-1, bitorder="little")).all()
    mod = tree.mask_mod(context)
    grid = torch.meshgrid(torch.arange(3), torch.arange(9), torch.arange(17), indexing="ij")
    assert torch.equal(mod(grid[0], torch.tensor(0), grid[1], grid[2]), mask[:, 0])


def test_flex_attention_takes_the_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    tree, context = DraftTree.from_parents([BUSHY, [-1, *range(8)]]), torch.tensor([3, 5])
    mask = create_mask(tree.mask_mod(context), 2, 1, 9, 14, device="cpu")
    assert torch.equal(mask, tree.attention_mask(context, 14))
    create_block_mask(tree.mask_mod(context), 2, None, 9, 14, device="cpu")


def test_attention_through_the_mask_is_that_along_each_path() -> None:
    """Each node's attention equals that of the plain sequence context + path."""
    tree, context, rng = DraftTree.from_parents(BUSHY), 4, torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, context + 9, 8, generator=rng) for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, context:], k, v, attn_mask=tree.attention_mask(torch.tensor([context]), context + 9)
    )
    for node in range(9):
        rows = [*range(context), *(context + n for n in path(BUSHY, node))]
        alone = torch.nn.functional.scaled_dot_product_attention(q[:, :, rows[-1:]], k[:, :, rows], v[:, :, rows])
        torch.testing.assert_close(out[:, :, node], alone[:, :, 0])


def test_choices_and_products() -> None:
    tree = DraftTree.from_choices([[1], [0, 1], [0], [0, 0]])
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1] and tree.ranks is not None
    assert tree.ranks.tolist() == [-1, 0, 1, 0, 1]
    product = DraftTree.cartesian([2, 3])
    assert product.num_nodes == 9 and product.retrieve_indices.shape == (6, 3)
    assert product.depth.tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]


def brute_force(accuracy: np.ndarray, max_nodes: int) -> float:  # type: ignore[type-arg]
    """The largest sum of node values: as no node is worth more than its parent, the best nodes form a tree."""
    values = []
    for k in range(1, accuracy.shape[0] + 1):
        for ranks in itertools.product(range(accuracy.shape[1]), repeat=k):
            values.append(np.prod([accuracy[i, r] for i, r in enumerate(ranks)]))
    return float(sum(heapq.nlargest(max_nodes - 1, values)))


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(2, 40))
@settings(max_examples=60)
def test_the_calibrated_tree_is_the_best_of_its_size(given: list[list[float]], max_nodes: int) -> None:
    accuracy = -np.sort(-np.array(given), axis=1)
    tree = DraftTree.calibrated(accuracy.tolist(), max_nodes)
    assert tree.num_nodes == min(max_nodes, 1 + sum(3**k for k in range(1, len(given) + 1)))
    assert tree.ranks is not None and tree.expected_accepted_length is not None
    assert tree.expected_accepted_length == pytest.approx(brute_force(accuracy, max_nodes), rel=1e-9, abs=1e-12)
    worth = [1.0]
    for node in range(1, tree.num_nodes):
        above, rank = int(tree.parents[node]), int(tree.ranks[node])
        worth.append(worth[above] * accuracy[int(tree.depth[node]) - 1, rank])
    assert sum(worth[1:]) == pytest.approx(tree.expected_accepted_length, rel=1e-9, abs=1e-12)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(worth[1:]))  # the best ones first


@given(st.lists(parents(), min_size=1, max_size=3))
@settings(max_examples=50)
def test_trees_come_back_from_their_links_and_masks(rows: list[list[int]]) -> None:
    size = max(map(len, rows))
    batch = torch.tensor([row + [0] * (size - len(row)) for row in rows])
    tree = DraftTree.from_parents(batch, 23)
    by_links = DraftTree.from_links(tree.first_child, tree.next_sibling.int(), 23)
    one = DraftTree.from_mask(tree.ancestors()[0], 23)
    assert torch.equal(one.links, tree.links[:, 0]) and not one.status
    for found in (by_links, DraftTree.from_mask(tree.ancestors(), 23)):
        assert torch.equal(found.links, tree.links) and not found.status.any()


def test_what_is_no_tree_is_pruned() -> None:
    mask = DraftTree.from_parents(BUSHY).ancestors()
    for row, column, pruned in ((4, 2, [4]), (8, 8, [8]), (3, 5, [3, 8]), (5, 0, [5, 6])):
        bad = mask.clone()
        bad[row, column] = ~bad[row, column]
        found = DraftTree.from_mask(bad, 4)
        assert found.status == sk.Status.BAD_TREE and (found.depth < 0).nonzero()[:, 0].tolist() == pruned
    alone = DraftTree.from_links(torch.full((4,), -1), torch.full((4,), -1), 3)
    assert alone.depth.tolist() == [0, -1, -1, -1] and alone.status == sk.Status.BAD_TREE
    beyond = DraftTree.from_links(torch.tensor([1, 9, -7]), torch.tensor([-1, 2, 5]), 3)
    assert beyond.parents.tolist() == [-1, 0, 0] and not beyond.status


def mask_of(parents: list[int], context: int, kv_length: int, form: str = "bool") -> Tensor:
    return DraftTree.from_parents(parents).attention_mask(torch.tensor([context]), kv_length, form)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DraftTree.from_parents([-1, 0, -1]), r"parents\[2\] must be a node, only node 0 is a root"),
        (lambda: DraftTree.from_parents([-1, 2, 0]), r"parents\[1\] must be a node before it, got 2"),
        (lambda: DraftTree.from_parents([-1, 1]), "must be a node before it, got 1"),
        (lambda: DraftTree.from_parents([-1, -2]), "must be a node before it, got -2"),
        (lambda: DraftTree.from_parents([0, 0]), r"parents\[0\] must be -1"),
        (lambda: DraftTree.from_parents([-1, *range(65)]), "at most 64 deep, got 65"),
        (lambda: DraftTree.from_parents(CHAIN, max_depth=2), "at most max_depth=2 deep, got 3"),
        (lambda: DraftTree.from_parents([-1] + [0] * 1024), "num_nodes <= 1024"),
        (lambda: DraftTree.from_parents([[-1, 0], [-1]]), r"lists of one length, got lengths \[1, 2\]"),
        (lambda: DraftTree.from_parents(torch.tensor(CHAIN)), "need max_depth"),
        (lambda: DraftTree.from_parents(torch.tensor(CHAIN), 65), r"max_depth must be in \[0, 64\], got 65"),
        (lambda: DraftTree.from_links(torch.tensor(CHAIN), torch.tensor(CHAIN[:3]), 3), r"next_sibling must be \[4\]"),
        (lambda: DraftTree.from_mask(torch.ones(3, 4, dtype=torch.bool), 3), r"mask must be \[num_nodes, num_nodes\]"),
        (lambda: DraftTree.from_choices([[0, 0]]), r"must hold \[0\]"),
        (lambda: DraftTree.from_choices([[0], [0]]), "distinct"),
        (lambda: DraftTree.from_choices([[-1]]), r"ranks in \[0"),
        (lambda: DraftTree.from_choices([[2**70]]), r"medusa_choices must be distinct lists of ranks in \[0"),
        (lambda: DraftTree.from_choices([[i] for i in range(1024)]), "medusa_choices must make at most 1024 nodes"),
        (lambda: DraftTree.cartesian([1] * 65), "widths must be at most 64, got 65"),
        (lambda: DraftTree.from_parents([-1, 2**70]), "parents must hold nodes"),
        (lambda: DraftTree.calibrated(torch.tensor([[0.5j]]), 3), "complex"),
        (lambda: DraftTree.cartesian([40, 40]), "at most 1024 nodes"),
        (lambda: DraftTree.cartesian([]), "at least one"),
        (lambda: DraftTree.calibrated([[0.5, 0.7]], 4), "rises"),
        (lambda: DraftTree.calibrated([[1.5]], 4), r"in \[0, 1\], got 1.5"),
        (lambda: DraftTree.calibrated([[0.5]], 1), "max_nodes"),
        (lambda: mask_of(CHAIN, 1, 9, "bits"), "form must be one of"),
        (lambda: mask_of(CHAIN, 1, 3), "kv_length must be >= num_nodes=4"),
        (lambda: DraftTree.from_parents([CHAIN]).attention_mask(torch.tensor([1, 2]), 9), r"must be \[batch=1\]"),
    ],
)  # fmt: skip
def test_errors(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("parents", [3, "ab", [[-1.0]], torch.tensor([-1.0]), [-1, False, True]])
def test_wrong_types(parents: object) -> None:
    with pytest.raises(TypeError, match="parents must"):
        DraftTree.from_parents(parents)  # type: ignore[arg-type]


def test_the_device_is_never_asked() -> None:
    """Built from a tensor without reading its values: fake tensors have none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tree = DraftTree.from_parents(torch.empty(3, 7, dtype=torch.int32), max_depth=4)
        shapes: list[Tensor] = [tree.depth, tree.first_child, tree.next_sibling, tree.retrieve_indices, tree.status]
        assert [tuple(t.shape) for t in shapes] == [(3, 7), (3, 7), (3, 7), (3, 7, 5), (3,)]
        assert tree.attention_mask(torch.empty(3, dtype=torch.int64), 20, form="packed").shape == (3, 18)
