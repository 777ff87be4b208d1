"""`warp_probs`: the probabilities of each row, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_logits
from ..processors import Processors
from ..sampling import SamplingParams
from ._common import as_rows, check_params, check_processors, define, dispatch
from .arguments import WarpProbsArguments


def _fake(args: WarpProbsArguments) -> Tensor:
    return args.logits.new_empty(args.logits.shape, dtype=torch.float32)


_op, _call = define("warp_probs", WarpProbsArguments, "Tensor", _fake)


def warp_probs(
    logits: Tensor,
    params: SamplingParams | None = None,
    *,
    processors: Processors | None = None,
    backend: str | None = None,
) -> Tensor:
    """The probabilities of each row after the sampling transform: temperature → top-k → top-p → min-p → renormalise.

    Verification never needs this array; it is for callers that do, and for tests.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocab]`` float32, bfloat16 or float16, any leading strides, contiguous in the last dimension. More than
        three dimensions are copied first where their strides do not merge.
    params : SamplingParams, optional
        Tensors in it hold one value for each index of the first dimension. None: temperature 1, nothing cut.
    processors : Processors, optional
        Masks, biases and penalties, which act on the logits before `params`.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    Tensor
        ``[..., vocab]`` float32, contiguous; 0 outside the support. One-hot at the argmax in a greedy row, at the
        lowest +inf, and at id 0 where nothing is possible. A NaN is read as −inf, a parameter out of its range as 1
        (temperature) or as off; there is no status to say so (`row_stats` has one).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride or device, or a backend that cannot run here; before any work.
    """
    check_logits("warp_probs", "logits", logits)
    rows, device = as_rows(logits), logits.device
    params = check_params("warp_probs", "params", params, rows.shape[0], device)
    given = None if processors is None else check_processors("warp_probs", processors, logits, None, rows.shape[0])
    probs: Tensor = _call(dispatch("warp_probs", _op, backend, device), logits=rows, params=params, processors=given)
    return probs if rows is logits else probs.reshape(logits.shape)
