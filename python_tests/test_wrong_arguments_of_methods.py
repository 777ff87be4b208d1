"""Methods refuse wrong arguments as functions do (see wrong_values.py), and these walks miss nothing public."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests import public
from python_tests.decoding.models import TableRunner, tiny
from python_tests.law.cases import problem
from python_tests.medusa.models import HIDDEN, features
from python_tests.wrong_values import Calls, complaints, logits, parameters, tables
from specdec_kernels.analysis.measured import Acceptance, StepCosts, watch
from specdec_kernels.analysis.planner import Plan
from specdec_kernels.decoding import Runner
from specdec_kernels.integrations import flashinfer_pipeline
from specdec_kernels.medusa import Features, MedusaHeads, Recipe
from specdec_kernels.testing import ChainProblem, TreeProblem, pieces


def heads() -> MedusaHeads:
    return MedusaHeads(HIDDEN, 2, sk.TokenMap(torch.arange(3)))


@functools.cache
def model() -> Any:
    return tiny("llama")


@functools.cache
def watched() -> Any:
    return watch(TableRunner.random(), torch.tensor([[3, 4, 5]]), drafter=sk.NgramDrafter(), max_new_tokens=4)


def table() -> sk.NgramTable:
    return sk.NgramTable.from_tokens(np.arange(9))


def step(chain: Any, tokens: int) -> dict[str, Any]:
    verify = sk.verify_chain if isinstance(chain, ChainProblem) else sk.verify_tree
    return {"verify": verify, "paths": chain.paths()[0][:1], "uniforms": np.zeros((1, tokens), np.int64),
            "acceptance": "token" if isinstance(chain, ChainProblem) else "match"}  # fmt: skip


CHAIN, TREE = problem("full", 3, 1), TreeProblem([-1, 0], [torch.zeros(3), torch.zeros(3, 3)])
COSTS = StepCosts(1, {1: 1.0, 2: 1.5}, {("lookup", 1): 0.1})
MARGINS = sk.Margins(torch.zeros(1, 2).long(), torch.zeros(1, 2).double())
NOWHERE = Path("/nowhere/at all")
GOOD: Calls = {
    "analysis.measured.Acceptance.of": (Acceptance.of, lambda: {"watched": [watched()]}),
    "testing.ChainProblem": (ChainProblem, lambda: {"target": [logits(3), logits(3, 3)], "draft": [logits(3)]}),
    "testing.ChainProblem.call": (CHAIN.call, lambda: step(CHAIN, CHAIN.num_uniforms)),
    "integrations.flashinfer_pipeline.LogitsPipe.compile": (
        flashinfer_pipeline.LogitsPipe([flashinfer_pipeline.Softmax()]).compile, lambda: {"custom_fusion_rules": None},
    ),
    "CostTable.at": (sk.CostTable.nominal(True).at, lambda: {"step": 1}),
    "CostTable.nominal": (sk.CostTable.nominal, lambda: {"draft_model": True, "num_nodes": 4}),
    "Draft": (sk.Draft, lambda: {"tokens": torch.tensor([[1, 2]]), "logits": logits(1, 2, 5)}),
    "Foresight": (sk.Foresight, lambda: {"tokens": np.array([7, -1]), "matched": np.array([2, 0])}),
    "Draft.widened": (sk.Draft(torch.tensor([[1, 2]])).widened, lambda: {"width": 3}),
    "DraftTree": (sk.DraftTree, lambda: {"parents": torch.tensor([-1, 0, 0]), "max_depth": 2}),
    "DraftTree.from_links": (
        sk.DraftTree.from_links,
        lambda: {"first_child": torch.tensor([1, -1]), "next_sibling": torch.tensor([-1, -1]), "max_depth": 1},
    ),
    "DraftTree.from_mask": (
        sk.DraftTree.from_mask, lambda: {"mask": torch.ones(2, 2).tril().bool(), "max_depth": 1},
    ),
    "DraftTree.to": (sk.DraftTree.cartesian([2]).to, lambda: {"device": "cpu"}),
    "medusa.Features.join": (Features.join, lambda: {"parts": [features()]}),
    "medusa.Features.labels": (features().labels, lambda: {"num_heads": 2}),
    "medusa.Features.load": (Features.load, lambda: {"path": NOWHERE}),
    "medusa.Features.rows_of": (features().rows_of, lambda: {"document": 1}),
    "medusa.Features.save": (features().save, lambda: {"path": NOWHERE}),
    "medusa.Features.split": (features().split, lambda: {"every": 2}),
    "medusa.MedusaHeads.check_fits": (heads().check_fits, lambda: {"vocab": 9, "hidden": HIDDEN}),
    "medusa.MedusaHeads.draft_labels": (heads().draft_labels, lambda: {"labels": torch.tensor([1, -100])}),
    "medusa.MedusaHeads.forward": (heads().forward, lambda: {"hidden": logits(2, HIDDEN)}),
    "medusa.MedusaHeads.load": (MedusaHeads.load, lambda: {"path": NOWHERE}),
    "medusa.MedusaHeads.of_model": (
        MedusaHeads.of_model, lambda: {"model": model(), "num_heads": 2, "token_map": sk.TokenMap(torch.arange(3))},
    ),
    "medusa.MedusaHeads.outputs": (heads().outputs, lambda: {"hidden": logits(2, HIDDEN)}),
    "medusa.MedusaHeads.save": (heads().save, lambda: {"path": NOWHERE}),
    "medusa.MedusaHeads.top_tokens": (heads().top_tokens, lambda: {"hidden": logits(2, HIDDEN), "num": 2}),
    "Margins.of_difference": (MARGINS.of_difference, lambda: {"tokens": torch.zeros(1, 2).long()}),
    "NgramLMDrafter.law_after": (sk.NgramLMDrafter().law_after, lambda: {"text": [1, 2, 1]}),
    "NgramTable": (sk.NgramTable, lambda: {"orders": table().orders}),
    "NgramTable.contexts": (table().contexts, lambda: {"text": [1, 2, 1]}),
    "NgramTable.load": (sk.NgramTable.load, lambda: {"path": NOWHERE}),
    "NgramTable.save": (table().save, lambda: {"path": NOWHERE}),
    "analysis.planner.Plan.best": (Plan().best, lambda: {"temperature": 1.0, "batch_size": 1}),
    "Processors.with_bitmask": (sk.Processors().with_bitmask, lambda: {"token_bitmask": torch.ones(1, 1).int()}),
    "Processors.with_counts": (
        sk.Processors(presence_penalty=1.0, token_counts=sk.TokenCounts(torch.tensor([[1]]), 3)).with_counts,
        lambda: {"token_counts": sk.TokenCounts(torch.tensor([[2]]), 3)},
    ),
    "medusa.Recipe.rate": (Recipe().rate, lambda: {"step": 1}),
    "testing.Pieces.box": (
        pieces(lambda path, uniforms: path, 1, 2).box,
        lambda: {"path": np.zeros(3, np.int64), "points": np.zeros((3, 2), np.int64)},
    ),
    "RowStats.stack": (sk.RowStats.stack, lambda: {"stats": [sk.row_stats(logits(2, 5))], "dim": 1}),
    "analysis.measured.StepCosts.c": (COSTS.c, lambda: {"name": "lookup", "length": 1}),
    "analysis.measured.StepCosts.verification": (COSTS.verification, lambda: {"rows": 2}),
    "TokenCounts.add_": (
        sk.TokenCounts(torch.tensor([[1, 2]]), 3).add_, lambda: {"tokens": torch.tensor([[1]])},
    ),
    "TokenCounts.restart_": (
        sk.TokenCounts(torch.tensor([[1, 2]]), 3).restart_, lambda: {"slot": 0, "prompt_ids": torch.tensor([1])},
    ),
    "TokenMap.to": (sk.TokenMap(torch.arange(3)).to, lambda: {"device": "cpu"}),
    "testing.TreeProblem": (TreeProblem, lambda: {"parents": [-1, 0], "target": [logits(3), logits(3, 3)]}),
    "testing.TreeProblem.call": (TREE.call, lambda: step(TREE, TREE.num_uniforms)),
}  # fmt: skip

ALLOWED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("verify", "draft_stats"), callable),
    "acceptance": lambda value: isinstance(value, str),  # the verifier's own
    "medusa.MedusaHeads.load-model": lambda value: value is None,
    **dict.fromkeys(
        ("medusa.MedusaHeads.load-path", "medusa.MedusaHeads.save-path"), lambda value: isinstance(value, str)
    ),
    "options": lambda value: value == {},
}


@pytest.mark.parametrize(("key", "parameter"), parameters(GOOD))
def test_wrong_values_are_refused(key: str, parameter: str) -> None:
    allowed = ALLOWED.get(f"{key}-{parameter}", ALLOWED.get(parameter, lambda value: False))
    said = complaints(*GOOD[key], parameter, allowed)
    assert not said, said


# Made by the package and read by its users.
RESULTS = {
    "Draw", "GatherOutput", "GenerationOutput", "GenerationStats", "Margins", "Provenance", "RowStats", "ShardDraw",
    "ShardStats", "Status", "TokenLogprobs", "VerifyOutput", "analysis.measured.Acceptance",
    "analysis.measured.Estimate", "analysis.measured.StepCosts", "analysis.measured.Watched", "analysis.planner.Choice",
    "analysis.planner.Plan", "audit.Finding", "audit.Loop", "audit.Report", "audit.Row", "testing.Pieces",
    "integrations.flashinfer_pipeline.TensorType",
}  # fmt: skip
# What `generate` calls, and what it calls it with.
OF_THE_LOOP = (
    "decoding.DecodingState",
    "decoding.Prompt",
    "decoding.StepResult",
    "CostTable.learn",
    "CostTable.leave",
    "CostTable.meet",
)


def is_of_the_loop(name: str, call: Callable[..., Any]) -> bool:
    methods = vars(sk.Drafter).keys() | vars(Runner).keys() | vars(sk.Grammar).keys()
    return name.startswith(OF_THE_LOOP) or (getattr(call, "__name__", "") in methods and "." in name)


def raises_section(call: Callable[..., Any]) -> bool:
    """Whether its docstring has the section; for a class, the docstring of it or of one of its bases."""
    described = call.__mro__ if isinstance(call, type) else (call,)
    return any(re.search(r"^ *Raises\n *------\n", one.__doc__ or "", re.MULTILINE) for one in described)


def test_everything_public_says_what_it_raises() -> None:
    """Except for formulas, figures and prompts, where it goes without saying, and for what takes anything."""
    pipeline = "integrations.flashinfer_pipeline"
    unsaid = ("analysis.", "assets.", "CostTable.", f"{pipeline}.Sample", f"{pipeline}.Softmax")
    silent = [
        name
        for name, call in public.callables().items()
        if name not in RESULTS and not name.startswith(unsaid) and not is_of_the_loop(name, call)
        if not raises_section(call)
    ]
    assert not silent, silent


def test_everything_public_is_walked() -> None:
    walked = {key.partition("-")[0] for table in tables() for key in table}
    public_ones = public.callables()
    missed = [
        name for name, call in public_ones.items() if name not in walked | RESULTS and not is_of_the_loop(name, call)
    ]
    assert not missed, missed
    assert not RESULTS - set(public_ones)
