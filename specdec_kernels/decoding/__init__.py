"""The decoding loops and what they are made of."""

from __future__ import annotations

from .generate import generate
from .output import GenerationOutput, GenerationStats, Provenance
from .packing import pack_linear_weights
from .runner import Prompt, Runner
from .state import DecodingState, StepResult

__all__ = [
    "DecodingState",
    "GenerationOutput",
    "GenerationStats",
    "Prompt",
    "Provenance",
    "Runner",
    "StepResult",
    "generate",
    "pack_linear_weights",
]
