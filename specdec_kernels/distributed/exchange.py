"""What ranks tell each other: one all-gather a round, of all that the round needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..checks import check_instance

OP = "distributed.verify_chain"


class Exchange:
    """The ranks of a process group, and what this one has sent.

    Attributes
    ----------
    rank, world : int
        Of the group.
    sent : dict of str to int
        Bytes that this rank has given to each round, by the round's name.
    launches : Counter of str
        Collectives that each round took.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(f"{OP}: torch.distributed must be initialised, and is not")
        outside = group is dist.GroupMember.NON_GROUP_MEMBER  # what `new_group` gives to ranks that it leaves out
        if group is not None and not outside:
            check_instance(OP, "group", group, dist.ProcessGroup, "a ProcessGroup or None")
        if outside or dist.get_rank(group) < 0:
            raise ValueError(f"{OP}: group must have this rank in it, and has not")
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.sent: dict[str, int] = {}
        self.launches: Counter[str] = Counter()

    def gather(self, name: str, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Every rank's `tensors`, by rank. Shapes and dtypes are the same on all."""
        message = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors])
        self.sent[name] = self.sent.get(name, 0) + message.numel()
        self.launches[name] += bool(message.numel())
        try:
            parts = self._all_gather(message) if message.numel() else [message] * self.world
        except RuntimeError as error:
            raise RuntimeError(
                f"{OP}: rank {self.rank} of {self.world} got no {name} from another rank, which has ended, hangs or "
                f"was called with other shapes: {error}"
            ) from error
        return [self._unpacked(part, tensors) for part in parts]

    def _all_gather(self, message: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        parts = [torch.empty_like(message) for _ in range(self.world)]
        dist.all_gather(parts, message, group=self.group)
        return parts

    @staticmethod
    def _unpacked(part: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pieces = part.split([t.numel() * t.element_size() for t in like])
        # a copy of each: a dtype's elements must lie at multiples of their size
        return tuple(p.clone().view(t.dtype).view(t.shape) for p, t in zip(pieces, like, strict=True))
