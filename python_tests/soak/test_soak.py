"""The soak itself: that it passes on what is right, and sees what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import tiny
from specdec_kernels.drafters import Draft

from .requests import SMALLER, VOCAB, Careless, Requests
from .run import MOST_GROWTH, grown
from .uniformity import Stream, rejected, transformed


def streams(laws: np.ndarray[Any, Any], drawn_from: np.ndarray[Any, Any]) -> dict[str, Stream]:
    rng, found = np.random.default_rng(0), Stream()
    for _ in range(400):
        rows = rng.integers(len(laws), size=12)
        tokens = [int(rng.choice(laws.shape[1], p=drawn_from[row])) for row in rows]
        found.add([transformed(laws[row], token, rng.random()) for row, token in zip(rows, tokens, strict=True)])
    return {"kind": found}


def test_a_right_stream_is_uniform_and_a_wrong_one_is_not() -> None:
    laws = np.random.default_rng(1).dirichlet(np.ones(VOCAB), 20)
    assert rejected(streams(laws, laws)) == {}
    sharper = laws**1.5
    assert "kind" in rejected(streams(laws, sharper / sharper.sum(1, keepdims=True)))


def test_neighbours_that_depend_on_each_other_are_seen() -> None:
    rng, found = np.random.default_rng(2), Stream()
    for value in rng.random(4000):
        found.add([float(value), float((value + 0.1 * rng.random()) % 1)])
    assert found.pvalues()[0] > 1e-3 and "kind" in rejected({"kind": found})


def test_each_number_is_in_one_pair() -> None:
    """The statistic of overlapping pairs varies more than a G-test allows for."""
    found = Stream()
    found.add([0.1, 0.3, 0.5, 0.7, 0.9])
    assert found.single.sum() == 5 and np.argwhere(found.pairs).tolist() == [[0, 2], [4, 5]]


def test_memory_that_grows_is_seen() -> None:
    flat = [300 << 20] * 100
    assert grown(flat) == [] and grown([*flat, *[x + MOST_GROWTH // 4 for x in flat]]) == []
    assert grown([(300 << 20) + i * MOST_GROWTH // 20 for i in range(100)])
    assert grown(flat[:30]) == []  # too short to say


@pytest.mark.long
def test_a_soak_without_a_request_is_no_success() -> None:
    command = [sys.executable, "-m", "python_tests.soak", "--minutes", "0.001", "--threads", "1", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 1 and done.stderr == "wrong: no request was made\n", done.stderr


@pytest.mark.slow
def test_requests_are_served() -> None:
    requests = Requests(3)
    for _ in range(60):
        requests.run()
    counts = requests.tally.counts
    assert requests.tally.wrong == [] and counts["requests"] == 60 and counts["tokens"] > 400
    assert rejected(requests.tally.streams) == {}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_ids_that_are_none_end_their_own_draft_alone(family: str) -> None:
    """What a drafter says never reaches the model's embedding unlooked at."""
    model = tiny(family, 1, **SMALLER)

    class Wrong(Careless):
        def _draft(self, batch: int, width: int) -> Any:
            tokens = torch.full((batch, width), 3)
            tokens[1] = VOCAB + 2
            tokens[2] = -5
            return Draft(tokens)

    ids = torch.randint(3, VOCAB, (3, 5), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"sampling": sk.SamplingParams(0.0), "max_new_tokens": 8, "eos_token_id": []}
    expected = sk.generate(model, ids, drafter=sk.NoDrafter(), **given)
    out = sk.generate(model, ids, drafter=Wrong(np.random.default_rng(0)), **given)
    assert torch.equal(out.tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [False, True])
def test_a_drafter_that_lies_is_seen(lie: bool) -> None:
    requests = Requests(0, lie)
    for _ in range(400):
        requests.ask("table", "model", "token")
    assert requests.tally.wrong == [] and bool(rejected(requests.tally.streams)) is lie
