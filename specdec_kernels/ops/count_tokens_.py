"""`count_tokens_`: count what a step emits in a `TokenCounts`, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import ID_DTYPES, INT32, check_given, check_instance, check_tensor, shape_error
from ..types import TokenCounts
from ._common import define, dispatch, raise_for_status, written
from .arguments import CountTokensArguments


def _fake(args: CountTokensArguments) -> Tensor:
    return torch.empty_like(args.num_output)


_op, _call = define("count_tokens_", CountTokensArguments, "Tensor", _fake)


def count_tokens_(
    token_counts: TokenCounts, tokens: Tensor, num_tokens: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Count tokens of the output, as a verify step gives them, in one launch: what `TokenCounts.add_` calls.

    The host waits for nothing: a step can be captured in a CUDA graph.

    Parameters
    ----------
    token_counts : TokenCounts
        Of `batch` sequences; written in place.
    tokens : Tensor
        ``[batch, n]`` int64 or int32; where a number is negative, or 2**31 − 1 or more, there is no token. Where more
        distinct ids come together than there is room for, the lowest are kept.
    num_tokens : Tensor, optional
        ``[batch]`` int32 or int64, as `VerifyOutput.num_tokens`: how many of each row count; None: all.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    Tensor
        ``[batch]`` int32 status: `Status.BAD_PARAM` where the ids of `token_counts` do not ascend (nothing is counted
        then), or where there is no room for an id.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device, `token_counts` that are not contiguous, or a backend that cannot run here;
        before any work.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    return _count("count_tokens_", token_counts, tokens, num_tokens, backend)


def _count(
    op: str, token_counts: TokenCounts, tokens: Tensor, num_tokens: Tensor | None, backend: str | None
) -> Tensor:
    """The same; `op` names the caller in messages."""
    check_instance(op, "token_counts", token_counts, TokenCounts, "a TokenCounts")
    ids, counts, num_output = token_counts.ids, token_counts.counts, token_counts.num_output
    check_tensor(op, "token_counts.ids", ids, INT32, None)
    if ids.dim() != 2:
        raise shape_error(op, "token_counts.ids", "[batch, capacity]", ids)
    batch, device = ids.shape[0], ids.device
    check_given(op, "token_counts.counts", counts, INT32, device, ("batch", "capacity"), tuple(ids.shape))
    check_given(op, "token_counts.num_output", num_output, INT32, device, ("batch",), (batch,))
    for name, tensor in (("ids", ids), ("counts", counts), ("num_output", num_output)):
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: token_counts.{name} must be contiguous, got strides {tensor.stride()}")
    check_tensor(op, "tokens", tokens, ID_DTYPES, device)
    if tokens.dim() != 2 or tokens.shape[0] != batch:
        raise shape_error(op, "tokens", f"[batch={batch}, n]", tokens)
    if num_tokens is not None:
        check_given(op, "num_tokens", num_tokens, ID_DTYPES, device, ("batch",), (batch,))
    chosen = dispatch("count_tokens_", _op, backend, device, op)
    written(ids, counts, num_output)
    out: Tensor = _call(chosen, ids=ids, counts=counts, num_output=num_output, tokens=tokens, num_tokens=num_tokens)
    raise_for_status(op, out)
    return out


TokenCounts._count = staticmethod(_count)
