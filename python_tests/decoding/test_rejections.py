"""What counts as rejected where a draft holds a token that could not be drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner
from specdec_kernels.decoding import DecodingState
from specdec_kernels.drafters import Draft


@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize("bad", ["an id that is none", "a token that its distribution cannot have given"])
def test_a_draft_that_ends_before_a_bad_token_rejects_nothing(bad: str, acceptance: str) -> None:
    """Nothing was judged there: what follows is drawn as after a shorter draft."""
    target = TableRunner.random(spread=9.0)

    class Bad(sk.Drafter):
        def start(self, state: DecodingState) -> None: ...

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            last = int(state.last_tokens())
            right = int(target.table[int(state.tokens[0, int(state.lengths) - 2]), last].argmax())
            if bad == "an id that is none":
                return Draft(torch.tensor([[right, 23, 0]])[:, :num_tokens])
            probs = torch.eye(23)[[right, 5, 5]][None]
            return Draft(torch.tensor([[right, 4, 5]])[:, :num_tokens], probs=probs[:, :num_tokens])

        def commit(self, state: DecodingState, result: Any) -> None: ...

    out = sk.generate(
        target, torch.tensor([[5, 6]]), drafter=Bad(), acceptance=acceptance, max_new_tokens=20, eos_token_id=[],
        num_speculative_tokens=3, seeds=torch.tensor([3]),
    )  # fmt: skip
    flag = sk.Status.BAD_TOKEN if bad == "an id that is none" else sk.Status.BAD_DRAFT
    assert out.status.tolist() == [int(flag)] and out.stats.num_accepted > 5
    # the first token of a draft may be rejected, and then the token rule does not come to the bad one, which never is
    after = 2 if (bad, acceptance) == ("a token that its distribution cannot have given", "token") else 0
    assert out.stats.num_drafted == out.stats.num_accepted + (1 + after) * out.stats.num_rejected
    assert out.stats.accepted_per_position[0] == out.stats.num_accepted
