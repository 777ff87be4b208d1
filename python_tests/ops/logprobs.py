"""What token_logprobs says of a token, in float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.testing import float64_law


def described(x: Tensor, ids: Tensor, params: sk.SamplingParams, num_top: int) -> tuple[np.ndarray, ...]:
    """Raw and processed log-probability and rank of each token ``[batch, width]``, and of the first ids in order their
    numbers, raw and processed; one row a token, in float64.
    """
    x64 = x.double().nan_to_num(-math.inf, math.inf, -math.inf)
    raw = x64.log_softmax(-1)
    with np.errstate(divide="ignore"):
        law = torch.from_numpy(np.log(float64_law(x, params)))
    order = x64.sort(dim=-1, descending=True, stable=True).indices
    rank = (order == ids[..., None]).int().argmax(-1) + 1
    first = order[..., :num_top]
    none = (0, num_top - first.shape[-1])
    pad = torch.nn.functional.pad
    own = (v.gather(-1, ids[..., None])[..., 0] for v in (raw, law))
    tops = (pad(v.gather(-1, first), none, value=-math.inf) for v in (raw, law))
    return tuple(v.numpy() for v in (*own, rank, pad(first, none, value=-1), *tops))


def check(out: sk.TokenLogprobs, expected: tuple[np.ndarray, ...], atol: float = 1e-5) -> None:
    raw, law, rank, top, top_raw, top_law = expected
    np.testing.assert_array_equal(out.rank.cpu(), rank)
    np.testing.assert_array_equal(out.top_ids.cpu(), top)
    for got, want in (
        (out.raw_log_prob, raw), (out.log_prob, law), (out.top_log_prob, top_raw), (out.top_processed_log_prob, top_law)
    ):  # fmt: skip
        np.testing.assert_allclose(got.cpu(), want, rtol=2e-6, atol=atol)
