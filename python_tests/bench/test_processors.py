"""The bench of processors: what a step with all of them on holds beside its inputs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers.generation import logits_process

from bench import inputs, processors, timing


@pytest.mark.parametrize("name", processors.CASES)
def test_nothing_as_wide_as_the_vocabulary_is_made(name: str) -> None:
    """At batch 128 half a megabyte at most, where the rows that a peer writes out have 12."""
    case = inputs.Case("verify_chain", name, 4096, 128, **processors.CASES[name])
    with torch.inference_mode():
        held = [processors.held(case) for _ in range(3)]
        rows = timing.peak_memory(lambda: torch.empty(128, 6, 4096).fill_(0.0))
    assert held[0]["torch_peak_bytes"] < 2**19 < 2**23 < rows["torch_peak_bytes"]  # type: ignore[operator]
    resident = [one["rss_peak_bytes"] for one in held if one["rss_peak_bytes"] is not None]
    assert min(resident, default=0) < 2**22  # the least: what else the process came to hold meanwhile is not the step's


def test_log_probabilities_are_of_what_the_step_emits() -> None:
    case = inputs.Case("verify_chain", "T=1", 4096, 2, **processors.CASES["T=1"])
    with torch.inference_mode():
        calls, _ = processors.comparable_calls(case, torch.Generator().manual_seed(0))
        emitted, (again, likely) = calls["all on"](), calls["and log-probabilities"]()
    assert torch.equal(again.tokens, emitted.tokens)
    assert torch.equal(likely.log_prob.isfinite(), emitted.tokens >= 0)
    assert likely.top_ids.shape == (2, 6, processors.NUM_TOP)


def test_transformers_makes_its_processors_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = inputs.Case("verify_chain", "T=1", 4096, 2, **processors.CASES["T=1"])
    rng = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        calls = processors.calls_of(case, inputs.chain(case, rng), inputs.Request.random(case, rng))
        monkeypatch.setattr(logits_process.SequenceBiasLogitsProcessor, "__init__", None)
        calls["transformers"]()


def test_what_goes_wrong_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(processors, "comparable_calls", mock.Mock(side_effect=MemoryError))
    threads = str(torch.get_num_threads())
    assert processors.main(["--vocab", "64", "--batch", "1", "--threads", threads]) == 2
    assert capsys.readouterr().err == "processors: out of memory\n"
