"""Device functions on numbers: exp, keys of the same order, Philox and the Gumbel noise; what is integer arithmetic is
bit for bit that of csrc/common.

Source of the generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import sampling
from ...ops import arguments
from ...types import Status
from ..reference import law, random

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# inline PTX is for NVIDIA alone, and not for the interpreter
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)

TILE = tl.constexpr(arguments.TILE)
GROUP = tl.constexpr(256)  # ids of which truncation knows the largest value
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.44269504)
SMALLEST_EXPONENT = tl.constexpr(law.SMALLEST_EXPONENT)
SMALLEST_TEMPERATURE = tl.constexpr(sampling.SMALLEST_TEMPERATURE)
SMALLEST_WEIGHT = tl.constexpr(law.SMALLEST_WEIGHT)
SLACK = tl.constexpr(law.SLACK)
TOP_P_REACHED = tl.constexpr(law.TOP_P_REACHED)
LAST_ID = tl.constexpr(0x7FFFFFFF)  # past every id
LOWEST_KEY = tl.constexpr(-0x7F800000)  # of the lowest finite float32, as `ordered` has it

# flags of a row or a sequence
NAN = tl.constexpr(int(Status.NAN))
INF = tl.constexpr(int(Status.INF))
EMPTY_ROW = tl.constexpr(int(Status.EMPTY_ROW))
BAD_TOKEN = tl.constexpr(int(Status.BAD_TOKEN))
BAD_PARAM = tl.constexpr(int(Status.BAD_PARAM))
BAD_TREE = tl.constexpr(int(Status.BAD_TREE))
BAD_DRAFT = tl.constexpr(int(Status.BAD_DRAFT))

PHILOX_M0 = tl.constexpr(0xD2511F53)  # multipliers
PHILOX_M1 = tl.constexpr(0xCD9E8D57)
PHILOX_W0 = tl.constexpr(0x9E3779B9)  # key increments
PHILOX_W1 = tl.constexpr(0xBB67AE85)
NOISE_STREAM = tl.constexpr(random.NOISE_STREAM)
FEW_BITS = tl.constexpr(random.FEW_BITS)


@triton.jit
def fast_exp2(x):
    """2^x within 2 units in the last place; denormal results may be 0."""
    if PTX:  # tl.exp2 takes four instructions, as it makes denormal numbers
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def exp_nonpositive(x):
    """exp(x) for x <= 0; exactly 0 below `SMALLEST_EXPONENT` and for NaN. The relative error grows with -x, as x log2 e
    is rounded: a few 1e-6 at the lower end.
    """
    return tl.where(x >= SMALLEST_EXPONENT, fast_exp2(x * LOG2_E), 0.0)


@triton.jit
def larger_or_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(x, axis: tl.constexpr):
    """The maximum along an axis; NaN where there is one."""
    if INTERPRETED:  # where a function of two numbers is called for each
        y = tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), tl.max(x, axis))
    else:
        y = tl.reduce(x, axis, larger_or_nan)
    return y


@triton.jit
def ordered(x):
    """float32 as int32 of the same order; both zeros are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_ordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def any_flags(status):
    """The OR of a vector of flags."""
    found = tl.max(status & NAN, 0) | tl.max(status & INF, 0) | tl.max(status & EMPTY_ROW, 0)
    found |= tl.max(status & BAD_TOKEN, 0) | tl.max(status & BAD_PARAM, 0)
    return found | tl.max(status & BAD_DRAFT, 0)


@triton.jit
def philox(key0, key1, c0, c1, c2, c3):
    """Philox4x32-10: four words of uint32 from a key of two and a counter of four."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(PHILOX_M0, c0), c0 * PHILOX_M0
        high1, low1 = tl.umulhi(PHILOX_M1, c2), c2 * PHILOX_M1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += PHILOX_W0
        key1 += PHILOX_W1
    return c0, c1, c2, c3


@triton.jit
def low_word(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(x):
    return ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def uniform(high, low):
    """Two words as a float64 in [0, 1), a multiple of 2^-53."""
    return ((high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)).to(tl.float64) * 2.0**-53


@triton.jit
def uniforms_at(seed, step, purpose, pair):
    """The uniform numbers ``2 pair`` and ``2 pair + 1`` of a seed: see csrc/common/philox.h."""
    counter = pair.to(tl.uint32)
    zero = counter * 0
    key0, key1, step0, step1 = low_word(seed), high_word(seed), low_word(step), high_word(step)
    w0, w1, w2, w3 = philox(
        key0 + zero, key1 + zero, counter, (zero + purpose).to(tl.uint32), step0 + zero, step1 + zero
    )
    return uniform(w0, w1), uniform(w2, w3)


@triton.jit
def key_at(seed, step, purpose, position):
    """The noise key of a position: see csrc/common/philox.h."""
    low = low_word(position)
    zero = low * 0
    key0, key1, step0, step1 = low_word(seed), high_word(seed), low_word(step), high_word(step)
    key0, key1, _, _ = philox(
        key0 + zero, key1 + zero, zero, (zero + purpose).to(tl.uint32), step0 + zero, step1 + zero
    )
    w0, w1, _, _ = philox(key0, key1, low, high_word(position), zero + 1, zero + 1)
    return w0.to(tl.int64) | (w1.to(tl.int64) << 32)


@triton.jit
def noise_bits(key0, key1, ids, further):
    """The 32 bits behind the noise of target ids, or the `further` ones."""
    group = (ids >> 2).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = philox(key0 + zero, key1 + zero, group, zero, zero + further, zero + NOISE_STREAM)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def gumbel(key0, key1, ids, bits):
    """The noise of target ids ``[n, m]`` by their bits: see csrc/common/philox.h."""
    part = tl.full(bits.shape, 2.0**-33, tl.float32)
    few = bits < FEW_BITS
    if tl.max(tl.max(few.to(tl.int32), 1), 0) > 0:  # nearly never
        further = noise_bits(key0, key1, ids, 1).to(tl.float32) * 2.0**-64 + 2.0**-65
        part = tl.where(few, further, part)
    t = bits.to(tl.float32) * 2.0**-32 + part
    rest = (bits ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + 2.0**-33  # 1 - t, with all its digits
    upper = t > 0.5
    t = tl.where(upper, 0.5, t)
    rounded = 1.0 - t  # log(rounded) * t / (1 - rounded) makes up for it
    lost = 1.0 - rounded
    lower = tl.where(lost > 0.0, -tl.log(rounded) * tl.div_rn(t, tl.where(lost > 0.0, lost, 1.0)), t)
    return -tl.log(tl.where(upper, -tl.log(rest), lower))


@triton.jit
def noise_at(key0, key1, ids):
    """The Gumbel noise of any target ids ``[n, m]``."""
    return gumbel(key0, key1, ids, noise_bits(key0, key1, ids, 0))


@triton.jit
def noise_of_groups(key0, key1, groups, SIZE: tl.constexpr):
    """The Gumbel noise of groups ``[n]`` of SIZE consecutive ids each, ``[n, SIZE]``: one Philox for four ids."""
    quarter: tl.constexpr = SIZE // 4
    group = (groups[:, None] * quarter + tl.arange(0, quarter)[None, :]).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = philox(key0 + zero, key1 + zero, group, zero, zero, zero + NOISE_STREAM)
    ids = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return gumbel(key0, key1, ids, tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
