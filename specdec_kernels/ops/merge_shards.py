"""`merge_shards`: a row's distribution from the statistics of the shards' tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT32, check_flag, shape_error
from ..sampling import SamplingParams
from ._common import check_params, check_tensors, define, dispatch
from .arguments import MergeShardsArguments


def _fake(args: MergeShardsArguments) -> tuple[Tensor, Tensor]:
    batch, n = args.tile_max.shape[:2]
    return args.tile_max.new_empty((batch, n, 6)), args.tile_max.new_empty((batch, n))


_op, _call = define("merge_shards", MergeShardsArguments, "(Tensor values, Tensor prob)", _fake)


def merge_shards(
    tile_max: Tensor,
    tile_mass: Tensor,
    logits_at: Tensor,
    params: SamplingParams | None = None,
    *,
    probs: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The distribution of each row of logits, nothing cut, from the tiles of all of its shards.

    Parameters
    ----------
    tile_max, tile_mass : Tensor
        ``[batch, n, tiles]`` float32, from `shard_stats`: the tiles of all shards in the order of their ids.
    logits_at : Tensor
        ``[batch, n]`` float32: the logit of one id of each row.
    params : SamplingParams, optional
        The temperature counts, as in `shard_stats`.
    probs : bool
        The rows are probabilities (a flag, as in `shard_stats`): their sum takes the normalizer's place.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    values : Tensor
        ``[batch, n, 6]`` float32 as in `RowStats`; the raw fields are not computed: −inf. With `probs` the normalizer
        is the sum, and log_normalizer is meaningless.
    prob : Tensor
        ``[batch, n]`` float32: the probability of `logits_at`; 0 where all mass is on one id (a greedy row, a maximum
        that is infinite), and with `probs`.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, stride or device, or a backend that cannot run here; before any work.
    """
    op = "merge_shards"
    if not isinstance(tile_max, Tensor) or tile_max.dim() != 3 or tile_max.shape[2] < 1:
        raise shape_error(op, "tile_max", "[batch, n, tiles] with tiles >= 1", tile_max)
    shape, names = tuple(tile_max.shape), ("batch", "n", "tiles")
    check_tensors(op, tile_max, [
        ("tile_max", tile_max, FLOAT32, names, shape),
        ("tile_mass", tile_mass, FLOAT32, names, shape),
        ("logits_at", logits_at, FLOAT32, names[:2], shape[:2]),
    ])  # fmt: skip
    check_flag(op, "probs", probs)
    device = tile_max.device
    params = check_params(op, "params", params, shape[0], device)
    values, prob = _call(
        dispatch(op, _op, backend, device),
        tile_max=tile_max, tile_mass=tile_mass, logits_at=logits_at, params=params, probs=probs,
    )  # fmt: skip
    return values, prob


def total_mass(masses: Tensor, backend: str | None = None) -> Tensor:
    """The sums ``[batch, n]`` of tiles' masses ``[batch, n, tiles]``, added in the same order as a normalizer's."""
    zeros = torch.zeros_like(masses)
    values, _ = merge_shards(zeros, masses, zeros[..., 0], backend=backend)
    return values[..., 3]
