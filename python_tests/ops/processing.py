"""What processors make of logits, written anew: one id after the other, in float64, from lists of plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops.inputs import logits, same_bits, uniforms
from python_tests.support import Backend
from specdec_kernels.flat import FlatProcessors
from specdec_kernels.testing import Float64
from specdec_kernels.types import NO_ID

Context = Sequence[int]
"""The draft tokens before a row."""


def grammar(context: Context, vocab: int) -> list[bool]:
    """Which ids may follow: never all of them, always one, and others after each token and at each depth."""
    state = 2 * len(context) + (context[-1] if len(context) else 0)
    return [vocab == 2 or (v + state) % 3 != 0 if v != state % vocab else True for v in range(vocab)]


@dataclass
class Request:
    """Of one sequence what `sk.Processors` takes, and its history."""

    logit_bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    allowed: list[int] | None = None
    stop: list[int] = field(default_factory=list)
    min_tokens: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    grammar: Callable[[Context, int], list[bool]] | None = None

    def logit(self, x: float, v: int, context: Context, vocab: int) -> float:
        output = [*self.output, *context]
        if self.grammar is not None and not self.grammar(context, vocab)[v]:
            return -math.inf
        if self.allowed is not None and v not in self.allowed:
            return -math.inf
        x += self.logit_bias.get(v, 0.0)
        if v in self.banned or (v in self.stop and len(output) < self.min_tokens):
            return -math.inf
        if v in self.prompt or v in output:
            x = x / self.repetition if x > 0 else x * self.repetition
        return x - self.frequency * output.count(v) - (self.presence if v in output else 0.0)

    def row(self, logits: Tensor, context: Context) -> Float64:
        """``[vocab]`` float64."""
        return np.array([self.logit(x, v, context, len(logits)) for v, x in enumerate(logits.double().tolist())])

    def table(self, logits: Tensor) -> Tensor:
        """Logits of the token after each path ``[vocab] * d + [vocab]``, in float64."""
        out = torch.empty(logits.shape, dtype=torch.float64)
        for context in np.ndindex(logits.shape[:-1]):
            out[context] = torch.from_numpy(self.row(logits[context], context))
        return out

    def counts(self, room: int = 8) -> sk.TokenCounts:
        counts = sk.TokenCounts(torch.tensor([self.prompt], dtype=torch.int64).view(1, -1), room)
        for token in self.output:
            add_plainly(counts, 0, token)
        return counts


def add_plainly(counts: sk.TokenCounts, sequence: int, token: int) -> None:
    """One token of the output, counted by Python."""
    ids, numbers = counts.ids[sequence].tolist(), counts.counts[sequence].tolist()
    known = {i: n for i, n in zip(ids, numbers, strict=True) if i != 2**31 - 1}
    known[token] = known.get(token, 0) + 2
    for slot, one in enumerate(sorted(known)):
        counts.ids[sequence, slot], counts.counts[sequence, slot] = one, known[one]
    counts.num_output[sequence] += 1


def bits(rows: Sequence[Sequence[bool]]) -> Tensor:
    """``[n, ceil(vocab / 32)]`` int32."""
    vocab = len(rows[0])
    out = np.zeros((len(rows), 4 * ((vocab + 31) // 32)), np.uint8)
    packed = np.packbits(np.array(rows, bool), axis=-1, bitorder="little")
    out[:, : packed.shape[1]] = packed
    return torch.from_numpy(out.view("<i4").astype(np.int32))


def processors(requests: Sequence[Request], bitmask: Tensor | None = None, device: str = "cpu") -> sk.Processors:
    """Of a batch; one request alone is for all sequences."""
    many, one = len(requests) > 1, requests[0]

    def column(name: str) -> Any:
        values = [float(getattr(request, name)) for request in requests]
        return torch.tensor(values, device=device) if many else values[0]

    counts = [request.counts(40 - len(request.prompt)) for request in requests]
    merged = counts[0]
    for name in ("ids", "counts", "num_output"):
        setattr(merged, name, torch.cat([getattr(each, name) for each in counts]).to(device))
    return sk.Processors(
        logit_bias=[r.logit_bias for r in requests] if many else one.logit_bias,
        banned_ids=[r.banned for r in requests] if many else one.banned,
        allowed_ids=[r.allowed for r in requests] if many else one.allowed,
        stop_token_ids=[r.stop for r in requests] if many else one.stop,
        min_tokens=torch.tensor([r.min_tokens for r in requests], device=device) if many else one.min_tokens,
        token_bitmask=None if bitmask is None else bitmask.to(device),
        repetition_penalty=column("repetition"), frequency_penalty=column("frequency"),
        presence_penalty=column("presence"), token_counts=merged,
    )  # fmt: skip


HISTORY = Request(prompt=[0, 2], output=[1, 1])
EACH: dict[str, Request] = {
    "logit_bias": replace(HISTORY, logit_bias={0: 1.3, 2: -0.7}),
    "banned_ids": replace(HISTORY, banned=[1]),
    "allowed_ids": replace(HISTORY, allowed=[0, 1, 2]),
    "min_tokens": replace(HISTORY, stop=[1], min_tokens=4),
    "token_bitmask": replace(HISTORY, grammar=grammar),
    "repetition_penalty": replace(HISTORY, repetition=1.6),
    "frequency_penalty": replace(HISTORY, frequency=0.45),
    "presence_penalty": replace(HISTORY, presence=0.8),
    "all": replace(
        HISTORY, logit_bias={0: 1.3, 2: -0.7}, allowed=[0, 1, 2], stop=[1], min_tokens=4, repetition=1.6,
        frequency=0.45, presence=0.8, grammar=grammar,
    ),
}  # fmt: skip
"""Each processor alone, and all together, for vocabularies of 2 to 4 ids."""


def of_any_kind(rng: torch.Generator, batch: int, rows: tuple[int, ...], vocab: int) -> sk.Processors:
    """All at once, with lists that no test reads."""
    counts = sk.TokenCounts(torch.randint(-1, vocab, (batch, 30), generator=rng), 9)
    known = counts.ids != NO_ID
    counts.counts += torch.where(known, 2 * torch.randint(0, 4, known.shape, generator=rng), 0).int()
    counts.num_output += torch.randint(0, 6, (batch,), generator=rng).int()
    some = [torch.randperm(vocab, generator=rng)[: vocab - vocab // 3].tolist() for _ in range(batch - 1)]
    masks = torch.randint(-(2**31), 2**31, (*rows, (vocab + 31) // 32), generator=rng).int()
    return sk.Processors(
        logit_bias=(torch.randint(-1, vocab + 9, (batch, 7), generator=rng), torch.randn(batch, 7, generator=rng)),
        banned_ids=torch.randint(-1, vocab, (5,), generator=rng),
        allowed_ids=[None, *some],
        stop_token_ids=[1, vocab - 1], min_tokens=torch.arange(batch), token_bitmask=masks, repetition_penalty=1.2,
        frequency_penalty=torch.randn(batch, generator=rng), presence_penalty=0.3, token_counts=counts,
    )  # fmt: skip


def holds_no_list(backend: Backend, name: str) -> None:
    """A list of one sequence in no order: as if it were empty, and told in the status of every op and row."""
    vocab, batch, width = 60, 3, 9
    rng = torch.Generator().manual_seed(8)
    x, u = backend(logits(rng, batch, 2, vocab), uniforms(rng, batch, 2))
    ids = torch.arange(0, 5 * width, 5)
    fields: dict[str, Any] = {
        "logit_bias": (ids.expand(batch, -1), torch.randn(batch, width, generator=rng)),
        "repetition_penalty": 1.7, "frequency_penalty": 0.5,
    }  # fmt: skip

    def given() -> tuple[sk.Processors, Tensor]:
        counts = sk.TokenCounts(ids.expand(batch, -1), 0)
        counts.counts += torch.arange(width).int() % 2 * 2
        made = backend(sk.Processors(**fields, token_counts=counts))
        listed = FlatProcessors(None, *made._lists(x.device, vocab).flat)._asdict()[name]
        return made, listed

    bad = int(sk.Status.BAD_PARAM)
    for place, value in ((1, 0), (width - 1, 20), (4, 59)):  # again, less, and the next one less
        (made, listed), (emptied, empty) = given(), given()
        listed[1, place], empty[1] = value, NO_ID
        stats = backend.row_stats(x, processors=made)
        assert stats.status.tolist() == [[0, 0], [bad, bad], [0, 0]], "a list in no order is not told"
        same_bits(stats.values, backend.row_stats(x, processors=emptied).values)
        drawn = backend.sample(x, uniform_samples=u, processors=made)
        assert drawn.stats.status.tolist() == stats.status.tolist()
        likely = backend.token_logprobs(x, drawn.token, processors=made)
        assert likely.status.tolist() == stats.status.tolist()
        step: dict[str, Any] = {"draft_tokens": drawn.token[:, :1], "uniform_samples": u}
        out = backend.verify_chain(x, **step, processors=made)
        assert out.status.tolist() == [0, bad, 0], "a list in no order is not told"
        assert torch.equal(out.tokens, backend.verify_chain(x, **step, processors=emptied).tokens)
