"""The ragged cache: every family of models served gives the logits of a full forward, whatever was rolled back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from python_tests.decoding.models import VOCAB, tiny
from specdec_kernels.decoding import Prompt
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.integrations.transformers.cache import VIEW_STEP, RaggedCache, causal_mask
from specdec_kernels.integrations.transformers.models import DECODERS, ENCODER_DECODERS

LENGTHS = (13, 22)
TOLERANCE = 2e-5  # logits are of order 1 to 100 here; measured differences are below 1e-6 of them


def ragged_pieces(model: object, texts: Tensor, prompt: Prompt) -> list[tuple[Tensor, Tensor]]:
    """Prefill, then pieces of text and garbage that is rolled back in turn: (start, logits) of the pieces of text."""
    runner = as_runner(model, "test")
    runner.start(prompt, texts.shape[1] + 20)
    runner.prefill(prompt)
    pieces = []
    start = prompt.lengths - 1
    for rows, kept in ((6, torch.tensor([2, 5])), (4, torch.tensor([4, 1])), (1, torch.tensor([1, 1])), (8, None)):
        places = start[:, None] + torch.arange(rows)
        piece = texts.gather(1, places)
        logits = runner.forward(piece, start, int(start.max()) + rows)
        assert logits is not None
        pieces.append((start, logits))
        if kept is not None:
            start = start + kept
            garbage = torch.randint(3, VOCAB, (2, 5))
            runner.forward(garbage, start, int(start.max()) + 5, need_logits=False)
    return pieces


def worst(full: Tensor, pieces: list[tuple[Tensor, Tensor]]) -> float:
    error = 0.0
    for start, logits in pieces:
        places = start[:, None] + torch.arange(logits.shape[1])
        expected = full.gather(1, places[:, :, None].expand(-1, -1, full.shape[2]))
        error = max(error, float((logits - expected).abs().max() / full.abs().max().clamp(min=1)))
    return error


@pytest.mark.parametrize("window", [None, 6], ids=["full", "window"])
@pytest.mark.parametrize("model_type", sorted(DECODERS))
@torch.inference_mode()
def test_decoder_logits_are_those_of_a_full_forward(model_type: str, window: int | None) -> None:
    changes: dict[str, object] = {} if window is None else {"sliding_window": window}
    if window and model_type.startswith("qwen"):
        changes.update(use_sliding_window=True, max_window_layers=1)
    model = tiny(model_type, **changes)
    texts = torch.randint(3, VOCAB, (2, 60), generator=torch.Generator().manual_seed(1))
    aligned = texts[:, : max(LENGTHS)].clone()
    aligned[0, LENGTHS[0] :] = 0
    prompt = Prompt(aligned, torch.tensor(LENGTHS), [])
    assert worst(model(texts).logits, ragged_pieces(model, texts, prompt)) < TOLERANCE


@pytest.mark.parametrize("model_type", sorted(DECODERS))
@torch.inference_mode()
def test_logits_of_some_rows_are_those_of_a_full_forward(model_type: str) -> None:
    model = tiny(model_type)
    texts = torch.randint(3, VOCAB, (2, 60), generator=torch.Generator().manual_seed(1))
    prompt = Prompt(texts[:, :1], torch.ones(2, dtype=torch.int64), [])
    runner = as_runner(model, "test")
    runner.start(prompt, 80)
    rows = torch.tensor([[12, 13, 14], [21, 22, 3]])
    logits = runner.forward_rows(texts[:, :24], torch.zeros(2, dtype=torch.int64), 24, rows)
    full = model(texts).logits
    expected = full.gather(1, rows[:, :, None].expand(-1, -1, full.shape[2]))
    assert float((logits - expected).abs().max() / full.abs().max()) < TOLERANCE
    start = torch.tensor([14, 23])
    after = runner.forward(texts.gather(1, start[:, None] + torch.arange(4)), start, 27)
    assert after is not None and worst(full, [(start, after)]) < TOLERANCE


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@torch.inference_mode()
def test_attention_implementations(model_type: str, attention: str) -> None:
    model = tiny(model_type, attention=attention)
    texts = torch.randint(3, VOCAB, (2, 60))
    prompt = Prompt(texts[:, :9], torch.tensor([9, 9]), [])
    assert worst(model(texts).logits, ragged_pieces(model, texts, prompt)) < TOLERANCE


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", sorted(ENCODER_DECODERS))
@torch.inference_mode()
def test_t5_has_each_sequences_own_relative_positions(model_type: str, attention: str) -> None:
    model = tiny(model_type, attention=attention)
    source = torch.randint(3, VOCAB, (2, 11))
    mask = torch.ones_like(source)
    mask[0, :4] = 0
    texts = torch.randint(3, VOCAB, (2, 60))
    texts[:, 0] = 0
    prompt = Prompt(texts[:, :1], torch.ones(2, dtype=torch.int64), [], source, mask)
    full = model(input_ids=source, attention_mask=mask, decoder_input_ids=texts).logits
    pieces = ragged_pieces(model, texts, prompt)
    assert worst(full, pieces) < TOLERANCE
    bias = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    bias.zero_()  # the comparison is worth nothing if the bias hardly matters
    assert worst(model(input_ids=source, attention_mask=mask, decoder_input_ids=texts).logits, pieces) > 100 * TOLERANCE


@torch.inference_mode()
def test_long_prompts_are_fed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_kernels.decoding.runner.PREFILL_ROWS", 5)
    model = tiny("gemma2")
    texts = torch.randint(3, VOCAB, (2, 60))
    prompt = Prompt(texts[:, :22], torch.tensor(LENGTHS), [])
    assert worst(model(texts).logits, ragged_pieces(model, texts, prompt)) < TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 3])
def test_causal_mask(window: int | None) -> None:
    positions = torch.tensor([[0, 1, 2], [4, 5, 6]])
    mask = causal_mask(positions, 8, torch.float32, window)
    assert mask.shape == (2, 1, 3, 8)
    for b in range(2):
        for i in range(3):
            for j in range(8):
                at = int(positions[b, i])
                sees = j <= at and (window is None or j > at - window)
                assert mask[b, 0, i, j] == (0 if sees else torch.finfo(torch.float32).min)


def test_attention_sees_no_more_of_the_buffer_than_it_needs() -> None:
    cache = RaggedCache(1, 2, 300)
    keys = torch.randn(2, 3, 4, 8)
    for bound, visible in ((5, VIEW_STEP), (VIEW_STEP, VIEW_STEP), (VIEW_STEP + 1, 2 * VIEW_STEP), (299, 300)):
        place = cache.place(torch.tensor([0, 1]), 4, bound)
        assert place.visible == visible and place.positions.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
        seen, _ = cache.update(keys, keys, 0)
        assert seen.shape == (2, 3, visible, 8)
        assert torch.equal(seen[0, :, :4], keys[0]) and torch.equal(seen[1, :, 1:5], keys[1])
    assert (
        cache.get_max_cache_shape() == 300 if hasattr(cache, "get_max_cache_shape") else cache.get_max_length() == 300
    )
