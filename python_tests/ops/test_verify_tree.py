"""`verify_tree`: its contract on every backend; test_trees_agree.py compares random steps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains, trees
from python_tests.ops.inputs import DTYPES, SCALARS, per_row, refuses, same_bits, strided, tensors
from python_tests.ops.trees import run
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.backends import OPS, implementation
from specdec_kernels.flat import LOSSLESS
from specdec_kernels.ops.arguments import TREE_ACCEPTANCES
from specdec_kernels.sampling import DEFAULT_PARAMS

OP = "verify_tree"
SIGNATURE = (
    ["target_logits", "tree", "node_tokens", "draft_logits"],
    ["target_probs", "draft_probs", "acceptance", "target_law", "epsilon", "delta", "params", "draft_params",
     "processors", "draft_stats", "draft_token_map", "eos_token_ids", "uniform_samples", "noise_keys", "seeds", "step",
     "positions", "backend"],
)  # fmt: skip
CALLS = {
    "sample": lambda: small("sample", "none", per_sequence=False),
    "greedy": lambda: small("greedy", "none"),
    "match": lambda: small("match", "none"),
    "typical": lambda: small("typical", "none"),
    "seeds": lambda: {
        **small("sample", "none"),
        "uniform_samples": None,
        "seeds": torch.arange(5),
        "step": torch.arange(5),
    },
    "recursive": lambda: small("recursive", "reduced"),
    "traversal": lambda: small("traversal", "stats", per_sequence=False),
    "traversal-probs": lambda: small("traversal", "probs"),
    "target_probs": lambda: chains.with_target_probs(small("recursive", "probs"), sk.SamplingParams(top_k=9)),
    "opt": lambda: small("sample", "full", law=laws.Opt(0.4, bonus="cascade")),
}


def small(acceptance: str, kind: str, **more: Any) -> trees.Arguments:
    """A call for `CALLS`: five sequences with parameters of their own."""
    given: dict[str, Any] = {"acceptance": acceptance, "kind": kind, "params": per_row(5), "draft_params": SCALARS}
    return {**trees.make(3, 5, 7, 40, **given, **more), "eos_token_ids": torch.tensor([3])}


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_a_sequence_does_not_depend_on_its_batch(backend: Backend, acceptance: str) -> None:
    arguments = trees.make(7, backend.batch(12), 9, 200, acceptance=acceptance)
    whole = run(backend, arguments)
    for rows in ([0], [5, 2], list(range(6))[::-1]):
        part = run(backend, trees.select(arguments, rows))
        for name in trees.OUTPUTS:
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_a_chain_is_a_tree(backend: Backend, acceptance: str) -> None:
    """On a tree without branches "recursive" is the token rule, token by token, and "traversal" the block rule: in law;
    and where everything is accepted, or nothing can be, token by token.
    """
    rng = torch.Generator().manual_seed(3)
    chain = chains.make(rng, backend.batch(40), 3, 60, acceptance=acceptance)
    target, tokens = chain["target_logits"], chain["draft_tokens"]
    barred = target.clone()
    barred[:, :3].scatter_(2, tokens[..., None], -math.inf)
    tree = sk.DraftTree.from_parents([-1, 0, 1, 2])
    name = {"token": "recursive", "block": "traversal"}[acceptance]
    steps: list[tuple[dict[str, Any], int | None]] = [
        ({}, None), ({"draft_logits": target[:, :3].contiguous()}, 3), ({"target_logits": barred}, 0),
    ]  # fmt: skip
    for change, accepted in steps:
        step = {**chain, **change}
        given: dict[str, Any] = {
            **{k: step[k] for k in ("target_logits", "uniform_samples", "params", "draft_params")}, "tree": tree,
            "node_tokens": torch.nn.functional.pad(tokens, (1, 0)),
            "draft_logits": torch.cat([step["draft_logits"], target[:, :1]], 1),
        }  # fmt: skip
        got, want = run(backend, given, acceptance=name), chains.run(backend, step)
        full = want.num_accepted == 3
        assert torch.equal(got.num_accepted == 3, full)
        assert accepted is None or (want.num_accepted == accepted).all()
        same = full if acceptance == "block" and accepted is None else torch.ones_like(full)
        assert torch.equal(got.tokens[same], want.tokens[same])
        assert torch.equal(got.num_accepted[same], want.num_accepted[same])


def test_greedy_and_match_walk_along_plain_decoding(backend: Backend) -> None:
    for acceptance in ("greedy", "match"):
        arguments = trees.make(11, backend.batch(20), 9, 30, acceptance=acceptance, kind="none")
        keys = arguments.get("noise_keys")
        wanted = (
            arguments["target_logits"].argmax(-1)
            if keys is None
            else sk.sample(arguments["target_logits"], noise_keys=keys, backend="reference").token
        )
        out, parents = run(backend, arguments), arguments["tree"].parents
        for b in range(len(wanted)):
            node, path = 0, []
            while True:
                y = int(wanted[b, node])
                path.append(y)
                below = [c for c in range(9) if parents[b, c] == node and int(arguments["node_tokens"][b, c]) == y]
                if not below:
                    break
                node = below[0]
            assert out.tokens[b, : len(path)].tolist() == path and int(out.num_tokens[b]) == len(path)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_typical_acceptance_is_its_definition(backend: Backend, temperature: float) -> None:
    """p and H at the sampling temperature and before truncation; the longest path, of equal ones the likeliest."""
    trees.check_typical(lambda **given: run(backend, given), temperature, backend.batch(30))


def test_thresholds_above_float32_are_infinite(backend: Backend) -> None:
    arguments = trees.make(13, backend.batch(30), 12, 20, acceptance="typical", kind="none")
    for wide, infinite in (({"epsilon": 1e39}, {"epsilon": math.inf}), ({"delta": 10**300}, {"delta": math.inf})):
        same_bits(run(backend, arguments, **wide), run(backend, arguments, **infinite))


def test_outputs_are_well_formed(backend: Backend) -> None:
    for acceptance in trees.ACCEPTANCES:
        arguments = trees.make(17, backend.batch(16), 10, 40, acceptance=acceptance, spoil_tokens=0.1)
        arguments["node_tokens"][3, 0] = -1
        out, tree = run(backend, arguments), arguments["tree"]
        assert int(out.num_tokens[3]) == 0 and (out.tokens[3] == -1).all() and (out.accepted_nodes[3] == -1).all()
        for b in range(len(out.tokens)):
            n, nodes = int(out.num_accepted[b]), out.accepted_nodes[b].tolist()
            assert nodes[n:] == [-1] * (tree.max_depth - n) and int(out.num_tokens[b]) in (n, n + 1)
            for above, node in zip([0, *nodes], nodes[:n], strict=False):
                assert int(tree.parents[b, node]) == above
            assert out.tokens[b, :n].tolist() == arguments["node_tokens"][b, nodes[:n]].tolist()


def test_flags(backend: Backend) -> None:
    trees.check_flags(lambda **given: run(backend, given))


@pytest.mark.parametrize("kind", ["probs", "stats"])
@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_children_of_what_is_no_distribution_are_skipped(backend: Backend, acceptance: str, kind: str) -> None:
    """Of the root in sequences of even number: the next token is the target's own."""
    arguments = trees.make(61, 8, 6, 40, acceptance=acceptance, kind=kind)
    clean = run(backend, arguments)
    if kind == "probs":
        arguments["draft_probs"][::2, 0] *= 1.02
    else:
        arguments["draft_stats"].values[::2, 0, 3] = 0.0
    out = run(backend, arguments)
    assert out.status.tolist() == [int(sk.Status.BAD_DRAFT), 0] * 4 and (out.num_accepted[::2] == 0).all()
    same_bits([t[1::2] for t in out[:4]], [t[1::2] for t in clean[:4]])
    alone = backend.verify_chain(
        *backend(arguments["target_logits"][:, :1], arguments["node_tokens"][:, :0]),
        uniform_samples=backend(arguments["uniform_samples"][:, :1].contiguous()),
    )
    same_bits(out.tokens[::2, 0], alone.tokens[::2, 0])


def test_a_cascade_without_a_draft_distribution_is_the_target(backend: Backend) -> None:
    arguments = trees.make(62, 8, 4, 40, acceptance="sample", kind="stats", law=laws.Chow(-1.0, bonus="cascade"))
    arguments["draft_stats"].values[..., 3] = math.nan
    out = run(backend, arguments)
    plain = {k: v for k, v in arguments.items() if k != "target_law" and not k.startswith("draft_")}
    same_bits(out.tokens, run(backend, plain).tokens)
    assert (out.status == sk.Status.BAD_DRAFT).all()


def test_pruned_trees_and_status(backend: Backend) -> None:
    bad = torch.tensor([[-1, 0, 5, 1], [-1, 0, 1, 2]])
    arguments = trees.make(19, 2, 4, 9, acceptance="greedy", kind="none")
    tree = sk.DraftTree.from_parents(bad, max_depth=3)
    out = run(backend, {**arguments, "tree": tree})
    assert out.status.tolist() == [int(sk.Status.BAD_TREE), 0]


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(backend: Backend, dtype: torch.dtype, acceptance: str) -> None:
    arguments = chains.on(backend, trees.make(31, 4, 7, 1100, acceptance=acceptance, dtype=dtype))
    turned = dict(arguments)
    for name in ("target_logits", "draft_logits"):
        turned[name] = strided(turned[name])
    for name in ("node_tokens", "uniform_samples", "noise_keys"):
        if name in turned:
            turned[name] = turned[name].t().contiguous().t()
    dense = backend.verify_tree(**arguments)
    same_bits(dense, backend.verify_tree(**turned))
    turned["target_logits"] = arguments["target_logits"].transpose(0, 1).contiguous().transpose(0, 1)
    turned["node_tokens"] = arguments["node_tokens"].int()
    same_bits(dense, backend.verify_tree(**turned))


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_inputs_are_untouched(backend: Backend, acceptance: str) -> None:
    arguments = chains.on(backend, trees.make(37, 4, 7, 60, acceptance=acceptance, spoil_tokens=0.2))
    arguments["target_logits"][1, 0, 2] = math.nan
    links = [arguments["tree"].links]
    before = [t.clone() for t in tensors(arguments) + links]
    backend.verify_tree(**arguments)
    same_bits(before, tensors(arguments) + links)


@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_draft_stats_are_used_as_given(backend: Backend, acceptance: str) -> None:
    params = sk.SamplingParams(1.2, top_k=40)
    arguments = trees.make(41, backend.batch(32), 8, 90, acceptance=acceptance, kind="stats", draft_params=params)
    arguments["draft_stats"] = backend.row_stats(*backend(arguments["draft_logits"], params))
    kept = run(backend, arguments)
    same_bits(kept, run(backend, {k: v for k, v in arguments.items() if k != "draft_stats"}))
    values = arguments["draft_stats"].values.clone()
    values[..., 0] += 20  # as if Q were tiny: whatever is tried is accepted
    doctored = sk.RowStats(values, arguments["draft_stats"].argmax, arguments["draft_stats"].status)
    out = run(backend, {**arguments, "draft_stats": doctored})
    first = backend(arguments["tree"]).first_child[:, 0]
    assert torch.equal(out.accepted_nodes[:, 0], first) and not torch.equal(kept.accepted_nodes[:, 0], first)


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_rows_that_the_rule_does_not_get_to_are_not_read(backend: Backend, acceptance: str) -> None:
    """Rows full of NaN set no flag and change nothing: below the accepted node where a walk goes down, at leaves that
    another path beats.
    """
    arguments = trees.make(43, backend.batch(24), 9, 200, acceptance=acceptance, spread=3.0)
    clean = run(backend, arguments)
    depth, parents = arguments["tree"].depth, arguments["tree"].parents
    last = torch.zeros(len(depth), dtype=torch.int64)
    for b, n in enumerate(clean.num_accepted.tolist()):
        last[b] = clean.accepted_nodes[b, n - 1] if n else 0
    if acceptance in ("traversal", "typical"):  # they look at inner nodes all over the tree
        inner = torch.zeros_like(depth, dtype=torch.bool).scatter(1, parents.clamp_min(0), True)
        unread = ~inner & (torch.arange(9) != last[:, None])
    else:
        unread = depth > depth.gather(1, last[:, None])
    assert unread.any()
    for name in ("target_logits", "draft_logits"):
        arguments[name] = arguments[name].masked_fill(unread[..., None], math.nan)
    same_bits(run(backend, arguments), clean)


def test_bad_parameters_are_flagged(backend: Backend) -> None:
    arguments = trees.make(47, 4, 5, 50, acceptance="recursive")
    clean = run(backend, arguments)
    bad = {"params": sk.SamplingParams(torch.tensor([1.0, -1.0, math.nan, math.inf]))}
    out = run(backend, {**arguments, **bad})
    assert out.status.tolist() == [0] + 3 * [int(sk.Status.BAD_PARAM)]
    same_bits(out.tokens, clean.tokens)


# --- calls of the dispatcher, which nothing has validated -------------------------------------------------------------


def direct(backend: Backend, acceptance: str, links: torch.Tensor, tokens: torch.Tensor, max_depth: int,
           towards_20: float = 0.0) -> Any:  # fmt: skip
    """`verify_tree` as the dispatcher has it, on a tree of any links; the target's logit of id 20 is raised."""
    batch, num_nodes = tokens.shape
    rng = torch.Generator().manual_seed(53)
    target, draft = (torch.randn(batch, num_nodes, 21, generator=rng) for _ in range(2))
    coins = None if acceptance in ("greedy", "match") else torch.rand(batch, num_nodes, generator=rng)
    target[..., 20] += towards_20
    keys = torch.arange(batch * num_nodes).view(batch, num_nodes) if acceptance == "match" else None
    op = implementation(OP, torch.ops.specdec.verify_tree.default, backend.name, torch.device(backend.device))
    given = backend(target, draft, coins, keys, tokens, links, torch.zeros(links.shape[1:-1], dtype=torch.int32))
    target, draft, coins, keys, tokens, links, status = given
    none = dict.fromkeys(OPS[OP].alone)
    leaves = none | {"target_logits": target, "draft_logits": draft, "uniform_samples": coins, "noise_keys": keys}
    leaves |= {"node_tokens": tokens, "links": links, "tree_status": status, "max_depth": max_depth, "step": 0}
    packed = OPS[OP].pack(
        **leaves, law=LOSSLESS, params=DEFAULT_PARAMS, draft_params=DEFAULT_PARAMS,
        acceptance=TREE_ACCEPTANCES[acceptance], epsilon=0.09, delta=0.3, target_probs=False,
    )  # fmt: skip
    return op(*packed)


def check_whole(out: tuple[torch.Tensor, ...], num_nodes: int, max_depth: int) -> None:
    """Ids and counts are in their ranges, whatever was given."""
    tokens, accepted, emitted, _, nodes = (t.cpu() for t in out)
    assert ((tokens >= -1) & (tokens < 21)).all() and ((nodes >= -1) & (nodes < num_nodes)).all()
    assert ((accepted >= 0) & (accepted <= max_depth)).all()
    assert ((emitted == accepted) | (emitted == accepted + 1)).all()
    assert torch.equal((nodes >= 0).sum(-1).int(), accepted) and torch.equal((tokens >= 0).sum(-1).int(), emitted)


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_any_links_and_tokens_do_no_harm(backend: Backend, acceptance: str) -> None:
    """Out of range, cyclic or contradictory: nothing is read or written out of bounds, or read for ever."""
    choices = torch.tensor([-(2**63), -(2**32), -2, -1, *range(8), 8, 9, 2**31, 2**32 + 1, 2**63 - 1])
    rng = torch.Generator().manual_seed(59)
    links = [choices[torch.randint(0, len(choices), (40, 8), generator=rng)] for _ in range(4)]
    good = sk.DraftTree.from_parents([-1, 0, 0, 1, 1, 3, 3, 5])
    right = (good.parents, good.first_child, good.next_sibling, torch.tensor([0, 3, 5, 3, 7, 1, 20, 2]))
    for some, those in zip(links, right, strict=True):
        some[20:] = torch.where(torch.rand(20, 8, generator=rng) < 0.2, some[20:], those)  # most are as they should be
    *links, tokens = links
    tokens[:, 0] = 0
    rows = backend.batch(40)
    check_whole(direct(backend, acceptance, torch.stack(links)[:, -rows:], tokens[-rows:], 7), 8, 7)


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_a_tree_deeper_than_it_says_is_cut(backend: Backend, acceptance: str) -> None:
    """It is what it would be without the nodes that are deeper: no token is of these, nor from the row of one."""
    rng = torch.Generator().manual_seed(67)
    rows = backend.batch(40)
    for parents in ([-1, 0, 0, 1, 1, 2, 3, 3, 6, 8], [-1, *range(11)]):
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        tokens = torch.where(torch.rand(rows, len(parents), generator=rng) < 0.6, 20, torch.arange(len(parents)) % 20)
        links = sk.DraftTree.from_parents(parents).links
        for most in range(3):
            inside = torch.tensor([depth <= most for depth in depths])
            kept = torch.where(inside & (links >= 0) & inside[links.clamp_min(0)], links, -1)
            out = direct(backend, acceptance, links, tokens, most, 5.0)
            check_whole(out, len(parents), most)
            same_bits(out, direct(backend, acceptance, kept, tokens, most, 5.0))
            assert (out[1] == most).any()


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_links_to_the_same_nodes_from_everywhere_take_no_time(backend: Backend, acceptance: str) -> None:
    """Every link is to the next node: followed blindly, 2^64 ways down, none of which is accepted."""
    following = torch.arange(1, 65)
    links = torch.stack([torch.arange(-1, 63), following, following])
    check_whole(direct(backend, acceptance, links, torch.arange(64).expand(1, 64) % 20, 63, 40.0), 64, 63)


def test_a_tree_too_large_for_the_kernels_is_refused(backend: Backend) -> None:
    if backend.name == "reference":
        pytest.skip("it has no limit")
    for nodes, depth in ((1025, 1), (3, 65), (3, -1)):
        links = torch.full((3, nodes), -1)
        links[0, 1:] = 0
        with pytest.raises(RuntimeError, match="1 to 1024 nodes and is at most 64 deep"):
            direct(backend, "greedy", links, torch.zeros(1, nodes, dtype=torch.int64), depth)


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_the_reference_asks_the_device_for_nothing(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No host synchronisation: fake tensors have no values to look at."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = importlib.import_module("specdec_kernels.ops.verify_tree")
    reference = importlib.import_module("specdec_kernels.backends.reference.verify_tree").verify_tree
    monkeypatch.setattr(module, "dispatch", lambda *of: lambda *given: reference(OPS[OP].unpack(*given)))
    monkeypatch.setattr(module, "raise_for_status", lambda *of: None)
    made = trees.make(61, 3, 6, 40, acceptance=acceptance, kind="stats")
    expected = sk.verify_tree(**made)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
        out = sk.verify_tree(**given)
    for name in trees.OUTPUTS:
        got, want = getattr(out, name), getattr(expected, name)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_a_captured_call_does_what_the_call_does(backend: Backend, acceptance: str) -> None:
    """In a CUDA graph, replayed on other inputs; the capture also shows that nothing waits for the device."""
    if backend.device != "cuda":
        pytest.skip("no CUDA tensors")
    first, second = (chains.on(backend, trees.make(s, 8, 9, 700, acceptance=acceptance)) for s in (67, 71))
    second["tree"] = first["tree"]
    expected = backend.verify_tree(**second)
    backend.verify_tree(**first)  # compiles, and finds its scratch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.verify_tree(**first)
    for name, value in second.items():
        if isinstance(value, torch.Tensor):
            first[name].copy_(value)
    graph.replay()
    same_bits([getattr(out, n) for n in trees.OUTPUTS], [getattr(expected, n) for n in trees.OUTPUTS])


# --- what is refused --------------------------------------------------------------------------------------------------


GOOD = trees.make(23, 4, 5, 30, acceptance="recursive")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tree": [-1, 0]}, TypeError, "tree must be a DraftTree, got list"),
        ({"tree": sk.DraftTree.from_parents([-1, 0])}, ValueError,
         "tree must be of num_nodes=5, one or batch=4 of them, got [2]"),
        ({"tree": sk.DraftTree.from_parents([[-1, 0, 0, 0, 0]] * 3)}, ValueError,
         "tree must be of num_nodes=5, one or batch=4 of them, got [3, 5]"),
        ({"tree": GOOD["tree"].to("meta")}, ValueError, "tree must be on cpu, got meta"),
        ({"node_tokens": torch.zeros(4, 4).long()}, ValueError,
         "node_tokens must be [batch=4, num_nodes=5], got [4, 4]"),
        ({"node_tokens": torch.zeros(4, 5)}, TypeError, "node_tokens must be int64 or int32, got float32"),
        ({"target_logits": torch.zeros(4, 30)}, ValueError,
         "target_logits must be [batch, num_nodes, vocab], got [4, 30]"),
        ({"target_logits": torch.zeros(4, 5, 30).double()}, TypeError, "target_logits must be"),
        ({"acceptance": "block"}, ValueError,
         "acceptance must be one of sample, greedy, match, typical, recursive, traversal, got 'block'"),
        ({"draft_logits": None, "draft_params": None}, ValueError,
         "acceptance='recursive' needs draft_logits or draft_probs, got neither"),
        ({"draft_logits": torch.zeros(4, 4, 30)}, ValueError,
         "draft_logits must be [batch=4, num_nodes=5, vocab=30], got [4, 4, 30]"),
        ({"uniform_samples": None}, ValueError,
         "acceptance='recursive' needs uniform_samples unless params.temperature is 0, got None"),
        ({"uniform_samples": torch.zeros(4, 6)}, ValueError,
         "uniform_samples must be [batch=4, num_nodes=5], got [4, 6]"),
        ({"noise_keys": torch.zeros(4, 5, dtype=torch.int64)}, ValueError,
         "acceptance='recursive' takes uniform_samples, got noise_keys"),
        ({"acceptance": "match"}, ValueError, "acceptance='match' takes noise_keys, got uniform_samples"),
        ({"acceptance": "greedy", "noise_keys": torch.zeros(4, 5, dtype=torch.int64)}, ValueError,
         "acceptance='greedy' must come without noise_keys, got some"),
        ({"target_law": sk.laws.Chow(0.1)}, ValueError,
         "target_law must be None or a cascade with acceptance='sample'"),
        ({"target_law": sk.laws.Lossy(0.1), "acceptance": "sample"}, ValueError,
         "target_law must be None or a cascade with acceptance='sample', got Lossy"),
        ({"epsilon": -0.1}, ValueError, "epsilon must be a number >= 0, got -0.1"),
        ({"delta": math.nan}, ValueError, "delta must be a number >= 0, got nan"),
        ({"delta": 10**400}, ValueError, "delta must be a number in [0, 1.8e308] or infinity, got a larger integer"),
        ({"eos_token_ids": torch.zeros(1, 1, dtype=torch.int64)}, ValueError,
         "eos_token_ids must be [num_eos], got [1, 1]"),
        ({"backend": "none"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.verify_tree, GOOD, change, error, f"verify_tree: {message}")


def test_the_good_arguments_of_the_refusals_are_good(backend: Backend) -> None:
    assert (run(backend, GOOD).status == 0).all()


def test_children_that_had_all_of_p_leave_no_impossible_token(backend: Backend) -> None:
    """By rounding a child that has all that is left of P can be rejected, with nothing after it: it is drawn then."""
    minus, count = -math.inf, 24
    tree = sk.DraftTree.from_parents([-1, 0, 0])
    shift = 1e-4 * (1 + torch.arange(count) / 200)
    blank = torch.full_like(shift, minus)
    target = torch.stack([blank, (0.5 - shift).log(), (0.5 + shift).log(), blank], -1)[:, None].expand(-1, 3, -1)
    draft = torch.tensor([0.0, 0.5, 0.5, 0.0]).log().expand(count, 3, -1)
    coins = torch.tensor([0.5, 0.99999, 1 - 2**-53], dtype=torch.float64).expand(count, -1)
    for acceptance in ("recursive", "traversal"):
        out = backend.verify_tree(
            *backend(target.contiguous(), tree, torch.tensor([[0, 1, 2]]).expand(count, -1), draft.contiguous()),
            acceptance=acceptance, uniform_samples=backend(coins.contiguous()),
        )  # fmt: skip
        assert set(out.tokens[:, 0].tolist()) <= {1, 2} and (out.status == 0).all()


@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_what_hardly_any_draft_mass_is_left_for(backend: Backend, acceptance: str) -> None:
    """Of the draft's distribution 1e-39 is left, which has no inverse; the child there is accepted all the same."""
    out = two_siblings(
        backend, (0, 1), torch.tensor([0.3, 0.4, 0.3]).log(), torch.tensor([1.0, 1e-39, 0.0]), (0.5, 0.9, 0.3),
        acceptance=acceptance,
    )  # fmt: skip
    assert out.status.tolist() == [0] and out.tokens[:, 0].tolist() == [1]


@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_a_rejected_child_that_the_target_excludes_is_not_emitted(backend: Backend, acceptance: str) -> None:
    """What the first child leaves of the draft is, rounded, all on the second, and nothing is left of the target's."""
    out = two_siblings(
        backend, (2, 1), torch.tensor([5.0, 0.0, 0.0]), torch.tensor([0.9999938, 3.4424557e-14, 6.1441742e-06]),
        (0.3, 0.5, 0.5), acceptance=acceptance, params=sk.SamplingParams(0.0),
    )  # fmt: skip
    assert out.tokens.tolist() == [[0, -1]] and out.status.tolist() == [0]


def two_siblings(
    backend: Backend, tokens: tuple[int, int], target: torch.Tensor, draft_probs: torch.Tensor, coins: Sequence[float],
    **given: Any,
) -> sk.VerifyOutput:  # fmt: skip
    """A step with two children of the root; every node has these target logits and draft probabilities."""
    rows = [row.expand(1, 3, 3).contiguous() for row in (target, draft_probs)]
    inputs = backend(
        *rows, sk.DraftTree.from_parents([-1, 0, 0]), torch.tensor([[0, *tokens]]),
        torch.tensor([coins], dtype=torch.float64),
    )  # fmt: skip
    logits, probs, tree, ids, uniforms = inputs
    return backend.verify_tree(logits, tree, ids, draft_probs=probs, uniform_samples=uniforms, **given)


def test_a_tiny_residual_keeps_its_shape(backend: Backend) -> None:
    """Of P that Q nearly equals 8e-8 is left after the first child, (0.5, 0.3, 0.2) of it to each other id; after the
    second (0.2, 0.1) to two, as 0.1 is left to each of Q.
    """
    q = torch.tensor([0.99, 0.008, 0.001, 0.001], dtype=torch.float64)
    p = (q + 8e-8 * torch.tensor([-1.0, 0.5, 0.3, 0.2])).float()
    q[0] += 0.001  # so that the first child is rejected for certain
    for coin, token in ((0.6, 2), (0.63, 2), (0.7, 3)):
        out = backend.verify_tree(
            None, backend(sk.DraftTree.from_parents([-1, 0, 0])), backend(torch.tensor([[0, 0, 1]])),
            target_probs=backend(p.expand(1, 3, 4).contiguous()), acceptance="recursive",
            draft_probs=backend(q.float().expand(1, 3, 4).contiguous()),
            uniform_samples=backend(torch.tensor([[coin, 0.9999, 0.9]])),
        )  # fmt: skip
        assert out.tokens.tolist() == [[token, -1]] and out.status.tolist() == [0]


def test_target_probabilities_far_from_a_sum_of_1_are_flagged(backend: Backend) -> None:
    """And divided by it."""
    arguments = chains.with_target_probs(trees.make(3, 4, 6, 1100, acceptance="recursive"), sk.SamplingParams())
    expected = run(backend, arguments)
    arguments["target_probs"] = arguments["target_probs"] * torch.tensor([1.0, 1.009, 1.02, 0.98])[:, None, None]
    out = run(backend, arguments)
    same_bits(out.tokens, expected.tokens)
    assert out.status.tolist() == [0, 0, int(sk.Status.BAD_PARAM), int(sk.Status.BAD_PARAM)]


@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_a_reduced_draft_may_be_given_as_probabilities(backend: Backend, acceptance: str) -> None:
    given = trees.make(11, backend.batch(16), 7, 1500, acceptance=acceptance, kind="reduced")
    expected = sk.verify_tree(**given, backend="reference")
    given["draft_probs"] = given.pop("draft_logits").softmax(-1)
    out = run(backend, given)
    for name in trees.OUTPUTS:
        assert torch.equal(getattr(out, name).cpu(), getattr(expected, name)), name


def test_a_cascade_at_temperature_0_needs_no_random_numbers(backend: Backend) -> None:
    tree, cold = sk.DraftTree.from_parents([-1, 0]), sk.SamplingParams(0.0)
    rows = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]])
    given = backend(rows, tree, torch.tensor([[0, 1]]), rows)
    out = backend.verify_tree(*given, target_law=sk.laws.Chow(0.1), params=cold, draft_params=cold)
    assert out.tokens.tolist() == [[1, 0]]
    with pytest.raises(ValueError, match="unless params.temperature and draft_params.temperature are 0, got None"):
        backend.verify_tree(*given, target_law=sk.laws.Chow(0.1), params=cold)


@pytest.mark.parametrize(("acceptance", "nodes"), [("typical", [2, 3]), ("sample", [1, -1])])
def test_of_equal_siblings_the_first_counts_or_the_longest_path(
    backend: Backend, acceptance: str, nodes: list[int]
) -> None:
    rows = torch.full((1, 4, 9), -20.0)
    rows[0, 0, 5] = rows[0, 1:, 7] = 20.0
    given = backend(rows, sk.DraftTree.from_parents([-1, 0, 0, 2]), torch.tensor([[0, 5, 5, 7]]))
    out = backend.verify_tree(*given, acceptance=acceptance, uniform_samples=backend(torch.full((1, 4), 0.5)))
    assert out.accepted_nodes.tolist() == [nodes]


def test_rows_may_lie_far_apart(backend: Backend) -> None:
    """2^31 elements from the first to the last, of which nothing else is touched."""
    vocab, apart = 40, 1 << 30
    near = torch.randn(1, 3, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
    if backend.device == "cpu":  # by NumPy, as torch may be told to fill what it allocates
        memory = torch.from_numpy(np.empty(2 * apart + vocab, dtype=np.int16))
    else:
        memory = torch.empty(2 * apart + vocab, dtype=torch.int16, device=backend.device)
    far = memory.view(torch.bfloat16).as_strided((1, 3, vocab), (1, apart, 1))
    far.copy_(near)
    tokens = torch.tensor([[1, int(near[0, 0].argmax()), int(near[0, 1].argmax())]])
    for acceptance in ("typical", "recursive", "traversal", "sample", "match"):
        coins = {"uniform_samples": torch.full((1, 3), 0.3)}
        if acceptance == "match":
            coins = {"noise_keys": torch.arange(3)[None]}
        outs = [
            backend.verify_tree(
                *backend(x, sk.DraftTree.from_parents([-1, 0, 1]), tokens), acceptance=acceptance,
                **{name: backend(coin) for name, coin in coins.items()},
                **({"draft_logits": backend(x)} if acceptance in ("recursive", "traversal") else {}),
            )
            for x in (near, far)
        ]  # fmt: skip
        same_bits(outs[1], outs[0])
