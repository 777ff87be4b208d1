"""`row_stats`: a row's whole distribution as a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_logits
from ..processors import Processors
from ..sampling import SamplingParams
from ..types import RowStats
from ._common import as_rows, check_params, check_processors, define, dispatch, raise_for_status
from .arguments import RowStatsArguments


def _fake(args: RowStatsArguments) -> tuple[Tensor, Tensor, Tensor]:
    batch, n = args.logits.shape[:2]
    return (
        args.logits.new_empty((batch, n, 6), dtype=torch.float32),
        args.logits.new_empty((batch, n), dtype=torch.int64),
        args.logits.new_empty((batch, n), dtype=torch.int32),
    )


_op, _call = define("row_stats", RowStatsArguments, "(Tensor values, Tensor argmax, Tensor status)", _fake)


def row_stats(
    logits: Tensor,
    params: SamplingParams | None = None,
    *,
    processors: Processors | None = None,
    backend: str | None = None,
) -> RowStats:
    """The distribution of each row of logits after the sampling transform, as a few numbers.

    Nothing as wide as the vocabulary is written.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocab]`` float32, bfloat16 or float16, any leading strides, contiguous in the last dimension. More than
        three dimensions are copied first where their strides do not merge.
    params : SamplingParams, optional
        Tensors in it hold one value for each index of the first dimension. None: temperature 1, nothing cut.
    processors : Processors, optional
        Masks, biases and penalties, which act on the logits before `params`; the raw fields describe the processed
        logits.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    RowStats
        ``values [..., 6]`` float32, ``argmax [...]`` int64, ``status [...]`` int32.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride or device, or a backend that cannot run here; before any work.
    RuntimeError
        A status is set while ``SPECDEC_CHECK=1``; after the work.
    """
    check_logits("row_stats", "logits", logits)
    rows, device = as_rows(logits), logits.device
    params = check_params("row_stats", "params", params, rows.shape[0], device)
    given = None if processors is None else check_processors("row_stats", processors, logits, None, rows.shape[0])
    values, argmax, status = _call(
        dispatch("row_stats", _op, backend, device), logits=rows, params=params, processors=given
    )
    if rows is not logits:
        shape = logits.shape[:-1]
        values, argmax, status = values.reshape(*shape, 6), argmax.reshape(shape), status.reshape(shape)
    raise_for_status("row_stats", status)
    return RowStats(values, argmax, status)
