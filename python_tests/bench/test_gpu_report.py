"""The report that needs a GPU, rehearsed without one: every path of it, with stand-ins for events, graphs and tools."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bench import gpu_report, inputs
from bench import plot as draw_again
from bench.gpu import (
    bench,
    clock,
    exercise,
    grid,
    hardware,
    measure,
    process,
    profile,
    rehearsal,
    sanitizer,
    strategy,
    suite,
    worker,
)
from bench.gpu.clock import Clock
from bench.gpu.journal import Journal, unfinished
from bench.inputs import Case
from bench.providers import PROVIDERS, Provider, eager, own
from python_tests.ops.inputs import OPS

SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER $*"
while [ "$1" != "$PYTHON" ]; do shift; done
exec "$@"
"""
NCU = """#!/bin/sh
[ "$1" = --csv ] || exit 9
while [ "$1" != "$PYTHON" ]; do
  [ "$1" = --log-file ] && table=$2
  shift
done
"$@" || exit
cat > "$table" <<END
==PROF== Connected
"ID","Kernel Name","Grid Size","Block Size","gpu__time_duration.sum","dram__bytes_read.sum"
"","","","","us","Mbyte"
"0","walk(int)","(32, 1, 1)","(512, 1, 1)","12.5","45.2"
END
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH, with stand-ins for NVIDIA's tools that run what they are given."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, script in (("compute-sanitizer", SANITIZER), ("ncu", NCU)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_the_whole_report_is_rehearsed(tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    code = gpu_report.main(f"--rehearse --parts {' '.join(gpu_report.PARTS)} --budget 150 --folder {folder}".split())
    printed = capsys.readouterr().out
    assert code == 0, printed
    report = json.loads((folder / "report.json").read_text())
    assert {p["part"]: p["status"] for p in report["parts"]} == dict.fromkeys(gpu_report.PARTS, "passed")
    assert report["parts"][1]["said"][-1].startswith("rehearsal: passed: ")
    result = json.loads((folder / "verify_chain.json").read_text())
    assert {"gpu", "copy_gb_per_s", "missing", "failed", "left_out"} <= set(result["settings"])
    assert result["settings"]["missing"]["flashinfer"] == "it needs a GPU"
    for row in result["rows"]:
        assert row["q25_us"] <= row["median_us"] <= row["q75_us"]
        assert 0 < row["floor_exit_us"] <= row["floor_us"]
    first = [r for r in result["rows"] if r["case"] == "T=1" and r["batch"] == 8 and r["num_draft"] == 5]
    assert {(r["cache"], r["launch"]) for r in first} == {(c, x) for c in ("cold", "warm") for x in ("graph", "eager")}
    assert {r["provider"] for r in first} >= {"cpu", "eager"}
    profiled = json.loads((folder / "profile.json").read_text())["rows"]
    assert profiled[0]["kernel"] == "walk(int)" and profiled[0]["duration"] == "12.5 us"
    plots = [folder / "roofline.png", folder / "ratios.png"]
    for path in plots:
        path.unlink()
    draw_again.main([str(folder)])
    assert all(path.stat().st_size > 0 for path in plots)
    assert "memcheck on bench.gpu.exercise: no error" in printed and "best peer" in printed


def python(code: str) -> Any:
    return lambda machine, seconds: [sys.executable, "-c", code]


def test_a_part_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "build": gpu_report.Part(python("print('broken'); raise SystemExit(1)"), 20, 1),
        "tests": gpu_report.Part(python("import time; print('begun', flush=True); time.sleep(60)"), 1, 1),
        "sanitizer": gpu_report.Part(python("raise SystemExit(77)"), 20, 1),
        "bench": gpu_report.Part(python("import os; print(os.environ['COLOUR'])"), 20, 1, lambda m: {"COLOUR": "red"}),
    }
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    machine = gpu_report.Machine("some gpu", "9.0", tmp_path / "results", tmp_path / "logs")
    start = time.monotonic()
    assert gpu_report.run(list(parts), machine, 60) == 1
    assert time.monotonic() - start < 30
    ended = {p["part"]: p["status"] for p in json.loads((tmp_path / "results/report.json").read_text())["parts"]}
    assert ended == {"build": "failed", "tests": "out of time", "sanitizer": "absent", "bench": "passed"}
    printed = capsys.readouterr().out
    assert "broken" in printed and "begun" in printed and "red" in printed
    assert gpu_report.run(["sanitizer", "bench"], machine, 60) == 0


def test_later_parts_keep_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}

    def part(name: str, machine: Any, seconds: float) -> dict[str, Any]:
        given[name] = seconds
        return {"part": name, "status": "passed", "exit_code": 0, "seconds": 0.0}

    monkeypatch.setattr(gpu_report, "run_part", part)
    machine = gpu_report.Machine("some gpu", "9.0", tmp_path, tmp_path)
    gpu_report.run(gpu_report.DEFAULT, machine, gpu_report.BUDGET_S)
    assert given["build"] == gpu_report.PARTS["build"].limit
    gpu_report.run(gpu_report.DEFAULT, machine, 300)
    assert given["build"] < 50 and given["bench"] > 150
    assert sum(part.least for part in gpu_report.PARTS.values()) < gpu_report.BUDGET_S


def test_parts_on_a_gpu_are_what_they_should_be(tmp_path: Path) -> None:
    """Commands that no rehearsal runs: their options are read by the programs they go to."""
    machine = gpu_report.Machine("NVIDIA H200", "9.0", tmp_path, tmp_path)
    assert gpu_report.build_environment(machine) == {"SPECDEC_CUDA": "1", "SPECDEC_CUDA_ARCHS": "90a"}
    assert [gpu_report.architecture(c) for c in ("8.0", "8.9", "10.0", "12.0")] == ["80", "89", "100a", "120a"]
    assert gpu_report.build(machine, 9)[1:] == ["setup.py", "build_ext", "--inplace"]
    for command, parse in (
        (gpu_report.tests(machine, 9), suite.parser()),
        (gpu_report.sanitizer(machine, 9), sanitizer.parser()),
        (gpu_report.bench(machine, 9), bench.parser()),
        (gpu_report.profile(machine, 9), profile.parser()),
    ):
        assert "--rehearse" not in command and command[1] == "-m"
        parse.parse_args(command[3:])
    assert len(sanitizer.steps(rehearse=False)) == 3


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_report, "find_machine", lambda folder, logs: None)
    assert gpu_report.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_gpu_is_found_by_asking_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(0, 'a warning\n["NVIDIA H200", "9.0", "/results/nvidia-h200"]\n'), (0, ""), (1, "")])

    def run(command: list[str], **options: Any) -> Any:
        compile(command[-1], "question", "exec")
        code, out = next(answers)
        return subprocess.CompletedProcess(command, code, out, "")

    monkeypatch.setattr(gpu_report.subprocess, "run", run)
    found = gpu_report.find_machine(None, tmp_path)
    assert found is not None and found.folder == Path("/results/nvidia-h200") and not found.rehearsing
    assert gpu_report.find_machine(None, tmp_path) is None
    assert gpu_report.find_machine(None, tmp_path) is None


CHOSEN = """
import pytest

@pytest.mark.parametrize("backend", ["cuda-cuda", "triton-cuda", "reference-cuda", "cuda-emulated-split", "cpu-avx2"])
def test_op(backend):
    with open(TOLD, "a") as file:
        print(backend, file=file)
    assert backend != FAILING

def test_graph_on_cuda():
    with open(TOLD, "a") as file:
        print("graph", file=file)
"""


OPTIONS = """
def pytest_addoption(parser):
    parser.addoption("--tier")
"""


def suite_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> tuple[int, list[str]]:
    told = tmp_path / "told"
    (tmp_path / "conftest.py").write_text(OPTIONS)
    (tmp_path / "test_chosen.py").write_text(f"TOLD, FAILING = {str(told)!r}, {failing!r}\n{CHOSEN}")
    monkeypatch.setattr(suite, "FOLDERS", (str(tmp_path / "test_chosen.py"),))
    monkeypatch.setattr(suite, "CAPTURED", (str(tmp_path / "test_chosen.py"), "-k", "graph"))
    plain = suite.pytest(rehearse=True)  # one process: several would each load everything
    monkeypatch.setattr(suite, "pytest", lambda rehearse: plain)
    code = suite.main(["--budget", "60", "--logs", str(tmp_path / "logs")])
    return code, told.read_text().split()


def test_the_suite_takes_what_runs_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = suite_on(tmp_path, monkeypatch, failing="triton-cuda")
    printed = capsys.readouterr().out
    assert code == 1, printed
    assert ran[:3] == ["cuda-cuda", "graph", "triton-cuda"] and set(ran[3:]) == {"reference-cuda", "graph"}
    assert "CUDA kernels: passed: 1 passed" in printed and "the rest: passed: 2 passed" in printed
    assert "Triton kernels: FAILED: 1 failed" in printed
    monkeypatch.undo()
    assert {"-n", "--dist"} <= set(suite.pytest(rehearse=False))


def test_a_suite_without_time_or_tests_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["--budget", "0", "--logs", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("no time was left") == 4
    (tmp_path / "conftest.py").write_text(OPTIONS)
    monkeypatch.setattr(suite, "steps", lambda rehearse: {"all": [str(tmp_path)]})
    assert suite.main(["--rehearse", "--budget", "60", "--logs", str(tmp_path)]) == 1
    assert "none chosen" in capsys.readouterr().out


def sanitized(tools: Path, tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (tools / "compute-sanitizer").write_text(script)
    code = sanitizer.main(["--rehearse", "--budget", "2", "--logs", str(tmp_path)])
    return code, capsys.readouterr().out


def test_sanitizer_errors_and_hangs_are_seen(tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = sanitized(tools, tmp_path, "#!/bin/sh\necho '========= Invalid write'\nexit 86\n", capsys)
    assert code == 1 and "found errors" in printed and "Invalid write" in printed
    code, printed = sanitized(tools, tmp_path, "#!/bin/sh\nexit 1\n", capsys)
    assert code == 1 and "ended with exit code 1" in printed
    code, printed = sanitized(tools, tmp_path, "#!/bin/sh\nexec sleep 60\n", capsys)
    assert code == 1 and "stopped after" in printed
    assert sanitizer.main(["--rehearse", "--budget", "0", "--logs", str(tmp_path)]) == 1
    assert "no time was left" in capsys.readouterr().out


def test_a_sanitized_program_that_need_not_end_may_be_stopped(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitizer, "steps", lambda rehearse: [("memcheck", sanitizer.TESTS, False)])
    assert sanitized(tools, tmp_path, "#!/bin/sh\nexec sleep 60\n", capsys)[0] == 0
    assert sanitized(tools, tmp_path, "#!/bin/sh\necho '========= Invalid read'\nexec sleep 60\n", capsys)[0] == 1


def test_tools_are_looked_for(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.find("ncu") == str(tools / "ncu")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(process, "TOOLS", (f"{tools.parent}/t*",))
    assert process.find("ncu") == str(tools / "ncu")
    assert process.find("no-such-tool") is None


def test_profile_reports_what_it_does_not_get(tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tools / "ncu").write_text("#!/bin/sh\necho ERR_NVGPUCTRPERM\nexit 1\n")
    assert profile.main(["--budget", "20", "--folder", str(tmp_path), "--logs", str(tmp_path), "--device", "cpu"]) == 1
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().out
    assert not (tmp_path / "profile.json").exists()
    assert profile.main(["--budget", "0", "--device", "cpu", "--logs", str(tmp_path)]) == 0


def test_exercise_reaches_every_op_and_sees_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert exercise.main("--backend cpu --device cpu --most-shapes 1".split()) == 0
    names = [name for name, _ in exercise.calls((1, 1, 33), torch.float32, "cpu", "cpu")]
    words = {*OPS, "token", "block", "match", "one-hot", "packed", "greedy", "tree"}
    assert words - {"warp_probs"} <= {name.split()[0] for name in names}  # it gives no integers: it is only run


def test_exercise_fails_where_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(shape: Any, dtype: Any, device: str, backend: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield "any", torch.zeros(4, 2) if backend == "reference" else torch.ones(4, 2)

    monkeypatch.setattr(exercise, "calls", calls)
    assert exercise.main("--backend cpu --device cpu".split()) == 1


def test_exercise_goes_through_the_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        def __init__(self, path: str) -> None:
            assert path.endswith("_C_cuda.so")

        def specdec_cuda_force_strategy(self, number: int) -> None:
            asked.append(number)

    monkeypatch.setattr(strategy.ctypes, "CDLL", Library)
    monkeypatch.setattr(strategy, "_library", strategy._library.__wrapped__)
    monkeypatch.setattr(exercise, "calls", lambda *arguments: iter([("any", torch.zeros(1, 1))]))
    assert exercise.main(["--device", "cpu"]) == 0
    assert asked == [0, 0, 1, 0, 2, 0, 3, 0] * len(exercise.SHAPES)


# ------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[measure.Setup]:
    """A pretended device: ``torch.cuda``'s events and graphs are stand-ins."""
    with rehearsal.pretended(), torch.inference_mode():
        device_clock = Clock("cpu", hardware.cache_bytes())
        yield measure.Setup("cpu", device_clock, hardware.cache_bytes(), 100.0, Journal(tmp_path / "journal"))


def a_case(name: str = "T=1", batch: int = 3, vocab: int = 64) -> Case:
    return grid.cases("cpu", [vocab], [batch], [2], [name])[0]


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
    monkeypatch.setattr(worker, "phases", lambda cases, roster: [(cases, ("breaks",))])
    assert worker.work([a_case()], grid.REHEARSAL, setup, time.time(), time.time() + 60) == worker.DIED
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
        monkeypatch.setattr(rehearsal.Event, "record", lambda self: order.append("event") or setattr(self, "time", 1.0))
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
    case = grid.cases("cuda", [128256], [256], [5], ["T=1"])[0]
    mean = sum(0.7**i for i in range(1, 6))
    full, early = grid.traffic(case, mean, 1 - 0.7**5).floor_us(4300)
    assert full == pytest.approx(109, abs=0.6) and early == pytest.approx(60, abs=0.6)
    greedy = grid.cases("cuda", [128256], [256], [5], ["greedy"])[0]
    assert grid.traffic(greedy, mean, 0.8).full == case.batch * 6 * 128256 * 2
    block = grid.cases("cuda", [128256], [256], [5], ["block"])[0]
    assert grid.traffic(block, mean, 0.8).exit == grid.traffic(block, 5, 0).full == case.batch * 11 * 128256 * 2
    cascade = grid.cases("cuda", [128256], [256], [5], ["Opt"])[0]
    assert grid.traffic(cascade, 5, 0).exit == grid.traffic(cascade, mean, 0.8).full == case.batch * 11 * 128256 * 2


def test_the_grid_is_whole_and_its_middle_first() -> None:
    cases = grid.cases("cuda")
    assert len({measure.name_of(case) for case in cases}) == len(cases) == 5 * 3 * (3 * 5 + 2)
    assert (cases[0].num_draft, cases[0].vocab, cases[0].name) == (5, 128256, "T=1")
    assert {case.num_draft for case in cases[:105]} == {5}
    assert all(case.dtype == torch.bfloat16 and case.device == "cuda" for case in cases)
    assert set(sum(vars(grid.GPU).values(), ())) <= set(PROVIDERS)
    assert [len(some) for some, _ in worker.phases(cases, grid.GPU)] == [255, 255, 8]


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
    for name in ("cuda", "triton", "compile"):
        monkeypatch.setitem(PROVIDERS, name, stand_in)
    monkeypatch.setattr(grid, "is_central", lambda case: case.name == "T=1")
    path = tmp_path / "journal"
    now = time.time()
    arguments = f"--journal {path} --start {now} --deadline {now + 100} --vocab 128 --batch 3 --draft 5".split()
    with rehearsal.pretended(), CpuForCuda():
        assert worker.main([*arguments, "--case", "T=1", "truncated", "greedy"]) == 0
    journal = Journal(path)
    assert [phase for phase, _ in journal.all("finished")] == [1, 1, 1, 2, 2, 2, 3]
    facts = journal.all("facts")[0]
    assert facts["num_cases"] == 3 and {"flashinfer", "vllm V1", "cuda, walk"} <= set(facts["missing"])
    rows = bench.newest(journal)
    assert {row["provider"] for row in rows} == {"cuda", "triton", "compile", "eager"}
    assert len(rows) == len({(row["id"], row["provider"]) for row in rows})
    assert journal.all("failed") == []
    assert bench.left_out(journal, 3) == [] and len(bench.left_out(journal, 5)) == 2
    with rehearsal.pretended(), CpuForCuda():  # all is done: another process finds nothing to do
        assert worker.main([*arguments, "--case", "T=1", "truncated", "greedy"]) == 0
    assert len(journal.all("finished")) == 7 and len(journal.all("facts")) == 1


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
    begin("crashes", 30)
    os._exit(5)
if turn == 1:
    begin("hangs", 0.3)
    time.sleep(60)
journal.write(rows=[{"id": "c", "provider": "cuda"}])
"""


def test_the_next_process_goes_on_behind_a_crash_and_a_hang(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    problems = bench.measure(journal, [sys.executable, "-c", DYING, str(journal.path)], time.time() + 60)
    assert len(problems) == 2 and "exit code 5" in problems[0] and "hung for 0 s" in problems[1]
    assert [f["provider"] for f in journal.all("failed")] == ["crashes", "hangs"]
    assert worker.barred(journal) == {("c", "crashes"), ("c", "hangs")}
    journal.failed("d", "hangs", "died", "again")
    assert (None, "hangs") in worker.barred(journal)
    assert bench.newest(journal) == [{"id": "c", "provider": "cuda"}]


def test_a_process_that_does_not_start_is_not_started_again(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'a').write('x'); raise SystemExit(1)"
    problems = bench.measure(Journal(tmp_path / "journal"), [sys.executable, "-c", code], time.time() + 60)
    assert problems == ["the process ended with exit code 1"] and started.read_text() == "x"


def test_the_end_of_the_time_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GRACE_S", 0.0)
    journal = Journal(tmp_path / "journal")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert bench.measure(journal, command, time.time() + 0.5) == []
    assert journal.all("failed") == []
    assert bench.run_worker(journal, command, time.time() - 1) == (-signal.SIGKILL, bench.OVER)
    monkeypatch.setattr(bench, "START_S", 0.3)
    assert "no step" in str(bench.run_worker(journal, command, time.time() + 60)[1])


def test_a_journal_survives_half_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.entries() == [] and unfinished(journal.entries()) is None
    journal.write(rows=[1])
    with journal.path.open("a") as file:
        file.write('\n{"rows": [2')
    journal.write(rows=[3])
    assert journal.all("rows") == [[1], [3]]


def test_nothing_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.write(tmp_path, Journal(tmp_path / "journal"), ["it crashed"], 1.0) == 1
    assert "nothing was measured" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="needs --folder"):
        bench.main(["--rehearse"])


def test_wrong_options_stop_before_a_process_is_started(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--rehearse", "--folder", str(tmp_path), "--case", "no such case"])
