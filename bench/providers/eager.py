"""Plain PyTorch, written with care: whole batch at once, no Python loop over positions, no synchronisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.laws import TargetLaw
from specdec_kernels.ops.arguments import TILE
from specdec_kernels.types import NO_ID

from ..inputs import (
    BIAS,
    FREQUENCY,
    NUM_TOP,
    PRESENCE,
    REPETITION,
    CacheInputs,
    Case,
    ChainInputs,
    CountInputs,
    PackedInputs,
    Request,
    RowInputs,
    SeedInputs,
    ShardInputs,
    TokenInputs,
)
from ..timing import Call

Warp = Callable[[Tensor, sk.SamplingParams], Tensor]


def warp(logits: Tensor, params: sk.SamplingParams) -> Tensor:
    """Temperature, top-k by `torch.topk`, top-p by sorting the row: ``[..., vocab]`` float32, −inf where cut."""
    scores = logits.float()
    if params.temperature != 1:
        scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(int(params.top_k)).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if params.top_p < 1:
        ordered, index = scores.sort(-1, descending=True)
        mass = ordered.softmax(-1)
        cut = mass.cumsum(-1) - mass >= params.top_p
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, index, cut), -math.inf)
    return scores


def narrow_warp(logits: Tensor, params: sk.SamplingParams) -> Tensor:
    """The same when top-k is on: top-p needs only the k logits that `torch.topk` has already sorted."""
    scores = logits.float() / params.temperature
    ordered, index = scores.topk(min(int(params.top_k), scores.shape[-1]))
    mass = ordered.softmax(-1)
    ordered = ordered.masked_fill(mass.cumsum(-1) - mass >= params.top_p, -math.inf)
    return torch.full_like(scores, -math.inf).scatter(-1, index, ordered)


def masked(logits: Tensor, params: sk.SamplingParams) -> Tensor:
    """A copy of the logits with −inf where they are cut."""
    return logits.masked_fill(warp(logits, params) == -math.inf, -math.inf)


def law(logits: Tensor, params: sk.SamplingParams, warp: Warp = warp) -> Tensor:
    """``[..., vocab]`` probabilities."""
    return warp(logits, params).softmax(-1)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[b, index[b]]``."""
    return rows[torch.arange(rows.shape[0], device=rows.device), index]


def values_at(rows: Tensor, ids: Tensor) -> Tensor:
    """``rows[b, i, ids[b, i]]``."""
    return rows.gather(-1, ids[..., None])[..., 0]


def prefix(accept: Tensor) -> Tensor:
    """How many leading positions are accepted, ``[batch]``."""
    return accept.int().cumprod(-1).sum(-1)


def assemble(draft_tokens: Tensor, accepted: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted tokens, the final one, then −1."""
    slots = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1))
    tokens = torch.where(slots == accepted[:, None], final[:, None], tokens)
    return tokens.masked_fill(slots > accepted[:, None], -1), accepted


def one_of(weights: Tensor) -> Tensor:
    """One id per row in proportion to ``[rows, vocab]`` weights. On a GPU by a race of exponentials, which is what
    `torch.multinomial` does after a check that waits for the device; on a CPU, where exponentials are generated one by
    one, by inverting the running sums."""
    if weights.device.type == "cpu":
        sums = weights.cumsum(-1)
        coins = torch.rand_like(sums[:, :1]) * sums[:, -1:]
        return torch.searchsorted(sums, coins, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)
    return (weights / torch.empty_like(weights).exponential_(1)).argmax(-1)


def recover(p: Tensor, residual: Tensor, all_accepted: Tensor) -> Tensor:
    """A draw from the weights `residual`, or from p after a fully accepted draft or if nothing is left, ``[batch]``."""
    use_p = all_accepted | (residual.sum(-1) <= 0)
    return one_of(torch.where(use_p[:, None], p, residual))


def token_rule(target: Tensor, draft: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The token rule on materialised laws."""
    num_draft = draft_tokens.shape[1]
    p, q = values_at(target[:, :-1], draft_tokens), values_at(draft, draft_tokens)
    accepted = prefix(torch.rand_like(p) * q < p)
    row, q_row = pick(target, accepted), pick(draft, accepted.clamp_max(num_draft - 1))
    return assemble(draft_tokens, accepted, recover(row, (row - q_row).clamp_min(0), accepted == num_draft))


def one_hot_rule(target: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The token rule if all of the draft's mass is on its token."""
    num_draft = draft_tokens.shape[1]
    p = values_at(target[:, :-1], draft_tokens)
    accepted = prefix(torch.rand_like(p) < p)
    row, token = pick(target, accepted), pick(draft_tokens, accepted.clamp_max(num_draft - 1))
    left = row.scatter(-1, token[:, None], 0.0)
    return assemble(draft_tokens, accepted, recover(row, left, accepted == num_draft))


def agreeing(wanted: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The draft while it agrees with what is `wanted` at every position ``[batch, num_draft + 1]``."""
    accepted = prefix(draft_tokens == wanted[:, :-1])
    return assemble(draft_tokens, accepted, pick(wanted, accepted))


def block_rule(target: Tensor, draft: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification (arXiv 2403.10444) on materialised laws."""
    num_draft = draft_tokens.shape[1]
    p, q = values_at(target[:, :-1], draft_tokens), values_at(draft, draft_tokens)
    ratio, weight, weights = p / q, torch.ones_like(p[:, 0]), []
    for i in range(num_draft):
        weight = (weight * ratio[:, i]).clamp_max(1)
        weights.append(weight)
    w = torch.stack(weights, 1)
    rest = (w[:, :-1, None] * target[:, 1:-1] - draft[:, 1:]).clamp_min(0).sum(-1)
    accept = torch.cat([torch.nan_to_num(rest / (rest + 1 - w[:, :-1]), 1.0), w[:, -1:]], 1)
    success = (torch.rand_like(accept) < accept) & (w > 0)
    accepted = (success * torch.arange(1, num_draft + 1, device=success.device)).amax(-1)
    scale = pick(torch.nn.functional.pad(w, (1, 0), value=1.0), accepted)
    q_row = pick(draft, accepted.clamp_max(num_draft - 1))
    p_row = pick(target, accepted)
    residual = (scale[:, None] * p_row - q_row).clamp_min(0)
    use_p = (accepted == num_draft) | (residual.sum(-1) <= 0)
    final = one_of(torch.where(use_p[:, None], p_row, residual))
    return assemble(draft_tokens, accepted, final)


def cascade(target: Tensor, draft: Tensor, target_logits: Tensor, draft_logits: Tensor, law: TargetLaw) -> Tensor:
    """The law π ``[batch, num_draft, vocab]`` of `sk.laws.Opt` and `sk.laws.TokenV3` on materialised laws."""
    P, p, q = target[:, :-1], target_logits[:, :-1].float().softmax(-1), draft_logits.float().softmax(-1)
    top = p.amax(-1, keepdim=True)
    if isinstance(law, sk.laws.TokenV3):
        replaced = p < (1 - law.alpha) * top
        return draft.masked_fill(replaced, 0) + P * torch.where(replaced, draft, 0).sum(-1, keepdim=True)
    assert isinstance(law, sk.laws.Opt) and law.loss == "0-1"
    distance = (P - draft).clamp_min(0).sum(-1, keepdim=True)
    return torch.where(q.amax(-1, keepdim=True) < top - law.alpha * distance, P, draft)


def verify(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, draft_probs: Tensor | None,
    case: Case, warp: Warp,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One verify step from raw logits, or from the probabilities made from them; `draft_probs` if they were kept from
    drafting.
    """
    if case.greedy:
        return agreeing(target_logits.argmax(-1), draft_tokens)
    target = target_logits if case.of_probs else law(target_logits, case.params, warp)
    if case.acceptance == "match":
        return agreeing(one_of(target.flatten(0, 1)).view(target.shape[:2]), draft_tokens)
    if draft_probs is None:
        if draft_logits is None:
            return one_hot_rule(target, draft_tokens)
        draft_probs = law(draft_logits, case.params, warp)
    if case.target_law is not None:
        assert draft_logits is not None
        target = torch.cat(
            [cascade(target, draft_probs, target_logits, draft_logits, case.target_law), target[:, -1:]], 1
        )
    rule = block_rule if case.acceptance == "block" else token_rule
    return rule(target, draft_probs, draft_tokens)


def verify_packed_rows(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor, cu: Tensor, case: Case, warp: Warp
) -> tuple[Tensor, Tensor]:
    """The token rule on ragged drafts: laws of the packed rows, then a padded walk."""
    target, draft = law(target_logits, case.params, warp), law(draft_logits, case.params, warp)
    start, length = cu[:-1].long(), cu.diff().long()
    batch = start.shape[0]
    slots = torch.arange(case.num_draft, device=cu.device)
    rows = torch.arange(batch, device=cu.device)
    inside = slots < length[:, None]
    drafts = torch.where(inside, start[:, None] + slots, 0)  # [batch, num_draft] packed draft rows
    targets = drafts + rows[:, None] * inside
    tokens = draft_tokens[drafts]
    p, q = target[targets, tokens], draft[drafts, tokens]
    accepted = prefix((torch.rand_like(p) * q < p) & inside)
    whole = accepted == length
    q_row = draft[(start + accepted).clamp_max(draft.shape[0] - 1)]
    row = target[start + rows + accepted]
    return assemble(tokens, accepted, recover(row, (row - q_row).clamp_min(0), whole))


def statistics(logits: Tensor, params: sk.SamplingParams) -> tuple[Tensor, ...]:
    """What `row_stats` gives: maximum, argmax, cutoff, log-normaliser, raw log-normaliser, raw entropy."""
    raw = logits.float()
    maximum, argmax = raw.max(-1)
    raw_log_normalizer = raw.logsumexp(-1)
    raw_entropy = torch.special.entr((raw - raw_log_normalizer[..., None]).exp()).sum(-1)
    if params == sk.SamplingParams():
        return maximum, argmax, torch.full_like(maximum, -math.inf), raw_log_normalizer, raw_log_normalizer, raw_entropy
    scores = warp(logits, params)
    cutoff = torch.where(scores > -math.inf, raw, math.inf).amin(-1)
    return maximum, argmax, cutoff, scores.logsumexp(-1), raw_log_normalizer, raw_entropy


def in_tiles(rows: Tensor, beyond: float) -> Tensor:
    """``[..., tiles, TILE]``; not the reference's function, as that is what these answers are compared with."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % TILE), value=beyond).unflatten(-1, (-1, TILE))


def tile_statistics(logits: Tensor, params: sk.SamplingParams) -> tuple[Tensor, ...]:
    """What `shard_stats` gives: maximum and mass of each tile, and the argmax."""
    tiles = in_tiles(logits.float() / params.temperature, -math.inf)
    maximum = tiles.amax(-1)
    return maximum * params.temperature, (tiles - maximum[..., None]).exp().sum(-1), logits.argmax(-1)


def merged(shard: ShardInputs, params: sk.SamplingParams) -> tuple[Tensor, ...]:
    """What `merge_shards` gives: maximum, normaliser, and the probability of an id."""
    maximum = shard.tile_max.amax(-1, keepdim=True)
    total = (shard.tile_mass * ((shard.tile_max - maximum) / params.temperature).exp()).sum(-1)
    at = ((shard.logits_at - maximum[..., 0]) / params.temperature).exp() / total
    return maximum[..., 0], total, at


def drawn_by_tiles(shard: ShardInputs, params: sk.SamplingParams) -> tuple[Tensor, Tensor]:
    """What `shard_draw` gives: masses of P's excess over Q, and the id where a draw among them ends."""
    p, q = (
        ((x.float() - stats.max[..., None]) / params.temperature).exp() / stats.normalizer[..., None]
        for x, stats in ((shard.logits, shard.stats), (shard.draft_logits, shard.draft_stats))
    )
    left = (p - q).clamp_min(0)
    masses = in_tiles(left, 0.0).sum(-1)
    ends = left.cumsum(-1)
    return masses, (ends > shard.uniform_samples[..., None] * ends[..., -1:]).int().argmax(-1)


def draw(logits: Tensor, params: sk.SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability."""
    log_law = warp(logits, params).log_softmax(-1)
    token = one_of(log_law.exp().flatten(0, -2)).view(*logits.shape[:-1], 1)
    return token[..., 0], log_law.gather(-1, token)[..., 0]


def as_vllm(request: Request, words: Tensor, logits: Tensor, drafted: Tensor) -> Tensor:
    """The rows after processors, by vLLM's formulae: the whole batch at once, with dense counts, made here."""
    x, (batch, rows, vocab) = logits.float().clone(), logits.shape
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=x.device)) & 1
    x.masked_fill_(bits.flatten(-2)[..., :vocab] == 0, -math.inf)
    biased = request.biased[:, None].expand(-1, rows, -1)
    x.scatter_add_(-1, biased, torch.full(biased.shape, BIAS, device=x.device))
    x[:, :3, 2] = -math.inf
    counts = torch.zeros(batch, vocab, dtype=torch.int32, device=x.device).scatter_add_(
        1, request.output, torch.ones_like(request.output, dtype=torch.int32)
    )
    prompt = torch.zeros(batch, vocab, dtype=torch.bool, device=x.device).scatter_(1, request.prompt, True)
    one_hot = torch.zeros(batch, rows, vocab, dtype=torch.int32, device=x.device)
    one_hot[:, 1:].scatter_(-1, drafted[..., None], 1)
    times = one_hot.cumsum_(1).add_(counts[:, None])
    penalties = torch.where(prompt[:, None] | (times > 0), REPETITION, 1.0)
    x *= torch.where(x > 0, 1.0 / penalties, penalties)
    x -= FREQUENCY * times
    x -= PRESENCE * (times > 0)
    return x


def likelihoods(step: TokenInputs, params: sk.SamplingParams) -> tuple[Tensor, ...]:
    """What `token_logprobs` gives: raw and processed log-probability, rank; the likeliest ids and both of theirs."""
    logits, tokens = step.logits, step.tokens
    raw = law = logits.float().log_softmax(-1)
    if step.request is not None and step.processors is not None and step.processors.token_bitmask is not None:
        logits = as_vllm(step.request, step.processors.token_bitmask, logits, tokens[:, :-1])
    if logits is not step.logits or params != sk.SamplingParams():
        law = warp(logits, params).log_softmax(-1)
    own = raw.gather(-1, tokens[..., None])
    top = raw.topk(NUM_TOP)
    rank = (raw > own).sum(-1) + 1
    return own[..., 0], values_at(law, tokens), rank, top.indices, top.values, law.gather(-1, top.indices)


def usable(case: Case, warp_function: Warp, kept: bool) -> bool:
    """Variants are offered only where they differ from the plain one."""
    if warp_function is narrow_warp:
        return bool(case.params.top_k > 0 and case.params.top_p < 1)
    return not kept or not (case.greedy or case.one_hot)


def chain_builder(
    case: Case, function: Callable[..., object] = verify, warp: Warp = warp, kept: bool = False
) -> Call | None:
    if not usable(case, warp, kept):
        return None

    def call(step: ChainInputs) -> object:
        probs = step.draft_probs if kept else None
        target = step.target_logits if step.target_probs is None else step.target_probs
        return function(target, step.draft_tokens, step.draft_logits, probs, case, warp)

    return call


def packed_builder(case: Case, function: Callable[..., object] = verify_packed_rows, warp: Warp = warp) -> Call | None:
    if not usable(case, warp, False):
        return None

    def call(step: PackedInputs) -> object:
        return function(step.target_logits, step.draft_tokens, step.draft_logits, step.cu_num_draft_tokens, case, warp)

    return call


def rows_builder(case: Case, function: Callable[..., object]) -> Call | None:
    def call(rows: RowInputs) -> object:
        return function(rows.named(), case.params)

    return call


def params_builder(case: Case, function: Callable[..., object]) -> Call | None:
    def call(given: ShardInputs | TokenInputs) -> object:
        return function(given, case.params)

    return call


def random_uniforms(case: Case) -> Call | None:
    """Not keyed: `torch.rand` gives other numbers in another batch slot."""
    return lambda step: torch.rand(step.seeds.shape[0], case.num_draft + 1, device=step.seeds.device)


def random_keys(case: Case) -> Call | None:
    """Not keyed: `torch.randint`."""

    def call(step: SeedInputs) -> object:
        return torch.randint(-(2**63), 2**63 - 1, step.positions.shape, device=step.seeds.device)

    return call


def count_tokens_(case: Case) -> Call | None:
    """Sorts lists and tokens together."""

    def call(step: CountInputs) -> object:
        known, tokens = step.token_counts, step.tokens
        new = tokens >= 0
        ids, order = torch.cat([known.ids, torch.where(new, tokens, NO_ID).int()], 1).sort(stable=True)
        counts = torch.cat([known.counts, 2 * new.int()], 1).gather(1, order)
        slot = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)
        capacity = known.ids.shape[1]
        known.ids.copy_(torch.full_like(ids, NO_ID).scatter(1, slot, ids)[:, :capacity])
        known.counts.copy_(torch.zeros_like(counts).scatter_add(1, slot, counts)[:, :capacity])
        known.num_output += new.sum(1).int()
        return known.num_output

    return call


def gather_kv_(case: Case) -> Call | None:
    """A layer at a time: `index_select` and `index_copy_` for one sequence, advanced indexing for several. All paths
    are assumed to have full length: with several lengths they would need a synchronisation."""
    sequences = torch.arange(case.batch, device=case.device)[:, None]

    def call(step: CacheInputs) -> object:
        source = step.context_lengths[:, None] + step.accepted_nodes
        target = step.context_lengths[:, None] + torch.arange(1, case.num_draft + 1, device=source.device)
        for tensor in (t for layer in step.cache for t in layer):
            if case.batch == 1:
                tensor.index_copy_(2, target[0], tensor.index_select(2, source[0]))
            else:
                tensor[sequences, :, target] = tensor[sequences, :, source]
        return step.context_lengths + 1 + case.num_draft

    return call


FUNCTIONS: Mapping[str, tuple[Callable[..., Call | None], Callable[..., object]]] = {
    "verify_chain": (chain_builder, verify),
    "verify_packed": (packed_builder, verify_packed_rows),
    "row_stats": (rows_builder, statistics),
    "warp_probs": (rows_builder, law),
    "mask_logits_": (rows_builder, masked),
    "sample": (rows_builder, draw),
    "shard_stats": (rows_builder, tile_statistics),
    "merge_shards": (params_builder, merged),
    "shard_draw": (params_builder, drawn_by_tiles),
    "token_logprobs": (params_builder, likelihoods),
}
"""By op, how a call is built around a function, and the function: itself, or what `torch.compile` makes of it."""
BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {
    **{op: functools.partial(builder, function=function) for op, (builder, function) in FUNCTIONS.items()},
    "uniform_samples": random_uniforms,
    "noise_keys": random_keys,
    "count_tokens_": count_tokens_,
    "gather_kv_": gather_kv_,
}
NARROW_BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {
    "verify_chain": functools.partial(chain_builder, warp=narrow_warp),
    "verify_packed": functools.partial(packed_builder, warp=narrow_warp),
}
KEPT_BUILDERS: Mapping[str, Callable[[Case], Call | None]] = {
    "verify_chain": functools.partial(chain_builder, kept=True),
}
