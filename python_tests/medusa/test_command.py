"""``specdec medusa train | calibrate`` on a model that is instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

import specdec_kernels as sk
from python_tests.decoding.models import tiny
from python_tests.medusa.models import patterned
from python_tests.medusa.models import wide as target
from specdec_kernels import cli
from specdec_kernels.medusa import Document, MedusaHeads, command, extract


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer").touch()


asked: list[tuple[int, int]] = []
"""Tokens and seed of the text that was last wanted."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def prepare(model: Any, tokenizer: Any, folder: Path, num_tokens: int, seed: int, advance: Any) -> list[Path]:
        assert model.dtype == torch.bfloat16
        texts = [Document(text.tokens, first=5 * (i % 2 == 0)) for i, text in enumerate(patterned(40))]
        features = extract(target(), texts)
        asked.append((num_tokens, seed))
        features.save(folder / "shard.safetensors")
        advance(features.tokens.numel())
        return [folder / "shard.safetensors"]

    monkeypatch.setattr(command, "load_target", lambda arguments: (target(), Tokenizer()))
    monkeypatch.setattr(command, "prepare", prepare)
    return tmp_path


def train(folder: Path, *more: str, heads: Path | None = None) -> int:
    options = ["--steps", "60", "--batch", "64", "--learning-rate", "2e-2", "--num-heads", "2", "--vocab", "12"]
    options += ["--folder", str(folder)]
    return cli.main(["medusa", "train", str(heads or folder / "heads.safetensors"), *options, *more])


def test_fewer_ids_may_be_drafted_than_ranks_are_counted(folder: Path) -> None:
    assert train(folder, "--vocab", "5", "--steps", "3") == 0
    accuracy = MedusaHeads.load(folder / "heads.safetensors", target()).accuracy
    assert accuracy is not None and accuracy.shape == (2, 5)


def test_heads_are_trained_calibrated_and_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    heads = MedusaHeads.load(folder / "heads.safetensors", target())
    assert heads.accuracy is not None and heads.accuracy.shape == (2, 10) and float(heads.accuracy[:, 0].min()) > 0.5
    assert heads.card["tokens"] == 38 * 20 and heads.card["tokens held out"] == 2 * 20
    assert heads.card["tokens predicted"] == 20 * 15 + 18 * 19  # 18: two of those without a prompt are held out
    assert heads.card["self-distilled share of those"] == 20 * 15 / (20 * 15 + 18 * 19)
    assert heads.card["mean of the last 60 losses"] < heads.card["first loss"]
    card = (folder / "heads.md").read_text()
    assert "- steps: 60" in card and f"| 1 | {float(heads.accuracy[1, 0]):.4f} |" in card
    drafter = sk.MedusaDrafter(heads)
    out = sk.generate(target(), torch.tensor([[3, 4, 5]]), drafter=drafter, acceptance="greedy", max_new_tokens=9)
    assert out.stats.num_tokens > 0

    capsys.readouterr()
    options = ["--folder", str(folder), "--ranks", "4", "--nodes", "5"]
    assert cli.main(["medusa", "calibrate", str(folder / "heads.safetensors"), *options]) == 0
    assert "calibrated tree of 5 nodes" in capsys.readouterr().out
    assert cli.main(["medusa", "calibrate", str(folder / "heads.safetensors"), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["tree"]) == 4 and len(report["accuracy"]) == 2 and report["card"]["heads"] == 2
    again = MedusaHeads.load(folder / "heads.safetensors")
    assert again.accuracy is not None and again.card == heads.card
    # float16 in the file: what was counted on float32 weights may differ by a token
    torch.testing.assert_close(again.accuracy, heads.accuracy[:, :4], atol=0.06, rtol=0)


def test_more_ranks_than_ids_are_refused_before_text_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "--steps", "3") == 0
    before = len(asked)
    given = ["medusa", "calibrate", str(folder / "heads.safetensors"), "--folder", str(folder), "--ranks", "13"]
    assert cli.main(given) == 2 and len(asked) == before
    assert capsys.readouterr().err == "medusa: --ranks must be in [1, 12], the ids drafted, got 13\n"


def test_calibrating_makes_no_text_that_training_had_not(folder: Path) -> None:
    assert train(folder, "--tokens", "700", "--seed", "3") == 0
    heads = MedusaHeads.load(folder / "heads.safetensors")
    had = heads.card["tokens"] + heads.card["tokens held out"]
    calibrate = ["medusa", "calibrate", str(folder / "heads.safetensors"), "--folder", str(folder), "--ranks", "4"]
    assert cli.main(calibrate) == 0
    assert cli.main([*calibrate, "--tokens", "900", "--seed", "5"]) == 0
    assert asked[-3:] == [(700, 3), (had, 3), (900, 5)]


def test_training_again_goes_on_from_the_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    first = MedusaHeads.load(folder / "heads.safetensors")
    (checkpoint,) = folder.glob("heads-heads-*.checkpoint")
    kept = torch.load(checkpoint, weights_only=True)
    assert len(kept["losses"]) == 60
    assert train(folder) == 0
    assert torch.equal(MedusaHeads.load(folder / "heads.safetensors").w1.weight, first.w1.weight)
    assert train(folder, "--seed", "1") == 2
    assert f"{checkpoint.name} must be of" in capsys.readouterr().err


def test_runs_of_one_name_keep_checkpoints_of_their_own(folder: Path) -> None:
    """In the folder of texts, which they share."""
    heads = folder / "other" / "heads.safetensors"
    heads.parent.mkdir()
    assert train(folder) == 0
    assert train(folder, "--seed", "1", heads=heads) == 0
    assert heads.exists() and len(list(folder.glob("heads-heads-*.checkpoint"))) == 2


def test_the_backbone_is_trained_too_if_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "--joint-steps", "3") == 2 and "needs --backbone" in capsys.readouterr().err
    assert train(folder, "--backbone", str(folder)) == 2
    assert "--backbone must be given with --joint-steps" in capsys.readouterr().err
    assert train(folder, "--joint-steps", "3", "--joint-batch", "4", "--backbone", str(folder / "backbone")) == 0
    heads = MedusaHeads.load(folder / "heads.safetensors")
    assert heads.card["joint"]["steps"] == 3 and heads.accuracy is None
    assert f"not calibrated: specdec medusa calibrate {folder / 'heads.safetensors'} --model" in capsys.readouterr().out
    assert {"model.safetensors", "tokenizer"} <= {path.name for path in (folder / "backbone").iterdir()}


def test_a_backbone_is_trained_in_float32_and_written_in_its_own_dtype(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_target", lambda arguments: (target().bfloat16(), Tokenizer()))
    path = folder / "backbone"
    assert train(folder, "--steps", "3", "--joint-steps", "3", "--backbone", str(path)) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert trained.dtype == torch.bfloat16
    before, calibrate = len(asked), ["medusa", "calibrate", str(folder / "heads.safetensors"), "--folder", str(folder)]
    assert cli.main(calibrate) == 2 and len(asked) == before
    assert "--model must be the backbone that" in capsys.readouterr().err
    monkeypatch.setattr(command, "load_target", lambda arguments: (trained, Tokenizer()))
    trained.config.medusa_backbone = "of other heads"
    assert cli.main(calibrate) == 2 and len(asked) == before
    assert "--model must be the backbone that" in capsys.readouterr().err
    trained.config.medusa_backbone = MedusaHeads.load(folder / "heads.safetensors").card["backbone"]
    assert cli.main([*calibrate, "--ranks", "4"]) == 0
    more = folder / "more.safetensors"  # heads alone, of that backbone
    assert train(folder, "--steps", "3", heads=more) == 0
    assert cli.main(["medusa", "calibrate", str(more), "--folder", str(folder), "--ranks", "4"]) == 0
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), target().bfloat16().parameters(), strict=True)]
    assert any(moved)


def test_a_backbone_learns_a_quarter_as_fast(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jointly = Mock(return_value=[1.0])
    monkeypatch.setattr(command, "train_jointly", jointly)
    options = ["--steps", "3", "--joint-steps", "1", "--learning-rate", "1e-4", "--backbone", str(folder / "backbone")]
    assert train(folder, *options) == 0
    recipe = jointly.call_args.args[3]
    assert (recipe.learning_rate, recipe.backbone_learning_rate) == (1e-4, 2.5e-5)


def test_a_model_that_joint_training_refuses_is_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_target", lambda arguments: (tiny("phi"), Tokenizer()))
    before = len(asked)
    assert train(folder, "--joint-steps", "3", "--backbone", str(folder / "backbone")) == 2
    assert "model must have logits that are its LM head's alone" in capsys.readouterr().err
    assert len(asked) == before and list(folder.iterdir()) == []


def test_a_draft_model_is_trained_and_drafts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "draft"
    options = ["--layers", "1", "--vocab", "12", "--steps", "40", "--batch", "8", "--json"]
    assert cli.main(["medusa", "draft", str(path), "--folder", str(folder), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["last loss"] < report["first loss"] and 0 < report["acceptance"] < 1 and report["draft ids"] == 12
    draft = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert report["parameters"] == sum(p.numel() for p in draft.parameters())
    drafter = sk.ModelDrafter(draft)
    assert drafter.token_map is not None and sorted(drafter.token_map.draft_to_target.tolist()) == list(range(3, 15))
    ids = torch.tensor([[3, 4, 5]])
    plain = sk.generate(target(), ids, drafter=sk.NoDrafter(), acceptance="greedy", max_new_tokens=9)
    out = sk.generate(target(), ids, drafter=drafter, acceptance="greedy", max_new_tokens=9)
    assert torch.equal(out.tokens, plain.tokens)
    assert cli.main(["medusa", "draft", str(path), "--folder", str(folder), *options[:-1]]) == 0
    assert f"12 ids, {report['parameters'] / 1e6:.1f} million parameters" in capsys.readouterr().out


def test_bad_options_and_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["medusa"])
    with pytest.raises(SystemExit, match="2"):
        train(folder, "--vocab", "1")
    assert "argument --vocab: must be" in capsys.readouterr().err
    assert cli.main(["medusa", "train", str(folder / "no" / "heads.safetensors"), "--folder", str(folder)]) == 2
    assert "heads.safetensors must be in a folder that is there" in capsys.readouterr().err
    assert cli.main(["medusa", "calibrate", str(folder / "none.safetensors")]) == 2
    assert "none.safetensors" in capsys.readouterr().err


def test_a_model_is_not_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "llama"}')
    common = ["--folder", str(folder)]
    assert cli.main(["medusa", "draft", str(folder / "model"), *common]) == 2
    assert "model must hold no model but a draft that was trained here: it would be lost" in capsys.readouterr().err
    assert cli.main(["medusa", "draft", str(folder / "model"), "--model", str(folder / "model"), *common]) == 2
    assert "model must be another folder than --model, whose weights would be lost" in capsys.readouterr().err
    (folder / "draft").mkdir()
    (folder / "draft/config.json").write_text('{"model_type": "llama", "draft_token_ids": [3]}')
    for name in ("model", "draft"):
        assert train(folder, "--joint-steps", "1", "--backbone", str(folder / name)) == 2
        assert "must hold no model but a backbone that was trained here: it would be lost" in capsys.readouterr().err


def test_what_was_trained_here_is_written_again_by_its_own_command_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, or as a killed run left it; a draft that was made of a backbone is none."""
    backbone, draft = folder / "backbone", folder / "draft"
    jointly = ["--steps", "3", "--joint-steps", "1", "--backbone"]
    drafting = ["--folder", str(folder), "--layers", "1", "--vocab", "12", "--steps", "3"]
    assert train(folder, *jointly, str(backbone)) == 0
    (backbone / "model.safetensors").unlink()
    whole = (backbone / "config.json").read_text()
    (backbone / "config.json").write_text(whole[:20])
    assert train(folder, *jointly, str(backbone)) == 2
    assert f"{backbone / 'config.json'} must be whole JSON" in capsys.readouterr().err
    (backbone / "config.json").write_text(whole)
    assert train(folder, *jointly, str(backbone)) == 0
    assert (backbone / "model.safetensors").exists()

    load = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(command, "load_target", lambda arguments: (load(backbone), Tokenizer()))
    capsys.readouterr()
    assert cli.main(["medusa", "draft", str(backbone), *drafting]) == 2
    assert "must hold no model but a draft that was trained here" in capsys.readouterr().err
    for _ in range(2):
        assert cli.main(["medusa", "draft", str(draft), *drafting]) == 0
    assert train(folder, *jointly, str(draft)) == 2
    assert "must hold no model but a backbone that was trained here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["there.md", "a folder"])
def test_what_could_not_be_written_is_said_before_training(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a folder").mkdir()
    (folder / "a file").touch()
    common = ["--folder", str(folder)]
    assert cli.main(["medusa", "train", str(folder / name), *common]) == 2
    assert "must be a file, and not the .md that is written beside it" in capsys.readouterr().err
    assert cli.main(["medusa", "draft", str(folder / "a file"), *common]) == 2
    assert "a file must be a folder, or not be there" in capsys.readouterr().err
    assert train(folder, "--joint-steps", "1", "--backbone", str(folder / "a file")) == 2
    assert "a file must be a folder, or not be there" in capsys.readouterr().err
