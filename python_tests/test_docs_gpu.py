"""What the pages say in words about a GPU's figures agrees with the results."""

from __future__ import annotations

import re

import pytest

from python_tests.docs_gpu import GPU, on_gpu
from python_tests.docs_tables import BENCHMARKS, agrees, prose, results

if not GPU.exists():
    pytest.skip("a source distribution holds no results", allow_module_level=True)


def test_trials_on_the_gpu_are_said_as_they_were() -> None:
    text = prose(*BENCHMARKS).split("**Changed since", 1)[1]
    trials = results("trials", GPU)["runs"]

    def said(run: int, provider: str, case: str, *batches: int) -> list[str]:
        cold = {r["batch"]: r["median_us"] for r in trials[run]["rows"]
                if (r["provider"], r["case"], r["cache"]) == (provider, case, "cold")}  # fmt: skip
        return [f"{cold[b]:.1f}" if cold[b] < 100 else f"{cold[b]:.0f}" for b in batches]

    triton, peer = said(0, "triton", "T=1", 1, 8, 128), said(0, "vllm V2", "T=1", 1, 8, 128)
    assert (
        "took {}, {} and {} µs at T = 1".format(*triton) in text and "took {}, {} and {} in the".format(*peer) in text
    )
    one_hot = (*said(0, "triton", "one-hot", 1, 8), *said(0, "vllm V2", "one-hot", 1, 8))
    assert "{} and {} for one-hot drafts ({} and {})".format(*one_hot) in text
    cut = (*said(0, "triton", "truncated", 1), *said(0, "vllm V2", "truncated", 1))
    assert "{} truncated ({})".format(*cut) in text
    ours = [time for case in ("T=1", "one-hot", "block") for time in said(1, "cuda", case, 1, 8)]
    sentence = (
        "took {} and {} µs at T = 1 for 1 and 8 sequences, {} and {} with one-hot drafts, "
        "{} and {} under the block rule"
    )
    assert sentence.format(*ours) in text


def test_readme_s_sentence_on_the_gpu_is_that_of_the_results() -> None:
    text = prose("README.md")
    said = re.search(r"took (\d+) µs at T = 1 and (\d+) µs truncated.* took ([\d.]+) and ([\d.]+) times as long", text)
    plain, cut = (on_gpu(f"{case}, 128", "CUDA, µs (floor)")[0] for case in ("T = 1", "truncated"))
    peers = [on_gpu(f"{case}, 128", "vLLM V2")[0] for case in ("T = 1", "truncated")]
    assert said and all(map(agrees, said.groups(), (plain, cut, *peers)))
    result, page = results("verify_chain", GPU), prose(*BENCHMARKS)
    without = [
        row["median_us"] for case in ("T=1", "truncated") for row in result["rows"]
        if row["provider"] == "cuda, no draft_stats" and row["id"] == f"{case} V=128256 B=128 K=5 bfloat16 cold graph"
    ]  # fmt: skip
    assert "({:.0f} and {:.0f} without the stats)".format(*without) in text
    assert "(without them {:.0f} µs at T = 1 and {:.0f} truncated for 128 sequences)".format(*without) in page
    assert result["command"] in page


def test_where_triton_is_faster_is_that_of_the_results() -> None:
    where = {
        "T = 1": [1], "truncated": [], "greedy": [1], "one-hot draft": [1, 8], "block": [1, 8], "`Opt`": [],
        "`TokenV3`": [32, 128, 256],
    }  # fmt: skip
    for case, batches in where.items():
        times = {
            batch: [on_gpu(f"{case}, {batch}", column)[0] for column in ("Triton, µs", "CUDA, µs (floor)")]
            for batch in (1, 8, 32, 128, 256)
        }
        assert [batch for batch, (triton, cuda) in times.items() if triton < cuda] == batches, case
    sentence = (
        "faster than the CUDA kernels for one sequence at T = 1 and greedily, for 1 and 8 with one-hot drafts and "
        "under the block rule, and for `TokenV3` from 32 on."
    )
    assert sentence in prose(*BENCHMARKS)


def cold(provider: str, vocab: int) -> dict[tuple[str, int], dict[str, float]]:
    """Five draft tokens, by replayed graphs: a row for each case and batch."""
    asked = (provider, vocab, 5, "cold", "graph")
    keys = ("provider", "vocab", "num_draft", "cache", "launch")
    rows = results("verify_chain", GPU)["rows"]
    return {(row["case"], row["batch"]): row for row in rows if tuple(row[key] for key in keys) == asked}


def test_where_vllm_is_faster_is_that_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    ours, theirs = cold("cuda", 128256), cold("vllm V2", 128256)
    faster = {at for at, row in theirs.items() if row["median_us"] < ours[at]["median_us"]}
    many = {(case, batch) for case in ("T=1", "one-hot") for batch in (1, 8)} | {("block", n) for n in (1, 8, 32)}
    assert faster == many
    assert "is faster at T = 1 and with one-hot drafts for 1 and 8 sequences, and under the block rule up to 32" in text
    ours, theirs = cold("cuda", 32000), cold("vllm V2", 32000)
    said = re.search(r"at T = 1 up to 32 \(([\d.]+), ([\d.]+), ([\d.]+) of our time; ([\d.]+) at 128\)", text)
    times = [theirs["T=1", batch]["median_us"] / ours["T=1", batch]["median_us"] for batch in (1, 8, 32, 128)]
    assert said and all(map(agrees, said.groups(), times)) and times[2] < 1 < times[3]


def test_which_goals_are_met_is_that_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    met: dict[tuple[str, int], set[int]] = {}
    for vocab in (128256, 32000):
        for (case, batch), row in cold("cuda", vocab).items():
            most = 12.0 if batch == 1 else (3 if case == "truncated" else 2) * row["floor_us"]
            assert row["median_us"] > row["floor_us"]
            if case != "block" and row["median_us"] <= most:
                met.setdefault((case, vocab), set()).add(batch)
    greedy = {("greedy", 32000): {1, 128, 256}, ("greedy", 128256): {1, 32, 128, 256}}
    wide = {(case, 128256): {128, 256} for case in ("T=1", "truncated", "one-hot")}
    assert {of: batches & {1, 8, 32, 128, 256} for of, batches in met.items()} == greedy | wide
    assert "only the greedy rule met 12 µs" in text and "was met for 8 by none; for 32 only by the greedy rule" in text
    assert "for 128 and 256 by the greedy rule with both vocabularies and, with 128256 ids only, at T = 1," in text


def test_what_calls_from_an_idle_device_take() -> None:
    text = prose(*BENCHMARKS)
    said = re.search(r"take (\d+) to (\d+) µs with the CUDA kernels, .{,60} and (\d+) to (\d+) with Triton's", text)
    found = []
    for provider in ("cuda", "triton"):
        asked = (provider, "cold", "eager", 128256, 5)
        keys = ("provider", "cache", "launch", "vocab", "num_draft")
        rows = results("verify_chain", GPU)["rows"]
        found.append([row["median_us"] for row in rows if tuple(row[key] for key in keys) == asked])
    assert said and all(map(agrees, said.groups(), (end(of) for of in found for end in (min, max))))
