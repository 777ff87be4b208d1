"""SGLang's verify kernels by its names: distributions, outputs in place, links, masks."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.integrations.sglang_outputs import UNTOUCHED, outputs
from python_tests.law.cases import check_law, problem
from python_tests.support import environment
from specdec_kernels.integrations import sglang


def emitted(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor) -> Tensor:
    """``[batch, room]``: what follows the accepted nodes, -1 after it. The outputs hold nothing else."""
    kept = torch.arange(accept_index.shape[1]) <= accept_token_num[:, None]
    assert ((accept_index != UNTOUCHED) == kept).all()
    assert (predicts != UNTOUCHED).sum() == kept.sum()
    return torch.where(kept, predicts[accept_index.clamp_min(0).long()], -1).long()


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("kind", ["full", "given_probabilities"])
def test_chains_have_the_targets_distribution(kind: str, block: bool) -> None:
    def verify(target: Tensor, tokens: Tensor, **given: Any) -> sk.VerifyOutput:
        batch, nodes = tokens.shape[0], tokens.shape[1] + 1
        draft = given["draft_logits"].softmax(-1) if kind == "full" else given["draft_probs"]
        index = torch.arange(batch * nodes).view(batch, nodes)
        coins, links = given["uniform_samples"], torch.zeros_like(index)
        made = outputs(batch, nodes, nodes)
        sglang.chain_speculative_sampling_triton(
            *made, torch.nn.functional.pad(tokens, (1, 0)), index, links, links,
            torch.nn.functional.pad(coins[:, 1:], (0, 1)), coins[:, 0].contiguous(), target.softmax(-1), draft,
            block_verification=block,
        )  # fmt: skip
        return sk.VerifyOutput(emitted(*made), made[2], made[2] + 1, torch.zeros_like(made[2]))

    check_law(verify, problem(kind, 3, 2), "block" if block else "token")


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_chains_obey_the_rule(block: bool) -> None:
    rng, batch, nodes = torch.Generator().manual_seed(0), 200, 5
    target = torch.randn(batch, nodes, 7, generator=rng).softmax(-1)
    draft = torch.randn(batch, nodes - 1, 7, generator=rng).softmax(-1)
    tokens, coins = torch.randint(7, (batch, nodes), generator=rng), torch.rand(batch, nodes, generator=rng)
    made, index = outputs(batch, nodes, nodes), torch.arange(batch * nodes).view(batch, nodes)
    final = torch.rand(batch, generator=rng)
    sglang.chain_speculative_sampling_triton(
        *made, tokens, index, index, index, coins, final, target, draft, block_verification=block
    )
    if block:
        named = outputs(batch, nodes, nodes)
        sglang.chain_block_speculative_sampling_triton(
            *named, tokens, index, index, index, coins, final, target, draft, 1.0, 1.0, True
        )
        assert all(map(torch.equal, made, named))
    lengths = []
    for rule in ("token", "block"):
        uniforms = torch.cat([final[:, None], coins[:, :-1]], 1)
        out = sk.verify_chain(target.log(), tokens[:, 1:], draft_probs=draft, uniform_samples=uniforms, acceptance=rule)
        lengths.append(out.num_accepted)
        if rule == ("block" if block else "token"):
            assert torch.equal(emitted(*made), out.tokens)
    assert not torch.equal(*lengths)


ROOT, FIRST, OTHER = (3, 2, 2, 1, 4), (4, 1, 1, 3, 3), (1, 5, 2, 2, 2)  # twelfths
LEAF = (2, 2, 4, 1, 3)
TREE = {0: ROOT, 1: FIRST, 2: OTHER, 3: LEAF, 4: LEAF}
CANDIDATES, NEXT, SIBLING = [9, 0, 1, 4, 2], [1, 3, 4, -1, -1], [-1, 2, -1, -1, -1]
"""Nodes 1 and 2 (tokens 0 and 1) hang from the root, node 3 (token 4) from 1 and node 4 (token 2) from 2."""


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_chains_come_in_any_layout(nodes: int, block: bool) -> None:
    """As the kernel takes them: ids of 32 bits, places of 64, no coin to spare, rows of any strides."""
    rng, batch, vocab = torch.Generator().manual_seed(0), 50, 7
    target, draft = (torch.randn(batch, n, vocab, generator=rng).softmax(-1) for n in (nodes, nodes - 1))
    tokens = torch.randint(vocab, (batch, nodes), generator=rng)
    coins, final = torch.rand(batch, nodes, generator=rng), torch.rand(batch, generator=rng)
    index = torch.arange(batch * nodes).flip(0).view(batch, nodes)

    def spread(given: Tensor) -> Tensor:
        return torch.stack([given, given], -1)[..., 0]

    made, again = outputs(batch, nodes, nodes), outputs(batch, nodes, nodes)
    sglang.chain_speculative_sampling_triton(
        *made, tokens, index, index, index, coins, final, target, draft, block_verification=block
    )
    wide, predicted = again[1].long(), again[0].long()
    sglang.chain_speculative_sampling_triton(
        predicted, wide, again[2], spread(tokens.int()), spread(index.int()), index, index,
        spread(coins[:, : nodes - 1]), final, spread(target), spread(draft), block_verification=block,
    )  # fmt: skip
    for one, other in zip(made, (predicted, wide, again[2]), strict=True):
        assert torch.equal(one.long(), other.long())
    assert emitted(*made).shape == (batch, nodes)


def in_batch(values: list[int], batch: int) -> Tensor:
    return torch.tensor(values).expand(batch, -1).contiguous()


@pytest.mark.parametrize("room", [2, 3])
def test_trees_have_the_targets_distribution(room: int) -> None:
    """Every coin on a grid that has all borders between its points: what comes out is counted, not estimated."""
    lasts = math.lcm(5 + 2, 9, 10, 12)
    grid = torch.cartesian_prod(torch.arange(12), torch.arange(12), torch.arange(lasts))
    root, inner, last = ((g + 0.5) / n for g, n in zip(grid.T, (12, 12, lasts), strict=True))
    batch = len(grid)
    probs = torch.tensor([TREE[n] for n in range(5)]).float() / 12
    made = outputs(batch, 5, room)
    sglang.tree_speculative_sampling_target_only(
        *made, in_batch(CANDIDATES, batch), torch.arange(batch * 5).view(batch, 5), in_batch(NEXT, batch),
        in_batch(SIBLING, batch), torch.stack([root, inner, inner, inner, inner], 1), last,
        probs.expand(batch, -1, -1), torch.zeros(1, 1, 1).expand(batch, 5, 5),
    )  # fmt: skip
    found = Counter(map(tuple, emitted(*made).tolist()))
    expected = {}
    for first, second, third in itertools.product(range(5), repeat=3):
        node = {0: 1, 1: 2}.get(first)
        if node is None:
            expected[first, -1, -1] = ROOT[first] / 12
        elif room == 2 or (node, second) not in {(1, 4), (2, 2)}:
            expected[first, second, -1] = ROOT[first] * TREE[node][second] / 12**2
        else:
            expected[first, second, third] = ROOT[first] * TREE[node][second] * LEAF[third] / 12**3
    expected = {tokens[:room]: p for tokens, p in expected.items()}
    assert found.keys() == expected.keys()
    for tokens, p in expected.items():
        assert abs(found[tokens] / batch - p) < 1e-9, tokens


def one_level(probs: list[float], candidates: list[int], coin: float, **thresholds: float) -> tuple[int, int]:
    """Accepted nodes and the first token of a root with these children; the last coin is 0.5."""
    nodes = len(candidates) + 1
    made = outputs(1, nodes, 2)
    rows = torch.tensor([[probs] * nodes])
    sglang.tree_speculative_sampling_target_only(
        *made, torch.tensor([[9, *candidates]]), torch.arange(nodes)[None], torch.tensor([[1] + [-1] * (nodes - 1)]),
        torch.tensor([[-1, *range(2, nodes), -1]]), torch.full((1, nodes), coin), torch.full((1,), 0.5), rows,
        torch.zeros_like(rows), **thresholds,
    )  # fmt: skip
    return int(made[2]), int(made[0][0])


def test_a_coin_that_was_rounded_to_1_accepts_nothing_but_what_is_sure() -> None:
    for coin in (1 - 2.0**-24, 1.0):
        assert one_level([0.1, 0.9], [0], coin) == (0, 1)
        assert one_level([1.0, 0.0], [0], coin)[0] == 1
        made, index = outputs(1, 2, 2), torch.arange(2)[None]
        sglang.chain_speculative_sampling_triton(
            *made, torch.tensor([[9, 0]]), index, index, index, torch.full((1, 2), coin), torch.full((1,), coin),
            torch.tensor([[[0.1, 0.4, 0.5]] * 2]), torch.tensor([[[1.0, 0.0, 0.0]]]),
        )  # fmt: skip
        assert (int(made[2]), int(made[0][0])) == (0, 2)


def test_there_may_be_more_room_for_what_is_predicted() -> None:
    made, index = outputs(1, 2, 2), torch.arange(2)[None]
    wide = torch.full((5,), UNTOUCHED, dtype=torch.int32)
    given = torch.tensor([[9, 1]]), index, torch.tensor([[1, -1]]), torch.tensor([[-1, -1]]), torch.tensor([[1, 3]])
    sglang.verify_tree_greedy(*made, *given)
    sglang.verify_tree_greedy(wide, *made[1:], *given)
    assert wide.tolist() == made[0].tolist() + [UNTOUCHED] * 3 and made[0].tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"predicts must be \[>= batch \* num_nodes=2\], got \[1\]"):
        sglang.verify_tree_greedy(wide[:1], *made[1:], *given)


def test_draft_probs_are_taken_off_but_not_at_the_depth_limit() -> None:
    probs, draft = torch.tensor([0.5, 0.25, 0.25]).expand(1, 2, 3), torch.tensor([0.5, 0.0, 0.0]).expand(1, 2, 3)
    for room, tokens in ((2, [2, 0]), (3, [2, 1])):  # a node has no child in either, but could have one in the second
        made = outputs(1, 2, room)
        sglang.tree_speculative_sampling_target_only(
            *made, torch.tensor([[9, 2]]), torch.arange(2)[None], torch.tensor([[1, -1]]), torch.full((1, 2), -1),
            torch.zeros(1, 2), torch.full((1,), 0.1), probs, draft,
        )  # fmt: skip
        assert made[0].tolist() == tokens


def test_thresholds_accept_more() -> None:
    probs = [0.1, 0.2, 0.3, 0.4]
    assert one_level(probs, [0, 1], 0.29) == (1, 1)
    assert one_level(probs, [0, 1], 0.31) == (0, 3)
    assert one_level(probs, [0, 1], 0.31, threshold_acc=0.5) == (1, 1)  # (0.1 + 0.2) / 0.5 = 0.6
    assert one_level(probs, [0, 1], 0.61, threshold_acc=0.5) == (0, 3)
    assert one_level(probs, [0, 2], 0.99, threshold_single=0.3) == (1, 2)
    assert one_level(probs, [0, 2], 0.99, threshold_single=0.31) == (0, 3)
    assert one_level(probs, [2, 0], 0.99, threshold_single=0.1) == (
        1,
        2,
    )  # the first of two that are both likely enough


def test_siblings_are_tried_in_their_order() -> None:
    """Node 2 before node 1: a coin below the probability of 2 takes it."""
    made, rows = outputs(1, 3, 2), torch.tensor([[[0.3, 0.4, 0.3]] * 3])
    for coin, accepted in ((0.39, [0, 2]), (0.41, [0, 1]), (0.69, [0, 1])):
        sglang.tree_speculative_sampling_target_only(
            *made, torch.tensor([[9, 0, 1]]), torch.arange(3)[None], torch.tensor([[2, -1, -1]]),
            torch.tensor([[-1, -1, 1]]), torch.full((1, 3), coin), torch.zeros(1), rows, torch.zeros_like(rows),
        )  # fmt: skip
        assert made[1].tolist() == [accepted]


def test_what_is_impossible_is_never_taken() -> None:
    assert one_level([0.0, 1.0, 0.0, 0.0], [0, 2], 0.0) == (0, 1)
    assert one_level([0.0, 1.0, 0.0, 0.0], [0, 2], 0.0, threshold_single=0.0) == (0, 1)
    assert one_level([0.5, 0.3, 0.2, 0.0], [0, 0], 0.6) == (0, 1)  # a token that two siblings share counts once
    assert one_level([0.5, 0.5, 0.0, 0.0], [-1, 99], 0.0)[0] == 0  # ids out of range are no tokens
    accepted, token = one_level([0.5, 0.5, 0.0, 0.0], [0, 1], 0.999)
    assert accepted == 1 and token in (0, 1)


def random_tree(rng: random.Random, nodes: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Children of each node in the order in which they are tried, and the two links."""
    parents = [-1, *(rng.randrange(max(0, n - 4), n) for n in range(1, nodes))]
    children = [[n for n in range(nodes) if parents[n] == p] for p in range(nodes)]
    for c in children:
        rng.shuffle(c)
    first = [c[0] if c else -1 for c in children]
    sibling = [-1] * nodes
    for c in children:
        for a, b in itertools.pairwise(c):
            sibling[a] = b
    return children, first, sibling


def walked(tree: tuple[list[list[int]], list[int], list[int]], b: int, given: dict[str, Tensor], room: int,
           single: float, acc: float) -> tuple[list[int], dict[tuple[int, int], float]]:  # fmt: skip
    """The accepted nodes from the root on, and by parent and token the probabilities of what was rejected."""
    path, rejected = [0], {}
    for _ in range(room - 1):
        node, mass, taken = path[-1], 0.0, None
        for child in tree[0][node]:
            token = int(given["candidates"][b, child])
            p = float(given["target_probs"][b, node, token])
            mass += 0.0 if (node, token) in rejected else p
            if p > 0 and (float(given["uniform_samples"][b, node]) < mass / max(acc, 1e-9) or p >= single):
                taken = child
                break
            rejected[node, token] = p
        if taken is None:
            break
        path.append(taken)
    return path, rejected


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.5, 0.7), (0.0, 0.0)])
def test_what_is_tried_and_rejected_is_written_down(thresholds: tuple[float, float]) -> None:
    """As SGLang's kernels do: at every node of the path but one at the depth limit."""
    batch, nodes, room, vocab = 200, 9, 4, 7
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    trees = [random_tree(rng, nodes) for _ in range(batch)]
    given = {
        "candidates": torch.randint(vocab, (batch, nodes), generator=generator),
        "retrive_index": torch.arange(batch * nodes).view(batch, nodes),
        "retrive_next_token": torch.tensor([first for _, first, _ in trees]),
        "retrive_next_sibling": torch.tensor([sibling for _, _, sibling in trees]),
        "uniform_samples": torch.rand(batch, nodes, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": torch.randn(batch, nodes, vocab, generator=generator).mul(2).softmax(-1),
        "draft_probs": torch.zeros(batch, nodes, vocab),
    }
    named = dict(zip(("threshold_single", "threshold_acc"), thresholds, strict=True))
    made, again, shared = outputs(batch, nodes, room), outputs(batch, nodes, room), torch.zeros(1, 1, 1)
    sglang.tree_speculative_sampling_target_only_triton(*made, **given, **named)
    lengths = set()
    for b, tree in enumerate(trees):
        path, rejected = walked(tree, b, given, room, *thresholds)
        assert made[1][b, : len(path)].tolist() == [b * nodes + node for node in path]
        assert int(made[2][b]) == len(path) - 1
        expected = torch.zeros(nodes, vocab)
        for (node, token), p in rejected.items():
            expected[node, token] = p
        assert torch.equal(given["draft_probs"][b], expected)
        lengths.add(len(path))
    assert len(lengths) >= 3 or thresholds == (0.0, 0.0)
    given["draft_probs"] = shared.expand(batch, nodes, vocab)  # has no room for them
    sglang.tree_speculative_sampling_target_only(*again, **given, **named)
    assert all(map(torch.equal, made, again)) and float(shared) == 0


def test_greedy_paths_are_followed() -> None:
    rng, batch, nodes, room, vocab = random.Random(0), 300, 9, 4, 3
    trees = [random_tree(rng, nodes) for _ in range(batch)]
    candidates = [[rng.randrange(vocab) for _ in range(nodes)] for _ in trees]
    predict = [[rng.randrange(vocab) for _ in range(nodes)] for _ in trees]
    places = torch.stack([b * nodes + torch.randperm(nodes, generator=torch.Generator().manual_seed(b))
                          for b in range(batch)])  # fmt: skip
    at_places = torch.empty(batch * nodes, dtype=torch.int64)
    at_places[places.flatten()] = torch.tensor(predict).flatten()
    made = outputs(batch, nodes, room)
    sglang.verify_tree_greedy(
        *made, torch.tensor(candidates), places, torch.tensor([t[1] for t in trees]),
        torch.tensor([t[2] for t in trees]), at_places.view(batch, nodes),
    )  # fmt: skip
    tokens = emitted(*made)
    lengths = set()
    for b, (children, _, _) in enumerate(trees):
        path, node = [0], 0
        while len(path) < room:
            found = [n for n in children[node] if candidates[b][n] == predict[b][node]]
            if not found:
                break
            node = found[0]
            path.append(node)
        assert made[1][b, : len(path)].tolist() == places[b, path].tolist()
        assert tokens[b].tolist() == [predict[b][n] for n in path] + [-1] * (room - len(path))
        lengths.add(len(path))
    assert lengths == {1, 2, 3, 4}


def candidates_of(topk: int, depth: int, nodes: int, rng: random.Random) -> tuple[list[int], list[int], dict[int, int]]:
    """EAGLE's candidates: the first `topk` hang from the root, each level expands `topk` of the last; a selection with
    whatever its nodes hang from; and each selected candidate's parent, -1: the root."""
    parent_list, parent_of = [-1], dict.fromkeys(range(topk), -1)
    level, following = list(range(topk)), topk
    for _ in range(depth - 1):
        expanded = sorted(rng.sample(level, topk))
        level = []
        for one in expanded:
            parent_list.append(one)
            for _ in range(topk):
                parent_of[following] = one
                level.append(following)
                following += 1
    selected: set[int] = set()
    while len(selected) < nodes - 1:
        allowed = [c for c in parent_of if c not in selected and (parent_of[c] in selected or parent_of[c] < 0)]
        selected.add(rng.choice(allowed))
    return parent_list, sorted(selected), parent_of


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("nodes", [1, 7, 20])
def test_trees_are_read_off_their_masks(nodes: int, dtype: torch.dtype) -> None:
    """Whatever stands behind the diagonal, and behind the last tree."""
    rng, batch = random.Random(nodes), 3
    given = [[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(batch)]
    trees, lengths = [sk.DraftTree.from_parents(parents) for parents in given], torch.tensor([5, 0, 9])
    behind = torch.ones(nodes, nodes, dtype=torch.bool).triu(1)
    mask = torch.stack([tree.ancestors().view(nodes, nodes) for tree in trees]) | behind
    positions, index, first, sibling = (torch.empty(batch, nodes, dtype=torch.int64) for _ in range(4))
    sglang.reconstruct_indices_from_tree_mask(
        torch.nn.functional.pad((3 * mask).to(dtype).flatten(), (0, 5), value=1),
        lengths,
        positions.view(-1),
        index,
        first,
        sibling,
        batch,
        nodes,
    )
    assert index.tolist() == torch.arange(batch * nodes).view(batch, nodes).tolist()
    for b, tree in enumerate(trees):
        assert first[b].tolist() == tree.first_child.tolist() and sibling[b].tolist() == tree.next_sibling.tolist()
        assert positions[b].tolist() == (tree.depth + lengths[b]).tolist()


@pytest.mark.parametrize("mode", [sglang.FULL_MASK, sglang.QLEN_ONLY, sglang.QLEN_ONLY_BITPACKING])
@pytest.mark.parametrize(
    ("topk", "depth", "nodes"), [(2, 3, 6), (4, 5, 16), (3, 1, 3), (1, 4, 5), (2, 2, 1), (4, 6, 20)]
)
def test_trees_are_built(topk: int, depth: int, nodes: int, mode: int) -> None:
    rng, batch = random.Random(topk), 4
    made = [candidates_of(topk, depth, nodes, rng) for _ in range(batch)]
    lengths = torch.tensor([5, 0, 11, 2])
    sizes = {
        sglang.FULL_MASK: (int(lengths.sum()) * nodes + batch * nodes**2, torch.bool),
        sglang.QLEN_ONLY: (batch * nodes**2, torch.bool),
        sglang.QLEN_ONLY_BITPACKING: (
            batch * nodes, torch.uint8 if nodes <= 8 else torch.uint16 if nodes <= 16 else torch.uint32,
        ),
    }  # fmt: skip
    size, dtype = sizes[mode]
    mask = torch.ones(size, dtype=dtype)
    positions, index = torch.empty(batch * nodes, dtype=torch.int64), torch.empty(batch, nodes, dtype=torch.int64)
    first, sibling = torch.full((batch, nodes), -1), torch.full((batch, nodes), -1)
    sglang.build_tree_kernel_efficient(
        torch.tensor([m[0] for m in made]), torch.tensor([m[1] for m in made], dtype=torch.int64), lengths, mask,
        positions, index, first, sibling, topk, depth, nodes, mode,
    )  # fmt: skip
    assert index.tolist() == torch.arange(batch * nodes).view(batch, nodes).tolist()
    start = 0
    for b, (_, selected, parent_of) in enumerate(made):
        parents = [-1, *(0 if parent_of[c] < 0 else selected.index(parent_of[c]) + 1 for c in selected)]
        tree = sk.DraftTree.from_parents(parents)
        assert first[b].tolist() == tree.first_child.tolist() and sibling[b].tolist() == tree.next_sibling.tolist()
        assert positions.view(batch, nodes)[b].tolist() == (tree.depth + lengths[b]).tolist()
        context = int(lengths[b])
        sees = tree.attention_mask(lengths[b : b + 1], context + nodes)[0, 0]
        if mode == sglang.FULL_MASK:
            end = start + nodes * (context + nodes)
            assert torch.equal(mask[start:end].view(nodes, -1), sees)
            start = end
        elif mode == sglang.QLEN_ONLY:
            assert torch.equal(mask.view(batch, nodes, nodes)[b], sees[:, context:])
        else:
            bits = [[node >> i & 1 for i in range(nodes)] for node in mask.view(batch, nodes)[b].tolist()]
            assert bits == sees[:, context:].int().tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32])
@pytest.mark.parametrize("mode", [sglang.FULL_MASK, sglang.QLEN_ONLY, sglang.QLEN_ONLY_BITPACKING])
def test_a_mask_is_bytes_of_any_type_and_may_be_larger(mode: int, dtype: torch.dtype) -> None:
    """A root and nine nodes that hang from it: two bytes a node where packed."""
    nodes, lengths = 10, torch.tensor([3, 1])
    size = {sglang.FULL_MASK: (4 + 2 * nodes) * nodes, sglang.QLEN_ONLY: 2 * nodes**2}.get(mode, 4 * nodes)
    mask = torch.full((size + 8,), 1, dtype=torch.uint8).view(dtype)
    spare = [torch.empty(2, nodes, dtype=torch.int64) for _ in range(3)]
    arguments = (
        torch.tensor([[-1]] * 2), torch.arange(nodes - 1).repeat(2, 1), lengths, mask,
        torch.empty(2 * nodes, dtype=torch.int64), *spare, nodes - 1, 1, nodes, mode,
    )  # fmt: skip
    sglang.build_tree_kernel_efficient(*arguments)
    found, sees = mask.view(torch.uint8), torch.eye(nodes, dtype=torch.uint8)
    sees[:, 0] = 1
    assert found[size:].tolist() == [1] * 8
    if mode == sglang.FULL_MASK:
        expected = [torch.cat([torch.ones(nodes, int(n), dtype=torch.uint8), sees], 1).flatten() for n in lengths]
    elif mode == sglang.QLEN_ONLY:
        expected = [sees.flatten()] * 2
    else:
        bits = [sum(int(bit) << i for i, bit in enumerate(row)) for row in sees]
        expected = [torch.tensor([byte for b in bits for byte in (b & 255, b >> 8)], dtype=torch.uint8)] * 2
    assert torch.equal(found[:size], torch.cat(expected))
    with pytest.raises(ValueError, match=f"tree_mask must have {size} bytes or more, got {size - 4}"):
        sglang.build_tree_kernel_efficient(
            *arguments[:3], mask.view(torch.uint8)[: size - 4].view(dtype), *arguments[4:]
        )


@pytest.mark.parametrize("last", [5, 900, -900])
def test_a_node_whose_parent_was_not_selected_is_left_out(last: int) -> None:
    """Or is no candidate at all, as where scores were NaN."""
    first, sibling = torch.empty(1, 4, dtype=torch.int64), torch.empty(1, 4, dtype=torch.int64)
    mask, positions = torch.ones(16, dtype=torch.bool), torch.empty(4, dtype=torch.int64)
    # candidates 0 and 1 hang from the root; 2 and 3 from candidate 0, 4 and 5 from candidate 1, which was not selected
    sglang.build_tree_kernel_efficient(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 2, last]]), torch.tensor([3]), mask, positions,
        torch.empty(1, 4, dtype=torch.int64), first, sibling, 2, 2, 4, sglang.QLEN_ONLY,
    )  # fmt: skip
    assert first.tolist() == [[1, 2, -1, -1]] and sibling.tolist() == [[-1] * 4]
    assert mask.view(4, 4)[3].tolist() == [False, False, False, True] and positions.tolist() == [3, 4, 5, 3]


def test_trees_are_cut_to_the_room_of_the_outputs_without_a_flag() -> None:
    predicts, accept_index, accept_token_num = outputs(1, 3, 2)
    nodes = torch.arange(3)[None]
    with environment(SPECDEC_CHECK="1"):
        sglang.verify_tree_greedy(
            predicts, accept_index, accept_token_num, nodes, nodes, torch.tensor([[1, 2, -1]]), torch.full((1, 3), -1),
            torch.tensor([[1, 2, 7]]),
        )  # fmt: skip
    assert accept_token_num.tolist() == [1] and accept_index.tolist() == [[0, 1]] and predicts[:2].tolist() == [1, 2]


def test_what_is_refused() -> None:
    def call(change: Callable[[dict[str, Any]], object]) -> None:
        index = torch.arange(4).view(2, 2)
        predicts, accept_index, accept_token_num = outputs(2, 2, 2)
        given = {
            "predicts": predicts, "accept_index": accept_index, "accept_token_num": accept_token_num,
            "candidates": index, "retrive_index": index, "retrive_next_token": index, "retrive_next_sibling": index,
            "uniform_samples": torch.zeros(2, 2), "uniform_samples_for_final_sampling": torch.zeros(2),
            "target_probs": torch.ones(2, 2, 5) / 5, "draft_probs": torch.zeros(2, 2, 5),
        }  # fmt: skip
        change(given)
        sglang.tree_speculative_sampling_target_only(**given)

    op = "tree_speculative_sampling_target_only"
    for name in (
        "predicts",
        "accept_token_num",
        "candidates",
        "retrive_next_sibling",
        "uniform_samples",
        "draft_probs",
    ):
        with pytest.raises(TypeError, match=f"{op}: {name} must be (int32|int64|float32), got float64"):
            call(lambda given, name=name: given.update({name: given[name].double()}))
        with pytest.raises(ValueError, match=f"{op}: {name} must be .*, got "):
            call(lambda given, name=name: given.update({name: given[name][..., None]}))
    with pytest.raises(ValueError, match=rf"{op}: threshold_acc must be in \[0, 1\], got 1.5"):
        call(lambda given: given.update(threshold_acc=1.5))
    with pytest.raises(ValueError, match=r"uniform_samples must be \[batch=2, >= 1\], got \[2, 0\]"):
        sglang.chain_speculative_sampling_triton(
            *outputs(2, 2, 2), *torch.arange(16).view(4, 2, 2), torch.zeros(2, 0), torch.zeros(2),
            torch.ones(2, 2, 5) / 5, torch.ones(2, 1, 5) / 5,
        )  # fmt: skip
    with pytest.raises(ValueError, match="draft_token_num must be <= 32 where tree_mask_mode is 2, got 33"):
        sglang.build_tree_kernel_efficient(
            torch.zeros(1, 1).long(), torch.zeros(1, 32).long(), torch.zeros(1).long(), torch.zeros(132).byte(),
            torch.zeros(33).long(), *torch.zeros(3, 1, 33).long(), 32, 1, 33, 2,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"target_probs must be \[batch=2, num_nodes=2, vocab >= 2\]"):
        call(lambda given: given.update(target_probs=torch.ones(2, 2, 1), draft_probs=torch.zeros(2, 2, 1)))
    with pytest.raises(ValueError, match=r"parent_list must be \[batch=1, >= topk \* \(depth - 1\) \+ 1=5\]"):
        sglang.build_tree_kernel_efficient(
            torch.zeros(1, 3).long(), torch.tensor([[0, 2, 8]]), torch.zeros(1).long(), torch.zeros(16).byte(),
            torch.zeros(4).long(), *torch.zeros(3, 1, 4).long(), 2, 3, 4, 1,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"tree_mask_mode must be in \[0, 2\], got 3"):
        sglang.build_tree_kernel_efficient(
            *torch.zeros(2, 1, 1).long(), torch.zeros(1).long(), torch.zeros(4, dtype=torch.bool),
            torch.zeros(2).long(), *torch.zeros(3, 1, 2).long(), 1, 1, 2, 3,
        )  # fmt: skip
