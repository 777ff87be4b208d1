"""Verifiers that are right in most calls: wrong for one sequence, for some lengths or parameters, in a sliver of a
uniform's range, or for seeded requests. And right ones in uncommon clothes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.audit import planted
from specdec_kernels.audit import audit
from specdec_kernels.audit.cases import chains
from specdec_kernels.audit.own import check


def right(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
    rows, u = (target_probs.double(), draft_probs.double()), uniform_samples.double()
    return planted.chain(*rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))


# --- batches ----------------------------------------------------------------------------------------------------------


def ragged(spoil: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A right plain verifier of drafts of any lengths, but that `spoil` is given its tokens ``[batch, num_draft + 1]``,
    these lengths and the uniforms.
    """

    def verify(
        target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor,
        num_draft_tokens: Tensor,
    ) -> Tensor:  # fmt: skip
        rows, u = (target_probs.double(), draft_probs.double()), uniform_samples.double()
        out = planted.chain(*rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]), num_draft_tokens)
        return spoil(out, num_draft_tokens, u)

    return verify


def by_parameters(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[..., Tensor]:
    """A plain verifier with other parameters of the target, and drafts taken at their word."""

    def verify(
        target_logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor, temperature: Tensor,
        top_k: Tensor, top_p: Tensor, num_draft_tokens: Tensor,
    ) -> Tensor:  # fmt: skip
        p = planted.law(target_logits, **change({"temperature": temperature, "top_k": top_k, "top_p": top_p}))
        u = uniform_samples.double()
        return planted.chain(
            p, draft_probs.double(), draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]), num_draft_tokens
        )

    return verify


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("row", [0, -1], ids=["the first", "the last"])
@pytest.mark.parametrize("names", [("top_k", "top_p"), ("temperature",)], ids="-".join)
def test_one_sequences_parameters_for_all(names: tuple[str, ...], row: int) -> None:
    verify = by_parameters(
        lambda given: given | {name: given[name][row].expand_as(given[name]).contiguous() for name in names}
    )
    report = audit(verify, cases=["beside", "eight ids"], steps=False)
    wrong = {each.case for each in report.rows if not each.lossless}
    assert wrong and all("beside" in name for name in wrong), report
    assert audit(by_parameters(lambda given: given), cases=["beside"], steps=False).lossless


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p"])
def test_the_largest_parameter_for_all(name: str) -> None:
    """Which is the own one of each sequence that the others' is smaller than."""

    def largest(given: dict[str, Tensor]) -> dict[str, Tensor]:
        one = given[name]
        return given | {name: torch.where(given["temperature"] == 0, one, one.max())}

    report = audit(by_parameters(largest), cases=["beside", "temperature 0.6", "top-k 2"], steps=False)
    wrong = {each.case for each in report.rows if not each.lossless}
    assert wrong and all("beside" in case for case in wrong), report


def test_wrong_where_nothing_is_drafted() -> None:
    def spoil(tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
        tokens[lengths == 0, 0] = 0
        return tokens

    report = audit(ragged(spoil), cases=["beside", "eight ids"], steps=False)
    assert [row.case for row in report.rows if not row.lossless] == ["no draft, beside one"], report
    assert "on its draft being shorter than theirs" in report.findings[0].words


def test_wrong_for_shorter_drafts() -> None:
    """Than the batch's longest."""

    def spoil(tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
        short = lengths < tokens.shape[1] - 1
        tokens[short] = -1
        tokens[short, 0] = 0
        return tokens

    report = audit(ragged(spoil), cases=["beside", "two drafted"], steps=False)
    wrong = [row.case for row in report.rows if not row.lossless]
    assert wrong == ["beside a longer draft", "no draft, beside one"], report


def test_the_packages_own_are_asked_for_shorter_drafts_too() -> None:
    def spoilt(*args: Any, **how: Any) -> Any:
        out = sk.verify_chain(*args, **how)
        lengths = how.get("num_draft_tokens")
        if lengths is not None:
            out.tokens[lengths < out.tokens.shape[1] - 1, -1] = 0  # behind the end
        return out

    made = check(
        {"verify_chain": spoilt, "verify_tree": sk.verify_tree}, {"verify_chain": ["cpu"], "verify_tree": []}, "cpu"
    )
    found = [row for row in made if row.op == "verify_chain"]
    assert found and not any(row.exact for row in found) and "more tokens than a step can give" in found[0].case


def test_a_sequence_alone() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        out = right(target_probs, draft_tokens, draft_probs, uniform_samples)
        if len(draft_tokens) == 1:
            out[0, :-1] = draft_tokens[0]
            out[0, -1] = 0
        return out

    report = audit(verify, cases=["two ids, the likelier"], steps=False)
    assert not report.lossless and "a sequence alone comes out otherwise than in a batch" in str(report), report


def test_a_sequence_alone_may_have_its_numbers_in_another_order() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        batch, k = draft_tokens.shape
        if batch == 1:
            final = torch.rand(batch)
            coins = torch.rand(batch, k)
        else:
            coins = torch.rand(batch, k)
            final = torch.rand(batch)
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(*rows, draft_tokens, coins.double(), lambda w: planted.inverse(w, final.double()))

    report = audit(verify, cases=["two ids, the likelier"], steps=False)
    assert report.lossless and report.rows[0].how == "exact", report


def test_a_known_defect_is_named_although_a_sequence_alone_has_its_numbers_in_another_order() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        batch, k = draft_tokens.shape
        u = torch.rand(batch, k + 1).double()
        u = u.flip(1) if batch == 1 else u
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(
            *rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]), residual=lambda p, q: p
        )

    report = audit(verify, cases=["two ids, the likelier", "eight ids"], steps=False)
    assert not report.lossless and report.findings[0].name not in ("failure", "unknown"), report


def test_a_sequence_alone_that_asks_for_other_numbers() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        if len(draft_tokens) == 1:
            race = torch.empty(target_probs.shape[-1]).exponential_()
            return torch.cat([draft_tokens, (target_probs[:, -1] / race).argmax(-1, keepdim=True)], 1)
        coins, final = torch.rand(draft_tokens.shape).double(), torch.rand(len(draft_tokens)).double()
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(*rows, draft_tokens, coins, lambda w: planted.inverse(w, final))

    report = audit(verify, cases=["two ids, the likelier"], steps=False)
    assert not report.lossless and "a sequence alone comes out otherwise than in a batch" in str(report), report


# --- parameters -------------------------------------------------------------------------------------------------------


def nucleus_before_temperature(given: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ones, none = torch.ones_like(temperature), torch.zeros_like(top_k)
    kept = planted.law(given, torch.where(temperature == 0, temperature, ones), none, top_p) > 0
    return planted.law(given.masked_fill(~kept, -torch.inf), temperature, top_k, torch.ones_like(top_p))


def nucleus_before_top_k(given: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    kept = planted.law(given, temperature, torch.zeros_like(top_k), top_p) > 0
    return planted.law(given.masked_fill(~kept, -torch.inf), temperature, top_k, torch.ones_like(top_p))


@pytest.mark.parametrize(
    ("law", "case"),
    [
        (nucleus_before_temperature, "top-p of what a temperature leaves"),
        (nucleus_before_top_k, "top-p of what top-k leaves"),
    ],
)
def test_cuts_in_another_order(law: Callable[..., Tensor], case: str) -> None:
    def verify(
        target_logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor, temperature: Tensor,
        top_k: Tensor, top_p: Tensor,
    ) -> Tensor:  # fmt: skip
        p, u = law(target_logits, temperature, top_k, top_p), uniform_samples.double()
        return planted.chain(p, draft_probs.double(), draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]))

    report = audit(verify, cases=[case, "temperature 0.6", "top-k 2", "top-p, draft"], steps=False)
    assert case in {row.case for row in report.rows if not row.lossless}, report


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_a_sliver_of_a_uniforms_range() -> None:
    """Too thin for the starting points, and too rare for samples: what random numbers hit is followed up."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        out = right(target_probs, draft_tokens, draft_probs, uniform_samples)
        hit = (uniform_samples[:, 1] >= 0.26) & (uniform_samples[:, 1] < 0.265)
        out[hit] = torch.tensor([1, -1])
        return out

    report = audit(verify, cases=["two ids, the likelier"], steps=False)
    (row,) = (row for row in report.rows if row.joint is not None)
    assert row.how == "exact" and not row.lossless, report
    assert row.distance == pytest.approx(0.005, rel=1e-3)


def test_an_error_that_is_too_small_to_tell_its_cause_by() -> None:
    """Tokens that cannot be are emitted at times, and the distribution is right but for them."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        rows, u = (target_probs.double(), draft_probs.double()), uniform_samples.double()
        return planted.chain(
            *rows, draft_tokens, u[:, 1:], lambda w: planted.inverse(w, u[:, 0]), test=lambda p, q, v: v * q < p + 1e-6
        )

    report = audit(verify, cases=["two ids", "zeros in"], steps=False)
    assert not report.lossless and [finding.name for finding in report.findings] == ["failure"], report
    assert "emits what the target cannot give" in report.findings[0].words


def test_wrong_in_every_batch_is_not_wrong_beside_others() -> None:
    def spoil(tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Tensor:
        return torch.where((uniforms[:, :1] > 0.9) & (tokens == 1), 0, tokens)

    report = audit(ragged(spoil), cases=["beside a"], steps=False)
    assert [finding.name for finding in report.findings] == ["unknown"], report


def test_seeded_requests_are_asked_for_without_a_drafter_too() -> None:
    own = planted.vllm_v1_of()

    def verify(*args: Any) -> Tensor:
        ids, lengths, width, *_, metadata = args
        out = own(*args)
        if metadata.generators:
            out[:, :-1] = planted.padded(ids.long(), torch.tensor(lengths), width, -1)
        return out

    report = audit(verify, "vllm-v1", cases=["two ids"])
    assert [loop.lossless for loop in report.loops] == [True, False], report
    assert [loop.name.endswith("seeded requests") for loop in report.loops] == [False, True]


# --- right ones -------------------------------------------------------------------------------------------------------


def test_a_buffer_that_is_used_again_is_no_defect() -> None:
    buffer = torch.empty(700, 9, dtype=torch.int64)

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        assert len(draft_tokens) <= 700
        out = right(target_probs, draft_tokens, draft_probs, uniform_samples)
        buffer[: len(out), : out.shape[1]] = out
        return buffer[: len(out), : out.shape[1]]

    assert audit(verify, cases=["two ids"], samples=5000).lossless


def test_numbers_of_the_rejected_alone_are_given_where_a_call_has_one_row() -> None:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        coins = torch.rand(draft_tokens.shape).double()

        def final(weights: Tensor) -> Tensor:
            out = planted.inverse(weights, torch.rand(len(weights)).double())
            rejected = (weights == 0).any(-1)  # of the residual nothing is on the token
            out[rejected] = planted.inverse(weights[rejected], torch.rand(int(rejected.sum())).double())
            return out

        return planted.chain(target_probs.double(), draft_probs.double(), draft_tokens, coins, final)

    report = audit(verify, cases=["greedy draft"], steps=False)
    assert [row.how for row in report.rows] == ["exact"] and report.lossless, report


def test_a_race_that_is_kept_from_0() -> None:
    """Which moves its chances by much less than the tolerance."""

    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
        race, coins = torch.empty_like(target_probs[:, 0]).exponential_(), torch.rand(draft_tokens.shape).double()
        race += torch.finfo(torch.float32).eps
        rows = target_probs.double(), draft_probs.double()
        return planted.chain(*rows, draft_tokens, coins, lambda w: (w / race).argmax(-1))

    report = audit(verify, cases=["zeros in the target", "three ids, two"], steps=False)
    assert report.lossless and {row.how for row in report.rows} == {"exact"}, report


def test_an_answer_may_be_a_list_of_tensors() -> None:
    def verify(
        target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor
    ) -> list[Tensor]:
        return [right(target_probs, draft_tokens, draft_probs, uniform_samples), draft_tokens[:, 0]]

    assert audit(verify, cases=["two ids"], steps=False).lossless


def test_an_answer_may_be_a_list_of_numbers() -> None:
    def draft(draft_probs: Tensor) -> list[Tensor]:
        return list(draft_probs.multinomial(1)[:, 0])

    assert audit(planted.blocks(stale=False), draft=draft, cases=["two ids, the likelier"], samples=2000).lossless


@pytest.mark.parametrize("law", [nucleus_before_temperature, nucleus_before_top_k])
def test_a_case_tells_orders_of_cuts_apart(law: Callable[..., Tensor]) -> None:
    """And several ids are left in it."""
    found = []
    for case in chains():
        if case.name.startswith("top-p of what"):
            of = case.problem.params
            given = case.problem.target[0][None], *(torch.tensor([n]) for n in (of.temperature, of.top_k, of.top_p))
            own = planted.law(*given)
            found.append(float((law(*given) - own).abs().sum()) / 2)
            assert int((own > 0).sum()) > 1
    assert len(found) == 2 and max(found) > 0.1
