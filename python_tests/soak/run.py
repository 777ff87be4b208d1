"""Threads and processes of callers, interrupts among them, and the memory that they take."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .requests import Requests, Tally
from .uniformity import rejected

MOST_GROWTH = 24 << 20  # bytes of resident memory, from the second third of a run to the last


class Worker:
    """One process: callers in threads, and one in the main thread, which interrupts reach."""

    def __init__(self, seed: int, threads: int, deadline: float) -> None:
        self.callers = [Requests(seed * 1000 + index) for index in range(threads)]
        self.deadline, self.memory, self.interruptible = deadline, list[int](), False
        self.errors: list[str] = []

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.interruptible:
            raise KeyboardInterrupt

    def loop(self, caller: Requests) -> None:
        try:
            while time.time() < self.deadline:
                caller.run()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def run(self, ready: Any) -> Tally:
        """All callers until the deadline; says `ready` when it can be interrupted."""
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, self.interrupted)
        ready.set()
        own, *others = self.callers
        threads = [threading.Thread(target=self.loop, args=(caller,)) for caller in others]
        for thread in threads:
            thread.start()
        while time.time() < self.deadline:
            try:
                self.interruptible = True
                own.run()
            except KeyboardInterrupt:
                own.tally.counts["interrupted"] += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                break
            finally:
                self.interruptible = False
            self.memory.append(resident())
        for thread in threads:
            thread.join()
        whole = Tally()
        for caller in self.callers:
            whole.merge(caller.tally)
        whole.wrong += self.errors
        whole.wrong += grown(self.memory)
        return whole


def grown(memory: list[int]) -> list[str]:
    """What is wrong with the memory of a run, if something is."""
    third = len(memory) // 3
    if third < 20:
        return []
    before, after = statistics.median(memory[third : 2 * third]), statistics.median(memory[2 * third :])
    if after - before <= MOST_GROWTH:
        return []
    return [f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"]


def resident() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(seed: int, threads: int, deadline: float, ready: Any, results: Any) -> None:
    """What a process does."""
    results.put(Worker(seed, threads, deadline).run(ready))


def soak(minutes: float, threads: int, processes: int, seed: int) -> Tally:
    """Run it; what all callers saw."""
    context = multiprocessing.get_context("spawn")
    results, deadline = context.Queue(), time.time() + 60 * minutes
    workers = []
    for index in range(processes):
        ready = context.Event()
        given = (seed * 100 + index, threads, deadline, ready, results)
        workers.append((context.Process(target=work, args=given, daemon=True), ready))
        workers[-1][0].start()
    chance, whole = random.Random(seed), Tally()
    while (left := deadline - time.time()) > 0:
        time.sleep(min(chance.uniform(0.5, 5), left))
        worker, ready = chance.choice(workers)
        if time.time() < deadline - 1 and worker.is_alive() and worker.pid is not None and ready.is_set():
            os.kill(worker.pid, signal.SIGINT)
    done, patience = 0, time.time() + 120
    while done < processes and time.time() < patience:
        try:
            whole.merge(results.get(timeout=1))
            done += 1
        except queue.Empty:
            if not any(worker.is_alive() for worker, _ in workers):
                break
    if done < processes:
        whole.wrong.append(f"{processes - done} processes died, or did not end")
    if not whole.counts["requests"]:
        whole.wrong.append("no request was made")
    whole.wrong += [f"{name}: not its distribution (p = {p:.1e})" for name, p in rejected(whole.streams).items()]
    return whole
