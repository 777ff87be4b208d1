"""Hidden states and attentions of assisted generation: against plain generation of transformers itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from python_tests.decoding.models import near, prompts, tiny
from python_tests.integrations.assistants import ENDS, Along
from specdec_kernels.decoding import runner
from specdec_kernels.integrations.transformers import assisted_generation
from specdec_kernels.integrations.transformers.models import DECODERS, ENCODER_DECODERS
from specdec_kernels.integrations.transformers.versions import CACHE

ASKED = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
WINDOW = {"mistral": {"sliding_window": 6}}


def same(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    """Assisted generation's output; each of its states is plain generation's, and of what is no text it is zeros."""
    options = {"attention_mask": mask, "max_new_tokens": 14, "eos_token_id": ENDS} | ASKED | options
    with assisted_generation(num_speculative_tokens=4):
        out = model.generate(ids, **options)
    drafted = ("assistant_model", "prompt_lookup_num_tokens")
    plain = {name: value for name, value in options.items() if name not in drafted}
    expected = model.generate(ids, **plain | {"do_sample": False, "logits_processor": [Along(out.sequences)]})
    assert out.keys() | {CACHE} == expected.keys()

    t5 = model.config.is_encoder_decoder
    real = torch.ones(len(ids), 1, dtype=torch.bool) if t5 else mask.bool()
    ended = torch.isin(out.sequences[:, real.shape[1] :], torch.tensor(ENDS)).long().cumsum(1) > 0
    for name in out.keys() - {"sequences"}:
        ours, theirs = out[name], expected[name]
        if not name.startswith("encoder"):
            assert len(ours) == len(theirs) == out.sequences.shape[1] - real.shape[1]
            theirs = tuple(
                blanked(layers, real if t == 0 else ~ended[:, t - 1, None]) for t, layers in enumerate(theirs)
            )
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    return out


def blanked(layers: tuple[Tensor, ...], real: Tensor) -> tuple[Tensor, ...]:
    """Layers' tensors with zeros in the rows, the last dimension but one, that are not `real` of ``[batch, rows]``."""
    return tuple(x.masked_fill(~real.view(len(x), *[1] * (x.dim() - 3), -1, 1), 0) for x in layers)


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("lengths", [(4, 12, 6), (7,)], ids=str)
@pytest.mark.parametrize("drafted", ["assistant_model", "prompt_lookup_num_tokens"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "t5"])
def test_hidden_states_and_attentions_are_plain_generation_s(
    family: str, drafted: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily, of prompts that are fed in several pieces, with windows that are shorter than the text."""
    monkeypatch.setattr(runner, "PREFILL_ROWS", 3)
    model = tiny(family, 1, "eager", **WINDOW.get(family, {}))
    draft = near(family, 1, 0.15, **WINDOW.get(family, {})) if drafted == "assistant_model" else 4
    out = same(model, *prompts(*lengths), do_sample=False, **{drafted: draft})
    states = out.decoder_hidden_states if family == "t5" else out.hidden_states
    assert not states[0][0].is_inference() and states[1][0].any()


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted(DECODERS | ENCODER_DECODERS))
def test_hidden_states_and_attentions_of_every_family(model_type: str) -> None:
    model, draft = tiny(model_type, 1, "eager"), near(model_type, 1, 0.15)
    same(model, *prompts(4, 9), assistant_model=draft, do_sample=False)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_hidden_states_of_sampled_tokens(family: str) -> None:
    model, draft = tiny(family, 1, "eager"), near(family, 1, 0.15)
    torch.manual_seed(5)
    same(model, *prompts(4, 9, 6), assistant_model=draft, do_sample=True, top_k=7, repetition_penalty=1.3)


@pytest.mark.parametrize("window", [None, 5])
def test_hidden_states_with_padding_anywhere(window: int | None) -> None:
    """Each row and key stands in its own column of the prompt; no key within a window is cut off."""
    model = tiny("mistral", 1, "eager", sliding_window=window)
    ids, mask = prompts(4, 9, 6)
    ids, mask = ids.roll(-2, 1), mask.roll(-2, 1)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None} | ASKED
    with assisted_generation():
        out = model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=4, **options)
    for b, columns in enumerate(row.nonzero()[:, 0] for row in mask):
        alone = model.generate(ids[b : b + 1, columns], **options)
        for t in range(6):
            keys = torch.cat([columns, torch.arange(9, 9 + t)])
            rows = columns if t == 0 else torch.zeros(1, dtype=torch.int64)
            for found, expected in zip(out.hidden_states[t], alone.hidden_states[t], strict=True):
                torch.testing.assert_close(found[b, rows], expected[0], rtol=1e-3, atol=1e-3)
            for found, expected in zip(out.attentions[t], alone.attentions[t], strict=True):
                assert found.shape == (3, 4, 9 if t == 0 else 1, 9 + t)
                seen = keys[-expected.shape[-1] :]
                torch.testing.assert_close(found[b][:, rows[:, None], seen], expected[0], rtol=1e-3, atol=1e-3)
                assert float(found[b].sum()) == pytest.approx(float(expected.sum()), rel=1e-4)


def test_hidden_states_of_some_layers_or_none() -> None:
    model = tiny("llama", 1)
    ids, mask = prompts(4, 9)
    wanted: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    some = {"return_dict_in_generate": True, "output_hidden_states": [1]}
    with assisted_generation():
        out = model.generate(ids, prompt_lookup_num_tokens=3, **wanted, **some)
        plain = model.generate(ids, prompt_lookup_num_tokens=3, **wanted, output_hidden_states=True)
    expected = model.generate(ids, **wanted, **some)
    assert plain.tolist() == out.sequences.tolist() and out.attentions is None
    for ours, theirs in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert [x is None for x in ours] == [x is None for x in theirs] and None in ours


@pytest.mark.parametrize("length", [65, 130])
def test_attentions_of_prompts_longer_than_a_piece(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the first saw a cache that was not yet as long as the prompt."""
    monkeypatch.setattr(runner, "PREFILL_ROWS", 64)
    model = tiny("llama", 1, "eager", max_position_embeddings=256)
    same(model, *prompts(length), prompt_lookup_num_tokens=4, do_sample=False)
