"""How many draft tokens of each sequence a step should verify, decided for the whole batch on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT32, check_given, check_tensor, shape_error


def plan_verify(acceptances: Tensor, step_seconds: Tensor) -> Tensor:
    """The draft tokens of each sequence that maximise the expected tokens a second of the whole batch.

    A sequence's first k draft tokens yield ``1 + Σ_{i ≤ k} Π_{j ≤ i} a_j`` tokens (`expected_tokens_by_position` of
    `analysis`), each further one no more than the one before. So the best n of the batch are the n likeliest, in
    whichever sequences, and it remains to choose n by its cost. Nothing waits for the device.

    Lossless only for estimates that were known before the tokens to be tested were drawn: from a sequence's earlier
    steps, the position, other texts. A choice from these tokens' own probabilities would drop the ones that look bad,
    and those kept would no longer have the distribution that verification assumes.

    Parameters
    ----------
    acceptances : Tensor
        ``[batch, num_draft]`` float32 in [0, 1]: the estimated probability that a draft token is accepted where all
        before it were. 0 where a sequence has no draft, so that nothing of it is chosen; NaN counts as 0.
    step_seconds : Tensor
        ``[batch * num_draft + 1]`` float32, > 0: time of a step that verifies n draft tokens in the whole batch, n = 0
        … batch * num_draft, in any unit. It includes drafting as far as that depends on n. An n whose time is NaN is
        not chosen.

    Returns
    -------
    Tensor
        ``[batch]`` int64, for ``num_draft_tokens`` of `verify_chain` and `verify_packed`.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device; before any work.
    """
    check_tensor("plan_verify", "acceptances", acceptances, FLOAT32, None)
    if acceptances.dim() != 2:
        raise shape_error("plan_verify", "acceptances", "[batch, num_draft]", acceptances)
    batch, num_draft = acceptances.shape
    check_given(
        "plan_verify", "step_seconds", step_seconds, FLOAT32, acceptances.device, ("batch * num_draft + 1",),
        (batch * num_draft + 1,),
    )  # fmt: skip
    gains = acceptances.nan_to_num(0.0).clamp(0, 1).double().cumprod(1).flatten()
    gains, order = gains.sort(descending=True, stable=True)  # stable: a sequence's tokens stay in their order
    expected = batch + torch.cat([gains.new_zeros(1), gains.cumsum(0)])
    rates = (expected / step_seconds).nan_to_num(0.0)
    rates[1:].masked_fill_(gains == 0, 0.0)  # no rows that yield nothing, even where measured times fall
    best = rates.argmax()
    counts = torch.zeros(batch, dtype=torch.int64, device=acceptances.device)
    chosen = torch.arange(batch * num_draft, device=acceptances.device) < best
    return counts.scatter_add_(0, order // max(num_draft, 1), chosen.long())
