"""The public functions of the package's modules refuse wrong arguments as its own do: see wrong_values.py."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

import specdec_kernels as sk
from python_tests.audit.planted import one_seed
from python_tests.decoding.models import TableRunner, tiny
from python_tests.integrations.sglang_outputs import outputs
from python_tests.law.cases import problem
from python_tests.medusa.models import HIDDEN, Letters, features, random_heads, wide
from python_tests.wrong_values import Calls, complaints, logits, parameters
from specdec_kernels import laws
from specdec_kernels.integrations import flashinfer_pipeline
from specdec_kernels.medusa import Document, Features, MedusaHeads, Recipe


def probs(*shape: int) -> Tensor:
    return logits(*shape).softmax(-1)


def seeded(**more: Any) -> dict[str, Any]:
    return {"indices": torch.tensor([1, 0]), "seed": torch.tensor([1, 2]), "offset": torch.tensor([3, 4])} | more


def flashinfer(name: str) -> dict[str, Any]:
    rows = {"logits": logits(2, 5)} if "logits" in name or name == "softmax" else {"probs": probs(2, 5)}
    cuts = {cut: torch.tensor(value) for cut, value in (("top_k", [3, 2]), ("top_p", [0.5, 0.9]), ("min_p", [0.1, 0.2]))
            if cut in name}  # fmt: skip
    if name == "softmax":
        return rows | {"temperature": torch.tensor([0.5, 1.0])}
    if name == "chain_speculative_sampling":
        return {
            "draft_probs": probs(2, 2, 5), "draft_token_ids": torch.tensor([[1, 2], [3, 4]]),
            "target_probs": probs(2, 3, 5), "maybe_output_accepted_token_num": torch.zeros(2, dtype=torch.int32),
            "maybe_output_emitted_draft_token_num": torch.zeros(2, dtype=torch.int32),
            "seed": torch.tensor([1, 2]), "offset": torch.tensor([3, 4]),
        }  # fmt: skip
    return rows | cuts | ({} if "renorm" in name or "mask" in name else seeded())


def pipeline(name: str) -> dict[str, Any]:
    return {"processors": [flashinfer_pipeline.TopP()]} if name == "LogitsPipe" else {}


def sglang(name: str) -> dict[str, Any]:
    index = torch.arange(4).view(2, 2)
    made = {
        f"retrive_{which}": torch.zeros(2, 2, dtype=torch.int64) for which in ("index", "next_token", "next_sibling")
    } | {
        "verified_seq_len": torch.tensor([3, 1]), "tree_mask": torch.ones(8, dtype=torch.bool),
        "positions": torch.zeros(4, dtype=torch.int64), "draft_token_num": 2,
    }  # fmt: skip
    if name == "reconstruct_indices_from_tree_mask":
        return made | {"batch_size": 2}
    if name == "build_tree_kernel_efficient":
        return made | {
            "parent_list": torch.tensor([[-1, 0], [-1, 0]]), "selected_index": torch.tensor([[0], [1]]),
            "topk": 2, "depth": 1, "tree_mask_mode": 1,
        }  # fmt: skip
    given = dict(zip(("predicts", "accept_index", "accept_token_num"), outputs(2, 2, 2), strict=True)) | {
        "candidates": index, "retrive_index": index, "retrive_next_token": torch.tensor([[1, -1], [1, -1]]),
        "retrive_next_sibling": torch.full((2, 2), -1),
    }  # fmt: skip
    if name == "verify_tree_greedy":
        return given | {"target_predict": index}
    return given | {
        "uniform_samples": torch.rand(2, 2), "uniform_samples_for_final_sampling": torch.rand(2),
        "target_probs": probs(2, 2, 5), "draft_probs": probs(2, 2, 5),
    }  # fmt: skip


def assisted_generation(*, num_speculative_tokens: int | str | None = None, acceptance: str = "token") -> None:
    """Enters the block: all that runs is the context manager's own code."""
    from specdec_kernels.integrations.transformers import assisted_generation as block

    with block(num_speculative_tokens=num_speculative_tokens, acceptance=acceptance):
        pass


def generate(
    *, drafter: sk.Drafter | None = None, num_speculative_tokens: int | str | None = None, acceptance: str = "token",
    seeds: Tensor | None = None, streamer: Any = None,
) -> None:  # fmt: skip
    """The parameters that a user passes; the others are transformers' own."""
    from specdec_kernels.integrations.transformers import generate as loop

    model().generate(
        torch.tensor([[3, 4, 5]]), custom_generate=functools.partial(loop, streamer=streamer), max_new_tokens=2,
        drafter=drafter, num_speculative_tokens=num_speculative_tokens, acceptance=acceptance, seeds=seeds,
        do_sample=True,
    )  # fmt: skip


@functools.wraps(sk.distributed.verify_chain)
def sharded(**given: Any) -> sk.VerifyOutput:
    """In a group of this process alone."""
    return sk.distributed.verify_chain(**given)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@functools.cache
def heads() -> MedusaHeads:
    return random_heads()


@functools.cache
def model() -> Any:
    return tiny("llama")


def medusa(name: str) -> dict[str, Any]:
    labels = torch.tensor([3, 4, -100])
    data = {"features": features(), "recipe": Recipe(steps=1, batch_size=2)}
    pathless = data | {"heads": heads()}
    head, draft = logits(model().config.vocab_size, HIDDEN), {"draft": model()}
    every: dict[str, Callable[[], dict[str, Any]]] = {
        "Document": lambda: {"tokens": np.arange(3), "first": 1},
        "Features": lambda: {name: getattr(features(), name) for name in Features.__dataclass_fields__},
        "Recipe": dict,
        "choose_vocabulary": lambda: {"features": features(), "size": 3},
        "count_accuracy": lambda: {"heads": heads(), "features": features(), "ranks": 2},
        "distillation_loss": lambda: {"original_logits": logits(3, 9), "logits": logits(3, 9), "labels": labels},
        "extract": lambda: {"model": model(), "documents": [Document(np.arange(3, 7))]},
        "falling": lambda: {"accuracy": torch.rand(2, 3)},
        "heads_weight": lambda: {"step": 1, "ramp_steps": 2, "final": 0.5},
        "linear_cross_entropy": lambda: {"inputs": logits(3, 4), "weight": logits(9, 4), "labels": labels},
        "lm_loss": lambda: {"logits": logits(3, 9), "labels": labels},
        "medusa1_loss": lambda: {"heads": heads(), "hidden": logits(2, HIDDEN), "labels": torch.zeros(2, 3).long()},
        "prepare": lambda: {"model": model(), "tokenizer": Letters(), "folder": Path("nowhere"), "num_tokens": 0},
        "acceptance_of": lambda: draft | {"head": head, "features": features()},
        "first_layers": lambda: {"model": wide(), "num_layers": 1},
        "train_draft": lambda: data | draft | {"head": head},
        "train_heads": lambda: pathless,
        "train_jointly": lambda: pathless | {"model": model()},
    }
    return every[name]()


def theory(name: str) -> dict[str, Any]:
    every = {
        "alpha": 0.5, "gamma": 3, "c": 0.1, "verification": 1.5, "operations_ratio": 0.1, "memory_ratio": 0.1,
        "acceptances": [0.5, 0.2], "lengths": [0, 1], "seconds": [1.0, 1.2], "margin": 1.1, "max_gamma": 8,
    }  # fmt: skip
    return {parameter: every[parameter] for parameter in parameters_of(sk.analysis, name)}


def judged(name: str) -> dict[str, Any]:
    chain = problem("full", 3, 1)
    P = np.array([[0.5, 0.3, 0.2]])
    return {
        "exact_law": {"verify": sk.verify_chain, "problem": chain, "acceptance": "token"},
        "float64_gumbel": {"keys": torch.tensor([1, 2]), "vocab": 5},
        "float64_law": {"logits": logits(2, 5)},
        "float64_target_law": {"law": laws.Chow(0.5), "P": P, "Q": P[:, ::-1], "p": P, "q": P},
        "joint_of": {"problem": chain, "emitted": [(0,)], "volume": np.ones(1), "path": np.zeros(1, np.int64)},
        "philox4x32": {"key": np.zeros((1, 2), np.uint64), "counter": np.zeros((1, 4), np.uint64)},
        "pieces": {"run": lambda path, uniforms: uniforms[:, 0] // (1 << 23), "num_paths": 1, "width": 1},
        "target_joint": {"problem": chain},
        "total_variation": {"laws": P, "expected": P[0]},
        "words32": {"values": np.arange(3)},
    }[name]


def decoded(**more: Any) -> dict[str, Any]:
    options = {"max_new_tokens": 2, "num_speculative_tokens": 1, "sampling": sk.SamplingParams()}
    batches = [(torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.ones(2, 3).long())]
    return options | {"model": TableRunner.random(), "drafter": sk.NgramDrafter(), "batches": batches} | more


def measured(name: str) -> dict[str, Any]:
    if name == "watch":
        return {
            "model": TableRunner.random(),
            "input_ids": torch.tensor([[3, 4, 5]]),
            "drafter": sk.NgramDrafter(),
            "max_new_tokens": 2,
        }
    if name == "measure_acceptance":
        return decoded()
    (ids, mask) = decoded()["batches"][0]
    return {"model": TableRunner.random(), "input_ids": ids, "attention_mask": mask, "lengths": [1], "batch_size": 1,
            "drafters": {"lookup": sk.NgramDrafter()}, "rounds": 1, "steps": 1}  # fmt: skip


def planned(name: str) -> dict[str, Any]:
    drafters = {"lookup": sk.NgramDrafter()}
    return {
        "count_runs": {
            "drafters": drafters,
            "num_batches": 1,
            "temperatures": [1.0],
            "lengths": 1,
            "batch_sizes": 1,
            "rounds": 1,
            "draws": 1,
        },
        "plan": {
            "model": TableRunner.random(),
            "batches": decoded()["batches"],
            "drafters": drafters,
            "temperatures": [1.0],
            "lengths": [1],
            "batch_sizes": [1],
            "max_new_tokens": 2,
            "rounds": 1,
            "draws": 1,
        },
        "simulate": {
            "acceptances": np.array([0.5]),
            "drafted_share": 0.5,
            "drafting": 0.1,
            "verification": 1.1,
            "batch_size": 1,
            "num_tokens": 3,
            "answers": 2,
        },
    }[name]  # fmt: skip


def drawn(name: str) -> dict[str, Any]:
    return {
        "save": {"figure": Figure(), "path": Path("/nowhere/at all.png"), "command": "specdec plot"},
        "acceptance_by_position": {"rows": ROWS}, "gain_by_batch": {"choices": ROWS},
        "predicted_and_measured": {"rows": ROWS}, "techniques": {"rows": ROWS},
        "thresholds": {"rows": ROWS}, "cascades": {"rows": ROWS},
    }.get(name, {})  # fmt: skip


def fetched(name: str) -> dict[str, Any]:
    return {"load_folder": {"folder": Path("nowhere")}, "print_to_stderr": {"message": "a word"}}.get(name, {})


def parameters_of(module: Any, name: str) -> list[str]:
    return list(inspect.signature(getattr(module, name)).parameters)


def public(module: str) -> list[str]:
    """A module's own functions and classes, or those in its list."""
    loaded = importlib.import_module(f"specdec_kernels.{module}")
    names = getattr(loaded, "__all__", None) or [
        name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == loaded.__name__
    ]
    return [name for name in names if callable(getattr(loaded, name)) and not name.startswith("_")]


ESTIMATE = {"mean": 1.0, "low": 0.5, "high": 1.5}
ROWS = [{
    "temperature": 1.0, "drafter": "lookup", "num_speculative_tokens": 1, "batch_size": 1, "by_position": [ESTIMATE],
    "gain": ESTIMATE, "simulated": ESTIMATE, "measured": ESTIMATE, "gain_by_alpha": 1.0, "ratio": 1.0, "ratio_min": 1.0,
    "ratio_max": 1.0, "setting": "T = 1", "rule": "Chow", "alpha": 0.1, "word_accuracy": 0.5, "standard_error": 0.1,
    "target_calls_per_token": 0.5,
}]  # fmt: skip
# For each module: what makes a function's arguments; and functions that take none, or return what they are made of.
MODULES: dict[str, tuple[Callable[[str], dict[str, Any]], set[str]]] = {
    "integrations.flashinfer": (flashinfer, set()),
    "integrations.flashinfer_pipeline": (pipeline, {"LogitsProcessor", "TensorType"}),
    "integrations.sglang": (sglang, set()),
    "medusa": (medusa, {"MedusaHeads"}),  # walked with `specdec_kernels` itself
    "analysis": (theory, set()),
    "testing": (judged, {"Float64", "Int64", "Verify", "Pieces", "ChainProblem", "TreeProblem"}),
    "analysis.measured": (measured, {"Acceptance", "Estimate", "StepCosts", "Watched"}),
    "analysis.planner": (planned, {"Choice", "Plan"}),
    "analysis.plots": (drawn, set()),
    "assets": (fetched, {"AssetError", "Say"}),
    "audit": (lambda name: {"verifier": one_seed, "steps": False, "samples": 9, "cases": ["two ids, two"]},
              {"Finding", "Loop", "Report", "Row"}),
}  # fmt: skip
GOOD: Calls = {
    f"{module}.{name}": (
        getattr(importlib.import_module(f"specdec_kernels.{module}"), name),
        lambda make=make, name=name: make(name),  # type: ignore[misc]
    )
    for module, (make, others) in MODULES.items()
    for name in public(module)
    if name not in others
}
GOOD["integrations.transformers.assisted_generation"] = (assisted_generation, dict)
GOOD["integrations.transformers.speculative_sampling"] = (
    sk.integrations.transformers.speculative_sampling,
    lambda: {
        "candidate_input_ids": torch.tensor([[1, 2, 3]]), "candidate_logits": logits(1, 2, 5), "candidate_length": 2,
        "new_logits": logits(1, 3, 5), "assistant_ensemble_weight": 0.5,
    },
)  # fmt: skip

GOOD["integrations.transformers.generate"] = (generate, lambda: {"drafter": sk.NgramDrafter()})
GOOD["distributed.verify_chain"] = (sharded, lambda: {
    "target_logits": logits(2, 3, 1030), "draft_tokens": torch.zeros(2, 2).long(), "draft_logits": logits(2, 2, 1030),
    "seeds": torch.tensor([1, 2]), "step": 0, "widths": [1030],
})  # fmt: skip


def is_int16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int16


UNREAD = {  # by the functions that take them, as other projects call those
    "deterministic", "is_deterministic", "enable_pdl",
    *(
        f"{chains}_speculative_sampling_triton-{name}" for chains in ("chain", "chain_block")
        for name in ("retrive_next_token", "retrive_next_sibling", "threshold_single", "threshold_acc")
    ),
}  # fmt: skip
HANDED_ON = {  # their documentation says "as `generate`"
    "analysis.measured.watch", "analysis.measured.measure_acceptance", "analysis.measured.measure_costs",
    "analysis.planner.plan",
}  # fmt: skip
ALLOWED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(UNREAD, lambda value: True),
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), is_int16),
    "top_k": lambda value: isinstance(value, int) or is_int16(value),  # any number: too large is off
    "exact_law-acceptance": lambda value: isinstance(value, str),  # the verifier's own
    "exact_law-verify": callable,
    "pieces-run": callable,
    **dict.fromkeys(("advance", "clock", "say"), lambda value: value is print),
    "count_runs-drafters": lambda value: value == {},
    "speculative_sampling-is_done_candidate": lambda value: value is None,
    "measure_costs-attention_mask": is_int16,
    "measure_costs-drafters": lambda value: value == {},  # plain decoding alone
    "generate-streamer": lambda value: value is None,
    "verify_chain-group": lambda value: value is None,
    "print_to_stderr-message": lambda value: True,  # whatever can be printed
    "save-command": lambda value: isinstance(value, str),
    "save-description": lambda value: isinstance(value, str),
    **dict.fromkeys(("seed", "offset"), lambda value: isinstance(value, int)),  # any: only its last 64 bits count
}


@pytest.mark.parametrize(("key", "parameter"), parameters(GOOD))
def test_wrong_values_are_refused(key: str, parameter: str) -> None:
    allowed = ALLOWED.get(parameter) or ALLOWED.get(f"{key.rpartition('.')[2]}-{parameter}")
    also = "generate|watch" if key in HANDED_ON else ""
    said = complaints(*GOOD[key], parameter, allowed or (lambda value: False), also)
    assert not said, said
