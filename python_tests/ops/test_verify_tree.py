"""`verify_tree`: its contract, and every backend against the reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.ops import chains, trees
from python_tests.ops.inputs import DTYPES, same_bits
from python_tests.support import Backend

OP = "verify_tree"
NEED_DRAFT = ("recursive", "traversal")


def run(backend: Backend, arguments: trees.Arguments, **more: Any) -> sk.VerifyOutput:
    out: sk.VerifyOutput = backend.verify_tree(**chains.on(backend, {**arguments, **more}))
    return out


def example(seed: int) -> trees.Arguments:
    choose = random.Random(seed)
    acceptance = choose.choice([*trees.ACCEPTANCES, *NEED_DRAFT])

    def parameters() -> sk.SamplingParams:
        return sk.SamplingParams(
            choose.choice([1.0, 0.7, 1.3, 0.0]), choose.choice([0, 0, 2, 7]), choose.choice([1.0, 0.9, 0.5]),
            choose.choice([0.0, 0.0, 0.05]),
        )  # fmt: skip

    kind = choose.choice(["full", "reduced", "probs", "stats", *([] if acceptance in NEED_DRAFT else ["none"])])
    law = None
    if acceptance == "sample" and kind in ("full", "stats") and choose.random() < 0.7:
        law = choose.choice(trees.LAWS)
    made = trees.make(
        seed, choose.choice([1, 3, 8]), choose.choice([1, 2, 3, 5, 8, 13]), choose.choice([2, 5, 17, 60, 1023, 1025]),
        acceptance=acceptance, kind=kind, dtype=choose.choice(DTYPES), params=parameters(), draft_params=parameters(),
        spread=choose.choice([0.1, 1.0, 3.0]), law=law, per_sequence=choose.random() < 0.7,
        spoil_tokens=choose.choice([0.0, 0.05]),
    )  # fmt: skip
    if choose.random() < 0.4:
        made["eos_token_ids"] = torch.tensor([0, 3])
    if choose.random() < 0.2:
        made["node_tokens"][0, 0] = -1
    if choose.random() < 0.1 and "uniform_samples" in made:
        made["uniform_samples"][-1, 0] = choose.choice([math.nan, 1.0, -0.5])
    if choose.random() < 0.2 and kind not in ("stats", "probs"):
        rng = torch.Generator().manual_seed(seed)
        for name in ("target_logits", "draft_logits"):
            if name in made:
                where = torch.rand(made[name].shape, generator=rng)
                made[name] = made[name].masked_fill(where < 0.01, math.nan).masked_fill(where > 0.995, math.inf)
                made[name][torch.rand(made[name].shape[:2], generator=rng) < 0.05] = -math.inf
    return made


def test_every_backend_agrees_with_the_reference(backend: Backend, pytestconfig: pytest.Config) -> None:
    """Token by token, on random trees of every kind; a border within rounding is met by none of these."""
    wanted, done = backend.cases(pytestconfig.getoption("cases")), 0
    for seed in range(10**9):
        arguments = example(seed)
        expected = sk.verify_tree(**arguments, backend="reference")
        same = run(backend, arguments)
        for name in ("tokens", "num_accepted", "num_tokens", "status", "accepted_nodes"):
            got, want = getattr(same, name).cpu(), getattr(expected, name)
            assert torch.equal(got, want), f"{backend}: {name} differs, example {seed}: {got} instead of {want}"
        done += len(expected.tokens)
        if done >= wanted:
            return


@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_a_sequence_does_not_depend_on_its_batch(backend: Backend, acceptance: str) -> None:
    arguments = trees.make(7, backend.batch(12), 9, 200, acceptance=acceptance)
    whole = run(backend, arguments)
    for rows in ([0], [5, 2], list(range(6))[::-1]):
        part = run(backend, trees.select(arguments, rows))
        for name in ("tokens", "num_accepted", "num_tokens", "status", "accepted_nodes"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_a_chain_is_a_tree(backend: Backend, acceptance: str) -> None:
    """On a tree without branches "recursive" is the token rule and "traversal" the block rule: in law; and where
    everything is accepted, or nothing can be, token by token.
    """
    rng = torch.Generator().manual_seed(3)
    chain = chains.make(rng, backend.batch(40), 3, 60, acceptance=acceptance)
    tree = sk.DraftTree.from_parents([-1, 0, 1, 2])
    tokens = torch.nn.functional.pad(chain["draft_tokens"], (1, 0))
    draft = torch.cat([chain["draft_logits"], chain["target_logits"][:, :1]], 1)
    given: dict[str, Any] = {
        "target_logits": chain["target_logits"], "tree": tree, "node_tokens": tokens, "draft_logits": draft,
        "uniform_samples": chain["uniform_samples"], "params": chain["params"], "draft_params": chain["draft_params"],
    }  # fmt: skip
    name = {"token": "recursive", "block": "traversal"}[acceptance]
    got, want = run(backend, given, acceptance=name), chains.run(backend, chain)
    if acceptance == "token":
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.num_accepted, want.num_accepted)
    else:
        full = want.num_accepted == 3
        assert torch.equal(got.num_accepted == 3, full)


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
    params = sk.SamplingParams(temperature, top_k=3)
    arguments = trees.make(13, backend.batch(30), 12, 20, acceptance="typical", params=params, kind="none")
    out = run(backend, arguments, epsilon=0.2, delta=0.7)
    p = (arguments["target_logits"].double() / temperature).softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    threshold = torch.minimum(torch.tensor(0.2).double(), 0.7 * (-entropy).exp())
    parents, tokens = arguments["tree"].parents, arguments["node_tokens"]
    for b in range(len(p)):
        paths = {0: (0, 0.0, 0)}  # node: (length, log-likelihood, −node)
        for node in range(1, 12):
            above, x = int(parents[b, node]), int(tokens[b, node])
            if above in paths and float(p[b, above, x]) > float(threshold[b, above]):
                length, likelihood, _ = paths[above]
                paths[node] = (length + 1, likelihood + math.log(float(p[b, above, x])), -node)
        best = max(paths, key=lambda node: paths[node])
        got = int(out.accepted_nodes[b, int(out.num_accepted[b]) - 1]) if out.num_accepted[b] else 0
        assert got == best


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
    """A duplicate child cannot have been drawn: skipped and flagged; so is an id that is none. A −1 is neither."""
    tree = sk.DraftTree.from_parents([-1, 0, 0])
    target = torch.zeros(4, 3, 5)
    arguments: dict[str, Any] = {
        "target_logits": target, "tree": tree, "draft_logits": torch.zeros(4, 3, 5), "acceptance": "recursive",
        "node_tokens": torch.tensor([[0, 2, 2], [0, 2, 7], [0, 2, -1], [0, 2, 3]]),
        "uniform_samples": torch.full((4, 3), 0.999),
    }  # fmt: skip
    target[:, 0, 2] = -torch.inf
    flags = run(backend, arguments).status.tolist()
    assert flags == [int(sk.Status.BAD_TOKEN), int(sk.Status.BAD_TOKEN), 0, 0]


def test_pruned_trees_and_status(backend: Backend) -> None:
    bad = torch.tensor([[-1, 0, 5, 1], [-1, 0, 1, 2]])
    arguments = trees.make(19, 2, 4, 9, acceptance="greedy", kind="none")
    tree = sk.DraftTree.from_parents(bad, max_depth=3)
    out = run(backend, {**arguments, "tree": tree})
    assert out.status.tolist() == [int(sk.Status.BAD_TREE), 0]


GOOD = trees.make(23, 4, 5, 30, acceptance="recursive")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tree": [-1, 0]}, TypeError, "tree must be a DraftTree"),
        ({"tree": sk.DraftTree.from_parents([-1, 0])}, ValueError, "tree must be of num_nodes=5"),
        ({"node_tokens": torch.zeros(4, 4).long()}, ValueError, r"node_tokens must be \[batch=4, num_nodes=5\]"),
        ({"node_tokens": torch.zeros(4, 5)}, TypeError, "node_tokens must be int64 or int32"),
        ({"target_logits": torch.zeros(4, 30)}, ValueError, r"must be \[batch, num_nodes, vocab\]"),
        ({"acceptance": "block"}, ValueError, "acceptance must be one of sample, greedy"),
        ({"draft_logits": None, "draft_params": None}, ValueError, "needs draft_logits or draft_probs"),
        ({"draft_logits": torch.zeros(4, 4, 30)}, ValueError, r"must be \[batch=4, num_nodes=5, vocab=30\]"),
        ({"uniform_samples": None}, ValueError, "needs uniform_samples"),
        ({"noise_keys": torch.zeros(4, 5, dtype=torch.int64)}, ValueError, "takes uniform_samples, got noise_keys"),
        ({"target_law": sk.laws.Chow(0.1)}, ValueError, "cascade with acceptance='sample'"),
        ({"target_law": sk.laws.Lossy(0.1), "acceptance": "sample"}, ValueError, "cascade with acceptance='sample'"),
        ({"eos_token_ids": torch.zeros(1, 1, dtype=torch.int64)}, ValueError, "eos_token_ids must be"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sk.verify_tree(**{**GOOD, **change})


def test_same_bits_again(backend: Backend) -> None:
    arguments = trees.make(29, backend.batch(8), 7, 1500, acceptance="traversal", dtype=torch.bfloat16)
    first, again = run(backend, arguments), run(backend, arguments)
    same_bits(list(first[:4]) + [first.accepted_nodes], list(again[:4]) + [again.accepted_nodes])
