"""`shard_draw` as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...flat import FlatParams
from ...ops.arguments import ShardDrawArguments, tiles_of
from .arithmetic import BAD_DRAFT, INFINITY, LAST_ID, TILE, exp_nonpositive, high_word, low_word
from .bundles import LOGITS, NO_DRAFT, Best, DraftLaws, Noise, Position, Row, RowLaws, Rows, Target, rows_of
from .launch import run, tiles_a_program, tiles_at_once
from .law import make_temperature
from .remainder import remainder
from .row import load_law, load_logits, load_values, tile_ids, walk_ids, walk_tiles, weigh
from .shard_stats import inverse_temperatures, scan_shard


@triton.jit
def without_point(target, row, n, points, ids):
    """The weights of P of some ids, except for the row's point."""
    law = load_law(target.laws, row)
    weight = weigh(load_logits(target.rows, row // n, row % n, ids), law, law.cutoff, LOGITS)
    if points is not None:
        weight = tl.where(ids == tl.load(points + row), 0.0, weight)
    return weight


@triton.jit(do_not_specialize=["n", "tiles"])
def masses(
    target,
    n,
    tiles,
    draft,
    points,
    weights,
    tile_max,
    tile_mass,
    out,
    TILES: tl.constexpr,
):
    """A program for TILES tiles of one row: the mass of what the token is drawn from."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    tile = first_tile + tl.arange(0, TILES)
    at = row * tiles + tile
    inside = tile < tiles
    weight = tl.load(weights + row)
    law = load_law(target.laws, row)
    certain = law.inverse_temperature < 0
    shift = (tl.load(tile_max + at, mask=inside, other=-INFINITY) - law.max) * law.inverse_temperature
    mass = tl.load(tile_mass + at, mask=inside, other=0.0) * exp_nonpositive(shift)
    if certain:
        here = law.argmax // TILE == tile
        taken = tl.zeros((), tl.float32)
        if points is not None:
            taken = tl.where(tl.load(points + row) == law.argmax, 1.0, 0.0)
        mass = tl.where(here & (law.argmax >= 0), tl.where(weight < 0.0, 1.0, tl.maximum(weight - taken, 0.0)), 0.0)
    if draft.given:
        if weight >= 0.0:
            left = remainder(
                target, draft, Position(row // n, row % n, row, row), weight, 1.0, tile_ids(first_tile, TILES)
            )
            mass = tl.sum(left, 1)
    tl.store(out + at, tl.where(weight == 0.0, 0.0, mass), mask=inside)
    if points is not None:
        hole = tl.load(points + row).to(tl.int32)
        inner = (hole >= first_tile * TILE) & (hole < (first_tile + TILES) * TILE) & (hole < target.rows.vocab)
        if inner & (weight > 0.0) & (certain == 0):
            tl.debug_barrier()  # several threads may have stored that tile's
            ids = hole // TILE * TILE + tl.arange(0, TILE)
            tl.store(out + row * tiles + hole // TILE, tl.sum(without_point(target, row, n, points, ids), 0))


@triton.jit(do_not_specialize=["n", "first", "all_tiles"])
def draw(
    target,
    n,
    draft,
    points,
    weights,
    given,
    uniforms,
    first,
    all_tiles,
    token,
    TILES: tl.constexpr,
):
    """A program a row: the token, if the draw ends in this shard."""
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(uniforms + row)
    uniform = tl.where((uniform >= 0.0) & (uniform < 1.0), uniform, 0.0)
    tile, rest, mass = walk_tiles(given + row * all_tiles, all_tiles, uniform, -1, 0.0, TILES)
    own = tile - first // TILE
    law = load_law(target.laws, row)
    id = tl.full((), -1, tl.int32)
    weight = tl.load(weights + row)
    here = (tile >= 0) & (own >= 0) & (own * TILE < target.rows.vocab) & (law.inverse_temperature > 0)
    if here & (weight != 0.0):
        ids = own * TILE + tl.arange(0, TILE)
        left = tl.zeros((TILE,), tl.float32)
        if weight < 0.0:
            left = without_point(target, row, n, None, ids)
        elif draft.given:
            left = remainder(target, draft, Position(row // n, row % n, row, row), weight, 1.0, ids)
        else:
            left = without_point(target, row, n, points, ids)
        id = first + walk_ids(left, ids, rest, mass)
    tl.store(token + row, id.to(tl.int64))


@triton.jit(do_not_specialize=["n", "tiles", "first"])
def noisy(target, n, tiles, keys, first, best, TILES: tl.constexpr):
    """A program for TILES tiles of one row: the best score of each, and the lowest id that has it."""
    programs = (tiles + TILES - 1) // TILES
    row = (tl.program_id(0) // programs).to(tl.int64)
    first_tile = tl.program_id(0) % programs * TILES
    tile = first_tile + tl.arange(0, TILES)
    law = load_law(target.laws, row)
    score = tl.full((TILES,), -INFINITY, tl.float32)
    score_id = tl.zeros((TILES,), tl.int32)
    if law.inverse_temperature > 0:
        key = tl.load(keys + row)
        # by ids of the whole vocabulary, whose noise counts
        own = target.rows
        rows = Rows(own.data - first, own.stride_batch, own.stride_row, own.vocab + first, own.overlay, LOGITS, None)
        whole = Row(rows, row // n, row % n, tiles, law)
        at = first // TILE + first_tile
        scores = load_values(whole, at + tl.arange(0, TILES), Noise(low_word(key), high_word(key), None), TILE)
        score = tl.max(scores, 1)
        score_id = tl.min(tl.where(scores == score[:, None], tile_ids(at, TILES), LAST_ID), 1)
    tl.store(best.score + row * tiles + tile, score, mask=tile < tiles)
    tl.store(best.id + row * tiles + tile, score_id, mask=tile < tiles)


def shard_laws(values: Tensor, argmax: Tensor, status: Tensor, first: int, params: FlatParams) -> RowLaws:
    """The laws of a shard's rows, from the stats of the whole ones."""
    inverse = inverse_temperatures(params, values).expand(argmax.shape)
    one_hot = (inverse < 0) | values[..., 0].isinf()
    numbers = torch.stack([values[..., 0], values[..., 1], torch.where(one_hot, -1.0, inverse), 1 / values[..., 3]], -1)
    return RowLaws(numbers, (argmax - first).contiguous(), status.contiguous())


def draft_of(args: ShardDrawArguments) -> DraftLaws:
    """The draft's rows, with laws that are 0 everywhere where the whole rows are no distribution."""
    rows = args.draft_probs if args.draft_logits is None else args.draft_logits
    if rows is None:
        return NO_DRAFT
    assert args.draft_status is not None
    laws = RowLaws(None, None, args.draft_status.contiguous())
    if args.draft_logits is not None:
        assert args.draft_values is not None and args.draft_argmax is not None
        laws = shard_laws(args.draft_values, args.draft_argmax, args.draft_status, args.first, args.draft_params)
        bad = args.draft_status & BAD_DRAFT.value != 0
        assert laws.numbers is not None and laws.argmax is not None
        laws.numbers[..., 2].masked_fill_(bad, -1.0)
        laws = laws._replace(argmax=laws.argmax.masked_fill(bad, -1).contiguous())
    return DraftLaws(rows_of(rows), laws, None, None, tl.constexpr(True), tl.constexpr(0))


def shard_draw(args: ShardDrawArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``[batch, n, width]`` to masses ``[batch, n, tiles]``, or tokens and scores ``[batch, n]``."""
    batch, n, width = args.logits.shape
    device, rows, tiles = args.logits.device, rows_of(args.logits), tiles_of(width)
    laws = shard_laws(
        args.values, args.argmax, torch.zeros_like(args.argmax, dtype=torch.int32), args.first, args.params
    )
    target, nothing = Target(rows, laws), torch.empty(0, dtype=torch.float32, device=device)
    a_program = tiles_a_program(width, 2)
    grid = (batch * n * triton.cdiv(tiles, a_program),)
    if args.noise_keys is not None:
        best = Best(
            torch.empty(batch, n, tiles, dtype=torch.float32, device=device),
            torch.empty(batch, n, tiles, dtype=torch.int32, device=device),
        )
        run(noisy, grid, target, n, tiles, args.noise_keys.contiguous(), args.first, best, TILES=a_program)
        assert best.score is not None and best.id is not None
        tile = best.score.argmax(-1, keepdim=True)  # the first of equals
        score, token = (of.gather(-1, tile)[..., 0] for of in (best.score, best.id))
        return nothing, torch.where(score > -torch.inf, token, -1).to(torch.int64), score
    draft, weights = draft_of(args), args.weights.contiguous()
    points = None if args.point_tokens is None else (args.point_tokens - args.first).contiguous()
    if args.masses is not None and args.uniform_samples is not None:
        token, all_tiles = torch.empty(batch, n, dtype=torch.int64, device=device), args.masses.shape[2]
        run(
            draw, (batch * n,), target, n, draft, points, weights, args.masses.contiguous(),
            args.uniform_samples.contiguous(), args.first, all_tiles, token,
            TILES=tiles_at_once(all_tiles * TILE.value),
        )  # fmt: skip
        return nothing, token, nothing
    stats = scan_shard(rows, batch, n, make_temperature(args.params))
    out = torch.empty(batch, n, tiles, dtype=torch.float32, device=device)
    run(masses, grid, target, n, tiles, draft, points, weights, stats.maximum, stats.mass, out, TILES=a_program)
    return out, nothing.to(torch.int64), nothing
