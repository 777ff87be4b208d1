"""Random verify steps of token trees."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.inputs import logits, uniforms
from specdec_kernels.laws import Lossy, TargetLaw
from specdec_kernels.ops.arguments import TREE_ACCEPTANCES
from specdec_kernels.ops.verify_tree import NEED_DRAFT as NEED_DRAFT
from specdec_kernels.testing import Verify

ACCEPTANCES = tuple(TREE_ACCEPTANCES)
LAWS: tuple[TargetLaw, ...] = tuple(law for law in chains.LAWS if not isinstance(law, Lossy))
OUTPUTS = ("tokens", "num_accepted", "num_tokens", "status", "accepted_nodes")
Arguments = dict[str, Any]
UNLIKE = "by its definition"  # what checks say of an outcome that is not the rule's


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


def run(backend: Any, arguments: Arguments, **more: Any) -> sk.VerifyOutput:
    """`verify_tree` on the backend's device."""
    out: sk.VerifyOutput = backend.verify_tree(**chains.on(backend, {**arguments, **more}))
    return out


def select(arguments: Arguments, rows: Any) -> Arguments:
    """The arguments of some sequences alone, in the order of `rows`."""
    out, tree = chains.select(arguments, rows), arguments["tree"]
    if tree.is_batched:
        out["tree"] = sk.DraftTree.from_parents(tree.parents[rows], tree.max_depth)
    return out


def check_typical(verify: Verify, temperature: float, batch: int) -> None:
    """Typical acceptance is its definition: p and H at the sampling temperature and before truncation; the longest
    path, of equal ones the likeliest.
    """
    params = sk.SamplingParams(temperature, top_k=3)
    arguments = make(13, batch, 12, 20, acceptance="typical", params=params, kind="none")
    out = verify(**arguments, epsilon=0.2, delta=0.7)
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
        assert got == best, f"sequence {b} ends at node {got}, {UNLIKE} at {best}"


def check_flags(verify: Verify) -> None:
    """A duplicate child cannot have been drawn: skipped and flagged; so is an id that is none. A −1 is neither."""
    tree = sk.DraftTree.from_parents([-1, 0, 0])
    target = torch.zeros(4, 3, 5)
    arguments: dict[str, Any] = {
        "target_logits": target, "tree": tree, "draft_logits": torch.zeros(4, 3, 5), "acceptance": "recursive",
        "node_tokens": torch.tensor([[0, 2, 2], [0, 2, 7], [0, 2, -1], [0, 2, 3]]),
        "uniform_samples": torch.full((4, 3), 0.999),
    }  # fmt: skip
    target[:, 0, 2] = -torch.inf
    flags, expected = verify(**arguments).status.tolist(), [int(sk.Status.BAD_DRAFT), int(sk.Status.BAD_TOKEN), 0, 0]
    assert flags == expected, f"flags are {flags}, {UNLIKE} {expected}"
