"""Device functions that find which values of a row are its largest, by number or by mass: candidates are listed, in one
more read of the groups that hold any, and the list decides. A row with too many candidates is read a few times more,
each time narrowing a range of keys, until what is left in it can be listed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import INFINITY, LAST_ID, LOWEST_KEY, from_ordered, ordered
from .bundles import Listed
from .row import load_values, weigh

CANDIDATES = tl.constexpr(2048)  # so many values are listed and selected from in registers
PARTS = tl.constexpr(4)  # into which a read divides a range, to keep one


@triton.jit
def part_of(low, high, part):
    """Where one of the PARTS of a range of keys begins: equal in value, as logits are spread, or equal in keys where
    that would take long.
    """
    lowest = from_ordered(low.to(tl.int32))
    span = from_ordered((high - 1).to(tl.int32)) - lowest
    by_value = (part > 0) & (high - low > 1 << 25) & (span > 2.0**-6) & (span < 1024.0)
    value = ordered(lowest + span * (part * (1.0 / PARTS))).to(tl.int64)
    return tl.where(by_value, value, low + (high - low) * part // PARTS)


@triton.jit
def grain_of(row, noise):
    """Keys that are nearer to each other belong to one value, as it was loaded."""
    grain = tl.full((), 1, tl.int64)
    if noise.key0 is None:
        if row.rows.overlay.flags is None:
            if row.rows.data.dtype.element_ty == tl.bfloat16:
                grain = tl.full((), 1 << 16, tl.int64)
            elif row.rows.data.dtype.element_ty == tl.float16:
                grain = tl.full((), 1 << 13, tl.int64)
    return grain


@triton.jit
def listed_of(row, groups, listed):
    """The scratch of one row, which has so many groups."""
    return Listed(listed.key + row * CANDIDATES, listed.id + row * CANDIDATES, listed.hot + row * groups)


@triton.jit
def load_maxima(groups, group):
    """Those of some groups, as keys."""
    return ordered(tl.load(groups.maximum + group, mask=group < groups.number, other=-INFINITY))


@triton.jit
def nth_maximum(groups, n, top, CHUNK: tl.constexpr):
    """A key that the maxima of at least n groups reach, and not many more unless they are alike: so at least n values
    do. The lowest where there are fewer. `top` is the largest.
    """
    low = tl.full((), LOWEST_KEY, tl.int64)
    if n <= groups.number:
        least = tl.full((), LAST_ID, tl.int32)
        for first in range(0, groups.number, CHUNK):
            group = first + tl.arange(0, CHUNK)
            key = load_maxima(groups, group)
            least = tl.minimum(least, tl.min(tl.where(group < groups.number, key, LAST_ID), 0))
        low = tl.maximum(low, least.to(tl.int64))
        high = top + 1
        reaching = groups.number
        most = n + tl.minimum(n // 4 + 8, (groups.number - n) // 4)
        while (high - low > 1 << 16) & (reaching > most):
            middle = part_of(low, high, PARTS // 2)
            count = tl.zeros((), tl.int32)
            for first in range(0, groups.number, CHUNK):
                key = load_maxima(groups, first + tl.arange(0, CHUNK))
                count += tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
            if count >= n:
                low = middle
                reaching = count
            else:
                high = middle
    return low


@triton.jit
def find_hot(low, groups, listed, CHUNK: tl.constexpr):
    """Lists the groups that hold a key from `low` on, in order; how many they are."""
    count = tl.zeros((), tl.int32)
    tl.debug_barrier()  # the list may be read yet
    for first in range(0, groups.number, CHUNK):
        group = first + tl.arange(0, CHUNK)
        is_hot = (load_maxima(groups, group) >= low.to(tl.int32)).to(tl.int32)
        tl.store(listed.hot + count + tl.cumsum(is_hot, 0) - 1, group, mask=is_hot > 0)
        count += tl.sum(is_hot, 0)
    tl.debug_barrier()
    return count


@triton.jit
def hot_groups(first, hot, groups, listed, AT_ONCE: tl.constexpr):
    """Some of the `hot` groups, and past them one that has no ids."""
    slot = first + tl.arange(0, AT_ONCE)
    return tl.load(listed.hot + slot, mask=slot < hot, other=groups.number)


@triton.jit
def places(inside):
    """The rank of each id inside, in index order, and how many there are."""
    count = tl.sum(inside.to(tl.int32), 1)
    before = tl.cumsum(count, 0) - count
    return before[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1, tl.sum(count, 0)


@triton.jit
def list_values(
    low,
    high,
    row,
    groups,
    noise,
    listed,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lists the values with keys from `low` on and below `high`, in index order; how many they are. Where that is more
    than CANDIDATES, the first of them, and a number that is too large as well.
    """
    hot = find_hot(low, groups, listed, CHUNK)
    count = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while (first < hot) & (count <= CANDIDATES):
        group = hot_groups(first, hot, groups, listed, AT_ONCE)
        key = ordered(load_values(row, group, noise, SIZE))
        inside = (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
        place, more = places(inside)
        place += count
        fits = inside & (place < CANDIDATES)
        tl.store(listed.key + place, key, mask=fits)
        tl.store(listed.id + place, group[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mask=fits)
        count += more
        first += AT_ONCE
    tl.debug_barrier()
    return count


@triton.jit
def load_listed(count, listed):
    """The keys that are listed, and past them one below all."""
    slot = tl.arange(0, CANDIDATES)
    return tl.load(listed.key + slot, mask=slot < count, other=LOWEST_KEY - 1)


@triton.jit
def select_listed(keys, amount, goal, low, high):
    """The largest c from `low` on and below `high` such that the amounts of keys >= c reach a goal, which is a key;
    `low` if none does. Bisection, each bound moved on to a key.
    """
    while high - low > 1:
        middle = ((low + high) // 2).to(tl.int32)
        reached = keys >= middle
        if tl.sum(tl.where(reached, amount, 0.0), 0) >= goal:
            low = tl.minimum(tl.min(tl.where(reached, keys, LAST_ID), 0).to(tl.int64), high - 1)
        else:
            high = tl.maximum(tl.max(tl.where(reached, LOWEST_KEY, keys), 0).to(tl.int64), low) + 1
    return low


@triton.jit
def select(
    between,
    wanted,
    share,
    total,
    row,
    groups,
    noise,
    listed,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest c in a range of keys such that `wanted` values, or if that is 0 a share of a total mass (negative: of
    the mass from the range's start on), have keys >= c; the range's start if none does. Where no value of the range
    differs from it, a key between c and the value below.

    Reads the row a few times, until few values of the range are left, then lists those.
    """
    low, high, count_high, mass_high = between.low, between.high, between.count_above, between.mass_above
    grain = grain_of(row, noise)
    hot = find_hot(low, groups, listed, CHUNK)
    part = tl.arange(0, PARTS)
    inside = tl.full((), LAST_ID, tl.int32)
    while (high - low > grain) & (inside > CANDIDATES):
        counts = tl.zeros((PARTS,), tl.int32)  # of what is in a part or higher
        masses = tl.zeros((PARTS,), tl.float32)
        for first in range(0, hot, AT_ONCE):
            x = load_values(row, hot_groups(first, hot, groups, listed, AT_ONCE), noise, SIZE)
            key = ordered(x)
            weight = tl.zeros_like(x)
            if noise.key0 is None:
                weight = weigh(x, row.law, -INFINITY, row.rows.kind)
            for i in range(PARTS):
                reached = key >= part_of(low, high, i).to(tl.int32)
                counts += tl.where(part == i, tl.sum(tl.sum(reached.to(tl.int32), 1), 0), 0)
                if noise.key0 is None:
                    masses += tl.where(part == i, tl.sum(tl.sum(tl.where(reached, weight, 0.0), 1), 0), 0.0)
        if total < 0.0:
            total = tl.sum(tl.where(part == 0, masses, 0.0), 0)
        reached = ((wanted > 0) & (counts >= wanted)) | ((wanted == 0) & (masses >= share * total))
        last = tl.max(tl.where(reached, part, 0), 0)
        start = part_of(low, high, last)
        if last + 1 < PARTS:
            high = part_of(low, high, last + 1)
            count_high = tl.sum(tl.where(part == last + 1, counts, 0), 0)
            mass_high = tl.sum(tl.where(part == last + 1, masses, 0.0), 0)
        low = start
        inside = tl.sum(tl.where(part == last, counts, 0), 0) - count_high
    if high - low > grain:
        count = list_values(low, high, row, groups, noise, listed, SIZE, AT_ONCE, CHUNK)
        keys = load_listed(count, listed)
        amount = tl.full((CANDIDATES,), 1.0, tl.float32)
        goal = (wanted - count_high).to(tl.float32)
        if noise.key0 is None:
            if wanted == 0:
                amount = weigh(from_ordered(keys), row.law, -INFINITY, row.rows.kind)
                goal = share * total - mass_high
        low = select_listed(keys, tl.where(keys < LOWEST_KEY, 0.0, amount), goal, low, high)
    return low
