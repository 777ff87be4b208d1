"""Reference of `sample`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...types import PLACEHOLDER_TOKEN_ID, Status
from .law import Law, draw, make_law, make_params
from .random import gumbel


def sample(
    logits: Tensor, uniform_samples: Tensor | None, noise_keys: Tensor | None, num_samples: int,
    draft_to_target: Tensor | None, *params: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``[batch, n, vocab]`` to tokens and log_probs ``[batch, n, num_samples]``, and the rows' stats."""
    law = make_law(logits, make_params(logits.shape[0], logits, *params))  # type: ignore[arg-type]
    law.values[..., 4:] = -math.inf
    status = law.status
    if noise_keys is not None:
        scores, order = perturbed(law, noise_keys, draft_to_target).sort(dim=-1, descending=True, stable=True)
        index = torch.where(scores > -math.inf, order, -1)[..., :num_samples]
    elif uniform_samples is not None:
        bad = ~((uniform_samples >= 0) & (uniform_samples < 1))
        clean = uniform_samples.masked_fill(bad, 0.0)
        index = draw(law.probs.flatten(0, 1), clean.flatten()).view(*law.argmax.shape, 1)
        index = torch.where(law.one_hot[..., None], law.argmax[..., None], index)
        bad &= ~law.one_hot
        status = status | torch.where(bad, int(Status.BAD_PARAM), 0).to(torch.int32)
    else:
        index = law.argmax[..., None]
    missing = num_samples - index.shape[-1]  # more samples than the vocabulary has ids
    index = torch.nn.functional.pad(index, (0, missing), value=-1)
    found = index.clamp_min(0)
    log_probs = law.scores.gather(-1, found) - law.values[..., 3:4].log()
    log_probs = torch.where(index < 0, -math.inf, log_probs).to(torch.float32)
    tokens = found if draft_to_target is None else draft_to_target[found]
    return torch.where(index < 0, PLACEHOLDER_TOKEN_ID, tokens), log_probs, law.values, law.argmax, status


def perturbed(law: Law, noise_keys: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Scores plus Gumbel noise, ``[batch, n, vocab]``: their argmax is a draw from the law; noise is indexed by target
    id.
    """
    vocab = law.probs.shape[-1]
    ids = torch.arange(vocab, device=law.probs.device) if draft_to_target is None else draft_to_target
    return law.scores + gumbel(noise_keys[..., None], ids.expand(law.probs.shape), law.probs.dtype)
