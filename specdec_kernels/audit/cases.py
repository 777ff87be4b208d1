"""The hard cases: small verify steps, the smallest first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sampling import GREEDY, SamplingParams
from ..testing import ChainProblem, Float64, Int64, TreeProblem, target_joint
from .step import Problem

Probs = Sequence[float]


@dataclass(frozen=True, eq=False)
class Case:
    """A verify step whose distribution is known.

    Attributes
    ----------
    name : str
    problem : ChainProblem or TreeProblem
    beside : ChainProblem or None
        What every second row of the batch is taken from, also the first and the last; None: it is of one kind.
    also : tuple of Problem
        The same step with ties at a border of top-k or top-p broken in other ways, equally valid.
    """

    name: str
    problem: Problem
    beside: ChainProblem | None = None
    also: tuple[Problem, ...] = ()

    @property
    def expected(self) -> list[Float64]:
        """The joint distributions that a verifier may produce."""
        return [target_joint(problem) for problem in (self.problem, *self.also)]

    @property
    def drafted(self) -> int:
        """Draft tokens, or nodes below a tree's root."""
        problem = self.problem
        return problem.length if isinstance(problem, ChainProblem) else len(problem.parents) - 1


def _log(*probs: Probs) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log().float()


def _one(target: Probs, draft: Probs | None, **fields: object) -> ChainProblem:
    """One draft token; the distribution after it leans towards the token that came."""
    vocab = len(target)
    after = torch.eye(vocab) * 0.7 + torch.linspace(0.0, 0.5, vocab)
    return ChainProblem([_log(target)[0], after], None if draft is None else [_log(draft)[0]], **fields)  # type: ignore[arg-type]


def _rows(vocab: int, depths: int, seed: int, spread: float = 1.2) -> list[Tensor]:
    rng = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(*[vocab] * (d + 1), generator=rng, device="cpu") * spread for d in range(depths)]


def _random(vocab: int, num_draft: int, seed: int, **fields: object) -> ChainProblem:
    target, draft = _rows(vocab, num_draft + 1, seed), _rows(vocab, num_draft, seed + 1)
    return ChainProblem(target, draft, **fields)  # type: ignore[arg-type]


def _tied(problem: ChainProblem) -> tuple[ChainProblem, ...]:
    """The same with ties of the first token broken by id, the lowest or the highest first; later ones have none."""
    nudge = torch.arange(problem.vocab, dtype=torch.float64) * 1e-9
    return tuple(replace(problem, target=[t.double() + sign * nudge for t in problem.target]) for sign in (-1, 1))


@cache
def chains() -> tuple[Case, ...]:
    """One step of one sequence, or of two kinds of sequences side by side."""
    cut, wide = SamplingParams(top_p=0.8), SamplingParams()
    flat = SamplingParams(1.6)
    ties_k, ties_p = (
        ChainProblem(
            [torch.tensor([1.0, 0.0, 0.0, -1.0]), torch.tensor([[2.0, 1.0, 0.5, 0.0]] * 4)],
            [torch.tensor([0.5, 0.2, 0.0, 0.1])],
            params,
        )
        for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6))
    )
    short, long = _random(3, 1, 40), _random(3, 2, 36)
    greedy, both_k, both_p, hot, hot_k, cool, warm = (
        dict[str, Any](params=of, draft_params=of)
        for of in (
            GREEDY,
            SamplingParams(top_k=2),
            SamplingParams(top_p=0.7),
            SamplingParams(1.5, top_p=0.7),
            SamplingParams(1.5, top_k=4, top_p=0.7),
            SamplingParams(0.6),
            SamplingParams(1.5),
        )
    )
    return (
        Case("a draft token that cannot be", _one((0.0, 1.0), (0.5, 0.5))),
        Case("two ids", _one((0.3, 0.7), (0.6, 0.4))),
        Case("two ids, the likelier drafted less", _one((0.85, 0.15), (0.25, 0.75))),
        Case("draft equal to target", _one((0.2, 0.5, 0.3), (0.2, 0.5, 0.3))),
        Case("draft equal to target but for a constant", _equal_but_a_constant()),
        Case("disjoint supports", _one((0.4, 0.6, 0.0, 0.0), (0.0, 0.0, 0.7, 0.3))),
        Case("zeros in the draft", _one((0.2, 0.5, 0.3), (0.0, 0.4, 0.6))),
        Case("zeros in the target", _one((0.0, 0.55, 0.0, 0.45), (0.4, 0.1, 0.3, 0.2))),
        Case("one-hot draft", _one((0.2, 0.5, 0.3), None)),
        Case("greedy target", replace(_random(3, 1, 10), params=GREEDY)),
        Case("greedy target and draft", replace(_random(3, 1, 12), params=GREEDY, draft_params=GREEDY)),
        Case("greedy draft", replace(_random(3, 1, 14), draft_params=GREEDY)),
        Case("ties at top-k", ties_k, also=_tied(ties_k)),
        Case("ties at top-p", ties_p, also=_tied(ties_p)),
        Case("eight ids", _random(8, 1, 16)),
        Case("two ids, two drafted", _random(2, 2, 18)),
        Case("temperature 0.6", _random(3, 1, 20, params=SamplingParams(0.6), draft_params=SamplingParams(0.6))),
        Case("draft hotter than the target", _random(3, 1, 22, params=SamplingParams(0.8), draft_params=flat)),
        Case("top-k 2", _random(4, 1, 24, **both_k)),
        Case("top-p, draft drawn without it", _random(4, 1, 26, params=cut, draft_params=wide)),
        Case("draft cut, target not", _random(4, 1, 28, params=wide, draft_params=SamplingParams(top_k=2))),
        Case("top-p of what a temperature leaves", _random(5, 1, 50, **hot)),
        Case("top-p of what top-k leaves", _random(5, 1, 78, **hot_k)),
        Case("three ids, two drafted", _random(3, 2, 30)),
        Case("one-hot drafts, two drafted", ChainProblem(_rows(3, 3, 32), None)),
        Case("two ids, three drafted", _random(2, 3, 34)),
        Case("beside a shorter draft", long, beside=short),
        Case("beside a longer draft", short, beside=long),
        Case("no draft, beside one", _random(3, 1, 48, num_draft_tokens=0), beside=long),
        Case("beside a greedy sequence", _random(3, 1, 38), beside=replace(short, **greedy)),
        Case("greedy, beside one that is not", replace(short, **greedy), beside=_random(3, 1, 38)),
        Case("top-k 2, beside top-p", _random(4, 1, 42, **both_k), beside=_random(4, 1, 44, **both_p)),
        Case("top-p, beside top-k 2", _random(4, 1, 44, **both_p), beside=_random(4, 1, 42, **both_k)),
        Case("temperature 0.6, beside 1.5", _random(3, 1, 52, **cool), beside=_random(3, 1, 54, **warm)),
        Case("temperature 1.5, beside 0.6", _random(3, 1, 54, **warm), beside=_random(3, 1, 52, **cool)),
    )


def _equal_but_a_constant() -> ChainProblem:
    target = _rows(3, 2, 8)
    return ChainProblem(target, [target[0] + 3.1])


@dataclass
class DistinctSiblings(TreeProblem):
    """A tree whose given tokens differ among siblings, as those of a draft's likeliest ids do."""

    def paths(self) -> tuple[Int64, Float64]:
        paths, weights = super().paths()
        pairs = itertools.combinations(range(1, len(self.parents)), 2)
        same = [(a - 1, b - 1) for a, b in pairs if self.parents[a] == self.parents[b]]
        good = np.array([all(path[a] != path[b] for a, b in same) for path in paths])
        return paths[good], weights[good]


@cache
def trees(sampled: bool) -> tuple[Case, ...]:
    """Trees whose siblings are drawn from the draft without replacement, or given."""
    shapes = {
        "two siblings": ([-1, 0, 0], 3),
        "three siblings": ([-1, 0, 0, 0], 4),
        "siblings at two depths": ([-1, 0, 0, 1], 3),
    }
    made = []
    for seed, (name, (parents, vocab)) in enumerate(shapes.items()):
        depth = 2 if len(parents) == 4 and 1 in parents else 1
        target = _rows(vocab, depth + 1, 50 + 2 * seed)
        draft = _rows(vocab, depth + 1, 51 + 2 * seed) if sampled else None
        made.append(Case(name, DistinctSiblings(parents, target, draft, sampled)))
    return tuple(made)


def context_tables(vocab: int = 3) -> tuple[Tensor, Tensor]:
    """Logits ``[vocab, vocab]`` of target and draft by the token before, for a chain of steps."""
    target, draft = (
        torch.from_numpy(np.random.default_rng(seed).normal(size=(vocab, vocab)) * 1.1) for seed in (70, 71)
    )
    return target.float(), draft.float()
