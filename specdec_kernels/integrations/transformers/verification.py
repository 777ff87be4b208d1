"""transformers' own verification of a draft, by `verify_chain`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...checks import (
    ID_DTYPES,
    check_flag,
    check_instance,
    check_int,
    check_logits,
    check_shape,
    check_tensor,
    contiguous_rows,
    shape_error,
)
from ...ops.verify_chain import verify_chain
from .versions import check_version


def speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    is_done_candidate: bool | float | Tensor | None = False,
    *,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A drop-in for ``transformers.generation.utils._speculative_sampling``: the same arguments and results.

    Differences, on purpose: a token of probability 0 is never accepted, a draft token that its own distribution cannot
    have produced ends the draft, and where the target's and the draft's distributions are equal up to rounding, nothing
    raises. The uniforms are ``torch.rand`` on the logits' device.

    Parameters
    ----------
    candidate_input_ids : Tensor
        ``[1, length + candidate_length]`` int64: the text and the draft.
    candidate_logits : Tensor
        ``[1, candidate_length, vocab]`` of any float dtype (float64 is read as float32): what the draft's tokens were
        drawn from, processed.
    candidate_length : int
        Draft tokens.
    new_logits : Tensor
        ``[1, candidate_length + 1, vocab]``, likewise: the target's, processed.
    is_done_candidate : bool or Tensor
        In transformers up to 5.19: the draft ends the text, and nothing is drawn after it if all is accepted. Later
        versions have `assistant_ensemble_weight` in this place: a float in (0, 1], or None, is taken as that.
    assistant_ensemble_weight : float, optional
        w in (0, 1]: verify against ``w · p + (1 − w) · q`` instead of the target's p, as transformers does. 1 is the
        same as None.

    Returns
    -------
    valid_tokens : Tensor
        ``[1, n_matches + 1]`` int64: accepted tokens and the one drawn after them.
    n_matches : Tensor
        ``[]`` int64.

    Raises
    ------
    ImportError
        An unknown version of transformers, with the range of known ones.
    ValueError, TypeError
        As `verify_chain`; a batch other than 1; a weight outside (0, 1].
    """
    check_version("speculative_sampling")
    op = "speculative_sampling"
    check_tensor(op, "candidate_input_ids", candidate_input_ids, ID_DTYPES, None)
    if candidate_input_ids.dim() != 2 or candidate_input_ids.shape[0] != 1:
        raise shape_error(op, "candidate_input_ids", "[1, length]", candidate_input_ids)
    check_int(op, "candidate_length", candidate_length, 0, candidate_input_ids.shape[1])
    candidate_logits, new_logits = _readable(candidate_logits), _readable(new_logits)
    vocab = check_logits(op, "new_logits", new_logits, candidate_input_ids.device)[-1]
    check_logits(op, "candidate_logits", candidate_logits, candidate_input_ids.device)
    names = ("batch", "candidate_length", "vocab")
    check_shape(op, "candidate_logits", candidate_logits, names, (1, candidate_length, vocab))
    check_shape(op, "new_logits", new_logits, names, (1, candidate_length + 1, vocab))
    if is_done_candidate is None:
        is_done_candidate = False
    elif isinstance(is_done_candidate, float):
        if assistant_ensemble_weight is not None:
            raise ValueError(
                f"{op}: is_done_candidate must be a bool beside assistant_ensemble_weight, got {is_done_candidate}"
            )
        if not 0 < is_done_candidate <= 1:
            raise ValueError(f"{op}: is_done_candidate must be a bool, or a weight in (0, 1], got {is_done_candidate}")
        is_done_candidate, assistant_ensemble_weight = False, is_done_candidate
    if isinstance(is_done_candidate, Tensor):
        check_tensor(op, "is_done_candidate", is_done_candidate, (torch.bool,), new_logits.device)
        if is_done_candidate.numel() != 1:
            raise shape_error(op, "is_done_candidate", "one value", is_done_candidate)
    else:
        check_flag(op, "is_done_candidate", is_done_candidate)
    draft = candidate_input_ids[:, candidate_input_ids.shape[1] - candidate_length :]
    if assistant_ensemble_weight is not None:
        new_logits = _ensemble(candidate_logits, new_logits, assistant_ensemble_weight)
    out = verify_chain(
        new_logits,
        draft.contiguous(),
        candidate_logits,
        uniform_samples=torch.rand(1, candidate_length + 1, dtype=torch.float64, device=new_logits.device),
    )
    num_accepted = out.num_accepted[0].long()
    if bool(is_done_candidate) and int(num_accepted) == candidate_length:
        return draft, num_accepted - 1
    return out.tokens[:, : int(num_accepted) + 1], num_accepted


def _readable(logits: Any) -> Any:
    """Logits as `verify_chain` takes them: float64 as float32, and copied where a row's ids lie apart."""
    if not isinstance(logits, Tensor) or logits.layout != torch.strided:
        return logits
    logits = logits.float() if logits.dtype == torch.float64 else logits
    return contiguous_rows(logits)


def _ensemble(candidate_logits: Tensor, new_logits: Tensor, weight: float) -> Tensor:
    """`new_logits`, with those that judge a draft token replaced by the mixture's."""
    check_instance("speculative_sampling", "assistant_ensemble_weight", weight, (int, float), "a number")
    if weight is True or not 0 < weight <= 1:
        raise ValueError(f"speculative_sampling: assistant_ensemble_weight must be in (0, 1], got {weight}")
    if weight == 1:
        return new_logits
    p, q = new_logits.float().log_softmax(-1), candidate_logits.float().log_softmax(-1)
    mixed = torch.logaddexp(p[:, :-1] + math.log(weight), q + math.log1p(-weight))
    return torch.cat([mixed, p[:, -1:]], dim=1)
