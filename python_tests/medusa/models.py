"""Heads, texts and a target for the tests of Medusa's training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import specdec_kernels as sk
from python_tests.decoding.models import SMALL, tiny
from specdec_kernels.medusa import Document, Features, MedusaHeads

HIDDEN = SMALL["hidden_size"]
IDS = torch.tensor([5, 2, 40, 17, 60, 8])


def random_heads(num_heads: int = 3, shared: bool = True, seed: int = 0) -> MedusaHeads:
    heads = MedusaHeads.of_model(tiny("llama"), num_heads, sk.TokenMap(IDS), shared)
    torch.manual_seed(seed)
    for weight in heads.parameters():
        weight.data = torch.randn_like(weight) * 0.3
    return heads


def formula(heads: MedusaHeads, hidden: torch.Tensor) -> np.ndarray:
    """``[n, K, vocab_draft]`` logits as the docstring writes them, in float64."""
    h = hidden.double().numpy()
    out = []
    for k in range(heads.num_heads):
        w1 = heads.w1.weight.detach().double().numpy()[k * HIDDEN : (k + 1) * HIDDEN]
        w2 = heads.w2[k if len(heads.w2) > 1 else 0].weight.detach().double().numpy()
        inner = h @ w1.T
        out.append((inner / (1 + np.exp(-inner)) + h) @ w2.T)
    return np.stack(out, axis=1)


def patterned(count: int) -> list[Document]:
    """Texts that can be learnt: every token is its forerunner's plus one, in a small circle."""
    return [Document((np.arange(20) + start) % 12 + 3) for start in range(count)]


class Letters:
    """A tokenizer: a letter a token."""

    pad_token_id, chat_template = 0, "its own"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 3}

    def apply_chat_template(self, *_: Any) -> str:
        raise NotImplementedError

    def encode(self, text: str, **kw: Any) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]


def wide(**changes: Any) -> Any:
    """A target that is wide enough to draft for."""
    return tiny("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **changes)


def features() -> Features:
    """Of two texts, eight tokens each."""
    hidden = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(0)).half()
    return Features(hidden, torch.arange(16) % 5 + 3, torch.tensor([0, 8]), torch.tensor([1, 0]))
