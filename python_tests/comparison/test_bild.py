"""The big little decoder against a plain loop over single sequences, with full forwards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, full_law, near, prompts, tiny
from specdec_kernels.decoding import Provenance

IDS = torch.tensor([[3, 4, 5], [3, 6, 7]])


def slow_bild(
    target: Any, draft: Any, prompt: Tensor, fallback: float, rollback: float, max_draft_tokens: int,
    max_new_tokens: int, ends: list[int],
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Tokens and where they come from."""
    text: list[int] = []
    origin: list[int] = []
    while len(text) < max_new_tokens and not set(text) & set(ends):
        written: list[int] = []
        most = min(max_draft_tokens, max_new_tokens - len(text) - 1)
        while len(written) < most and not set(written) & set(ends):
            q = full_law(draft, prompt, text + written)[-1]
            if q.max() < fallback:
                break
            written.append(int(q.argmax()))
        p = full_law(target, prompt, text + written)[len(text) :]
        kept = 0
        while kept < len(written) and -math.log(p[kept, written[kept]]) <= rollback:
            kept += 1
        text += written[:kept]
        origin += [int(Provenance.ACCEPTED)] * kept
        if kept < len(written) or not set(written) & set(ends):
            text.append(int(p[kept].argmax()))
            origin.append(int(Provenance.BONUS if kept == len(written) else Provenance.RECOVERED))
    return text, origin


@pytest.mark.short(cases=3)
@pytest.mark.parametrize(
    ("family", "fallback", "rollback", "max_draft_tokens"),
    [("llama", 0.18, 2.5, 10), ("llama", 0.0, 4.0, 3), ("gpt2", 0.15, 2.0, 10), ("gemma2", 0.1, 3.0, 4),
     ("t5", 0.9, 5.0, 10)],
)  # fmt: skip
def test_equals_the_plain_loop(family: str, fallback: float, rollback: float, max_draft_tokens: int) -> None:
    target, draft = tiny(family, 1), near(family, 1, 0.15)
    lengths = (3, 1, 6)
    ids, mask = prompts(*lengths)
    origins = set()
    for ends in ([], [5, 17, 29, 44]):
        out = sk.bild(
            target, ids, attention_mask=mask, draft_model=draft, fallback=fallback, rollback=rollback,
            max_draft_tokens=max_draft_tokens, max_new_tokens=24, eos_token_id=ends,
        )  # fmt: skip
        accepted = 0
        for row, length in enumerate(lengths):
            tokens, origin = slow_bild(
                target, draft, ids[row, -length:], fallback, rollback, max_draft_tokens, 24, ends
            )
            n = int(out.num_tokens[row])
            assert out.tokens[row].tolist() == tokens + [-1] * (out.tokens.shape[1] - n)
            assert out.provenance[row, :n].tolist() == origin
            accepted += origin.count(int(Provenance.ACCEPTED))
            origins |= set(origin)
        stats = out.stats
        assert stats.num_accepted == accepted and not out.status.any()
        assert stats.target_forwards < 24 and stats.draft_steps <= stats.target_forwards
    assert origins == {Provenance.ACCEPTED, Provenance.RECOVERED, Provenance.BONUS}


def test_extremes() -> None:
    target, draft = tiny("llama", 1), tiny("llama", 2)
    ids, mask = prompts(3, 9, 6)
    kw: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 22, "eos_token_id": []}
    plain = sk.generate(target, ids, drafter=sk.NoDrafter(), sampling=sk.SamplingParams(0.0), **kw)
    for changes in ({"fallback": 1.5}, {"fallback": 0.0, "rollback": 0.0, "max_draft_tokens": 1}):
        out = sk.bild(target, ids, draft_model=draft, **changes, **kw)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.stats.target_forwards == 22 and out.stats.num_accepted == 0
    out = sk.bild(target, ids, draft_model=draft, fallback=0.0, rollback=math.inf, **kw)
    assert out.stats.target_forwards == 2 and out.stats.num_drafted == out.stats.num_accepted == 60
    assert out.provenance.tolist() == [([0] * 10 + [int(Provenance.BONUS)]) * 2] * 3


def test_values_that_are_no_numbers() -> None:
    """A NaN is never kept, an infinity always; the flags of the rows that were looked at."""
    target, draft = TableRunner.random(seed=1), TableRunner.random(seed=2)
    draft.table[..., 1] = 40.0  # it writes nothing else
    kw: dict[str, Any] = {"draft_model": draft, "max_new_tokens": 8, "eos_token_id": [], "rollback": 100.0}
    target.table[..., 1] = torch.nan
    out = sk.bild(target, IDS, **kw)
    assert out.stats.num_accepted == 0 and out.status.tolist() == [int(sk.Status.NAN)] * 2
    target.table[..., 1] = torch.inf
    out = sk.bild(target, IDS, **kw)
    assert bool((out.tokens == 1).all()) and out.stats.num_rejected == 0
    assert out.status.tolist() == [int(sk.Status.INF)] * 2
    target.table[...] = -torch.inf
    out = sk.bild(target, IDS, **kw)
    assert bool((out.tokens == 0).all()) and out.stats.num_accepted == 0


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"fallback": -0.1}, ValueError, r"fallback must be in \[0.0, inf\], got -0.1"),
        ({"fallback": "0.6"}, TypeError, "fallback must be a number, got str"),
        ({"rollback": math.nan}, ValueError, r"rollback must be in \[0.0, inf\], got nan"),
        ({"max_draft_tokens": 0}, ValueError, r"max_draft_tokens must be in \[1, 64\], got 0"),
        ({"max_draft_tokens": 2.0}, TypeError, "max_draft_tokens must be an integer, got float"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    target, draft = TableRunner.random(), TableRunner.random(seed=1)
    with pytest.raises(kind, match=f"^bild: {message}"):
        sk.bild(target, IDS, draft_model=draft, **changes)
    assert target.forwards == draft.forwards == []
