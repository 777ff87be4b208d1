"""Reference of `shard_draw`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import TILE, ShardDrawArguments
from ...types import Status
from .draft import probs_from_stats
from .law import Params, clean, exp, find_inside, find_tile, in_tiles, make_params, remainder
from .random import gumbel
from .reads import clean_uniforms
from .rows import slots_upto


def shard_draw(args: ShardDrawArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, width]`` to masses ``[batch, n, tiles]``, or tokens and scores ``[batch, n]``."""
    x, valid = clean(args.logits), make_params(args.logits.shape[0], args.logits, args.params)
    nothing = x.new_empty(0)
    if args.noise_keys is not None:
        maximum, inverse_t = args.values[..., 0:1], valid.inverse_temperature[..., None]
        shifted = (x - maximum) * inverse_t
        ids = args.first + slots_upto(x.shape[-1], x)
        scores = torch.where((exp(shifted) > 0) & ~valid.greedy[..., None], shifted, -math.inf)
        best = (scores + gumbel(args.noise_keys[..., None], ids.expand(x.shape), x.dtype)).max(-1)
        return nothing, torch.where(best.values > -math.inf, best.indices + args.first, -1), best.values
    left = weights_left(args, x, valid)
    if args.masses is None or args.uniform_samples is None:
        return in_tiles(left, 0.0).sum(-1), nothing.to(torch.int64), nothing
    certain = valid.greedy | args.values[..., 0].isinf() | (args.weights == 0)
    uniforms = clean_uniforms(args.uniform_samples).masked_fill(certain, math.nan)
    return nothing, draw(in_tiles(left, 0.0), args.first // TILE, args.masses, uniforms), nothing


def weights_left(args: ShardDrawArguments, x: Tensor, params: Params) -> Tensor:
    """``(w P − Q)+``, or P, of the shard's ids ``[batch, n, width]``."""
    P = probs_from_stats(x, args.values, args.argmax - args.first, params)
    Q = torch.zeros_like(P)
    if args.point_tokens is not None:
        Q = (args.first + slots_upto(x.shape[-1], x) == args.point_tokens[..., None]).to(P.dtype)
    elif args.draft_logits is not None:
        assert args.draft_values is not None and args.draft_argmax is not None
        draft_params = make_params(x.shape[0], x, args.draft_params)
        Q = probs_from_stats(args.draft_logits, args.draft_values, args.draft_argmax - args.first, draft_params)
    elif args.draft_probs is not None:
        Q = torch.where(args.draft_probs >= 0, args.draft_probs, 0.0)
    if args.draft_status is not None:
        Q = torch.where((args.draft_status & int(Status.BAD_DRAFT) != 0)[..., None], 0.0, Q)
    return torch.where((args.weights < 0)[..., None], P, remainder(P, Q, args.weights))


def draw(tiles: Tensor, first: int, masses: Tensor, uniforms: Tensor) -> Tensor:
    """The id where a draw ends, of weights ``[batch, n, tiles, TILE]`` from tile `first` on and the `masses` of all
    tiles; −1 where it does not end here, or nowhere, and where the uniform is NaN.
    """
    rows = masses.flatten(0, 1)
    tile, rest, mass = find_tile(rows, uniforms.flatten())
    own = tile - first
    here = (own >= 0) & (own < tiles.shape[2]) & (rows > 0).any(-1) & ~uniforms.flatten().isnan()
    weights = tiles.flatten(0, 1)
    weights = weights[slots_upto(len(own), own), own.clamp(0, tiles.shape[2] - 1)]
    return torch.where(here, tile * TILE + find_inside(weights, rest, mass), -1).view(uniforms.shape)
