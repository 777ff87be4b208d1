"""The joint distribution that a verifier's steps really have: exactly where its random numbers can be given, else
from samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..testing import LATTICE, Float64, Int64, TreeProblem, joint_of, target_joint
from ..testing.counts import g_test
from .cases import Case
from .cut import Bisection, Bool
from .noise import UnknownNoise
from .signatures import Signature
from .step import Problem, draw, step_of

_ONE_BY_ONE = 5000
"""The most samples of a verifier that takes one sequence a call."""
LEVEL = 1e-7
"""p-values below it are differences."""
MERGED = 5.0
"""Of a G-test."""


@dataclass
class Joint:
    """What a verifier emits in a case.

    Attributes
    ----------
    law : ndarray
        ``[n] + [vocab] * num_tokens``: as `specdec_kernels.testing.exact_law`; for samples, their frequencies.
    samples : int or None
        How many, for each of the n; None: exact.
    failures : dict of str to float
        What went wrong instead of an answer, and with which probability.
    impossible : dict of tuple to float
        The probability of what was emitted although the target cannot give it, by emitted tokens. For trees and chains
        alike, the last one is the final token.
    accepted : bool
        Whether the impossible token is an accepted one each time, with another one after it.
    at_ends : bool
        Whether what is impossible, and failures, need a uniform at an end of its range.
    dtypes : set of torch.dtype
        Of the uniforms, as far as that is known.
    """

    law: Float64
    samples: int | None = None
    failures: dict[str, float] = field(default_factory=dict)
    impossible: dict[tuple[int, ...], float] = field(default_factory=dict)
    accepted: bool = True
    at_ends: bool = False
    dtypes: set[torch.dtype] = field(default_factory=set)

    def distance(self, expected: Float64) -> float:
        """The total variation from a distribution, or of several the largest."""
        off = np.abs(self.law - expected).reshape(len(self.law), -1).sum(-1).max() / 2
        return float(off) + sum(self.failures.values()) / 2

    def p_value(self, expected: Float64) -> float:
        """Of a G-test of the samples, with Bonferroni's correction where there are several tests; 1 where exact."""
        if self.samples is None:
            return 1.0
        wanted = np.broadcast_to(expected, self.law.shape)
        found = [g_test(self.samples * law, of, MERGED) for law, of in zip(self.law, wanted, strict=True)]
        return min(1.0, min(found) * len(found))

    def agrees(self, expected: Float64, tolerance: float) -> bool:
        if self.samples is not None:
            return self.p_value(expected) > LEVEL
        return self.distance(expected) <= tolerance


class Extractor(Bisection):
    """Runs one case of a signature's verifier with given or with its own random numbers; `alone`: row by row."""

    def __init__(self, signature: Signature, case: Case, rng: np.random.Generator, alone: bool = False) -> None:
        self.case, self.problem = case, case.problem
        other = None if case.beside is None else step_of(case.beside)
        step, vocab, width = step_of(case.problem), case.problem.vocab, case.problem.num_tokens
        super().__init__(signature, signature.emit, step, vocab, width, rng, other)
        self._in_batches = signature.batched and not alone
        self.batched = self._in_batches
        _, weights = self.problem.paths()
        self._likely = weights / weights.sum()

    def joint(self, samples: int, tolerance: float) -> Joint:
        """Found exactly, or from so many samples (for each choice of given tokens).

        Where batches are right and a row alone comes out otherwise, what rows alone emit is found, too: that may be as
        right.
        """
        expected = self.case.expected

        def right(found: Joint) -> bool:
            agrees = any(found.agrees(of, tolerance) for of in expected)
            return agrees and not found.failures and not found.impossible

        with torch.random.fork_rng(devices=[]):
            joint = self._joint(samples)
            if self.differs_alone and right(joint):
                alone = Extractor(self.signature, self.case, self.rng, alone=True)._joint(samples)
                if not right(alone):
                    off = max(min(map(alone.distance, expected)), sum(alone.impossible.values()))
                    joint.failures["a sequence alone comes out otherwise than in a batch"] = off
            return joint

    def _joint(self, samples: int) -> Joint:
        try:
            found = self.find(isinstance(self.problem, TreeProblem)).boxes()
        except UnknownNoise:
            return self._sampled(samples)
        return self._assembled(found.code, found.volume, found.path, found.at_ends)

    def _assembled(self, codes: Int64, volumes: Float64, owner: Int64, at_ends: Bool) -> Joint:
        _, weights = self.problem.paths()
        each = self.problem.each_is_right
        good = (codes >= 0) & (volumes > 0)
        emitted = [self.tokens(code) for code in codes[good]]
        dtypes = self.dtypes or ({torch.float32} if self.given else set())
        joint = Joint(joint_of(self.problem, emitted, volumes[good], owner[good]), dtypes=dtypes)
        shares = volumes * (1 / len(weights) if each else weights[owner])
        ends = []
        for code, share, end in zip(codes, shares, at_ends, strict=True):
            if code < 0 and share > 0:
                message = self.messages[-1 - code]
                joint.failures[message] = joint.failures.get(message, 0.0) + share
                ends.append(end)
        possible = _prefixes(self.problem)
        for tokens, share, end in zip(emitted, shares[good], at_ends[good], strict=True):
            if possible[len(tokens)][tokens] == 0:
                joint.impossible[tokens] = joint.impossible.get(tokens, 0.0) + share
                joint.accepted &= possible[len(tokens) - 1][tokens[:-1]] == 0
                ends.append(end)
        joint.at_ends = bool(ends) and all(ends)
        return joint

    # --- from samples -------------------------------------------------------------------------------------------------

    def _sampled(self, samples: int) -> Joint:
        """Its own random numbers; what a step does not emit is drawn from the distribution that it should have."""
        problem, rng = self.problem, self.rng
        _, weights = problem.paths()
        each = problem.each_is_right
        if not self._in_batches:
            samples = min(samples, _ONE_BY_ONE)
        if each:
            samples = max(samples // len(weights), 2000)
            path = np.repeat(np.arange(len(weights)), samples)
        else:
            path = rng.choice(len(weights), samples, p=weights / weights.sum())
        self.batched = self._in_batches
        codes = self.codes(path, rng.integers(0, LATTICE, (len(path), self.given)) / LATTICE, replaced=False)
        joint = Joint(np.zeros((len(weights) if each else 1, *[problem.vocab] * self.width)), samples)
        laws, possible = problem.target_laws(), _prefixes(problem)
        for code in np.unique(codes):
            here = np.flatnonzero(codes == code)
            if code < 0:
                joint.failures[self.messages[-1 - code]] = len(here) / len(path)
                continue
            tokens = self.tokens(code)
            if possible[len(tokens)][tokens] == 0:
                joint.impossible[tokens] = len(here) / len(path)
            ids = np.tile(np.array(tokens), (len(here), 1))
            for depth in range(len(tokens), self.width):
                ids = np.concatenate([ids, draw(laws[depth][tuple(ids.T)], rng)[:, None]], 1)
            np.add.at(joint.law, (path[here] if each else 0, *ids.T), 1 / samples)
        return joint


def _prefixes(problem: Problem) -> list[Float64]:
    """The probability of each prefix of 0, 1, … tokens."""
    joint = target_joint(problem)
    return [joint.sum(tuple(range(depth, joint.ndim))) for depth in range(joint.ndim + 1)]
