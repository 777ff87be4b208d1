"""The n-gram index, compiled and in Python: time per appended token, proposal and distribution, and memory.

Run ``python -m bench.host_index``; ``--save`` keeps the result. The text is a random walk over repeated phrases, so
that most suffixes have an earlier occurrence, as in code; the index is the default one (suffixes of 1 to 4 tokens).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from specdec_kernels import _host_py, host
from specdec_kernels.commands import ended
from specdec_kernels.options import POSITIVE

from . import machine

BATCH = 8
NUM_TOKENS = 5


def text(length: int, seed: int, vocab: int = 32000) -> NDArray[np.int64]:
    """Return [length] int64: phrases of 2 to 20 tokens, drawn from 400 with Zipf's frequencies."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, vocab, rng.integers(2, 21)) for _ in range(400)]
    ranks = np.minimum(rng.zipf(1.3, length), 400) - 1
    return np.concatenate([phrases[rank] for rank in ranks])[:length]


def seconds(function: Callable[[], Any], repeats: int, calls: int = 1) -> float:
    """Return the median over `repeats` of the time of one call, in seconds; each sample runs `calls` of them."""
    return statistics.median(timeit.repeat(function, repeat=repeats, number=calls)) / calls


def measure(new_index: Any, context: int, repeats: int) -> dict[str, float]:
    """Measure one implementation at one context length; the keys say the units."""
    texts = np.stack([text(context, seed) for seed in range(BATCH)])
    step = np.ascontiguousarray(texts[:, :NUM_TOKENS])

    def prefill() -> Any:
        index = new_index(BATCH)
        index.append_batch(texts)
        return index

    index = prefill()

    def append_and_undo() -> None:
        index.append_batch(step)
        for b in range(BATCH):
            index.truncate(b, context)

    return {
        "prefill_per_token_us": 1e6 * seconds(prefill, repeats) / (BATCH * context),
        "append_and_undo_us": 1e6 * seconds(append_and_undo, repeats, 100),
        "propose_us": 1e6 * seconds(lambda: index.propose(NUM_TOKENS), repeats, 100),
        "distribution_us": 1e6 * seconds(index.distribution, repeats, 100),
        "sequences_with_a_match": float((index.propose(NUM_TOKENS)[1] > 0).sum()),
    }


def python_bytes(context: int) -> float:
    """Return the memory of one sequence in the pure-Python index, in bytes."""
    tracemalloc.start()
    index = _host_py.NgramIndex(1)
    index.append(0, text(context, 0))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(used)


def compiled_bytes(context: int, sequences: int = 64) -> float:
    """Return the memory of one sequence in the compiled index, in bytes: the growth of the resident set."""
    row = text(context, 0)
    process = psutil.Process()
    before = process.memory_info().rss
    index = host.NgramIndex(sequences)
    for b in range(sequences):
        index.append(b, row)
    return float(process.memory_info().rss - before) / sequences


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and, if asked, save the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_index", description=__doc__)
    parser.add_argument("--contexts", type=POSITIVE, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeats", type=POSITIVE, default=9)
    parser.add_argument("--save", action="store_true", help="write the result file of this machine")
    return ended("host_index", partial(_measured, parser.parse_args(argv)))


def _measured(arguments: argparse.Namespace) -> None:
    implementations: dict[str, tuple[Any, Callable[[int], float]]] = {"python": (_host_py.NgramIndex, python_bytes)}
    if host.COMPILED:
        implementations["compiled"] = (host.NgramIndex, compiled_bytes)
    rows = []
    for context in arguments.contexts:
        for name, (new_index, memory) in implementations.items():
            figures = measure(new_index, context, arguments.repeats)
            figures["sequence_bytes"] = memory(context)
            rows.append({"implementation": name, "context": context, **figures})
    print(f"B = {BATCH}, K = {NUM_TOKENS}; a step appends B x K tokens; medians of {arguments.repeats}")
    print(f"{'':10}{'context':>8}{'prefill':>15}{'step + undo':>14}{'propose':>11}{'distribution':>14}{'memory':>19}")
    for row in rows:
        print(
            f"{row['implementation']:10}{row['context']:8}{1000 * row['prefill_per_token_us']:9.1f} ns/tok"
            f"{row['append_and_undo_us']:11.1f} us{row['propose_us']:8.2f} us{row['distribution_us']:11.1f} us"
            f"{row['sequence_bytes'] / 1024:9.0f} KiB/sequence"
        )
    if arguments.save:
        settings = {"batch": BATCH, "num_tokens": NUM_TOKENS, "repeats": arguments.repeats}
        print(machine.save(None, "host_index", rows, settings))


if __name__ == "__main__":
    sys.exit(main())
