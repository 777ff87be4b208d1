"""Random shapes, dtypes, strides and parameters: every backend gives the reference's tokens, or a predicted exception.

The exception that the contract documents: a token may differ where a uniform, a top-p mass or a min-p bound lies within
float32 error of a border. Which cases those are is predicted by the reference in float64, run twice with uniforms and
bounds moved apart by that error: a case is *borderline* when the two runs differ. Any other difference fails, and both
the borderline cases and the differences among them are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from python_tests.ops.borderline import borderline, build, compare, counted
from python_tests.ops.chains import KINDS, LAWS
from python_tests.ops.inputs import DTYPES
from python_tests.support import Backend, present
from specdec_kernels.ops.arguments import ACCEPTANCES

OP = "verify_chain"
EXAMPLES = 150


@pytest.fixture(scope="module", autouse=True)
def totals() -> Iterator[None]:
    """Print what was counted, and hold the whole of it to the contract: differences in fewer than 1e-4 of the cases."""
    counted.clear()
    yield
    for name, c in sorted(counted.items()):
        print(f"\n{name}: {c['cases']} cases, {c['borderline']} borderline, {c['different']} different", end="")
        assert c["cases"] >= 100_000, f"{name}: {dict(c)}"
        assert c["different"] < c["cases"] * 1e-4 and c["borderline"] < c["cases"] * 1e-3, f"{name}: {dict(c)}"


parameters = st.fixed_dictionaries({
    "temperature": st.sampled_from([1.0, 0.7, 1.3, 0.3, 2.5, 0.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 7, 40, 5000]),
    "top_p": st.sampled_from([0.95, 0.8, 0.3, 1.0, 1.0, 0.0]),
    "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.2, 1.0]),
})  # fmt: skip
examples = st.fixed_dictionaries({
    "vocab": st.one_of(st.integers(2, 40), st.integers(41, 300), st.sampled_from([1023, 1024, 1025, 2047, 2048])),
    "num_draft": st.sampled_from([3, 2, 1, 4, 5, 7, 0]),
    "dtype": st.sampled_from(DTYPES),
    "kind": st.sampled_from(KINDS),  # simplest first: hypothesis draws that most
    "acceptance": st.sampled_from(["block", "token", *ACCEPTANCES]),
    "params": st.lists(parameters, min_size=1, max_size=4),
    "draft_params": st.lists(parameters, min_size=1, max_size=4),
    "min_p_first": st.booleans(),
    "spread": st.sampled_from([1.0, 3.0, 0.1, 10.0]),
    "rounded": st.booleans(),
    "holes": st.booleans(),
    "ragged": st.booleans(),
    "turned": st.booleans(),
    "law": st.sampled_from([None, None, *LAWS]),
    "seed": st.integers(0, 2**31),
})  # fmt: skip


@pytest.mark.long
@given(e=examples)
@settings(max_examples=EXAMPLES)
def test_every_backend_gives_the_references_tokens(e: dict[str, Any]) -> None:
    arguments = build(e)
    expected = sk.verify_chain(**arguments, backend="reference")
    excepted = borderline(arguments)
    for backend in present(OP):
        if backend.interpreted or (backend.name == "reference" and backend.device == "cpu"):
            continue  # interpreted ones have test_backends_agree.py
        with backend.limited():
            compare(backend, e, arguments, expected, excepted)


@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_a_small_error_would_be_seen(acceptance: str) -> None:
    """The exception does not swallow defects: uniforms off by 1e-3 (match: a temperature by 1 %) fail."""
    one = {"temperature": 0.9, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    e = {
        "vocab": 30, "num_draft": 3, "dtype": torch.float32, "kind": "full", "acceptance": acceptance, "params": [one],
        "draft_params": [one], "min_p_first": False, "spread": 1.0, "rounded": False, "holes": False, "ragged": False,
        "turned": False, "law": None, "seed": 5,
    }  # fmt: skip
    arguments = build(e)
    wrong = dict(arguments)
    if acceptance == "match":
        wrong["params"] = replace(arguments["params"], temperature=arguments["params"].temperature * 1.01)
    else:
        wrong["uniform_samples"] = (arguments["uniform_samples"] + 1e-3).clamp_max(1 - 2.0**-24)
    off, right = (sk.verify_chain(**a, backend="reference") for a in (wrong, arguments))
    with pytest.raises(AssertionError, match="differ and are not borderline"):
        compare(_Fixed(off), e, arguments, right, borderline(arguments))


class _Fixed(Backend):
    """A backend that gives one answer."""

    def __init__(self, answer: sk.VerifyOutput) -> None:
        super().__init__("fixed", "cpu")
        object.__setattr__(self, "answer", answer)

    def verify_chain(self, **_: Any) -> sk.VerifyOutput:
        answer: sk.VerifyOutput = self.__dict__["answer"]
        return answer
