"""The decoding loop: its tokens are those of plain decoding, whatever the drafter, draft length, batch or padding."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import (
    FAMILIES,
    HostSyncs,
    NarrowTable,
    RepeatLast,
    TableRunner,
    TooMany,
    prompts,
    texts,
    tiny,
)
from specdec_kernels.decoding import DecodingState, Provenance, StepResult
from specdec_kernels.decoding.launching import Steps
from specdec_kernels.drafters import Draft, Drafter

GREEDY = sk.SamplingParams(temperature=0.0)
DRAFTERS: dict[str, Callable[[Any, Any], Drafter]] = {
    "none": lambda target, draft: sk.NoDrafter(),
    "ngram": lambda target, draft: sk.NgramDrafter(3),
    "model": lambda target, draft: sk.ModelDrafter(draft),
    "itself": lambda target, draft: sk.ModelDrafter(target),
    "narrow": lambda target, draft: sk.ModelDrafter(draft, token_map=sk.TokenMap(torch.arange(40, 3, -1))),
}


# --- real classes -----------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(7,), (3, 9, 6), (1, 4, 9, 2, 7, 5, 8, 3)], ids=["1", "3", "8"])
def test_greedy_equals_the_models_own_generate(family: str, lengths: tuple[int, ...], turn: int) -> None:
    """Each drafter with one of three draft lengths, in turns."""
    target, draft = tiny(family, 1), tiny(family, 2)
    ids, mask = prompts(*lengths)
    own = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
    assert own[:, -20:].unique().numel() > 3, "the model repeats itself: the comparison would show nothing"
    for i, (name, make) in enumerate(DRAFTERS.items()):
        num_speculative_tokens = (1, 5, "auto")[(i + turn) % 3]
        out = sk.generate(
            target, ids, attention_mask=mask, drafter=make(target, draft), sampling=GREEDY, max_new_tokens=24,
            num_speculative_tokens=num_speculative_tokens,
        )  # fmt: skip
        assert torch.equal(out.sequences, own), (name, num_speculative_tokens)


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_match_equals_plain_sampling(family: str) -> None:
    target, draft = tiny(family, 1), tiny(family, 2)
    ids, mask = prompts(3, 9, 6)
    seeds = torch.tensor([5, -1, 2**62])
    sampling = sk.SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
    kw: dict[str, Any] = {
        "attention_mask": mask, "sampling": sampling, "seeds": seeds, "max_new_tokens": 20, "acceptance": "match",
        "eos_token_id": [],
    }  # fmt: skip
    plain = sk.generate(target, ids, drafter=sk.NoDrafter(), **kw)
    for name, make in DRAFTERS.items():
        for num_speculative_tokens in (2, 6):
            out = sk.generate(
                target, ids, drafter=make(target, draft), num_speculative_tokens=num_speculative_tokens, **kw
            )
            assert torch.equal(out.tokens, plain.tokens), (name, num_speculative_tokens)
    # and plain sampling is what it says: the draw with the noise of the token's position, from a full forward
    if family != "t5":
        for row, length in enumerate(mask.sum(1).tolist()):
            text = ids[row, -length:]
            for token in plain.tokens[row, :6]:
                keys = sk.noise_keys(seeds[row : row + 1], torch.tensor([[len(text)]]))
                with torch.inference_mode():
                    logits = target(text[None]).logits[:, -1:]
                    assert sk.sample(logits, sampling, noise_keys=keys).token.item() == token
                text = torch.cat([text, token[None]])


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_a_draft_equal_to_the_target_is_always_accepted(acceptance: str) -> None:
    target = tiny("llama")
    ids, mask = prompts(4, 7)
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.ModelDrafter(target), acceptance=acceptance, max_new_tokens=33,
        num_speculative_tokens=7, eos_token_id=[], seeds=torch.tensor([1, 2]),
    )  # fmt: skip
    # A coin within rounding of 1 may still reject; a hole in the draft's cache after a whole draft would reject often.
    assert out.stats.num_rejected <= 1
    assert out.stats.mean_acceptance_length > 6.5


def test_end_ids_end_each_sequence_by_itself() -> None:
    target, draft = tiny("llama", 1), tiny("llama", 2)
    ids, mask = prompts(3, 9, 6, 5)
    free = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.NoDrafter(), sampling=GREEDY, max_new_tokens=30, eos_token_id=[]
    )
    ends = [int(free.tokens[0, 4]), int(free.tokens[2, 11])]
    own = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=30, eos_token_id=ends)
    for make in DRAFTERS.values():
        for acceptance in ("token", "match", "greedy"):
            out = sk.generate(
                target, ids, attention_mask=mask, drafter=make(target, draft), sampling=GREEDY, max_new_tokens=30,
                eos_token_id=ends, acceptance=acceptance,
            )  # fmt: skip
            assert torch.equal(out.sequences, own)
            for row, n in zip(out.tokens.tolist(), out.num_tokens.tolist(), strict=True):
                assert not set(ends) & set(row[: n - 1]) and set(row[n:]) <= {-1}
                assert row[n - 1] in ends or n == 30
    one = sk.generate(
        target,
        ids,
        attention_mask=mask,
        drafter=sk.NoDrafter(),
        sampling=GREEDY,
        max_new_tokens=30,
        eos_token_id=ends[0],
    )
    assert one.num_tokens[0] <= 5


# --- a model whose logits do not depend on the rows beside: strict ----------------------------------------------------


def table_drafters(target: TableRunner) -> list[Drafter]:
    near = TableRunner(target.table + TableRunner.random(target.vocab_size, 9, 1.0).table)
    return [
        sk.NgramDrafter(2), sk.ModelDrafter(near), sk.ModelDrafter(near, sk.SamplingParams(0.5, top_k=4)), RepeatLast(),
    ]  # fmt: skip


@pytest.mark.parametrize("acceptance", ["greedy", "match"])
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 3, 8, "auto"])
def test_strictly_lossless(acceptance: str, num_speculative_tokens: int | str) -> None:
    target = TableRunner.random()
    ids, mask = prompts(1, 5, 3, 8, 2, 2, 7, 4, vocab=23)
    kw: dict[str, Any] = {
        "attention_mask": mask,
        "seeds": torch.arange(8) * 77,
        "max_new_tokens": 60,
        "eos_token_id": 4,
    }
    plain = sk.generate(target, ids, drafter=sk.NoDrafter(), acceptance=acceptance, **kw)
    assert plain.num_tokens.unique().numel() > 2
    for drafter in table_drafters(target):
        out = sk.generate(
            target, ids, drafter=drafter, acceptance=acceptance, num_speculative_tokens=num_speculative_tokens, **kw
        )
        assert torch.equal(out.tokens, plain.tokens), type(drafter).__name__


@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
def test_a_sequence_does_not_depend_on_its_neighbours(acceptance: str) -> None:
    target = TableRunner.random()
    lengths = (1, 5, 3, 8, 2)
    ids, mask = prompts(*lengths, vocab=23)
    seeds = torch.tensor([3, 1, 4, 1, 5])
    for drafter in table_drafters(target):
        run = lambda rows, cut: texts(  # noqa: E731
            sk.generate(
                target, ids[rows, cut:], attention_mask=mask[rows, cut:], seeds=seeds[rows], drafter=drafter,  # noqa: B023
                acceptance=acceptance, max_new_tokens=25, num_speculative_tokens=4, eos_token_id=4,
            )
        )  # fmt: skip
        together = run([0, 1, 2, 3, 4], 0)
        order = [4, 2, 0, 3, 1]
        assert run(order, 0) == [together[i] for i in order]
        for i, length in enumerate(lengths):
            assert run([i], 8 - length) == [together[i]]
        assert run([1, 2], 3) == together[1:3]


@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_rows_may_have_their_own_sampling_parameters(acceptance: str) -> None:
    target = TableRunner.random()
    ids, mask = prompts(3, 3, 5, vocab=23)
    temperatures, top_ks, seeds = torch.tensor([0.0, 1.0, 0.7]), torch.tensor([0, 0, 3]), torch.tensor([8, 9, 10])
    kw: dict[str, Any] = {"acceptance": acceptance, "max_new_tokens": 30, "num_speculative_tokens": 3}
    for drafter in [sk.NoDrafter(), *table_drafters(target)]:
        sampling = sk.SamplingParams(temperatures, top_k=top_ks)
        out = texts(sk.generate(
            target, ids, attention_mask=mask, sampling=sampling, seeds=seeds, drafter=drafter, **kw
        ))  # fmt: skip
        for row in range(3):
            keep = ids[row : row + 1, mask[row] == 1]
            alone = sk.SamplingParams(float(temperatures[row]), top_k=int(top_ks[row]))
            one = sk.generate(target, keep, sampling=alone, seeds=seeds[row : row + 1], drafter=drafter, **kw)
            assert texts(one) == [out[row]]


def test_length_limits() -> None:
    target = TableRunner.random()
    ids, mask = prompts(2, 6, vocab=23)
    for limit in (1, 2, 5):
        for drafter in [sk.NoDrafter(), *table_drafters(target)]:
            out = sk.generate(
                target, ids, attention_mask=mask, drafter=drafter, sampling=GREEDY, max_new_tokens=limit,
                num_speculative_tokens=8,
            )  # fmt: skip
            assert out.num_tokens.tolist() == [limit, limit] and out.sequences.shape == (2, 6 + limit)


def test_seeds_default_to_torchs_generator() -> None:
    target = TableRunner.random()
    ids, _ = prompts(4, vocab=23)
    run = lambda: sk.generate(  # noqa: E731
        target, ids, drafter=sk.NgramDrafter(2), max_new_tokens=30, num_speculative_tokens=5
    ).tokens.tolist()
    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert run() == first != second


# --- what is reported -------------------------------------------------------------------------------------------------


def test_provenance_and_counts() -> None:
    target = TableRunner.random()
    ids, mask = prompts(4, 2, vocab=23)
    steps: list[list[np.ndarray]] = []
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.ModelDrafter(TableRunner(target.table)), sampling=GREEDY,
        max_new_tokens=9, num_speculative_tokens=3, streamer=steps.append,
    )  # fmt: skip
    assert out.provenance.tolist() == [[0, 0, 0, 2, 0, 0, 0, 2, 2]] * 2
    stats = out.stats
    assert (stats.num_tokens, stats.num_steps, stats.target_forwards, stats.draft_steps) == (18, 6, 3, 2)
    assert (stats.num_drafted, stats.num_accepted, stats.num_rejected) == (12, 12, 0)
    assert stats.acceptance_rate == stats.alpha == 1.0 and stats.mean_acceptance_length == 3.0
    assert stats.acceptance_rate_per_position.tolist() == [1.0, 1.0, 1.0]
    assert stats.tokens_per_second > 0 and out.status.tolist() == [0, 0]
    assert [[len(row) for row in step] for step in steps] == [[4, 4], [4, 4], [1, 1]]
    assert np.concatenate([step[1] for step in steps]).tolist() == out.tokens[1].tolist()

    out = sk.generate(
        target, ids, attention_mask=mask, drafter=RepeatLast(), acceptance="match", max_new_tokens=40,
        eos_token_id=4, num_speculative_tokens=3, seeds=torch.tensor([0, 1]),
    )  # fmt: skip
    emitted = out.provenance != Provenance.PADDING
    assert torch.equal(emitted.sum(1), out.num_tokens) and int(emitted.sum()) == out.stats.num_tokens
    assert int((out.provenance == Provenance.ACCEPTED).sum()) == out.stats.num_accepted
    assert int((out.provenance == Provenance.RECOVERED).sum()) == out.stats.num_rejected > 0
    repeats = torch.cat([ids[:, -1:], out.tokens], 1)
    accepted = (out.provenance == Provenance.ACCEPTED).nonzero()
    assert all(repeats[b, t] == repeats[b, t + 1] for b, t in accepted.tolist())


def test_a_placeholder_ends_a_draft_and_counts_for_nothing() -> None:
    class OneOfFour(RepeatLast):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            tokens = super().propose(state, num_tokens).tokens.clone()
            tokens[:, 1:] = sk.PLACEHOLDER_TOKEN_ID
            return Draft(tokens)

    target = TableRunner.random()
    ids, mask = prompts(4, 2, vocab=23)
    kw: dict[str, Any] = {
        "attention_mask": mask, "acceptance": "match", "max_new_tokens": 40, "seeds": torch.tensor([0, 1]),
        "eos_token_id": [],
    }  # fmt: skip
    out = sk.generate(target, ids, drafter=OneOfFour(), num_speculative_tokens=4, **kw)
    assert torch.equal(out.tokens, sk.generate(target, ids, drafter=sk.NoDrafter(), **kw).tokens)
    stats = out.stats
    assert stats.num_accepted > 0 and stats.num_accepted + stats.num_rejected == stats.num_drafted
    assert len(stats.acceptance_rate_per_position) == 1


@pytest.mark.parametrize("auto", [False, True])
def test_a_draft_may_be_of_fewer_tokens_for_some(auto: bool) -> None:
    """Of none at all where the number is negative, too."""

    class Some(RepeatLast):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            return Draft(super().propose(state, num_tokens).tokens, num_draft_tokens=torch.tensor([2, -1, 0]))

    target, (ids, mask) = TableRunner.random(), prompts(4, 2, 3, vocab=23)
    kw: dict[str, Any] = {"attention_mask": mask, "acceptance": "match", "max_new_tokens": 20, "eos_token_id": [],
                          "seeds": torch.tensor([0, 1, 2])}  # fmt: skip
    out = sk.generate(target, ids, drafter=Some(), num_speculative_tokens="auto" if auto else 4, **kw)
    assert torch.equal(out.tokens, sk.generate(target, ids, drafter=sk.NoDrafter(), **kw).tokens)
    assert out.stats.num_drafted > 0 and set(out.provenance[1:].flatten().tolist()) == {Provenance.BONUS}


def test_reading_prompts_is_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still otherwise."""
    now, target = [0.0], TableRunner.random()
    prefill = target.prefill

    def read(prompt: Any) -> None:
        now[0] += 10
        prefill(prompt)

    monkeypatch.setattr(target, "prefill", read)
    module = importlib.import_module("specdec_kernels.decoding.generate")
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    stats = sk.generate(target, prompts(4, vocab=23)[0], drafter=sk.NgramDrafter(2), max_new_tokens=3).stats
    assert (stats.seconds_prefill, stats.seconds_decode) == (10, 0)


def test_a_drafter_is_prepared_before_it_proposes() -> None:
    """And is given the room that a step has."""

    class Prepared(RepeatLast):
        ready = False

        def prepare(self, state: DecodingState) -> None:
            self.ready = True

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            assert self.ready and state.host_limits.max() == num_tokens
            self.ready = False
            return super().propose(state, num_tokens)

    ids, _ = prompts(4, 6, vocab=23)
    out = sk.generate(TableRunner.random(), ids, drafter=Prepared(), max_new_tokens=30)
    assert out.stats.num_drafted > 0


def test_a_drafter_that_is_asked_for_the_bonus_alone_is_counted() -> None:
    target, draft = TableRunner.random(), TableRunner.random(seed=1)
    law = sk.laws.Diff(0.1, bonus="cascade")
    out = sk.generate(
        target, prompts(4, vocab=23)[0], drafter=sk.ModelDrafter(draft), target_law=law, num_speculative_tokens=0,
        max_new_tokens=7, eos_token_id=[],
    )  # fmt: skip
    assert out.stats.draft_steps == out.stats.num_steps == 7


def test_a_streamer_is_told_nothing_of_a_call_that_is_refused() -> None:
    class Told:
        heard: list[str] = []

        def put(self, tokens: Tensor) -> None:
            self.heard.append("put")

        def end(self) -> None:
            self.heard.append("end")

    class Released(TableRunner):
        def finish(self) -> None:
            del self.text  # of its own `start`, which was not called

    drafter = sk.ModelDrafter(Released(TableRunner.random(24).table))
    with pytest.raises(ValueError, match="must share one tokenizer"):
        sk.generate(TableRunner.random(23), prompts(4, vocab=23)[0], drafter=drafter, streamer=Told())
    narrow = sk.ModelDrafter(
        NarrowTable(TableRunner.random(23).table, ids := sk.TokenMap(torch.arange(9))), token_map=ids
    )
    with pytest.raises(ValueError, match="generate: .* without a token_map"):
        sk.generate(
            TableRunner.random(23), prompts(4, vocab=23)[0], drafter=narrow, streamer=Told(),
            target_law=sk.laws.BiLD(0.5, "argmax"),
        )  # fmt: skip
    assert not Told.heard


def test_padding_takes_no_position() -> None:
    target, (ids, mask) = tiny("llama", max_position_embeddings=32), prompts(4, 3)
    padded = torch.nn.functional.pad(ids, (26, 0)), torch.nn.functional.pad(mask, (26, 0))
    kw: dict[str, Any] = {"drafter": sk.NoDrafter(), "max_new_tokens": 28, "acceptance": "greedy", "eos_token_id": []}
    out = sk.generate(target, padded[0], attention_mask=padded[1], **kw)
    assert torch.equal(out.tokens, sk.generate(target, ids, attention_mask=mask, **kw).tokens)
    with pytest.raises(ValueError, match="holds 32 positions, but prompt and max_new_tokens need 33"):
        sk.generate(target, padded[0], attention_mask=padded[1], **kw | {"max_new_tokens": 29})


def test_a_draft_of_the_wrong_shape_is_refused() -> None:
    ids, _ = prompts(4, vocab=23)
    with pytest.raises(ValueError, match=r"TooMany.propose must give \[batch=1, at most 5\] tokens, got \[1, 6\]"):
        sk.generate(TableRunner.random(), ids, drafter=TooMany(), num_speculative_tokens=5)


def test_a_config_s_end_id_of_minus_one_ends_nothing() -> None:
    target, (ids, _) = tiny("llama"), prompts(4)
    target.generation_config.eos_token_id = -1
    out = sk.generate(target, ids, drafter=sk.NgramDrafter(), max_new_tokens=8)
    assert out.num_tokens.tolist() == [8]


@pytest.mark.parametrize("ends", [7, [7], (7, 9), torch.tensor(7), torch.tensor([7, 9]), np.array(7)], ids=repr)
def test_a_config_s_end_ids_may_be_any_ids(ends: Any) -> None:
    target, (ids, _) = tiny("llama"), prompts(4)
    target.generation_config.eos_token_id = ends
    out = sk.generate(
        target, ids, drafter=sk.NoDrafter(), processors=sk.Processors(logit_bias={7: 99.0}), max_new_tokens=8
    )
    assert out.tokens[0, 0] == 7 and out.num_tokens.tolist() == [1]


def test_status_tells_of_bad_logits() -> None:
    target = TableRunner.random()
    target.table[:, :, 5] = float("nan")
    ids, _ = prompts(4, vocab=23)
    out = sk.generate(target, ids, drafter=sk.NoDrafter(), max_new_tokens=5)
    assert out.status.tolist() == [sk.Status.NAN] and 5 not in out.tokens


class Lying(Drafter):
    """Always proposes one id, from probabilities that do not have it or are all 0."""

    def __init__(self, id: int, probs: float) -> None:
        self.id, self.probs = id, probs

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        probs = torch.full((state.batch_size, num_tokens, state.vocab_size), self.probs)
        probs[..., self.id] = 0.0
        return Draft(torch.full((state.batch_size, num_tokens), self.id), probs=probs)

    def commit(self, state: DecodingState, result: StepResult) -> None: ...


@pytest.mark.parametrize("probs", [0.0, 1 / 22])
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_what_the_draft_cannot_have_drawn_is_not_emitted(acceptance: str, probs: float) -> None:
    """Flagged, and the tokens are those of a drafter that proposes nothing."""
    target, (ids, mask) = TableRunner.random(), prompts(4, 2, vocab=23)
    given = {"attention_mask": mask, "seeds": torch.tensor([3, 4]), "acceptance": acceptance, "max_new_tokens": 12}
    out = sk.generate(target, ids, drafter=Lying(5, probs), num_speculative_tokens=4, **given)
    plain = sk.generate(target, ids, drafter=sk.NoDrafter(), **given)
    assert torch.equal(out.tokens, plain.tokens) and out.stats.num_accepted == 0
    assert out.status.tolist() == [sk.Status.BAD_DRAFT] * 2 and plain.status.tolist() == [0, 0]


def test_streamer_of_transformers() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            assert value.dim() == 1 or value.shape[0] == 1
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    target, streamer = TableRunner.random(), Streamer()
    ids, mask = prompts(4, vocab=23)
    out = sk.generate(target, ids, drafter=sk.NgramDrafter(), max_new_tokens=20, streamer=streamer)
    assert streamer.got == out.sequences[0].tolist() and streamer.ended == 1


def test_a_streamer_is_told_where_each_token_came_from() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens, self.origins = ([], []), ([], [])

        def step(self, tokens: list[np.ndarray], origins: list[np.ndarray]) -> None:
            for kept, given in ((self.tokens, tokens), (self.origins, origins)):
                for row, of_a_step in zip(kept, given, strict=True):
                    row.extend(of_a_step.tolist())

    target, streamer, (ids, mask) = TableRunner.random(spread=4.0), Streamer(), prompts(4, 3, vocab=23)
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.NgramDrafter(), max_new_tokens=20, streamer=streamer,
        seeds=torch.tensor([5, 6]), num_speculative_tokens=2,
    )  # fmt: skip
    for row, count in enumerate(out.num_tokens.tolist()):
        assert streamer.tokens[row] == out.tokens[row, :count].tolist()
        assert streamer.origins[row] == out.provenance[row, :count].tolist()
    assert len(set(streamer.origins[0] + streamer.origins[1])) == 3


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    ids, _ = prompts(4, vocab=23)
    sk.generate(TableRunner.random(), ids, drafter=sk.NgramDrafter(), max_new_tokens=20, progress=True)
    captured = capsys.readouterr()
    assert "20/20" in captured.err and captured.out == ""


# --- how it works -----------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=8)
@pytest.mark.parametrize("acceptance", ["token", "block", "match", "greedy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_for_the_device_once(family: str, acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny(family, 1), tiny(family, 2)
    ids, mask = prompts(3, 9)
    syncs: list[list[str]] = []
    plain = Steps.next_result

    def watched(self: Steps, *args: Any) -> Any:
        with HostSyncs() as mode:
            out = plain(self, *args)
        syncs.append(mode.seen)
        return out

    monkeypatch.setattr(Steps, "next_result", watched)
    for drafter in (sk.NoDrafter(), sk.NgramDrafter(), sk.ModelDrafter(draft)):
        syncs.clear()
        sk.generate(
            target, ids, attention_mask=mask, drafter=drafter, acceptance=acceptance, max_new_tokens=12,
            eos_token_id=[], num_speculative_tokens=3, sampling=sk.SamplingParams(0.9, top_k=9),
        )  # fmt: skip
        assert len(syncs) >= 3
        assert all(seen == ["cpu", "numpy"] for seen in syncs), syncs  # the stop check and nothing else


@pytest.mark.parametrize(("length", "prefill"), [(5, [4]), (1, [])])
def test_model_drafter_runs_as_many_forwards_as_it_drafts_tokens(length: int, prefill: list[int]) -> None:
    target = TableRunner.random()
    draft = TableRunner(target.table)
    ids, _ = prompts(length, vocab=23)
    sk.generate(
        target, ids, drafter=sk.ModelDrafter(draft), sampling=GREEDY, max_new_tokens=12, num_speculative_tokens=3
    )
    assert draft.forwards == prefill + 3 * [2, 1, 1] and target.forwards == prefill + 3 * [4]


def drafts_for_itself(*lengths: int, max_new_tokens: int) -> sk.GenerationOutput:
    """A model is its own draft, three tokens a step: were a token missing in the draft's cache, some were rejected."""
    target = tiny("gemma2", 1)
    ids, mask = prompts(*lengths)
    own = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
    out = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.ModelDrafter(target), sampling=GREEDY,
        max_new_tokens=max_new_tokens, num_speculative_tokens=3,
    )  # fmt: skip
    assert torch.equal(out.sequences, own)
    assert out.stats.num_rejected == 0
    return out


@pytest.mark.parametrize("lengths", [(1,), (1, 4, 2)])
def test_model_drafter_misses_no_token_after_drafts_accepted_whole(lengths: tuple[int, ...]) -> None:
    out = drafts_for_itself(*lengths, max_new_tokens=16)
    assert out.stats.num_accepted >= 12 * len(lengths)


def test_model_drafter_catches_up_after_steps_without_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.decoding import schedule

    class Pauses(schedule.FixedSchedule):
        plan = (3, 0, 0, 2, 0, 1, 3, 0, 0, 0, 3)

        def __init__(self, *_: Any) -> None:
            super().__init__(3)
            self.calls = 0

        def next(self) -> int:
            self.calls += 1
            return self.plan[self.calls % len(self.plan)]

    monkeypatch.setattr(importlib.import_module("specdec_kernels.decoding.generate"), "FixedSchedule", Pauses)
    out = drafts_for_itself(3, 9, 6, max_new_tokens=40)
    assert out.stats.num_accepted > 30


def test_an_interrupt_leaves_nothing_behind() -> None:
    class Interrupted(RepeatLast):
        calls = finished = 0

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().propose(state, num_tokens)

        def finish(self) -> None:
            self.finished += 1

    target, drafter = tiny("llama"), Interrupted()
    ids, mask = prompts(3, 9)
    kw: dict[str, Any] = {"attention_mask": mask, "sampling": GREEDY, "max_new_tokens": 10}
    before = sk.generate(target, ids, drafter=RepeatLast(), **kw).sequences
    attributes = {name: set(vars(module)) for name, module in target.named_modules()}
    with pytest.raises(KeyboardInterrupt):
        sk.generate(target, ids, drafter=drafter, **kw)
    assert drafter.finished == 1
    assert attributes == {name: set(vars(module)) for name, module in target.named_modules()}
    assert torch.equal(sk.generate(target, ids, drafter=RepeatLast(), **kw).sequences, before)
