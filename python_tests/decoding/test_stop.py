"""Sequences that end because the caller says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.fake_cuda import NEAR, TARGET, FakeCuda, same
from python_tests.decoding.models import CapturableTable, TableRunner, prompts
from specdec_kernels import Provenance
from specdec_kernels.decoding import DecodingState, StepResult, graph
from specdec_kernels.decoding.costs import CostTable

LIMITS = (7, 1, 100, 12)  # tokens after which each sequence is ended; the third goes on to its end


class Limits:
    """Ends each sequence after so many tokens, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = [[] for _ in LIMITS]

    def __call__(self, tokens: list[np.ndarray]) -> list[int | None]:
        answers: list[int | None] = []
        for text, new, limit in zip(self.seen, tokens, LIMITS, strict=True):
            assert len(text) < limit or not len(new), "tokens of a sequence that has ended"
            kept = limit - len(text)
            text += new.tolist()
            answers.append(kept if 0 < kept <= len(new) else None)
        return answers


def run(**changes: Any) -> sk.GenerationOutput:
    ids, mask = prompts(4, 2, 6, 3, vocab=23)
    kw: dict[str, Any] = {
        "attention_mask": mask, "drafter": sk.ModelDrafter(CapturableTable(NEAR)), "max_new_tokens": 30,
        "num_speculative_tokens": 4, "seeds": torch.arange(4) * 9, "eos_token_id": [],
    }  # fmt: skip
    return sk.generate(CapturableTable(TARGET), ids, **kw | changes)


@pytest.mark.parametrize("num_speculative_tokens", [0, 4, "auto"])
def test_each_sequence_ends_where_it_is_told(num_speculative_tokens: int | str) -> None:
    stop = Limits()
    out = run(stop=stop, num_speculative_tokens=num_speculative_tokens, acceptance="match")
    whole = run(acceptance="match")
    assert out.num_tokens.tolist() == [7, 1, 30, 12]
    for b, n in enumerate(out.num_tokens):
        assert out.tokens[b, :n].tolist() == whole.tokens[b, :n].tolist() == stop.seen[b][:n]
    assert (out.tokens >= 0).sum() == out.stats.num_tokens == 50
    emitted = out.provenance != Provenance.PADDING
    assert torch.equal(emitted, out.tokens >= 0)
    assert int((out.provenance == Provenance.ACCEPTED).sum()) == out.stats.num_accepted


def test_the_end_of_all_is_the_end() -> None:
    forwards = []
    for stop in (None, lambda tokens: [len(new) for new in tokens]):
        out = run(stop=stop, drafter=sk.NoDrafter())
        forwards.append(out.stats.target_forwards)
    assert forwards == [30, 1]


@pytest.mark.parametrize("drafter", [sk.NoDrafter, lambda: sk.ModelDrafter(CapturableTable(NEAR))])
def test_a_step_launched_ahead_leaves_no_trace(drafter: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host learns of an end when the next step is under way."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    captured = run(drafter=drafter(), stop=Limits())
    assert "replay" in fake.log and captured.num_tokens.tolist() == [7, 1, 30, 12]
    monkeypatch.setattr(graph, "_is_cuda", lambda device: False)
    same(captured, run(drafter=drafter(), stop=Limits()))


def test_drafters_get_what_was_kept() -> None:
    committed: list[list[int]] = [[] for _ in LIMITS]

    class Watched(sk.NgramDrafter):
        def commit(self, state: DecodingState, result: StepResult) -> None:
            super().commit(state, result)
            for text, row, n in zip(committed, result.tokens, result.num_tokens, strict=True):
                text += row[:n].tolist()

    out = run(drafter=Watched(2), stop=Limits())
    assert committed == [row[row >= 0].tolist() for row in out.tokens]


@pytest.mark.parametrize("drafter", [sk.NgramDrafter, sk.NgramLMDrafter])
@pytest.mark.parametrize("lengths", [3, CostTable(np.zeros(1, np.int64), np.array([[1.0, 1.01, 1.02, 1.03]]))])
def test_a_sequence_that_stopped_within_a_draft_holds_up_no_other(
    drafter: Callable[[], Any], lengths: int | CostTable
) -> None:
    """Its drafts are right, so that a step gives it more than is kept."""
    logits = torch.full((23, 23, 23), -30.0)
    logits[:, torch.arange(23), torch.arange(23).roll(-1)] = 30.0
    ids, lasted = torch.arange(23).repeat(2)[None, :30].repeat(4, 1), []
    how: dict[str, Any] = {"max_new_tokens": 30, "acceptance": "greedy", "eos_token_id": []}
    for each, number in ((sk.NoDrafter(), 0), (drafter(), lengths)):
        stop = Limits()
        out = sk.generate(
            TableRunner(logits), ids, drafter=each, num_speculative_tokens=number, stop=stop,
            streamer=lambda rows: lasted.append([len(row) for row in rows]), **how,
        )  # fmt: skip
        assert (
            out.num_tokens.tolist() == [7, 1, 30, 12]
            and stop.seen[2] == ((ids[2, -1] + 1 + torch.arange(30)) % 23).tolist()
        )
    assert max(max(counts) for counts in lasted) > 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda tokens: [None], "stop must answer for 4 sequences, got 1 answers"),
        (lambda tokens: [len(tokens[0]) + 1, *[None] * 3], r"stop must keep 0 … \d tokens of sequence 0, got \d"),
        (lambda tokens: [None, -1, None, None], r"stop must keep 0 … \d tokens of sequence 1, got -1"),
    ],
)
def test_answers_that_make_no_sense(answer: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"generate: {message}"):
        run(stop=answer)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "a list of answers, got NoneType"),
        ("none", "a list of answers, got str"),
        (dict.fromkeys(range(4)), "a list of answers, got dict"),
        (np.array(0), "a list of answers, got ndarray"),
        ([False] * 4, "integers or None, got bool"),
        (["1"] * 4, "integers or None, got str"),
        ([1.0] * 4, "integers or None, got float"),
    ],
)
def test_answers_of_other_types(answers: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"generate: stop must (give|answer with) {message}"):
        run(stop=lambda tokens: answers)


def test_answers_may_be_integers_of_any_kind() -> None:
    kinds: list[Any] = [
        [0, None, 1, None],
        (np.int64(0), None, np.array(1), None),
        [torch.tensor(0), None, True + 0, None],
    ]
    lengths = [run(stop=lambda tokens, kind=kind: kind).num_tokens.tolist() for kind in kinds]
    assert lengths[0] == lengths[1] == lengths[2] and lengths[0][0] == 0
    assert run(stop=lambda tokens: np.zeros(4, dtype=np.int32)).num_tokens.tolist() == [0] * 4
