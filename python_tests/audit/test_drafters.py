"""How the audit calls drafters, and verifiers that Python knows no signature of; what it refuses before any case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.audit import planted
from specdec_kernels import cli
from specdec_kernels.audit import audit

ONE: dict[str, Any] = {"cases": ["two ids, the likelier"], "samples": 200}
VERIFIERS: dict[str, Callable[..., Any]] = {
    "plain": planted.blocks(stale=False), "transformers": planted.transformers_of(),
    "flashinfer": planted.flashinfer_of(), "sglang-chain": planted.sglang_chain(), "vllm-v1": planted.vllm_v1_of(),
    "vllm-v2": planted.vllm_v2_of("draft").rejection_sample,
}  # fmt: skip
BY_NAMES = ["plain", "transformers", "flashinfer", "sglang-chain"]


@pytest.mark.parametrize("signature", BY_NAMES)
def test_a_drafter_that_is_called_by_names_must_have_them(signature: str) -> None:
    """Else every call would raise, and the verifier be told from a lossless one by that alone."""

    def draft(probs: Tensor) -> Tensor:
        return probs.multinomial(1)[:, 0]

    message = f"audit: a {signature} drafter must name arguments among draft_logits, .*, got probs$"
    with pytest.raises(TypeError, match=message):
        audit(VERIFIERS[signature], signature, draft=draft, **ONE)


@pytest.mark.parametrize("signature", BY_NAMES)
def test_a_drafter_gets_what_it_names(signature: str) -> None:
    named: set[tuple[str, ...]] = set()

    def draft(draft_probs: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor) -> Tensor:
        named.add((*map(str, draft_probs.shape[1:]), *(str(t.dim()) for t in (seeds, positions, temperature, top_k))))
        assert len({len(t) for t in (draft_probs, seeds, positions, temperature, top_k)}) == 1
        return draft_probs.multinomial(1)[:, 0]

    report = audit(VERIFIERS[signature], signature, draft=draft, **ONE)
    assert report.lossless and named == {("3", "1", "1", "1", "1")}, report


@pytest.mark.parametrize(
    ("signature", "wanted"),
    [
        ("vllm-v1", "logits, sampling_metadata"),
        ("vllm-v2", "logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting"),
    ],
)
def test_a_drafter_that_is_called_by_order_must_take_so_many(signature: str, wanted: str) -> None:
    with pytest.raises(TypeError, match=f"audit: a {signature} drafter must take {wanted}, by their order: too many"):
        audit(VERIFIERS[signature], signature, draft=lambda logits: logits.argmax(-1), **ONE)


def tree(target_probs: Tensor, draft_tokens: Tensor, parents: list[int], uniform_samples: Tensor) -> Tensor:
    raise AssertionError("it is not called")


def draft(draft_probs: Tensor) -> Tensor:
    raise AssertionError("it is not called")


@pytest.mark.parametrize("signature", ["sglang", "plain"])
def test_a_drafter_beside_a_verifier_of_trees_is_refused(signature: str) -> None:
    verify = planted.sglang_tree(updated=True) if signature == "sglang" else tree
    with pytest.raises(ValueError, match="^audit: draft must be None with a verifier of trees, .*, got one$"):
        audit(verify, signature, draft=draft)


def test_a_drafter_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="^audit: draft must be None without steps, .*, got one$"):
        audit(VERIFIERS["plain"], draft=draft, steps=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--signature", "sglang"], "--drafter must be left out with --signature sglang"),
        (["--no-steps"], "--drafter must be left out with --no-steps"),
        ([], "audit: draft must be None with a verifier of trees"),
    ],
)
def test_the_command_refuses_a_drafter_that_nothing_would_call(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "python_tests.audit.test_drafters"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["audit", f"{name}:tree", "--drafter", f"{name}:draft", *arguments])
    assert message in capsys.readouterr().err


def test_a_drafter_without_a_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["audit", "python_tests.audit.planted:one_seed", "--drafter", "", "--cases", "two ids"])
    assert "is named module:function" in capsys.readouterr().err


@pytest.mark.parametrize("compiled", [max, torch.multinomial], ids=["max", "torch.multinomial"])
def test_compiled_code_that_is_called_by_names_must_be_wrapped(compiled: Callable[..., Any]) -> None:
    said = "must have a Python signature: wrap it in a def, got <built-in"
    with pytest.raises(TypeError, match=f"^audit: a plain verifier {said}"):
        audit(compiled, **ONE)
    for signature in BY_NAMES:
        with pytest.raises(TypeError, match=f"^audit: a {signature} drafter {said}"):
            audit(VERIFIERS[signature], signature, draft=compiled, **ONE)


def test_a_drafter_that_draws_a_drafts_tokens_by_one_number() -> None:
    """Each is drawn from its distribution, but not independently: no fault of the verifier's numbers."""

    def draw(draft_probs: Tensor, seeds: Tensor) -> Tensor:
        uniforms = sk.uniform_samples(seeds, torch.zeros_like(seeds), 1, "draft")[:, 0]
        return planted.inverse(draft_probs.double(), uniforms)

    report = audit(planted.keyed("draft")[0], draft=draw, cases=["cannot be"])
    assert [finding.name for finding in report.findings] == ["other-draft"], report


class Compiled:
    """A callable that Python knows no signature of, as of pybind11's functions."""

    __signature__ = "none"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)


def test_compiled_code_that_is_called_by_order_is_taken_as_it_is() -> None:
    """Of vllm-v1 as one that takes logits."""
    verify, drafter = Compiled(VERIFIERS["vllm-v1"]), Compiled(planted.vllm_v1_draft(apart=True))
    assert audit(verify, "vllm-v1", draft=drafter, **ONE).lossless
    assert audit(Compiled(VERIFIERS["flashinfer"]), "flashinfer", **ONE).lossless
