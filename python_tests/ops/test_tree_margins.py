"""`decision_margins` of `verify_tree`, proved as test_margins.py proves those of chains: logits are nudged by eps, and
nothing flips that has a larger margin, whatever the rule; what is forgotten is found out by the same nudges.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import chains, trees
from python_tests.ops.chains import mixed
from python_tests.ops.inputs import uniforms
from python_tests.ops.nudges import (
    CUTS,
    EPS,
    ERROR,
    FAR,
    SLOW,
    VOCAB,
    directions,
    in_the_middle,
    nudged,
    of_laws,
    worst,
)
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.backends.reference import margins, tree_margins
from specdec_kernels.backends.reference.loose_laws import LooseStep
from specdec_kernels.backends.reference.tree_margins import LooseSiblings, LooseTypical

OP = "verify_tree"
BATCH, NODES = 128, 9
LAWS = {repr(law): law for law in trees.LAWS}
KINDS = ("full", "plain", "reduced", "probs", "odd")
CASES = [
    *((a, kind) for a in trees.ACCEPTANCES if a not in trees.NEED_DRAFT for kind in ("none", "target_probs", "odd")
      if kind != "target_probs" or a not in ("match", "typical")),
    *((a, kind) for a in trees.NEED_DRAFT for kind in KINDS),
    *(("sample", name) for name in LAWS),
]  # fmt: skip


@functools.cache
def case(acceptance: str, kind: str) -> tuple[trees.Arguments, sk.Margins, Tensor]:
    """Sequences with trees and cuts of their own ("plain": without cuts; "odd": some nodes have other tokens), their
    margins, and the accepted nodes.
    """
    seed, law = CASES.index((acceptance, kind)), LAWS.get(kind)
    rng = torch.Generator().manual_seed(seed)
    cuts = CUTS[:1] if kind == "plain" else CUTS
    params, draft_params = (mixed(cuts, BATCH, first, rng) for first in (kind == "probs", False))
    draft = kind if kind in ("reduced", "probs", "none") else "none" if kind == "target_probs" else "full"
    made = trees.make(
        seed, BATCH, NODES, VOCAB, acceptance=acceptance, kind=draft, params=params, draft_params=draft_params, law=law,
        spoil_tokens=0.1 if kind == "odd" else 0.0,
    )  # fmt: skip
    if acceptance == "typical":
        made |= {"epsilon": 0.3, "delta": 0.9}
    if kind == "target_probs":
        made = chains.with_target_probs(made, sk.SamplingParams(top_k=7, top_p=0.9, min_p=0.02))
    return made, of(made), sk.verify_tree(**made, backend="reference").accepted_nodes


def of(arguments: trees.Arguments, **more: Any) -> sk.Margins:
    return sk.decision_margins(sk.verify_tree, **{**arguments, **more})


def nudges(acceptance: str, kind: str, eps: float) -> Iterator[trees.Arguments]:
    """Aimed at each node's first and second child, and in turn at the token that was emitted after it."""
    arguments, exact, nodes = case(acceptance, kind)
    tree, drafted = arguments["tree"], arguments["node_tokens"].clamp(0, VOCAB - 1)
    first = tree.first_child.clamp_min(0)
    second = tree.next_sibling.gather(1, first)
    path = torch.nn.functional.pad(nodes.clamp_min(0), (1, 0))
    has_draft = {"draft_logits", "draft_probs"} & set(arguments) and acceptance not in ("match", "greedy", "typical")
    for child in (first, torch.where(second > 0, second, first)):
        aim = drafted.gather(1, child)
        emitted = aim
        for token, node in zip(exact.tokens.unbind(1), path.unbind(1), strict=True):
            at = node[:, None]
            emitted = emitted.scatter(1, at, torch.where(token[:, None] >= 0, token[:, None], emitted.gather(1, at)))
        laws_moved = of_laws(arguments) if "target_law" in arguments or acceptance == "typical" else ()
        for sign in itertools.chain(directions(emitted), directions(aim), laws_moved):
            for draft_sign in (-1.0, 1.0) if has_draft else (1.0,):
                yield nudged(arguments, eps, sign, draft_sign)


@pytest.mark.short(cases=1, emulated=0, triton=0)
@pytest.mark.parametrize(("acceptance", "kind"), CASES)
def test_nothing_flips_beyond_its_margin(backend: Backend, acceptance: str, kind: str) -> None:
    arguments, exact, _ = case(acceptance, kind)
    size, every = backend.batch(BATCH), SLOW.get(backend.name, 1)
    for turn, eps in enumerate((0.0, EPS[-1]) if backend.interpreted else (0.0, *EPS, FAR)):
        ways = nudges(acceptance, kind, eps) if eps else iter([arguments])
        steps = itertools.islice(ways, turn % every, None, every)
        largest, _ = worst(exact, functools.partial(run, backend), steps, size, trees.select)
        assert largest <= eps + ERROR, f"{backend}: logits moved by {eps} flipped a margin of {largest}"


def run(backend: Backend, **given: Any) -> sk.VerifyOutput:
    return trees.run(backend, given)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("acceptance", "least"),
    [("sample", 0.05), ("greedy", 0.9), ("match", 0.3), ("typical", 0.05), ("recursive", 0.05), ("traversal", 0.05)],
)
def test_margins_are_not_idle(acceptance: str, least: float) -> None:
    """Of the sequences whose smallest margin lies in (eps/8, eps] so many flip by eps; the others are false alarms."""
    near = flips = 0
    for kind in (kind for rule, kind in CASES if rule == acceptance):
        _, exact, _ = case(acceptance, kind)
        _, flipped = worst(exact, sk.verify_tree, nudges(acceptance, kind, EPS[-1]), BATCH, trees.select)
        smallest = exact.margins.amin(-1)
        alarm = (smallest > EPS[-1] / 8) & (smallest <= EPS[-1])
        near, flips = near + int(alarm.sum()), flips + int((alarm & flipped).sum())
    print(f"\n{acceptance}: {near} sequences with a margin near {EPS[-1]}, of which {flips} flip", end="")
    assert near >= 10 and flips >= least * near, f"{flips} of {near}"


# --- margins that are known -------------------------------------------------------------------------------------------

HALF, NOTHING = [0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf]
FORK, LINE = sk.DraftTree.from_parents([-1, 0, 0]), sk.DraftTree.from_parents([-1, 0, 1])


def small(
    tree: sk.DraftTree, children: list[int], u: list[float], acceptance: str, rows: list[list[float]], **more: Any
) -> trees.Arguments:
    """Two nodes below the root, by the target's rows of all three."""
    return {
        "target_logits": torch.tensor([rows]), "tree": tree, "node_tokens": torch.tensor([[0, *children]]),
        "uniform_samples": torch.tensor([u], dtype=torch.float64), "acceptance": acceptance, **more,
    }  # fmt: skip


THREE, EVEN = [0.0, 0.0, 0.0], torch.zeros(1, 3, 3)
UNEVEN = torch.tensor([[0.6, 0.3, 0.1]]).expand(1, 3, 3).contiguous()
KNOWN: dict[str, tuple[trees.Arguments, int, float]] = {
    "a draw at the root": (small(FORK, [1, 2], [0.3, 0.5, 0.5], "sample", [HALF] * 3), 0, math.log(0.5 / 0.3) / 2),
    "a draw at a child": (small(FORK, [0, 1], [0.3, 0.7, 0.5], "sample", [HALF] * 3), 1, math.log(0.7 / 0.5) / 2),
    "greedy": (small(FORK, [1, 2], [0.0] * 3, "greedy", [[0.0, 0.5, 0.1], THREE, THREE]), 0, 0.2),
    "typical": (
        small(FORK, [0, 2], [0.3] * 3, "typical", [HALF, NOTHING, NOTHING], epsilon=0.4, delta=9.0), 0,
        math.log(0.5 / 0.4) / 2,
    ),
    "typical, the likelier of two": (
        small(FORK, [0, 1], [0.3] * 3, "typical", [[0.1, 0.0, -math.inf], NOTHING, NOTHING], epsilon=0.1, delta=9.0), 0,
        0.1 / 4,
    ),
    "typical, none": (
        small(FORK, [0, 1], [0.0] * 3, "typical", [HALF, NOTHING, NOTHING], epsilon=0.6, delta=9.0), 0,
        math.log(0.6 / 0.5) / 2,
    ),
    "recursive, the first child": (
        small(FORK, [1, 2], [0.3, 0.9, 0.5], "recursive", [THREE] * 3, draft_logits=EVEN), 0, math.log(1 / 0.9) / 4,
    ),
    "recursive, of probabilities": (
        small(FORK, [0, 1], [0.3, 0.5, 0.5], "recursive", [HALF] * 3, draft_probs=UNEVEN), 0,
        math.log(0.5 / (0.5 * 0.6)) / 4,
    ),
    "recursive, the first child's rejection": (
        small(FORK, [0, 1], [0.3, 0.9, 0.0], "recursive", [HALF] * 3, draft_probs=UNEVEN), 0,
        math.log(0.9 * 0.6 / 0.5) / 4,
    ),
    "traversal, a leaf": (
        small(LINE, [0, 0], [0.3, 0.9, 0.5], "traversal", [HALF] * 3, draft_probs=UNEVEN), 0,
        math.log((0.5 / 0.6) ** 2 / 0.5) / 8,
    ),
    "traversal, a leaf alone": (
        small(LINE, [0, 0], [0.3, 0.2, 0.69], "traversal", [HALF] * 3, draft_probs=UNEVEN), 1,
        math.log((0.5 / 0.6) ** 2 / 0.69) / 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_margin(name: str) -> None:
    arguments, place, expected = KNOWN[name]
    exact = of(arguments)
    margin = float(exact.margins[0, place])
    assert exact.tokens[0, place] >= 0 and (margin == expected or 0.985 * expected < margin < expected * 1.0001)


def test_what_leads_to_a_leaf_stays_where_the_node_above_is_accepted_instead() -> None:
    margins = of(KNOWN["traversal, a leaf alone"][0]).margins[0]
    assert margins[0] > 20 * margins[1]


# --- a margin that forgets something ----------------------------------------------------------------------------------


def always(*given: Any) -> Tensor:
    return torch.ones_like(given[-1], dtype=torch.bool)


def never_before(self: Any, node: Tensor, where: Tensor) -> Tensor:
    out = keeps(self, node, where)
    self.before = torch.zeros_like(self.before)
    return out


def coins_alone(self: Any, node: Tensor, child: Tensor, where: Tensor) -> Tensor:
    """Rejected children are forgotten."""
    sure, accept = self.sure, accepts(self, node, child, where)
    self.sure = torch.where(accept[:, None], self.sure, sure)
    return accept


def best_alone(self: Any, m: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(self.last, self.tree.tokens.shape[1]).bool()


def without_error(kind: str) -> Callable[..., Any]:
    """A node's ends are those of no error."""

    def change(self: Any, exact: Any, rows: Any, m: Tensor, *more: Any) -> None:
        siblings_init(self, exact, rows, m, *more)
        setattr(self, kind, tuple(in_the_middle(getattr(self, kind))))

    return change


keeps, accepts, siblings_init, rest = (
    LooseSiblings.keeps, LooseSiblings.accepts, LooseSiblings.__init__, LooseSiblings.rest,
)  # fmt: skip
probs_of, entropy, position, weigh = (
    LooseSiblings.loose_probs, tree_margins.entropy, LooseStep._position, LooseSiblings.weigh,
)  # fmt: skip
MUTATIONS: dict[str, tuple[Any, str, Any, tuple[str, str]]] = {
    # what is forgotten: where, its name, what stands there, the case that finds it out
    "draws, sample": (margins, "surely_drawn", lambda weights, u, token: token >= 0, ("sample", "none")),
    "draws, a law": (
        tree_margins, "surely_drawn", lambda weights, u, token: token >= 0, ("sample", repr(laws.Diff(0.05))),
    ),
    "where a law defers": (
        LooseStep, "_position", lambda step, j, m, P, Q, end: position(step, j, 0 * m, P, Q, end),
        ("sample", repr(laws.Diff(0.05))),
    ),
    "the second best": (margins, "surely_best", lambda rows, noise, m, token: token >= 0, ("match", "none")),
    "other paths, typical": (LooseTypical, "may_win", best_alone, ("typical", "none")),
    "entropies": (tree_margins, "entropy", lambda P: in_the_middle(entropy(P)), ("typical", "none")),
    "coins, recursive": (
        LooseSiblings, "loose_probs", lambda *given: tuple(map(in_the_middle, probs_of(*given))), ("recursive", "full"),
    ),
    "rejected children": (LooseSiblings, "accepts", coins_alone, ("recursive", "plain")),
    "what is left": (
        LooseSiblings, "rest", lambda *given: in_the_middle(rest(*given)), ("recursive", "plain"),
    ),
    "the draft": (LooseSiblings, "__init__", without_error("loose_Q"), ("recursive", "plain")),
    "draws, recursive": (tree_margins, "surely_drawn", lambda weights, u, token: token >= 0, ("recursive", "probs")),
    "draws, traversal": (tree_margins, "surely_drawn", lambda weights, u, token: token >= 0, ("traversal", "probs")),
    "nodes before, traversal": (LooseSiblings, "keeps", never_before, ("traversal", "plain")),
    "weights": (
        LooseSiblings, "weigh", lambda self, node, where, w: weigh(self, node, where, in_the_middle(w)),
        ("traversal", "plain"),
    ),
}  # fmt: skip


@pytest.mark.short(cases=3)
@pytest.mark.parametrize("forgotten", MUTATIONS)
def test_a_margin_that_forgets_is_found_out(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead, (acceptance, kind) = MUTATIONS[forgotten]
    arguments, exact, _ = case(acceptance, kind)
    monkeypatch.setattr(where, name, instead)
    wrong = of(arguments)
    assert torch.equal(wrong.tokens, exact.tokens)
    found = {
        eps: worst(wrong, sk.verify_tree, nudges(acceptance, kind, eps), BATCH, trees.select)[0]
        for eps in (EPS[-1], FAR)
    }
    assert any(largest > eps + ERROR for eps, largest in found.items()), found


# --- every form of a call ---------------------------------------------------------------------------------------------


def alike(one: sk.Margins, other: sk.Margins) -> None:
    """The same tokens, and margins up to a step of the bisection: sums of other shapes may end otherwise in the last
    bit.
    """
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.margins, other.margins, rtol=2e-2, atol=0)


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("acceptance", trees.ACCEPTANCES)
def test_every_form_of_a_call(acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tree for all, parts of a batch, seeds, stats, processors, no sequence, idle ones, rows without a number."""
    params = mixed(CUTS, 12, False, torch.Generator().manual_seed(1))
    kind = "full" if acceptance in trees.NEED_DRAFT else "none"
    given: dict[str, Any] = {"acceptance": acceptance, "params": params, "draft_params": params, "kind": kind}
    one = trees.make(3, 12, 6, VOCAB, per_sequence=False, **given)
    expected = of(one)
    each = sk.DraftTree.from_parents(one["tree"].parents.expand(12, -1).contiguous(), one["tree"].max_depth)
    alike(of(one, tree=each), expected)
    monkeypatch.setattr(margins, "CELLS", 5 * 6 * VOCAB)
    alike(of(one, tree=each, backend="reference"), expected)
    alike(of(one), expected)
    bias = torch.zeros(VOCAB)
    bias[3], bias[5] = 0.5, -math.inf
    processors = sk.Processors(logit_bias=[{3: 0.5}] * 12, banned_ids=[5])
    alike(of(one, processors=processors), of(one, target_logits=one["target_logits"] + bias))
    if "draft_logits" in one:
        alike(of(one, draft_stats=sk.row_stats(one["draft_logits"], params)), expected)
    if "uniform_samples" in one:
        seeds = torch.arange(12)
        made = sk.uniform_samples(seeds, 5, 6)
        alike(of(one, uniform_samples=None, seeds=seeds, step=5), of(one, uniform_samples=made))
    empty = of(trees.select(one, slice(0, 0)))
    assert empty.tokens.shape == empty.margins.shape == (0, one["tree"].max_depth + 1)
    idle = of(one, node_tokens=torch.full_like(one["node_tokens"], -1))
    assert (idle.tokens == -1).all() and (idle.margins == math.inf).all()
    spoilt = of(one, target_logits=torch.full_like(one["target_logits"], math.nan))
    assert not spoilt.margins.isnan().any() and (spoilt.margins >= 0).all()


def test_tokens_after_an_eos_have_no_margin() -> None:
    arguments = small(FORK, [0, 1], [0.3, 0.5, 0.5], "sample", [HALF] * 3, eos_token_ids=torch.tensor([0]))
    exact = of(arguments)
    assert exact.tokens.tolist() == [[0, -1]] and exact.margins[0, 1] == math.inf


def test_a_root_alone_has_the_margin_of_a_bonus() -> None:
    rng = torch.Generator().manual_seed(2)
    x, u = torch.randn(6, 1, VOCAB, generator=rng), uniforms(rng, 6, 1)
    params = mixed(CUTS, 6, False, rng)
    root = sk.DraftTree.from_parents([-1])
    bonus = sk.decision_margins(
        sk.verify_chain, x, torch.empty(6, 0, dtype=torch.int64), params=params, uniform_samples=u
    )
    for acceptance in ("sample", "typical", "recursive", "traversal"):
        draft = {"draft_logits": x} if acceptance in trees.NEED_DRAFT else {}
        alone = sk.decision_margins(
            sk.verify_tree, x, root, torch.zeros(6, 1, dtype=torch.int64), params=params, uniform_samples=u,
            acceptance=acceptance, **draft,
        )  # fmt: skip
        alike(alone, bonus)
