"""`uniform_samples`: the uniforms of one verify step, from a counter-based generator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_int
from ._common import define, dispatch
from ._random import check_seeds, purpose_code, split_step
from .arguments import UniformSamplesArguments


def _fake(args: UniformSamplesArguments) -> Tensor:
    return args.seeds.new_empty((args.seeds.shape[0], args.num), dtype=torch.float64)


_op, _call = define("uniform_samples", UniformSamplesArguments, "Tensor", _fake)


def uniform_samples(
    seeds: Tensor, step: int | Tensor, num: int, purpose: str = "accept", *, backend: str | None = None
) -> Tensor:
    """Uniforms keyed by (seed, step, purpose, index): Philox4x32-10 (Salmon et al., SC 2011), 53 bits each.

    A draw or a coin is as fine as its uniform: a token of probability 1e-8 comes as often as it should, where float32
    uniforms, multiples of 2**-24 at best, would draw it never or six times as often.

    The ratio rules ("token", "block") need fresh ones at every verify step: let `step` grow by one with each step of a
    sequence. A number depends on nothing else: not on `num`, the batch slot or the backend.

    Parameters
    ----------
    seeds : Tensor
        ``[batch]`` int64, one per sequence.
    step : int or Tensor
        The verify step, >= 0; or ``[batch]`` int64 on the device (an int would be baked into a captured graph).
    num : int
        How many per sequence, >= 0: ``num_draft + 1`` for `verify_chain`.
    purpose : {"accept", "draft", "final", "sample"}
        Disjoint streams.
    backend : str, optional
        "reference", "cpu", "triton" or "cuda"; None: that of ``SPECDEC_BACKEND``, else the best one for the device.

    Returns
    -------
    Tensor
        ``[batch, num]`` float64, multiples of 2**-53 in [0, 1). As float32 some would round to 1, which is outside.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape, device or range, an unknown purpose, or a backend that cannot run here; before any work.
    """
    op = "uniform_samples"
    check_seeds(op, seeds)
    steps, step = split_step(op, step, seeds)
    check_int(op, "num", num, 0, 2**31 - 1)
    run = dispatch(op, _op, backend, seeds.device)
    code = purpose_code(op, purpose)
    out: Tensor = _call(run, seeds=seeds, steps=steps, step=step, num=num, purpose=code)
    return out
