"""Laws, sampling parameters and processors as the ops take them: what csrc/bind_arguments.h reads by place.

Compiled parts that were built beside another text of this file are refused (`backends.contract`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class FlatLaw(NamedTuple):
    """A law as the ops take it: `TargetLaw` of csrc/common/target_law.h."""

    number: int
    variant: bool
    alpha: float
    beta: float
    cascade_bonus: bool

    @property
    def is_cascade(self) -> bool:
        """Whether it is a cascade's, which looks at the draft's raw rows: not the lossless and the lossy."""
        return self.number > LOSSY


LOSSLESS = FlatLaw(0, False, 0.0, 1.0, False)
LOSSY = 1
"""The number of `laws.Lossy`; cascades have those above."""


class FlatParams(NamedTuple):
    """One set of sampling parameters as the ops take them: where there is no tensor, the number counts."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_p_first: bool
    temperatures: Tensor | None  # [batch] float32
    top_ks: Tensor | None  # [batch] int64
    top_ps: Tensor | None  # [batch] float32
    min_ps: Tensor | None  # [batch] float32


class FlatProcessors(NamedTuple):
    """What the ops take, for one device and vocabulary: ``Tensor?[]`` in this order, None where a part is off.

    `lists` is batch, or 1 for all sequences. Ids are distinct and in ascending order, with `types.NO_ID` after the
    last.
    """

    token_bitmask: Tensor | None  # [..., words] int32: as many rows as there are of target logits
    allowed: Tensor | None  # [lists, words] int32
    bias_ids: Tensor | None  # [lists, num_bias] int32
    bias_values: Tensor | None  # [lists, num_bias] float32
    bias_until: Tensor | None  # [lists, num_bias] int32: barred while the output has fewer tokens
    penalties: Tensor | None  # [lists, 3] float32: repetition, frequency, presence
    count_ids: Tensor | None  # [lists, capacity] int32, and so on: see `TokenCounts`
    counts: Tensor | None
    num_output: Tensor | None  # [lists] int32
