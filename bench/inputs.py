"""Inputs that look like a language model's: peaked, heavy-tailed rows, and drafts with a known chance of acceptance.

A target row is a Zipf law over a random permutation of the vocabulary, ``logit = −s · log(rank) + noise`` with an
exponent s drawn for each row from [1, 3] (from flat rows to nearly certain ones, as in text) and Gaussian noise of
standard deviation 0.5.

A draft row is the target row plus Gaussian noise, whose scale is found by bisection so that the mean of ``Σ min(P, Q)``
after the case's sampling parameters is `ACCEPTANCE`; if greedy, so that both argmaxes agree that often. A one-hot draft
proposes the target's most likely id; for it the target's rows are scaled until that id's mean probability is
`ACCEPTANCE`. Draft tokens are drawn from the draft's distribution, with the stats kept.

Everything is made on the case's device. On a GPU plain PyTorch makes it, not the kernels being measured
(`bench.gpu.drafts`): a kernel that fails then costs one row, not the whole run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.laws import TargetLaw
from specdec_kernels.ops.arguments import TILE

from . import machine

ACCEPTANCE = 0.7
TREE_WIDTHS = (2, 2, 1)
"""Children of a node at each depth of the tree that is measured: 11 nodes, the root included."""
NUM_TOP = 5
"""Likeliest ids that are listed beside each token."""
_CPU = torch.device("cpu")
OVERHEAD = "overhead"
"""Name of the case that is too small for anything but the cost of a call: vocab 64, one sequence."""
REPETITION, FREQUENCY, PRESENCE, BIAS = 1.1, 0.2, 0.1, 0.5
PROMPT, OUTPUT, BIASES = 1000, 200, 300
"""Tokens of a request's history, and entries of its bias list."""
POOL = 256
"""So many different target rows at most: more are drawn from these."""


@dataclass(frozen=True)
class Case:
    """One thing to measure: an op, its sizes and how it is called."""

    op: str
    name: str
    vocab: int
    batch: int
    dtype: torch.dtype = torch.float32
    cache: str = "cold"  # "hot": the same provider has just used the same input
    num_draft: int = 5
    params: sk.SamplingParams = sk.SamplingParams()
    acceptance: str = "token"
    one_hot: bool = False
    target_law: TargetLaw | None = None
    processed: bool = False  # every processor is on: those of a `Request`
    of_probs: bool = False  # the target's rows are given as probabilities
    indexed: bool = False  # an index names the rows, out of twice as many
    drawn_before: bool = False  # uniforms come from outside the timed call: for the overhead of one public call
    device: str = "cpu"

    @property
    def greedy(self) -> bool:
        return self.params.is_greedy

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} V={self.vocab} B={self.batch} {dtype} {self.cache}"


@dataclass
class ChainInputs:
    """What one verify step has: `verify_chain`'s inputs, and what a peer may have kept from drafting."""

    target_logits: Tensor  # [batch, num_draft + 1, vocab]
    draft_tokens: Tensor  # [batch, num_draft]
    draft_logits: Tensor | None  # [batch, num_draft, vocab]
    draft_stats: sk.RowStats | None
    draft_probs: Tensor | None
    seeds: Tensor  # [batch]
    uniform_samples: Tensor  # [batch, num_draft + 1]
    steps: Tensor | None = None  # [batch], on a GPU: where a captured graph reads the step
    processors: sk.Processors | None = None
    target_probs: Tensor | None = None  # [batch, num_draft + 1, vocab] of such a case

    draft_scores: Tensor | None = field(init=False)
    """`draft_logits` as transformers keeps them from drafting: processed, up to a constant a row."""

    def __post_init__(self) -> None:
        self.draft_scores = None if self.draft_probs is None else self.draft_probs.log()

    def dense_draft_probs(self, target: Tensor) -> Tensor:
        """`draft_probs`; for a one-hot draft, rows of zeros and a one, laid out like those of `target`."""
        if self.draft_probs is not None:
            return self.draft_probs
        return torch.zeros_like(target[:, :-1]).scatter_(-1, self.draft_tokens[..., None], 1.0)


class Request(NamedTuple):
    """What the processors of a step are made from."""

    prompt: Tensor  # [batch, PROMPT]
    output: Tensor  # [batch, OUTPUT]
    biased: Tensor  # [batch, BIASES]
    allowed: Tensor  # [batch, num_draft + 1, vocab] bool

    @staticmethod
    def random(case: Case, rng: torch.Generator) -> Request:
        """Three ids in four are allowed; on the generator's device."""
        shape, device = (case.batch, case.num_draft + 1, case.vocab), rng.device
        prompt, output = (
            torch.randint(0, case.vocab, (case.batch, n), generator=rng, device=device) for n in (PROMPT, OUTPUT)
        )
        biased = [torch.randperm(case.vocab, generator=rng, device=device)[:BIASES] for _ in range(case.batch)]
        return Request(prompt, output, torch.stack(biased), torch.rand(shape, generator=rng, device=device) < 0.75)

    def processors(self) -> sk.Processors:
        """The same as the package's processors."""
        batch, rows, vocab = self.allowed.shape
        bits = torch.nn.functional.pad(self.allowed, (0, -vocab % 32)).view(batch, rows, -1, 32).long()
        words = (bits << torch.arange(32, device=bits.device)).sum(-1)
        return sk.Processors(
            logit_bias=(self.biased, torch.full(self.biased.shape, BIAS, device=bits.device)), stop_token_ids=[2],
            min_tokens=OUTPUT + 3, token_bitmask=torch.where(words >= 2**31, words - 2**32, words).int(),
            repetition_penalty=REPETITION, frequency_penalty=FREQUENCY, presence_penalty=PRESENCE,
            token_counts=sk.TokenCounts(self.prompt, OUTPUT).add_(self.output),
        )  # fmt: skip


@dataclass
class PackedInputs:
    """The same for ragged drafts laid end to end."""

    target_logits: Tensor  # [total + batch, vocab]
    draft_tokens: Tensor  # [total]
    draft_logits: Tensor  # [total, vocab]
    draft_stats: sk.RowStats
    cu_num_draft_tokens: Tensor  # [batch + 1]
    seeds: Tensor  # [batch]
    uniform_samples: Tensor  # [total + batch]
    draft_scores: Tensor  # [total, vocab], see `ChainInputs`


@dataclass
class TreeInputs:
    """What one verify step of token trees has."""

    tree: sk.DraftTree
    target_logits: Tensor  # [batch, num_nodes, vocab]
    node_tokens: Tensor  # [batch, num_nodes]
    draft_logits: Tensor  # [batch, num_nodes, vocab]
    draft_stats: sk.RowStats
    seeds: Tensor  # [batch]
    uniform_samples: Tensor  # [batch, num_nodes]


@dataclass
class RowInputs:
    """Rows of logits, and a uniform for each."""

    logits: Tensor  # [batch, n, vocab], of an indexed case [rows, n, vocab]
    seeds: Tensor  # [batch]
    uniform_samples: Tensor  # [batch, n]
    row_index: Tensor | None = None  # [batch]

    def named(self) -> Tensor:
        """``[batch, n, vocab]``: the rows themselves, for providers that must copy the rows that an index names."""
        return self.logits if self.row_index is None else self.logits[self.row_index]


@dataclass
class ShardInputs:
    """The first half of a vocabulary shared by two ranks, and what both know about the rows."""

    logits: Tensor  # [batch, n, width]
    draft_logits: Tensor  # [batch, n, width]
    stats: sk.RowStats  # of the whole rows
    draft_stats: sk.RowStats
    weights: Tensor  # [batch, n]
    tile_max: Tensor  # [batch, n, tiles of the whole rows]
    tile_mass: Tensor
    logits_at: Tensor  # [batch, n]
    uniform_samples: Tensor  # [batch, n]


@dataclass(frozen=True)
class TokenInputs:
    """Rows of logits, and a token drawn from each; in a processed case also what changes the rows."""

    logits: Tensor  # [batch, n, vocab]
    tokens: Tensor  # [batch, n]
    request: Request | None
    processors: sk.Processors | None


@dataclass(frozen=True)
class CountInputs:
    """The counts of a request's history, and what a step emitted: tokens that the history already has, as it has most
    of a text's, and which repeated measuring therefore leaves unchanged.
    """

    token_counts: sk.TokenCounts
    tokens: Tensor  # [batch, num_draft + 1]


@dataclass
class SeedInputs:
    """Seeds and positions."""

    seeds: Tensor  # [batch]
    positions: Tensor  # [batch, n]


@dataclass
class CacheInputs:
    """A key-value cache after a forward pass over a token tree, and the path that was accepted."""

    cache: list[tuple[Tensor, Tensor]]  # layers of [batch, kv_heads, rows, head_dim]
    accepted_nodes: Tensor  # [batch, num_draft]
    context_lengths: Tensor  # [batch]


def rows(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """``[count, vocab]`` float32 target rows, on the generator's device."""
    device = generator.device
    exponent = 1 + 2 * torch.rand(count, 1, generator=generator, device=device)
    logits = torch.randn(count, vocab, generator=generator, device=device) * 0.5
    log_rank = torch.arange(1, vocab + 1, device=device).log()
    for row, s in zip(logits, exponent, strict=True):
        row -= s * log_rank[torch.randperm(vocab, generator=generator, device=device)]
    return logits


@functools.lru_cache(4)
def _pool(vocab: int, device: torch.device) -> Tensor:
    return rows(POOL, vocab, torch.Generator(device).manual_seed(vocab))


def some_rows(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """``[count, vocab]`` target rows. Rows are slow to make: many, or any on a GPU, are copies of `POOL` of them."""
    device = generator.device
    if count <= POOL and device.type == "cpu":
        return rows(count, vocab, generator)
    return _pool(vocab, device)[torch.randint(0, POOL, (count,), generator=generator, device=device)]


def backend(device: torch.device) -> str | None:
    """The backend that computes laws while inputs are made: see the module's docstring."""
    return None if device.type == "cpu" else "reference"


def bisect(decreasing: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Where a decreasing function passes `goal`, to a few per mille."""
    for _ in range(9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if decreasing(middle) > goal else (low, middle)
    return math.sqrt(low * high)


@functools.cache
def draft_noise(vocab: int, params: sk.SamplingParams, device: torch.device = _CPU) -> float:
    """Standard deviation of the noise with which a draft is accepted with probability `ACCEPTANCE`."""
    generator = torch.Generator(device).manual_seed(vocab)
    count = 400 if params.is_greedy else 120  # the greedy mean is over zeros and ones
    target = rows(count, vocab, generator)
    noise = torch.randn(count, vocab, generator=generator, device=device)
    law = target.argmax(-1) if params.is_greedy else sk.warp_probs(target, params, backend=backend(device))

    def overlap(scale: float) -> float:
        draft = target + scale * noise
        if params.is_greedy:
            return (draft.argmax(-1) == law).float().mean().item()
        return torch.minimum(law, sk.warp_probs(draft, params, backend=backend(device))).sum(-1).mean().item()

    return bisect(overlap, ACCEPTANCE, 0.05, 10.0)


@functools.cache
def one_hot_sharpness(vocab: int, device: torch.device = _CPU) -> float:
    """The factor on the target's rows with which their most likely id's mean probability is `ACCEPTANCE`."""
    target = rows(120, vocab, torch.Generator(device).manual_seed(vocab))
    return 1 / bisect(lambda flatness: (target / flatness).softmax(-1).amax(-1).mean().item(), ACCEPTANCE, 0.1, 10.0)


Drafting = Callable[[Tensor, Case, torch.Generator], tuple[Tensor, sk.RowStats, Tensor | None]]


def drafted(logits: Tensor, case: Case, generator: torch.Generator) -> tuple[Tensor, sk.RowStats, Tensor | None]:
    """Tokens and stats ``[batch, n]`` of draft rows ``[batch, n, vocab]``; probabilities unless the case is greedy."""
    coins = torch.rand(logits.shape[:2], generator=generator, device=generator.device)
    drawn = sk.sample(logits, case.params, uniform_samples=coins)
    return drawn.token, drawn.stats, None if case.greedy else sk.warp_probs(logits, case.params)


def chain(case: Case, generator: torch.Generator, drafting: Drafting = drafted) -> ChainInputs:
    """One verify step of `case`."""
    batch, k, vocab, device = case.batch, case.num_draft, case.vocab, generator.device
    target = some_rows(batch * (k + 1), vocab, generator).view(batch, k + 1, vocab)
    draft = stats = probs = None
    if case.one_hot:
        target *= one_hot_sharpness(vocab, device)
        tokens = target[:, :k].argmax(-1)
    else:
        noise = torch.randn(batch, k, vocab, generator=generator, device=device)
        draft = (target[:, :k] + draft_noise(vocab, case.params, device) * noise).to(case.dtype)
        del noise
        tokens, stats, probs = drafting(draft, case, generator)
    seeds = torch.randint(0, 2**62, (batch,), generator=generator, device=device)
    uniforms = torch.rand(batch, k + 1, generator=generator, device=device)
    steps = None if device.type == "cpu" else torch.randint(0, 999, (batch,), generator=generator, device=device)
    processors = Request.random(case, generator).processors() if case.processed else None
    of_target = sk.warp_probs(target, case.params, backend=backend(device)) if case.of_probs else None
    return ChainInputs(
        target.to(case.dtype), tokens, draft, stats, probs, seeds, uniforms, steps, processors, of_target
    )


def packed(case: Case, generator: torch.Generator) -> PackedInputs:
    """One verify step whose sequences have 1 … num_draft draft tokens."""
    step = chain(case, generator)
    assert step.draft_logits is not None and step.draft_stats is not None and step.draft_scores is not None
    device = generator.device
    lengths = torch.randint(1, case.num_draft + 1, (case.batch, 1), generator=generator, device=device)
    targets = torch.arange(case.num_draft + 1, device=device) <= lengths
    used = targets[:, 1:]
    stats = step.draft_stats
    cu = torch.nn.functional.pad(lengths[:, 0].cumsum(0), (1, 0)).to(torch.int32)
    return PackedInputs(
        step.target_logits[targets], step.draft_tokens[used], step.draft_logits[used],
        sk.RowStats(stats.values[used], stats.argmax[used], stats.status[used]), cu,
        step.seeds, step.uniform_samples[targets], step.draft_scores[used],
    )  # fmt: skip


def tree(case: Case, generator: torch.Generator) -> TreeInputs:
    """One verify step of a tree whose siblings were drawn from the draft's distribution without replacement (−1 if
    truncation left none).
    """
    batch, vocab, device = case.batch, case.vocab, generator.device
    shape = sk.DraftTree.cartesian(TREE_WIDTHS).to(device)
    num_nodes = shape.num_nodes
    target = some_rows(batch * num_nodes, vocab, generator).view(batch, num_nodes, vocab)
    noise = torch.randn(batch, num_nodes, vocab, generator=generator, device=device)
    draft = (target + draft_noise(vocab, case.params, device) * noise).to(case.dtype)
    keys = torch.randint(0, 2**62, (batch, num_nodes), generator=generator, device=device)
    drawn_with = sk.SamplingParams() if case.greedy else case.params  # a greedy draft has only one child
    some = sk.sample(draft, drawn_with, noise_keys=keys, num_samples=max(TREE_WIDTHS), backend=backend(device))
    assert shape.ranks is not None
    tokens = some.token[:, shape.parents.clamp_min(0), shape.ranks.clamp_min(0)].contiguous()
    seeds = torch.randint(0, 2**62, (batch,), generator=generator, device=device)
    coins = torch.rand(batch, num_nodes, generator=generator, device=device)
    return TreeInputs(shape, target.to(case.dtype), tokens, draft, some.stats, seeds, coins)


def verified_rows(case: Case, generator: torch.Generator) -> RowInputs:
    """The target rows of one verify step, ``[batch, num_draft + 1, vocab]``."""
    return _rows(case, case.num_draft + 1, generator)


def next_rows(case: Case, generator: torch.Generator) -> RowInputs:
    """The rows of one drafting step, ``[batch, 1, vocab]``."""
    return _rows(case, 1, generator)


def emitted_tokens(case: Case, generator: torch.Generator) -> TokenInputs:
    """What one verify step emits if all is accepted, ``[batch, num_draft + 1]``."""
    rows = verified_rows(case, generator)
    drawn = sk.sample(rows.logits, case.params, uniform_samples=rows.uniform_samples, backend=backend(generator.device))
    request = Request.random(case, generator) if case.processed else None
    return TokenInputs(rows.logits, drawn.token, request, None if request is None else request.processors())


def _rows(case: Case, n: int, generator: torch.Generator) -> RowInputs:
    device = generator.device
    num, index = case.batch, None
    if case.indexed:
        num = 2 * case.batch
        index = torch.randperm(num, generator=generator, device=device)[: case.batch]
    logits = some_rows(num * n, case.vocab, generator).view(num, n, case.vocab).to(case.dtype)
    seeds = torch.randint(0, 2**62, (case.batch,), generator=generator, device=device)
    return RowInputs(logits, seeds, torch.rand(case.batch, n, generator=generator, device=device), index)


def shard_rows(case: Case, generator: torch.Generator) -> RowInputs:
    """The first half of the ids of `verified_rows`."""
    whole = verified_rows(case, generator)
    return dataclasses.replace(whole, logits=whole.logits[..., : half(case.vocab)])


def shard(case: Case, generator: torch.Generator) -> ShardInputs:
    """What one of two ranks holds when a token is to be drawn, with one row per sequence."""
    device = generator.device
    logits = some_rows(case.batch, case.vocab, generator).view(case.batch, 1, case.vocab)
    noise = torch.randn(logits.shape, generator=generator, device=device)
    draft = (logits + draft_noise(case.vocab, case.params, device) * noise).to(case.dtype)
    logits = logits.to(case.dtype)
    stats, draft_stats = (sk.row_stats(x, case.params, backend=backend(device)) for x in (logits, draft))
    tiles = sk.shard_stats(logits, case.params, backend=backend(device))
    ones = torch.ones(case.batch, 1, device=device)
    first = half(case.vocab)
    return ShardInputs(
        logits[..., :first], draft[..., :first], stats, draft_stats, ones, tiles.tile_max, tiles.tile_mass,
        logits[..., 0].float(), torch.rand(case.batch, 1, generator=generator, device=device),
    )  # fmt: skip


def half(vocab: int) -> int:
    """Ids of the first of two shards: whole tiles, or the whole vocabulary if it has only one tile."""
    return max(vocab // (2 * TILE) * TILE, TILE) if vocab > TILE else vocab


def seeds_and_positions(case: Case, generator: torch.Generator) -> SeedInputs:
    """``[batch]`` seeds and ``[batch, num_draft + 1]`` positions."""
    device = generator.device
    seeds = torch.randint(0, 2**62, (case.batch,), generator=generator, device=device)
    first = torch.randint(0, 4096, (case.batch, 1), generator=generator, device=device)
    positions = first + torch.arange(case.num_draft + 1, device=device)
    return SeedInputs(seeds, positions)


def history(case: Case, generator: torch.Generator) -> CountInputs:
    """Counts of `PROMPT` and `OUTPUT` tokens, and ``num_draft + 1`` more of the same."""
    request = Request.random(case, generator)
    counts = sk.TokenCounts(request.prompt, 2 * OUTPUT).add_(request.output)
    return CountInputs(counts, request.output[:, : case.num_draft + 1])


def tree_cache(case: Case, generator: torch.Generator) -> CacheInputs:
    """A tree of 64 nodes, `num_draft` accepted, in a cache of 8 heads of 128; 32 layers, one in the overhead case."""
    device, heads, head_dim, nodes, longest = generator.device, 8, 128, 64, 32
    shape = (case.batch, heads, longest + nodes, head_dim)
    layers = [torch.zeros(shape, dtype=case.dtype, device=device) for _ in range(2 if case.name == OVERHEAD else 64)]
    chosen = torch.rand(case.batch, nodes - 1, generator=generator, device=device).topk(case.num_draft).indices
    contexts = torch.randint(0, longest, (case.batch,), generator=generator, device=device)
    return CacheInputs(list(zip(layers[::2], layers[1::2], strict=True)), chosen.sort().values + 1, contexts)


def bytes_held(inputs: Any) -> int:
    """Bytes of the tensors in `inputs`, also in lists and tuples."""
    if isinstance(inputs, Tensor):
        return inputs.nbytes
    return sum(map(bytes_held, inputs)) if isinstance(inputs, list | tuple) else 0


def num_sets(bytes_read: int, held: int) -> int:
    """So many input sets that rotation finds none of them in a cache, if a call reads `bytes_read`; at least 8.

    "Hot" cases get as many, so that their inputs are as varied. At most as many as fit in an eighth of the memory, if a
    set takes `held` bytes: a virtual machine can be told of a cache of its host's that is half a gigabyte.
    """
    cold = math.ceil(4 * machine.last_level_cache_bytes() / bytes_read)
    return max(8, min(256, cold, machine.memory_bytes() // 8 // max(held, 1)))
