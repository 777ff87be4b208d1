"""A draft model end to end, on models that are instant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import specdec_kernels as sk
from bench import draft_model, end_to_end
from examples.own_loop import LeanLlama
from python_tests.decoding.models import Letters, tiny
from specdec_kernels import assets
from specdec_kernels.assets import prompts

ARGUMENTS = [
    str(Path(__file__).parent),
    "--sets",
    "chat",
    "--lengths",
    "2",
    "3",
    "--prompts",
    "2",
    "--rounds",
    "1",
    "--max-new-tokens",
    "20",
]


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama", 1, num_hidden_layers=2), Letters()))
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"] * 2)


def test_all_that_is_said_of_a_draft_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "peak_bytes", lambda folder, gamma: 2**20 * (1 + gamma))
    assert draft_model.main([*ARGUMENTS, "--threads", str(torch.get_num_threads()), "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "draft_model.json").read_text())
    rows = [row for row in result["rows"] if row["drafter"] == "model"]
    keys = [(row["temperature"], row["rule"], row["num_speculative_tokens"]) for row in rows]
    assert keys == [(0, "greedy", 2), (0, "greedy", 3)] + [(1, rule, n) for rule in ("token", "block") for n in (2, 3)]
    for row in rows:
        assert 0 <= row["alpha_low"] <= row["alpha"] <= row["alpha_high"] <= 1 and 0 < row["alpha"] < 1
        assert row["batches_differing"] == 0
        assert row["c"] == pytest.approx(row["drafting_us"] / row["num_speculative_tokens"] / row["plain_step_us"])
        assert min(row["forward_us"], row["rest_us"], row["drafting_us"]) > 0
        assert 1 <= row["mean_acceptance_length"] <= 1 + row["num_speculative_tokens"]
    settings = result["settings"]
    assert settings["parameters"] > settings["draft parameters"] and settings["draft ids"] == 61
    assert settings["peak_bytes"] == {"0": 2**20, "3": 4 * 2**20}
    assert "peak memory, γ = 3: 4 MB" in capsys.readouterr().out


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("ids", [None, list(range(3, 50))], ids=["all ids", "some ids"])
def test_both_models_run_in_the_own_loop(
    ids: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tiny("llama", 1, num_hidden_layers=2)
    draft.config.draft_token_ids = ids
    monkeypatch.setattr(assets, "load_folder", lambda folder: (draft, Letters()))
    own = ["--own-loop", "--draft-bfloat16", "--name", "own", "--temperatures", "0", "--output", str(tmp_path)]
    own += ["--trees", "6", "70"]  # more nodes than a chain may have tokens
    targets: list[object] = []
    real = end_to_end.measure
    monkeypatch.setattr(end_to_end, "measure", lambda *of, **how: (targets.append(of[0]), real(*of, **how))[1])
    assert draft_model.main([*ARGUMENTS, "--threads", str(torch.get_num_threads()), *own]) == 0
    result = json.loads((tmp_path / "own.json").read_text())
    rows = [row for row in result["rows"] if row["drafter"] == "model"]
    assert [row["num_speculative_tokens"] for row in rows] == [2, 3]
    assert all(row["batches_differing"] == 0 and row["alpha"] > 0 for row in rows)
    trees = [row for row in result["rows"] if row["drafter"] == "model-tree"]
    assert [tree["num_speculative_tokens"] for tree in trees] == [6, 70]
    for tree in trees:
        assert tree["batches_differing"] == 0 and tree["drafting_us"] > 0
        assert tree["mean_acceptance_length"] > 1 and "c" not in tree
    assert {type(target) for target in targets} == {LeanLlama}
    assert result["settings"]["draft ids"] == (61 if ids is None else 47) and not result["settings"]["peak_bytes"]


def test_memory_is_that_of_a_process_with_one_way_of_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    used: list[sk.Drafter] = []
    real = sk.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sk, "generate", lambda *of, **how: (used.append(how["drafter"]), real(*of, **how))[1])
        for gamma in ("0", "2"):
            assert (
                draft_model.main([ARGUMENTS[0], "--threads", str(torch.get_num_threads()), "--only-memory", gamma]) == 0
            )
    assert [type(drafter) for drafter in used] == [sk.NoDrafter, sk.ModelDrafter]
    assert all(int(line) > 10 * 2**20 for line in capsys.readouterr().out.split())


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"ended with exit code 2: .* must be a file or folder that is there, got "):
        draft_model.peak_bytes(tmp_path / "none", 0)


def test_a_folder_without_a_model_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(folder: Path) -> None:
        raise assets.AssetError("draft must be a folder of a transformers model, and has no config.json")

    monkeypatch.setattr(assets, "load_folder", missing)
    assert draft_model.main(ARGUMENTS) == 2
    assert (
        capsys.readouterr().err
        == "draft_model: draft must be a folder of a transformers model, and has no config.json\n"
    )
