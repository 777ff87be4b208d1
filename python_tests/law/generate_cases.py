"""Cases of `generate`: what it decodes with, and the joint law that its tokens should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

import specdec_kernels as sk
from python_tests.decoding.models import NarrowTable, TableRunner
from python_tests.law.windows import WINDOW, windows_of
from specdec_kernels import laws
from specdec_kernels.drafters import Drafter
from specdec_kernels.laws import TargetLaw
from specdec_kernels.testing import Float64, float64_law, float64_target_law

BATCH = 24576
LENGTH = 12  # with 3 draft tokens a step at least three steps, nearly always four or more
VOCAB = 4
END = 2
target_table = TableRunner.random(VOCAB, seed=7, spread=1.2).table
draft_table = TableRunner.random(VOCAB, seed=8, spread=1.2).table
SHARPER = sk.SamplingParams(0.6)
# Costs by which several lengths are chosen, one after the other.
AUTO = sk.CostTable(
    np.arange(5),
    np.array([[1, 1.2, 9, 9], [1, 1.3, 1.6, 2.5], [1, 9, 9, 9], [1, 1.01, 1.02, 1.03], [1, 1.3, 1.6, 2.5]]),
)
CUT = sk.SamplingParams(0.8, top_k=3, top_p=0.95)
FLATTER_CUT = sk.SamplingParams(1.4, top_k=3)


@dataclass(frozen=True)
class Case:
    acceptance: str
    drafter: Callable[[], Drafter]
    sampling: sk.SamplingParams = field(default_factory=sk.SamplingParams)
    num_speculative_tokens: int | sk.CostTable = 3
    ends: tuple[int, ...] = ()
    target_law: TargetLaw | None = None
    draft_sampling: sk.SamplingParams | None = None  # of the draft, where `target_law` looks at it


def model_drafter(sampling: sk.SamplingParams | None = None, min_confidence: float = 0.0) -> Callable[[], Drafter]:
    return lambda: sk.ModelDrafter(TableRunner(draft_table), sampling, min_confidence)


NARROW = sk.TokenMap(torch.tensor([3, 0, 1]))
CASES = {
    "none-token": Case("token", sk.NoDrafter),
    "none-match": Case("match", sk.NoDrafter),
    "none-block-cut": Case("block", sk.NoDrafter, CUT),
    **{
        f"{name}-{acceptance}": Case(acceptance, drafter, sampling)
        for acceptance in ("token", "block", "match")
        for name, drafter, sampling in (
            ("model", model_drafter(), sk.SamplingParams()),
            ("model-sharper", model_drafter(SHARPER), sk.SamplingParams()),
            ("model-cut", model_drafter(FLATTER_CUT), CUT),
            ("model-confident", model_drafter(None, 0.4), sk.SamplingParams()),
            ("model-narrow", lambda: sk.ModelDrafter(NarrowTable(draft_table, NARROW), token_map=NARROW), CUT),
            ("model-greedy", model_drafter(sk.SamplingParams(0.0)), sk.SamplingParams()),
            ("ngram", lambda: sk.NgramDrafter(2), sk.SamplingParams()),
        )
    },
    **{
        f"model-{acceptance}-{name}": Case(acceptance, model_drafter(), **changes)
        for acceptance in ("token", "block", "match")
        for name, changes in (
            ("ends", {"ends": (END,)}),
            ("auto", {"num_speculative_tokens": AUTO}),
        )
    },
    **{
        f"cascade-{acceptance}-{type(law).__name__}": Case(
            acceptance, model_drafter(SHARPER), CUT, target_law=law, draft_sampling=SHARPER
        )
        for acceptance in ("token", "block")
        for law in (
            laws.Opt(0.3, bonus="cascade"),
            laws.TokenV3(0.6, bonus="cascade"),
            laws.Chow(2.0, bonus="cascade"),  # the draft's own law
        )
    },
    "cascade-token-cut-draft": Case(
        "token", model_drafter(FLATTER_CUT), target_law=laws.TokenV3(0.6, bonus="cascade"), draft_sampling=FLATTER_CUT
    ),
    "ngram-token-auto-ends": Case("token", lambda: sk.NgramDrafter(2), num_speculative_tokens=AUTO, ends=(END,)),
}
TRANSFORMER = ("token", "block", "match")
PROCESSED_LENGTH = 6
NUM_TESTS = (len(CASES) + 3) * (LENGTH - WINDOW + 1) + len(TRANSFORMER) * 6 + 12 * (PROCESSED_LENGTH - WINDOW + 1)


def expected_windows(case: Case) -> list[Float64]:
    """See `windows_of`; id VOCAB follows an end, for ever."""
    size = VOCAB + 1
    law = np.zeros((size, size, size))
    law[:VOCAB, :VOCAB, :VOCAB] = goal = float64_law(target_table, case.sampling)
    if case.target_law is not None:
        law[:VOCAB, :VOCAB, :VOCAB] = float64_target_law(
            case.target_law, goal, float64_law(draft_table, case.draft_sampling), float64_law(target_table),
            float64_law(draft_table),
        )  # fmt: skip
    for end in (*case.ends, VOCAB):
        law[:, end] = np.eye(size)[VOCAB]
    law[VOCAB, :VOCAB] = np.eye(size)[VOCAB]  # never reached
    return windows_of(law, LENGTH)
