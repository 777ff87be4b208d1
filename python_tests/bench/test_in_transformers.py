"""The bench of transformers' own generation on a model that is instant."""

from __future__ import annotations

from typing import Any

import specdec_kernels as sk
from bench import in_transformers as bench
from examples.own_loop import LeanLlama
from python_tests.decoding.models import near, prompts, tiny


def test_every_way_is_measured_and_gives_plain_answers() -> None:
    model, turns = tiny("llama", 1), []
    tree = sk.ModelTreeDrafter(LeanLlama(near("llama", 1, 0.1)), bench.TREE)
    loops = bench.LOOPS | {"n-grams": bench.Loop(sk.NgramLMDrafter(), "auto"), "tree": bench.Loop(tree, 2, "token")}
    for batch, ways in (
        (1, [bench.OURS, bench.OURS_MODEL, bench.AUTO, bench.STOCK, bench.STOCK_MODEL]),
        (3, [bench.OURS, bench.AUTO, *loops]),
    ):  # fmt: skip
        assistant = near("llama", 1, 0.1) if bench.OURS_MODEL in ways else None
        runner = LeanLlama(model) if "own loop" in ways else None
        batches = [prompts(*(4, 6, 9)[:batch])]
        for name, sampling in bench.SAMPLING.items():
            turns.clear()
            results = bench.measure(
                model, batches, sampling, rounds=2, max_new_tokens=5, num_speculative_tokens=3,
                advance=lambda: turns.append(1), assistant=assistant, runner=runner, loops=loops,
            )  # fmt: skip
            rows = bench.rows_of("texts", batch, name, results)
            assert {row["way"] for row in rows} == set(ways) and len(turns) == 2 * (len(ways) + 1)
            for row in rows:
                assert 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"] and row["ratio_cpu"] > 0
                assert row["batches_differing"] == 0


def test_goals_are_of_the_own_loop_beside_itself() -> None:
    def row(prompts: str, way: str, ratio: float, batch: int = 1) -> dict[str, Any]:
        return {"prompts": prompts, "sampling": "greedy", "batch": batch, "way": way, "ratio": ratio}

    rows = [row("quote", "own loop, plain", 1.25), row("quote", "own loop", 2.5), row("quote", "own loop, tree", 3.5)]
    rows += [row("quote", bench.STOCK, 9.0), row("quote", "own loop", 9.0, 8), row("chat", "own loop", 9.0)]
    (only,) = bench.targets(rows)
    assert only["what"] == "quote, greedy: own loop, best drafter" and (only["target"], only["measured"]) == (2.5, 2.8)
    assert not bench.targets([row("quote", bench.OURS, 2.0)])
