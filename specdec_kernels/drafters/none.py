"""Plain decoding, as a drafter."""

from __future__ import annotations

from ..decoding.state import DecodingState, StepResult
from .base import Draft, Drafter


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding through the same loop, the baseline of every comparison."""

    capturable = True

    def start(self, state: DecodingState) -> None:
        """Nothing to prepare."""

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """A draft of width 0."""
        return Draft(state.tokens[:, :0])

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Nothing to note."""
