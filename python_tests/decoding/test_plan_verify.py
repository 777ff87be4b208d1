"""The batch's best numbers of draft tokens, against all there are; and that they may not look at the tested tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import check_law, problem
from specdec_kernels.analysis import expected_tokens_by_position


def rate(acceptance: Tensor, seconds: Tensor, counts: tuple[int, ...]) -> float:
    """Expected tokens a second with these numbers of draft tokens."""
    tokens = sum(float(expected_tokens_by_position(a[:k])) for a, k in zip(acceptance.tolist(), counts, strict=True))
    return tokens / float(seconds[sum(counts)])


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_better(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    batch, num_draft = ((3, 3), (2, 5), (4, 2), (1, 6))[seed % 4]
    acceptance = torch.rand(batch, num_draft, generator=random).round(decimals=1)  # with ties, zeros and ones
    seconds = 1 + (torch.rand(batch * num_draft + 1, generator=random) * (0.1, 0.5, 2.0)[seed % 3]).cumsum(0)
    planned = sk.plan_verify(acceptance, seconds)
    assert planned.dtype == torch.int64 and planned.shape == (batch,)
    choices = itertools.product(range(num_draft + 1), repeat=batch)
    best = max(rate(acceptance, seconds, counts) for counts in choices)
    assert rate(acceptance, seconds, tuple(planned.tolist())) == pytest.approx(best, rel=1e-6)


def test_rows_go_to_the_likeliest() -> None:
    acceptance = torch.tensor([[0.9, 0.9, 0.9], [0.2, 0.9, 0.9], [0.0, 1.0, 1.0], [torch.nan, 1.0, 1.0]])
    free, dear = torch.ones(13), torch.full((13,), 9.0)
    dear[:4] = 1.0
    assert sk.plan_verify(acceptance, free).tolist()[:2] == [3, 3]
    assert sk.plan_verify(acceptance, dear).tolist() == [3, 0, 0, 0]
    assert sk.plan_verify(torch.full((2, 3), 0.5), torch.arange(1.0, 8.0)).tolist() == [0, 0]


def test_a_time_that_is_no_number_is_not_chosen() -> None:
    seconds = torch.tensor([1.0, torch.nan, 1.2])
    assert sk.plan_verify(torch.tensor([[0.9, 0.9]]), seconds).tolist() == [2]
    assert sk.plan_verify(torch.tensor([[0.1, 0.1]]), seconds).tolist() == [0]


def test_a_row_that_yields_nothing_is_not_chosen() -> None:
    """Be it of a sequence without a draft, or behind a token that is never accepted; measured times may fall."""
    falling = torch.tensor([1.0, 1.1, 1.05])
    assert sk.plan_verify(torch.tensor([[0.5], [0.0]]), falling).tolist() == [1, 0]
    assert sk.plan_verify(torch.tensor([[0.0, 1.0]]), falling).tolist() == [0]
    assert sk.plan_verify(torch.tensor([[0.5], [torch.nan]]), torch.tensor([1.0, 5.0, 1.0])).tolist() == [0, 0]
    assert sk.plan_verify(torch.zeros(2, 2), torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6])).tolist() == [0, 0]


def test_nothing_to_choose_from() -> None:
    assert sk.plan_verify(torch.zeros(3, 0), torch.ones(1)).tolist() == [0, 0, 0]


def test_it_runs_without_a_look_at_values() -> None:
    """On tensors without data, as under graph capture: nothing is fetched from the device."""
    planned = sk.plan_verify(torch.empty(4, 3, device="meta"), torch.empty(13, device="meta"))
    assert planned.shape == (4,) and planned.device.type == "meta"


@pytest.mark.parametrize(
    ("acceptance", "seconds", "error", "message"),
    [
        (torch.zeros(2), torch.ones(3), ValueError, "acceptances must be \\[batch, num_draft\\], got \\[2\\]"),
        (torch.zeros(2, 3).double(), torch.ones(7), TypeError, "acceptances must be float32, got float64"),
        ([[0.5]], torch.ones(2), TypeError, "acceptances must be a tensor, got list"),
        (torch.zeros(2, 3), torch.ones(6), ValueError, r"step_seconds must be \[batch .* \+ 1=7\], got \[6\]"),
        (torch.zeros(2, 3), torch.ones(7).long(), TypeError, "step_seconds must be float32, got int64"),
    ],
)  # fmt: skip
def test_what_is_refused(acceptance: Any, seconds: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^plan_verify: {message}"):
        sk.plan_verify(acceptance, seconds)


# --- the distribution -------------------------------------------------------------------------------------------------

KNOWN = torch.tensor([[0.9, 0.8], [0.6, 0.5], [0.2, 0.9]])
"""What is known of three sequences before their drafts are drawn."""
SECONDS = 1 + 0.12 * torch.arange(7.0)

Estimate = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def of_the_sequence(target: Tensor, draft: Tensor, tokens: Tensor, sequence: int) -> Tensor:
    """What may be known before the draft is drawn."""
    return KNOWN[sequence].expand(tokens.shape)


def of_the_tokens(target: Tensor, draft: Tensor, tokens: Tensor, sequence: int) -> Tensor:
    """The tested tokens' own probabilities of being accepted."""
    p, q = (logits.softmax(-1).gather(2, tokens[..., None])[..., 0] for logits in (target[:, :-1], draft))
    return (p / q).clamp(max=1)


def planning(estimate: Estimate, sequence: int, seen: set[int]) -> Callable[..., Any]:
    """`verify_chain` on as many draft tokens as are planned for this one of the three `KNOWN`, with the others' rows
    weighed against its own; the numbers are added to `seen`.
    """

    def verify(target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor, **rest: Any) -> Any:
        estimates = estimate(target_logits, draft_logits, draft_tokens, sequence)
        distinct, which = np.unique(estimates.numpy(), axis=0, return_inverse=True)
        together = KNOWN.repeat(len(distinct), 1, 1)
        together[:, sequence] = torch.from_numpy(distinct)
        counts = torch.stack([sk.plan_verify(batch, SECONDS)[sequence] for batch in together])
        counts = counts[torch.from_numpy(which.reshape(-1))]
        seen.update(counts.tolist())
        return sk.verify_chain(target_logits, draft_tokens, draft_logits, num_draft_tokens=counts, **rest)

    return verify


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_planned_steps_have_the_targets_distribution(acceptance: str) -> None:
    """Of each of three sequences that are planned together, and get other numbers of rows than they would alone."""
    together = sk.plan_verify(KNOWN, SECONDS).tolist()
    assert together == [2, 1, 0]
    assert [int(sk.plan_verify(KNOWN[i : i + 1], SECONDS[:3])) for i in range(3)] == [2, 2, 2]
    for sequence, count in enumerate(together):
        seen: set[int] = set()
        check_law(planning(of_the_sequence, sequence, seen), problem("full", 3, 2), acceptance)
        assert seen == {count}


@pytest.mark.parametrize("sequence", range(3))
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_a_plan_that_looks_at_the_tested_tokens_is_caught(acceptance: str, sequence: int) -> None:
    seen: set[int] = set()
    with pytest.raises(AssertionError, match="law off by TV"):
        check_law(planning(of_the_tokens, sequence, seen), problem("full", 3, 2), acceptance)
    assert len(seen) > 1
