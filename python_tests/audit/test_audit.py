"""The audit finds each planted defect and its cause, and has nothing to say of right verifiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.audit import planted
from python_tests.support import in_fresh_process
from specdec_kernels import cli
from specdec_kernels.audit import Report, audit
from specdec_kernels.integrations import flashinfer, sglang
from specdec_kernels.integrations.transformers import speculative_sampling
from specdec_kernels.integrations.vllm import v1, v2

FEW = ["cannot be", "two ids, the likelier", "zeros in", "draft hotter", "three ids"]
"""Cases for verifiers that take one sequence a call, which take their time."""
ONE_BY_ONE = {"cases": FEW, "steps": False}
TREES = {"cases": ["two siblings", "two depths"]}


def with_drafter(pair: tuple[Callable[..., Any], Callable[..., Any]]) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    return pair[0], "plain", {"draft": pair[1]}


def of_v2(made: Any) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    return made.rejection_sample, "vllm-v2", {"draft": made.gumbel_sample}


# --- right ones -------------------------------------------------------------------------------------------------------


def own_chain(acceptance: str) -> Callable[..., Tensor]:
    def verify(
        target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None = None, *, uniform_samples: Tensor,
        temperature: Tensor, top_k: Tensor, top_p: Tensor, draft_temperature: Tensor, draft_top_k: Tensor,
        draft_top_p: Tensor, num_draft_tokens: Tensor,
    ) -> Tensor:  # fmt: skip
        return sk.verify_chain(
            target_logits, draft_tokens, draft_logits, uniform_samples=uniform_samples, acceptance=acceptance,
            params=sk.SamplingParams(temperature, top_k, top_p), num_draft_tokens=num_draft_tokens,
            draft_params=sk.SamplingParams(draft_temperature, draft_top_k, draft_top_p),
        ).tokens  # fmt: skip

    return verify


def own_tree(acceptance: str) -> Callable[..., Tensor]:
    def verify(
        target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, parents: list[int], uniform_samples: Tensor
    ) -> Tensor:
        tree = sk.DraftTree.from_parents(parents)
        return sk.verify_tree(
            target_probs.log(), tree, draft_tokens, draft_probs.log(), uniform_samples=uniform_samples,
            acceptance=acceptance,
        ).tokens  # fmt: skip

    return verify


def exactly_k(
    target_logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor,
) -> Tensor:  # fmt: skip
    """Ties at the border of top-k are cut by id, the highest last, as peers do that sort."""
    order = target_logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    cut = (order >= top_k[:, None, None]) & (top_k > 0)[:, None, None]
    p = planted.law(target_logits.masked_fill(cut, -torch.inf), temperature, top_k * 0, top_p)
    u = uniform_samples.double()
    return planted.chain(p, draft_probs.double(), draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))


RIGHT: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "verify_chain, token": (own_chain("token"), "plain", {}),
    "verify_chain, block": (own_chain("block"), "plain", {}),
    "verify_tree, recursive": (own_tree("recursive"), "plain", {}),
    "verify_tree, traversal": (own_tree("traversal"), "plain", {}),
    "integrations.flashinfer": (flashinfer.chain_speculative_sampling, "flashinfer", {}),
    "integrations.sglang, trees": (sglang.tree_speculative_sampling_target_only, "sglang", {}),
    "integrations.sglang, chains": (sglang.chain_speculative_sampling_triton, "sglang-chain", {}),
    "integrations.transformers": (speculative_sampling, "transformers", ONE_BY_ONE),
    "integrations.vllm, V1": (v1.make_rejection_sample(lambda: None), "vllm-v1", {}),
    "integrations.vllm, V2": (v2.make_rejection_sample(lambda: None), "vllm-v2", {}),
    "plain": (planted.plain_of(), "plain", {}),
    "exactly k of ties": (exactly_k, "plain", {}),
    "plain, block": (planted.blocks(stale=False), "plain", {}),
    "plain, siblings": (planted.siblings(), "plain", TREES),
    "keyed": with_drafter(planted.keyed("draft")),
    "keyed, block, fresh at each step": with_drafter(planted.keyed("draft", per_step=True, block=True)),
    "transformers": (planted.transformers_of(), "transformers", ONE_BY_ONE),
    "flashinfer": (planted.flashinfer_of(), "flashinfer", {}),
    "vllm-v1": (planted.vllm_v1_of(), "vllm-v1", {"draft": planted.vllm_v1_draft(apart=True)}),
    "vllm-v2": of_v2(planted.vllm_v2_of("draft")),
    "vllm-v2, block": of_v2(planted.vllm_v2_of("draft", block=True)),
    "sglang": (planted.sglang_tree(updated=True), "sglang", {}),
    "sglang-chain": (planted.sglang_chain(), "sglang-chain", {}),
    "sglang-chain, block": (planted.sglang_chain(block=True), "sglang-chain", {}),
}


def short_or_long(names: Iterable[str], kept: str) -> list[Any]:
    """Verifiers of one sequence a call and loops keyed by seeds take seconds: of them `make test` has the one named."""
    slow = [name for name in names if "transformers" in name or "V2" in name or "vllm-v2" in name]
    assert kept in slow
    return [pytest.param(name, marks=pytest.mark.long if name in slow and name != kept else ()) for name in names]


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("name", short_or_long(RIGHT, "integrations.transformers"))
def test_a_right_verifier_is_found_lossless(name: str) -> None:
    verify, signature, options = RIGHT[name]
    report = audit(verify, signature, **options)
    assert report.lossless and not report.findings and report.counterexample is None, report
    ran = [row for row in report.rows if row.joint is not None]
    of = "" if len(ran) == len(report.rows) else f", in the {len(ran)} of {len(report.rows)} cases that it serves"
    assert str(report).endswith(f"Lossless: yes{of}.")
    assert len(ran) >= 0.8 * len(report.rows)
    # only what is made of seeds cannot be known exactly
    assert all((row.how == "exact") == ("seeds" not in name and "keyed" not in name and signature != "vllm-v2")
               for row in ran)  # fmt: skip


# --- defects ----------------------------------------------------------------------------------------------------------


def at_the_targets_temperature(target: dict[str, Tensor], draft: dict[str, Tensor]) -> dict[str, Tensor]:
    return draft | {"temperature": target["temperature"]}


def cut_by_the_targets_top_p(target: dict[str, Tensor], draft: dict[str, Tensor]) -> dict[str, Tensor]:
    return draft | {"top_p": target["top_p"]}


def the_target(p: Tensor, q: Tensor) -> Tensor:
    return p


WRONG: dict[str, tuple[Callable[..., Any], str, dict[str, Any], str]] = {
    "q at another temperature, plain": (planted.plain_of(at_the_targets_temperature), "plain", {}, "draft-temperature"),
    "q at another temperature, transformers":
        (planted.transformers_of(warm=0.7), "transformers", ONE_BY_ONE, "draft-temperature"),
    "top-p after the draft was drawn without it":
        (planted.plain_of(cut_by_the_targets_top_p), "plain", {}, "draft-truncation"),
    "<=, plain": (planted.plain_of(test=planted.or_equal), "plain", {}, "zero-accepted"),
    "<=, flashinfer": (planted.flashinfer_of(test=planted.or_equal), "flashinfer", {}, "zero-accepted"),
    "<=, vllm-v1": (planted.vllm_v1_of(test=planted.or_equal), "vllm-v1", {}, "zero-accepted"),
    "<=, transformers": (planted.transformers_of(test=planted.or_equal), "transformers", ONE_BY_ONE, "zero-accepted"),
    "a stale block weight, plain": (planted.blocks(stale=True), "plain", {}, "block-weight"),
    "a stale block weight, sglang-chain":
        (planted.sglang_chain(block=True, stale=True), "sglang-chain", {}, "block-weight"),
    "everything accepted, plain": (planted.plain_of(test=planted.always), "plain", {}, "everything-accepted"),
    "everything accepted, transformers":
        (planted.transformers_of(test=planted.always), "transformers", ONE_BY_ONE, "everything-accepted"),
    "everything accepted, vllm-v1": (planted.vllm_v1_of(test=planted.always), "vllm-v1", {}, "everything-accepted"),
    "everything accepted, vllm-v2":
        (planted.vllm_v2_of("draft", test=planted.always).rejection_sample, "vllm-v2", {}, "everything-accepted"),
    "everything accepted, flashinfer":
        (planted.flashinfer_of(test=planted.always), "flashinfer", {}, "everything-accepted"),
    "recovered tokens from the target": (planted.flashinfer_of(residual=the_target), "flashinfer", {}, "residual"),
    "recovered tokens from the target, by races":
        (planted.vllm_v1_of(residual=the_target), "vllm-v1", {}, "residual"),
    "draft and verify share noise, plain": (*with_drafter(planted.keyed("accept")), "shared-noise"),
    "draft and verify share noise, vllm-v1":
        (planted.vllm_v1_of(), "vllm-v1", {"draft": planted.vllm_v1_draft(apart=False)}, "shared-noise"),
    "draft and verify share noise, vllm-v2": (*of_v2(planted.vllm_v2_of("accept")), "shared-noise"),
    "block verification takes noise again, plain":
        (*with_drafter(planted.keyed("draft", block=True)), "noise-again"),
    "block verification takes noise again, vllm-v2":
        (*of_v2(planted.vllm_v2_of("draft", per_step=False, block=True)), "noise-again"),
    "siblings without updating, sglang": (planted.sglang_tree(updated=False), "sglang", {}, "siblings"),
    "siblings without updating, plain": (planted.siblings("both"), "plain", TREES, "siblings"),
    "siblings without updating the draft": (planted.siblings("draft"), "plain", TREES, "siblings"),
    "the parameters of the batch's first": (planted.first_ones_parameters, "plain", {}, "neighbours"),
    "one seed for every call": (planted.one_seed, "plain", {}, "constant-noise"),
    "one seed for every coin": (planted.seed_in_the_loop, "plain", {}, "shared-coin"),
}  # fmt: skip


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("name", short_or_long(WRONG, "everything accepted, transformers"))
def test_a_defect_is_found_and_named(name: str) -> None:
    verify, signature, options, cause = WRONG[name]
    report = audit(verify, signature, **options)
    assert not report.lossless
    assert [finding.name for finding in report.findings] == [cause], report
    assert report.findings[0].words in str(report)
    if name == "q at another temperature, transformers":
        assert "q at 0.70 times the temperature" in str(report)


def test_the_distance_and_the_counterexample_are_exact() -> None:
    """Everything accepted: of target (0.3, 0.7) and draft (0.6, 0.4) the first token is 0.3 off, as the joint is."""
    report = audit(planted.flashinfer_of(test=planted.always), "flashinfer", cases=["two ids"], steps=False)
    row = report.smallest
    assert row is not None and (row.case, row.vocab, row.drafted) == ("two ids", 2, 1)
    assert abs(row.distance - 0.3) < 1e-6
    told = report.counterexample
    assert told is not None and "target of the first token  (0.3, 0.7)" in told
    assert "tokens beginning with [0] come with probability 0.600000, not 0.300000" in told


@pytest.mark.long
def test_a_defect_that_is_in_no_list_is_not_given_a_name() -> None:
    def sometimes_0(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        u = uniform_samples.double()
        out = planted.chain(
            target_probs.double(), draft_probs.double(), draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0])
        )
        return torch.where((u[:, :1] > 0.9) & (out == 1), 0, out)

    report = audit(sometimes_0)
    assert not report.lossless and [finding.name for finding in report.findings] == ["unknown"]
    assert "No known cause explains every case" in str(report)


@pytest.mark.long
def test_a_drafter_that_draws_from_another_distribution_is_named() -> None:
    def draft(draft_probs: Tensor) -> Tensor:
        return (draft_probs**2).multinomial(1)[:, 0]

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        coins = torch.rand(draft_tokens.shape).double()
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(*rows, draft_tokens, coins, lambda w: w.multinomial(1)[:, 0])

    assert audit(verify).lossless
    assert [finding.name for finding in audit(verify, draft=draft).findings] == ["other-draft"]


def test_what_goes_wrong_is_told_and_not_raised() -> None:
    def no_residual(p: Tensor, q: Tensor) -> Tensor:
        return (p - q).clamp_min(0) * (0 if p.shape[-1] == 8 else 1)

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        coins = torch.rand(draft_tokens.shape).double()
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(*rows, draft_tokens, coins, lambda w: w.multinomial(1)[:, 0], residual=no_residual)

    report = audit(verify, cases=["two ids", "eight ids"], steps=False)
    assert not report.lossless and [finding.name for finding in report.findings] == ["failure"]
    assert "it raises RuntimeError: probability tensor" in str(report)

    def outside(target_probs: Tensor, draft_tokens: Tensor) -> Tensor:
        return torch.full_like(draft_tokens, target_probs.shape[-1])

    assert "an id outside the vocabulary" in str(audit(outside, cases=["two ids"], steps=False))


def race(weights: Tensor) -> Tensor:
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def test_numbers_that_are_asked_for_as_they_are_needed() -> None:
    """Which number is a coin and which a race depends on what was accepted."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, num_draft_tokens: Tensor) -> Tensor:
        out = torch.full(target_probs.shape[:2], -1)
        for b, length in enumerate(num_draft_tokens.tolist()):
            for i, x in enumerate(draft_tokens[b, :length].tolist()):
                p, q = target_probs[b, i], draft_probs[b, i]
                if torch.rand((), dtype=torch.float64) * q[x] >= p[x]:
                    out[b, i] = race((p - q).clamp_min(0))
                    break
                out[b, i] = x
            else:
                out[b, length] = race(target_probs[b, length])
        return out

    report = audit(verify, cases=["two ids", "one-hot drafts, two drafted"], steps=False, samples=2000)
    assert report.lossless, report


@pytest.mark.long
def test_a_race_of_uniforms_is_sampled() -> None:
    """Its outcome is constant in no boxes, however small."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        def gumbel(weights: Tensor) -> Tensor:
            return (weights.log() - torch.log(-torch.log(torch.rand(weights.shape).double()))).argmax(-1)

        coins = torch.rand(draft_tokens.shape).double()
        return planted.chain(target_probs.double(), draft_probs.double(), draft_tokens, coins, gumbel)

    report = audit(verify, cases=["two ids, the likelier"], steps=False)
    assert report.lossless and [row.how for row in report.rows if row.joint] == ["60000 samples"], report


def test_a_largest_batch_is_no_defect() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        assert len(draft_tokens) <= 700
        return right(target_probs, draft_tokens, draft_probs, uniform_samples)

    def always(target_probs: Tensor, draft_tokens: Tensor) -> Tensor:
        raise ValueError("never")

    report = audit(verify, cases=["two ids"], samples=5000)
    assert report.lossless and len(report.loops) == 1, report
    report = audit(always, cases=["two ids"], samples=5000)
    assert [loop.failure for loop in report.loops] == ["it raises ValueError: never"] and "p = " not in str(report)


def test_a_final_token_that_cannot_be_is_no_accepted_one() -> None:
    """One that is accepted at u = 0 has a cause of its own."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        u = uniform_samples.double()

        def from_the_first(weights: Tensor) -> Tensor:
            ends = weights.cumsum(-1)
            return (ends < u[:, :1] * ends[:, -1:]).sum(-1)

        rows = target_probs.double(), draft_probs.double()
        right_ones = planted.chain(*rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))
        drawn = planted.chain(*rows, draft_tokens, u[:, 1:], from_the_first)
        return torch.where((right_ones >= 0).all(1, keepdim=True), drawn, right_ones)  # the bonus alone

    report = audit(verify, steps=False)
    assert [finding.name for finding in report.findings] == ["draw-at-an-end"], report


def right(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
    rows, u = (target_probs.double(), draft_probs.double()), uniform_samples.double()
    return planted.chain(*rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))


def test_more_or_fewer_tokens_than_a_step_has_are_seen() -> None:
    def longer(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        out = right(target_probs, draft_tokens, draft_probs, uniform_samples)
        return torch.cat([out, torch.zeros_like(out[:, :1])], 1)

    def one_row(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        return right(target_probs, draft_tokens, draft_probs, uniform_samples)[:1]

    assert "more tokens than a step can" in str(audit(longer, cases=["two ids"], steps=False))
    assert "it gives 1 rows of tokens for " in str(audit(one_row, cases=["two ids"], steps=False))
    assert audit(right, cases=["two ids"], steps=False).lossless


def test_what_is_wrong_at_an_end_does_not_hide_what_is_wrong_everywhere() -> None:
    """Where a coin is 0 a token of probability 0 is accepted; and rejected ones are replaced by draws from P."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        rows, u = (target_probs.double(), draft_probs.double()), uniform_samples.double()
        draw = lambda w: planted.inverse(w, u[:, 0])  # noqa: E731
        return planted.chain(*rows, draft_tokens, u[:, 1:], draw, test=planted.or_equal, residual=lambda p, q: p)

    report = audit(verify, cases=["zeros in the target"], steps=False)
    assert "at an end of a uniform" in str(report) and "another distribution" in str(report)
    assert len(report.findings) == 2, report


@pytest.mark.long
def test_random_numbers_of_a_kernel_are_sampled() -> None:
    """Numbers that torch does not make: the distribution is tested, not extracted."""
    import numpy as np

    rng = np.random.default_rng(0)

    def of(test: planted.Test) -> Callable[..., Tensor]:
        def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
            u = torch.from_numpy(rng.random((len(draft_tokens), draft_tokens.shape[1] + 1)))
            rows = target_probs.double(), draft_probs.double()
            return planted.chain(*rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]), test=test)

        return verify

    report = audit(of(planted.strictly), cases=FEW)
    assert report.lossless and {row.how for row in report.rows} == {"60000 samples"}
    report = audit(of(planted.always), cases=FEW)
    assert [finding.name for finding in report.findings] == ["everything-accepted"]


def test_a_case_that_raises_hides_no_cause_of_the_others() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        if bool((draft_probs == 0).any()):
            raise RuntimeError("a zero")
        u = uniform_samples.double()
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(*rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]), test=planted.always)

    report = audit(verify, cases=["two ids", "zeros in the draft"], steps=False)
    failure, cause = report.findings
    assert [failure.name, cause.name] == ["failure", "everything-accepted"]
    assert failure.words.startswith("zeros in the draft: ") and "RuntimeError: a zero" in failure.words


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, right = "python_tests.audit.planted:first_ones_parameters", "python_tests.audit.planted:one_seed"
    assert cli.main(["audit", wrong, "--cases", "beside", "eight ids", "--no-steps", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["lossless"] is False and [cause["name"] for cause in told["causes"]] == ["neighbours"]
    assert told["verifier"] == wrong and {case["how"] for case in told["cases"]} == {"exact"}
    assert cli.main(["audit", right, "--cases", "two ids", "--no-steps"]) == 0
    assert capsys.readouterr().out.endswith("Lossless: yes.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere:verify"], "No module named 'nowhere'"),
        (["..up:verify"], "TypeError: "),
        (["python_tests.audit.planted"], "a verifier is named module:function, got python_tests.audit.planted"),
        (["python_tests.audit.planted:law"], "a plain verifier must name arguments among"),
        (["python_tests.audit.planted:one_seed", "--cases", "of the moon"], "cases must be parts of names as"),
    ],
)
def test_a_wrong_command_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["audit", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("where", ["", "    "], ids=["when imported", "when called"])
def test_a_verifier_that_ends_the_process_is_no_verdict(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"leaves_{len(where)}"
    (tmp_path / f"{name}.py").write_text(
        f"import sys\ndef verify(target_logits, draft_tokens, uniform_samples):\n    pass\n{where}sys.exit(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["audit", f"{name}:verify", "--cases", "two ids", "--no-steps"])
    assert "SystemExit: 0" in capsys.readouterr().err


def test_what_the_audited_code_prints_is_beside_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talks.py").write_text(
        "from python_tests.audit.planted import one_seed\nprint('imported')\n"
        "def verify(target_logits, draft_tokens, draft_logits=None, **more):\n    print('called')\n"
        "    return 0 * target_logits[..., 0].long()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["audit", "talks:verify", "--cases", "two ids", "--no-steps", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verifier"] == "talks:verify" and printed.err.startswith("imported\ncalled\n")


def test_a_verifier_that_served_no_case_is_not_called_lossless() -> None:
    def never(target_logits: Tensor, draft_tokens: Tensor) -> Tensor:
        raise AssertionError("it is not called")

    report = audit(never, cases=["beside a shorter draft"], steps=False)
    assert not report.ran and not report.lossless and "Lossless: not known, as it served none of" in str(report)
    assert json.loads(report.json())["ran"] is False


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="audit: signature must be one of plain, transformers, .*, got 'vllm'"):
        audit(planted.one_seed, "vllm")
    with pytest.raises(TypeError, match="audit: verifier must be callable, got int"):
        audit(3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="audit: verifier must take and return what 'flashinfer' does, but in every case"
    ):
        audit(lambda: None, "flashinfer", cases=["two ids"], steps=False)
    with pytest.raises(TypeError, match="case it raises TypeError: tokens must be a tensor, got NoneType"):
        audit(lambda draft_tokens: None, cases=["two ids"], steps=False)


@pytest.mark.parametrize("form", [np.asarray, Tensor.tolist])
def test_tokens_may_come_as_an_array_or_a_list(form: Callable[[Tensor], Any]) -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Any:
        return form(planted.blocks(stale=False)(target_probs, draft_tokens, draft_probs, uniform_samples))

    assert audit(verify, cases=["two ids"], steps=False).lossless


@pytest.mark.long
def test_an_older_transformers_function_is_told_whether_the_draft_ended() -> None:
    def older(ids: Tensor, draft: Tensor, length: int, target: Tensor, is_done_candidate: bool) -> Any:
        assert is_done_candidate is False
        return speculative_sampling(ids, draft, length, target, is_done_candidate)

    assert audit(older, "transformers", cases=["two ids"], steps=False, samples=2000).lossless


def test_what_cannot_be_asked_is_said() -> None:
    def verify(target_logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        u = uniform_samples.double()
        p = target_logits.double().softmax(-1)
        return planted.chain(p, draft_probs.double(), draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))

    report: Report = audit(verify, steps=False)
    notes = {row.case: row.result for row in report.rows if row.joint is None}
    assert report.lossless and notes["top-k 2"] == "it takes target_logits and no top_k"
    assert f"Lossless: yes, in the {len(report.rows) - len(notes)} of {len(report.rows)} cases" in str(report)
    assert notes["beside a shorter draft"] == "drafts have one length"


def test_the_package_does_not_import_the_audit() -> None:
    code = "import sys, specdec_kernels; print(any('audit' in name or 'scipy' in name for name in sys.modules))"
    assert in_fresh_process(code).strip() == "False"


def test_logits_without_parameters_are_served_where_nothing_is_cut() -> None:
    """A draft that is hotter than the target is another case where the verifier is told no temperature at all."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_logits: Tensor, uniform_samples: Tensor) -> Tensor:
        u, q = uniform_samples.double(), draft_logits.double().softmax(-1)
        return planted.chain(target_probs.double(), q, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))

    report: Report = audit(verify, steps=False)
    notes = {row.case: row.result for row in report.rows}
    assert report.lossless and notes["temperature 0.6"] == "it takes draft_logits and no draft_temperature"


def test_loops_alone_serve_no_case() -> None:
    def verify(target_logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        u, p = uniform_samples.double(), target_logits.double().softmax(-1)
        return planted.chain(p, draft_probs.double(), draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))

    report: Report = audit(verify, cases=["temperature 0.6"])
    assert not report.ran and not report.lossless


def test_how_a_verifier_takes_its_arguments() -> None:
    """By names: one that names none of them would be called with nothing."""

    def by_place(target_probs: Tensor, draft_tokens: Tensor, /) -> Tensor:
        return draft_tokens

    for wrong in (by_place, lambda *given: given[0], lambda **given: given["draft_tokens"], lambda: None):
        with pytest.raises(TypeError, match="a plain verifier must name arguments among"):
            audit(wrong, steps=False)


def test_generators_are_none_of_a_plain_verifier_s_arguments() -> None:
    """They would always be None."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, generators: Any) -> Tensor:
        return draft_tokens

    def draft(draft_probs: Tensor, generators: Any) -> Tensor:
        return draft_probs.argmax(-1)

    with pytest.raises(TypeError, match="audit: a plain verifier must name arguments among .*, got generators$"):
        audit(verify, cases=["two ids, the likelier"], steps=False, samples=100)
    with pytest.raises(TypeError, match="audit: a plain drafter must name arguments among .*, got generators$"):
        audit(own_chain("token"), draft=draft, cases=["two ids, the likelier"], samples=100)
