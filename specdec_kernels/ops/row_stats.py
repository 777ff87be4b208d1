"""`row_stats`: a row's whole distribution as a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.reference.row_stats import row_stats as _reference
from ..sampling import SamplingParams
from ..types import RowStats
from ._common import PARAMS_SCHEMA, as_rows, check_logits, define, dispatch, flat_params, raise_for_status


def _fake(logits: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, n = logits.shape[:2]
    return (
        logits.new_empty((batch, n, 6), dtype=torch.float32),
        logits.new_empty((batch, n), dtype=torch.int64),
        logits.new_empty((batch, n), dtype=torch.int32),
    )


_op = define(
    "row_stats",
    "Tensor logits, bool raw, " + PARAMS_SCHEMA.format(""),
    "(Tensor values, Tensor argmax, Tensor status)",
    _fake,
    _reference,
)


def row_stats(logits: Tensor, params: SamplingParams | None = None, *, backend: str | None = None) -> RowStats:
    """The distribution of each row of logits after the sampling transform, as a few numbers.

    Nothing as wide as the vocabulary is written.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocab]`` float32, bfloat16 or float16, any leading strides, contiguous in the last dimension.
    params : SamplingParams, optional
        Tensors in it hold one value for each index of the first dimension. None: temperature 1, nothing cut.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None takes the best one for the device.

    Returns
    -------
    RowStats
        ``values [..., 6]`` float32, ``argmax [...]`` int64, ``status [...]`` int32.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride or device, or a backend that cannot run here; before any work.
    """
    check_logits("row_stats", "logits", logits)
    rows = as_rows(logits)
    flat = flat_params("row_stats", "params", params, rows.shape[0], logits.device)
    values, argmax, status = dispatch("row_stats", _op, backend, logits.device)(rows, True, *flat)
    raise_for_status("row_stats", status)
    if logits.dim() == 3:
        return RowStats(values, argmax, status)
    shape = logits.shape[:-1]
    return RowStats(values.reshape(*shape, 6), argmax.reshape(shape), status.reshape(shape))
