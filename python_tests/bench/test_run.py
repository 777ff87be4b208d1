"""The bench itself: inputs with the acceptance they claim, interleaving, memory, targets, files."""

from __future__ import annotations

import inspect
import json
import mmap
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes

import specdec_kernels as sk
from bench import inputs, machine, plot, report, run, timing
from bench.inputs import Case
from bench.providers import PROVIDERS


@pytest.mark.parametrize("params", [sk.SamplingParams(), sk.SamplingParams(0.8, 50, 0.9), sk.SamplingParams(0.0)])
def test_drafts_have_the_acceptance_they_claim(params: sk.SamplingParams) -> None:
    step = inputs.chain(Case("verify_chain", "any", 2048, 80, params=params), torch.Generator().manual_seed(5))
    out = sk.verify_chain(
        step.target_logits, step.draft_tokens, step.draft_logits, uniform_samples=step.uniform_samples, params=params,
        draft_params=params, draft_stats=step.draft_stats, return_acceptance=True,
    )  # fmt: skip
    assert out.acceptance is not None
    assert out.acceptance.mean().item() == pytest.approx(inputs.ACCEPTANCE, abs=0.07)


def test_one_hot_drafts_have_the_acceptance_they_claim() -> None:
    step = inputs.chain(Case("verify_chain", "any", 2048, 80, one_hot=True), torch.Generator().manual_seed(5))
    assert step.draft_logits is None
    law = step.target_logits[:, :-1].softmax(-1).gather(-1, step.draft_tokens[..., None])
    assert law.mean().item() == pytest.approx(inputs.ACCEPTANCE, abs=0.07)


def test_packed_inputs_are_the_chain_s_rows() -> None:
    case = Case("verify_packed", "any", 64, 6)
    step, whole = (make(case, torch.Generator().manual_seed(2)) for make in (inputs.packed, inputs.chain))
    cu = step.cu_num_draft_tokens.tolist()
    for b, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        assert 1 <= end - start <= case.num_draft
        assert torch.equal(step.draft_tokens[start:end], whole.draft_tokens[b, : end - start])
        assert torch.equal(step.draft_scores[start:end], whole.draft_scores[b, : end - start])
        assert torch.equal(step.target_logits[start + b : end + b + 1], whole.target_logits[b, : end - start + 1])
        assert torch.equal(step.uniform_samples[start + b : end + b + 1], whole.uniform_samples[b, : end - start + 1])


def test_input_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 32 << 20)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 32 << 30)
    assert inputs.num_sets(2**20, 2**22) * 2**20 >= 4 * machine.last_level_cache_bytes()


def test_input_sets_leave_room_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 480 << 20)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 24 << 30)
    assert 8 < inputs.num_sets(2**23, 110 << 20) <= 3 * 1024 // 110
    assert inputs.num_sets(2**23, 1 << 40) == 8
    taken = dict[str, int]()
    monkeypatch.setattr(inputs, "num_sets", lambda read, held: taken.setdefault("held", held) and 2)
    case = Case("verify_chain", "T=1", 100, 2)
    first, _ = run.input_sets(case)
    assert taken["held"] >= first.target_logits.nbytes + first.draft_logits.nbytes
    taken.clear()
    first, _ = run.input_sets(Case("gather_kv_", "32 layers", 64, 2))
    assert taken["held"] >= 64 * first.cache[0][0].nbytes


def test_interleave_gives_every_provider_every_set() -> None:
    used: dict[str, list[int]] = {"a": [], "b": []}
    order: list[str] = []

    def call(name: str) -> timing.Call:
        def busy(inputs: int) -> int:
            time.sleep(1e-3)  # long enough to be timed one at a time
            used[name].append(inputs)
            order.append(name)
            return inputs

        return busy

    sets = list(range(8))
    calls = {name: call(name) for name in used}
    samples = timing.interleave(calls, sets, lambda i, out: 100 + out, hot=False, repeats=32, seconds_each=1e9)
    for name, sample in samples.items():
        assert set(used[name][2:]) == set(sets)
        assert len(sample.seconds) == 32 == sample.summary()["repeats"]
    timed = order[4:]  # after the two warm-up calls of each
    rounds = [timed[i : i + 2] for i in range(0, len(timed), 2)]
    assert all(set(pair) == {"a", "b"} for pair in rounds)
    assert ["a", "b"] in rounds and ["b", "a"] in rounds


def test_a_slow_provider_takes_part_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that calls alone put forward."""
    now, order = [0.0], []

    def call(name: str, seconds: float) -> timing.Call:
        def run(inputs: int) -> None:
            now[0] += seconds
            order.append(name)

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {"slow": call("slow", 4e-3), "fast": call("fast", 1e-6)}
    samples = timing.interleave(calls, [0, 1], lambda i, out: 1, hot=False, repeats=40, seconds_each=1e-2)
    slow, fast = samples["slow"], samples["fast"]
    assert slow.number == 1 and slow.seconds == pytest.approx([4e-3] * timing.LEAST_REPEATS)
    assert fast.number == 200 and fast.seconds == pytest.approx([1e-6] * 40)  # as many as were asked for
    timed = [i for i, name in enumerate(order[4:]) if name == "slow"]  # after the two warm-up calls of each
    assert all(7 * 200 < later - earlier <= 9 * 200 + 1 for earlier, later in pairwise(timed))  # spread evenly


def test_the_peak_of_a_process_is_its_own() -> None:
    """A benchmark that starts another one must not lend it its peak. The other is Python alone: torch's own size is
    that of its build.
    """
    held = bytearray(2**29)
    held[::4096] = b"x" * len(held[::4096])  # pages are taken when they are written
    say = f"from pathlib import Path\n{inspect.getsource(timing.resident_peak)}\nprint(resident_peak())"
    said = subprocess.run([sys.executable, "-I", "-c", say], check=True, capture_output=True, text=True).stdout
    assert 0 < int(said) < len(held) < timing.resident_peak()


def test_peak_memory_sees_what_a_call_holds() -> None:
    size = 8 * 2**20
    peaks = timing.peak_memory(lambda: torch.ones(size // 4).add_(1).sum())
    assert peaks["torch_peak_bytes"] is not None and size <= peaks["torch_peak_bytes"] < size + 4096

    def takes(size: int) -> None:
        """Pages straight from the system, whatever an allocator keeps for later."""
        with mmap.mmap(-1, size) as pages:
            pages[::4096] = b"x" * (size // 4096)

    takes(4 * size)  # an earlier peak
    peaks = timing.peak_memory(lambda: takes(size))
    assert peaks["torch_peak_bytes"] == 0
    assert peaks["rss_peak_bytes"] is None or size * 0.9 <= peaks["rss_peak_bytes"] < size * 1.5
    quiet = timing.peak_memory(lambda: None)
    assert quiet["torch_peak_bytes"] == 0


def row(provider: str, median: float, **other: Any) -> dict[str, Any]:
    base = {
        "id": "x", "case": "T=1", "vocab": 1000, "batch": 1, "dtype": "float32", "cache": "cold", "provider": provider,
        "median_us": median, "q25_us": median, "q75_us": median, "gb_per_s": 10.0, "share_of_bandwidth": 0.5,
        "repeats": 5, "torch_peak_bytes": 9, "rss_peak_bytes": 0, "tokens_per_step": 3.0,
    }  # fmt: skip
    return {**base, **other}


def test_targets_are_judged_against_the_best_peer() -> None:
    rows = [row("cpu", 10.0), row("eager", 90.0), row("transformers", 70.0), row("reference", 1.0)]
    (speed, rate, share, *_) = report.targets("verify_chain", rows)
    assert "transformers" in speed["what"] and speed["measured"] == 7.0 and speed["reached"] is False
    assert rate["reached"] is True
    assert "NO" in report.targets_table([speed]) and "NO" not in report.targets_table([rate])
    rows[2] = row("transformers", 81.0)
    assert report.targets("verify_chain", rows)[0]["reached"] is True
    assert "time / cpu" in report.table(rows) and "50%" in report.table(rows)
    assert share["what"].endswith("share of the read bandwidth") and share["reached"] is True
    eight = report.targets("verify_chain", [row("cpu", 1.0, batch=8)])
    assert [t["reached"] for t in eight if "share" in t["what"]] == [False]


def test_a_goal_is_drawn_where_it_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    real = Axes.plot

    def watched(axes: Axes, x: Any, y: Any, *style: Any, **more: Any) -> Any:
        if style and style[0] == "k:":
            drawn.append((x[0], sum(y) / 2))
        return real(axes, x, y, *style, **more)

    monkeypatch.setattr(Axes, "plot", watched)
    kinds: list[dict[str, Any]] = [{"case": name} for name in ("T=1", "greedy", "truncated", "block")]
    kinds += [{"cache": "hot"}, {"dtype": "bfloat16"}]
    rows = [row(name, 9.0, id=str(kind), **kind) for kind in kinds for name in ("cpu", "eager")]
    result = {"benchmark": "verify_chain", "rows": rows, "settings": {"threads": 1}}
    result["machine"] = {"gpu": None, "cpu": "x"}
    assert plot.ratios(result, tmp_path / "x.png")
    stated = [(target["measured"], target["target"]) for target in report.targets("verify_chain", rows)]
    assert drawn == [(8.0, 0.0), (8.0, 1.0), (50.0, 2.0)]
    assert [goal for _, goal in stated if goal in (8.0, 50.0)] == [8.0, 8.0, 50.0]


def test_memory_target_is_that_nothing_grows_with_the_vocabulary() -> None:
    def judged(large: int, resident: int) -> list[bool]:
        bigger = row("cpu", 1.0, id="y", vocab=9000, torch_peak_bytes=large, rss_peak_bytes=resident)
        rows = [row("cpu", 1.0), bigger]
        return [t["reached"] for t in report.targets("verify_chain", rows) if "memory" in t["what"]]

    assert judged(9, 0) == [True, True]
    assert judged(36000, 36001) == [False, False]


def test_a_quick_run_writes_its_results_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    run.main(
        "--op verify_chain sample --providers cpu reference eager transformers --case T=1 overhead --vocab 256 "
        f"--batch 2 --quick --threads 1 --save {tmp_path}".split()
    )
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "overhead of a call" in printed and "transformers" in printed
    result = json.loads((tmp_path / "verify_chain.json").read_text())
    assert {"machine", "versions", "git", "command", "date", "settings", "rows", "targets"} <= set(result)
    assert {r["provider"] for r in result["rows"]} >= {"reference", "eager", "transformers"}
    assert all(r["q25_us"] <= r["median_us"] <= r["q75_us"] for r in result["rows"])
    plot.main([str(tmp_path)])
    assert (tmp_path / "verify_chain.png").stat().st_size > 0
    assert (tmp_path / "sample.png").exists()


def test_an_unknown_case_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main("--op sample --case T=1 nonsense".split())
    assert "error: no case named nonsense; there are " in capsys.readouterr().err


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine's results, with a file of what is measured by default; a measurement is instant."""

    def instant(case: Case, names: Any, *_: Any) -> list[dict[str, Any]]:
        return [row(n, 1.0, id=str(case)) for n in names if PROVIDERS[n].why_missing(case.op, "cpu") is None]

    monkeypatch.setattr(run, "PUBLISHED", tmp_path / "published")
    monkeypatch.setattr(run, "measure", instant)
    monkeypatch.setattr(machine, "read_gb_per_s", lambda: 10.0)
    run.main("--op sample gather_kv_ --save".split())
    return tmp_path / "published"


def told(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments.split())
    return capsys.readouterr().err


def test_published_results_are_not_lost(
    published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (published / "sample.json").read_text()
    for given in ("--case T=1", "--providers cpu", "--vocab 49152", "--batch 1", "--cache cold"):
        assert "sample.json holds " in told(f"--op sample --save {given}", capsys)
    assert "--save must be given a folder of its own with --quick" in told("--op sample --quick --save", capsys)
    with monkeypatch.context() as patched:
        gone = replace(PROVIDERS["eager"], why_missing=lambda op, device: "it is not installed any more")
        patched.setitem(PROVIDERS, "eager", gone)
        assert "sample.json holds " in told("--op sample --save", capsys)
    monkeypatch.chdir(published.parent)
    assert "a folder of its own with --quick" in told(f"--op sample --quick --save {published.name}", capsys)
    assert (published / "sample.json").read_text() == before
    (published / "sample.json").unlink()
    for _ in range(2):  # what is measured again is what was
        run.main("--op sample --case T=1 --cache cold --save".split())
    kept = json.loads((published / "sample.json").read_text())["rows"]
    assert kept and all("cold" in one["id"] for one in kept)


def test_json_is_one_document(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, and nothing else; files are written by `--save` alone."""
    capsys.readouterr()
    before = {path: path.read_text() for path in published.iterdir()}
    run.main("--op verify_chain sample --case T=1 --vocab 49152 --cache cold --json".split())
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert set(found) == {"rows", "targets"} and {one["op"] for one in found["rows"]} == {"verify_chain", "sample"}
    assert found["targets"] == report.targets("verify_chain", [r for r in found["rows"] if r["op"] == "verify_chain"])
    assert found["targets"] and " threads, load " in printed.err and report.table(found["rows"][:1]) in printed.err
    assert {path: path.read_text() for path in published.iterdir()} == before
    run.main(f"--op sample --case T=1 --cache cold --json --save {tmp_path / 'both'}".split())
    (both,) = (tmp_path / "both").iterdir()
    saved, printed_rows = json.loads(both.read_text())["rows"], json.loads(capsys.readouterr().out)["rows"]
    assert [{"op": "sample", **one} for one in saved] == printed_rows
    assert "unrecognized arguments: somewhere" in told("--op sample --json somewhere", capsys)  # as it was once called


def test_an_op_of_which_nothing_was_measured_has_no_file(published: Path, tmp_path: Path) -> None:
    run.main(f"--op sample gather_kv_ --case T=1 --save {tmp_path / 'some'}".split())
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["sample.json"]
    before = (published / "gather_kv_.json").read_text()
    (published / "sample.json").unlink()
    run.main("--op sample gather_kv_ --case T=1 --save".split())
    assert (published / "gather_kv_.json").read_text() == before


def test_options_that_would_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "out.json", tmp_path / "file"):
        assert f"--save must be given a folder, got {path}" in told(f"--op sample --save {path}", capsys)
    for name in ("repeats", "seconds"):
        assert f"--quick chooses --{name} and must be given without it" in told(
            f"--op sample --quick --{name} 3", capsys
        )


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no result file"):
        plot.main([str(tmp_path)])


def test_a_command_does_not_name_the_folder_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--threads", "2", "--output", "somewhere", "--op", "sample"])
    assert machine.command().endswith(" --threads 2 --op sample")
