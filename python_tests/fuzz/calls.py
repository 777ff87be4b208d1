"""Random calls of the ops below the public API: good ones, changed in ways that no validation has seen.

A call either raises an exception of Python or gives results in their ranges; that it touches no memory but its own,
the sanitizers see. `GOOD` has a function for each op: of a case, right arguments.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.backends import OPS, direct
from specdec_kernels.flat import LOSSLESS
from specdec_kernels.ops.arguments import ACCEPTANCES, CACHE_DIMS, TREE_ACCEPTANCES
from specdec_kernels.testing import LAW_EXAMPLES

INTEGERS = (-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 3, 7, 1024, 1025, 2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 0.0, 0.5, 1e-45, 1e-30, 1.5, 3.0, 1e30, 1e300, 2.0**53)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip


class Case:
    """What is random in one case, and what it does, in words.

    Attributes
    ----------
    random : random.Random
    torch : torch.Generator
    tell : callable
        Is told each call in words, before it is made: what crashes or hangs leaves no other trace.
    """

    def __init__(self, seed: int, tell: Callable[[str], Any]) -> None:
        self.tell = tell
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed & 0xFFFFFFFF)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """Of [low, high]; now and then some that are far outside."""
        made = torch.randint(low, max(low, high) + 1, shape, generator=self.torch)
        return self.spoilt(made, INTEGERS) if self.chance(0.1) else made

    def floats(self, *shape: int, spread: float = 3.0) -> Tensor:
        made = torch.randn(shape, generator=self.torch) * spread
        return self.spoilt(made, FLOATS) if self.chance(0.2) else made

    def uniforms(self, *shape: int) -> Tensor:
        made = torch.rand(shape, generator=self.torch)
        return self.spoilt(made, FLOATS) if self.chance(0.1) else made

    def spoilt(self, x: Tensor, values: tuple[Any, ...]) -> Tensor:
        """`x` with values of the table here and there."""
        flat = x.reshape(-1)
        for _ in range(min(3, flat.numel())):
            if self.chance(0.2):
                flat[:] = _fits(self.random.choice(values), x.dtype)
            else:
                flat[self.random.randrange(flat.numel())] = _fits(self.random.choice(values), x.dtype)
        return flat.view(x.shape)

    def say(self, what: str, **arguments: Any) -> None:
        """Tell of a call that comes now, a line for each argument."""
        self.tell("\n".join([what, *(f"    {name} = {describe(value)}" for name, value in arguments.items()), ""]))

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values at other strides: dimensions in any order, with gaps, somewhere within their storage."""
        if x.numel() > 1 << 22:
            return x
        order = self.random.sample(range(x.dim()), x.dim())
        steps, starts = [self.random.choice((1, 1, 2)) for _ in order], [self.random.choice((0, 0, 1)) for _ in order]
        sizes = [start + size * step for start, size, step in zip(starts, x.shape, steps, strict=True)]
        room = x.new_zeros([sizes[at] for at in order]).permute([order.index(at) for at in range(x.dim())])
        for at, (start, size, step) in enumerate(zip(starts, x.shape, steps, strict=True)):
            room = room.narrow(at, start, size * step).unflatten(at, (size, step)).select(at + 1, 0)
        return room.copy_(x)


def _fits(value: Any, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        most = torch.finfo(dtype).max
        return min(max(value, -most), most) if math.isfinite(value) else value
    return 1 if dtype == torch.bool else min(max(int(value), torch.iinfo(dtype).min), torch.iinfo(dtype).max)


def describe(value: Any) -> str:
    """A tensor's layout and its first values, a list item by item."""
    if isinstance(value, list):
        return f"[{', '.join(map(describe, value))}]"
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return repr(value)
    text = f"{str(value.dtype)[6:]}{list(value.shape)} strides {list(value.stride())} on {value.device}"
    if value.device.type == "cpu" and value.numel() <= 24 and not value.is_neg() and value.data_ptr():
        text += f" {value.tolist()}"
    return text


# ---------------------------------------------------------------- good calls


def _sizes(case: Case) -> tuple[int, int, int]:
    """batch, n, vocab."""
    pick = case.random.choice
    if case.chance(0.001):  # more tiles than one node of the tree of their sums has
        return pick((1, 2)), pick((0, 1)), 270_000
    return pick((0, 1, 1, 2, 3, 5)), pick((0, 1, 2, 3, 4)), pick((1, 2, 3, 7, 17, 40, 40, 1023, 1025, 2500))


def _logits(case: Case, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows, their strides those of a contiguous tensor, any, or 0."""
    rows = case.floats(*shape).to(dtype)
    form = case.random.randrange(4)
    if form == 0 and shape[0] > 1:
        return rows[:1].expand(shape)
    return case.laid_out(rows) if form == 1 else rows


def _probs(case: Case, *shape: int) -> Tensor:
    rows = case.floats(*shape).softmax(-1)
    return case.spoilt(rows, FLOATS) if case.chance(0.1) else rows


def _params(case: Case, batch: int) -> sk.SamplingParams:
    pick = case.random.choice
    numbers: dict[str, Any] = {
        "temperature": pick((0.0, 0.7, 1.0, 1.0)), "top_k": pick((0, 0, 1, 5, 10**6)),
        "top_p": pick((0.5, 0.9, 1.0, 1.0)), "min_p": pick((0.0, 0.0, 0.1)),
    }  # fmt: skip
    for name in numbers:
        if case.chance(0.15):
            numbers[name] = case.integers(batch, low=0, high=9) if name == "top_k" else case.uniforms(batch)
    return sk.SamplingParams(**numbers, min_p_first=case.chance(0.3))


def _processors(case: Case, batch: int, rows: tuple[int, ...], vocab: int) -> list[Tensor | None] | None:
    """As ops take them, in order or not."""
    if case.chance(0.6):
        return None
    lists, words = case.random.choice((1, batch)), (vocab + 31) // 32
    biased, counted = case.random.randrange(9), case.random.randrange(9)
    barred, masked, allowed = (case.chance(0.5) for _ in range(3))

    def ids(width: int) -> Tensor:
        made = case.integers(lists, width, low=-1, high=vocab + 1).int()
        return made.sort(-1).values if case.chance(0.8) else made

    given: list[Tensor | None] = [None] * 9
    given[0] = case.integers(*rows, words, low=-(2**31), high=2**31 - 1).int() if masked else None
    given[1] = case.integers(lists, words, low=-(2**31), high=2**31 - 1).int() if allowed else None
    if biased:
        given[2:4] = ids(biased), case.floats(lists, biased)
        if barred:
            given[4], given[8] = (
                case.integers(lists, biased, low=0, high=9).int(),
                case.integers(lists, low=0, high=9).int(),
            )
    if counted:
        given[5:8] = case.floats(lists, 3), ids(counted), case.integers(lists, counted, low=0, high=9).int()
    return given


def _dtype(case: Case) -> torch.dtype:
    return case.random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))


def _row_stats(case: Case) -> dict[str, Any]:
    batch, n, vocab = _sizes(case)
    return {
        "logits": _logits(case, batch, n, vocab, dtype=_dtype(case)), "params": _params(case, batch),
        "processors": _processors(case, batch, (batch, n), vocab),
    }  # fmt: skip


def _mask_logits_(case: Case) -> dict[str, Any]:
    given = _row_stats(case)
    del given["processors"]
    return given


def _uniform_samples(case: Case) -> dict[str, Any]:
    batch, n, _ = _sizes(case)
    return {
        "seeds": case.integers(batch, low=-9, high=9), "num": n, "step": case.random.choice(INTEGERS),
        "steps": case.integers(batch, low=0, high=9) if case.chance(0.5) else None, "purpose": case.random.randrange(4),
    }  # fmt: skip


def _noise_keys(case: Case) -> dict[str, Any]:
    given = _uniform_samples(case)
    positions = case.integers(len(given["seeds"]), given.pop("num"), low=0, high=99)
    return given | {"positions": positions.int() if case.chance(0.5) else positions}


def _sample(case: Case) -> dict[str, Any]:
    batch, n, vocab = _sizes(case)
    lead = (batch,) if case.chance(0.5) else (batch, n)
    several = case.chance(0.4)
    noise = "noise_keys" if several or case.chance(0.5) else "uniform_samples"
    values = case.integers(*lead, low=-99, high=99) if noise == "noise_keys" else case.uniforms(*lead)
    probs, index, rows = case.chance(0.2), None, lead
    if case.chance(0.3):
        rows = (case.random.randrange(6), *lead[1:])
        index = case.integers(batch, low=-1 if case.chance(0.3) else 0, high=rows[0])
        index = index.int() if case.chance(0.5) else index
    return {
        "logits": _probs(case, *rows, vocab) if probs else _logits(case, *rows, vocab, dtype=_dtype(case)),
        "probs": probs, "row_index": index, "params": _params(case, batch),
        "uniform_samples": None, "noise_keys": None, noise: values,
        "draft_to_target": case.integers(vocab, low=0, high=vocab) if case.chance(0.3) else None,
        "num_samples": case.random.choice((2, 5, 70, 1024)) if several else 1,
        "processors": _processors(case, batch, lead, vocab),
    }  # fmt: skip


def _shard_stats(case: Case) -> dict[str, Any]:
    probs = case.chance(0.3)
    given = _row_stats(case)
    del given["processors"]
    if probs:
        given["logits"] = _probs(case, *given["logits"].shape)
    return given | {"probs": probs}


def _merge_shards(case: Case) -> dict[str, Any]:
    batch, n, _ = _sizes(case)
    tiles = case.random.choice((1, 2, 3, 255, 256, 257, 600))
    return {
        "tile_max": case.floats(batch, n, tiles), "tile_mass": case.floats(batch, n, tiles),
        "logits_at": case.floats(batch, n), "params": _params(case, batch), "probs": case.chance(0.3),
    }  # fmt: skip


def _shard_draw(case: Case) -> dict[str, Any]:
    batch, n, width = _sizes(case)
    first, rows = 1024 * case.random.choice((0, 0, 1, 3)), (batch, n)
    given: dict[str, Any] = dict.fromkeys(
        ("draft_logits", "draft_probs", "draft_values", "draft_argmax", "draft_status", "point_tokens", "masses",
         "uniform_samples", "noise_keys")
    )  # fmt: skip
    kind, mode = case.random.choice(("none", "logits", "probs", "points")), case.random.randrange(3)
    if kind in ("logits", "probs"):
        given["draft_status"] = case.integers(*rows, low=0, high=127).int()
        make = _logits if kind == "logits" else _probs
        given[f"draft_{kind}"] = make(case, *rows, width)
    if kind == "logits":
        given["draft_values"], given["draft_argmax"] = case.floats(*rows, 6), case.integers(*rows, low=-1, high=6000)
    if kind == "points":
        given["point_tokens"] = case.integers(*rows, low=-1, high=6000)
    if mode == 1:
        tiles = (first + width + 1023) // 1024 + case.random.choice((0, 1, 300))
        given["masses"], given["uniform_samples"] = case.floats(*rows, tiles), case.uniforms(*rows)
    if mode == 2:
        given["noise_keys"] = case.integers(*rows, low=-99, high=99)
    return given | {
        "logits": _logits(case, *rows, width, dtype=_dtype(case)), "values": case.floats(*rows, 6),
        "argmax": case.integers(*rows, low=-1, high=6000), "weights": case.floats(*rows), "first": first,
        "params": _params(case, batch), "draft_params": _params(case, batch),
    }  # fmt: skip


def _token_logprobs(case: Case) -> dict[str, Any]:
    given = _row_stats(case)
    (batch, n, vocab), width = given["logits"].shape, case.random.randrange(4)
    return given | {
        "tokens": case.integers(batch, width, low=-1, high=vocab - 1), "num_top": case.random.choice((0, 1, 5, 20)),
        "rows": case.integers(batch, width, low=0, high=n - 1) if case.chance(0.7) else None,
        "num_tokens": case.integers(batch, low=-1, high=width) if case.chance(0.4) else None,
    }  # fmt: skip


def _verify(
    case: Case, batch: int, drafted: tuple[int, ...], scored: tuple[int, ...], vocab: int,
    numbers: tuple[int, ...] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What chains and trees share; `drafted` and `scored` are the leading sizes of their rows, and `numbers` those of
    random numbers, where there are more.
    """
    given: dict[str, Any] = dict.fromkeys(
        ("draft_logits", "draft_probs", "draft_values", "draft_argmax", "draft_status", "target_to_draft",
         "uniform_samples", "noise_keys", "seeds", "steps", "positions", "eos_token_ids")
    )  # fmt: skip
    numbers = numbers or scored
    dtype, law = _dtype(case), case.random.choice((LOSSLESS, *(law.flat() for law in LAW_EXAMPLES)))
    if law.cascade_bonus:
        drafted = numbers
    width = case.random.randint(1, vocab) if case.chance(0.3) else vocab
    if width < vocab or case.chance(0.2):
        given["target_to_draft"] = case.integers(vocab, low=-1, high=width - 1)
    kind = case.random.choice(("none", "logits", "logits", "probs", "stats"))
    if kind in ("logits", "stats"):
        given["draft_logits"] = _logits(case, *drafted, width, dtype=dtype)
    if kind == "probs":
        given["draft_probs"] = _probs(case, *drafted, width)
    if kind == "stats":
        given["draft_values"] = case.floats(*drafted, 6)
        given["draft_argmax"] = case.integers(*drafted, low=0, high=width - 1)
        given["draft_status"] = case.integers(*drafted, low=0, high=3).int()
    noise = case.random.choice(("uniform_samples", "uniform_samples", "noise_keys", "seeds", "positions", "none"))
    if noise == "uniform_samples":
        given[noise] = case.uniforms(*numbers)
    elif noise == "noise_keys":
        given[noise] = case.integers(*numbers, low=-99, high=99)
    elif noise != "none":
        given["seeds"] = case.integers(batch, low=-9, high=9)
        given["positions"] = case.integers(*numbers, low=0, high=99) if noise == "positions" else None
        given["steps"] = case.integers(batch, low=0, high=9) if case.chance(0.5) else None
    if case.chance(0.3):
        given["eos_token_ids"] = case.integers(case.random.randrange(4), low=0, high=vocab)
    probs = case.chance(0.2)
    return given | {
        "target_logits": _probs(case, *scored, vocab) if probs else _logits(case, *scored, vocab, dtype=dtype),
        "target_probs": probs, "law": law, "step": case.random.choice(INTEGERS),
        "params": _params(case, batch), "draft_params": _params(case, batch),
        "processors": _processors(case, batch, scored, vocab),
    }  # fmt: skip


def _verify_chain(case: Case) -> dict[str, Any]:
    batch, n, vocab = _sizes(case)
    given: dict[str, Any] = {"num_draft": n, "cu_num_draft_tokens": None, "num_draft_tokens": None}
    drafted, scored = (batch, n), (batch, n + 1)
    if case.chance(0.4):
        counts = case.random.choices(range(n + 1), k=batch)
        total = sum(counts)
        given["cu_num_draft_tokens"] = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        if case.chance(0.4):
            given["cu_num_draft_tokens"] = case.integers(batch + 1, low=-1, high=total + 1).int()
        drafted, scored = (total,), (total + batch,)
    if case.chance(0.3):
        given["num_draft_tokens"] = case.integers(batch, low=-1, high=n)
    tokens = case.integers(*drafted, low=-1 if case.chance(0.3) else 0, high=vocab - 1)
    given["bonus_tokens"] = case.integers(batch, low=-2, high=vocab) if case.chance(0.3) else None
    target_rows = scored if given["bonus_tokens"] is None else drafted
    shared = _verify(case, batch, drafted, target_rows, vocab, scored)
    given["draft_index"] = None
    if shared["draft_values"] is None and case.chance(0.3):
        requests = case.random.randint(1, 6)
        for name in ("draft_logits", "draft_probs"):
            if shared[name] is not None:
                rows = (requests, n + 1 + case.random.randrange(3), shared[name].shape[-1])
                shared[name] = _probs(case, *rows) if name == "draft_probs" else _logits(case, *rows)
                given["draft_index"] = case.integers(batch, low=-1 if case.chance(0.2) else 0, high=requests - 1)
    return given | shared | {
        "draft_tokens": tokens.int() if case.chance(0.3) else tokens,
        "acceptance": case.random.randrange(len(ACCEPTANCES)),
        "return_acceptance": case.chance(0.3),
    }  # fmt: skip


def _verify_tree(case: Case) -> dict[str, Any]:
    batch, n, vocab = _sizes(case)
    nodes = 1 + case.random.choice((n, n, 9, 30))
    parents = torch.tensor([[-1, *(case.random.randrange(i) for i in range(1, nodes))] for _ in range(batch or 1)])
    tree = sk.DraftTree.from_parents(parents if case.chance(0.4) and batch else parents[0], 64)
    links, status = tree.links, tree.status
    if case.chance(0.3):
        links = case.integers(*links.shape, low=-1, high=nodes)
    return _verify(case, batch, (batch, nodes), (batch, nodes), vocab) | {
        "node_tokens": case.integers(batch, nodes, low=0, high=vocab - 1), "links": links, "tree_status": status,
        "max_depth": case.random.choice((0, 1, 5, 64)), "acceptance": case.random.randrange(len(TREE_ACCEPTANCES)),
        "epsilon": case.random.random(), "delta": case.random.choice(FLOATS),
    }  # fmt: skip


def _gather_kv_(case: Case) -> dict[str, Any]:
    batch, depth, _ = _sizes(case)
    rows, paged = case.random.choice((1, 5, 16)), case.chance(0.4)
    names = ["block", "row", *case.random.choice(((), ("head",), ("element",), ("head", "element"), ("further",)))]
    sizes = {
        "block": 6 if paged else batch, "row": rows, "head": case.random.randint(0, 3), "further": 2,
        "element": case.random.choice((1, 3, 8)), "batch_and_head": 2 * batch,
    }  # fmt: skip
    if not paged and "head" not in names and case.chance(0.3):
        names[0] = "batch_and_head"
    case.random.shuffle(names)
    shape = [sizes[name] for name in names]
    dtype = case.random.choice(DTYPES)
    cache = [torch.zeros(shape, dtype=dtype) for _ in range(case.random.choice((0, 1, 2, 4)))]
    nodes = torch.cumsum(case.integers(batch, depth, low=1, high=3), 1)
    table = case.integers(batch, case.random.randrange(4), low=0, high=5) if paged else None
    lengths = case.integers(batch, low=-1, high=3 * rows if paged else rows)
    layout = [CACHE_DIMS[name] for name in names]
    return {
        "cache": cache, "key_layout": layout, "value_layout": list(layout), "accepted_nodes": nodes,
        "context_lengths": lengths.int() if case.chance(0.5) else lengths, "block_table": table,
    }  # fmt: skip


def _count_tokens_(case: Case) -> dict[str, Any]:
    batch, n, vocab = _sizes(case)
    prompt = case.integers(batch, case.random.choice((0, 1, 1100)), low=-1, high=vocab)
    lists = vars(sk.TokenCounts(prompt, case.random.choice((0, 5))))
    num_tokens = case.integers(batch, low=-1, high=n + 1) if case.chance(0.5) else None
    given = {"tokens": case.integers(batch, n, low=-1, high=vocab), "num_tokens": num_tokens}
    return given | {name: lists[name] for name in ("ids", "counts", "num_output")}


GOOD: dict[str, Callable[[Case], dict[str, Any]]] = {
    "row_stats": _row_stats, "warp_probs": _row_stats, "mask_logits_": _mask_logits_,
    "uniform_samples": _uniform_samples, "noise_keys": _noise_keys,
    "sample": _sample, "token_logprobs": _token_logprobs, "count_tokens_": _count_tokens_,
    "shard_stats": _shard_stats, "merge_shards": _merge_shards, "shard_draw": _shard_draw,
    "verify_chain": _verify_chain, "verify_tree": _verify_tree, "gather_kv_": _gather_kv_,
}  # fmt: skip

# ---------------------------------------------------------------- worse ones


def _misaligned(x: Tensor) -> Tensor:
    """The same values one byte further in memory than their dtype allows."""
    if x.numel() > 1 << 20:
        raise ValueError("too many to copy")
    if x.dtype is torch.complex128:
        raise ValueError("torch's own copies of it crash")
    room = np.zeros(x.numel() * x.element_size() + 1, np.uint8)
    if x.numel() == 0:
        return x
    moved = torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=1).view(x.shape)
    return moved.copy_(x)


def _without_memory(x: Tensor) -> Tensor:
    """A tensor of its shape whose storage was given back, as sharded training does."""
    made = x.clone()
    made.untyped_storage().resize_(0)
    return made


def _overlapping(case: Case, x: Tensor) -> Tensor:
    """Other strides over the same memory, from 0 up."""
    room, strides = x.contiguous().reshape(-1), []
    left = max(0, room.numel() - 1)
    for size in x.shape:
        strides.append(case.random.randint(0, left // (size - 1)) if size > 1 else case.random.randrange(3))
        left -= strides[-1] * (size - 1)
    return room.as_strided(x.shape, strides)


def _one_longer(case: Case, x: Tensor) -> Tensor:
    at = case.random.randrange(x.dim())
    return torch.cat([x, x.narrow(at, 0, min(1, x.shape[at]))], at)


def _huge(case: Case, x: Tensor) -> Tensor:
    """Expanded beyond what memory could hold."""
    sizes = [case.random.choice((s, 2**34, 2**33, 2**40, 2**62)) if s == 1 else s for s in x.shape]
    return x.expand(*(case.random.choice(((), (2**34,), (2**40,), (0, 2**62)))), *sizes)


WORSE_TENSORS: tuple[Callable[[Case, Tensor], Any], ...] = (
    lambda case, x: x.to(case.random.choice(DTYPES)),
    lambda case, x: x.to("meta"),
    lambda case, x: x.narrow(case.random.randrange(x.dim()), 0, 0),
    lambda case, x: x[:-1],
    lambda case, x: x[..., :-1],
    _one_longer,
    lambda case, x: x.unsqueeze(case.random.randint(-1, x.dim())),
    lambda case, x: x.flatten(),
    lambda case, x: x.transpose(0, -1),
    lambda case, x: case.laid_out(x),
    lambda case, x: case.laid_out(x),
    _overlapping,
    lambda case, x: _misaligned(x),
    lambda case, x: case.spoilt(x.clone(), INTEGERS if not x.is_floating_point() else FLOATS),
    lambda case, x: None,
    lambda case, x: x.to_sparse(),
    lambda case, x: torch._neg_view(x),
    lambda case, x: x.clone().requires_grad_(),
    lambda case, x: torch.nn.Parameter(x, requires_grad=False),
    lambda case, x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    _huge,
    lambda case, x: x.new_zeros(()),
    lambda case, x: torch.zeros([case.random.choice((0, 1, 2, 3)) for _ in range(case.random.randrange(5))]).to(x),
)  # fmt: skip


def _worse_list(case: Case, given: list[Any]) -> list[Any]:
    made = list(given)
    at = case.random.randrange(len(made) or 1)
    form = case.random.randrange(5)
    if form == 0 or not made:
        return [*made, *case.random.choice(([0.0], [1], [None], made))]
    if form == 1:
        return made[:at]
    if form == 2:
        return []
    made[at] = _worse(case, made[at], given)
    return made


def _worse(case: Case, value: Any, others: list[Any]) -> Any:
    """`value` changed, or another argument in its place."""
    if case.chance(0.05):
        return case.random.choice([*others, None, "x", 1.5, [None]])
    if isinstance(value, Tensor):
        # Of what is huge already, nothing is made element by element.
        return value if value.numel() > 1 << 20 else case.random.choice(WORSE_TENSORS)(case, value)
    if isinstance(value, list):
        return _worse_list(case, value)
    if isinstance(value, float):
        return case.random.choice((*FLOATS, *map(float, INTEGERS)))
    return case.random.choice((*INTEGERS, 2**64)) if isinstance(value, int) else case.random.choice(others)


def _in_range(op: str, given: dict[str, Any], out: tuple[Any, ...]) -> None:
    """What no argument whatever may make of an op's results."""
    out = tuple(t for t in out if t is not None)  # past the dispatcher: one that was not asked for
    if any(t.device.type != "cpu" for t in out):
        return
    if op == "uniform_samples":
        assert bool(((out[0] >= 0) & (out[0] < 1)).all()), out
    if op == "sample" and given["draft_to_target"] is None:
        assert bool(((out[0] >= -1) & (out[0] < given["logits"].shape[-1])).all()), out[0]
    if op in ("verify_chain", "verify_tree"):
        tokens, accepted, emitted = out[:3]
        width, vocab = tokens.shape[1], given["target_logits"].shape[-1]
        assert bool(((accepted >= 0) & (accepted < width) & (emitted >= accepted) & (emitted <= accepted + 1)).all())
        assert bool(((tokens >= -1) & (tokens < vocab)).all()), tokens
        assert torch.equal((tokens >= 0).sum(1), emitted), (tokens, emitted)


def fuzz_op(case: Case, op: str) -> None:
    """One call of `op`, by the dispatcher or past it."""
    definition = OPS[op]
    names = [argument.name for argument in getattr(torch.ops.specdec, op).default._schema.arguments]
    given = dict(zip(names, definition.pack(**GOOD[op](case)), strict=True))
    good, held = list(given.values()), [name for name in names if isinstance(given[name], Tensor)]
    if case.chance(0.02) and held:  # by itself: torch's own functions crash on such a tensor
        name = case.random.choice(held)
        given[name] = _without_memory(given[name])
        held = []
    for _ in range(case.random.choice((0, 0, 1, 1, 1, 2, 3)) if held else 0):
        name = case.random.choice(names)
        try:
            given[name] = _worse(case, given[name], good)
        except (RuntimeError, IndexError, TypeError, ValueError):  # no such change of this tensor
            continue
    for name in ("per_sequence", "processors", "settings", "cache"):  # torch makes a list of a tensor there
        if isinstance(given.get(name), Tensor) and (not given[name].dim() or given[name].shape[0] > 1 << 20):
            given[name] = []
    overload = getattr(torch.ops.specdec, op).default
    past = case.chance(0.6)
    case.say(f"torch.ops.specdec.{op}{' past the dispatcher' if past else ''}", **given)
    try:
        out = (direct.call(op, overload) if past else overload)(*given.values())
    except Exception:
        return
    _in_range(op, given, out if isinstance(out, tuple) else (out,))
