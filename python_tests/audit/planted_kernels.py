"""vLLM's V2 signature by Triton kernels that make their own random numbers, right ones and ones with a defect each."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from python_tests.audit import planted

COIN, RACE, DRAFT = 0, 1 << 20, 1 << 24
"""Where the offsets of each purpose's numbers begin."""
BLOCK = 8


@triton.jit
def _race(weights, ids, seed, offset):
    """The id that ``weights / times of arrival`` has its maximum at."""
    u = tl.rand(seed, offset=offset + ids)
    times = tl.where(u < 0.05, u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4))), -tl.log(1 - u))
    return tl.argmax(weights / times, 0)


@triton.jit
def _draft_kernel(out, q, seeds, places, vocab, SALT: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    weights = tl.load(q + b * vocab + ids, mask=ids < vocab, other=0.0)
    tl.store(out + b, _race(weights, ids, tl.load(seeds + b), SALT + tl.load(places + b) * BLOCK))


@triton.jit
def _verify_kernel(
    out, p, q, x, lengths, seeds, places, vocab, k, ALWAYS: tl.constexpr, OR_EQUAL: tl.constexpr,
    BLOCKS: tl.constexpr, COIN: tl.constexpr, RACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    mask = ids < vocab
    seed, length = tl.load(seeds + b), tl.load(lengths + b)
    count, going, weight, kept = 0, True, 1.0, 1.0
    for i in range(length):
        token = tl.load(x + b * k + i)
        own = tl.load(p + (b * (k + 1) + i) * vocab + token)
        told = tl.load(q + (b * k + i) * vocab + token)
        u = tl.rand(seed, COIN + tl.load(places + b * (k + 1) + i))
        if BLOCKS:
            weight = tl.minimum(weight * own / told, 1.0)
            threshold = weight
            if i < length - 1:
                target = tl.load(p + (b * (k + 1) + i + 1) * vocab + ids, mask=mask, other=0.0)
                draft = tl.load(q + (b * k + i + 1) * vocab + ids, mask=mask, other=0.0)
                left = tl.sum(tl.maximum(weight * target - draft, 0.0), 0)
                threshold = tl.where(left + 1 - weight > 0, left / (left + 1 - weight), 1.0)
            if u < threshold:
                count = i + 1
                kept = weight
        else:
            going = going and (ALWAYS or (u * told <= own if OR_EQUAL else u * told < own))
            if going:
                count = i + 1
    weights = tl.load(p + (b * (k + 1) + count) * vocab + ids, mask=mask, other=0.0)
    if count < length:
        draft = tl.load(q + (b * k + count) * vocab + ids, mask=mask, other=0.0)
        weights = tl.maximum(kept * weights - draft, 0.0)
    last = _race(weights, ids, seed, RACE + tl.load(places + b * (k + 1) + count) * BLOCK)
    for i in range(count):
        tl.store(out + b * (k + 1) + i, tl.load(x + b * k + i))
    tl.store(out + b * (k + 1) + count, last)


def vllm_v2_of(
    *, test: str = "<", block: bool = False, shared: bool = False, per_step: bool = False
) -> SimpleNamespace:
    """``rejection_sample`` and ``gumbel_sample``.

    `test`: "<", "<=" or "always". `shared`: drafts are raced with the numbers of the last token's race. `per_step`: a
    position's numbers depend on its block's first position too.
    """
    first_of_block: dict[str, int] = {}

    def places(positions: Tensor, first: Tensor | int) -> Tensor:
        return positions * 64 + first if per_step else positions

    def rejection_sample(*arguments: Tensor | int) -> tuple[Tensor, Tensor]:
        first_of_block.clear()
        p, q, x, lengths, start = planted.rows_of_v2(*arguments)  # type: ignore[arg-type]
        batch, width, vocab = p.shape
        out = torch.full((batch, width), -1)
        _verify_kernel[(batch,)](
            out, p.float(), q.float(), x.contiguous(), lengths, arguments[9],
            places(start[:, None] + torch.arange(width), start[:, None]), vocab, width - 1, test == "always",
            test == "<=", block, COIN, RACE, BLOCK,
        )  # fmt: skip
        return out, (out >= 0).sum(1).int()

    def gumbel_sample(
        logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, seed: Tensor, pos: Tensor,
        apply_temperature: bool, is_drafting: bool,
    ) -> Tensor:  # fmt: skip
        first = first_of_block.setdefault("first", int(pos[0]) + 1)
        out = torch.empty(len(logits), dtype=torch.int64)
        _draft_kernel[(len(logits),)](
            out, logits.float().softmax(-1), seed, places(pos + 1, first), logits.shape[-1],
            RACE if shared else DRAFT, BLOCK,
        )  # fmt: skip
        return out

    return SimpleNamespace(rejection_sample=rejection_sample, gumbel_sample=gumbel_sample)
