"""Pairs of models for assisted generation, and what leads or watches their texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

import specdec_kernels as sk
from python_tests.decoding.models import near, tiny
from specdec_kernels.integrations.transformers import generate

ENDS = [2, 7, 13, 21, 30, 44]
PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    family: functools.cache(lambda family=family: (tiny(family, 1), near(family, 1, 0.15)))  # type: ignore[misc]
    for family in ("llama", "gpt2", "gemma2", "t5")
}
DRAFTED = {
    "assistant": lambda assistant: {"assistant_model": assistant},
    "lookup": lambda _: {"prompt_lookup_num_tokens": 4},
}
OF_DECODERS = DRAFTED | {
    "trees": lambda assistant: {"custom_generate": generate, "drafter": sk.ModelTreeDrafter(assistant, 9, 3, 4)}
}


class NoEvenAfterOdd(LogitsProcessor):  # type: ignore[misc]
    """Looks at the text: an even id may not follow an odd one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        even = torch.arange(scores.shape[1]) % 2 == 0
        return scores.masked_fill((input_ids[:, -1:] % 2 == 1) & even, -torch.inf)


class Along(LogitsProcessor):  # type: ignore[misc]
    """Leads plain generation along a given text, and keeps the scores that it would have gone by."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences, self.seen = sequences, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores)
        wanted = self.sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted, 0.0)
