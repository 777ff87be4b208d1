"""Top-p of rows whose mass is spread over the ranks: the cut-off is searched for by what ranges of logits weigh.

In each round a range is split into `BINS` parts; every rank sends the mass and the number of its ids in each part, and
the part in which the mass reaches its goal is the next range. Once that holds few ids, all that may be kept are sent,
and every rank finds the cut-off among them. Weights are integers, so ranks agree in whatever order they are added.

The op adds the same weights as floats, each backend in its own way. Where the mass at a cut-off comes so near to its
goal that those sums could end on either side of it (`ROUNDING`), only the op itself can tell what it finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.reference.law import TOP_P_REACHED, exp, make_params
from ..sampling import SamplingParams
from .rows import Shard

BINS = 256
FEW = 256  # ids that a range may hold at last
ROUNDING = 2.0**-19  # of a row's mass: how far off a backend's sums may be; at most 2^-21 was seen


def key_of(x: Tensor) -> Tensor:
    """float32 as int64 of the same order; both zeros are one number."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def from_key(key: Tensor) -> Tensor:
    """The float32 of a key."""
    size = key.abs().to(torch.int32).view(torch.float32)
    return torch.where(key < 0, -size, size)


LOWEST = -0x7F7FFFFF  # key of the lowest finite float32


@dataclass(frozen=True)
class TopP:
    """The weights of the ids of rows ``[batch, n]``, and how much of them top-p has to reach; in rows that it does not
    look at, all weights are 0.

    Attributes
    ----------
    looked : Tensor
        ``[batch, n]`` bool.
    maximum, temperature, inverse_temperature : Tensor
        ``[batch, n, 1]`` float32.
    share : Tensor
        ``[batch, n, 1]`` float32: the share of a row's mass that is to be reached.
    total : Tensor
        ``[batch, n, 1]`` float64: that mass, as the op has it.
    vocab : int
        Ids of a row.
    """

    looked: Tensor
    maximum: Tensor
    temperature: Tensor
    inverse_temperature: Tensor
    share: Tensor
    total: Tensor
    vocab: int

    @classmethod
    def of(cls, values: Tensor, params: SamplingParams, wanted: list[bool], vocab: int) -> TopP:
        """Of the sequences that are `wanted`; `values [batch, n, 6]` are those of the uncut rows."""
        valid = make_params(len(values), values, params._flat)
        maximum, ones = values[..., :1], torch.ones_like(values[..., :1])
        looked = torch.tensor(wanted, device=values.device)[:, None, None] & ~maximum.isinf()
        assert valid.top_p is not None
        return cls(
            looked[..., 0], torch.where(looked, maximum, 0.0), valid.temperature[..., None] * ones,
            valid.inverse_temperature[..., None] * ones, valid.top_p[..., None] * TOP_P_REACHED * ones,
            values[..., 3:4].double(), vocab,
        )  # fmt: skip

    @property
    def unit(self) -> float:
        """A weight of 1 as an integer; a row's sum fits 62 bits."""
        return 2.0 ** (62 - self.vocab.bit_length())

    def weigh(self, x: Tensor) -> Tensor:
        """``[batch, n, ids]`` int64 of logits."""
        shifted = (x - self.maximum) * self.inverse_temperature  # in float32, as kernels do
        weights = exp(torch.where(self.looked[..., None], shifted, -math.inf).double())
        return (weights * self.unit).round().to(torch.int64)

    def goal(self, off: float) -> Tensor:
        """``[batch, n, 1]`` int64, with `off` of the row's mass added."""
        return ((self.share.double() + off) * self.total * self.unit).ceil().to(torch.int64)

    def first_range(self) -> Tensor:
        """``[batch, n, BINS + 1]``: the keys at which parts of a whole row begin, evenly spaced in value down to the
        lowest possible cut-off: all that is lower weighs an eighth of what may be cut.
        """
        rest = (1 - self.share).clamp_min(2.0**-18) * self.total.float() / (8 * self.vocab)
        steps = torch.linspace(1, 0, BINS, dtype=torch.float32, device=rest.device)
        edges = key_of(self.maximum + rest.log() * self.temperature * steps)
        highest = key_of(self.maximum) + 1
        return torch.cat([torch.full_like(highest, LOWEST), edges.clamp_min(LOWEST)[..., :-1], highest], -1)

    def cutoff(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The cut-offs ``[batch, n]`` of rows of which `x` has all ids that may be kept ``[batch, n, ids]``, and where
        the op may find another.
        """
        values = x.sort(-1, descending=True).values
        until = self.weigh(values).cumsum(-1)

        def reaching(goal: Tensor) -> Tensor:
            place = (until < goal).sum(-1, keepdim=True).clamp_max(x.shape[-1] - 1)
            return values.gather(-1, place)[..., 0]

        found = reaching(self.goal(ROUNDING))
        return found, self.looked & (found != reaching(self.goal(-ROUNDING)))


def bounds(shard: Shard, x: Tensor, top_p: TopP, most: int) -> Tensor:
    """Bounds ``[batch, n]`` from which on ids may be kept; of the ids above one, at most `FEW`, or those of one value,
    are not kept. Where more than `most` are kept, any bound that they reach. `x [batch, n, ids]` are this rank's
    logits.
    """
    weights = top_p.weigh(x)
    keys = torch.where(weights > 0, key_of(x), LOWEST - 1)
    goal, edges = top_p.goal(ROUNDING), top_p.first_range()
    above, higher = torch.zeros_like(goal), torch.zeros_like(goal)  # than the range: their mass, and their number
    places = torch.arange(BINS + 1, device=x.device)
    while True:
        part = torch.searchsorted(edges, keys, right=True)  # 0 and BINS + 1: elsewhere
        room = torch.zeros(*x.shape[:2], BINS + 2, dtype=torch.int64, device=x.device)
        mass = room.scatter_add(-1, part, weights)[..., 1:-1]
        count = room.scatter_add(-1, part, torch.ones_like(part))[..., 1:-1].to(torch.int32)
        told = shard.exchange.gather("masses of ranges", mass, count)
        mass, count = (torch.stack([of[i] for of in told]).sum(0) for i in (0, 1))
        upwards, number = (of.flip(-1).cumsum(-1).flip(-1) for of in (mass, count))
        found = ((above + upwards >= goal).sum(-1, keepdim=True) - 1).clamp_min(0)  # the last part to reach it
        above = above + (upwards - mass).gather(-1, found)
        higher = higher + (number - count).gather(-1, found)
        low, high = edges.gather(-1, found), edges.gather(-1, found + 1)
        if not ((count.gather(-1, found) > FEW) & (high - low > 1) & (higher <= most)).any():
            return from_key(low)[..., 0]
        edges = low + (high - low) * places // BINS
