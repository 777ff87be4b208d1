"""Philox4x32-10 in integer tensors, and the uniforms, keys and Gumbel noise made from it.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_STREAM = 0x47554D42  # counter word of the Gumbel stream, which no purpose uses
FEW_BITS = 1 << 16  # below, 32 further bits count: see csrc/common/philox.h
_LOW = 0xFFFFFFFF


def philox(key_low: Tensor, key_high: Tensor, counter: list[Tensor]) -> Tensor:
    """Four 32-bit words a counter: ``[..., 4]`` int64 in [0, 2**32). All inputs int64 in [0, 2**32), broadcastable."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low, key_high = (key_low + 0x9E3779B9) & _LOW, (key_high + 0xBB67AE85) & _LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 × 32 bit product, through 16-bit halves: int64 has no room for the whole of it."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    middle2 = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (middle2 >> 16), ((middle2 << 16) | (low & 0xFFFF)) & _LOW


def words(value: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high 32-bit word of int64, each as int64 in [0, 2**32)."""
    return value & _LOW, (value >> 32) & _LOW


def gumbel(keys: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """``G = −log(−log1p(−t))``, t in the middle of what the 32 bits ``philox(key, id div 4)[id mod 4]`` leave open; an
    unlikely id wins by a small t, and where that has few bits 32 further ones stand behind them.

    `keys` and `ids` are int64 and broadcast; `ids` are target ids.
    """
    bits = _noise_bits(keys, ids, 0)
    further = _noise_bits(keys, ids, 1).to(dtype) * 2.0**-64 + 2.0**-65
    t = bits.to(dtype) * 2.0**-32 + torch.where(bits < FEW_BITS, further, 2.0**-33)
    rest = (bits ^ _LOW).to(dtype) * 2.0**-32 + 2.0**-33  # 1 − t, with all its digits
    upper = bits >= 1 << 31
    return -torch.where(upper, -rest.log(), -torch.log1p(-torch.where(upper, 0.5, t))).log()


def _noise_bits(keys: Tensor, ids: Tensor, further: int) -> Tensor:
    zero = torch.zeros_like(ids)
    bits = philox(*words(keys), [ids >> 2, zero, zero + further, zero + NOISE_STREAM])
    return bits.gather(-1, (ids & 3).expand(bits.shape[:-1])[..., None])[..., 0]
