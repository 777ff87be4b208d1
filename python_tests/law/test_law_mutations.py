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
from python_tests.law.cases import check_law, with_law
from specdec_kernels import laws
from specdec_kernels.laws import TargetLaw

verify_chain = importlib.import_module("specdec_kernels.backends.reference.verify_chain")
target_law = importlib.import_module("specdec_kernels.backends.reference.target_law")
make_mixtures, remainder, Position = verify_chain.make_mixtures, target_law.remainder, target_law.Position
TRUE = partial(sk.verify_chain, backend="reference")


def with_mixtures(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(verify_chain, "make_mixtures", lambda *a: change(make_mixtures(*a)))


def eta_forgotten(mixtures: Any) -> Any:
    """π(v) = Q (1 − r) + P: not normalised."""
    one = torch.ones_like(mixtures.scale)
    return replace(mixtures, accept=one, scale=one)


def accepted_as_lossless(mixtures: Any) -> Any:
    return replace(mixtures, accept=torch.ones_like(mixtures.accept))


def recovered_as_lossless(mixtures: Any) -> Any:
    return replace(mixtures, scale=torch.ones_like(mixtures.scale))


def nothing_kept(mixtures: Any) -> Any:
    return replace(mixtures, kept=torch.zeros_like(mixtures.kept))


def bonus_of_the_target(mixtures: Any) -> Any:
    return replace(mixtures, at_bonus=False)


def looking_at(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """A law decides by a position that was changed."""

    class Changed(Position):  # type: ignore[misc, valid-type]
        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            change(self)

    return lambda patch: patch.setattr(target_law, "Position", Changed)


def transformed_laws(x: Any) -> None:
    """P and Q, not the raw laws."""
    x.p, x.q, x.max_p, x.max_q = x.P, x.Q, x.P.amax(-1, keepdim=True), x.Q.amax(-1, keepdim=True)


def raw_laws(x: Any) -> None:
    """TV of p and q."""
    x.P, x.Q = x.p, x.q


def block_remainder_of_kept_ids(patch: pytest.MonkeyPatch) -> None:
    """(w π − Q)+ without the (1 − w) Q that a kept id loses."""

    def change(self: Any, P: Tensor, Q: Tensor, w: Tensor) -> Tensor:
        return remainder(P, torch.where(self.kept, 0.0, Q), w * self.scale)

    patch.setattr(target_law.Mixtures, "remainder", change)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], TargetLaw, str, str]] = [
    (with_mixtures(eta_forgotten), laws.TokenV2(0.2), "full", "token"),
    (with_mixtures(eta_forgotten), laws.TokenV3(0.5), "full", "block"),
    (with_mixtures(accepted_as_lossless), laws.Lossy(0.4), "full", "token"),
    (with_mixtures(recovered_as_lossless), laws.Lossy(0.4, beta=0.7), "full", "token"),
    (with_mixtures(recovered_as_lossless), laws.Lossy(0.6, beta="exact"), "full", "block"),
    (with_mixtures(nothing_kept), laws.TokenV1(0.3), "full", "token"),
    (with_mixtures(nothing_kept), laws.Diff(0.1), "full", "token"),
    (looking_at(transformed_laws), laws.TokenV3(0.6), "two_temperatures", "token"),
    (looking_at(transformed_laws), laws.Chow(0.5), "two_temperatures", "token"),
    (looking_at(raw_laws), laws.Opt(0.24), "two_temperatures", "token"),
    (with_mixtures(bonus_of_the_target), laws.TokenV3(0.6, bonus="cascade"), "full", "token"),
    (block_remainder_of_kept_ids, laws.TokenV2(0.1), "two_temperatures", "block"),
]


@pytest.mark.short(cases=6)
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
