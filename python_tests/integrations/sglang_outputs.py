"""What SGLang gives its verification functions to write to."""

from __future__ import annotations

import torch
from torch import Tensor

UNTOUCHED = -7


def outputs(batch: int, nodes: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((batch * nodes,), UNTOUCHED, dtype=torch.int32),
        torch.full((batch, room), UNTOUCHED, dtype=torch.int32),
        torch.full((batch,), UNTOUCHED, dtype=torch.int32),
    )
