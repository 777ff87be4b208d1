"""The law that `verify_tree` really produces on each backend, extracted through the uniforms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.law.cases import TOLERANCE, check_law
from python_tests.law.tree_cases import KINDS, SHAPES, check_undrawable, depth_of, given, plain, problem, vocab_on
from python_tests.ops import trees
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.testing import TreeProblem, exact_law, float64_law, float64_target_law, target_joint

OP = "verify_tree"
EMULATED_CASES = 7


@pytest.mark.short(triton=0)
@pytest.mark.parametrize("acceptance", ["sample", *trees.NEED_DRAFT])
def test_law_of_the_smallest_trees(backend: Backend, acceptance: str) -> None:
    """A given child; two that were drawn."""
    case = plain([-1, 0] if acceptance == "sample" else [-1, 0, 0], 2, torch.Generator().manual_seed(3))
    check_law(backend.verify_tree, given(case) if acceptance == "sample" else case, acceptance, backend.device)


@pytest.mark.short(emulated=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_law_of_sampled_children(backend: Backend, acceptance: str, shape: str, kind: str) -> None:
    check_law(backend.verify_tree, problem(kind, shape, vocab_on(backend, shape)), acceptance, backend.device)


@pytest.mark.short(triton=0, emulated=3)
@pytest.mark.parametrize("kind", ["full", "zero supports", "eos"])
@pytest.mark.parametrize("acceptance", ["sample", *trees.NEED_DRAFT])
def test_law_of_target_probabilities(backend: Backend, acceptance: str, kind: str) -> None:
    """Rows of probabilities instead of logits; that their sum is a little off changes nothing."""

    def verify(target, *rest, **more):  # type: ignore[no-untyped-def]
        return backend.verify_tree(None, *rest, target_probs=target.softmax(-1) * 1.005, **more)

    case = problem(kind, "siblings", 2 if backend.interpreted else 3)
    check_law(verify, given(case) if acceptance == "sample" else case, acceptance, backend.device)


@pytest.mark.short(triton=0)
@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_law_where_a_child_cannot_have_been_drawn(backend: Backend, acceptance: str) -> None:
    check_undrawable(acceptance, backend.verify_tree, backend.device, 2 if backend.interpreted else 3)


@pytest.mark.parametrize("gap", [50.0, 86.9])
@pytest.mark.parametrize("acceptance", trees.NEED_DRAFT)
def test_law_where_next_to_nothing_of_the_draft_is_left(backend: Backend, acceptance: str, gap: float) -> None:
    """So little that its inverse, by what is left of the target, is no float32; likely siblings after it are tried."""
    vocab_on(backend, "siblings")
    target = torch.tensor([-torch.inf, math.log(0.85), math.log(0.15)])
    draft = torch.tensor([gap, 0.0, -torch.inf]) / 10  # at temperature 0.1
    case = TreeProblem(
        SHAPES["siblings"], [target, torch.zeros(3, 3)], [draft, torch.zeros(3, 3)], sampled=True,
        draft_params=sk.SamplingParams(0.1),
    )  # fmt: skip
    check_law(backend.verify_tree, case, acceptance, backend.device)


@pytest.mark.parametrize("kind", ["full", "truncated", "eos"])
@pytest.mark.parametrize("shape", ["siblings", "fork", "bush"])
def test_law_of_given_children(backend: Backend, shape: str, kind: str) -> None:
    """Right for every choice of the tokens, duplicates among them."""
    vocab_on(backend, shape)
    if backend.interpreted and shape != "siblings":
        pytest.skip("thousands of steps: interpreted kernels walk two siblings")
    case = given(plain(SHAPES[shape], 2, torch.Generator().manual_seed(3)))
    case.params, case.eos = problem(kind, shape).params, problem(kind, shape).eos
    check_law(backend.verify_tree, case, "sample", backend.device)


def test_the_output_of_a_cascade_s_tree_is_not_enumerated() -> None:
    case = plain(SHAPES["chain"], 2, torch.Generator().manual_seed(5), law=laws.Diff(0.1))
    with pytest.raises(ValueError, match="^target_joint: problem.law must be None for a TreeProblem, got one"):
        target_joint(case)


@pytest.mark.short(emulated=1)
@pytest.mark.parametrize("law", {type(law): law for law in trees.LAWS}.values(), ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("shape", ["siblings", "chain"])
def test_law_of_cascades(backend: Backend, shape: str, law: laws.TargetLaw) -> None:
    """π at nodes with children, and at the leaves where the bonus is the cascade's."""
    vocab = min(vocab_on(backend, shape), 2 if shape == "chain" or backend.interpreted else 3)
    case = plain(SHAPES[shape], vocab, torch.Generator().manual_seed(5), law=law)
    case.sampled = False
    assert case.draft is not None
    joint = exact_law(backend.verify_tree, case, "sample", backend.device)
    P, Q = ([float64_law(t) for t in side] for side in (case.target, case.draft))
    mixed = [float64_target_law(law, p, q, p, q) for p, q in zip(P, Q, strict=True)]
    deepest = depth_of(case.parents)
    # Where a token is drawn at a leaf or beyond the tree, its law is the bonus', else π.
    for choice, (tokens, _) in enumerate(zip(*case.paths(), strict=True)):
        expected = np.zeros(joint.shape[1:])
        drafted = {case._context(node, tokens.tolist()) for node in range(len(case.parents))}
        inner = {case._context(case.parents[node], tokens.tolist()) for node in range(1, len(case.parents))}
        for emitted in np.ndindex(*expected.shape):
            mass = 1.0
            for d in range(deepest + 1):
                above = emitted[:d]
                law_here = P[d]
                if above in drafted:
                    law_here = mixed[d] if above in inner or law.cascade_bonus else P[d]
                mass *= law_here[(*above, emitted[d])]
            expected[emitted] = mass
        assert np.abs(joint[choice] - expected).sum() / 2 < TOLERANCE, f"tokens {tokens}"
