"""verify_chain over process groups: gloo, a process a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import specdec_kernels as sk
from python_tests.distributed.cases import RULES, make
from python_tests.distributed.ranks import columns, same

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
UNEVEN = {
    2: [(2048, 1024), (1300, 1500)],
    3: [(1024, 2048, 1024), (1500, 20, 2600)],
    4: [(1000, 3, 2000, 1500), (1024, 1024, 1024, 900)],
    8: [(700, 300, 1100, 1, 1024, 2000, 5, 900), (1024,) * 8],
}


def run_rank(
    rank: int, world: int, place: str, timeout: float, work: Callable[..., Any], answers: Connection, *more: Any
) -> None:
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world, timeout=wait)
    try:
        answers.send(work(rank, *more))
    except Exception as error:  # the parent raises it again
        answers.send(error)


def on_processes(world: int, tmp_path: Path, work: Callable[..., Any], *more: Any, timeout: float = 240) -> list[Any]:
    """What ``work(rank, *more)`` gives or raises on each rank; None where a rank ends without a word."""
    context, processes, answers = mp.get_context("forkserver"), [], []
    context.set_forkserver_preload([__name__])  # so that each rank does not import torch anew
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        given = (rank, world, str(tmp_path / "ranks"), timeout, work, theirs, *more)
        processes.append(context.Process(target=run_rank, args=given, daemon=True))
        processes[-1].start()
        theirs.close()
        answers.append(mine)
    said = []
    for mine in answers:
        try:
            said.append(mine.recv() if mine.poll(timeout + 120) else None)
        except EOFError:
            said.append(None)
    for process in processes:
        process.join(20)
        process.kill()
    return said


def every_case(rank: int, worlds: Sequence[int], names: Sequence[str]) -> int:
    """Each rule and layout, by groups of the first ranks; how many calls were compared."""
    compared = 0
    for world in worlds:
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        for widths in UNEVEN[world]:
            for name in names:
                arguments = make(name, sum(widths))
                out = sk.distributed.verify_chain(**columns(arguments, widths, rank), group=group)
                same(sk.verify_chain(**arguments), [out])
                compared += 1
    return compared


def check(answers: list[Any], expected: list[int]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    assert answers == expected


def test_two_and_three_ranks(tmp_path: Path) -> None:
    answers = on_processes(3, tmp_path, every_case, [2, 3], list(RULES))
    check(answers, [4 * len(RULES)] * 2 + [2 * len(RULES)])


@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(tmp_path: Path, world: int) -> None:
    check(on_processes(world, tmp_path, every_case, [world], list(RULES)), [2 * len(RULES)] * world)


def from_outside(rank: int) -> str:
    """What a rank is told of a group that it is not in."""
    group = dist.new_group([0])
    dist.barrier()  # a rank that is gone breaks the connections that another is still making
    if rank == 0:
        return ""
    with pytest.raises(ValueError) as caught:
        sk.distributed.verify_chain(**columns(make("token", 2800), (1300, 1500), rank), group=group)
    return str(caught.value)


def test_a_rank_outside_the_group_is_refused(tmp_path: Path) -> None:
    assert on_processes(2, tmp_path, from_outside)[1] == (
        "distributed.verify_chain: group must have this rank in it, and has not"
    )


def until_one_is_gone(rank: int, ends: bool) -> str:
    """The last rank ends, or sleeps, before its second call; what the others are told."""
    widths = (1300, 1500, 600)
    arguments = make("block", sum(widths))
    mine = columns(arguments, widths, rank)
    sk.distributed.verify_chain(**mine)
    if rank == 2:
        if ends:
            os._exit(0)
        time.sleep(30)  # the others give up after half of it
    with pytest.raises(RuntimeError) as caught:
        sk.distributed.verify_chain(**mine)
    return str(caught.value)


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.long)], ids=["ended", "silent"])
def test_a_rank_that_is_gone_is_an_error(tmp_path: Path, ends: bool) -> None:
    answers = on_processes(3, tmp_path, until_one_is_gone, ends, timeout=15.0)
    for rank in (0, 1):
        assert isinstance(answers[rank], str), answers[rank]  # None: it waits still
        assert answers[rank].startswith(f"distributed.verify_chain: rank {rank} of 3 got no ")
        assert "from another rank, which has ended, hangs or was called" in answers[rank]
