"""Defects of the tree rules, planted in the reference or round its inputs: the named check must fail on each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import FOUND, check_law
from python_tests.law.mutants import (
    coins_of_the_node_before,
    final_shares_the_first_coin,
    one_number_for_all,
    siblings_share_a_coin,
    uniforms,
)
from python_tests.law.tree_cases import SHAPES, check_undrawable, given, plain, problem
from python_tests.ops import trees
from specdec_kernels.testing import Verify

reference = importlib.import_module("specdec_kernels.backends.reference.verify_tree")
Check = Callable[[Verify], None]
TRUE: Verify = partial(sk.verify_tree, backend="reference")
rejected, remove = reference.rejected, reference.remove


def law(acceptance: str, shape: str, kind: str = "full") -> Check:
    return lambda verify: check_law(verify, problem(kind, shape), acceptance)


def given_children(shape: str) -> Check:
    case = given(plain(SHAPES[shape], 2, torch.Generator().manual_seed(3)))
    return lambda verify: check_law(verify, case, "sample")


def typical(verify: Verify) -> None:
    trees.check_typical(verify, 1.0, 30)


# --- round the inputs -------------------------------------------------------------------------------------------------


def epsilon_and_delta_swapped(**arguments: Any) -> sk.VerifyOutput:
    return TRUE(**{**arguments, "epsilon": arguments["delta"], "delta": arguments["epsilon"]})


def draft_at_the_targets_temperature(*args: Any, params: Any, draft_params: Any, **rest: Any) -> sk.VerifyOutput:
    return TRUE(*args, params=params, draft_params=params, **rest)


INPUT_MUTANTS: list[tuple[str, Verify, Check]] = [
    *(
        (f"{change.__name__}, {rule}", uniforms(TRUE, change), law(rule, shape))
        for change, shape in (
            (final_shares_the_first_coin, "siblings"), (siblings_share_a_coin, "second"),
            (coins_of_the_node_before, "siblings"), (one_number_for_all, "siblings"),
        )
        for rule in trees.NEED_DRAFT
    ),
    ("one number for all, sample", uniforms(TRUE, one_number_for_all), given_children("fork")),
    ("typical, epsilon and delta swapped", epsilon_and_delta_swapped, typical),
    ("the draft's parameters, recursive", draft_at_the_targets_temperature, law("recursive", "siblings", "truncated")),
    ("the draft's parameters, traversal", draft_at_the_targets_temperature, law("traversal", "siblings", "truncated")),
]  # fmt: skip


@pytest.mark.short(cases=6)
@pytest.mark.parametrize(("mutant", "check"), [m[1:] for m in INPUT_MUTANTS], ids=[m[0] for m in INPUT_MUTANTS])
def test_planted_input_defect_is_caught(mutant: Verify, check: Check) -> None:
    check(TRUE)
    with pytest.raises(AssertionError, match=f"{FOUND}|{trees.UNLIKE}"):
        check(mutant)


# --- in the rules -----------------------------------------------------------------------------------------------------


def laws_not_updated(P: Tensor, Q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Siblings are all held against the node's own P (an older commit of TensorRT-LLM)."""
    return P, rejected(P, Q, w)[1]


def residual_without_its_weight(P: Tensor, Q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return rejected(P, Q, torch.ones_like(w))[0], rejected(P, Q, w)[1]


def child_stays_in_the_draft(Q: Tensor, token: Tensor) -> Tensor:
    """Siblings as if drawn with replacement."""
    return Q


def anything_is_given(q: Tensor) -> Tensor:
    return q >= 0


def draft_not_renormalised(Q: Tensor, token: Tensor) -> Tensor:
    return Q.scatter(1, token[:, None], 0.0)


def weight_of_the_path_forgotten(w: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return (p / q).clamp_max(1.0)


def weight_not_clamped(w: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return w * p / q


def weight_not_updated(w: Tensor, rest: Tensor) -> Tensor:
    return w


def weight_is_the_residual(w: Tensor, rest: Tensor) -> Tensor:
    """As where a child is the only one: R without R + 1 − w."""
    return rest


def last_child_with_the_token(self: Any, node: Tensor, token: Tensor) -> Tensor:
    """Any child, whosever it is."""
    is_it = self.usable & (self.tokens == token[:, None])
    return torch.where(is_it, torch.arange(self.tokens.shape[1]), -1).amax(-1)


RULE_MUTANTS: list[tuple[str, Any, Check]] = [
    ("rejected", laws_not_updated, law("recursive", "siblings")),
    ("rejected", laws_not_updated, law("traversal", "siblings")),
    ("rejected", residual_without_its_weight, law("traversal", "chain")),
    ("remove", child_stays_in_the_draft, law("recursive", "siblings")),
    ("remove", child_stays_in_the_draft, law("traversal", "siblings")),
    ("remove", child_stays_in_the_draft, trees.check_flags),  # a duplicate is not skipped
    ("remove", draft_not_renormalised, law("recursive", "siblings")),
    *(("can_give", anything_is_given, partial(check_undrawable, rule)) for rule in trees.NEED_DRAFT),
    ("next_block_weight", weight_of_the_path_forgotten, law("traversal", "chain")),
    ("next_block_weight", weight_not_clamped, law("traversal", "chain")),
    ("block_threshold", weight_not_updated, law("traversal", "fork")),
    ("block_threshold", weight_is_the_residual, law("traversal", "fork")),
    ("child_with", last_child_with_the_token, given_children("fork")),
]


@pytest.mark.short(cases=7)
@pytest.mark.parametrize(
    ("name", "mutant", "check"), RULE_MUTANTS, ids=[f"{m.__name__}-{i}" for i, (_, m, _) in enumerate(RULE_MUTANTS)]
)
def test_planted_rule_defect_is_caught(name: str, mutant: Any, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    check(TRUE)
    monkeypatch.setattr(reference.Tree if name == "child_with" else reference, name, mutant)
    with pytest.raises(AssertionError, match=f"{FOUND}|{trees.UNLIKE}"):
        check(TRUE)
