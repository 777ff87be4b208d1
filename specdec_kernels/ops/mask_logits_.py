"""`mask_logits_`: −inf where top-k, top-p and min-p cut, for callers that want whole rows of logits back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_logits, shape_error
from ..sampling import SamplingParams
from ._common import as_rows, check_params, define, dispatch, places_of, raise_for_status, written
from .arguments import MaskLogitsArguments


def _fake(args: MaskLogitsArguments) -> Tensor:
    return args.logits.new_empty(args.logits.shape[:2], dtype=torch.int32)


_op, _call = define("mask_logits_", MaskLogitsArguments, "Tensor", _fake)


def mask_logits_(logits: Tensor, params: SamplingParams | None, *, backend: str | None = None) -> Tensor:
    """Write −inf, in place, where temperature, top-k, top-p and min-p cut a row: below `RowStats.cutoff`.

    Verification and `sample` never need it: they cut by themselves. It is for callers that hand rows of logits on.
    Nothing as wide as the vocabulary is allocated beside the rows. Every other logit keeps its bits: ties at the
    border, NaN, and all of a row that is not cut because no cut is asked for, it is greedy, or its distribution is
    certain (it holds a +inf or nothing possible). On a copy: ``mask_logits_(copy := logits.clone(), params)``.

    Parameters
    ----------
    logits : Tensor
        ``[vocab]``, ``[batch, vocab]`` or ``[batch, n, vocab]`` float32, bfloat16 or float16, contiguous in the last
        dimension. Any leading strides, but no element may share memory with another: a stride is no smaller than what
        the dimensions of smaller strides span.
    params : SamplingParams or None
        Tensors in it hold one value for each index of the first dimension. The temperature counts for top-p and min-p;
        it divides no logit. None: nothing is cut.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    Tensor
        ``[]``, ``[batch]`` or ``[batch, n]`` int32 status, as `row_stats` gives it.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride or device, logits that require grad (outside of ``torch.no_grad()``), or a backend
        that cannot run here; before any work.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    op = "mask_logits_"
    shape = check_logits(op, "logits", logits)
    if logits.requires_grad and torch.is_grad_enabled():  # the kernel writes behind autograd's back
        raise ValueError(f"{op}: logits must not require grad (call it within torch.no_grad()), got some that do")
    if len(shape) > 3:  # reshaped to three dimensions they might be a copy
        raise shape_error(op, "logits", "[vocab], [batch, vocab] or [batch, n, vocab]", logits)
    if not logits.is_contiguous() and logits.numel() and not places_of(shape, logits.stride())[0]:
        raise ValueError(f"{op}: logits must not overlap themselves, got strides {logits.stride()}")
    rows, device = as_rows(logits), logits.device
    params = check_params(op, "params", params, rows.shape[0], device)
    chosen = dispatch(op, _op, backend, device)
    written(logits)
    status: Tensor = _call(chosen, logits=rows, params=params)
    status = status if rows is logits else status.reshape(shape[:-1])
    raise_for_status(op, status)
    return status
