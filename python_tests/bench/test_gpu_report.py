"""The report that needs a GPU, rehearsed without one: every path of it, with stand-ins for events, graphs and tools."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_report, machine
from bench import plot as draw_again
from bench.gpu import (
    bench,
    build,
    clock,
    crossovers,
    decode,
    grid,
    hardware,
    kernels,
    process,
    profile,
    rehearsal,
    sanitizer,
    strategy,
    suite,
)
from bench.registry import REGISTRY

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


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits that programs are given. The time of one that prints "begun" is over when it has, however slow the
    machine is, and others have all the time that they need.
    """
    given: list[float] = []

    class Program(subprocess.Popen[bytes]):
        def __init__(self, command: Any, *, stdout: Any, **options: Any) -> None:
            super().__init__(command, stdout=stdout, **options)
            self.log, self.limited = Path(stdout.name), False

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or self.limited:
                return super().wait(timeout)
            self.limited = True
            given.append(timeout)
            while self.poll() is None:
                if b"begun" in self.log.read_bytes():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait()

    monkeypatch.setattr(process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Program}))
    return given


@pytest.mark.long
@pytest.mark.slow
def test_the_whole_report_is_rehearsed(tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    code = gpu_report.main(f"{' '.join(gpu_report.PARTS)} --rehearse --folder {folder}".split())
    printed = capsys.readouterr().out
    assert code == 0, printed
    report = json.loads((folder / "report.json").read_text())
    assert {p["part"]: p["status"] for p in report["parts"]} == dict.fromkeys(gpu_report.PARTS, "passed")
    said = {p["part"]: p["said"] for p in report["parts"]}
    assert said["tests"][-1].startswith("rehearsal: passed: ")
    result = json.loads((folder / "verify_chain.json").read_text())
    assert {"gpu", "copy_gb_per_s", "read_gb_per_s", "missing", "failed", "left_out"} <= set(result["settings"])
    assert result["settings"]["missing"]["flashinfer"] == "it needs a GPU"
    for row in result["rows"]:
        assert row["median_us"] == 1e3 * rehearsal.MILLISECONDS / row["calls_per_repeat"]  # nothing was timed
        assert 0 < row["floor_exit_us"] <= row["floor_us"]
    first = [r for r in result["rows"] if r["case"] == "T=1" and r["batch"] == 8 and r["num_draft"] == 5]
    assert {(r["cache"], r["launch"]) for r in first} == {(c, x) for c in ("cold", "warm") for x in ("graph", "eager")}
    assert {r["provider"] for r in first} >= {"cuda", "eager"}
    profiled = json.loads((folder / "profile.json").read_text())["rows"]
    assert profiled[0]["kernel"] == "walk(int)" and profiled[0]["duration"] == "12.5 us"
    plots = [folder / "roofline.png", folder / "ratios.png"]
    for path in plots:
        path.unlink()
    draw_again.main([str(folder)])
    assert all(path.stat().st_size > 0 for path in plots)
    assert "memcheck on bench.gpu.exercise: no error" in printed and "best peer" in printed
    assert "kLayouts of csrc/cuda/strategy.cu should be" in printed and printed.count(rehearsal.NOTICE) >= 5
    others = {name: json.loads((folder / f"{name}.json").read_text())["rows"] for name in ("ops", "decode", "kernels")}
    assert {row["op"] for row in others["ops"]} == {"verify_chain", "verify_tree", "sample", "gather_kv_"}
    assert {round(row["ms_a_step"], 6) for row in others["decode"]} == {rehearsal.MILLISECONDS}
    assert {row["way"] for row in others["decode"]} >= {"draft model, graph", "transformers: assisted"}
    assert {row["us"] for row in others["kernels"]} == {rehearsal.TRACE[0]["dur"]}
    assert not list(folder.glob("*.journal"))


def python(code: str) -> Any:
    return lambda machine, seconds: [sys.executable, "-c", code]


def test_a_part_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, limits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "build": gpu_report.Part(python("print('broken'); raise SystemExit(1)"), 20, 1),
        "tests": gpu_report.Part(python("import time; print('begun', flush=True); time.sleep(600)"), 3, 1),
        "sanitizer": gpu_report.Part(python("raise SystemExit(77)"), 20, 1),
        "bench": gpu_report.Part(python("print('red'); raise SystemExit(75)"), 20, 1),
        "ops": gpu_report.Part(python("pass"), 20, 1),
    }
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    machine = gpu_report.Machine("some gpu", "9.0", tmp_path / "results", tmp_path / "logs")
    start = time.monotonic()
    assert gpu_report.run(list(parts), machine, 6000) == 1
    assert time.monotonic() - start < 600 and limits == [20, 3, 20, 20, 20]
    ended = {p["part"]: p["status"] for p in json.loads((tmp_path / "results/report.json").read_text())["parts"]}
    assert ended == {
        "build": "failed", "tests": "not finished", "sanitizer": "absent", "bench": "not finished", "ops": "passed",
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "broken" in printed and "begun" in printed and "red" in printed
    assert gpu_report.run(["tests", "sanitizer", "bench", "ops"], machine, 6000) == 0  # those did not fail


def test_a_report_keeps_the_parts_of_earlier_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, machine = tmp_path / "report.json", gpu_report.Machine("some gpu", "9.0", tmp_path, tmp_path)

    def ran(*names: str, code: int = 0) -> dict[str, Any]:
        parts = {name: gpu_report.Part(python(f"raise SystemExit({code})"), 60, 1) for name in names}
        monkeypatch.setattr(gpu_report, "PARTS", parts)
        gpu_report.run(names, machine, 6000)
        report = json.loads(path.read_text())
        assert report["gpu"] == "some gpu" and not list(tmp_path.glob("*.unfinished"))
        assert all(datetime.datetime.fromisoformat(entry["date"]) for entry in report["parts"])
        return {entry["part"]: entry for entry in report["parts"]}

    first = ran("bench", "tests", code=1)
    second = ran("build", "tests")
    assert second["bench"] == first["bench"] and first["bench"]["status"] == "failed"
    assert {name: entry["status"] for name, entry in second.items()} == {
        "bench": "failed", "tests": "passed", "build": "passed"
    }  # fmt: skip
    path.write_text('{"gpu": "another", "parts": [{"part": "ops"}]}')
    assert set(ran("build")) == {"build"}
    path.write_text('{"gpu": "some')
    assert set(ran("tests")) == {"tests"}


def test_an_interrupted_report_is_the_last_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = gpu_report.Machine("some gpu", "9.0", tmp_path, tmp_path)
    path = gpu_report.save(machine, [gpu_report.ended("bench", "passed", 0, 1.0)])
    before, write_text = path.read_text(), Path.write_text

    def interrupted(file: Path, text: str) -> None:
        write_text(file, text[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.save(machine, [])
    assert path.read_text() == before


@pytest.mark.skipif(not machine.RESULTS.exists(), reason="a source distribution holds no results")
def test_a_report_of_one_date_gives_it_to_its_parts() -> None:
    """As the committed one is."""
    path = machine.RESULTS / "nvidia-h100-80gb-hbm3/report.json"
    found = gpu_report.earlier(path, json.loads(path.read_text())["gpu"])
    assert {"build", "bench", "tests"} <= set(found)
    assert all(datetime.datetime.fromisoformat(entry["date"]) for entry in found.values())


def test_later_parts_keep_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}

    def part(name: str, machine: Any, seconds: float) -> dict[str, Any]:
        given[name] = seconds
        return {"part": name, "status": "passed", "exit_code": 0, "seconds": 0.0}

    monkeypatch.setattr(gpu_report, "run_part", part)
    machine = gpu_report.Machine("some gpu", "9.0", tmp_path, tmp_path)
    gpu_report.run(gpu_report.DEFAULT, machine)
    # where a command may take ten minutes, a part fits into one
    assert given == {name: gpu_report.PARTS[name].limit for name in gpu_report.DEFAULT}
    assert max(given.values()) <= 520 and sum(given.values()) < 1800
    gpu_report.run(["build", "bench"], machine, 150)
    assert given["build"] < 70 and given["bench"] >= gpu_report.PARTS["bench"].least
    with pytest.raises(SystemExit):
        gpu_report.main(["no-such-part"])


def test_parts_on_a_gpu_are_what_they_should_be(tmp_path: Path) -> None:
    """Commands that no rehearsal runs: their options are read by the programs they go to."""
    machine = gpu_report.Machine("NVIDIA H200", "9.0", tmp_path, tmp_path)
    assert build.environment("9.0") == {"SPECDEC_CUDA": "1", "SPECDEC_CUDA_ARCHS": "90a"}
    assert [build.architecture(c) for c in ("8.0", "8.9", "10.0", "12.0")] == ["80", "89", "100a", "120a"]
    assert build.steps(tmp_path, "9.0")["build"] == ["setup.py", "build_ext", "--inplace"]
    for command, parse in (
        (gpu_report.tests(machine, 9), suite.parser()),
        (gpu_report.sanitizer(machine, 9), sanitizer.parser()),
        (gpu_report.build(machine, 9), build.parser()),
        *((gpu_report.measuring(plan)(machine, 9), bench.parser()) for plan in grid.PLANS),
        (gpu_report.decode(machine, 9), decode.parser()),
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
    code = suite.main(["--budget", "600", "--logs", str(tmp_path / "logs")])
    return code, told.read_text().split()


@pytest.mark.long
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


def test_a_suite_without_time_is_not_finished_and_one_without_tests_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["--budget", "0", "--logs", str(tmp_path)]) == process.UNFINISHED
    assert capsys.readouterr().out.count("no time was left") == 4
    (tmp_path / "conftest.py").write_text(OPTIONS)
    monkeypatch.setattr(suite, "steps", lambda rehearse: {"all": [str(tmp_path)]})
    assert suite.main(["--rehearse", "--budget", "600", "--logs", str(tmp_path)]) == 1
    assert "none chosen" in capsys.readouterr().out


def sanitized(tools: Path, tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (tools / "compute-sanitizer").write_text(script)
    code = sanitizer.main(["--rehearse", "--budget", "600", "--logs", str(tmp_path)])
    return code, capsys.readouterr().out


def test_sanitizer_errors_and_hangs_are_seen(
    tools: Path, tmp_path: Path, limits: list[float], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    code, printed = sanitized(tools, tmp_path, "#!/bin/sh\necho '========= Invalid write'\nexit 86\n", capsys)
    assert code == 1 and "found errors" in printed and "Invalid write" in printed
    code, printed = sanitized(tools, tmp_path, "#!/bin/sh\nexit 1\n", capsys)
    assert code == 1 and "ended with exit code 1" in printed
    code, printed = sanitized(tools, tmp_path, "#!/bin/sh\necho begun\nexec sleep 600\n", capsys)
    assert code == process.UNFINISHED and "no error so far, not finished" in printed
    hangs = "#!/bin/sh\necho '========= Invalid read'\necho begun\nexec sleep 600\n"
    code, printed = sanitized(tools, tmp_path, hangs, capsys)
    assert code == 1 and "ERRORS" in printed
    none = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    code, printed = sanitized(tools, tmp_path, f"#!/bin/sh\necho '{none}'\necho begun\nexec sleep 600\n", capsys)
    assert code == process.UNFINISHED and "no error so far" in printed
    race = "========= Error: Race reported between Write access at walk+0x10 and Read access at walk+0x20 [4 hazards]"
    code, printed = sanitized(tools, tmp_path, f"#!/bin/sh\necho '{race}'\necho begun\nexec sleep 600\n", capsys)
    assert code == 1 and "ERRORS" in printed
    monkeypatch.setattr(
        sanitizer, "steps", lambda rehearse: [(tool, ("-c", ""), 1.0) for tool in ("racecheck", "memcheck")]
    )
    refused = "case $* in *racecheck*) exit 86;; esac; echo 'Device not supported'; exit 1"
    code, printed = sanitized(tools, tmp_path, f"#!/bin/sh\n{refused}\n", capsys)
    assert code == 1 and "found errors" in printed and sanitizer.REFUSED in printed
    assert sanitizer.main(["--rehearse", "--budget", "0", "--logs", str(tmp_path)]) == process.UNFINISHED
    assert "no time was left" in capsys.readouterr().out


def test_tools_are_looked_for(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.find("ncu") == str(tools / "ncu")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(process, "TOOLS", (f"{tools.parent}/t*",))
    assert process.find("ncu") == str(tools / "ncu")
    assert process.find("no-such-tool") is None


def test_profile_reports_what_it_does_not_get(
    tools: Path, tmp_path: Path, limits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    (tools / "ncu").write_text("#!/bin/sh\necho ERR_NVGPUCTRPERM\nexit 1\n")
    assert profile.main(["--budget", "600", "--folder", str(tmp_path), "--logs", str(tmp_path), "--device", "cpu"]) == 1
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().out
    assert not (tmp_path / "profile.json").exists()
    short = ["--device", "cpu", "--logs", str(tmp_path), "--most", "1", "--budget"]
    assert profile.main([*short, "0"]) == process.UNFINISHED
    assert "1 of 1 cases: no time was left" in capsys.readouterr().out
    (tools / "ncu").write_text("#!/bin/sh\necho begun\nexec sleep 600\n")
    assert profile.main([*short, "60"]) == process.UNFINISHED and 0 < limits[-1] <= 60
    assert re.search(r"0 kernels, not finished in \d+ s", capsys.readouterr().out)


def test_a_replay_must_give_what_the_call_gave() -> None:
    with rehearsal.pretended(), rehearsal.stand_ins():
        count = iter(range(9))
        call = lambda x: (x + next(count),)  # noqa: E731
        with pytest.raises(ValueError, match="a replayed call gives something else"):
            clock.capture(call, [torch.zeros(2)], [(torch.zeros(2),)])
        clock.capture(lambda x: (x,), [torch.zeros(2)], [(torch.zeros(2),)])


def layouts(times: dict[int, tuple[float, ...]], case: str = "T=1", overlap: bool = True) -> list[dict[str, Any]]:
    """Rows by batch, of split, walk, cluster, resident and early."""
    how = "" if overlap else ", no overlap"
    return [
        {"case": case, "vocab": 128256, "batch": batch, "provider": f"cuda, {layout}{how}", "median_us": us,
         "cache": "cold", "launch": "graph"}
        for batch, each in times.items() for layout, us in zip(strategy.LAYOUTS, each, strict=True)
    ]  # fmt: skip


def test_thresholds_follow_from_measured_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times: dict[int, tuple[float, ...]] = {
        1: (5.0, 9.0, 8.0, 4.0, 6.0), 16: (9.0, 12.0, 11.0, 10.0, 9.5), 66: (20.0, 19.9, 19.8, 22.0, 21.0),
        128: (50.0, 44.0, 40.0, 48.0, 45.0), 256: (99.0, 70.0, 80.0, 101.0, 71.0),
    }  # fmt: skip
    rows = layouts(times) + layouts(times, overlap=False)
    found = crossovers.thresholds(rows, 132)
    # At 66 split is as good as the best.
    assert found == [(0.03, "resident"), (0.696, "split"), (1.371, "cluster"), (math.inf, "walk")]
    source = crossovers.SOURCE.read_text()
    changed = crossovers.written(source, found)
    assert (
        "{0.03, Strategy::kResident},\n    {0.696, Strategy::kSplit},\n    {1.371, Strategy::kCluster},\n"
        "    {INFINITY, Strategy::kWalk},\n};" in changed
    )
    before = [(0.4, "split"), (math.inf, "early")]
    assert crossovers.written(changed, before) == source
    some = rows[:2]  # a layout is missing
    assert crossovers.thresholds(some, 132) == [] and "no thresholds" in crossovers.told(some, 132)
    assert "40.0* (40.0)" in crossovers.table(rows)
    settings = {"gpu": {"multiprocessors": 132, "name": "some gpu"}}
    (tmp_path / "crossovers.json").write_text(json.dumps({"rows": rows, "settings": settings}))
    assert crossovers.main([str(tmp_path)]) == 0
    assert "{0.696, Strategy::kSplit}" in capsys.readouterr().out and crossovers.SOURCE.read_text() == source
    settings["gpu"]["name"] = rehearsal.NAME
    (tmp_path / "crossovers.json").write_text(json.dumps({"rows": rows, "settings": settings}))
    assert crossovers.main([str(tmp_path), "--write"]) == 1 and crossovers.SOURCE.read_text() == source


def test_kernels_are_read_from_a_trace() -> None:
    args = {"grid": [264, 1, 1], "block": [256, 1, 1], "registers per thread": 64, "shared memory": 16, "stream": 7}
    name = "void specdec::cuda::(anonymous namespace)::verify_walk_kernel<true>(specdec::VerifyChainArgs, bool)"
    events = [
        {"cat": "kernel", "name": "second", "ts": 9, "dur": 2.0},
        {"cat": "cpu_op", "name": "aten::sum", "ts": 1, "dur": 3.0},
        {"cat": "kernel", "name": name, "ts": 3, "dur": 12.5, "args": args},
    ]
    assert kernels.kernels(events) == [
        {"kernel": "verify_walk_kernel<true>", "us": 12.5, "grid": [264, 1, 1], "block": [256, 1, 1], "registers": 64,
         "shared_bytes": 16},
        {"kernel": "second", "us": 2.0},
    ]  # fmt: skip
    offered = {case.op for case, _ in kernels.cases("cuda")}
    assert offered == set(REGISTRY)


def test_clocks_are_asked_for_by_their_newer_name_and_their_older(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command[1])
        if "event_reasons" in command[1]:
            raise subprocess.CalledProcessError(2, command)
        return subprocess.CompletedProcess(
            command, 0, "1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 300 W, 700 W, 35, P0, 0x0\n"
        )

    monkeypatch.setattr(hardware.subprocess, "run", run)
    state = hardware.state()
    assert state is not None and state["clocks.sm"] == "1980 MHz" and state["held_down_by"] == "0x0"
    assert len(asked) == 2 and "--query" in asked[0]


def test_a_step_of_a_decoding_loop_is_the_difference_of_two_lengths() -> None:
    def run(length: int) -> decode.Ran:
        return decode.Ran(seconds=3.0 + 0.01 * length, steps=1 + length // 2, tokens=length)

    found = decode.steady(run, (100, 200))
    assert found["ms_a_step"] == pytest.approx(20) and found["tokens_a_step"] == 2
    took = iter([0.0, 3.0, 4.0, 3.0, 3.5, 3.0, 8.0])  # of the first run, and of each pair
    found = decode.steady(lambda length: decode.Ran(next(took), length, length), (100, 200))
    assert [round(found[name], 6) for name in ("ms_min", "ms_a_step", "ms_max", "pairs")] == [5, 10, 50, 3]
    with pytest.raises(ValueError, match="no difference"):
        decode.steady(lambda length: decode.Ran(1.0, 1, 1), (100, 200))
    longest = decode.PROMPT + decode.LENGTHS[1] + decode.NUM_DRAFT + 1
    assert decode.PROMPT + decode.LENGTHS[0] > 128 and longest <= 256  # one capture in both, none between


@pytest.mark.long
def test_an_interrupted_program_says_what_it_has(
    tmp_path: Path, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "INTERRUPT_S", 300)
    code = """if True:
        import time
        try:
            print("begun", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("3 passed", flush=True)
    """
    outcome = process.run([sys.executable, "-c", code], 5, tmp_path / "log")
    assert outcome.code is None and "3 passed" in outcome.text()
    stubborn = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun', flush=True)\ntime.sleep(600)"
    )
    monkeypatch.setattr(process, "INTERRUPT_S", 0.5)
    outcome = process.run([sys.executable, "-c", stubborn], 1, tmp_path / "log")
    assert outcome.code is None and outcome.seconds < 600  # killed, not waited for
