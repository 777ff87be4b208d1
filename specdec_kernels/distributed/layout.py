"""Which rank has which ids, and which tiles.

Sums over a row are made of tiles of 1024 ids, so the rank that adds up a tile must have all of it. A tile belongs to
the rank that has its first id; the ids of it that lie in later shards are handed to that rank, 1023 a border and row at
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..checks import check_sequence
from ..ops.arguments import TILE, tiles_of
from .exchange import OP, Exchange


@dataclass(frozen=True)
class Layout:
    """Shards of a vocabulary, one a rank, in their order.

    Attributes
    ----------
    widths : tuple of int
        Ids of each shard.
    """

    widths: tuple[int, ...]

    @property
    def vocab(self) -> int:
        return sum(self.widths)

    @property
    def starts(self) -> list[int]:
        """First id of each shard, then the end of the last."""
        return [0, *accumulate(self.widths)]

    @property
    def first_tiles(self) -> list[int]:
        """First tile of each rank; a rank has those before the next one's."""
        return [tiles_of(start) for start in self.starts]

    def tiles(self, rank: int) -> int:
        """How many tiles a rank has."""
        return self.first_tiles[rank + 1] - self.first_tiles[rank]

    def ids(self, rank: int) -> int:
        """How many ids those hold."""
        first, stop = (min(tile * TILE, self.vocab) for tile in self.first_tiles[rank : rank + 2])
        return stop - first

    @property
    def most_tiles(self) -> int:
        return max(map(self.tiles, range(len(self.widths))))

    def strays(self, rank: int) -> int:
        """How many of a shard's ids, its first ones, lie in an earlier rank's tile."""
        start, stop = self.starts[rank : rank + 2]
        return min(stop, self.first_tiles[rank] * TILE) - start

    @property
    def most_strays(self) -> int:
        return max(map(self.strays, range(len(self.widths))))

    def owner(self, ids: Tensor) -> Tensor:
        """The rank whose tile each id is in."""
        ends = torch.tensor(self.first_tiles[1:], device=ids.device)
        return torch.bucketize(torch.div(ids, TILE, rounding_mode="floor"), ends, right=True)


def layout_of(exchange: Exchange, width: int, widths: Sequence[int] | None, device: torch.device) -> Layout:
    """The layout for the widths given, or for those that the ranks tell each other."""
    if widths is None:
        told = exchange.gather("widths", torch.tensor([width], device=device))
        widths = [int(one) for (one,) in told]
    else:
        check_sequence(OP, "widths", widths, int, "integers")
    if len(widths) != exchange.world or widths[exchange.rank] != width or min(widths) < 1:
        raise ValueError(
            f"{OP}: widths must be >= 1 and those of {exchange.world} shards, this rank's {width}, got {list(widths)}"
        )
    layout = Layout(tuple(widths))
    if layout.vocab <= TILE:
        raise ValueError(f"{OP}: target_logits must have more than {TILE} ids over all ranks, got {layout.vocab}")
    return layout


def own_tiles(exchange: Exchange, layout: Layout, rows: list[Tensor]) -> list[Tensor]:
    """Of each ``[batch, n, width]`` the ids of this rank's tiles ``[batch, n, ids]``, with those of later shards."""
    rank, most = exchange.rank, layout.most_strays
    if most == 0 or not rows:
        return rows
    strays = layout.strays(rank)
    given = [torch.nn.functional.pad(x[..., :strays], (0, most - strays)) for x in rows]
    told = exchange.gather("ids of tiles that shards share", *given)
    end = layout.first_tiles[rank + 1] * TILE
    later = [r for r in range(rank + 1, exchange.world) if layout.tiles(rank) and layout.starts[r] < end]
    return [
        torch.cat([x[..., strays:], *(told[r][i][..., : layout.strays(r)] for r in later)], -1)
        for i, x in enumerate(rows)
    ]
