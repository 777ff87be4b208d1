"""Random calls of public functions: what they promise of memory."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import specdec_kernels as sk

from .calls import Case


def fuzz_cu(case: Case) -> None:
    """Any `cu_num_draft_tokens`: a sequence is flagged exactly where it does not follow the one before."""
    batch, n, vocab, total = case.random.randint(1, 5), 3, 8, case.random.randrange(9)
    cu = case.integers(batch + 1, low=-1, high=total + 1).int()
    if case.chance(0.5):
        cu = cu.sort().values
        cu[0], cu[-1] = case.random.choice(((0, total), (0, int(cu[-1])), (int(cu[0]), total)))
    drafts = case.chance(0.5)
    given = {
        "target_logits": torch.randn(total + batch, vocab, generator=case.torch), "cu_num_draft_tokens": cu,
        "draft_tokens": torch.randint(0, vocab, (total,), generator=case.torch), "max_num_draft_tokens": n,
        "draft_logits": torch.randn(total, vocab, generator=case.torch) if drafts else None,
        "uniform_samples": torch.rand(total + batch, generator=case.torch),
    }  # fmt: skip
    case.say("verify_packed", **given)
    out, expected = sk.verify_packed(**given), sk.verify_packed(**given, backend="reference")
    starts, ends = cu[:-1].tolist(), cu[1:].tolist()
    bad = [
        not 0 <= a <= b <= total or b - a > n or (i == 0 and a != 0) or (i + 1 == batch and b != total)
        for i, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]
    assert ((out.status & sk.Status.BAD_PARAM) != 0).tolist() == bad, (out.status, bad)
    assert torch.equal(out.tokens, expected.tokens) and torch.equal(out.status, expected.status), (out, expected)


def fuzz_overlap(case: Case) -> None:
    """`gather_kv_` refuses a cache two of whose elements share a byte, and no other whose strides nest."""
    batch, rows, dim = 2, 4, case.random.choice((1, 2, 3))
    shape = (batch, rows, dim)
    room = torch.zeros(120, dtype=case.random.choice((torch.float32, torch.int16)))
    cache = []
    for _ in range(case.random.choice((1, 2, 2, 3))):
        forms = ((rows * dim, dim, 1), (rows * dim, 1, rows), (dim, batch * dim, 1), (2 * rows * dim, 2 * dim, 1),
                 (1, 2, 8), [case.random.randrange(12) for _ in shape])  # fmt: skip
        strides = case.random.choice(forms)
        span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        cache.append(room.as_strided(shape, tuple(strides), case.random.randint(0, room.numel() - span)))
    case.say("gather_kv_", cache=cache)
    places = [t.data_ptr() // room.element_size() + sum(i * s for i, s in zip(at, t.stride(), strict=True))
              for t in cache for at in itertools.product(*map(range, shape))]  # fmt: skip
    nodes, lengths = torch.tensor([[1, 2], [2, -1]]), torch.tensor([0, 1])
    try:
        sk.gather_kv_(cache, nodes, lengths, "bsd")
        refused = False
    except ValueError as error:
        refused = "gather_kv_: cache" in str(error)
        assert refused, error
    overlaps = len(set(places)) < len(places)
    assert refused or not overlaps
    assert overlaps or not refused or not all(map(_nested, cache))


def _nested(x: Tensor) -> bool:
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if stride < span and size > 1:
            return False
        span += stride * (size - 1)
    return True
