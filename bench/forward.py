"""``python -m bench.forward``: what one forward of the target costs, where its time goes, and what its floor is.

SmolLM2-135M-Instruct on the CPU; 1, 2, 4 and 8 rows of one sequence after a context of 128 tokens: in transformers,
unchanged and with packed weights, and in the loop of ``examples/own_loop.py``, in float32, with torch.compile and in
bfloat16. All ways take turns; times are medians. The floor is the bytes of weights that a forward reads, divided by the
rate at which ``torch.sum`` reads memory, with the same threads before and after. Where the time goes is
torch.profiler's account of the main thread: matrix products, attention, all other ops, and what lies between them
(Python).
"""

from __future__ import annotations

import bench.waiting  # noqa: F401  # isort: skip

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import machine, real_model, timing
from examples.own_loop import LeanLlama
from specdec_kernels import assets, pack_linear_weights
from specdec_kernels.decoding import Prompt, Runner
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.options import integer

ROWS = (1, 2, 4, 8)
CONTEXT = 128
PARTS = {  # of a forward, by words in the names of torch's ops
    "matrix products": ("linear", "addmm", "::mm", "::matmul", "mkldnn", "::bmm"),
    "attention": ("attention", "sdp"),
}
SHARES = (*PARTS, "other ops", "between ops")
GOALS = (("a plain step, float32, ms", 28.0), ("a step of eight rows over a step of one, float32", 1.25))


def weights_read(model: Any) -> int:
    """Bytes of the weights that a forward reads: all, except an embedding table that does not serve as the head too."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not table or p is head)


def ways(model: Any) -> dict[str, tuple[Runner, int]]:
    """Each way of running the model, with the bytes of weights that a forward reads."""
    packed = assets.load_model()[0]
    pack_linear_weights(packed)
    half = assets.load_model()[0].bfloat16()
    size = weights_read(model)
    return {
        "transformers": (as_runner(model, "bench.forward"), size),
        "transformers, packed": (as_runner(packed, "bench.forward"), size),
        "own loop": (LeanLlama(model), size),
        "own loop, compiled": (LeanLlama(model, compile=True), size),
        "own loop, bfloat16": (LeanLlama(half), size // 2),
    }


def forwards(runner: Runner, ids: torch.Tensor) -> dict[int, Callable[[], Any]]:
    """For each number of rows, a call that feeds so many after the context."""
    runner.start(Prompt(ids, torch.tensor([ids.shape[1]]), [ids[0].numpy()]), 2 * CONTEXT)
    runner.forward(ids[:, :CONTEXT], torch.tensor([0]), CONTEXT)
    start = torch.tensor([CONTEXT])
    return {n: partial(runner.forward, ids[:, CONTEXT : CONTEXT + n], start, CONTEXT + n) for n in ROWS}


def shares(call: Callable[[], Any], times: int = 20) -> dict[str, float]:
    """The parts of a call, as shares of its time; they sum to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        for _ in range(times):
            call()
        whole = (time.perf_counter() - began) * 1e6
    found = dict.fromkeys(SHARES, 0.0)
    for event in seen.key_averages():
        part = next((part for part, words in PARTS.items() if any(w in event.key for w in words)), "other ops")
        found[part] += event.self_cpu_time_total / whole
    found["between ops"] = 1 - sum(found.values())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and write ``forward.json`` into the machine's results folder."""
    parser = argparse.ArgumentParser(prog="python -m bench.forward", description="What a forward of the target costs.")
    parser.add_argument("--rounds", type=integer(2, 1000), default=30)
    real_model.add_common(parser)
    return real_model.run("forward", parser.parse_args(argv), _measured)


@torch.inference_mode()
def _measured(arguments: argparse.Namespace) -> None:
    model, _ = assets.load_model()
    ids = torch.randint(1000, (1, CONTEXT + max(ROWS)), generator=torch.Generator().manual_seed(0))
    runners = ways(model)
    calls = {(way, n): call for way, (runner, _) in runners.items() for n, call in forwards(runner, ids).items()}
    before = machine.read_gb_per_s()
    seconds = timing.take_turns(calls, arguments.rounds, warm_up=2)
    rate = max(before, machine.read_gb_per_s())
    rows: list[dict[str, Any]] = []
    for (way, n), samples in seconds.items():
        low, middle, high = statistics.quantiles(samples, n=4)
        row: dict[str, Any] = {
            "way": way, "rows": n, "median_us": middle * 1e6, "q25_us": low * 1e6, "q75_us": high * 1e6,
            "floor_us": runners[way][1] / rate / 1e3,
        } | shares(calls[way, n])  # fmt: skip
        rows.append(row)
        print(
            f"{way:22}{n} rows {row['median_us'] / 1e3:6.1f} ms, floor {row['floor_us'] / 1e3:.1f}: "
            + ", ".join(f"{part} {row[part]:.0%}" for part in SHARES),
            flush=True,
        )
    targets = goals(rows)
    for target in targets:
        print(f"{target['what']}: {target['measured']:.2f} (goal {target['target']})")
    settings = {"rounds": arguments.rounds, "threads": arguments.threads, "context": CONTEXT, "read_gb_per_s": rate}
    print(f"written: {machine.save(arguments.output, 'forward', rows, settings, targets)}")


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals for the own loop in float32."""
    one, eight = (next(r["median_us"] for r in rows if (r["way"], r["rows"]) == ("own loop", n)) for n in (1, 8))
    measured = (one / 1e3, eight / one)
    return [
        {"what": what, "target": goal, "measured": value, "reached": value <= goal}
        for (what, goal), value in zip(GOALS, measured, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
