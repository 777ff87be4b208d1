"""The model of a GPU: what the emulator counts, how counts become microseconds, and that it says what it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench.gpu import grid, model, summary
from bench.inputs import Case
from python_tests import emulated
from python_tests.bench.rows import row

VOCAB, BATCH, K = 12 * 1024, 2, 3
CARD = model.Card(100, 4000.0, 51.2, "a test")  # 2 GHz

pytestmark = pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))


def launches(strategy: str, draft_is_target: bool = True, overlap: bool = True) -> list[model.Launch]:
    target = torch.randn(BATCH, K + 1, VOCAB, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    tokens = target[:, :K].argmax(-1) if draft_is_target else target[:, :K].argmin(-1)
    coins = torch.full((BATCH, K + 1), 0.5)
    library = model.emulator().library()
    library.specdec_cuda_allow_overlap(int(overlap))
    try:
        with emulated.running(strategy):
            return model.counted(
                lambda: sk.verify_chain(
                    target, tokens, uniform_samples=coins, params=sk.SamplingParams(0.01), backend=emulated.NAME
                )  # fmt: skip
            )
    finally:
        library.specdec_cuda_allow_overlap(1)


def test_bytes_are_those_of_the_rows() -> None:
    row_bytes = VOCAB * 2
    scan, laws, decide = launches("split")
    assert [x.kernel for x in (scan, laws, decide)] == [
        "scan_kernel", "verify_laws_kernel", "verify_decide_kernel<false>",
    ]  # fmt: skip
    assert scan.counts["bytes"] == BATCH * (K + 1) * row_bytes
    assert laws.counts["bytes"] == BATCH * K * 2  # of each draft token its own logit
    assert scan.counts["blocks"] * scan.counts["most_bytes"] >= scan.counts["bytes"]
    assert scan.counts["barriers"] == 0 < laws.counts["barriers"]
    assert decide.counts["atomics"] == 0  # tables tell what is left, and one block draws from it
    (walk,) = launches("walk")
    (early,) = launches("walk", draft_is_target=False)
    assert walk.kernel == "verify_walk_kernel<false>" and walk.counts["blocks"] == BATCH
    assert walk.counts["bytes"] >= BATCH * (K + 1) * row_bytes > 3 * early.counts["most_bytes"] > 0
    assert early.counts["bytes"] >= BATCH * row_bytes and early.counts["loading"] < walk.counts["loading"]
    (cluster,) = launches("cluster")
    assert cluster.kernel == "verify_walk_kernel<true>" and cluster.counts["cluster_barriers"] > 0
    assert cluster.counts["most_bytes"] < walk.counts["most_bytes"]


def test_kernels_overlap_unless_told_not_to() -> None:
    assert [x.counts["overlapping"] for x in launches("split")] == [0, 1, 1]
    assert [x.counts["overlapping"] for x in launches("split", overlap=False)] == [0, 0, 0]


def test_nothing_is_counted_unless_asked_for() -> None:
    with emulated.running():
        sk.row_stats(torch.randn(1, 1, 64), backend=emulated.NAME)
    assert model.counted(lambda: None) == []


def test_the_kernel_is_found_in_a_launch_as_it_is_written() -> None:
    either = "cluster > 1 ? walk_kernel<true> : walk_kernel<false>, shape, launch.stream, args"
    assert (
        model.kernel_of(either, True) == "walk_kernel<true>" and model.kernel_of(either, False) == "walk_kernel<false>"
    )
    assert model.kernel_of("scan_kernel, shape, stream", False) == "scan_kernel"
    assert model.kernel_of("body, 1", False) == "body"


def test_terms_add_up_as_they_are_described() -> None:
    counts = {**dict.fromkeys(model.NUMBERS, 0.0), "blocks": 200.0, "threads": 256.0, "cluster": 1.0, "bytes": 36e6,
              "most_bytes": 180e3, "loading": 2.0, "barriers": 5.0, "most_collectives": 10.0}  # fmt: skip
    launch = model.Launch("scan_kernel", counts)
    found = model.terms(launch, CARD, first=True)
    assert CARD.ghz == pytest.approx(2.0)
    assert found["launch"] == grid.LAUNCH_US and found["chain of loads"] == pytest.approx(0.8)
    assert found["barriers"] == pytest.approx(0.1) and found["collectives"] == pytest.approx(0.06)
    assert found["reading (bandwidth)"] == pytest.approx(10.0)  # 36 MB at nine tenths of 4 TB/s
    few = replace(launch, counts={**counts, "bytes": 180e3, "blocks": 1.0})
    assert model.terms(few, CARD, True)["reading (busiest block)"] == pytest.approx(180e3 / 20.48 / 2000)
    brought = replace(launch, counts={**few.counts, "most_copied": 180e3})  # at the port's 64 bytes a cycle
    assert model.terms(brought, CARD, True)["reading (busiest block)"] == pytest.approx(180e3 / 64 / 2000)
    slow = replace(launch, instructions=1000.0)
    assert model.terms(slow, CARD, True)["reading (instructions)"] == pytest.approx(36e6 / 1.024 / 100 / 4 / 2000)
    later = {**counts, "overlapping": 1.0}
    assert (
        model.terms(replace(launch, counts=later), CARD, False)["launch"] < model.terms(launch, CARD, False)["launch"]
    )
    both = model.predicted([launch, replace(launch, counts=later)], CARD)
    assert both["launch"] == pytest.approx(2.5 + model.cost("overlapping launch, µs")) and "atomics" not in both


def test_cards_are_those_of_their_data_sheets() -> None:
    assert [round(card.ghz, 2) for card in model.CARDS.values()] == [1.98, 1.98]
    assert all("data sheet" in card.source for card in model.CARDS.values())
    assert all(source for _, source in model.COSTS.values())


@pytest.mark.parametrize("batch", [1, 256])
def test_a_sample_has_the_layout_of_the_whole_batch(batch: int) -> None:
    case = Case("verify_chain", "T=1", VOCAB, batch, torch.bfloat16, num_draft=K)
    found, accepted = model.launches_of(case, 132)
    assert [launch.kernel for launch in found][::2] == ["scan_kernel", "verify_decide_kernel<false>"]
    assert len(accepted) == min(batch, model.SAMPLE)
    assert found[-1].counts["blocks"] == {1: math.ceil(math.ceil(VOCAB / 1024) / 2), 256: 256}[batch]


def test_instructions_come_from_machine_code_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "OBJECTS", tmp_path)
    assert model.instructions.__wrapped__() == {}
    (tmp_path / "scan.cu.o").touch()
    name = "_ZN7specdec4cuda12_GLOBAL__N_118verify_scan_kernelENS_4ArgsE"
    kernel = SimpleNamespace(name=name, of_a_tile=lambda *counts: {(4, 32): 400}.get(counts))
    monkeypatch.setattr(model.sass, "find_tool", lambda name: name)
    monkeypatch.setattr(model.sass, "kernels_of", lambda path, arch: [kernel])
    known = model.instructions.__wrapped__()
    assert known == {"verify_scan_kernel": 200.0}
    counted = [model.Launch("verify_scan_kernel<true>", {}), model.Launch("other_kernel", {})]
    assert [x.instructions for x in model.with_instructions(counted, known)] == [200.0, None]


def test_file_figure_and_table_say_that_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    titles: list[Any] = []
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "suptitle", lambda self, text: titles.append(text))
    monkeypatch.setattr(model, "instructions", dict)
    asked = f"--gpu nvidia-h200 --vocab {VOCAB} --batch 1 4 --draft 5 --case T=1 greedy --folder {tmp_path}".split()
    assert model.main(asked) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert result["settings"]["model"]["notice"] == model.NOTICE and all(model.NOTICE in title for title in titles)
    assert model.NOTICE in printed and "no machine code was read" in printed
    assert (tmp_path / "nvidia-h200.png").stat().st_size > 0
    for r in result["rows"]:
        assert "median_us" not in r and r["model_us"] == pytest.approx(sum(r["terms_us"].values()), abs=0.1)
        assert r["floor_exit_us"] <= r["floor_us"] < r["model_us"]
    said = model.of_gpu("nvidia-h200", tmp_path)
    assert set(said) == {(name, VOCAB, b, 5) for name in ("T=1", "greedy") for b in (1, 4)}
    assert model.of_gpu("another", tmp_path) == {} and model.NOTICE in model.table(result["rows"])


def test_a_measurement_is_printed_beside_its_prediction() -> None:
    assert "(17.5)" in summary.table([row("cuda", 19.0)], model={("T=1", 1000, 8, 5): 17.5})
    assert "(17.5)" not in summary.table([row("cuda", 19.0)], model={("T=1", 2000, 8, 5): 17.5})
