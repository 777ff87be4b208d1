"""What the tables comparing ops with peers must show: README's, and those of the machine with only AVX2."""

from __future__ import annotations

import re
from pathlib import Path

from python_tests.docs_tables import AVX2, CASES, INTEL, Expected, against, results, size_of

PEERS = {
    "eager PyTorch": "eager", "the same, keeping draft probabilities": "eager, kept draft_probs",
    "torch.compile": "compile", "transformers": "transformers",
}  # fmt: skip
SIZES = [(vocab, batch) for vocab in (49152, 128256) for batch in (1, 8)]


def span_of(label: str, column: str) -> Expected:
    """Smallest and largest ratio over the four sizes, for README's one table."""
    op, case = {
        "chain, T = 1": ("verify_chain", "T=1"), "chain, greedy": ("verify_chain", "greedy"),
        "chain, T = 0.8, top-k 50, top-p 0.9": ("verify_chain", "truncated"),
        "tree of 11 nodes, T = 1": ("verify_tree", "T=1"),
        "tree of 11 nodes, T = 0.8, top-k 50, top-p 0.9": ("verify_tree", "truncated"),
    }[label]  # fmt: skip
    if (op == "verify_tree" and column != "eager PyTorch") or (case == "greedy" and column.startswith("the same")):
        return []
    ratios = [against(op, case, size, [PEERS[column]])[0] for size in SIZES]
    return [min(ratios), max(ratios)]


def chain_with_avx2(label: str, column: str) -> Expected:
    """Each peer's time over ours, then our own microseconds."""
    kept = {"T = 1": ["eager, kept draft_probs"], "truncated": ["eager, kept draft_probs", "eager, top-p in top-k"]}
    last = [] if column in ("one-hot draft", "block") else ["transformers"]
    peers = ["eager", *kept.get(column, []), "compile", *last]
    return against("verify_chain", CASES[column], size_of(label), peers, folder=AVX2)


def tree_with_avx2(label: str, column: str) -> Expected:
    return against("verify_tree", CASES[column], size_of(label), ["eager"], folder=AVX2)


def best_peers(case: str, whose: str = "cpu × best peer", folder: Path = INTEL) -> Expected:
    """Over the sizes: ratios to our time, to ours without stats, or to another peer's."""
    what = re.compile(rf"{re.escape(case)} .*: {re.escape(whose)}")
    found = [t["measured"] for t in results("verify_chain", folder)["targets"] if what.match(t["what"])]
    return [min(found), max(found)]
