"""`shard_stats`: statistics of a rank's columns of the logits, tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_flag, check_logits, shape_error
from ..sampling import SamplingParams
from ..types import ShardStats
from ._common import check_params, define, dispatch
from .arguments import ShardStatsArguments, tiles_of


def _fake(args: ShardStatsArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n, width = args.logits.shape
    return (
        args.logits.new_empty((batch, n, tiles_of(width)), dtype=torch.float32),
        args.logits.new_empty((batch, n, tiles_of(width)), dtype=torch.float32),
        args.logits.new_empty((batch, n), dtype=torch.int64),
        args.logits.new_empty((batch, n), dtype=torch.int32),
    )


_op, _call = define(
    "shard_stats", ShardStatsArguments, "(Tensor tile_max, Tensor tile_mass, Tensor argmax, Tensor status)", _fake
)


def shard_stats(
    logits: Tensor, params: SamplingParams | None = None, *, probs: bool = False, backend: str | None = None
) -> ShardStats:
    """One pass over a shard of every row: its tiles' maxima and masses, from which `merge_shards` makes the whole row's
    distribution, bit for bit as if it had been read in one piece (by the reference above 1024 ids only).

    Parameters
    ----------
    logits : Tensor
        ``[batch, n, width]`` float32, bfloat16 or float16, contiguous in the last dimension: the ids of each row from a
        multiple of 1024 on.
    params : SamplingParams, optional
        Only the temperature counts: nothing is cut.
    probs : bool
        The rows are probabilities (float32); a flag, where `sample` takes a tensor. A tile's mass is then their sum,
        infinite where one is negative (a −inf counts as 0).
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    ShardStats
        ``tile_max`` and ``tile_mass [batch, n, tiles]`` float32, ``argmax [batch, n]`` int64 (counted from the shard's
        first id), ``status [batch, n]`` int32 (`Status.NAN` alone). Nothing raises for it, as other ranks would
        go on: `sk.distributed.verify_chain` does under ``SPECDEC_CHECK=1``, on all of them alike.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride or device, or a backend that cannot run here; before any work.
    """
    op = "shard_stats"
    shape = check_logits(op, "logits", logits, least=1)
    if len(shape) != 3:
        raise shape_error(op, "logits", "[batch, n, width]", logits)
    check_flag(op, "probs", probs)
    if probs and logits.dtype != torch.float32:
        raise TypeError(f"{op}: logits must be float32 where they are probabilities, got {logits.dtype}")
    params = check_params(op, "params", params, shape[0], logits.device)
    return ShardStats(*_call(dispatch(op, _op, backend, logits.device), logits=logits, params=params, probs=probs))
