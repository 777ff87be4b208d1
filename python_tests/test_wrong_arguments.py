"""Every public function and class of `specdec_kernels` itself refuses wrong arguments: see wrong_values.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, tiny
from python_tests.ops.inputs import op_tests
from python_tests.wrong_values import Calls, complaints, parameters
from specdec_kernels import laws
from specdec_kernels.backends import FUNCTIONS
from specdec_kernels.medusa import MedusaHeads


def runner() -> TableRunner:
    return TableRunner.random()


def loop(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": runner(), "input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "max_new_tokens": 2, **more}


def tree() -> sk.DraftTree:
    return sk.DraftTree.from_parents([-1, 0, 0, 1])


LOOP = loop(draft_model=runner(), attention_mask=torch.ones(2, 3).long(), seeds=torch.tensor([1, 2]))
GOOD: Calls = {
    **{
        f"{op}-{name}": (getattr(sk, op), make)
        for op in FUNCTIONS
        for name, make in op_tests(op).CALLS.items()
    },
    "decision_margins": (
        sk.decision_margins, lambda: {"verify": sk.verify_chain, **op_tests("verify_chain").CALLS["token"]()},
    ),
    "generate": (sk.generate, loop(drafter=sk.NgramDrafter(), attention_mask=torch.ones(2, 3).long(),
                                   seeds=torch.tensor([1, 2]))),
    "token_cascade": (sk.token_cascade, lambda: LOOP() | {"target_law": laws.Chow(0.5)}),
    "oracle_cascade": (sk.oracle_cascade, lambda: LOOP() | {"target_law": laws.Opt(0.5)}),
    "seq_cascade": (sk.seq_cascade, lambda: LOOP() | {"alpha": 0.5}),
    "bild": (sk.bild, lambda: {k: v for k, v in LOOP().items() if k != "seeds"}),
    "CostTable": (sk.CostTable, lambda: {"steps": np.zeros(1, np.int64), "seconds": np.ones((1, 4))}),
    "SamplingParams": (sk.SamplingParams, dict),
    "Processors": (
        sk.Processors, lambda: {"token_counts": sk.TokenCounts(torch.tensor([[1]]), 2), "stop_token_ids": [1]},
    ),
    "TokenCounts": (sk.TokenCounts, lambda: {"prompt_ids": torch.tensor([[3, 1]]), "max_new_tokens": 2}),
    "TokenMap": (sk.TokenMap, lambda: {"draft_to_target": torch.tensor([3, 1])}),
    **{
        f"laws.{name}": (getattr(laws, name), lambda: {"alpha": 0.5})
        for name in laws.__all__
    },
    "DraftTree.from_parents": (sk.DraftTree.from_parents, lambda: {"parents": [-1, 0, 0], "max_depth": 3}),
    "DraftTree.from_parents-tensor": (
        sk.DraftTree.from_parents, lambda: {"parents": torch.tensor([-1, 0, 0]), "max_depth": 3},
    ),
    "DraftTree.from_choices": (sk.DraftTree.from_choices, lambda: {"medusa_choices": [[0], [1]]}),
    "DraftTree.cartesian": (sk.DraftTree.cartesian, lambda: {"widths": [2, 2]}),
    "DraftTree.calibrated": (sk.DraftTree.calibrated, lambda: {"accuracy": [[0.5, 0.2]], "max_nodes": 3}),
    "DraftTree.attention_mask": (
        tree().attention_mask, lambda: {"context_lengths": torch.tensor([1, 2]), "kv_length": 9},
    ),
    "DraftTree.mask_mod": (tree().mask_mod, lambda: {"context_lengths": torch.tensor([1, 2])}),
    "MedusaDrafter": (sk.MedusaDrafter, lambda: {"heads": heads(), "tree": sk.DraftTree.from_choices([[0]])}),
    "ModelDrafter": (sk.ModelDrafter, lambda: {"draft_model": runner()}),
    "ModelTreeDrafter": (sk.ModelTreeDrafter, lambda: {"draft_model": tiny("llama")}),
    "NgramDrafter": (sk.NgramDrafter, dict),
    "NgramLMDrafter": (sk.NgramLMDrafter, dict),
    "NgramTreeDrafter": (sk.NgramTreeDrafter, dict),
    "NgramTable.from_tokens": (sk.NgramTable.from_tokens, lambda: {"tokens": np.arange(9)}),
    "plan_verify": (
        sk.plan_verify, lambda: {"acceptances": torch.full((2, 3), 0.5), "step_seconds": torch.arange(1.0, 8)},
    ),
    "backends": (sk.backends, lambda: {"device": "cpu"}),
    "pack_linear_weights": (sk.pack_linear_weights, lambda: {"model": torch.nn.ReLU()}),
    "medusa.MedusaHeads": (
        MedusaHeads, lambda: {"hidden_size": 4, "num_heads": 2, "token_map": sk.TokenMap(torch.arange(3))},
    ),
}  # fmt: skip
ALLOWED: dict[str, Callable[[Any], bool]] = {  # although the annotation does not say so
    "streamer": lambda value: value is None or callable(value),
    "dtype": lambda value: value is torch.float32,
    "logit_bias": lambda value: isinstance(value, dict),
    **dict.fromkeys(("banned_ids", "allowed_ids", "stop_token_ids"), lambda value: value == [[]]),
    "cache": lambda value: isinstance(value, list) and value == [[]],
    "top_k": lambda value: isinstance(value, int),  # any number: too large is off
    "attention_mask": lambda value: isinstance(value, Tensor) and value.dtype == torch.int16,
    "eos_token_id": lambda value: value in ([[]], {}) if isinstance(value, (list, dict)) else False,
}


def heads() -> MedusaHeads:
    return MedusaHeads(4, 2, sk.TokenMap(torch.arange(3)))


@pytest.mark.parametrize(("key", "parameter"), parameters(GOOD))
def test_wrong_values_are_refused(key: str, parameter: str) -> None:
    said = complaints(*GOOD[key], parameter, ALLOWED.get(parameter, lambda value: False))
    assert not said, said
