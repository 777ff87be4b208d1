"""Every figure in a table of `PAGES` is that of bench/results.

A table is announced by a comment, ``<!-- figures: NAME -->``; `NAMES` of docs_figures.py says what its cells must hold,
given the words of its first column and of its heading. A table without such a comment fails, unless it is in
`WORDS_ONLY`.
"""

from __future__ import annotations

import re
from itertools import chain

import pytest
from PIL import Image

from bench import plot, report
from bench.cascades import report as cascades_report
from python_tests.docs_figures import AUTO, AUTO_MODEL, AUTO_TREES, FIRST, GOALS, NAMES, PAGES
from python_tests.docs_laws import CASCADES
from python_tests.docs_peers import best_peers
from python_tests.docs_tables import (
    AVX2,
    BENCHMARKS,
    FIGURE,
    ICE_LAKE,
    INTEL,
    RESULTS,
    ROOT,
    agrees,
    prose,
    results,
    tables,
)  # fmt: skip

if not RESULTS.exists():
    pytest.skip("a source distribution holds no results", allow_module_level=True)
WORDS_ONLY = {  # tables without figures, by the first cell of their heading
    "README.md": {"in", "backend", "missing"}, "docs/what-it-gains.md": {"`sk.analysis.`"},
}  # fmt: skip


STATED: dict[str, tuple[str, str]] = {  # the file, and what the goal is called there
    "verify step at T = 1, times the best peer": ("verify_chain", r"T=1 .*: cpu × best peer"),
    "the same, truncated": ("verify_chain", r"truncated .*: cpu × best peer"),
    "the same, greedy": ("verify_chain", r"greedy .*: cpu × best peer"),
    "logits read at T = 1, GB/s": ("verify_chain", r"T=1 .*: GB/s"),
    "the same, greedily": ("verify_chain", r"greedy .*: GB/s"),
    "the same, truncated, vocabulary 49152": ("verify_chain", r"truncated V=49152 .*: GB/s"),
    "share of the bandwidth of `torch.sum`, batch 1": ("verify_chain", r".* B=1: share of the read bandwidth"),
    "the same, batch 8": ("verify_chain", r".* B=8: share of the read bandwidth"),
    "overhead of a call, µs, by op": ("verify_chain", r".*overhead of a call"),
    "code-edit, greedy, lookup: times plain decoding": ("end_to_end", r"code-edit, greedy, lookup"),
    "quote, the same": ("end_to_end", r"quote, greedy, lookup"),
    "HumanEval, T = 1, n-gram model: times plain decoding": ("end_to_end", r"humaneval, temperature 1, ngram-lm"),
    "a plain step in the own loop, float32, ms": ("forward", r"a plain step"),
    "a step of eight rows there, times a plain one": ("forward", r"a step of eight rows"),
    '"auto", at its worst: times plain decoding': (AUTO["one"][0], r"auto, any set"),
    '"auto", at its worst: times the best fixed K that pays': (AUTO["one"][0], r"auto, where drafts pay"),
}


def goal(label: str) -> set[float]:
    """What was to be reached; results older than a goal do not state it."""
    if label not in STATED:
        return set(report.RATE_TARGETS.values())
    name, what = STATED[label]
    folder = {"verify_chain": INTEL, AUTO["one"][0]: AUTO["one"][1]}.get(name, RESULTS)
    stated = results(name, folder)["targets"]
    return {target["target"] for target in stated if re.match(what, target["what"])}


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_table_is_that_of_the_results(page: str) -> None:
    wrong, seen = [], 0
    for name, (head, *body) in tables(page):
        if name is None:
            assert head[0] in WORDS_ONLY.get(page, ()), f"{page}: no comment above {head}"
            continue
        for label, *cells in body:
            for column, cell in zip(head[1:], cells, strict=True):
                if name == "goals" and column != "measured":
                    continue  # `test_goals_are_called_missed_where_they_are`
                figures, expected = re.findall(FIGURE, cell), NAMES[name](label, column)
                seen += len(figures)
                if len(figures) != len(expected) or not all(map(agrees, figures, expected)):
                    wrong.append(f"{page}, {name}: {label} | {column}: {cell}, but the results say {expected}")
    assert not wrong, "\n".join(wrong)
    assert seen > 5


def test_goals_are_called_missed_where_they_are() -> None:
    ((_, *body),) = (cells for name, cells in tables("docs/benchmarks.md") if name == "goals")
    assert [label for label, *_ in body] == list(GOALS)
    for label, wanted, _, verdict in body:
        measured, at_most = GOALS[label](), re.search("µs|, ms|rows", label)
        reached = max(measured) <= float(wanted) if at_most else min(measured) >= float(wanted)
        assert verdict.startswith("reached" if reached else "**missed**"), label
        assert goal(label) == {float(wanted)}, label


def test_what_is_said_beside_the_goals_is_of_the_results() -> None:
    page, front = ((ROOT / name).read_text() for name in ("docs/benchmarks.md", "README.md"))
    kept, narrow = (best_peers("truncated", f"cpu × eager, {which}") for which in ("kept", "top-p in top-k"))
    assert "{:.1f} – {:.1f} without `draft_stats` |".format(*best_peers("T=1", "without draft_stats")) in page
    assert "{:.0f} – {:.0f} where the peer keeps its draft's probabilities".format(*kept) in page
    assert "{:.0f} – {:.0f} where it looks for top-p within the top-k".format(*narrow) in page
    assert "takes {:.0f} to {:.0f} times as long".format(*narrow) in " ".join(front.split())
    for case in ("greedy", "truncated V=128256"):
        assert "with AVX2 alone {:.1f} – {:.1f} |".format(*best_peers(case, "GB/s", AVX2)) in page


def test_a_wrong_figure_is_seen() -> None:
    assert agrees("9.5", 9.479) and agrees("11", 11.4) and not agrees("9.5", 9.3) and not agrees("12", 11.4)


def as_it_is_now(command: str) -> str:
    """With the present names of options: some had other names when the results were taken."""
    for before, now in (
        (" --json", " --save"), (" --batches ", " --batch "), ("engine --tokens ", "engine --max-new-tokens "),
    ):  # fmt: skip
        command = command.replace(before, now)
    return command


def test_the_commands_are_those_of_the_results() -> None:
    """Each result that the pages of benchmarks quote appears there with the command that produced it."""
    text = as_it_is_now(prose(*BENCHMARKS).replace("\\ ", ""))
    for name in (
        "end_to_end", "end_to_end_quote", "medusa_trees", "vllm_engine",
        "forward", "end_to_end_own", "draft_model",
    ):  # fmt: skip
        assert as_it_is_now(results(name)["command"]) in text, name
    for run in (
        ((name, AVX2) for name in ("verify_chain", "answers")),
        ((name, INTEL) for name in ("replay", "replay_ngrams")),
        ((name, ICE_LAKE) for name in ("in_transformers", "processors")),
        AUTO.values(),
        AUTO_MODEL.values(),
        AUTO_TREES.values(),
        chain.from_iterable(FIRST.values()),
    ):
        for name, folder in run:
            assert as_it_is_now(results(name, folder)["command"]) in text, name
    for name in (
        "verify_chain", "verify_tree", "gather_kv_", "count_tokens_", "sample",
        "in_transformers_ten", "end_to_end_medusa",
    ):  # fmt: skip
        assert as_it_is_now(results(name, INTEL)["command"]) in text, name


def test_the_cascades_figures_are_of_their_results() -> None:
    """``python -m bench.cascades report`` redraws all of them."""
    for task, names in {
        "rewriting": ("-rejections", "-target-calls", "-seconds", "-variants"),
        "draft-lengths": ("",),
        "next-token": ("-accuracy", "-log-loss"),
    }.items():
        revision = plot.revision(results(task, CASCADES))
        for name in names:
            with Image.open(CASCADES / f"{task}{name}.png") as figure:
                assert figure.info.get("Description") == revision, name


def test_the_cascades_tables_are_of_their_results() -> None:
    page = (CASCADES / "README.md").read_text()
    for task, written in {
        "rewriting": cascades_report._rewriting, "draft-lengths": cascades_report._draft_lengths,
        "next-token": cascades_report._next_token,
    }.items():  # fmt: skip
        assert written(results(task, CASCADES)) in page, task


def test_the_ops_figures_are_of_their_results() -> None:
    """A figure carries a revision of the rows it was drawn from: ``python -m bench.plot FOLDER`` redraws all."""
    drawn = [file for file in INTEL.glob("*.json") if "provider" in results(file.stem, INTEL)["rows"][0]]
    assert len(drawn) >= 9
    for file in drawn:
        with Image.open(file.with_suffix(".png")) as figure:
            assert figure.info["Description"] == plot.revision(results(file.stem, INTEL)), file.stem
