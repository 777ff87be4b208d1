"""Measuring on a GPU, rehearsed without one: cases, providers that fail, and processes that crash or hang."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import specdec_kernels as sk
from bench import inputs, machine
from bench.gpu import (
    bench,
    build,
    clock,
    decode,
    grid,
    hardware,
    kernels,
    measure,
    rehearsal,
    worker,
)
from bench.gpu.clock import Clock
from bench.gpu.journal import Journal, unfinished
from bench.inputs import Case
from bench.providers import PROVIDERS, Provider, eager, own

# ------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[measure.Setup]:
    """A pretended device: ``torch.cuda``'s events and graphs are stand-ins."""
    with rehearsal.pretended(), torch.inference_mode():
        device_clock = Clock("cpu", hardware.cache_bytes())
        yield measure.Setup("cpu", device_clock, hardware.cache_bytes(), 100.0, Journal(tmp_path / "journal"))


def a_case(name: str = "T=1", batch: int = 3, vocab: int = 64) -> Case:
    return grid.cases("cpu", grid.Sizes([vocab], [batch], [2], [name]))[0]


def measured(setup: measure.Setup, names: list[str], **other: Any) -> list[dict[str, Any]]:
    case = other.pop("case", a_case())
    return measure.measure(case, names, setup, other.pop("barred", set()), 3, 0.01, True)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, call: Any) -> None:
    monkeypatch.setitem(PROVIDERS, name, Provider({"verify_chain": lambda case: call}, lambda op, device: None))


def test_a_provider_that_fails_is_one_row_less(setup: measure.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(step: Any) -> Any:
        raise TypeError("rejection_sample() got an unexpected keyword argument")

    def out_of_range(step: Any) -> Any:
        return torch.full((3, 3), 64), torch.zeros(3)

    failing(monkeypatch, "raises", raising)
    failing(monkeypatch, "wrong", out_of_range)
    rows = measured(setup, ["raises", "wrong", "eager"])
    assert {row["provider"] for row in rows} == {"eager"}
    errors = {f["provider"]: f["error"] for f in setup.journal.all("failed")}
    assert errors["raises"].startswith("TypeError: rejection_sample() got") and "vocabulary" in errors["wrong"]
    assert worker.barred(setup.journal) == {(measure.name_of(a_case()), n) for n in ("raises", "wrong")}
    assert measured(setup, ["eager"], barred={(None, "eager")}) == []


def test_a_provider_that_waits_is_timed_by_launches_alone(
    setup: measure.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = [False]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: strict.__setitem__(0, mode == "error"))

    def waiting(step: Any) -> Any:
        if strict[0]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return eager.BUILDERS["verify_chain"](a_case())(step)  # type: ignore[misc]

    failing(monkeypatch, "waits", waiting)
    rows = measured(setup, ["waits"])
    assert {(row["cache"], row["launch"]) for row in rows} == {("cold", "eager")}
    assert [f["what"] for f in setup.journal.all("failed")] == ["graph"]
    assert worker.barred(setup.journal) == set()


def test_a_broken_device_ends_the_process(setup: measure.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(step: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def refuse() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    failing(monkeypatch, "breaks", breaking)
    phase = grid.Phase([a_case()], ("breaks",), 1.0)
    assert worker.work([phase], setup, time.time(), time.time() + 600) == worker.DIED
    step = unfinished(setup.journal.entries())
    assert step is not None and step["begin"]["provider"] == "breaks"


def test_inputs_too_large_for_the_device_are_one_case_less(
    setup: measure.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(case: Case, cache_bytes: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "input_sets", too_large)
    assert measured(setup, ["eager"]) == []
    assert worker.barred(setup.journal) == {(measure.name_of(a_case()), None)}


@pytest.mark.parametrize(
    ("tokens", "accepted", "message"),
    [
        ([[1, 2]], [0], "shapes"),
        ([[1, 2, 3]], [3], "within"),
        ([[5, 2, 3]], [1], "not the draft's"),
        ([[1, 64, -1]], [1], "vocabulary"),
    ],
)
def test_outputs_are_checked(tokens: list[list[int]], accepted: list[int], message: str) -> None:
    case = a_case(batch=1)
    step = inputs.chain(case, torch.Generator().manual_seed(0))
    step.draft_tokens = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=message):
        measure.check(case, step, (torch.tensor(tokens), torch.tensor(accepted)))
    assert measure.check(case, step, (torch.tensor([[1, 7, 10**9]]), torch.tensor([1]))).tolist() == [1]


def test_sampled_ids_are_checked_whoever_draws_them() -> None:
    case = Case("sample", "T=1", 64, 2)
    for wrong in (torch.tensor([3, 64]), (torch.tensor([3, -1]), torch.zeros(2))):
        with pytest.raises(ValueError, match="a sampled token is outside the vocabulary"):
            measure.check(case, None, wrong)


def test_the_path_of_a_tree_is_checked() -> None:
    case, tree = Case("verify_tree", "sample", 64, 1), sk.DraftTree.from_parents([-1, 0, 0, 2])
    step = SimpleNamespace(tree=tree, node_tokens=torch.tensor([[9, 4, 5, 6]]))
    for tokens, accepted in (([5, 6, 7], 2), ([4, 1, -1], 1), ([1, -1, -1], 0)):
        assert measure.check(case, step, (torch.tensor([tokens]), torch.tensor([accepted]))).tolist() == [accepted]
    for tokens, accepted in (([4, 6, 7], 2), ([6, 1, -1], 1), ([9, 1, -1], 1)):
        with pytest.raises(ValueError, match="the accepted tokens are no path of the tree"):
            measure.check(case, step, (torch.tensor([tokens]), torch.tensor([accepted])))


def test_sets_suffice_for_a_run_and_warm_rows_are_of_what_fits(setup: measure.Setup) -> None:
    small, large = a_case(), a_case(batch=200, vocab=512)
    assert len(measure.input_sets(small, setup.cache_bytes)) == measure.MOST_SETS
    assert len(measure.input_sets(large, setup.cache_bytes)) == 3
    assert {row["cache"] for row in measured(setup, ["cpu"], case=large)} == {"cold"}
    assert {row["cache"] for row in measured(setup, ["cpu"], case=small)} == {"cold", "warm"}


def test_a_graph_is_queued_behind_other_work_and_launches_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    with rehearsal.pretended():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
        monkeypatch.setattr(
            rehearsal.Event, "record", lambda self: order.append("event") or setattr(self, "recorded", True)
        )
        device_clock = Clock("cpu", 64)
        for cache, launch in (("cold", "graph"), ("warm", "graph"), ("cold", "eager")):
            device_clock.seconds(lambda: order.append("run"), 1, cache, launch)
    timed = ["event", "run", "event"]
    assert order == [*timed, "run", *timed, "wait", *timed]


def test_a_capture_runs_every_set_once(setup: measure.Setup) -> None:
    seen: list[int] = []
    replay = clock.capture(seen.append, [1, 2, 3])
    assert seen == [1, 1, 1, 2, 3]  # a call that may not wait, a warm one beside, the capture
    replay()
    assert clock.launches(lambda step: torch.ones(2), None) is None
    assert clock.healthy("cpu")


def test_floors_are_those_of_the_design() -> None:
    case = grid.cases("cuda", grid.Sizes([128256], [256], [5], ["T=1"]))[0]
    mean = sum(0.7**i for i in range(1, 6))
    full, early = grid.traffic(case, mean, 1 - 0.7**5).floor_us(4300)
    assert full == pytest.approx(109, abs=0.6) and early == pytest.approx(60, abs=0.6)
    greedy = grid.cases("cuda", grid.Sizes([128256], [256], [5], ["greedy"]))[0]
    assert grid.traffic(greedy, mean, 0.8).full == case.batch * 6 * 128256 * 2
    block = grid.cases("cuda", grid.Sizes([128256], [256], [5], ["block"]))[0]
    assert grid.traffic(block, mean, 0.8).exit == grid.traffic(block, 5, 0).full == case.batch * 11 * 128256 * 2
    cascade = grid.cases("cuda", grid.Sizes([128256], [256], [5], ["Opt"]))[0]
    assert grid.traffic(cascade, 5, 0).exit == grid.traffic(cascade, mean, 0.8).full == case.batch * 11 * 128256 * 2


def test_the_grid_is_whole_and_its_middle_first() -> None:
    cases = grid.cases("cuda")
    assert len({measure.name_of(case) for case in cases}) == len(cases) == 5 * 3 * (3 * 5 + 2)
    assert (cases[0].num_draft, cases[0].vocab, cases[0].name) == (5, 128256, "T=1")
    assert {case.num_draft for case in cases[:105]} == {5}
    assert all(case.dtype == torch.bfloat16 and case.device == "cuda" for case in cases)
    phases = {name: plan("cuda", grid.Sizes()) for name, plan in grid.PLANS.items()}
    assert {n for plan in phases.values() for phase in plan for n in phase.providers} <= set(PROVIDERS)
    headline, rest, middle, compiled = phases["verify_chain"]
    assert len(headline.cases) == 15 and {case.num_draft for case in headline.cases} == {5}
    assert len(headline.cases) + len(rest.cases) == 255 and set(middle.cases) < set(rest.cases)
    assert set(compiled.cases) < set(headline.cases) and set(grid.PEERS) < set(headline.providers)
    for layouts, names in zip(phases["crossovers"], ({"T=1", "truncated"}, {"greedy", "one-hot"}), strict=True):
        assert {case.name for case in layouts.cases} == names and layouts.cases[0].vocab == 128256
        assert {case.batch for case in layouts.cases} == set(grid.CROSSOVER_BATCHES)
        assert {"cuda, walk", "cuda, split, no overlap"} < set(layouts.providers)
    ops = [case for phase in phases["ops"] for case in phase.cases]
    assert {case.op for case in ops} == {"verify_chain", "verify_tree", "sample", "gather_kv_"}
    assert all(case.device == "cuda" and case.dtype == torch.bfloat16 for case in ops)


class CpuForCuda(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU: code then runs as on a GPU, names of devices included."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class CpuGenerator(torch.Generator):
    """The same for generators."""

    def __new__(cls, device: object) -> torch.Generator:
        return super().__new__(cls, "cpu")


def test_a_worker_goes_through_its_phases_as_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as in a rehearsal: the GPU's devices, cases, providers and phases. What is missing here says why."""
    monkeypatch.setattr(torch, "Generator", CpuGenerator)
    monkeypatch.setattr(hardware, "COPY_BYTES", 2**16)
    stand_in = Provider(own.builders("cpu"), lambda op, device: None if device == "cuda" else "not asked of a GPU")
    for name in (*grid.OWN, "compile"):
        monkeypatch.setitem(PROVIDERS, name, stand_in)
    path = tmp_path / "journal"
    now = time.time()
    monkeypatch.setattr(worker, "time", SimpleNamespace(time=lambda: now))  # no machine is too slow
    arguments = f"--journal {path} --start {now} --deadline {now + 100} --vocab 128 --batch 8 --draft 5".split()
    with rehearsal.pretended(), CpuForCuda():
        assert worker.main([*arguments, "--case", "T=1", "block"]) == 0
    journal = Journal(path)
    assert [phase for phase, _ in journal.all("finished")] == [1, 2, 3, 4]
    facts = journal.all("facts")[0]
    assert facts["cases_of_phases"] == [1, 1, 1, 1] and {"flashinfer", "vllm V1", "sglang"} <= set(facts["missing"])
    rows = bench.newest(journal)
    assert {row["provider"] for row in rows} == {"cuda", "triton", "compile", "eager", "eager, kept draft_probs"}
    assert len(rows) == len({(row["id"], row["provider"]) for row in rows})
    assert journal.all("failed") == []
    assert bench.left_out(journal, [1, 1, 1, 1]) == [] and bench.left_out(journal, [1, 5]) == [
        "4 of 5 cases of phase 2"
    ]
    with rehearsal.pretended(), CpuForCuda():  # all is done: another process finds nothing to do
        assert worker.main([*arguments, "--case", "T=1", "block"]) == 0
    assert len(journal.all("finished")) == 4 and len(journal.all("facts")) == 1


# ------------------------------------------------------------------------------- processes that crash or hang

DYING = """
import os, sys, time
from pathlib import Path
from bench.gpu.journal import Journal, unfinished
journal = Journal(Path(sys.argv[1]))
turn = len(journal.all("failed"))
def begin(provider, limit_s):
    journal.write(begin={"case": "c", "provider": provider, "what": "prepare"}, limit_s=limit_s)
if turn == 0:
    begin("crashes", 300)
    os._exit(5)
if turn == 1:
    begin("hangs", 0.3)
    time.sleep(600)
journal.write(rows=[{"id": "c", "provider": "cuda"}])
"""


def test_the_next_process_goes_on_behind_a_crash_and_a_hang(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    problems = bench.measure(journal, [sys.executable, "-c", DYING, str(journal.path)], time.time() + 600)
    assert len(problems) == 2 and "exit code 5" in problems[0] and "hung for 0 s" in problems[1]
    assert [f["provider"] for f in journal.all("failed")] == ["crashes", "hangs"]
    assert worker.barred(journal) == {("c", "crashes"), ("c", "hangs")}
    journal.failed("d", "hangs", "died", "again")
    assert (None, "hangs") in worker.barred(journal)
    assert bench.newest(journal) == [{"id": "c", "provider": "cuda"}]


def test_a_process_that_does_not_start_is_not_started_again(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'a').write('x'); raise SystemExit(1)"
    problems = bench.measure(Journal(tmp_path / "journal"), [sys.executable, "-c", code], time.time() + 600)
    assert problems == ["the process ended with exit code 1"] and started.read_text() == "x"


def test_the_end_of_the_time_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GRACE_S", 0.0)
    journal = Journal(tmp_path / "journal")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert bench.measure(journal, command, time.time() + 0.5) == []
    assert journal.all("failed") == []
    assert bench.run_worker(journal, command, time.time() - 1) == (-signal.SIGKILL, bench.OVER)
    monkeypatch.setattr(bench, "START_S", 0.3)
    assert "no step" in str(bench.run_worker(journal, command, time.time() + 600)[1])


def test_a_journal_survives_half_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.entries() == [] and unfinished(journal.entries()) is None
    journal.write(rows=[1])
    with journal.path.open("a") as file:
        file.write('\n{"rows": [2')
    journal.write(rows=[3])
    assert journal.all("rows") == [[1], [3]]


def test_nothing_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(bench, "measure", lambda *arguments: ["it crashed"])
    assert bench.main(["--rehearse", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed and "it crashed" in printed


@pytest.mark.parametrize("asked", [[], ["--folder", str(machine.RESULTS / "nvidia-h200")]])
@pytest.mark.parametrize("program", [bench, decode, kernels, build], ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_rehearsal_writes_no_result(program: Any, asked: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main([*asked, *([] if program is build else ["--rehearse"])])
    assert not asked or "outside bench/results" in str(stopped.value)


@pytest.mark.parametrize(
    ("way", "code"), [("plain, graph", 1), ("transformers: plain", 0)], ids=["ours", "transformers"]
)
def test_a_decoding_loop_that_fails_counts_if_it_is_ours(
    way: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error's text names."""

    def failing(length: int) -> decode.Ran:
        raise RuntimeError("not captured: X (/a/transformers/b.py:1)")

    def ways(*given: Any) -> Iterator[tuple[str, Any]]:
        yield "lookup, graph", lambda length: decode.Ran(1.0, length, length)
        yield way, failing

    monkeypatch.setattr(decode, "ways", ways)
    assert decode.main(["--rehearse", "--folder", str(tmp_path)]) == code
    result = json.loads((tmp_path / "decode.json").read_text())
    assert [row["way"] for row in result["rows"]] == ["lookup, graph"] * len(decode.BATCHES)
    assert len(result["settings"]["failed"]) == len(decode.BATCHES)


def test_a_host_drafter_drafts_at_every_step() -> None:
    """Whatever a random model says; else plain steps would be timed."""
    model = decode.llama({**decode.HEADS, **decode.TINY, "vocab_size": 20_000}, "cpu").float()
    prompt = torch.randint(2, 20_000, (2, 8), generator=torch.Generator().manual_seed(0))
    out = sk.generate(
        model, prompt, drafter=decode.EveryStep(), num_speculative_tokens=4, max_new_tokens=30, acceptance="greedy",
        eos_token_id=[],
    )  # fmt: skip
    steps = out.stats.target_forwards - 1
    assert steps > 20 and out.stats.num_drafted > 4 * 2 * (steps - 4)


def test_a_pair_of_runs_without_a_difference_is_left_out() -> None:
    times = iter([9.0, 1.0, 0.5, 1.0, 1.5, 0.2, 1.4])  # the first is that of what is set up once
    found = decode.steady(lambda length: decode.Ran(next(times), length, length), (10, 20))
    assert found["pairs"] == 2 and found["ms_a_step"] == pytest.approx(1e3 * (0.05 + 0.12) / 2)
    held = iter([9.0, *[1.0, 0.5] * decode.PAIRS])
    with pytest.raises(ValueError, match="no difference to measure"):
        decode.steady(lambda length: decode.Ran(next(held), length, length), (10, 20))


def test_a_verify_step_that_cannot_be_timed_counts_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> float:
        raise RuntimeError("/a/transformers/b.py")

    monkeypatch.setattr(decode, "verify_us", failing)
    monkeypatch.setattr(decode, "ways", lambda *given: [("plain, graph", lambda n: decode.Ran(1.0, n, n))])
    assert decode.main(["--rehearse", "--folder", str(tmp_path)]) == 1


def test_what_was_measured_is_written_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves the rows of its journal in the result file."""
    journal = Journal(tmp_path / "journal")
    facts = {"gpu": {"name": "some gpu"}, "cases_of_phases": [2], "missing": {}}
    code = f"""if True:
        import time
        from pathlib import Path
        from bench.gpu.journal import Journal
        journal = Journal(Path({str(journal.path)!r}))
        journal.write(facts={facts!r})
        journal.write(rows=[{{"id": "c", "provider": "cuda"}}])
        journal.write(finished=[1, "c"])
        time.sleep(600)
    """
    monkeypatch.setattr(bench, "SAVE_S", 0.2)
    saved: list[Any] = []

    class Killed(Exception):
        pass

    def save() -> None:
        whole = bool(journal.all("finished"))
        saved.append(bench.write(tmp_path, "ops", journal, ["it was stopped"], {}))
        if whole:
            raise Killed

    with pytest.raises(Killed):
        bench.measure(journal, [sys.executable, "-c", code], time.time() + 600, save)
    assert saved[-1] is not None
    result = json.loads((tmp_path / "ops.json").read_text())
    assert [row["provider"] for row in result["rows"]] == ["cuda"]
    assert result["settings"]["left_out"] == ["1 of 2 cases of phase 1"]


def test_wrong_options_stop_before_a_process_is_started(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--rehearse", "--folder", str(tmp_path), "--case", "no such case"])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("--plan ops --case T=1", "--case must be left out with --plan ops"),
        ("--plan ops --draft 3", "--draft must be left out with --plan ops"),
        ("--plan ops --vocab 32000 151936", "--vocab must be of what --plan ops measures with these options, got 1519"),
        ("--plan ops --batch 256", "--batch must be of what --plan ops measures with these options, got 256"),
        ("--plan crossovers --draft 3", "--draft must be of what --plan crossovers measures with these options, got 3"),
        ("--plan crossovers --case T=1 block", "--case must be of what --plan crossovers measures with these options"),
        ("--providers cpu", "--providers must be of what --plan verify_chain measures with these options, got cpu"),
    ],
)
def test_an_option_that_a_plan_does_not_heed_is_refused(
    asked: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--folder", str(tmp_path), *asked.split()])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["bench.gpu.bench", "bench.gpu.decode"])
def test_without_a_gpu_a_measurement_is_one_sentence(module: str) -> None:
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        importlib.import_module(module).main([])
