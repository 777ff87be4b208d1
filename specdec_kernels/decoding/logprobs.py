"""Log-probabilities of what steps emit: on their way to the host within a step's outcome, and collected there."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..types import TokenLogprobs

NONE = TokenLogprobs(*(torch.tensor(x, device="cpu") for x in (-math.inf, -math.inf, 0, 0, -1, -math.inf, -math.inf)))
"""What stands where there is no token."""
DTYPES = (torch.float32, torch.float32, torch.int32, torch.int32, torch.int64, torch.float32, torch.float32)


def numbers_of_token(num_top: int | None) -> int:
    """How many numbers of an outcome belong to a token: itself, and what is said of it."""
    return 1 if num_top is None else 5 + 3 * num_top


def packed(likely: TokenLogprobs) -> Tensor:
    """``[batch, width * (numbers - 1)]`` int64: float32 as their bits."""
    whole = (x.view(torch.int32) if x.dtype == torch.float32 else x for x in likely)
    return torch.cat([x.flatten(1).long() for x in whole], 1)


def split(numbers: np.ndarray, num_top: int) -> tuple[np.ndarray, TokenLogprobs]:
    """Takes apart, on the host, tokens ``[batch, width]`` and what is packed behind them."""
    width = numbers.shape[1] // numbers_of_token(num_top)
    shapes = _shapes(len(numbers), width, num_top)
    parts = torch.from_numpy(numbers[:, width:]).split([math.prod(shape[1:]) for shape in shapes], 1)
    return numbers[:, :width], TokenLogprobs(
        *(
            (x.int().view(dtype) if dtype == torch.float32 else x.to(dtype)).reshape(shape)
            for x, dtype, shape in zip(parts, DTYPES, shapes, strict=True)
        )
    )


def _shapes(batch: int, width: int, num_top: int) -> list[tuple[int, ...]]:
    return [(batch, width)] * 4 + [(batch, width, num_top)] * 3


class LogprobsRecorder:
    """Collects the log-probabilities of a call's steps.

    Parameters
    ----------
    batch_size, room, num_top : int
        There is no token past `room`.
    """

    def __init__(self, batch_size: int, room: int, num_top: int) -> None:
        shapes = _shapes(batch_size, room, num_top)
        self._kept = TokenLogprobs(
            *(none.to(dtype).expand(shape).clone() for none, dtype, shape in zip(NONE, DTYPES, shapes, strict=True))
        )
        self._rows = torch.arange(batch_size, device="cpu")[:, None]

    def add(self, slots: np.ndarray, likely: TokenLogprobs) -> None:
        """Take in a step's, whose tokens go to `slots` ``[batch, width]``."""
        at = torch.from_numpy(slots)
        for kept, new in zip(self._kept, likely, strict=True):
            kept[self._rows, at] = new

    def output(self, num_tokens: np.ndarray) -> TokenLogprobs:
        """Those of the first `num_tokens` tokens of each sequence."""
        longest = int(num_tokens.max())
        past = torch.arange(longest, device="cpu") >= torch.from_numpy(num_tokens)[:, None]
        return TokenLogprobs(
            *(
                torch.where(past if kept.dim() == 2 else past[..., None], none.to(kept.dtype), kept[:, :longest])
                for none, kept in zip(NONE, self._kept, strict=True)
            )
        )
