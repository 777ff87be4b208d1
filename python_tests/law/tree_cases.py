"""The cases of the tree law tests: every kind of distribution on every shape, small enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import check_law
from python_tests.support import Backend
from specdec_kernels.testing import Float64, Int64, TreeProblem, Verify, float64_law

SHAPES = {
    "chain": [-1, 0, 1], "siblings": [-1, 0, 0], "fork": [-1, 0, 1, 1], "bush": [-1, 0, 0, 1], "second": [-1, 0, 0, 2],
}  # fmt: skip
Kinds = dict[str, Callable[[list[int], int, torch.Generator], TreeProblem]]


def depth_of(parents: list[int]) -> int:
    return sk.DraftTree.from_parents(parents).max_depth


def rows(vocab: int, parents: list[int], rng: torch.Generator) -> list[Tensor]:
    return [1.5 * torch.randn(*[vocab] * d, vocab, generator=rng) for d in range(depth_of(parents) + 1)]


def plain(parents: list[int], vocab: int, rng: torch.Generator, **fields: object) -> TreeProblem:
    target, draft = rows(vocab, parents, rng), rows(vocab, parents, rng)
    return TreeProblem(parents, target, draft, sampled=True, **fields)  # type: ignore[arg-type]


def zero_supports(parents: list[int], vocab: int, rng: torch.Generator) -> TreeProblem:
    """Ids that only the target or only the draft may draw: siblings run out."""
    case = plain(parents, 3, rng)
    assert case.draft is not None
    for number, (p, q) in enumerate(zip(case.target, case.draft, strict=True)):
        p[..., number % 3] = -torch.inf
        q[..., (number + 1) % 3] = -torch.inf
    case.draft[-1][..., 2] = -torch.inf
    return case


def equal_laws(parents: list[int], vocab: int, rng: torch.Generator) -> TreeProblem:
    case = plain(parents, vocab, rng)
    case.draft = [t.clone() for t in case.target]
    return case


def truncated(parents: list[int], vocab: int, rng: torch.Generator) -> TreeProblem:
    params, draft_params = sk.SamplingParams(0.8, top_p=0.8), sk.SamplingParams(1.3, top_k=2)
    return plain(parents, 3, rng, params=params, draft_params=draft_params)


KINDS: Kinds = {
    "full": plain,
    "truncated": truncated,
    "greedy target": lambda *of: plain(*of, params=sk.SamplingParams(0.0)),
    "greedy draft": lambda *of: plain(*of, draft_params=sk.SamplingParams(0.0)),
    "zero supports": zero_supports,
    "equal laws": equal_laws,
    "eos": lambda *of: plain(*of, eos=1),
}


def problem(kind: str, shape: str, vocab: int = 3) -> TreeProblem:
    return KINDS[kind](SHAPES[shape], vocab, torch.Generator().manual_seed(len(kind) + 10 * len(shape)))


def given(case: TreeProblem) -> TreeProblem:
    """The same with tokens that were chosen, not drawn: any of them."""
    case.sampled, case.draft = False, None
    return case


def vocab_on(backend: Backend, shape: str) -> int:
    """The vocabulary to run a case in: 3, or 2 where kernels are interpreted and the tree has four nodes; Triton's
    interpreter, which is far slower, runs the smallest trees alone.
    """
    if backend.by_interpreter:
        pytest.skip("Triton's interpreter needs minutes for this: it runs the smallest trees alone")
    return 2 if backend.interpreted and len(SHAPES[shape]) > 3 else 3


@dataclass
class Undrawable(TreeProblem):
    """Of two siblings the first is the last id, which the draft's distribution excludes."""

    def paths(self) -> tuple[Int64, Float64]:
        assert self.draft is not None
        law = float64_law(self.draft[0], self.draft_params)
        second = np.flatnonzero(law)
        return np.stack([np.full_like(second, self.vocab - 1), second], 1), law[second]


def check_undrawable(acceptance: str, verify: Verify, device: str = "cpu", vocab: int = 3) -> None:
    case = plain(SHAPES["siblings"], vocab, torch.Generator().manual_seed(3))
    assert case.draft is not None
    case.draft[0][-1] = -torch.inf
    check_law(verify, Undrawable(case.parents, case.target, case.draft, sampled=True), acceptance, device)
