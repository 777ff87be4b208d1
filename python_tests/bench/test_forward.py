"""The bench of a forward on a model that is instant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import forward as bench
from bench import timing
from examples.own_loop import LeanLlama
from python_tests.decoding.models import tiny
from specdec_kernels.integrations.runners import as_runner


@torch.inference_mode()
def test_all_rows_are_timed_and_the_parts_are_the_whole() -> None:
    model = tiny("llama", 1)
    ids = torch.randint(20, (1, bench.CONTEXT + max(bench.ROWS)))
    rows: list[dict[str, Any]] = []
    for way, runner in {"transformers": as_runner(model, "test"), "own loop": LeanLlama(model)}.items():
        calls = bench.forwards(runner, ids)
        seconds = timing.take_turns(calls, 2, warm_up=2)
        assert all(call().shape[:2] == (1, n) and len(seconds[n]) == 2 for n, call in calls.items())
        rows += [{"way": way, "rows": n, "median_us": 1e6 * max(found)} for n, found in seconds.items()]
        parts = bench.shares(calls[2], times=2)
        assert sum(parts.values()) == pytest.approx(1) and min(parts.values()) > 0
    plain, eight = bench.goals(rows)
    assert plain["measured"] > 0 and eight["reached"] == (eight["measured"] <= 1.25)


def test_tied_weights_are_read_once() -> None:
    model = tiny("llama", 1)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    sizes = sum(p.nbytes for p in model.parameters())
    assert bench.weights_read(model) == (sizes if table is head else sizes - table.nbytes)
    model.get_output_embeddings().weight = table
    assert bench.weights_read(model) == sum(p.nbytes for p in model.parameters())
