"""The rows of a sharded vocabulary: what each rank finds in its tiles, and what all make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends.reference.law import SLACK, clean, make_params
from ..backends.reference.reads import any_flag
from ..ops.arguments import TILE
from ..ops.merge_shards import merge_shards
from ..ops.shard_draw import shard_draw
from ..ops.shard_stats import shard_stats
from ..sampling import SamplingParams
from ..types import RowStats, ShardStats, Status
from .exchange import Exchange
from .layout import Layout


@dataclass(frozen=True)
class Shard:
    """One rank's part, and its way to the others'."""

    exchange: Exchange
    layout: Layout
    backend: str | None

    @property
    def first(self) -> int:
        """First id of this rank's tiles."""
        return self.layout.first_tiles[self.exchange.rank] * TILE

    @property
    def tiles(self) -> int:
        """How many there are of them."""
        return self.layout.tiles(self.exchange.rank)

    def pick(self, rows: Tensor, ids: Tensor) -> Tensor:
        """``rows[..., ids]`` as float32 where this rank has the id, 0 elsewhere, ``[batch, n]`` as `ids`."""
        local = ids - self.first
        here = (local >= 0) & (local < rows.shape[-1])
        if not rows.shape[-1]:
            return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        found = rows.gather(-1, local.clamp(0, rows.shape[-1] - 1)[..., None])[..., 0].float()
        return torch.where(here, found, 0.0)

    def of_owner(self, told: list[Tensor], ids: Tensor) -> Tensor:
        """Of every rank's answers about `ids`, those of the rank that has the id."""
        return torch.stack(told).gather(0, self.layout.owner(ids)[None])[0]

    def padded(self, of_tiles: Tensor, value: float = 0.0) -> Tensor:
        """``[..., tiles of this rank]``, as wide as the widest rank's."""
        return torch.nn.functional.pad(of_tiles, (0, self.layout.most_tiles - of_tiles.shape[-1]), value=value)

    def in_order(self, told: list[Tensor]) -> Tensor:
        """``[..., tiles]`` of all ranks' tiles, from what they said."""
        return torch.cat([of[..., : self.layout.tiles(rank)] for rank, of in enumerate(told)], -1)

    def whole(self, *rows: Tensor) -> list[Tensor]:
        """``[..., vocab]`` of rows of which each rank has its tiles ``[..., ids]``."""
        most = max(map(self.layout.ids, range(self.exchange.world)))
        given = [torch.nn.functional.pad(x, (0, most - x.shape[-1])) for x in rows]
        told = self.exchange.gather("whole rows", *given)
        return [
            torch.cat([of[i][..., : self.layout.ids(rank)] for rank, of in enumerate(told)], -1)
            for i in range(len(rows))
        ]

    def own_masses(self, rows: Tensor, *args: object, **of_draft: object) -> Tensor:
        """`shard_draw`'s masses of this rank's tiles ``[batch, n, tiles]``."""
        if not self.tiles:
            return torch.zeros(*rows.shape[:2], 0, dtype=torch.float32, device=rows.device)
        made = shard_draw(rows, *args, first=self.first, backend=self.backend, **of_draft).masses  # type: ignore[arg-type]
        assert made is not None
        return made

    def told_masses(self, name: str, mine: Tensor) -> Tensor:
        """Those of all tiles ``[batch, n, tiles]``."""
        return self.in_order([told[0] for told in self.exchange.gather(name, self.padded(mine))])


@dataclass(frozen=True)
class ShardRows:
    """This rank's tiles of some rows, and the whole rows' distributions.

    Attributes
    ----------
    own : Tensor
        ``[batch, n, ids]``.
    stats : RowStats
        ``[batch, n]``.
    one_hot : Tensor
        ``[batch, n]`` bool: all mass is on the argmax.
    at, prob : Tensor
        ``[batch, n]``: for one id per row, what the row has there, as float32, and its probability.
    """

    own: Tensor
    stats: RowStats
    one_hot: Tensor
    at: Tensor
    prob: Tensor

    def some(self, sequences: Tensor) -> ShardRows:
        """Those of some sequences, by their numbers."""
        stats = RowStats(*(of[sequences] for of in self.stats))
        return ShardRows(self.own[sequences], stats, self.one_hot[sequences], self.at[sequences], self.prob[sequences])


@dataclass(frozen=True)
class RowsRead:
    """Rows that are to be read: ``own [batch, n, ids]``, of each the probability of ``ids [batch, n]``."""

    own: Tensor
    ids: Tensor
    params: SamplingParams
    probs: bool = False


@dataclass(frozen=True)
class Largest:
    """The largest logits of rows ``[batch, n]``, so many of each rank.

    Attributes
    ----------
    ids : Tensor
        ``[batch, n, most]`` int64, of each rank in turn; the vocabulary's size where it has no more above −inf.
    logits : Tensor
        The same, in the rows' dtype.
    also : Tensor or None
        What another tensor has there, whose rows may be fewer.
    nan : Tensor
        ``[batch, n, ranks]`` int64: an id that is NaN, the vocabulary's size where there is none.
    floor : Tensor
        ``[batch, n]`` float32: every logit above it is among these.
    """

    ids: Tensor
    logits: Tensor
    also: Tensor | None
    nan: Tensor
    floor: Tensor

    def values(self, vocab: int) -> Tensor:
        """The logits as float32, −inf where there is none."""
        return torch.where(self.ids < vocab, self.logits.float(), -math.inf)


@dataclass(frozen=True)
class Listed:
    """Rows ``own [batch, n, ids]`` of which each rank tells the `length` largest logits, and what `also` has there."""

    own: Tensor
    length: int
    also: Tensor | None = None


def read_rows(shard: Shard, asked: list[RowsRead], listed: list[Listed]) -> tuple[list[ShardRows], list[Largest]]:
    """All of them in one round: each tile's maximum and mass, of each row the argmax, the flags and one logit; and the
    largest logits of those that are cut.
    """
    given = [own_stats(shard, rows) for rows in asked] + [own_largest(shard, rows) for rows in listed]
    told = shard.exchange.gather("stats and largest logits", *(tensor for group in given for tensor in group))
    parts: list[list[tuple[Tensor, ...]]] = []  # of each of those, what every rank told
    first = 0
    for group in given:
        parts.append([of[first : first + len(group)] for of in told])
        first += len(group)
    return (
        [merge_rows(shard, rows, of) for rows, of in zip(asked, parts, strict=False)],
        [merge_largest(shard, of) for of in parts[len(asked) :]],
    )


def own_stats(shard: Shard, rows: RowsRead) -> list[Tensor]:
    """What `merge_rows` takes of this rank's tiles."""
    batch, n = rows.own.shape[:2]
    nothing = torch.empty(batch, n, 0, dtype=torch.float32, device=rows.own.device)
    found = ShardStats(
        nothing, nothing, torch.zeros(batch, n, dtype=torch.int64, device=rows.own.device),
        torch.zeros(batch, n, dtype=torch.int32, device=rows.own.device),
    )  # fmt: skip
    if shard.tiles:
        found = shard_stats(rows.own, rows.params, probs=rows.probs, backend=shard.backend)
    return [
        shard.padded(found.tile_max, -math.inf), shard.padded(found.tile_mass), found.argmax + shard.first,
        found.status, shard.pick(rows.own, rows.ids),
    ]  # fmt: skip


def own_largest(shard: Shard, rows: Listed) -> list[Tensor]:
    """What `merge_largest` takes of this rank's tiles."""
    own, vocab = rows.own, shard.layout.vocab
    nan = torch.full(own.shape[:2], vocab, device=own.device)
    if own.shape[-1]:
        missing = own.isnan()
        nan = torch.where(missing.any(-1), shard.first + missing.int().argmax(-1), vocab)
    x = clean(own)
    taken = x.topk(min(rows.length, own.shape[-1])).indices
    return [nan, *listed_at(shard, rows, taken, x.gather(-1, taken) > -math.inf, rows.length)]


def listed_at(shard: Shard, rows: Listed, taken: Tensor, valid: Tensor, length: int) -> list[Tensor]:
    """The ids of places `taken` where they are `valid`, and what the rows have there, each `length` long."""
    room = (0, length - taken.shape[-1])
    vocab = shard.layout.vocab
    ids = torch.nn.functional.pad(torch.where(valid, taken + shard.first, vocab), room, value=vocab).to(torch.int32)
    given = [ids, torch.nn.functional.pad(rows.own.gather(-1, taken), room)]
    if rows.also is not None:
        given.append(torch.nn.functional.pad(rows.also.gather(-1, taken[:, : rows.also.shape[1]]), room))
    return given


def merge_largest(shard: Shard, told: list[tuple[Tensor, ...]]) -> Largest:
    """The lists of all ranks."""
    nan = torch.stack([of[0] for of in told], -1)
    ids, logits, *also = (torch.cat([of[i] for of in told], -1) for i in range(1, len(told[0])))
    found = Largest(ids.long(), logits, also[0] if also else None, nan, nan)
    last = found.values(shard.layout.vocab).unflatten(-1, (len(told), -1))[..., -1]
    return replace(found, floor=last.amax(-1))


def merge_rows(shard: Shard, rows: RowsRead, told: list[tuple[Tensor, ...]]) -> ShardRows:
    """What the whole rows are."""
    tile_max, tile_mass = (shard.in_order([of[i] for of in told]) for i in (0, 1))
    at = shard.of_owner([of[4] for of in told], rows.ids)
    values, prob = merge_shards(tile_max, tile_mass, at, rows.params, probs=rows.probs, backend=shard.backend)
    maximum, valid = values[..., 0], make_params(values.shape[0], values, rows.params._flat)
    maxima = torch.stack([of[0].amax(-1) for of in told])
    owner = (maxima == maximum).int().argmax(0)
    argmax = torch.stack([of[2] for of in told]).gather(0, owner[None])[0]
    argmax = torch.where(maximum == -math.inf, 0, argmax)
    flags = torch.stack([of[3] for of in told], -1)
    status = any_flag(flags, torch.ones_like(flags, dtype=torch.bool)).to(torch.int32)
    if rows.probs:
        bad = (status != 0) | ~((values[..., 3] - 1).abs() <= SLACK)
        status = status | torch.where(bad, int(Status.BAD_DRAFT), 0).to(torch.int32)
        prob = torch.where((at >= 0) & ~bad, at, 0.0)
        return ShardRows(rows.own, RowStats(values, argmax, status), torch.zeros_like(bad), at, prob)
    status = status | torch.where(maximum == math.inf, int(Status.INF), 0).to(torch.int32)
    status = status | torch.where(maximum == -math.inf, int(Status.EMPTY_ROW), 0).to(torch.int32)
    one_hot = valid.greedy | maximum.isinf()
    prob = torch.where(one_hot, (rows.ids == argmax).to(prob.dtype), prob)
    return ShardRows(rows.own, RowStats(values, argmax, status | valid.status[:, None]), one_hot, at, prob)
