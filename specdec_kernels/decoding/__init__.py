"""The decoding loop. Here: what drafters and runners are written against, and what a loop returns."""

from __future__ import annotations

from .costs import CostTable
from .output import GenerationOutput, GenerationStats, Provenance
from .runner import Prompt, Runner
from .state import DecodingState, StepResult

__all__ = [
    "CostTable",
    "DecodingState",
    "GenerationOutput",
    "GenerationStats",
    "Prompt",
    "Provenance",
    "Runner",
    "StepResult",
]
