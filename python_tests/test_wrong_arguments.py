"""Every public function and class refuses wrong arguments by TypeError or ValueError, in words of its own.

Their signatures are walked: each parameter is given, in an otherwise good call, values that its annotation excludes,
and the message must begin with the function's name and hold the parameter's.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner
from python_tests.ops.inputs import op_tests
from specdec_kernels import laws
from specdec_kernels.medusa import MedusaHeads

PLAIN = {
    "str": ["no such name", b"token"],
    "int": [3, -(2**70), 2**70],
    "float": [2.5, float("nan"), float("inf")],
    "bool": [True],
    "None": [None],
    "list": [["token"], [[]], (0.5,), {}],
    "other": [object(), torch.float32, print],
}
HUGE = {-(2**70), 2**70}
SEQUENCES = ("Sequence", "Iterable", "list", "tuple", "NDArray")


def excluded(annotation: str) -> list[Any]:
    """Values of no type that `annotation` names; numbers that no range has, strings that are no name."""
    kinds = set(re.findall(r"\w+", annotation))
    out = list(PLAIN["other"])
    if "Callable" in kinds:
        out.pop()
    out += PLAIN["str"]
    if not kinds & {"int", "float"}:
        out += PLAIN["int"][:1]
    if "int" in kinds:
        out += PLAIN["int"][1:]
    out += PLAIN["float"][1:2] if "float" in kinds else PLAIN["float"]
    for kind in ("bool", "None"):
        if kind not in kinds:
            out += PLAIN[kind]
    if not kinds & set(SEQUENCES):
        out += PLAIN["list"]
    return out


def spoilt(x: Tensor) -> Iterator[Tensor]:
    """Tensors of another dtype or layout than `x`; none of them is an argument of any function."""
    yield x.to(torch.complex64)
    yield x.to(torch.complex64).conj()
    yield x.to(torch.int16)
    yield x.to_sparse()
    if x.dim() == 2:
        yield x.to_sparse_csr()
    yield torch.quantize_per_tensor(torch.zeros(x.shape), 0.1, 0, torch.qint8)


def elsewhere(x: Tensor) -> Iterator[Tensor]:
    """Of another shape or device than `x`: wrong, or another argument is, unless the function takes any."""
    yield x.to("meta")
    yield x[None, None, None]
    yield x.reshape(-1)[:0].reshape(0, 0, 0, 0)


def runner() -> TableRunner:
    return TableRunner.random()


def loop(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": runner(), "input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "max_new_tokens": 2, **more}


def tree() -> sk.DraftTree:
    return sk.DraftTree.from_parents([-1, 0, 0, 1])


LOOP = loop(draft_model=runner(), attention_mask=torch.ones(2, 3).long(), seeds=torch.tensor([1, 2]))
GOOD: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    **{
        f"{op}-{name}": (getattr(sk, op), make)
        for op in ("row_stats", "warp_probs", "uniform_samples", "noise_keys", "sample", "verify_chain",
                   "verify_packed", "verify_tree", "gather_kv_")
        for name, make in op_tests(op).CALLS.items()
    },
    "generate": (sk.generate, loop(drafter=sk.NgramDrafter(), attention_mask=torch.ones(2, 3).long(),
                                   seeds=torch.tensor([1, 2]))),
    "token_cascade": (sk.token_cascade, lambda: LOOP() | {"rule": laws.Chow(0.5)}),
    "oracle_cascade": (sk.oracle_cascade, lambda: LOOP() | {"law": laws.Opt(0.5)}),
    "seq_cascade": (sk.seq_cascade, lambda: LOOP() | {"alpha": 0.5}),
    "bild": (sk.bild, lambda: {k: v for k, v in LOOP().items() if k != "seeds"}),
    "SamplingParams": (sk.SamplingParams, dict),
    "TokenMap": (sk.TokenMap, lambda: {"draft_to_target": torch.tensor([3, 1])}),
    **{
        name: (getattr(laws, name), lambda: {"alpha": 0.5})
        for name in ("Lossy", "Chow", "Diff", "Opt", "TokenV1", "TokenV2", "TokenV3", "BiLD")
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
    "NgramDrafter": (sk.NgramDrafter, dict),
    "NgramLMDrafter": (sk.NgramLMDrafter, dict),
    "NgramTreeDrafter": (sk.NgramTreeDrafter, dict),
    "NgramTable.from_tokens": (sk.NgramTable.from_tokens, lambda: {"tokens": np.arange(9)}),
    "plan_verify": (
        sk.plan_verify, lambda: {"acceptance": torch.full((2, 3), 0.5), "step_seconds": torch.arange(1.0, 8)},
    ),
    "backends": (sk.backends, lambda: {"device": "cpu"}),
    "pack_linear_weights": (sk.pack_linear_weights, lambda: {"model": torch.nn.ReLU()}),
    "MedusaHeads": (MedusaHeads, lambda: {"hidden_size": 4, "num_heads": 2, "token_map": sk.TokenMap(torch.arange(3))}),
}  # fmt: skip
# Which have no parameters that a caller gives wrongly: abstract, outputs, or made by the package. (`analysis` takes
# whatever is an array: python_tests/analysis has its refusals.)
PASSED_OVER = {
    "Draft", "DraftTree", "Drafter", "Draw", "GatherOutput", "GenerationOutput", "GenerationStats", "NgramTable",
    "NoDrafter", "PLACEHOLDER_TOKEN_ID", "Provenance", "RowStats", "Status", "TreeDrafter", "VerifyOutput",
    "analysis", "laws",
}  # fmt: skip
TAKEN = "taken"
ALLOWED: dict[str, Callable[[Any], bool]] = {  # although the annotation does not tell
    "streamer": lambda value: value is None or callable(value),
    "dtype": lambda value: value is torch.float32,
    "cache": lambda value: isinstance(value, list) and value == [[]],
    "top_k": lambda value: isinstance(value, int),  # any number: too large is off
    "attention_mask": lambda value: isinstance(value, Tensor) and value.dtype == torch.int16,
    "eos_token_id": lambda value: value in ([[]], {}) if isinstance(value, (list, dict)) else False,
}


def heads() -> MedusaHeads:
    return MedusaHeads(4, 2, sk.TokenMap(torch.arange(3)))


def test_every_public_function_is_walked() -> None:
    assert {key.partition("-")[0].partition(".")[0] for key in GOOD} >= set(sk.__all__) - PASSED_OVER


def name_in_messages(call: Callable[..., Any]) -> str:
    owner = getattr(call, "__self__", None)
    if owner is not None:
        return (owner if inspect.isclass(owner) else type(owner)).__name__
    return call.__qualname__.partition(".")[0]


def parameters() -> list[Any]:
    """Each parameter once, in its first good call that gives it or else in the first."""
    found: dict[tuple[str, str], str] = {}
    for key, (call, make) in GOOD.items():
        given = make()
        for parameter in inspect.signature(call).parameters:
            known = found.get((key.partition("-")[0], parameter))
            if known is None or (parameter in given and parameter not in GOOD[known][1]()):
                found[key.partition("-")[0], parameter] = key
    return [pytest.param(key, parameter, id=f"{name}-{parameter}") for (name, parameter), key in found.items()]


@pytest.mark.parametrize(("key", "parameter"), parameters())
def test_wrong_values_are_refused(key: str, parameter: str) -> None:
    call, make = GOOD[key]
    signature = inspect.signature(call).parameters[parameter]
    good = make().get(parameter, signature.default)
    wrong, other = excluded(str(signature.annotation)), []
    if isinstance(good, Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong += spoilt(good)
            other = list(elsewhere(good))
    allowed = ALLOWED.get(parameter, lambda value: False)
    complaints = [
        (value, complaint_of(call, make() | {parameter: value}, parameter)) for value in wrong if not allowed(value)
    ]
    for value in other:
        complaint = complaint_of(call, make() | {parameter: value}, r"\w+")
        complaints.append((value, None if complaint == TAKEN else complaint))
    said = [f"{_shown(value)}: {complaint}" for value, complaint in complaints if complaint]
    assert not said, "\n".join(said)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.layout} {value.dtype} {list(value.shape)} {value.device}"


def complaint_of(call: Callable[..., Any], given: dict[str, Any], parameter: str) -> str | None:
    """What is wrong with how a bad `parameter` is refused; None: nothing is."""
    try:
        call(**given)
    except (TypeError, ValueError) as error:
        text = str(error)
        named = re.search(rf"\b{parameter}\b", text) or (
            parameter in ("model", "draft_model") and "cannot be served" in text
        )
        good = text.startswith(f"{name_in_messages(call)}: ") and named
        return None if good else f"{type(error).__name__}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return TAKEN
