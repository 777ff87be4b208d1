"""Defects of the target laws, planted in the reference: the exact-law check must find each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import check_law
from python_tests.law.test_target_laws import with_law
from specdec_kernels import laws
from specdec_kernels.laws import TargetLaw

verify_chain = importlib.import_module("specdec_kernels.backends.reference.verify_chain")
target_law = importlib.import_module("specdec_kernels.backends.reference.target_law")
make_mixture, Mixture, make_law = verify_chain.make_mixture, target_law.Mixture, target_law.make_law
TRUE = partial(sk.verify_chain, backend="reference")


def with_mixture(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(verify_chain, "make_mixture", lambda *a: change(make_mixture(*a)))


def eta_forgotten(mixture: Any) -> Any:
    """π(v) = Q (1 − r) + P: not normalised."""
    one = torch.ones_like(mixture.scale)
    return Mixture(one, one, mixture.kept)


def accepted_as_lossless(mixture: Any) -> Any:
    return replace(mixture, accept=torch.ones_like(mixture.accept))


def recovered_as_lossless(mixture: Any) -> Any:
    return replace(mixture, scale=torch.ones_like(mixture.scale))


def nothing_kept(mixture: Any) -> Any:
    return replace(mixture, kept=torch.zeros_like(mixture.kept))


def on_transformed_laws(patch: pytest.MonkeyPatch) -> None:
    """The rule looks at P and Q, not at the raw laws."""

    def change(number: int, variant: bool, alpha: float, beta: float, *rows: Any) -> Any:
        logits, draft_logits, target, Q, token_map = rows
        logs = [x.clamp_min(1e-30).log() for x in (target.probs, Q)]
        return make_mixture(number, variant, alpha, beta, logs[0], logs[1], target, Q, token_map)

    patch.setattr(verify_chain, "make_mixture", change)


def opt_with_raw_distance(patch: pytest.MonkeyPatch) -> None:
    """TV of the raw laws."""

    def change(number: int, variant: bool, alpha: float, beta: float, *rows: Any) -> Any:
        logits, draft_logits, target, Q, token_map = rows
        raw = replace(target, probs=logits.softmax(-1))
        return make_mixture(
            number, variant, alpha, beta, logits, draft_logits, raw, draft_logits.softmax(-1), token_map
        )

    patch.setattr(verify_chain, "make_mixture", change)


def bonus_of_the_target(patch: pytest.MonkeyPatch) -> None:
    final = verify_chain.final_token

    def change(target: Any, draft: Any, mixture: Any, *rest: Any) -> Any:
        shorter = Mixture(mixture.scale[:, :-1], mixture.accept[:, :-1], mixture.kept[:, :-1])
        return final(target, draft, shorter, *rest)

    patch.setattr(verify_chain, "final_token", change)


def block_residual_of_kept_ids(patch: pytest.MonkeyPatch) -> None:
    """(w π − Q)+ without the (1 − w) Q that a kept id loses."""

    def change(self: Any, scale: Tensor, kept: Tensor | None, weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
        lost = q if kept is None else torch.where(kept, 0.0, q)
        return ((weight * scale)[:, None] * p - lost).clamp_min(0.0)

    patch.setattr(Mixture, "residual", change)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], TargetLaw, str, str]] = [
    (with_mixture(eta_forgotten), laws.TokenV2(0.2), "full", "token"),
    (with_mixture(eta_forgotten), laws.TokenV3(0.5), "full", "block"),
    (with_mixture(accepted_as_lossless), laws.Lossy(0.4), "full", "token"),
    (with_mixture(recovered_as_lossless), laws.Lossy(0.4, beta=0.7), "full", "token"),
    (with_mixture(recovered_as_lossless), laws.Lossy(0.6, beta="exact"), "full", "block"),
    (with_mixture(nothing_kept), laws.TokenV1(0.3), "full", "token"),
    (with_mixture(nothing_kept), laws.Diff(0.1), "full", "token"),
    (on_transformed_laws, laws.TokenV3(0.6), "two_temperatures", "token"),
    (on_transformed_laws, laws.Chow(0.5), "two_temperatures", "token"),
    (opt_with_raw_distance, laws.Opt(0.24), "two_temperatures", "token"),
    (bonus_of_the_target, laws.TokenV3(0.6, bonus="cascade"), "full", "token"),
    (block_residual_of_kept_ids, laws.TokenV2(0.1), "two_temperatures", "block"),
]


@pytest.mark.parametrize(("plant", "law", "kind", "acceptance"), MUTANTS)
def test_planted_defect_of_a_law_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    law: TargetLaw,
    kind: str,
    acceptance: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = with_law(kind, law, 4, 2)
    check_law(TRUE, case, acceptance)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="law off by"):
        check_law(TRUE, case, acceptance)
