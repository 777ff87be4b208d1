"""`verify_packed`: `verify_chain` on ragged drafts laid end to end."""

from __future__ import annotations

from torch import Tensor

from ..backends import FUNCTIONS
from ..checks import check_int, check_shape, shape_error
from ..laws import TargetLaw
from ..processors import Processors
from ..sampling import SamplingParams
from ..types import RowStats, TokenMap, VerifyOutput
from ._common import check_rows
from .verify_chain import verify_spans

FUNCTIONS["verify_packed"] = "verify_chain"


def verify_packed(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    cu_num_draft_tokens: Tensor,
    max_num_draft_tokens: int,
    uniform_samples: Tensor | None = None,
    noise_keys: Tensor | None = None,
    seeds: Tensor | None = None,
    step: int | Tensor | None = None,
    positions: Tensor | None = None,
    params: SamplingParams | None = None,
    draft_params: SamplingParams | None = None,
    processors: Processors | None = None,
    acceptance: str = "token",
    target_law: TargetLaw | None = None,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_index: Tensor | None = None,
    draft_stats: RowStats | None = None,
    draft_token_map: TokenMap | None = None,
    num_draft_tokens: Tensor | None = None,
    bonus_tokens: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
    return_acceptance: bool = False,
    backend: str | None = None,
) -> VerifyOutput:
    """`verify_chain` for drafts of different lengths without padding: same rules, same tokens for the same inputs.

    Sequence b's draft tokens (and draft rows) are those from ``cu[b]`` up to ``cu[b+1]``; its target rows, uniforms and
    keys start at ``cu[b] + b``, in the order of `verify_chain` (so its uniform number 0 draws the recovered or bonus
    token).

    Parameters
    ----------
    target_logits : Tensor or None
        ``[total + batch, vocab]`` float32, bfloat16 or float16, where ``total = cu_num_draft_tokens[-1]``.
    draft_tokens : Tensor
        ``[total]`` int32 or int64.
    draft_logits : Tensor, optional
        ``[total, vocab_draft]``; where `target_law` has ``bonus="cascade"`` ``[total + batch, vocab_draft]``, segment b
        starting at ``cu[b] + b``.
    cu_num_draft_tokens : Tensor
        ``[batch + 1]`` int32, cumulative, from 0 to total. A segment that ends before it starts or leaves ``[0,
        total]`` is an idle row with ``Status.BAD_PARAM``; nothing of it is read. The first segment has that flag if it
        does not start at 0, the last if it does not end at total: draft tokens then belong to no sequence.
    max_num_draft_tokens : int
        Width of the result less one, in [0, 2**20), ``batch * (max_num_draft_tokens + 1) < 2**31``; a longer segment is
        cut to it and flagged ``Status.BAD_PARAM``.
    uniform_samples, noise_keys : Tensor, optional
        ``[total + batch]`` float64 or float32 in [0, 1), and int64; needed and refused as in `verify_chain`.
    seeds, step : optional
        As in `verify_chain`: ``[batch]`` int64, instead of both; the numbers are those of `verify_chain`.
    positions : Tensor, optional
        With `seeds`, "match" only: ``[total + batch]`` int32 or int64.
    params, draft_params : SamplingParams, optional
        Tensors in them hold one value per sequence.
    processors : Processors, optional
        As in `verify_chain`; its `token_bitmask` has a row for each of the ``total + batch`` target rows.
    target_probs : Tensor, optional
        Instead of `target_logits` (None): ``[total + batch, vocab]`` float32, as in `verify_chain`.
    draft_probs : Tensor, optional
        ``[total, vocab_draft]`` float32.
    draft_index : Tensor, optional
        As in `verify_chain`, of rows ``[requests, >= max_num_draft_tokens, vocab_draft]``.
    draft_stats : RowStats, optional
        Of shape ``[total]``, or of `draft_logits`' rows.
    num_draft_tokens : Tensor, optional
        ``[batch]`` int32 or int64: how many tokens to use of each segment; −1: an idle row.
    bonus_tokens : Tensor, optional
        ``[batch]`` int32 or int64, as in `verify_chain`: `target_logits` (or `target_probs`, and a `token_bitmask`) is
        ``[total, vocab]``, the row of draft token i of sequence b is number ``cu[b] + i``; random numbers stay
        ``[total + batch]``.
    acceptance, target_law, draft_token_map, eos_token_ids, return_acceptance, backend
        As in `verify_chain`.

    Returns
    -------
    VerifyOutput
        tokens ``[batch, max_num_draft_tokens + 1]`` int64, num_accepted, num_tokens and status ``[batch]`` int32;
        acceptance ``[batch, max_num_draft_tokens]`` float32, or None where it was not asked for.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride, device or combination, or a backend that cannot run here; before any work. What
        only the values show sets ``status`` instead.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "verify_packed"
    target, name, shape = check_rows(op, "target_logits", target_logits, target_probs)
    ends = _length(op, "cu_num_draft_tokens", cu_num_draft_tokens, "[batch + 1]")
    if ends < 1:
        raise shape_error(op, "cu_num_draft_tokens", "[batch + 1]", cu_num_draft_tokens)
    check_int(op, "max_num_draft_tokens", max_num_draft_tokens, 0, 2**20 - 1)
    batch, total = ends - 1, _length(op, "draft_tokens", draft_tokens, "[total]")
    drafted, rows = (("total",), (total,)), (("total + batch",), (total + batch,))
    names, lead = rows if bonus_tokens is None else drafted
    if len(shape) != 2 or shape[0] != lead[0]:
        check_shape(op, name, target, (*names, "vocab"), (*lead, shape[-1]))
    asked = (
        target, draft_tokens, draft_logits, (uniform_samples, noise_keys, seeds, step, positions), params,
        draft_params, processors, acceptance, target_law, target_probs is not None,
        draft_probs, draft_index, draft_stats, draft_token_map, num_draft_tokens, bonus_tokens, eos_token_ids,
        return_acceptance,
    )  # fmt: skip
    return verify_spans(op, backend, asked, batch, max_num_draft_tokens, cu_num_draft_tokens, drafted, rows)


def _length(op: str, argument: str, value: Tensor, expected: str) -> int:
    """The length of a 1-d tensor; `verify_spans` checks its dtype and device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {argument} must be a tensor, got {type(value).__name__}")
    shape = value.shape
    if len(shape) != 1:
        raise shape_error(op, argument, expected, value)
    return shape[0]
