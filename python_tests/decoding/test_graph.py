"""The loop as it runs on a GPU: captured steps give the tokens of ordinary ones, and nothing in them waits."""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specdec_kernels as sk
from python_tests.decoding.fake_cuda import EOS, LAST_WORDS, NEAR, TARGET, FakeCuda, Stream, both, same
from python_tests.decoding.models import (
    FAMILIES,
    CapturableTable,
    HostSyncs,
    RepeatLast,
    TableRunner,
    TooMany,
    prompts,
    tiny,
)
from python_tests.decoding.tree_models import Fixed, TreeTable
from python_tests.ops.chains import ACCEPTANCES
from python_tests.support import environment
from specdec_kernels import laws
from specdec_kernels.decoding import DecodingState, GenerationOutput, Prompt, graph, known_costs, schedule
from specdec_kernels.decoding.graph import CapturedSteps
from specdec_kernels.decoding.state import OUTCOME_COLUMNS, Speculation
from specdec_kernels.decoding.step import verify_step
from specdec_kernels.drafters import Draft, Drafter
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.integrations.transformers.models import DECODERS, ENCODER_DECODERS

LOOP = importlib.import_module("specdec_kernels.decoding.generate")  # the name is also the function's
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": sk.NoDrafter,
    "ngram": lambda: sk.NgramDrafter(2),
    "ngram_lm": sk.NgramLMDrafter,
    "model": lambda: sk.ModelDrafter(CapturableTable(NEAR)),
    "model, own sampling": lambda: sk.ModelDrafter(CapturableTable(NEAR), sk.SamplingParams(0.5, top_k=4)),
    "repeat last": RepeatLast,
}


def unequal(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random prompts and their mask; the text of the second ends at its first token."""
    ids, mask = prompts(*lengths, vocab=23)
    ids[1, -2:] = torch.tensor(LAST_WORDS)
    return ids, mask


# --- the same tokens --------------------------------------------------------------------------------------------------


AUTO = pytest.param(sk.CostTable(np.zeros(1, np.int64), np.array([[1.0, 1.1, 1.2, 1.3]])), id="auto")


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4, AUTO])
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_captured_step_does_what_an_ordinary_one_does(
    cuda: FakeCuda, name: str, acceptance: str, num_speculative_tokens: int | sk.CostTable
) -> None:
    ids, mask = unequal(1, 5, 3, 8, 2)
    captured, ordinary = both(
        CapturableTable(TARGET), ids, attention_mask=mask, drafter=DRAFTERS[name](), acceptance=acceptance,
        seeds=torch.arange(5) * 77, max_new_tokens=60, num_speculative_tokens=num_speculative_tokens, eos_token_id=EOS,
        sampling=sk.SamplingParams(torch.tensor([1.0, 0.7, 0.0, 1.3, 0.9]), top_k=9),
    )  # fmt: skip
    same(captured, ordinary)
    assert captured.num_tokens.unique().numel() > 1
    assert cuda.log.count("replay") > cuda.captures() > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_processors_act_in_captured_steps(cuda: FakeCuda, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = unequal(1, 5, 3)

    def run() -> GenerationOutput:
        return sk.generate(
            CapturableTable(TARGET), ids, attention_mask=mask, drafter=DRAFTERS[name](), seeds=torch.arange(3) * 77,
            max_new_tokens=40, num_speculative_tokens=4, eos_token_id=EOS, processors=sk.Processors(
                logit_bias={3: 1.0}, banned_ids=[5], stop_token_ids=[EOS], min_tokens=9, frequency_penalty=0.3,
                token_counts=sk.TokenCounts(ids, 40, mask),
            ),
        )  # fmt: skip

    captured = run()
    assert cuda.log.count("replay") > 0 and not bool((captured.tokens == 5).any())
    monkeypatch.setattr(graph, "_is_cuda", lambda device: False)
    same(captured, run())


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_log_probabilities_come_with_captured_steps(cuda: FakeCuda, name: str, num_top: int) -> None:
    ids, mask = unequal(1, 5, 3)
    captured, ordinary = both(
        CapturableTable(TARGET), ids, attention_mask=mask, drafter=DRAFTERS[name](), seeds=torch.arange(3) * 77,
        max_new_tokens=40, num_speculative_tokens=4, eos_token_id=EOS, return_logprobs=num_top,
    )  # fmt: skip
    same(captured, ordinary)
    assert captured.logprobs is not None and cuda.log.count("replay") > 0


@pytest.mark.parametrize("num_speculative_tokens", [0, 4, AUTO])
@pytest.mark.parametrize("acceptance", ["token", "block"])
@pytest.mark.parametrize(
    "law",
    [laws.Lossy(0.4, "exact"), laws.Opt(0.2), laws.Opt(0.2, bonus="cascade"), laws.TokenV3(0.6, bonus="cascade")],
    ids=repr,
)
def test_target_laws(
    cuda: FakeCuda, law: laws.TargetLaw, acceptance: str, num_speculative_tokens: int | sk.CostTable
) -> None:
    ids, mask = unequal(1, 5, 3, 8, 2)
    captured, ordinary = both(
        CapturableTable(TARGET), ids, attention_mask=mask, drafter=DRAFTERS["model, own sampling"](), target_law=law,
        acceptance=acceptance, seeds=torch.arange(5) * 77, max_new_tokens=60, eos_token_id=EOS,
        num_speculative_tokens=num_speculative_tokens, sampling=sk.SamplingParams(0.9, top_k=9),
    )  # fmt: skip
    same(captured, ordinary)
    assert cuda.captures() > 0


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_real_classes(cuda: FakeCuda, family: str, drafter: str) -> None:
    target = tiny(family, 1)
    ids, mask = prompts(3, 9, 6)
    make = {"none": sk.NoDrafter, "ngram": sk.NgramDrafter, "model": lambda: sk.ModelDrafter(tiny(family, 2))}[drafter]
    for acceptance in ("match", "token"):
        captured, ordinary = both(
            target, ids, attention_mask=mask, drafter=make(), acceptance=acceptance, seeds=torch.tensor([5, 6, 7]),
            max_new_tokens=25, num_speculative_tokens=3, sampling=sk.SamplingParams(0.8, top_k=20), eos_token_id=[],
        )  # fmt: skip
        same(captured, ordinary)
    assert cuda.captures() > 0


@pytest.mark.parametrize("family", sorted(DECODERS | ENCODER_DECODERS))
def test_every_family_served_can_be_captured(cuda: FakeCuda, family: str) -> None:
    captured, ordinary = both(
        tiny(family, 1), prompts(7, 3)[0], drafter=RepeatLast(), acceptance="match", seeds=torch.tensor([1, 2]),
        max_new_tokens=12, num_speculative_tokens=2, eos_token_id=[],
    )  # fmt: skip
    same(captured, ordinary)
    assert cuda.captures() == 1


class NothingOfTheHost(TorchDispatchMode):
    """Raises for a call that sees a tensor elsewhere than on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, Tensor) or tensor.device.type == "meta", f"{func} moves {tensor}"
        return out


@pytest.mark.short(cases=20)
@pytest.mark.parametrize(
    ("family", "acceptance"),
    [(family, "token") for family in sorted(DECODERS)] + [("llama", rule) for rule in ACCEPTANCES[1:]],
)
@torch.inference_mode()
def test_a_step_is_made_of_tensors_on_the_device_alone(family: str, acceptance: str) -> None:
    """On the meta device, where a number copied from the host shows as a tensor of the CPU."""
    target, draft = (tiny(family, seed).bfloat16().to("meta") for seed in (1, 2))
    runner, drafter = as_runner(target, "test"), sk.ModelDrafter(draft)
    zeros = partial(torch.zeros, dtype=torch.int64, device="meta")
    prompt = Prompt(zeros(2, 5), zeros(2), [np.zeros(5, dtype=np.int64)] * 2)
    how = Speculation(acceptance, 3)
    state = DecodingState.begin(prompt, runner, sk.SamplingParams(0.8, top_k=5), zeros(2), 20, how)
    runner.start(prompt, state.capacity)
    drafter.start(state)
    runner.prefill(prompt)
    with NothingOfTheHost():
        outcome = verify_step(state, runner, drafter.propose(state, 3), state.longest, zeros(2), zeros(1))
    assert outcome.shape == (2, 4 + OUTCOME_COLUMNS)


def test_a_text_that_outgrows_its_rows_is_captured_again(cuda: FakeCuda) -> None:
    captured, ordinary = both(
        tiny("llama", 1), prompts(7, 3)[0], drafter=sk.ModelDrafter(tiny("llama", 2)), acceptance="match",
        seeds=torch.tensor([1, 2]), max_new_tokens=150, num_speculative_tokens=2, eos_token_id=[],
    )  # fmt: skip
    same(captured, ordinary)
    assert cuda.captures() == 3  # 64 and 128 rows, and all that there are


@pytest.mark.parametrize("name", ["none", "perfect", "repeat last"])
def test_every_step_sees_all_that_was_written(cuda: FakeCuda, name: str) -> None:
    """Also where the host does not yet know how far a text has come."""
    make = {**DRAFTERS, "perfect": lambda: sk.ModelDrafter(CapturableTable(TARGET))}[name]
    for length in range(5, 10):  # so that texts reach the end of the rows in different ways
        captured, ordinary = both(
            CapturableTable(TARGET), prompts(length, 3, vocab=23)[0], drafter=make(), acceptance="match",
            seeds=torch.tensor([1, 2]), max_new_tokens=140, num_speculative_tokens=4, eos_token_id=[],
        )  # fmt: skip
        same(captured, ordinary)
    assert cuda.captures() == 5 * 3


def test_rows_are_as_many_as_the_cache_has_for_the_nodes_of_a_tree(cuda: FakeCuda) -> None:
    """Which may be many more than it is deep; the runner refuses more."""

    class CapturableTrees(TreeTable):
        capturable = True

    choices = [list(choice) for depth in (1, 2, 3) for choice in itertools.product(*map(range, (4, 3, 2)[:depth]))]
    tree = sk.DraftTree.from_choices(choices)
    captured, ordinary = both(
        CapturableTrees(TARGET), prompts(9, 3, vocab=23)[0], drafter=Fixed(tree, [c[-1] for c in choices]),
        acceptance="match", seeds=torch.tensor([1, 2]), max_new_tokens=30, num_speculative_tokens=1, eos_token_id=[],
    )  # fmt: skip
    same(captured, ordinary)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_short_texts(cuda: FakeCuda, max_new_tokens: int) -> None:
    for make in DRAFTERS.values():
        captured, ordinary = both(
            CapturableTable(TARGET), prompts(4, 4, vocab=23)[0], drafter=make(), max_new_tokens=max_new_tokens,
            num_speculative_tokens=8, seeds=torch.tensor([1, 2]), eos_token_id=[],
        )  # fmt: skip
        same(captured, ordinary)
        assert cuda.captures() == 0 or max_new_tokens > graph.WARM_UP_STEPS


def test_drafts_that_are_limited_by_their_drafter(cuda: FakeCuda) -> None:
    class Some(RepeatLast):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            draft = super().propose(state, num_tokens)
            return Draft(draft.tokens, num_draft_tokens=torch.tensor([1, 0, 2]))

    captured, ordinary = both(
        CapturableTable(TARGET), prompts(4, 4, 4, vocab=23)[0], drafter=Some(), max_new_tokens=40, acceptance="match",
        seeds=torch.tensor([1, 2, 3]), eos_token_id=[], num_speculative_tokens=5,
    )  # fmt: skip
    same(captured, ordinary)
    assert captured.stats.num_accepted > 0 and cuda.captures() == 1


# --- how it is captured -----------------------------------------------------------------------------------------------


def run(target: Any = None, drafter: Drafter | None = None, **kw: Any) -> GenerationOutput:
    arguments: dict[str, Any] = {
        "acceptance": "match", "seeds": torch.tensor([1, 2]), "max_new_tokens": 30, "num_speculative_tokens": 3,
        "eos_token_id": [], **kw,
    }  # fmt: skip
    target = CapturableTable(TARGET) if target is None else target
    return sk.generate(target, prompts(4, 4, vocab=23)[0], drafter=drafter or sk.NoDrafter(), **arguments)


def test_a_replay_runs_no_model_code(cuda: FakeCuda) -> None:
    target, draft = CapturableTable(TARGET), CapturableTable(NEAR)
    out = run(target, sk.ModelDrafter(draft))
    # a step with the prompt, two ordinary ones and the capture; from then on nothing
    assert target.forwards == [3 + 4] + 3 * [4] and draft.forwards == [3] + 4 * [2, 1, 1]
    assert out.stats.target_forwards > 6


def test_warm_up_check_capture_replay_in_this_order(cuda: FakeCuda) -> None:
    out = run()
    start, end = cuda.log.index("check"), len(cuda.log)
    assert cuda.log[:start] == ["streams meet", "record", "record", "wait"]  # the first with the prompt
    assert cuda.log[start:end].count("check") == 1 and cuda.log.index("capture") > start
    assert cuda.log.index("replay") == cuda.log.index("capture") + 1 and cuda.log[-1] == "drain"
    assert cuda.log.count("replay") == out.stats.target_forwards - 1 - graph.WARM_UP_STEPS  # none after the end
    assert cuda.current is not cuda.capture_arguments[0]["stream"], "the stream of the caller is the current one again"


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_the_host_looks_one_step_late(cuda: FakeCuda, drafter: str) -> None:
    run(drafter=DRAFTERS[drafter]())
    seen = [entry for entry in cuda.log if entry in ("record", "wait")]
    launched = [seen[:i].count("record") for i, entry in enumerate(seen) if entry == "wait"]
    assert launched == [min(i + 2, seen.count("record")) for i in range(len(launched))] and len(launched) > 5


def test_a_drafter_on_the_host_waits_for_each_step(cuda: FakeCuda) -> None:
    run(drafter=sk.NgramDrafter(2))
    seen = [entry for entry in cuda.log if entry in ("record", "wait")]
    assert seen == ["record", "wait"] * (len(seen) // 2)


def test_one_graph_a_draft_length_and_one_pool_for_all(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class AllLengths(schedule.FixedSchedule):
        max_draft_tokens = 7
        learns = True

        def __init__(self, *_: Any) -> None:
            self.calls = 0

        def next(self) -> int:
            self.calls += 1
            return (1, 3, 7, 0)[self.calls // 4 % 4]

        def round_up(self, width: int) -> int:
            return width

    monkeypatch.setattr(LOOP, "AutoSchedule", AllLengths)
    captured, ordinary = both(
        CapturableTable(TARGET), prompts(4, 4, vocab=23)[0], drafter=DRAFTERS["model"](), max_new_tokens=50,
        acceptance="match", seeds=torch.tensor([1, 2]), num_speculative_tokens="auto", eos_token_id=[],
    )  # fmt: skip
    same(captured, ordinary)
    assert cuda.captures() == 4
    for name in ("pool", "stream"):
        assert len({id(arguments[name]) for arguments in cuda.capture_arguments}) == 1
    assert {arguments["capture_error_mode"] for arguments in cuda.capture_arguments} == {"thread_local"}


@pytest.mark.short(cases=3)
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_no_step_waits_for_the_device(
    cuda: FakeCuda, acceptance: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary and captured steps alike: no .item(), .cpu(), .tolist(), nonzero."""
    plain, seen = CapturedSteps.next_result, list[str]()

    def watched(self: CapturedSteps, *args: Any) -> Any:
        with HostSyncs() as mode:
            out = plain(self, *args)
        seen.extend(mode.seen)
        return out

    monkeypatch.setattr(CapturedSteps, "next_result", watched)
    target, draft = tiny("llama", 1), tiny("llama", 2)
    make = {**DRAFTERS, "model": lambda: sk.ModelDrafter(draft)}[drafter]
    out = run(target, make(), acceptance=acceptance, sampling=sk.SamplingParams(0.9, top_k=9))
    assert out.stats.target_forwards > 5 and set(seen) == {"numpy"}  # pinned memory as an array


def test_a_drafter_has_the_room_that_it_is_asked_to_fill(cuda: FakeCuda) -> None:
    seen: list[tuple[int, int]] = []

    class Noting(sk.NgramDrafter):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            seen.append((int(state.host_limits.max()), num_tokens))
            return super().propose(state, num_tokens)

    for length in (1, 3, 7, "auto"):
        run(CapturableTable(TARGET), Noting(), num_speculative_tokens=length)
    assert all(room == asked for room, asked in seen) and {1, 3, 7} <= {asked for _, asked in seen}


def test_choosing_changes_nothing_and_captures_a_length_once(cuda: FakeCuda) -> None:
    target = CapturableTable(TARGET)
    drafters = {name: DRAFTERS[name]() for name in ("model", "ngram", "none")}  # a draft's costs go with it
    for name, drafter in drafters.items():
        plain = run(target, sk.NoDrafter())
        cuda.log.clear()
        assert torch.equal(run(target, drafter, num_speculative_tokens="auto").tokens, plain.tokens)
        assert cuda.captures() >= (1 if name == "none" else 2)
        assert cuda.log.count("capture") <= len(schedule.AUTO_DRAFT_LENGTHS) + 1
    kinds = [key[-1] for key in known_costs._known[known_costs.Identity(target)].costs]
    assert kinds == 2 * [CapturedSteps], "plain decoding needs none"


# --- what cannot be captured ------------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [r for r in caplog.records if "op by op" in r.getMessage()]
    return record.getMessage()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="specdec_kernels")
    return caplog


def test_a_runner_that_does_not_say_so(cuda: FakeCuda, log: pytest.LogCaptureFixture) -> None:
    target = TableRunner(TARGET)
    for _ in range(2):
        run(target)
    assert "table cannot be captured, or does not say that it can (Runner.capturable)" in logged(log)
    assert not cuda.log


def test_a_runner_that_waits_is_found_out_before_the_capture(cuda: FakeCuda, log: pytest.LogCaptureFixture) -> None:
    class Waits(CapturableTable):
        def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
            if int(starts.max()) > bound:
                raise AssertionError
            return super().forward(tokens, starts, bound, need_logits)

    plain = run()
    cuda.log.clear()
    assert torch.equal(run(Waits(TARGET), sk.ModelDrafter(CapturableTable(NEAR))).tokens, plain.tokens)
    assert "table: item is a synchronizing CUDA operation (" in logged(log)
    assert cuda.captures() == 0 and cuda.log.count("check") == 1 and cuda.get_sync_debug_mode() == 0


def test_a_step_with_a_grammar(cuda: FakeCuda, log: pytest.LogCaptureFixture) -> None:
    """The host looks at its draft, and knows of all that was emitted before."""

    class Odd(sk.Grammar):
        seen = 0

        def fill(self, rows: Tensor, drafts: list[np.ndarray]) -> None:
            rows.fill_(0x2AAAAAAA)

        def commit(self, tokens: list[np.ndarray]) -> None:
            self.seen += sum(map(len, tokens))

    grammar = Odd()
    out = run(drafter=DRAFTERS["model"](), grammar=grammar)
    assert bool((out.tokens[out.tokens >= 0] % 2 == 1).all()) and grammar.seen == int(out.num_tokens.sum())
    assert "a grammar looks at each draft on the host" in logged(log) and cuda.captures() == 0


def test_a_capture_that_fails(cuda: FakeCuda, log: pytest.LogCaptureFixture) -> None:
    plain = run()
    cuda.fail_captures = True
    cuda.log.clear()
    assert torch.equal(run(drafter=DRAFTERS["model"]()).tokens, plain.tokens)
    assert "table: operation not permitted when stream is capturing (" in logged(log)
    assert cuda.captures() == 1 and "replay" not in cuda.log


def test_a_draft_model_that_does_not_say_so(cuda: FakeCuda, log: pytest.LogCaptureFixture) -> None:
    captured, ordinary = both(
        CapturableTable(TARGET), prompts(4, 4, vocab=23)[0], drafter=sk.ModelDrafter(TableRunner(NEAR)),
        max_new_tokens=30, seeds=torch.tensor([1, 2]), num_speculative_tokens=3, eos_token_id=[],
    )  # fmt: skip
    same(captured, ordinary)
    assert "ModelDrafter gives a distribution with its draft and does not say that it can be captured" in logged(log)
    assert cuda.captures() == 0


def test_specdec_check_looks_at_every_status(cuda: FakeCuda, log: pytest.LogCaptureFixture) -> None:
    with environment(SPECDEC_CHECK="1"):
        run()
    assert "SPECDEC_CHECK=1" in logged(log) and not cuda.log


def test_a_capture_under_a_check_that_was_on_already(cuda: FakeCuda) -> None:
    def check(tokens: Any) -> None:
        cuda.set_sync_debug_mode("default" if cuda.captures() else "error")

    assert torch.equal(run(streamer=check).tokens, run().tokens)
    # the streamer's after each of two steps, the third step's own, and the streamer's again after that
    assert cuda.log[: cuda.log.index("capture")].count("check") == 4 and cuda.get_sync_debug_mode() == 0


def test_an_interrupt_leaves_nothing_under_way(cuda: FakeCuda) -> None:
    def interrupt(tokens: Any) -> None:
        if cuda.captures():
            raise KeyboardInterrupt

    target, before = CapturableTable(TARGET), cuda.current
    with pytest.raises(KeyboardInterrupt):
        run(target, DRAFTERS["model"](), streamer=interrupt)
    assert cuda.log[-1] == "drain" and cuda.current is before
    assert torch.equal(run(target, DRAFTERS["model"]()).tokens, run(target).tokens)


def test_a_draft_of_the_wrong_shape_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match=r"TooMany.propose must give \[batch=2, at most 3\] tokens, got \[2, 4\]"):
        run(drafter=TooMany())


def test_what_other_threads_wait_for_is_theirs(cuda: FakeCuda) -> None:
    """Torch has one mode for all threads: others may wait while a step is checked, and other warnings are shown."""

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    with pytest.warns(UserWarning, match="something else") as shown, graph._noting_waits() as waits:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert waits == [] and cuda.get_sync_debug_mode() == 1
        wait()
        warnings.warn("something else", stacklevel=1)
    assert [text.partition(" (")[0] for text in waits] == ["called a synchronizing CUDA operation"]
    assert "test_graph.py:" in waits[0] and len(shown) == 1 and cuda.get_sync_debug_mode() == 0


def test_warnings_that_other_threads_restore_do_not_undo_the_check(cuda: FakeCuda) -> None:
    """Python has one of each setting, which `catch_warnings` puts back for all threads."""

    wait = partial(warnings.warn, "called a synchronizing CUDA operation\nthat may be meant", stacklevel=1)
    with warnings.catch_warnings(record=True) as shown:
        with graph._noting_waits():
            warnings.warn("", stacklevel=1)
        other = warnings.catch_warnings()
        other.__enter__()
        with graph._noting_waits() as waits:
            other.__exit__(None, None, None)
            wait()
            wait()
        assert len(waits) == 2 and "meant" not in waits[0]
        assert [str(warning.message) for warning in shown] == [""]
        wait()
    assert len(shown) == 2, "no step is checked"


def test_no_two_calls_have_one_stream(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one launches on it while the other captures would become part of that graph."""
    device, streams = torch.device("cuda:0"), graph._Streams()
    first, second = streams.take(device), streams.take(device)
    assert first is not None and first is not second
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: second)  # as torch, which gives out 32 in turn
    assert streams.take(device) is None
    streams.give_back(device, first)
    assert streams.take(device) is first
    monkeypatch.setattr(graph, "_streams", streams)
    assert run().num_tokens.tolist() == [30, 30] and cuda.captures() == 0
    assert "as many other calls as torch has streams" in graph.refusals()[0]


def test_a_call_gives_its_stream_back(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tokens: Any) -> None:
        raise KeyboardInterrupt

    made, real = list[Any](), torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (made.append(device), real(device))[1])
    for _ in range(2):
        run()
    with pytest.raises(KeyboardInterrupt):
        run(streamer=fail)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(graph, "_pinned", lambda size, device: (_ for _ in ()).throw(MemoryError))
        run()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Stream, "synchronize", fail)
        run()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Stream, "wait_stream", lambda stream, other: fail(other))
        run()
    run()
    assert len(made) == 1


def test_on_a_cpu_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(graph, "CapturedSteps")
    assert run(drafter=DRAFTERS["model"]()).num_tokens.tolist() == [30, 30]


def test_the_check_for_synchronisations_is_one_threads_at_a_time(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's mode is the process's: two that each put back what they found would leave it on."""
    modes: list[tuple[int | str, bool]] = []
    set_mode = graph._set_sync_debug_mode
    monkeypatch.setattr(
        graph, "_set_sync_debug_mode", lambda mode: (modes.append((mode, graph._capturing.locked())), set_mode(mode))
    )
    run(drafter=DRAFTERS["none"]())
    assert "warn" in [mode for mode, _ in modes] and all(locked for _, locked in modes)
