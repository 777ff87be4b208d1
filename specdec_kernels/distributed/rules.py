"""The rules of a chain applied to what all ranks know of its rows: numbers from which each rank decides alike."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..backends.reference.law import Remainder, RowLaws, make_params
from ..backends.reference.reads import clean_uniforms, flags_read
from ..backends.reference.rows import at, laid_out, slots_upto
from ..backends.reference.target_law import Mixtures
from ..backends.reference.verify_chain import (
    BLOCK,
    GREEDY,
    MATCH,
    Chain,
    Walk,
    accept_while,
    block_rule,
    draws_final,
    make_span,
    token_rule,
    what_was_read,
)  # fmt: skip
from ..flat import LOSSLESS
from ..ops.arguments import ACCEPTANCES, VerifyArguments, VerifyChainArguments
from ..ops.merge_shards import total_mass
from ..ops.shard_draw import shard_draw
from ..sampling import GREEDY as GREEDY_PARAMS
from ..sampling import SamplingParams
from ..types import RowStats, VerifyOutput
from .rows import RowsRead, Shard, ShardRows


@dataclass(frozen=True)
class ShardedCall:
    """One verify step; rows of logits and probabilities are this rank's tiles of them."""

    shard: Shard
    target_logits: Tensor
    draft_tokens: Tensor
    draft_logits: Tensor | None
    draft_probs: Tensor | None
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    params: SamplingParams
    draft_params: SamplingParams
    acceptance: str
    num_draft_tokens: Tensor | None
    eos_token_ids: Tensor | None

    @property
    def ids(self) -> Tensor:
        """The draft tokens ``[batch, num_draft]`` int64, clamped into the vocabulary."""
        return self.draft_tokens.to(torch.int64).clamp(0, self.shard.layout.vocab - 1)

    @property
    def drafted(self) -> Tensor | None:
        """The draft's rows, of either kind; None where there are none."""
        rows = self.draft_probs if self.draft_logits is None else self.draft_logits
        return rows if self.draft_tokens.shape[1] else None

    def some(self, numbers: list[int]) -> ShardedCall:
        """The step of some sequences, by their numbers."""
        if len(numbers) == len(self.draft_tokens):  # all of them: nothing is copied
            return self
        sequences = torch.tensor(numbers, device=self.draft_tokens.device)
        whole = ("eos_token_ids",)
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in whole}
        chosen = {name: value[sequences] for name, value in given.items() if isinstance(value, Tensor)}
        params = {
            name: some_params(value, sequences) for name, value in given.items() if isinstance(value, SamplingParams)
        }
        made: dict[str, Any] = chosen | params
        return replace(self, **made)

    def arguments(self) -> VerifyChainArguments:
        """As the op on one device takes them."""
        shared = VerifyArguments(
            self.target_logits, self.draft_logits, self.draft_probs, None, None, None, None, self.uniform_samples,
            self.noise_keys, None, None, None, 0, self.eos_token_ids, LOSSLESS, self.params._flat,
            self.draft_params._flat,
        )  # fmt: skip
        return VerifyChainArguments(
            shared, self.draft_tokens, self.num_draft_tokens, None, self.draft_tokens.shape[1],
            ACCEPTANCES[self.acceptance], False,
        )  # fmt: skip


def some_params(params: SamplingParams, sequences: Tensor) -> SamplingParams:
    """Those of some sequences."""
    given = {f.name: getattr(params, f.name) for f in fields(params) if f.init}
    chosen: dict[str, Any] = {k: v[sequences] if isinstance(v, Tensor) else v for k, v in given.items()}
    return SamplingParams(**chosen)


@dataclass
class ShardedChain(Chain):
    """A chain whose whole distributions no rank has."""

    residuals: Tensor | None = None  # [batch, num_draft + 1]: what `left` gives
    weights: list[Tensor] = field(default_factory=list)  # as long as they are not known: the w's that it was asked with

    def left(self, i: int, w: Tensor) -> Tensor:
        if self.residuals is None:
            self.weights.append(w)
            return torch.zeros_like(w)
        return self.residuals[:, i]


RULES = ("token", "block", "match", "greedy")
"""Those that are served: another of `ACCEPTANCES` is refused until it is written here."""


def verify_whole(step: ShardedCall, target: ShardRows, draft: ShardRows | None) -> VerifyOutput:
    """Verify sequences whose target rows are not cut; the draft's are as truncation leaves them."""
    args = step.arguments()
    chain = make_chain(step, args, target, draft)
    if args.acceptance in (MATCH, GREEDY):
        by_argmax = step.noise_keys is None or step.params.is_greedy
        wanted = target.stats.argmax if by_argmax else noisy_tokens(step, target)
        walk = accept_while(chain.tokens == wanted[:, :-1], chain)
        final = at(wanted, walk.accepted)
        certain = torch.ones_like(chain.sampled)
    else:
        walk, masses = token_rule(chain), None
        if args.acceptance == BLOCK and draft is not None:
            walk, masses = block_rule_of(step, chain, walk, target, draft)
        chain = replace(chain, span=chain.span.before(walk.length))
        certain, final = (at(of, walk.accepted) for of in (target.one_hot, target.stats.argmax))
        if not step.params.is_greedy:  # or nothing is drawn at all
            final = torch.where(certain, final, draw(step, chain, walk, target, draft, masses))
    num_tokens = walk.accepted + draws_final(chain, walk).int()
    tokens = laid_out(chain.tokens, walk.accepted, final, num_tokens)
    reads = what_was_read(args, chain, walk, Remainder(final, certain, final))
    of_drafted = None if draft is None else draft.stats.status
    status = chain.span.status | flags_read(reads, target.stats.status, of_drafted, step.uniform_samples)
    int32 = torch.int32
    return VerifyOutput(tokens, walk.accepted.to(int32), num_tokens.to(int32), status.to(int32), None)


def asked_of_target(step: ShardedCall) -> RowsRead:
    """The target's rows."""
    params = GREEDY_PARAMS if step.acceptance == "greedy" else step.params
    return RowsRead(step.target_logits, torch.nn.functional.pad(step.ids, (0, 1)), params)


def with_flags(step: ShardedCall, target: ShardRows) -> ShardRows:
    """The target's rows as they were read, with the flags of the parameters: greedy rows were read without them."""
    flags = make_params(len(step.ids), target.stats.values, step.params._flat).status
    return replace(target, stats=target.stats._replace(status=target.stats.status | flags[:, None]))


def asked_of_draft(step: ShardedCall) -> list[RowsRead]:
    """The draft's rows, if it has any."""
    drafted = step.drafted
    return [] if drafted is None else [RowsRead(drafted, step.ids, step.draft_params, step.draft_logits is None)]


def make_chain(
    step: ShardedCall, args: VerifyChainArguments, target: ShardRows, draft: ShardRows | None
) -> ShardedChain:
    values, ids = target.stats.values, step.ids
    batch, rows = values.shape[:2]
    params, draft_params = (make_params(batch, values, given._flat) for given in (step.params, step.draft_params))
    nothing = values.new_empty(0)
    laws = RowLaws(
        nothing, nothing, values[..., 0], values[..., 1], values[..., 3], values[..., 2], target.stats.argmax,
        target.one_hot,
    )  # fmt: skip
    uniforms = torch.zeros(batch, rows, dtype=torch.float32, device=ids.device)
    if step.uniform_samples is not None:
        uniforms = clean_uniforms(step.uniform_samples)
    ones = torch.ones_like(values[..., 0])
    p = target.prob[:, :-1]
    q = torch.ones_like(p) if draft is None else draft.prob
    sampled = torch.full((batch,), draft is not None, device=ids.device)
    if step.draft_logits is not None:
        sampled = sampled & ~draft_params.greedy[:, 0]
    certain = target.one_hot[:, :-1]
    return ShardedChain(
        make_span(args, step.shard.layout.vocab), params, draft_params, laws, nothing,
        Mixtures(ones, ones, nothing, False, False), sampled, uniforms, ids, p, q, p, ~certain, ~certain,
    )  # fmt: skip


def of_draft(step: ShardedCall, draft: ShardRows | None, rows: Tensor | slice, batch: Tensor | slice) -> dict[str, Any]:
    """What `shard_draw` takes of some of the draft's rows."""
    if draft is None:
        return {}
    stats = RowStats(*(of[batch, rows] for of in draft.stats))
    if step.draft_logits is None:
        return {"draft_probs": draft.own[batch, rows], "draft_status": stats.status}
    return {"draft_logits": draft.own[batch, rows], "draft_stats": stats, "draft_params": step.draft_params}


def block_rule_of(
    step: ShardedCall, chain: ShardedChain, by_token: Walk, target: ShardRows, draft: ShardRows
) -> tuple[Walk, Tensor]:
    """The block rule, and the token rule of sequences whose drafts are not drawn; and the masses ``[batch, tiles]`` of
    what the last token is drawn from. Weights and the span depend on no sum: they are found first, then all the sums
    that either needs in one round.
    """
    shard, num_draft, every = step.shard, chain.tokens.shape[1], slice(None)
    by_block = block_rule(chain)
    slots = slots_upto(num_draft, by_token.accepted)
    weights = torch.stack([torch.ones_like(by_token.weight), *chain.weights[:-1]], 1)
    after = torch.where(slots == by_token.accepted[:, None], by_token.weight[:, None], weights)
    weights = torch.where(chain.sampled[:, None], weights, after)
    whole = chain.span.before(by_token.where(~chain.sampled, by_block).length).length
    batch = slots_upto(len(whole), whole)
    last = RowStats(*(of[batch, whole][:, None] for of in target.stats))
    rows = slice(0, num_draft)
    left = shard.own_masses(
        target.own[:, rows], RowStats(*(of[:, rows] for of in target.stats)), weights, step.params,
        **of_draft(step, draft, rows, every),
    )  # fmt: skip
    kept = shard.own_masses(target.own[batch, whole][:, None], last, -torch.ones_like(weights[:, :1]), step.params)
    masses = shard.told_masses("masses of what the block rule leaves", torch.cat([left, kept], 1))
    residuals = torch.nn.functional.pad(total_mass(masses[:, :num_draft].contiguous(), shard.backend), (0, 1))
    walk = by_token.where(~chain.sampled, block_rule(replace(chain, residuals=residuals)))
    row = torch.where(walk.accepted < whole, walk.accepted, num_draft)
    return walk, masses[batch, row]


def draw(
    step: ShardedCall,
    chain: ShardedChain,
    walk: Walk,
    target: ShardRows,
    draft: ShardRows | None,
    masses: Tensor | None,
) -> Tensor:
    """The token after the accepted ones ``[batch]``: after a rejection from ``(w P − Q)+``; where that is empty, and
    after a span accepted whole, from P. `masses [batch, tiles]` are those of what is drawn from, where they are known
    and not empty.
    """
    shard, row, rejected = step.shard, walk.accepted, walk.accepted < chain.span.length
    batch = slots_upto(len(row), row)[:, None]
    both = row[:, None].expand(-1, 2)
    own = target.own[batch, row[:, None]]
    stats = RowStats(*(of[batch, both] for of in target.stats))
    drafted: dict[str, Any] = {}
    last = chain.tokens.shape[1] - 1
    if draft is not None:
        drafted = of_draft(step, draft, row[:, None].clamp_max(last), batch)
    elif last >= 0:
        point = at(torch.nn.functional.pad(chain.tokens, (0, 1)), row)
        drafted = {"point_tokens": torch.where(rejected, point, -1)[:, None]}
    weight = torch.where(rejected, walk.weight, -1.0)
    if masses is None or (rejected & ~at(target.one_hot, row) & ~(masses > 0).any(-1)).any():
        weights = torch.stack([weight, torch.full_like(weight, -1.0)], 1)
        twice = {name: twofold(value) for name, value in drafted.items()}
        mine = shard.own_masses(own.expand(-1, 2, -1), stats, weights, step.params, **twice)
        of_both = shard.told_masses("masses of what a token is drawn from", mine)
        empty = ~(of_both[:, 0] > 0).any(-1)
        weight = torch.where(empty, -1.0, weight)
        masses = torch.where(empty[:, None], of_both[:, 1], of_both[:, 0])
    mine = torch.full_like(row, -1)
    if shard.tiles:
        token = shard_draw(
            own, RowStats(*(of[:, :1].contiguous() for of in stats)), weight[:, None], step.params, first=shard.first,
            masses=masses[:, None].contiguous(), uniform_samples=chain.uniforms[:, :1].contiguous(),
            backend=shard.backend, **drafted,
        ).token  # fmt: skip
        assert token is not None
        mine = token[:, 0]
    return torch.stack([told[0] for told in shard.exchange.gather("drawn tokens", mine)]).amax(0)


def twofold(value: object) -> object:
    """``[batch, 1, …]`` as ``[batch, 2, …]``."""
    if isinstance(value, RowStats):
        return RowStats(*(of.expand(-1, 2, *of.shape[2:]).contiguous() for of in value))
    return value.expand(-1, 2, *value.shape[2:]) if isinstance(value, Tensor) else value


def noisy_tokens(step: ShardedCall, target: ShardRows) -> Tensor:
    """What plain sampling with the noise draws at every row ``[batch, num_draft + 1]``."""
    shard = step.shard
    assert step.noise_keys is not None
    score = torch.full_like(target.prob, -torch.inf)
    token = torch.full_like(target.stats.argmax, -1)
    if shard.tiles:
        weights = torch.full_like(score, -1.0)
        drawn = shard_draw(
            target.own, target.stats, weights, step.params, first=shard.first, noise_keys=step.noise_keys,
            backend=shard.backend,
        )  # fmt: skip
        assert drawn.token is not None and drawn.score is not None
        token, score = drawn.token, drawn.score
    told = shard.exchange.gather("best scores", score, token)
    best = torch.stack([of[0] for of in told]).argmax(0)  # the first of equals: the lowest id
    token = torch.stack([of[1] for of in told]).gather(0, best[None])[0]
    return torch.where(target.one_hot, target.stats.argmax, token)
