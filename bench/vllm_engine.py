"""vLLM with and without the plug-in, in one run: tokens a second, and the time of a step spent in the sampler.

``make bench-vllm``. Four engines run one after the other, each in a process of its own: without speculation, with
n-gram drafts in vLLM as it is, the same with `expand_batch_to_tokens` mended (vLLM 0.32 leaves its result unwritten on
a CPU), and with the plug-in. The sampler's time is the median over the steps; tokens a second are those of the whole
engine, on the same prompts, the median of the rounds. Both are measured by the clock and, as machines may be doing
other work, in CPU seconds of all threads; the ratios are made from the latter. A case in which an engine fails says
how.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from integration_tests.vllm.engine import ENVIRONMENT, speculation
from specdec_kernels.options import POSITIVE

from . import machine

ENGINES = ("none", "stock", "mended", "plug-in")
CASES = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
PROMPTS = "code-edit"
Row = dict[str, Any]


def now() -> np.ndarray:
    """Seconds by the clock, and CPU seconds of all threads of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def time_samplers(seconds: list[np.ndarray]) -> None:
    """Append the time that each step spends in vLLM's samplers, as `now` counts, in the outermost of their calls."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    depth = 0
    for owner in (RejectionSampler, Sampler):
        inner = owner.forward

        @functools.wraps(inner)
        def forward(*args: Any, inner: Any = inner, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            began = now()
            try:
                return inner(*args, **options)
            finally:
                depth -= 1
                if depth == 0:
                    seconds.append(now() - began)

        owner.forward = forward


def measure(engine: str, batches: Sequence[int], tokens: int, rounds: int) -> list[Row]:
    """In this process: one row per case and batch size."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from specdec_kernels.assets import model_dir
    from specdec_kernels.assets.prompts import load_prompts
    from specdec_kernels.integrations.vllm import v1

    llm = LLM(
        model=str(model_dir()), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=max(batches),
        speculative_config=speculation("none" if engine == "none" else "ngram"), enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    if engine == "mended":
        import vllm.v1.sample.rejection_sampler as stock

        stock.expand_batch_to_tokens = v1.expand_batch_to_tokens
    in_sampler: list[np.ndarray] = []
    time_samplers(in_sampler)
    tokenizer = AutoTokenizer.from_pretrained(model_dir(), local_files_only=True)
    texts = [tokenizer.encode(t, add_special_tokens=False) for t in load_prompts(PROMPTS, tokenizer, max(batches))]
    rows: list[Row] = []
    for case, params in CASES.items():
        for batch in batches:
            row: Row = {"case": case, "batch": batch, "engine": engine}
            rows.append(row)
            given = [{"prompt_token_ids": text} for text in texts[:batch]]
            rates = []
            try:
                for index in range(rounds + 1):  # the first warms up
                    if index == 1:
                        in_sampler.clear()
                    began = now()
                    asked = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=index, **params)
                    out = llm.generate(given, asked, use_tqdm=False)
                    rates.append(sum(len(request.outputs[0].token_ids) for request in out) / (now() - began))
            except Exception as error:  # whatever kernels and engine raise is what gets reported
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
                return rows
            row["tokens_per_s"], row["tokens_per_cpu_s"] = np.median(rates[1:], 0).tolist()
            row["sampler_us"], row["sampler_cpu_us"] = (np.median(in_sampler, 0) * 1e6).tolist()
            row["steps"] = len(in_sampler)
    return rows


def add_ratios(rows: Sequence[Row]) -> None:
    """CPU time in the sampler over the plug-in's, and the plug-in's tokens per CPU second over the engine's."""
    ours = {(row["case"], row["batch"]): row for row in rows if row["engine"] == "plug-in"}
    for row in rows:
        best = ours.get((row["case"], row["batch"]), {})
        if "failed" not in row and "sampler_cpu_us" in best:
            row["sampler_ratio"] = row["sampler_cpu_us"] / best["sampler_cpu_us"]
            row["speedup"] = best["tokens_per_cpu_s"] / row["tokens_per_cpu_s"]


def print_table(rows: Sequence[Row]) -> None:
    print("case       batch engine    sampler, CPU ms a step   × plug-in's   tokens/CPU s   plug-in's ×")
    for row in sorted(rows, key=lambda r: (list(CASES).index(r["case"]), r["batch"])):
        head = f"{row['case']:10} {row['batch']:5} {row['engine']:9}"
        if "failed" in row:
            print(head, "fails:", row["failed"])
        else:
            sampler, rate = row["sampler_cpu_us"] / 1e3, row["tokens_per_cpu_s"]
            ratio, speedup = (row.get(name, float("nan")) for name in ("sampler_ratio", "speedup"))
            print(f"{head} {sampler:22.2f} {ratio:13.1f} {rate:14.1f} {speedup:13.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_engine", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--batch", nargs="+", type=POSITIVE, default=[1, 8])
    parser.add_argument("--max-new-tokens", type=POSITIVE, default=48, help="tokens of each answer (default 48)")
    parser.add_argument("--rounds", type=POSITIVE, default=3)
    parser.add_argument("--save", action="store_true", help="write bench/results/<machine>/vllm_engine.json")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)  # for each engine's own process
    arguments = parser.parse_args(argv)
    if arguments.measure:
        measured = measure(arguments.engines[0], arguments.batch, arguments.max_new_tokens, arguments.rounds)
        Path(arguments.measure).write_text(json.dumps(measured))
        return 0
    rows: list[Row] = []
    for engine in arguments.engines:
        given = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SPECDEC_VLLM": str(int(engine == "plug-in"))}
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            command = [sys.executable, "-m", "bench.vllm_engine", "--measure", out.name, "--engines", engine, "--batch"]
            command += [
                *map(str, arguments.batch),
                "--max-new-tokens",
                str(arguments.max_new_tokens),
                "--rounds",
                str(arguments.rounds),
            ]
            done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
            if done.returncode:  # before its first case, for example if it does not start
                print(f"{engine}: {done.stderr[-2000:]}", file=sys.stderr)
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                failed: Row = {"engine": engine, "failed": said[-1][:200]}
                rows += [failed | {"case": case, "batch": batch} for case in CASES for batch in arguments.batch]
            else:
                rows += json.loads(Path(out.name).read_text())
    add_ratios(rows)
    print_table(rows)
    if arguments.save:
        settings = {k: v for k, v in vars(arguments).items() if k not in ("save", "measure")} | {"prompts": PROMPTS}
        print("written:", machine.save(None, "vllm_engine", rows, settings))
    return 1 if any("failed" in row and row["engine"] == "plug-in" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
