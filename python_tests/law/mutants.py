"""Defects of the uniforms that a verifier of chains or of trees is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels.testing import Verify


def uniforms(verify: Verify, change: Callable[[Tensor], Tensor]) -> Verify:
    """`verify` with other uniforms."""
    return lambda *a, uniform_samples, **k: verify(*a, uniform_samples=change(uniform_samples), **k)


def final_shares_the_first_coin(u: Tensor) -> Tensor:
    """The final draw takes the number of the first coin."""
    return torch.cat([u[:, 1:2], u[:, 1:]], 1)


def siblings_share_a_coin(u: Tensor) -> Tensor:
    """One coin for all siblings, or positions of a chain (`manual_seed` inside the accept loop)."""
    return torch.cat([u[:, :1], u[:, 1:2].expand(-1, u.shape[1] - 1)], 1)


def coins_of_the_node_before(u: Tensor) -> Tensor:
    """Column i is read for node i + 1: the final draw's number is the first coin too."""
    return torch.cat([u[:, :1], u[:, :-1]], 1)


def one_number_for_all(u: Tensor) -> Tensor:
    """One number for everything."""
    return u[:, :1].expand(u.shape).contiguous()
