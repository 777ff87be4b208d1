"""Figures in sentences of the pages, and what these sentences say about tables, agree with bench/results."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from bench import end_to_end, report
from bench.cascades import report as cascades_report
from python_tests.docs_figures import AUTO, AUTO_MODEL, AUTO_TREES, FIRST, decoded, milliseconds, planned
from python_tests.docs_laws import CASCADES
from python_tests.docs_tables import AVX2, BENCHMARKS, INTEL, RESULTS, ROOT, agrees, prose, results
from python_tests.ops.chains import LAWS
from specdec_kernels import analysis, laws

if not RESULTS.exists():
    pytest.skip("a source distribution holds no results", allow_module_level=True)


def test_what_means_would_say_instead_of_medians_is_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    said = re.search(r"A ratio of means is ([\d.]+) to ([\d.]+) times that of medians, ([\d.]+) in the middle", text)
    found = []
    for folder in (INTEL, AVX2):
        for op in ("verify_chain", "verify_tree"):
            for rows in report.cases(results(op, folder)["rows"]):
                own, peer = report.subject(rows), report.best_peer(rows)
                if own is not None and peer is not None:
                    means, medians = (peer[of] / own[of] for of in ("mean_us", "median_us"))
                    found.append(means / medians)
    assert said and all(map(agrees, said.groups(), (min(found), max(found), statistics.median(found))))


def test_how_far_quartiles_lie_from_the_median_is_of_the_results() -> None:
    said = re.search(r"machine was shared: our quartiles lie (\d+) to (\d+) % from the median", prose(*BENCHMARKS))
    far = []
    for op in ("verify_chain", "verify_tree"):
        for row in results(op, AVX2)["rows"]:
            if row["provider"] == "cpu" and row["cache"] == "cold":
                far += [100 * abs(row[end] / row["median_us"] - 1) for end in ("q25_us", "q75_us")]
    assert said and all(map(agrees, said.groups(), (min(far), max(far))))


def test_readme_s_sentence_on_decoding_is_that_of_the_results() -> None:
    text = prose("README.md")
    said = re.search(
        r"lookup makes SmolLM2-135M ([\d.]+) to ([\d.]+) times as fast greedily, ([\d.]+) to ([\d.]+) at T = 1", text
    )
    sets = ("code-edit", "quote", "humaneval", "chat")
    by_lookup = [[decoded("end_to_end", name, t, "lookup", 7)[0] for name in sets] for t in (0.0, 1.0)]
    assert said and all(map(agrees, said.groups(), (end(ratios) for ratios in by_lookup for end in (min, max))))


def test_what_is_said_of_the_draft_model_is_that_of_its_results() -> None:
    text = prose(*BENCHMARKS)
    found = results("draft_model")
    said = re.search(r"peak of memory is (\d+) MB plainly and (\d+) MB with the draft", text)
    assert said and all(map(agrees, said.groups(), (size / 1e6 for size in found["settings"]["peak_bytes"].values())))
    pairs = [r for r in found["rows"] if r["drafter"] == "model"]
    said = re.search(r"gains (\d+) to (\d+) % at γ = 3 .* α is ([\d.]+) to ([\d.]+), and c ([\d.]+) to ([\d.]+)", text)
    gains = [r["ratio"] for r in pairs if r["num_speculative_tokens"] == 3 and r["prompts"] != "chat"]
    alpha, c = ([r[key] for r in pairs] for key in ("alpha", "c"))
    spans = (100 * (min(gains) - 1), 100 * (max(gains) - 1), min(alpha), max(alpha), min(c), max(c))
    assert said and all(map(agrees, said.groups(), spans)), spans
    losses = [r["ratio"] for r in pairs if r["prompts"] == "chat" or r["num_speculative_tokens"] >= 7]
    assert max(losses) < 1
    assert not any(r["batches_differing"] for r in pairs)


def test_what_a_loop_of_our_own_gains_is_told_from_what_speculation_does() -> None:
    text = prose(*BENCHMARKS)
    by: dict[Any, dict[str, float]] = {}
    for found in results("in_transformers_ten", INTEL)["rows"]:
        by.setdefault((found["prompts"], found["sampling"]), {})[found["way"]] = found["ratio"]
    plain = [ways["own loop, plain"] for ways in by.values()]
    gains = [ways["own loop"] / ways["own loop, plain"] for ways in by.values()]
    said = re.search(r'of "own loop" ([\d.]+) to ([\d.]+) is the loop, and its lookup ([\d.]+) to ([\d.]+) times', text)
    assert said and all(map(agrees, said.groups(), (min(plain), max(plain), min(gains), max(gains))))
    said = re.search(
        r"best drafter has ([\d.]+) on code .{,15} ([\d.]+) on quotes, .{,99} reach\), and ([\d.]+) on", text
    )
    goals = [goal["measured"] for goal in results("in_transformers_ten", INTEL)["targets"]]
    assert said and all(map(agrees, said.groups(), goals))
    drafted = [[ways[f"{whose}, assistant"] for ways in by.values()] for whose in ("transformers", "specdec_kernels")]
    said = re.search(r"assisted generation ([\d.]+) to ([\d.]+) times .{,30}, ours ([\d.]+) to ([\d.]+)\.", text)
    assert said and all(map(agrees, said.groups(), (end(of) for of in drafted for end in (min, max))))
    assert not any(found["batches_differing"] for found in results("in_transformers_ten", INTEL)["rows"])
    slow = results("draft_model_own")["rows"][0]["plain_step_us"]
    said = re.search(r"tree of six nodes has ([\d.]+), in a run in which a plain step took (\d+) ms", text)
    (tree,) = (
        found["ratio"] for found in results("draft_model_own")["rows"]
        if (found["drafter"], found["rule"]) == ("model-tree", "token")
    )  # fmt: skip
    assert said and agrees(said[1], tree) and agrees(said[2], slow / 1000)


def test_at_least_is_no_more_than_was_measured() -> None:
    text = prose(*BENCHMARKS).split("## A trained draft model", 1)[1]
    four = ", ".join([r"([\d.]+)"] * 3) + r" and ([\d.]+)"
    said = re.search(
        rf'For one, two, four and eight "auto" has at least {four} times .{{,60}} at least {four} times that of', text
    )
    assert said
    for size, plain, share in zip(AUTO_MODEL, said.groups()[:4], said.groups()[4:], strict=True):
        for figure, goal, what, step in ((plain, 0, "any set", 1e-2), (share, 1, "best fixed K", 1e-3)):
            found = goals_of(size, "model")[goal]
            assert what in found["what"] and float(figure) <= found["measured"] < float(figure) + step
    stops = re.search(r"which is three everywhere, \"auto\" has ([\d.]+) or more", text)
    assert stops and float(stops[1]) <= goals_of("one", "model, 0.4")[1]["measured"] < float(stops[1]) + 1e-3


def goals_of(size: str, drafter: str) -> list[dict[str, Any]]:
    """Of a draft model alone, or of one that stops: beside which they ran."""
    rows = results(*AUTO_MODEL[size])["rows"]
    return end_to_end.targets_of([row for row in rows if row["drafter"] in ("none", drafter)])


def test_what_stopping_gains_is_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    by: dict[Any, dict[Any, float]] = {}
    for found in results(*AUTO_MODEL["one"])["rows"]:
        way = found["drafter"], found["num_speculative_tokens"]
        by.setdefault((found["prompts"], found["temperature"]), {})[way] = found["ratio"]
    gains = [[of["model, 0.4", n] / of["model", n] for of in by.values()] for n in (3, 7, "auto")]
    said = re.search(
        r"three tokens are ([\d.]+) to ([\d.]+) times as fast with it, seven ([\d.]+) to ([\d.]+), and \"auto\" "
        r"([\d.]+) to ([\d.]+)\.", text,
    )  # fmt: skip
    assert said and all(map(agrees, said.groups(), (end(of) for of in gains for end in (min, max))))


def test_what_is_said_of_a_chosen_length_is_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    one = re.search(r"everywhere at least ([\d.]+) times plain .{,99} of the rounds ([\d.]+) times that of the", text)
    pair = r" ([\d.]+) and ([\d.]+)"
    more = re.search(rf"two together{pair}, four{pair}, eight{pair}\.", text)
    assert one and more
    goals = {size: [goal["measured"] for goal in results(*run)["targets"]] for size, run in AUTO.items()}
    measured_of = [goal for size in AUTO for goal in goals[size][-3:-1]]
    for said, measured in zip((*one.groups(), *more.groups()), measured_of, strict=True):
        assert float(said) <= measured < float(said) + 1e-3


def test_what_is_said_of_first_calls_is_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    figures = r" ([\d.]+)(?:,| and| times)" * 4
    said = re.search(r"first calls of one, two, four and eight .{,60} at least" + figures, text)
    assert said
    for figure, runs in zip(said.groups(), FIRST.values(), strict=True):
        rows = [found for run in runs for found in results(*run)["rows"]]
        least = min(found["ratio"] for found in rows)
        assert float(figure) <= least < float(figure) + 1e-2
        assert not any(found["batches_differing"] for found in rows)


def test_what_is_said_of_trees_that_are_chosen_is_of_the_results() -> None:
    text = prose(*BENCHMARKS)
    figures = r"least ([\d.]+) times plain decoding's speed here, .{,50} down to (\d\.\d+)\. .{,40} has ([\d.]+) or"
    said = re.search(figures, text)
    found = [results(*run) for run in AUTO_TREES.values()]
    goals = {goal["what"]: goal["measured"] for each in reversed(found) for goal in each["targets"]}
    rows = [row for each in found for row in each["rows"]]
    always = min(row["ratio"] for row in rows if isinstance(row["num_speculative_tokens"], int))
    chosen = min(row["ratio"] for row in rows if str(row["num_speculative_tokens"]).startswith("auto"))
    (share,) = (measured for what, measured in goals.items() if "best fixed K" in what)
    assert said and agrees(said[2], always) and not any(row["batches_differing"] for row in rows)
    for figure, least in ((said[1], chosen), (said[3], share)):
        assert float(figure) <= least < float(figure) + 0.01


@pytest.mark.parametrize("name", ["replay", "replay_ngrams"])
def test_what_is_said_of_replays_is_of_the_results(name: str) -> None:
    text = prose(*BENCHMARKS)
    said = re.findall(r"is nowhere below ([\d.]+), and has ([\d.]+) or more of the best fixed K", text)
    rows = [found for found in results(name, INTEL)["rows"] if "batch" in found]
    ratios, shares = [], []
    for of in {(found["prompts"], found["temperature"], found["batch"]) for found in rows}:
        by = {
            r["num_speculative_tokens"]: r["ratio"] for r in rows if (r["prompts"], r["temperature"], r["batch"]) == of
        }
        auto, best = by["auto"], max(by[length] for length in (1, 3, 7))
        ratios.append(auto)
        if best > 1:
            shares.append(auto / best)
    figures = said[["replay", "replay_ngrams"].index(name)]
    assert len(said) == 2 and len(shares) > 10
    for figure, least in zip(figures, (min(ratios), min(shares)), strict=True):
        assert float(figure) <= least < float(figure) + 0.01, least


def test_the_command_of_typical_acceptance_is_that_of_its_results() -> None:
    assert results("typical")["command"] in prose("docs/what-it-gains.md")


def near(row: dict[str, Any], measured: float, kind: str, share: float = 0.1) -> bool:
    return bool(abs(row[kind]["mean"] / measured - 1) < share)


def test_what_is_said_of_the_plan_is_that_of_its_results() -> None:
    text = prose("docs/what-it-gains.md")
    assert planned()["command"] in text
    rows = planned()["rows"]
    missed = {
        kind: [row for row in rows if not near(row, row["measured"]["mean"], kind)] for kind in ("gain", "simulated")
    }
    assert {len(each) for each in missed.values()} == {
        3
    } and "within 10 % of the measured ones in 17 of 20 rows" in text
    assert {(row["prompts"], row["drafter"]) for each in missed.values() for row in each} == {("code-edit", "ngram-lm")}
    off = {
        (row["temperature"], row["num_speculative_tokens"]): [
            f"{100 * (row[kind]['mean'] / row['measured']['mean'] - 1):.0f}" for kind in ("simulated", "gain")
        ]
        for row in missed["gain"]
    }
    assert "greedily ({} and {} % too high)".format(*off.pop((0.0, 3))) in text
    every = sorted(int(number) for pair in off.values() for number in pair)
    assert len(off) == 2 and f"both numbers at T = 1 ({every[0]} to {every[-1]} %)" in text
    spans = [f"{row['measured']['low']:.2f} to {row['measured']['high']:.2f}" for row in missed["gain"]]
    assert len(spans) == 3 and all(span in text for span in spans)
    assert planned()["settings"]["rounds"] == 3  # so that these are all
    means = [sum(row["measured"][key] for key in ("low", "mean", "high")) / 3 for row in rows]
    assert all(near(row, mean, "simulated", 0.08) for row, mean in zip(rows, means, strict=True))
    most = max(row["gain_by_alpha"] / row["measured"]["mean"] - 1 for row in rows)
    assert f"promises up to {most:.0%}".replace("%", " %") in text
    silent = [1 - row["drafted_share"] for row in rows if row["drafter"] == "lookup"]
    assert f"in {100 * min(silent):.0f} to {max(silent):.0%} of its steps".replace("%", " %") in text
    even = [
        float(analysis.break_even_acceptance(7, 0.0, milliseconds(batch, "8") / milliseconds(batch, "1")))
        for batch in (1, 8)
    ]
    assert f"an α of {even[0]:.2f} at batch 1, and of {even[1]:.2f} at batch 8" in text
    assert milliseconds(4, "medusa") > 4 * milliseconds(4, "1") and milliseconds(8, "medusa") > 6 * milliseconds(8, "1")


def test_the_sentence_on_draft_lengths_is_that_of_the_results() -> None:
    tables = cascades_report._draft_lengths(results("draft-lengths", CASCADES))
    text = prose("docs/choosing-a-law.md")
    lossless = re.findall(r"takes ([\d.]+), ([\d.]+), ([\d.]+) target calls", tables)
    token_v2 = re.findall(r"\| TokenV2 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", tables)
    assert len(lossless) == len(token_v2) == 2
    for calls in lossless + token_v2:
        assert "{}, {} and {}".format(*calls) in text


def test_block_takes_what_the_page_says() -> None:
    page, allowed, others = (ROOT / "docs/laws.md").read_text(), set(), set()
    for law in LAWS:
        try:
            laws.check_law("verify_chain", "block", law)
            allowed.add(type(law).__name__)
        except ValueError:
            others.add(repr(law))
    assert allowed == {name for name in laws.__all__ if name != "TargetLaw"}
    assert others and all("Lossy" in law for law in others)
    rows = [row for row in page.splitlines() if re.match(rf"\| `({'|'.join(laws.__all__)})\b", row)]
    assert rows and all(row.endswith("| token, block | logits |") is ("`Lossy" not in row) for row in rows)
    assert '| token; block with `beta="exact"` | any |' in page
