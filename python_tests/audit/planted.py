"""Verifiers of every signature, right ones and ones with a known defect each, written from descriptions of the defects.

All rest on `chain`, which takes its random numbers as arguments; where a defect is, an argument says so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk

Test = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of (P(x), Q(x), the coin): whether to accept."""


def strictly(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    return u * q < p


def or_equal(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    return u * q <= p


def always(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    return torch.ones_like(p, dtype=torch.bool)


def excess(p: Tensor, q: Tensor) -> Tensor:
    """What a recovered token is drawn from."""
    left = (p - q).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 1e-9, left, p)


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """The id that each uniform falls on."""
    ends = weights.cumsum(-1)
    ids = (ends <= u[..., None] * ends[..., -1:]).sum(-1)
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(ids, last)


def chain(
    p: Tensor, q: Tensor, x: Tensor, coins: Tensor, final: Callable[[Tensor], Tensor], lengths: Tensor | None = None,
    *, test: Test = strictly, residual: Callable[[Tensor, Tensor], Tensor] = excess,
) -> Tensor:  # fmt: skip
    """The token rule on ``p [batch, K + 1, vocab]``, ``q [batch, K, vocab]`` and the drafted ``x [batch, K]``.

    `final` draws a token of each row of weights ``[batch, vocab]``.
    """
    batch, k = x.shape
    lengths = torch.full((batch,), k) if lengths is None else lengths
    ids = x.clamp_min(0)[..., None]
    accepted = test(p[:, :k].gather(-1, ids)[..., 0], q.gather(-1, ids)[..., 0], coins)
    accepted &= torch.arange(k) < lengths[:, None]
    count = accepted.int().cumprod(1).sum(1)
    return emitted(p, q, x, count, lengths, final, residual)


def emitted(
    p: Tensor, q: Tensor, x: Tensor, count: Tensor, lengths: Tensor, final: Callable[[Tensor], Tensor],
    residual: Callable[[Tensor, Tensor], Tensor], weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """So many accepted tokens and the one behind them."""
    batch, k = x.shape
    rows = torch.arange(batch)
    row = p[rows, count]
    own = row if weight is None else row * weight[:, None]
    weights = torch.where((count < lengths)[:, None], residual(own, q[rows, count.clamp_max(k - 1)]), row)
    out = torch.nn.functional.pad(x, (0, 1)).masked_fill(torch.arange(k + 1) >= count[:, None], -1)
    out[rows, count] = final(weights)
    return out


def block_chain(
    p: Tensor, q: Tensor, x: Tensor, coins: Tensor, final: Callable[[Tensor], Tensor], lengths: Tensor | None = None,
    *, stale: bool = False,
) -> Tensor:  # fmt: skip
    """Block verification (Sun et al., 2024); `stale`: test and residual take the weight of the token before."""
    batch, k = x.shape
    lengths = torch.full((batch,), k) if lengths is None else lengths
    w, count, kept = torch.ones(batch), torch.zeros(batch, dtype=torch.int64), torch.ones(batch)
    for i in range(k):
        before, ids = w, x[:, i : i + 1].clamp_min(0)
        w = (w * (p[:, i].gather(1, ids) / q[:, i].gather(1, ids))[:, 0]).clamp_max(1.0)
        used, after = before if stale else w, min(i + 1, k - 1)
        left = (used[:, None] * p[:, i + 1] - q[:, after]).clamp_min(0).sum(-1)
        h = torch.where(i == lengths - 1, used, torch.nan_to_num(left / (left + 1 - used), nan=1.0))
        here = (coins[:, i] < h) & (i < lengths)
        count, kept = torch.where(here, i + 1, count), torch.where(here, used, kept)
    return emitted(p, q, x, count, lengths, final, excess, torch.where(count == lengths, 1.0, kept))


# --- plain ------------------------------------------------------------------------------------------------------------


def law(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``[batch, n, vocab]`` probabilities, float64."""
    return sk.warp_probs(logits, sk.SamplingParams(temperature, top_k, top_p)).double()


def plain_of(
    own_draft_params: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]] = lambda t, d: d,
    **defects: Any,
) -> Callable[..., Tensor]:
    """From logits, with given uniforms; `own_draft_params` of the target's and the draft's makes those used."""

    def verify(
        target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor, uniform_samples: Tensor, temperature: Tensor,
        top_k: Tensor, top_p: Tensor, draft_temperature: Tensor, draft_top_k: Tensor, draft_top_p: Tensor,
        num_draft_tokens: Tensor,
    ) -> Tensor:  # fmt: skip
        target = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        draft = {"temperature": draft_temperature, "top_k": draft_top_k, "top_p": draft_top_p}
        p, q = law(target_logits, **target), law(draft_logits, **own_draft_params(target, draft))
        u = uniform_samples.double()
        return chain(p, q, draft_tokens, u[:, 1:], lambda w: inverse(w, u[:, 0]), num_draft_tokens, **defects)

    return verify


def blocks(stale: bool) -> Callable[..., Tensor]:
    def verify(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, uniform_samples: Tensor) -> Tensor:
        p, q, u = target_probs.double(), draft_probs.double(), uniform_samples.double()
        return block_chain(p, q, draft_tokens, u[:, 1:], lambda w: inverse(w, u[:, 0]), stale=stale)

    return verify


def first_ones_parameters(
    target_logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor, num_draft_tokens: Tensor, uniform_samples: Tensor,
    temperature: Tensor, top_k: Tensor, top_p: Tensor,
) -> Tensor:  # fmt: skip
    """Every sequence is verified at the temperature of the first."""
    p, q = law(target_logits, temperature[:1].expand(len(top_k)), top_k, top_p), draft_probs.double()
    u = uniform_samples.double()
    return chain(p, q, draft_tokens, u[:, 1:], lambda w: inverse(w, u[:, 0]), num_draft_tokens)


def one_seed(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
    """Its generator begins anew at every call."""
    torch.manual_seed(0)
    coins = torch.rand(draft_tokens.shape)
    return chain(target_probs.double(), draft_probs.double(), draft_tokens, coins, lambda w: w.multinomial(1)[:, 0])


def seed_in_the_loop(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor) -> Tensor:
    """One coin for all positions: the generator is set back for each."""
    coins = []
    state = torch.get_rng_state()
    for _ in range(draft_tokens.shape[1]):
        torch.set_rng_state(state)
        coins.append(torch.rand(len(draft_tokens)))
    final = torch.rand(len(draft_tokens))
    return chain(
        target_probs.double(), draft_probs.double(), draft_tokens, torch.stack(coins, 1).double(),
        lambda w: inverse(w, final.double()),
    )  # fmt: skip


def keyed(
    purpose: str, per_step: bool = False, block: bool = False
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A verifier and a drafter whose numbers are made of seeds and positions.

    `purpose` is the drafter's own; the verifier's is "accept". `per_step`: a position's number depends on the first
    position of its block too.
    """

    def numbers(seeds: Tensor, positions: Tensor, purpose: str, first: Tensor | None = None) -> Tensor:
        step = positions if first is None else positions * 1000 + first
        return sk.uniform_samples(seeds, step, 2, purpose).double()

    drafting: dict[str, Tensor] = {}

    def verify(
        target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, seeds: Tensor, positions: Tensor
    ) -> Tensor:
        k, first = draft_tokens.shape[1], positions if per_step else None
        drafting.clear()
        u = torch.stack([numbers(seeds, positions + i, "accept", first) for i in range(k + 1)], 1)
        p, q = target_probs.double(), draft_probs.double()
        rule = block_chain if block else chain

        def final(weights: Tensor) -> Tensor:
            return inverse(weights, u[:, 0, 1])

        return rule(p, q, draft_tokens, u[:, :k, 0], final)

    def draft(draft_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        first = drafting.setdefault("first", positions) if per_step else None
        return inverse(draft_probs.double(), numbers(seeds, positions, purpose, first)[:, 0])

    return verify, draft


# --- peers' signatures ------------------------------------------------------------------------------------------------


def transformers_of(warm: float = 1.0, **defects: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`warm`: the temperature that q is computed at once more."""

    def verify(
        candidate_input_ids: Tensor, candidate_logits: Tensor, candidate_length: int, new_logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = candidate_input_ids[:, -candidate_length:]
        p, q = new_logits.double().softmax(-1), (candidate_logits.double() / warm).softmax(-1)
        coins = torch.rand_like(p[:, :-1, 0])
        out = chain(p, q, x, coins, lambda w: torch.multinomial(w, 1)[:, 0], **defects)
        count = (out >= 0).sum() - 1
        return out[:, : count + 1], count

    return verify


def flashinfer_of(**defects: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def verify(
        draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        u = torch.rand(len(draft_probs), target_probs.shape[1], generator=generator).double()
        out = chain(
            target_probs.double(), draft_probs.double(), draft_token_ids.long(), u[:, 1:],
            lambda w: inverse(w, u[:, 0]), **defects,
        )  # fmt: skip
        count = (out >= 0).sum(1) - 1
        return out.int(), count, count

    return verify


def padded(flat: Tensor, lengths: Tensor, width: int, value: float = 0.0) -> Tensor:
    """``[total, …]`` as ``[batch, width, …]``."""
    out = torch.full((len(lengths), width, *flat.shape[1:]), value, dtype=flat.dtype)
    out[torch.arange(width) < lengths[:, None]] = flat
    return out


def vllm_v1_of(**defects: Any) -> Callable[..., Tensor]:
    """Coins and one exponential race a request, seeded requests with their generators; recovered tokens by the race."""

    def rejection_sample(
        draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None, target_logits: Tensor, bonus_token_ids: Tensor, sampling_metadata: Any,
    ) -> Tensor:  # fmt: skip
        lengths, vocab = torch.tensor(num_draft_tokens), target_logits.shape[-1]
        batch = len(lengths)
        uniform = torch.rand(len(draft_token_ids), dtype=torch.float64)
        race = torch.empty(batch, vocab).exponential_()
        starts = (lengths.cumsum(0) - lengths).tolist()
        for i, generator in sampling_metadata.generators.items():
            uniform[starts[i] : starts[i] + num_draft_tokens[i]].uniform_(generator=generator)
            race[i].exponential_(generator=generator)
        x = padded(draft_token_ids.long(), lengths, max_spec_len, -1)
        p = padded(target_logits.double(), lengths, max_spec_len).softmax(-1)
        greedy = sampling_metadata.temperature == 0
        p[greedy] = torch.eye(vocab, dtype=p.dtype)[p[greedy].argmax(-1)]
        one_hot = torch.eye(vocab, dtype=p.dtype)[draft_token_ids.long()]
        q = padded(one_hot if draft_probs is None else draft_probs.double(), lengths, max_spec_len)
        bonus = torch.eye(vocab, dtype=p.dtype)[bonus_token_ids[:, 0].long()]
        p = torch.nn.functional.pad(p, (0, 0, 0, 1))
        p[torch.arange(batch), lengths] = bonus
        coins = padded(uniform, lengths, max_spec_len)
        return chain(p, q, x, coins, lambda w: (w / race).argmax(-1), lengths, **defects)

    return rejection_sample


def vllm_v1_draft(apart: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Draws with the requests' generators, or else with a copy of each, made anew in each step, which the verifier's
    then repeat.
    """
    copies: dict[int, tuple[Tensor, torch.Generator]] = {}

    def copy_of(i: int, generator: torch.Generator) -> torch.Generator:
        state = generator.get_state()
        if i not in copies or not torch.equal(copies[i][0], state):
            copies[i] = state, torch.Generator().set_state(state)
        return copies[i][1]

    def draft(logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor]:
        probs = logits.softmax(-1)
        race = torch.empty_like(probs).exponential_()
        for i, generator in sampling_metadata.generators.items():
            race[i].exponential_(generator=generator if apart else copy_of(i, generator))
        return (probs / race).argmax(-1), probs

    return draft


def rows_of_v2(
    target_logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
    idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor, seed: Tensor,
    num_speculative_steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of the V2 signature's arguments P, Q, the drafted tokens, their number, and the first one's position."""
    width = num_speculative_steps + 1
    rows = cu_num_logits.long().diff()
    cold = temperature == 0
    p = padded(target_logits.double(), rows, width).softmax(-1)
    vocab = p.shape[-1]
    p[cold] = torch.eye(vocab, dtype=p.dtype)[p[cold].argmax(-1)]
    x = padded(draft_sampled, rows, width, -1)[:, 1:]
    if draft_logits is None:
        q = torch.eye(vocab, dtype=p.dtype)[x.clamp_min(0)]
    else:
        q = (draft_logits.double() / torch.where(cold, 1.0, temperature)[:, None, None]).softmax(-1)
        q[cold] = torch.eye(vocab, dtype=p.dtype)[q[cold].argmax(-1)]
    return p, q, x, rows - 1, pos[cu_num_logits[:-1].long()] + 1


def vllm_v2_of(purpose: str, per_step: bool = True, block: bool = False, **defects: Any) -> SimpleNamespace:
    """``rejection_sample`` and ``gumbel_sample`` with numbers of (seed, position); see `keyed`."""

    drafting: dict[str, Tensor] = {}

    def numbers(seed: Tensor, pos: Tensor, purpose: str, first: Tensor | None, count: int = 2) -> Tensor:
        step = pos if first is None else pos * 1000 + first
        return sk.uniform_samples(seed, step, count, purpose).double()

    def rejection_sample(
        target_logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
        idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor,
        seed: Tensor, num_speculative_steps: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        drafting.clear()
        p, q, x, lengths, start = rows_of_v2(
            target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
            expanded_local_pos, temperature, seed, num_speculative_steps,
        )  # fmt: skip
        width = num_speculative_steps + 1
        first = start if per_step else None
        u = torch.stack([numbers(seed, start + i, "accept", first) for i in range(width)], 1)
        final = u[:, 0, 1]
        rule = block_chain if block else chain
        tokens = rule(p, q, x, u[:, :-1, 0], lambda w: inverse(w, final), lengths, **defects)
        count = (tokens >= 0).sum(1)
        return tokens.masked_fill(tokens < 0, 12345), count.int()

    def gumbel_sample(
        logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, seed: Tensor, pos: Tensor,
        apply_temperature: bool, is_drafting: bool,
    ) -> Tensor:  # fmt: skip
        first = drafting.setdefault("first", pos + 1) if per_step else None
        return inverse(logits.double().softmax(-1), numbers(seed, pos + 1, purpose, first)[:, 0])

    return SimpleNamespace(rejection_sample=rejection_sample, gumbel_sample=gumbel_sample)


def sglang_tree(updated: bool) -> Callable[..., None]:
    """A child is tested with its node's one coin against the summed probabilities so far; or with a coin of its own
    against its own probability, which forgets that those before it were rejected.
    """

    def verify(
        predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
        retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
        uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, draft_probs: Tensor,
        threshold_single: float, threshold_acc: float, deterministic: bool,
    ) -> None:  # fmt: skip
        rows, nodes = torch.arange(len(candidates)), candidates.shape[1]
        node, done = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.bool)
        left = target_probs[:, 0].double()
        accept_index[:, 0] = retrive_index[:, 0]
        accept_token_num.zero_()
        for depth in range(1, accept_index.shape[1] + 1):
            p = target_probs[rows, node].double()
            left = torch.where(done[:, None], left, p)
            child, reached, found = (
                retrive_next_token[rows, node],
                torch.zeros(len(rows)).double(),
                torch.full_like(node, -1),
            )
            for _ in range(nodes):
                on = (child >= 0) & (found < 0) & ~done
                token = candidates[rows, child.clamp_min(0)]
                own = p[rows, token]
                reached = reached + torch.where(on, own, 0.0)
                coin, bound = (node, reached) if updated else (child.clamp_min(0), own)
                found = torch.where(on & (uniform_samples[rows, coin].double() < bound), child, found)
                missed = on & (found < 0)
                left[missed, token[missed]] = 0
                child = torch.where(on, retrive_next_sibling[rows, child.clamp_min(0)], child)
            go = found >= 0
            predicts[retrive_index[rows, node][go]] = candidates[rows, found][go].int()
            done |= ~go
            node = torch.where(go, found, node)
            if depth < accept_index.shape[1]:
                accept_index[go, depth] = retrive_index[rows, node][go].int()
            accept_token_num += go.int()
        final = inverse(left, uniform_samples_for_final_sampling.double())
        predicts[retrive_index[rows, node]] = final.int()

    return verify


def sglang_chain(block: bool = False, stale: bool = False, **defects: Any) -> Callable[..., None]:
    def verify(
        predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
        retrive_next_token: Tensor, retrive_next_sibling: Tensor, uniform_samples: Tensor,
        uniform_samples_for_final_sampling: Tensor, target_probs: Tensor, draft_probs: Tensor,
        threshold_single: float, threshold_acc: float, deterministic: bool,
    ) -> None:  # fmt: skip
        p, q, x = target_probs.double(), draft_probs.double(), candidates[:, 1:]
        coins, last = uniform_samples[:, :-1].double(), uniform_samples_for_final_sampling.double()
        if block:
            tokens = block_chain(p, q, x, coins, lambda w: inverse(w, last), stale=stale)
        else:
            tokens = chain(p, q, x, coins, lambda w: inverse(w, last), **defects)
        count = (tokens >= 0).sum(1) - 1
        accept_token_num.copy_(count)
        on = torch.arange(tokens.shape[1]) <= count[:, None]
        accept_index.copy_(torch.where(on, retrive_index, -1))
        predicts.copy_(torch.where(on, tokens, -1).flatten())

    return verify


def siblings(defect: str = "") -> Callable[..., Tensor]:
    """Recursive rejection of one node's sampled children; "both": P and Q stay after a rejection, "draft": Q does."""

    def verify(
        target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor, parents: list[int], uniform_samples: Tensor
    ) -> Tensor:
        out = torch.full((len(target_probs), 3), -1)
        for b in range(len(target_probs)):
            node, depth = 0, 0
            while True:
                p, q = target_probs[b, node].double().clone(), draft_probs[b, node].double().clone()
                children = [c for c, parent in enumerate(parents) if parent == node]
                found = -1
                for c in children:
                    x = int(draft_tokens[b, c])
                    if float(uniform_samples[b, c]) * q[x] < p[x]:
                        found = c
                        break
                    if defect != "both":
                        p = excess(p[None], q[None])[0]
                        p /= p.sum()
                    if not defect:
                        q[x] = 0
                        q /= q.sum()
                if found < 0:
                    break
                out[b, depth] = draft_tokens[b, found]
                node, depth = found, depth + 1
            if defect == "both" and children:
                p = excess(p[None], draft_probs[b, node : node + 1].double())[0]
            out[b, depth] = inverse(p[None], uniform_samples[b, :1].double())[0]
        return out

    return verify
