"""Drafting on a GPU in plain PyTorch: tokens, stats and probabilities of rows of logits, in a few passes over them.

The package's kernels are what is being measured, and its reference sorts every row twice, which would take seconds of a
run at the sizes used on a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import specdec_kernels as sk

from ..inputs import Case


def drafted(logits: Tensor, case: Case, generator: torch.Generator) -> tuple[Tensor, sk.RowStats, Tensor | None]:
    """``[batch, n, vocab]`` to tokens and stats ``[batch, n]``, and probabilities unless the case is greedy.

    The stats are those that `specdec_kernels.sample` keeps, i.e. without the fields of the raw law. Only the laws being
    measured are supported: plain, greedy, and top-p within top-k.
    """
    params = case.params
    x = logits.float()
    maximum = x.amax(-1)
    ids = torch.arange(x.shape[-1], device=x.device)
    argmax = torch.where(x == maximum[..., None], ids, x.shape[-1]).amin(-1)  # the first of equal ones
    status = torch.zeros_like(argmax, dtype=torch.int32)
    infinite = torch.full_like(maximum, -math.inf)
    if case.greedy:
        one = torch.ones_like(maximum)
        values = torch.stack([maximum, infinite, maximum, one, infinite, infinite], -1)
        return argmax, sk.RowStats(values, argmax, status), None
    weights = ((x - maximum[..., None]) / params.temperature).exp()
    cutoff = cut(x, weights, case) if params.top_k else infinite
    weights = weights.masked_fill_(x < cutoff[..., None], 0.0)
    normalizer = weights.sum(-1)
    values = torch.stack(
        [maximum, cutoff, maximum / params.temperature + normalizer.log(), normalizer, infinite, infinite], -1
    )
    token = (weights / torch.empty_like(weights).exponential_(1, generator=generator)).argmax(-1)
    return token, sk.RowStats(values, argmax, status), weights.div_(normalizer[..., None])


def cut(x: Tensor, weights: Tensor, case: Case) -> Tensor:
    """The smallest logit that top-p within top-k keeps, ``[batch, n]``; equal logits live and die together."""
    params = case.params
    largest = x.topk(min(int(params.top_k), x.shape[-1])).values
    total = weights.masked_fill(x < largest[..., -1:], 0.0).sum(-1, keepdim=True)
    mass = ((largest - largest[..., :1]) / params.temperature).exp()
    above = (mass[..., None, :] * (largest[..., None, :] > largest[..., None])).sum(-1)
    return torch.where(above < params.top_p * total, largest, math.inf).amin(-1)
