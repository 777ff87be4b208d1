"""Medusa's heads and their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import specdec_kernels as sk
from python_tests.decoding.models import VOCAB, tiny
from python_tests.medusa.models import HIDDEN, IDS, formula, random_heads
from specdec_kernels.medusa import MedusaHeads


@pytest.mark.parametrize("shared", [True, False])
def test_logits_are_the_formulas(shared: bool, rng: torch.Generator) -> None:
    heads = random_heads(shared=shared)
    hidden = torch.randn(7, HIDDEN, generator=rng)
    np.testing.assert_allclose(heads(hidden).detach().numpy(), formula(heads, hidden), rtol=1e-4, atol=1e-4)
    assert heads(hidden[:, None]).shape == (7, 1, 3, len(IDS))


@pytest.mark.parametrize("shared", [True, False])
def test_new_heads_predict_what_the_lm_head_does(shared: bool, rng: torch.Generator) -> None:
    model = tiny("llama")
    heads = MedusaHeads.of_model(model, 2, sk.TokenMap(IDS), shared)
    hidden = torch.randn(5, HIDDEN, generator=rng)
    want = model.get_output_embeddings()(hidden)[:, IDS]
    torch.testing.assert_close(heads(hidden), want[:, None].expand(-1, 2, -1))


def test_top_tokens_are_target_ids(rng: torch.Generator) -> None:
    heads = random_heads()
    hidden = torch.randn(4, HIDDEN, generator=rng)
    want = IDS.numpy()[np.argsort(-formula(heads, hidden), axis=-1)[..., :3]]
    assert np.array_equal(heads.top_tokens(hidden, 3).numpy(), want)


def test_draft_labels() -> None:
    assert random_heads().draft_labels(torch.tensor([2, 5, 3, -100, 60, 61, 999])).tolist() == [1, 0, -100, -100, 4, -100, -100]  # noqa: E501  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_the_file_brings_them_back(shared: bool, tmp_path: Path, rng: torch.Generator) -> None:
    heads = random_heads(shared=shared)
    heads.accuracy = torch.tensor([[0.5, 0.25], [0.3, 0.2], [0.1, 0.0]], dtype=torch.float64)
    heads.card = {"steps": 3}
    heads.save(tmp_path / "heads.safetensors")
    back = MedusaHeads.load(tmp_path / "heads.safetensors", tiny("llama"))
    hidden = torch.randn(5, HIDDEN, generator=rng)
    torch.testing.assert_close(back(hidden), heads(hidden).detach(), rtol=1e-2, atol=1e-2)  # float16 in the file
    assert torch.equal(back.accuracy, heads.accuracy) and back.card == heads.card
    assert torch.equal(back.token_map.draft_to_target, IDS) and not back.w1.weight.requires_grad
    assert [file.name for file in tmp_path.iterdir()] == ["heads.safetensors"]


def broken(tmp_path: Path, **changes: Any) -> Path:
    tensors = {
        "w1": torch.zeros(3, HIDDEN, HIDDEN), "w2": torch.zeros(1, 6, HIDDEN), "draft_to_target": IDS.int(), **changes
    }  # fmt: skip
    path = tmp_path / "heads.safetensors"
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "specdec_kernels medusa heads, 1"})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w1": torch.zeros(3, HIDDEN, HIDDEN + 1)}, r"w1 must be \[heads, hidden, hidden\], got \[3, 32, 33\]"),
        ({"w2": torch.zeros(2, 6, HIDDEN)}, r"w2 must be \[1 or heads=3, vocab_draft=6, hidden=32\], got \[2, 6, 32\]"),
        ({"w2": torch.zeros(1, 5, HIDDEN)}, r"w2 must be .*, got \[1, 5, 32\]"),
        ({"w2": None}, "must hold w1, w2 and draft_to_target, got no w2"),
        ({"accuracy": torch.zeros(2, 4)}, r"accuracy must be \[heads=3, ranks\], got \[2, 4\]"),
        ({"draft_to_target": torch.tensor([1, 2, 3, 4, 5, 5])}, "distinct ids"),
        ({"draft_to_target": torch.tensor([1, 2, 3, 4, 5, VOCAB])}, "ids < vocab=61, got hidden=32 and ids up to 61"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaHeads.load(broken(tmp_path, **changes), tiny("llama"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    save_file({"w1": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="must have the format"):
        MedusaHeads.load(path)
    path.write_text("no tensors")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        MedusaHeads.load(path)


def test_heads_of_another_width_are_refused(tmp_path: Path) -> None:
    path = broken(tmp_path)
    with pytest.raises(ValueError, match="hidden=16 and ids < vocab=61, got hidden=32"):
        MedusaHeads.load(path, tiny("llama", hidden_size=16))
    with pytest.raises(ValueError, match="num_heads must be >= 1, got 0"):
        MedusaHeads.of_model(tiny("llama"), 0, sk.TokenMap(IDS))
    with pytest.raises(ValueError, match="ids < vocab=61, got 61"):
        MedusaHeads.of_model(tiny("llama"), 1, sk.TokenMap(torch.tensor([0, VOCAB])))
