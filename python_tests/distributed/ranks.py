"""Ranks in one process: threads of which one runs at a time, so that every backend can be sharded without processes."""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.distributed.exchange import Exchange

SHARDED = ("target_logits", "draft_logits", "draft_probs")


class Ranks:
    """So many threads that wait for each other, and hand on the right to run."""

    def __init__(self, world: int) -> None:
        self.world, self.turn, self.barrier = world, threading.Lock(), threading.Barrier(world, timeout=120)
        self.told: list[Any] = [None] * world
        self.sent: list[dict[str, int]] = [{} for _ in range(world)]
        self.launches: list[Counter[str]] = [Counter() for _ in range(world)]


class Thread(Exchange):
    """What a rank among `Ranks` exchanges by; `group` is they and its number."""

    def __init__(self, group: tuple[Ranks, int]) -> None:
        self.ranks, self.rank = group
        self.world, self.group = self.ranks.world, None
        self.sent, self.launches = self.ranks.sent[self.rank], self.ranks.launches[self.rank]

    def _all_gather(self, message: Tensor) -> list[Tensor]:
        ranks = self.ranks
        ranks.told[self.rank] = message.clone()
        ranks.turn.release()
        try:
            ranks.barrier.wait()
            told = list(ranks.told)
            ranks.barrier.wait()
        finally:
            ranks.turn.acquire()
        sizes = {len(one) for one in told}
        assert len(sizes) == 1, f"ranks send messages of different sizes: {sizes}"
        return told


def on_every_rank(world: int, run: Callable[[Any, int], Any]) -> tuple[list[Any], Ranks]:
    """``run(group, rank)`` on each rank: its results, or the error of the first that raised one."""
    ranks, results, errors = Ranks(world), [None] * world, {}

    def one(rank: int) -> None:
        with ranks.turn:
            try:
                results[rank] = run((ranks, rank), rank)
            except BaseException as error:
                errors[rank] = error
                ranks.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    chain = importlib.import_module("specdec_kernels.distributed.chain")
    with mock.patch.object(chain, "Exchange", Thread):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    first = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)] or list(errors.values())
    if first:
        raise first[0]
    return results, ranks


def columns(arguments: dict[str, Any], widths: Sequence[int], rank: int) -> dict[str, Any]:
    """What a rank is given of a whole call's arguments."""
    start = sum(widths[:rank])
    return {k: v[..., start : start + widths[rank]] if k in SHARDED else v for k, v in arguments.items()}


def sharded(
    arguments: dict[str, Any], widths: Sequence[int], backend: str | None
) -> tuple[list[sk.VerifyOutput], Ranks]:
    """`sk.distributed.verify_chain` on each rank."""

    def run(group: Any, rank: int) -> sk.VerifyOutput:
        return sk.distributed.verify_chain(**columns(arguments, widths, rank), group=group, backend=backend)

    return on_every_rank(len(widths), run)


def same(whole: sk.VerifyOutput, of_ranks: Sequence[sk.VerifyOutput]) -> None:
    """Every rank has what the op gives on the whole rows."""
    for rank, out in enumerate(of_ranks):
        for name in ("tokens", "num_accepted", "num_tokens", "status"):
            got, wanted = getattr(out, name), getattr(whole, name)
            assert got.dtype == wanted.dtype and torch.equal(got, wanted), (rank, name, got, wanted)
