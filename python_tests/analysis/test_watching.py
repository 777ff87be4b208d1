"""A watched generation: the same tokens, the acceptances that the rule really has, and where the time goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.analysis.slow_models import SlowDrafter, SlowRunner, Ticking
from python_tests.decoding.models import RepeatLast, TableRunner, prompts, tiny, unlike_pair
from specdec_kernels.analysis.watching import Unlikely, Watched, watch
from specdec_kernels.decoding import Provenance
from specdec_kernels.drafters import Drafter
from specdec_kernels.medusa import MedusaHeads

NUM_DRAFT = 4


def table_case(drafter: Drafter, temperature: float, tokens: int = 60, **options: Any) -> tuple[TableRunner, Watched]:
    target, ids = TableRunner.random(spread=2.0), prompts(5, 5, 5, vocab=23)[0]
    options = {"num_speculative_tokens": NUM_DRAFT, "seeds": torch.arange(3), "max_new_tokens": tokens} | options
    options |= {"sampling": sk.SamplingParams(temperature)}
    seen = watch(target, ids, drafter=drafter, **options)
    drafter_again = type(drafter)(*([drafter.draft_model] if isinstance(drafter, sk.ModelDrafter) else []))
    plain = sk.generate(target, ids, drafter=drafter_again, **options)
    assert torch.equal(seen.output.tokens, plain.tokens)
    return target, seen


def steps_of(seen: Watched, sequence: int) -> list[list[int]]:
    """The tokens that each step of a sequence emitted."""
    steps: list[list[int]] = [[]]
    tokens, origins = seen.output.tokens[sequence].tolist(), seen.output.provenance[sequence].tolist()
    for token, origin in zip(tokens, origins, strict=True):
        if origin == Provenance.PADDING:
            break
        steps[-1].append(token)
        if origin != Provenance.ACCEPTED:
            steps.append([])
    return [step for step in steps if step]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["model", "one-hot"])
def test_the_acceptance_is_the_overlap_of_the_distributions(kind: str, temperature: float) -> None:
    """Recomputed in float64 from the tables, along the text."""
    draft = TableRunner.random(seed=1)
    target, seen = table_case(sk.ModelDrafter(draft) if kind == "model" else RepeatLast(), temperature)
    ids = prompts(5, 5, 5, vocab=23)[0]
    checked = 0
    for sequence in range(3):
        steps = steps_of(seen, sequence)
        for k, row in enumerate(seen.acceptance[seen.sequence == sequence]):
            before = ids[sequence].tolist() + sum(steps[:k], [])
            room = min(NUM_DRAFT, 60 - len(before) + 5 - 1)
            reached = min(room, len(steps[k]))  # a step emits one token more than it accepts
            assert np.isnan(row).tolist() == [False] * reached + [True] * (NUM_DRAFT - reached)
            for i in range(reached):
                text = before + steps[k][:i]
                p, q = ((t.table[text[-2], text[-1]].double() / temperature).softmax(-1) for t in (target, draft))
                exact = torch.minimum(p, q).sum() if kind == "model" else p[before[-1]]
                assert row[i] == pytest.approx(float(exact), abs=1e-5)
                checked += 1
    assert checked > 60


def of_medusa(temperature: float) -> Watched:
    model = tiny("llama", 1)
    torch.manual_seed(2)
    heads = MedusaHeads.of_model(model, 3, sk.TokenMap(torch.arange(3, 60)))
    tree = sk.DraftTree.cartesian([4, 2, 1])
    return watched_model(model, sk.MedusaDrafter(heads, tree), temperature)


def of_lookups(temperature: float) -> Watched:
    return watched_model(tiny("llama", 1), sk.NgramTreeDrafter(num_nodes=12, max_depth=3), temperature)


def of_chains(temperature: float) -> Watched:
    return watched_model(tiny("llama", 1), sk.NgramDrafter(2), temperature, num_speculative_tokens=3)


def watched_model(model: Any, drafter: Drafter, temperature: float, **options: Any) -> Watched:
    ids, mask = prompts(30, 25, 30, 28)
    ids[:, -12:] = ids[:, -24:-12]  # something to look up
    options |= {"attention_mask": mask, "sampling": sk.SamplingParams(temperature, top_k=3)}
    options = {"num_speculative_tokens": 3, "seeds": torch.arange(4), **options}
    seen = watch(model, ids, drafter=drafter, max_new_tokens=60, eos_token_id=[], **options)
    plain = sk.generate(model, ids, drafter=drafter, max_new_tokens=60, eos_token_id=[], **options)
    assert torch.equal(seen.output.tokens, plain.tokens) and plain.stats.num_accepted > 3
    return seen


@pytest.mark.parametrize("case", [of_medusa, of_lookups, of_chains])
def test_as_many_are_accepted_as_the_acceptances_say(case: Any) -> None:
    """Greedily every acceptance is 0 or 1, and their sum what was accepted; at T = 1 the difference is a martingale."""
    greedy = case(0.0)
    judged = greedy.acceptance[greedy.acceptance >= 0]
    assert set(judged.round(6)) <= {0.0, 1.0} and judged.sum() == greedy.output.stats.num_accepted
    sampled = case(1.0)
    judged = sampled.acceptance[sampled.acceptance >= 0]
    spread = np.sqrt((judged * (1 - judged)).sum())
    assert 0 < spread and abs(judged.sum() - sampled.output.stats.num_accepted) < 4 * spread


@pytest.mark.parametrize("draft", ["model", "one-hot"])
def test_what_counts_is_what_is_measured(draft: str) -> None:
    """Greedy decoding whatever `sampling` says, processors, a grammar."""
    target = TableRunner.random(spread=2.0)
    kw: dict[str, Any] = {"seeds": torch.arange(4), "max_new_tokens": 60, "eos_token_id": []}
    ids = prompts(5, 5, 5, 5, vocab=23)[0]

    def seen(**options: Any) -> tuple[np.ndarray, Any]:
        other = TableRunner(target.table + torch.randn(23, 23, 23, generator=torch.Generator().manual_seed(1)))
        drafter = sk.ModelDrafter(other) if draft == "model" else RepeatLast()
        found = watch(target, ids, drafter=drafter, num_speculative_tokens=3, **kw, **options)
        return found.acceptance[found.acceptance >= 0], found.output.stats

    judged, stats = seen(acceptance="greedy", sampling=sk.SamplingParams(1.0))
    assert set(judged.round(6)) <= {0.0, 1.0} and judged.sum() == stats.num_accepted
    few = {"processors": sk.Processors(allowed_ids=[5, 6])}
    for options in (few, {"grammar": FiveOrSix()}, few | {"acceptance": "greedy"}):
        judged, stats = seen(**options)
        spread = np.sqrt((judged * (1 - judged)).sum())
        assert stats.num_accepted > 50 and abs(judged.sum() - stats.num_accepted) <= 4 * spread


class FiveOrSix(sk.Grammar):
    def fill(self, rows: torch.Tensor, drafts: list[np.ndarray]) -> None:
        rows[...] = 1 << 5 | 1 << 6

    def commit(self, tokens: list[np.ndarray]) -> None: ...


def test_nothing_to_propose_is_told_from_a_rejection() -> None:
    seen = of_chains(1.0)
    stats = seen.output.stats
    silent = (seen.acceptance[:, 0] == -1).sum()
    assert 0 < silent < len(seen.acceptance)
    assert (seen.acceptance[:, 0] >= 0).sum() == stats.drafted_per_position[0]
    assert np.isnan(seen.acceptance[seen.acceptance[:, 0] == -1, 1:]).all()


def test_a_step_of_which_nothing_is_kept_counts_for_nothing() -> None:
    """It had a draft, of which nobody knows how far it was judged."""
    calls = 0

    def stop(new: list[Any]) -> list[int | None]:
        nonlocal calls
        calls += 1
        return [0 if calls == 2 else None for _ in new]

    _, seen = table_case(RepeatLast(), 1.0, 8)
    stopped = watch(
        TableRunner.random(spread=2.0), prompts(5, 5, 5, vocab=23)[0], drafter=RepeatLast(), stop=stop,
        max_new_tokens=8, num_speculative_tokens=NUM_DRAFT, seeds=torch.arange(3), sampling=sk.SamplingParams(1.0),
    )  # fmt: skip
    assert calls == 2 and len(stopped.acceptance) == 3 < len(seen.acceptance)
    assert not any(np.isnan(row[0]) for row in stopped.acceptance)


def test_a_cascade_and_an_encoder_decoder_are_watched() -> None:
    """The first has a row of the draft more than tokens; both may end with an accepted token."""
    ids, mask = prompts(6, 4, 9, 5)
    for kind, law in (("llama", sk.laws.Diff(0.1, bonus="cascade")), ("t5", None)):
        target, draft = unlike_pair(kind)
        options = {"attention_mask": mask, "seeds": torch.arange(4), "num_speculative_tokens": 3, "target_law": law}
        options |= {"max_new_tokens": 40, "eos_token_id": [5, 9, 14]}
        seen = watch(target, ids, drafter=sk.ModelDrafter(draft), **options)
        plain = sk.generate(target, ids, drafter=sk.ModelDrafter(draft), **options)
        assert torch.equal(seen.output.tokens, plain.tokens) and (seen.output.num_tokens < 40).any()
        judged = seen.acceptance[seen.acceptance >= 0]
        assert len(judged) == plain.stats.num_accepted + plain.stats.num_rejected and plain.stats.num_accepted > 5


def test_the_time_of_each_part() -> None:
    clock, stop = Ticking(), 0.25
    target, drafter = SlowRunner(TableRunner.random().table), SlowDrafter()
    target.clock = drafter.clock = clock

    def looked_at(rows: Any) -> list[None]:
        clock.time += stop  # within the loop: part of the rest
        return [None] * len(rows)

    seen = watch(
        target, prompts(6, vocab=23)[0], drafter=drafter, clock=clock, acceptances=False, stop=looked_at,
        num_speculative_tokens=3, max_new_tokens=8, eos_token_id=[], seeds=torch.tensor([1]),
    )  # fmt: skip
    assert seen.acceptance.shape == (0, 0) and len(seen.sequence) == 0
    assert len(seen.rows) == len(seen.seconds) == seen.output.stats.target_forwards
    for rows, (drafting, forward, rest) in zip(seen.rows, seen.seconds, strict=True):
        assert (drafting, forward, rest) == (4.0 if rows == 4 else 1.0, 10.0 + rows, stop)
    assert set(seen.rows) == {1, 4}


def test_watching_costs_no_time_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drafter = Ticking(), SlowDrafter()
    target = SlowRunner(TableRunner.random().table)
    target.clock = drafter.clock = clock
    from specdec_kernels.analysis import watching

    def slow(*arguments: Any, **options: Any) -> Any:
        clock.time += 100
        return sk.verify_chain(*arguments, **options)

    monkeypatch.setattr(watching, "verify_chain", slow)
    seen = watch(target, prompts(6, vocab=23)[0], drafter=drafter, clock=clock, max_new_tokens=8, eos_token_id=[])
    assert clock.time > 100 and (seen.seconds.sum(1) < 40).all()


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^watch: drafter must be a Drafter \(NoDrafter\(\) for none\), got str"):
        watch(TableRunner.random(), prompts(4, vocab=23)[0], drafter="lookup")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^watch: num_speculative_tokens must be an integer, got 'auto'"):
        watch(TableRunner.random(), prompts(4, vocab=23)[0], drafter=sk.NgramDrafter(), num_speculative_tokens="auto")
    with pytest.raises(ValueError, match="^watch: processors must be None with a drafter of trees"):
        watch(tiny("llama"), prompts(4)[0], drafter=sk.NgramTreeDrafter(), processors=sk.Processors(banned_ids=[3]))
    with pytest.raises(ValueError, match="NgramTreeDrafter needs a decoder-only target that takes trees"):
        watch(TableRunner.random(), prompts(4, vocab=23)[0], drafter=sk.NgramTreeDrafter())
    with pytest.raises(ValueError, match="^generate: max_new_tokens must be in"):
        watch(TableRunner.random(), prompts(4, vocab=23)[0], drafter=sk.NoDrafter(), max_new_tokens=0)
    target = TableRunner.random()
    with pytest.raises(ValueError, match="^watch: drafter must have a Runner of its own, got the target's"):
        watch(target, prompts(4, vocab=23)[0], drafter=sk.ModelDrafter(target))


def test_a_draft_of_unlikely_tokens_is_rejected() -> None:
    seen = watch(
        TableRunner.random(), prompts(5, 5, vocab=23)[0], drafter=Unlikely(), num_speculative_tokens=3,
        max_new_tokens=40, sampling=sk.SamplingParams(0.0),
    )  # fmt: skip
    assert seen.output.stats.acceptance_rate < 0.2
