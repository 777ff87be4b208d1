"""`verify_chain`, padded or ragged: all rows at once, then all sequences.

Launches: ``find_spans`` (where each sequence's rows stand and how far the rules look), ``scan`` and ``law`` of the
target's rows and of the draft's, ``walk`` (the token rule, or the weights of the block rule), ``remainder_masses`` (of
what P has and Q has not, by tiles) and ``finish``, which draws the last token. Point masses need no remainder;
"match" and "greedy" no walk, "match" scores instead. Seeds take one more before them, for the random numbers.
`return_acceptance` takes one before the walk, ``overlap``, and so does a target law: ``mixtures``, which reads the raw
draft rows where `draft_stats` are given.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the token rule, Sun et al.
2024 (arXiv 2403.10444) for the block rule.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.arguments import VerifyArguments, VerifyChainArguments, tiles_of
from .bundles import (
    LOGITS,
    NO_DRAFT,
    NO_NOISE,
    PROBS,
    Chains,
    Layout,
    Output,
    Rows,
    Temperature,
    Walked,
    Wanted,
    step_of,
)
from .coins import with_numbers
from .draft import Draft, draft_laws
from .finish import finish, match
from .launch import empties, power_of_2, run, tiles_at_once, tiles_of_rows
from .law import Found, find_laws, make_temperature
from .mixture import NO_MIXTURE, find_mixtures
from .noise import best_scores
from .processors import drafted_before, with_processors
from .rules import BLOCK, GREEDY, MATCH, TOKEN, find_spans, overlap, remainder_masses, walk

MOST_SLOTS_AT_ONCE = 64  # draft positions that a program looks at in one go


def contiguous(args: Any, *names: str) -> Any:
    """The same arguments, those of `names` contiguous."""
    return args._replace(**{n: tensor.contiguous() for n in names if (tensor := getattr(args, n)) is not None})


def in_order(shared: VerifyArguments) -> VerifyArguments:
    """The same arguments, with whatever kernels index by a number alone contiguous."""
    made: VerifyArguments = contiguous(shared, "uniform_samples", "noise_keys", "target_to_draft", "eos_token_ids")
    return made


def layout_of(args: VerifyChainArguments) -> Layout:
    """Where the sequences lie."""
    total, bonus_rows = args.draft_tokens.numel(), int(args.bonus_tokens is None)
    if args.cu_num_draft_tokens is None:
        return Layout(args.draft_tokens.shape[0], args.num_draft, None, total, bonus_rows)
    cu = args.cu_num_draft_tokens.contiguous()
    # no segment is longer than all of them: what is kept for each row is as wide as that, whatever the bound says
    return Layout(cu.numel() - 1, min(args.num_draft, total), cu, total, bonus_rows)


def indexed_rows(data: Tensor, index: Tensor, layout: Layout) -> Rows:
    """The draft's rows ``[requests, n, vocab]``, of each sequence those of the request that its index names."""
    (requests, stride), unit = data.stride()[:2], step_of(data)
    starts = index.to(torch.int64).clamp(0, max(data.shape[0] - 1, 0)) * (requests // unit)
    if layout.cu is not None:  # a sequence's rows are counted from the first of all
        starts = starts - layout.cu[:-1].to(torch.int64) * (stride // unit)
    return Rows(data, unit, stride, data.shape[-1], starts=starts)


def verify_chain(args: VerifyChainArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens ``[batch, num_draft + 1]``, num_accepted, num_tokens, status ``[batch]``, acceptance ``[batch,
    num_draft]``.
    """
    layout, shared = layout_of(args), in_order(args.shared)
    ragged_numbers = layout.cu is not None and shared.seeds is None
    shared = with_numbers(shared, layout.width + 1, layout.cu, layout.total)
    args = contiguous(args._replace(shared=shared), "num_draft_tokens", "draft_index", "bonus_tokens")
    batch, width, num_draft = layout.batch, layout.width, args.num_draft
    empty = empties(shared.target_logits.device)
    rows = layout.rows(shared.target_logits, layout.bonus_rows)
    rows = rows._replace(kind=PROBS if shared.target_probs else LOGITS)
    if shared.processors is not None:
        before = drafted_before(layout, args.draft_tokens)
        rows = with_processors(rows, layout, width + layout.bonus_rows, shared.processors, before)
    draft_data = shared.draft_probs if shared.draft_logits is None else shared.draft_logits
    requests = 0 if draft_data is None else draft_data.shape[0]
    slots = min(power_of_2(width), MOST_SLOTS_AT_ONCE)
    spans = empty(batch, 4, dtype=torch.int64)
    target_spans = None if args.bonus_tokens is None else torch.empty_like(spans)
    chains = Chains(
        args.draft_tokens.contiguous(), args.bonus_tokens, spans, target_spans, empty(batch, 3),
        tl.constexpr(ragged_numbers),
    )  # fmt: skip
    run(
        find_spans, (batch,), chains, rows.vocab, width if layout.cu is None else 0, layout.cu, args.num_draft_tokens,
        shared.eos_token_ids, 0 if shared.eos_token_ids is None else shared.eos_token_ids.numel(), layout.total,
        num_draft, args.draft_index, requests, SLOTS=slots, warps=1,
    )  # fmt: skip

    raw = shared.law.is_cascade
    greedy, ratio_rule = args.acceptance == GREEDY.value, args.acceptance not in (MATCH.value, GREEDY.value)
    wanted = Wanted(spans if target_spans is None else target_spans, tl.constexpr(False))
    found = find_laws(rows, batch, width + 1, shared.params, values=raw, raw=raw, greedy=greedy, wanted=wanted)
    draft = Draft(NO_DRAFT)
    if draft_data is not None and (ratio_rule or args.return_acceptance):
        draft = _draft_of(draft_data, args, layout, spans)

    acceptances = empty(*((batch, num_draft) if args.return_acceptance else (0,)), dtype=torch.float32)
    if args.return_acceptance:  # before the walk, which may end a span
        run(
            overlap, (acceptances.numel(),), found.target, chains, width, tiles_of(rows.vocab), draft.laws, num_draft,
            acceptances, TILES=tiles_of_rows(rows, 2), registers=None if shared.processors is None else 128,
        )  # fmt: skip

    tokens = empty(batch, num_draft + 1, dtype=torch.int64)
    out = Output(tokens, empty(batch), empty(batch), empty(batch), None, tl.constexpr(slots))
    if ratio_rule:
        _by_ratio(args, chains, width, found, draft, out)
    else:
        _by_match(args, chains, width, found, wanted, out)
    return tokens, out.num_accepted, out.num_tokens, out.status, acceptances


def _draft_of(data: Tensor, args: VerifyChainArguments, layout: Layout, spans: Tensor) -> Draft:
    """The laws of the draft's rows, of logits or probabilities `data`."""
    law, bonus = args.shared.law, int(args.shared.law.cascade_bonus)
    if not layout.width + bonus:
        return Draft(NO_DRAFT)
    if args.draft_index is None:
        rows = layout.rows(data, bonus)
    else:
        rows = indexed_rows(data, args.draft_index, layout)
    wanted = Wanted(spans, tl.constexpr(not bonus))
    return draft_laws(rows, wanted, layout.batch, layout.width, args.shared, bonus=bonus, raw=law.is_cascade)


def _by_ratio(args: VerifyChainArguments, chains: Chains, width: int, found: Found, draft: Draft, out: Output) -> None:
    """The walk over the coins or weights, what is left where it may stop, and the token drawn from that."""
    shared, law, rows = args.shared, args.shared.law, found.target.rows
    batch, tiles, bonus = chains.spans.shape[0], tiles_of(rows.vocab), int(law.cascade_bonus)
    empty = empties(chains.spans.device, torch.float32)
    has_draft = draft.laws.rows is not None
    by_block = args.acceptance == BLOCK.value and has_draft
    rule = args.acceptance if has_draft or args.acceptance != BLOCK.value else TOKEN.value
    masses = empty(batch, width + bonus if by_block else 1, tiles) if has_draft else None
    walked = Walked(empty(batch, width + 1), masses, tl.constexpr(rule))
    mixtures = NO_MIXTURE
    if law.number and width + bonus:
        mixtures = find_mixtures(law, found, draft, width + bonus, chains.spans)
    temperature = make_temperature(shared.draft_params)
    if shared.draft_probs is not None:
        temperature = Temperature(1.0, None, tl.constexpr(False))
    run(
        walk, (batch,), found.target, chains, width, draft.laws, mixtures, shared.uniform_samples, temperature, walked,
        SLOTS=out.slots.value, warps=1,
    )  # fmt: skip
    if masses is not None:
        a_program = tiles_of_rows(rows, 2)
        run(
            remainder_masses, (masses.shape[0] * masses.shape[1] * triton.cdiv(tiles, a_program),), found.target,
            chains, width, tiles, draft.laws, mixtures, walked, TILES=a_program,
        )  # fmt: skip
    run(
        finish, (batch,), found.target, chains, width, tiles, found.tile_mass, draft.laws, mixtures,
        shared.uniform_samples, walked, out, args.num_draft, TILES=tiles_at_once(rows.vocab),
        registers=128 if shared.processors is None else 240,
    )  # fmt: skip


def _by_match(
    args: VerifyChainArguments, chains: Chains, width: int, found: Found, wanted: Wanted, out: Output
) -> None:
    """The tokens that the target itself draws, as far as the draft has them, and the one after."""
    best, (rows, laws) = NO_NOISE, found.target
    if args.shared.noise_keys is not None:
        best = best_scores(found, args.shared.noise_keys, spans=wanted.spans, ragged=chains.ragged_numbers.value)
    run(
        match, (chains.spans.shape[0],), laws, rows.vocab, chains, width, best, tiles_of(rows.vocab), out,
        args.num_draft, TILES=tiles_at_once(rows.vocab),
    )  # fmt: skip
