"""Reference of `sample`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.arguments import SampleArguments
from ...types import PLACEHOLDER_TOKEN_ID, Status
from .law import Remainder, RowKind, RowLaws, make_law, make_params, row_status
from .processors import processed
from .random import gumbel
from .reads import bad_uniforms, clean_uniforms
from .row_stats import stat_values
from .rows import named


def sample(args: SampleArguments) -> tuple[Tensor, ...]:
    """Tokens, log_probs and the rows' stats."""
    return args.rowwise(draw_rows)


def draw_rows(args: SampleArguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``[batch, n, vocab]`` to tokens and log_probs ``[batch, n, num_samples]``, and the rows' stats."""
    rows, uniform_samples, noise_keys, draft_to_target, num_samples, params, processors, probs, row_index = args
    if row_index is not None:
        rows, none = named(rows, row_index)
        rows = rows.masked_fill(none[:, None, None], -math.inf)
    logits, flags = processed(rows, processors)
    valid = make_params(logits.shape[0], logits, params, flags, RowKind.WEIGHTS if probs else RowKind.LOGITS)
    law = make_law(logits, valid)
    status = row_status(logits, valid)
    if noise_keys is not None:
        scores, order = perturbed(law, noise_keys, draft_to_target).sort(dim=-1, descending=True, stable=True)
        index = torch.where(scores > -math.inf, order, -1)[..., :num_samples]
    elif uniform_samples is not None:
        laws = Remainder(*(t.flatten(0, 1) for t in (law.probs, law.one_hot, law.argmax)))
        index = laws.draw(clean_uniforms(uniform_samples).flatten()).view(*law.argmax.shape, 1)
        status = status | torch.where(law.one_hot, 0, bad_uniforms(uniform_samples))
    else:
        index = law.argmax[..., None]
    if row_index is not None:
        index = torch.where(none[:, None, None], -1, index)
        status = torch.where(none[:, None], int(Status.BAD_PARAM), status)
    missing = num_samples - index.shape[-1]  # more samples than the vocabulary has ids
    index = torch.nn.functional.pad(index, (0, missing), value=-1)
    found = index.clamp_min(0)
    log_probs = law.scores.gather(-1, found) - law.normalizer[..., None].log()
    log_probs = torch.where(index < 0, -math.inf, log_probs).to(torch.float32)
    tokens = found if draft_to_target is None else draft_to_target[found]
    return torch.where(index < 0, PLACEHOLDER_TOKEN_ID, tokens), log_probs, stat_values(law, None), law.argmax, status


def perturbed(law: RowLaws, noise_keys: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Scores plus Gumbel noise, ``[batch, n, vocab]``: their argmax is a draw from the law; noise is indexed by target
    id.
    """
    vocab = law.probs.shape[-1]
    ids = torch.arange(vocab, device=law.probs.device) if draft_to_target is None else draft_to_target
    return law.scores + gumbel(noise_keys[..., None], ids.expand(law.probs.shape), law.probs.dtype)
