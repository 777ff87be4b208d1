"""`verify_chain` and `verify_packed`: all rows at once, then all sequences.

Launches: ``block`` (where each sequence's rows stand and its block ends), ``scan`` and ``law`` of the target's rows and
of the draft's, ``walk`` (the token rule, or the weights of the block rule), ``residual`` (tile masses of what P has and
Q has not) and ``finish``, which draws the last token. Point masses need no residual; "match" and "greedy" no walk. A
target law takes one more before the walk, ``mixtures``, which where `draft_stats` are given reads the raw draft rows.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the token rule, Sun et al.
2024 (arXiv 2403.10444) for the block rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .draft import DraftLaws, draft_laws
from .finish import finish, match
from .launch import power_of_2, run, tiles_a_program, tiles_at_once, tiles_of
from .law import Laws, Rows, find_laws
from .mixture import TargetLaw
from .noise import best_scores
from .rules import block, overlap, residual, walk

TOKEN, BLOCK, MATCH, GREEDY = range(4)
MOST_SLOTS_AT_ONCE = 64  # draft positions that a program looks at in one go


@dataclass
class Layout:
    """Where sequences lie: padded, or laid end to end if `cu` is given."""

    batch: int
    width: int  # most draft tokens that a sequence can have
    cu: Tensor | None
    total: int

    def rows(self, data: Tensor, extra: int) -> Rows:
        """Rows of a sequence's draft tokens and `extra` more, ``[batch, n, vocab]`` or ``[rows, vocab]``."""
        n = self.width + extra
        if self.cu is None:
            return Rows(data, self.batch, n, *data.stride()[:2])
        # the rows of sequence b start `extra * b` rows further than its draft tokens
        return Rows(data, self.batch, n, extra * data.stride(0), data.stride(0))

    def stride(self, extra: int) -> int:
        """Elements between two sequences in a flat array with a number for each of `Layout.rows`."""
        return self.width + extra if self.cu is None else extra


def verify(
    layout: Layout, num_draft: int, target_logits: Tensor, draft_tokens: Tensor,
    draft_logits: Tensor | None, draft_probs: Tensor | None,
    draft_values: Tensor | None, draft_argmax: Tensor | None, draft_status: Tensor | None,
    uniform_samples: Tensor | None, noise_keys: Tensor | None, target_to_draft: Tensor | None,
    num_draft_tokens: Tensor | None, eos_token_ids: Tensor | None, acceptance: int, return_acceptance: bool,
    law: int, law_variant: bool, law_alpha: float, law_beta: float, cascade_bonus: bool, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """tokens ``[batch, num_draft + 1]``, num_accepted, num_tokens, status ``[batch]``, acceptance ``[batch,
    num_draft]``.
    """
    device, batch, width = target_logits.device, layout.batch, layout.width

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    target = layout.rows(target_logits, 1)
    vocab, tiles = target.vocab, tiles_of(target.vocab)
    draft_tokens, target_to_draft = draft_tokens.contiguous(), _contiguous(target_to_draft)
    uniform_samples, noise_keys = _contiguous(uniform_samples), _contiguous(noise_keys)
    slots = {"SLOTS": min(power_of_2(width), MOST_SLOTS_AT_ONCE)}
    token_stride, uniform_stride = layout.stride(0), layout.stride(1)

    blocks, state = empty(batch, 3, dtype=torch.int64), empty(batch, 3)
    run(
        block, (batch,), draft_tokens, token_stride, layout.cu, _contiguous(num_draft_tokens),
        _contiguous(eos_token_ids), 0 if eos_token_ids is None else eos_token_ids.numel(), layout.total, num_draft,
        vocab, blocks, state, warps=1, **slots,
    )  # fmt: skip
    target_law = TargetLaw(law, law_variant, law_alpha, law_beta) if law else None
    raw, bonus = target_law is not None and target_law.is_cascade, int(cascade_bonus)
    found = find_laws(target, params[:9], values=raw, raw=raw, greedy=acceptance == GREEDY, blocks=blocks)
    ratio_rule = acceptance in (TOKEN, BLOCK)
    draft: DraftLaws | None = None
    if width + bonus and (draft_logits is not None or draft_probs is not None) and (ratio_rule or return_acceptance):
        given = (draft_values, draft_argmax, draft_status)
        draft = draft_laws(
            layout, blocks, draft_logits, draft_probs, given, target_to_draft, params[9:], bonus=bonus, raw=raw
        )

    tokens = empty(batch, num_draft + 1, dtype=torch.int64)
    num_accepted, num_tokens, status = empty(batch), empty(batch), empty(batch)
    out = (tokens, num_accepted, num_tokens, status, num_draft)
    sequences = (draft_tokens, token_stride, blocks, state, width)
    laws = (found.laws, found.argmax, found.status)
    row_tiles = {"TILES": tiles_at_once(vocab)}
    if ratio_rule:
        scales = empty(batch, width + 1, dtype=torch.float32)
        by_block = acceptance == BLOCK and draft is not None
        draft_args = DraftLaws.NONE if draft is None else draft.arguments
        law_args = TargetLaw.NONE
        if target_law is not None and width + bonus:
            law_args = target_law.arguments(target, found, draft, width, blocks)
        temperature = (params[9], params[14]) if draft_probs is None else (1.0, None)
        run(
            walk, (batch,), *target.address, *sequences, *laws, *draft_args, *law_args, vocab, uniform_samples,
            uniform_stride, *temperature, scales, BLOCK=by_block, warps=1, **slots,
        )  # fmt: skip
        masses = None
        if draft is not None:
            masses = empty(batch, width + bonus if by_block else 1, tiles, dtype=torch.float32)
            a_program = tiles_a_program(vocab, 2)
            run(
                residual, (masses.shape[0] * masses.shape[1] * triton.cdiv(tiles, a_program),), *target.address,
                tiles, *sequences, *laws, *draft_args, *law_args, vocab, scales, masses, BLOCK=by_block,
                TILES=a_program,
            )  # fmt: skip
        run(
            finish, (batch,), *target.address, tiles, *sequences, *laws, found.tile_mass, *draft_args, *law_args,
            vocab, uniform_samples, uniform_stride, scales, masses, *out, BLOCK=by_block,
            registers=128, **row_tiles, **slots,
        )  # fmt: skip
    else:
        best: tuple[Tensor | None, Tensor | None] = (None, None)
        if noise_keys is not None:
            best = best_scores(target, found, noise_keys, blocks=blocks, key_stride=uniform_stride)
        run(match, (batch,), tiles, *sequences, *laws, *best, *out, **row_tiles, **slots)
    acceptances = empty(*((batch, num_draft) if return_acceptance else (0,)), dtype=torch.float32)
    if return_acceptance:
        _overlaps(target, found, draft, sequences, laws, num_draft, acceptances)
    return tokens, num_accepted, num_tokens, status, acceptances


def _overlaps(
    target: Rows, found: Laws, draft: DraftLaws | None, sequences: tuple[object, ...], laws: tuple[Tensor, ...],
    num_draft: int, out: Tensor,
) -> None:  # fmt: skip
    draft_args = DraftLaws.NONE if draft is None else draft.arguments
    tiles, a_program = tiles_of(target.vocab), tiles_a_program(target.vocab, 2)
    run(
        overlap, (out.numel(),), *target.address, tiles, *sequences, *laws, *draft_args, target.vocab, num_draft, out,
        TILES=a_program,
    )  # fmt: skip


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
