"""What each cell of the pages' tables must hold, by the table's name and the words of its row and column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from python_tests.docs_gpu import goals_on_gpu, on_gpu, samples_on_gpu
from python_tests.docs_laws import CHOOSING, best_by_law, cost_by_law
from python_tests.docs_peers import best_peers, chain_with_avx2, span_of, tree_with_avx2
from python_tests.docs_tables import (
    BENCHMARKS,
    CASES,
    ICE_LAKE,
    INTEL,
    RESULTS,
    ROOT,
    Expected,
    against,
    results,
    row,
    size_of,
    tables,
)
from specdec_kernels import analysis

PLAN = RESULTS / "plan.json"
PAGES = (*BENCHMARKS, "docs/what-it-gains.md", CHOOSING, "README.md")
LOOKUP, NGRAMS = "greedy, lookup, K = 7", "T = 1, n-gram model, K = 3"  # columns


def chain(label: str, column: str) -> Expected:
    return against("verify_chain", CASES[column], size_of(label), ("eager", "compile", "transformers"))


def chain_in_bfloat16(label: str, column: str) -> Expected:
    peers = ("eager", "compile", "transformers")
    return against("verify_chain", CASES[column], size_of(label), peers, dtype="bfloat16")


def chain_more(label: str, column: str) -> Expected:
    return against("verify_chain", CASES[column], size_of(label), ("eager", "compile"))


def chain_variants(label: str, column: str) -> Expected:
    case, _, variant = column.partition(": ")
    name = {"no stats": "cpu, no draft_stats", "kept probs": "eager, kept draft_probs"}.get(
        variant, f"eager, {variant}"
    )
    return against("verify_chain", CASES[case], size_of(label), [name])[:1]


def tree(label: str, column: str) -> Expected:
    case = CASES[column]
    return against("verify_tree", case, size_of(label), [] if case == "traversal" else ["eager"])


def gather(label: str, column: str) -> Expected:
    case, vocab, batch = {
        "one layer, one sequence": ("overhead", 64, 1), "32 layers, one sequence": ("32 layers", 64, 1),
        "32 layers, eight sequences": ("32 layers", 64, 8),
    }[label]  # fmt: skip
    provider = "cpu" if column.startswith("ours") else "eager"
    at = {"case": case, "vocab": vocab, "batch": batch}
    time = row("gather_kv_", INTEL, provider=provider, **at)["median_us"]
    return [time] if "µs" in column else [time / row("gather_kv_", INTEL, provider="cpu", **at)["median_us"]]


def overhead(label: str, column: str) -> Expected:
    goals = results(label.strip("`"), INTEL)["targets"]
    (found,) = (t for t in goals if "overhead" in t["what"])
    return {"goal, µs": [found["target"]], "measured, µs": [found["measured"]]}.get(column, [])


def rates(label: str, column: str) -> Expected:
    wanted = {"case": CASES[column], "dtype": "float32", "cache": "cold", "provider": "cpu"}
    vocab, batch = size_of(label)
    return [row("verify_chain", INTEL, vocab=vocab, batch=batch, **wanted)["gb_per_s"]]


def best_peer(label: str, column: str) -> Expected:
    vocab, batch = size_of(label)
    what = f"{CASES[column]} V={vocab} B={batch}: cpu × best peer"
    (found,) = (t for t in results("verify_chain", INTEL)["targets"] if t["what"].startswith(what))
    return [found["measured"]]


def decoded(
    name: str, prompts: str, temperature: float, drafter: str, number: int | str, folder: Path = RESULTS
) -> Expected:
    """Tokens a second over plain decoding's, and tokens per step."""
    found = row(name, folder, prompts=prompts, temperature=temperature, drafter=drafter, num_speculative_tokens=number)
    return [found["ratio"], found["mean_acceptance_length"]]


def end_to_end(label: str, column: str) -> Expected:
    name, prompts = ("end_to_end_quote", "quote") if label == "quote, eight texts" else ("end_to_end", label)
    temperature, drafter, number = {
        LOOKUP: (0.0, "lookup", 7), NGRAMS: (1.0, "ngram-lm", 3),
    }[column]  # fmt: skip
    if name == "end_to_end_quote" and temperature:
        return []
    return decoded(name, prompts, temperature, drafter, number)


AUTO: dict[str, tuple[str, Path]] = {  # of lookups and n-gram models, by the number of sequences decoded together
    "one": ("end_to_end_auto", ICE_LAKE), "two": ("end_to_end_auto_2", ICE_LAKE),
    "four": ("end_to_end_auto_4", ICE_LAKE), "eight": ("end_to_end_auto_8", ICE_LAKE),
}  # fmt: skip
AUTO_MODEL = {  # of the trained draft model
    "one": ("end_to_end_auto_model", ICE_LAKE), "two": ("end_to_end_auto_model_2", ICE_LAKE),
    "four": ("end_to_end_auto_model_4", ICE_LAKE), "eight": ("end_to_end_auto_model_8", ICE_LAKE),
}  # fmt: skip


def adaptive(label: str, column: str, drafter: str = "lookup") -> Expected:
    """Times plain decoding, for one sequence at a time or several together; for "auto" with its interval."""
    prompts, sampling, size = label.split(", ")
    way, _, stops = column.partition(", ")
    number = "auto" if way == '"auto"' else int(way.removeprefix("K = "))
    of = AUTO_MODEL if drafter == "model" else AUTO
    name, folder = of[size]
    if number not in results(name, folder)["settings"]["lengths"]:
        return []
    found = row(
        name, folder, prompts=prompts, temperature=float(sampling != "greedy"), num_speculative_tokens=number,
        drafter=f"{drafter}, 0.4" if stops else drafter,
    )  # fmt: skip
    return [found[key] for key in (("ratio", "ratio_low", "ratio_high") if number == "auto" else ("ratio",))]


FIRST = {  # calls that begin anew: of lookups and n-gram models, and of the draft model
    size: ((f"end_to_end_first_{number}", ICE_LAKE), (f"end_to_end_first_model_{number}", INTEL))
    for size, number in (("one", 1), ("two", 2), ("four", 4), ("eight", 8))
}


def first_calls(label: str, column: str) -> Expected:
    """Times plain decoding, with "auto": by lookups, by the n-gram model and by the draft model."""
    prompts, sampling = label.split(", ")
    at = {"prompts": prompts, "temperature": float(sampling != "greedy")}
    lookups, model = FIRST[column]
    ways = ((lookups, "lookup"), (lookups, "ngram-lm"), (model, "model"))
    return [row(*run, drafter=drafter, **at)["ratio"] for run, drafter in ways]


AUTO_TREES = {"one": ("end_to_end_auto_trees", ICE_LAKE), "eight": ("end_to_end_auto_trees_8", ICE_LAKE)}


def adaptive_trees(label: str, column: str) -> Expected:
    """The same for lookups' trees: at every step, and for "auto" with its interval."""
    prompts, sampling, size = label.split(", ")
    nodes, auto = re.fullmatch(r'(\d+) nodes(, "auto")?', column).groups()  # type: ignore[union-attr]
    found = row(
        *AUTO_TREES[size], prompts=prompts, temperature=float(sampling != "greedy"),
        num_speculative_tokens=f"auto, {nodes}" if auto else int(nodes),
    )  # fmt: skip
    return [found[key] for key in (("ratio", "ratio_low", "ratio_high") if auto else ("ratio",))]


def replayed(label: str, column: str, name: str = "replay", folder: Path = INTEL) -> Expected:
    """The same by replay: for "auto" with the batches' tenth percentile, for the best fixed number with that number."""
    (prompts, sampling), (batch, way) = label.split(", "), column.split(": ")
    at = {"prompts": prompts, "temperature": float(sampling != "greedy"), "batch": int(batch)}
    if way == '"auto"':
        found = row(name, folder, num_speculative_tokens=way.strip('"'), **at)
        return [found["ratio"], found["ratio_low"]]
    fixed = [row(name, folder, num_speculative_tokens=length, **at) for length in (1, 3, 7)]
    best = max(fixed, key=lambda each: each["ratio"])
    return [best["ratio"], best["num_speculative_tokens"]]


def of_matches(label: str, column: str) -> Expected:
    """How often the first token after a match was right, and one that followed right ones, by the drafter."""
    drafter, what = column.split(": ")
    matched = 0 if label == "none" else int(label)
    if drafter == "lookup" and matched in (0, 4):
        return []
    found = row({"lookup": "replay", "n-gram model": "replay_ngrams"}[drafter], INTEL, matched=matched)
    return [found["first" if what == "the first" else "later"]]


def of_auto(what: str) -> Expected:
    """The smallest value of one of its goals, over the batch sizes and both drafters that know what they found."""
    goals = [t for run in AUTO.values() for t in results(*run)["targets"]]
    return [min(t["measured"] for t in goals if t["what"].startswith(what))]


def in_transformers(label: str, column: str) -> Expected:
    prompts, batch, sampling = re.fullmatch(r"([\w-]+), batch (\d+), (.*)", label).groups()  # type: ignore[union-attr]
    way = {"its own": "transformers", "ours": "specdec_kernels", 'ours, "auto"': "specdec_kernels, auto"}[column]
    if way == "transformers" and batch != "1":
        return []
    return [
        row("in_transformers", ICE_LAKE, prompts=prompts, batch=int(batch), sampling=sampling, way=way)["ratio_cpu"]
    ]


WAYS = {
    "transformers: lookup": "transformers", "transformers: draft": "transformers, assistant",
    "ours: lookup": "specdec_kernels", "ours: draft": "specdec_kernels, assistant",
    "own loop: plain": "own loop, plain", "own loop: lookup": "own loop",
    "own loop: n-gram model": "own loop, n-gram model", "own loop: tree": "own loop, tree",
}  # fmt: skip


def beside_transformers(label: str, column: str) -> Expected:
    prompts, sampling = label.split(", ")
    return [row("in_transformers_ten", INTEL, prompts=prompts, sampling=sampling, way=WAYS[column])["ratio"]]


def medusa(label: str, column: str) -> Expected:
    way, drafter, nodes = re.fullmatch(r"(greedy|T = 1|typical): (.*), (\d+) nodes", label).groups()  # type: ignore[union-attr]
    names = {"Medusa": "medusa", "Medusa's heads alone": "medusa, heads alone", "lookup tree": "lookup-tree"}
    name = names[drafter] + (", typical" if way == "typical" else "")
    return decoded("end_to_end_medusa", column, float(way != "greedy"), name, int(nodes), INTEL)


def medusa_trees(label: str, column: str) -> Expected:
    nodes, kind = label.split(" nodes, ")
    drafter = {"calibrated": "medusa", "random": "medusa, random tree"}[kind]
    return decoded("medusa_trees", column, 0.0, drafter, int(nodes))


def in_vllm(label: str, column: str) -> Expected:
    """CPU milliseconds per step in the sampler, tokens per CPU second; nothing from where the engine failed on."""
    case, batch = label.rsplit(", ", 1)
    engine = {"no speculation": "none", "vLLM": "stock", "mended": "mended", "plug-in": "plug-in"}[column]
    rows = [r for r in results("vllm_engine")["rows"] if (r["case"], r["engine"]) == (CASES[case], engine)]
    if any("failed" in r for r in rows):
        return []
    (found,) = (r for r in rows if r["batch"] == int(batch))
    return [found["sampler_cpu_us"] / 1e3, found["tokens_per_cpu_s"]]


def forward(label: str, column: str) -> Expected:
    """For each way of running the model: milliseconds and the floor, times a forward of one row, or percent of it."""
    one = row("forward", way=label, rows=1)
    if column.startswith("1 row"):
        return [one["median_us"] / 1e3, one["floor_us"] / 1e3]
    if column.endswith("times that"):
        return [row("forward", way=label, rows=int(column.split()[0]))["median_us"] / one["median_us"]]
    return [100 * one[column.removesuffix(", %")]]


def own_loop(label: str, column: str) -> Expected:
    kind, drafter, number = column.split(", ")
    name = {"lookup": "lookup", "n-gram model": "ngram-lm"}[drafter]
    return decoded("end_to_end_own", label, float(kind != "greedy"), name, int(number.removeprefix("K = ")))


def typical(label: str, column: str) -> Expected:
    """Tokens per step, and nats per token."""
    epsilon = float(column.removeprefix("ε = ")) if column.startswith("ε") else None
    found = row("typical", prompts=label, way="typical" if epsilon else column, epsilon=epsilon)
    return [found["tokens_per_step"], -found["log_prob"]]


@cache
def planned() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PLAN.read_text())
    return found


def best_gamma(label: str, column: str) -> Expected:
    alpha, c = float(label), float(column.removeprefix("c = "))
    gamma = analysis.best_gamma(alpha, c)
    return [float(gamma), float(analysis.walltime_improvement(alpha, gamma, c))]


def plan(label: str, column: str) -> Expected:
    """What was predicted and measured for one drafter and draft length."""
    prompts, kind, drafter, length = label.split(", ")
    (found,) = (
        r for r in planned()["rows"]
        if (r["prompts"], r["drafter"], r["num_speculative_tokens"]) == (prompts, drafter, int(length))
        and r["temperature"] == (0 if kind == "greedy" else float(kind.removeprefix("T = ")))
    )  # fmt: skip
    if column.startswith("theorem"):
        return [found["gain_by_alpha"]]
    key = {"α": "alpha", "tokens a step": "tokens_per_step", "predicted": "gain"}.get(column, column)
    return [found[key]["mean"]]


def milliseconds(batch: int, rows: str) -> float:
    """Of one step of the plan; with several sets, after the prompts of HumanEval."""
    (found,) = (
        1e3 * c["seconds"]
        for c in planned()["settings"]["costs"]
        if (c.get("prompts", "humaneval"), c["batch_size"], c["rows"]) == ("humaneval", batch, rows)
    )
    return found


def step_costs(label: str, column: str) -> Expected:
    rows = {"plain, ms": "1", "tree of 16 nodes, ms": "medusa"}.get(column, column.split()[0])
    plain, time = milliseconds(int(label), "1"), milliseconds(int(label), rows)
    return [time] if rows == "1" else [time, time / plain]


def over_sizes(
    function: Callable[[str, str], Expected], column: str, vocabs: tuple[int, ...] = (49152, 128256)
) -> Expected:
    values = [function(f"{vocab}, {batch}", column)[0] for vocab in vocabs for batch in (1, 8)]
    return [min(values), max(values)]


def overheads() -> Expected:
    ((_, *body),) = (cells for name, cells in tables("docs/benchmarks.md") if name == "overhead")
    values = [overhead(label, "measured, µs")[0] for label, *_ in body]
    return [min(values), max(values)]


def shares(batch: int) -> Expected:
    """Shares of the bandwidth measured beside each case; float32, the three cases that rates are stated for."""
    what = re.compile(rf"(T=1|truncated|greedy) V=\d+ B={batch}: share of the read bandwidth")
    found = [t["measured"] for t in results("verify_chain", INTEL)["targets"] if what.fullmatch(t["what"])]
    return [min(found), max(found)]


GOALS: dict[str, Callable[[], Expected]] = {
    "verify step at T = 1, times the best peer": lambda: best_peers("T=1"),
    "the same, truncated": lambda: best_peers("truncated"),
    "the same, greedy": lambda: best_peers("greedy"),
    "logits read at T = 1, GB/s": lambda: over_sizes(rates, "T = 1"),
    "the same, greedily": lambda: over_sizes(rates, "greedy"),
    "the same, truncated, vocabulary 49152": lambda: over_sizes(rates, "truncated", (49152,)),
    "the same, truncated, vocabulary 128256": lambda: over_sizes(rates, "truncated", (128256,)),
    "share of the bandwidth of `torch.sum`, batch 1": lambda: shares(1),
    "the same, batch 8": lambda: shares(8),
    "overhead of a call, µs, by op": overheads,
    "code-edit, greedy, lookup: times plain decoding": lambda: end_to_end("code-edit", LOOKUP)[:1],
    "quote, the same": lambda: end_to_end("quote", LOOKUP)[:1],
    "HumanEval, T = 1, n-gram model: times plain decoding": lambda: end_to_end(
        "humaneval", "T = 1, n-gram model, K = 3"
    )[:1],
    "a plain step in the own loop, float32, ms": lambda: forward("own loop", "1 row, ms")[:1],
    "a step of eight rows there, times a plain one": lambda: forward("own loop", "8 rows, times that"),
    '"auto", at its worst: times plain decoding': lambda: of_auto("auto, any set"),
    '"auto", at its worst: times the best fixed K that pays': lambda: of_auto("auto, where drafts pay"),
}
RULES = {"greedy": (0.0, "greedy"), "T = 1, token": (1.0, "token"), "T = 1, block": (1.0, "block")}


def draft_pair(label: str, column: str, name: str = "draft_model") -> Expected:
    """Times plain decoding, tokens per step and acceptance of the trained draft model; for its trees the first two."""
    prompts, kind, number = re.fullmatch(r"([\w-]+), (γ =|tree of) (\d+)", label).groups()  # type: ignore[union-attr]
    temperature, rule = RULES[column]
    if kind == "tree of" and rule == "block":
        return []
    at = {"prompts": prompts, "temperature": temperature, "rule": rule, "num_speculative_tokens": int(number)}
    found = row(name, drafter="model" if kind == "γ =" else "model-tree", **at)
    return [found["ratio"], found["mean_acceptance_length"], *([found["alpha"]] if kind == "γ =" else [])]


def parts_of_a_step(label: str, column: str) -> Expected:
    """For HumanEval at T = 1, token rule."""
    at = {"prompts": "humaneval", "temperature": 1.0, "rule": "token", "num_speculative_tokens": int(label[4:])}
    found = row("draft_model", drafter="model", **at)
    if column.startswith("α"):
        return [found["alpha"], found["alpha_low"], found["alpha_high"]]
    return [found["c"] if column == "c" else found[f"{column.partition(',')[0].replace(' ', '_')}_us"] / 1e3]


WITH_PROCESSORS = {"all on, by a step without": "all on us", "and log-probabilities": "and log-probabilities us"}
BATCHES = {"one sequence": 1, "eight": 8, "eight sequences": 8}


def with_processors(label: str, column: str) -> Expected:
    case, batch = label.split(", ")
    at = {"case": CASES[case], "batch": BATCHES[batch]}
    if "bytes" in column:
        return [row("processors", ICE_LAKE, **at | {"batch": 128})["torch_peak_bytes"]] if at["batch"] == 1 else []
    found = row("processors", ICE_LAKE, **at)
    if column in WITH_PROCESSORS:
        return [found[WITH_PROCESSORS[column]] / found["without us"]]
    peer = {"transformers, by ours": "transformers", "vLLM's formulae": "vLLM", "compiled": "compiled"}[column]
    return [found[f"{peer} us"] / found["all on us"]]


def counting(label: str, column: str) -> Expected:
    at = {"vocab": 128256, "batch": BATCHES[label]}
    ours, eager = (row("count_tokens_", INTEL, provider=name, **at)["median_us"] for name in ("cpu", "eager"))
    return [ours] if column == "µs" else [eager / ours]


def instructions(label: str, column: str) -> Expected:
    """For the scans: "mass, half precision" by backend."""
    what, _, dtype = label.rpartition(", ")
    tile = f"{what}, {4 if dtype == 'half precision' else 8} loads"
    found = results("instructions", ROOT / "bench/model")["rows"]
    (one,) = (r for r in found if r["tile"] == tile and r["backend"] == column.lower())
    return [one["least"], one["most"]]


def goals(label: str, column: str) -> Expected:
    return GOALS[label]() if column == "measured" else []


NAMES: dict[str, Callable[[str, str], Expected]] = {
    "chain": chain, "chain in bfloat16": chain_in_bfloat16, "other chains": chain_more, "variants": chain_variants,
    "tree": tree, "gather": gather, "overhead": overhead, "rates": rates, "best peer": best_peer,
    "goals": goals, "end to end": end_to_end, "medusa": medusa, "medusa trees": medusa_trees, "ratios": span_of,
    "in transformers": in_transformers, "beside transformers": beside_transformers, "vllm": in_vllm,
    "best gamma": best_gamma, "plan": plan, "step costs": step_costs, "gpu": on_gpu, "gpu goals": goals_on_gpu,
    "gpu sample": samples_on_gpu,
    "best by law": best_by_law, "cost by law": cost_by_law, "typical": typical,
    "forward": forward, "own loop": own_loop, "auto": adaptive, "auto, replayed": replayed,
    "auto, first calls": first_calls,
    "auto, n-gram model": partial(adaptive, drafter="ngram-lm"),
    "auto, draft model": partial(adaptive, drafter="model"), "auto, trees": adaptive_trees,
    "auto, a draft model that stops": partial(adaptive, drafter="model"),
    "auto, n-gram model, replayed": partial(replayed, name="replay_ngrams"),
    "matches": of_matches, "instructions": instructions,
    "draft model": draft_pair, "draft model, own loop": partial(draft_pair, name="draft_model_own"),
    "parts of a step": parts_of_a_step,
    "processors": with_processors, "counting": counting, "chain, AVX2": chain_with_avx2, "tree, AVX2": tree_with_avx2,
}  # fmt: skip
