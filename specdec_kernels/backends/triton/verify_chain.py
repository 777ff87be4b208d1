"""`verify_chain`, padded or ragged: all rows at once, then all sequences.

Launches: ``find_spans`` (where each sequence's rows stand and how far the rules look), ``scan`` and ``law`` of the
target's rows and of the draft's, ``walk`` (the token rule, or the weights of the block rule), ``remainder_masses`` (of
what P has and Q has not, by tiles) and ``finish``, which draws the last token. Point masses need no remainder; "match"
and "greedy" no walk. Seeds take one more before them, for the random numbers; a target law one before the walk,
``mixtures``, which where `draft_stats` are given reads the raw draft rows.

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
from .launch import power_of_2, run, tiles_at_once, tiles_of_rows
from .law import find_laws, make_temperature
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
    layout, num_draft, shared = layout_of(args), args.num_draft, in_order(args.shared)
    ragged_numbers = layout.cu is not None and shared.seeds is None
    shared = with_numbers(shared, layout.width + 1, layout.cu, layout.total)
    kept = (shared.draft_values, shared.draft_argmax, shared.draft_status)
    target_logits, law = shared.target_logits, shared.law
    args = contiguous(args, "num_draft_tokens", "draft_index", "bonus_tokens")
    draft_data = shared.draft_probs if shared.draft_logits is None else shared.draft_logits
    requests, draft_rows = 0, None
    if draft_data is not None:
        draft_rows = layout.rows(draft_data, int(law.cascade_bonus))
        if args.draft_index is not None:
            requests, draft_rows = draft_data.shape[0], indexed_rows(draft_data, args.draft_index, layout)
    device, batch, width = target_logits.device, layout.batch, layout.width

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows = layout.rows(target_logits, layout.bonus_rows)._replace(kind=PROBS if shared.target_probs else LOGITS)
    if shared.processors is not None:
        before = drafted_before(layout, args.draft_tokens)
        rows = with_processors(rows, layout, width + layout.bonus_rows, shared.processors, before)
    tiles, row_tiles = tiles_of(rows.vocab), tiles_at_once(rows.vocab)
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

    target_spans = spans if target_spans is None else target_spans
    raw, bonus = law.is_cascade, int(law.cascade_bonus)
    greedy, ratio_rule = args.acceptance == GREEDY.value, args.acceptance not in (MATCH.value, GREEDY.value)
    wanted = Wanted(target_spans, tl.constexpr(False))
    found = find_laws(rows, batch, width + 1, shared.params, values=raw, raw=raw, greedy=greedy, wanted=wanted)
    target = found.target
    draft = Draft(NO_DRAFT)
    if width + bonus and draft_rows is not None and (ratio_rule or args.return_acceptance):
        draft = draft_laws(
            draft_rows, Wanted(chains.spans, tl.constexpr(not bonus)), batch, width, kept, shared.target_to_draft,
            shared.draft_params, probs=shared.draft_logits is None, bonus=bonus, raw=raw,
        )  # fmt: skip
    has_draft = draft.laws.rows is not None

    acceptances = empty(*((batch, num_draft) if args.return_acceptance else (0,)), dtype=torch.float32)
    if args.return_acceptance:  # before the walk, which may end a span
        run(
            overlap, (acceptances.numel(),), target, chains, width, tiles, draft.laws, num_draft, acceptances,
            TILES=tiles_of_rows(rows, 2), registers=None if shared.processors is None else 128,
        )  # fmt: skip

    tokens = empty(batch, num_draft + 1, dtype=torch.int64)
    out = Output(tokens, empty(batch), empty(batch), empty(batch), None, tl.constexpr(slots))
    if ratio_rule:
        by_block = args.acceptance == BLOCK.value and has_draft
        rule = args.acceptance if has_draft or args.acceptance != BLOCK.value else TOKEN.value
        masses = empty(batch, width + bonus if by_block else 1, tiles, dtype=torch.float32) if has_draft else None
        walked = Walked(empty(batch, width + 1, dtype=torch.float32), masses, tl.constexpr(rule))
        mixtures = NO_MIXTURE
        if law.number and width + bonus:
            mixtures = find_mixtures(law, found, draft, width + bonus, chains.spans)
        temperature = make_temperature(shared.draft_params)
        if shared.draft_probs is not None:
            temperature = Temperature(1.0, None, tl.constexpr(False))
        run(
            walk, (batch,), target, chains, width, draft.laws, mixtures, shared.uniform_samples, temperature, walked,
            SLOTS=slots, warps=1,
        )  # fmt: skip
        if masses is not None:
            a_program = tiles_of_rows(rows, 2)
            run(
                remainder_masses, (masses.shape[0] * masses.shape[1] * triton.cdiv(tiles, a_program),), target, chains,
                width, tiles, draft.laws, mixtures, walked, TILES=a_program,
            )  # fmt: skip
        run(
            finish, (batch,), target, chains, width, tiles, found.tile_mass, draft.laws, mixtures,
            shared.uniform_samples, walked, out, num_draft, TILES=row_tiles,
            registers=128 if shared.processors is None else 240,
        )  # fmt: skip
    else:
        best = NO_NOISE
        if shared.noise_keys is not None:
            best = best_scores(found, shared.noise_keys, spans=target_spans, ragged=ragged_numbers)
        run(match, (batch,), target.laws, rows.vocab, chains, width, best, tiles, out, num_draft, TILES=row_tiles)
    return tokens, out.num_accepted, out.num_tokens, out.status, acceptances
