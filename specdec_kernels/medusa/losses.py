"""The losses of Medusa-1 and Medusa-2 (Cai et al., arXiv 2401.10774, section 2.2)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..drafters.medusa_heads import MedusaHeads
from .data import IGNORED

HEAD_DECAY = 0.8
"""λₖ = 0.8ᵏ, k from 0: later heads, whose losses are larger, weigh less."""


def linear_cross_entropy(inputs: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The mean of ``−log softmax(weight · input)[label]`` over the labelled rows, in nats; 0 where none is labelled.

    On a GPU with liger-kernel installed the logits never exist as a whole; else torch's linear layer and cross-entropy.

    Parameters
    ----------
    inputs : Tensor
        ``[n, hidden]``.
    weight : Tensor
        ``[vocab, hidden]``.
    labels : Tensor
        ``[n]`` int64, −100 for rows that do not count.
    """
    fused = _liger() if inputs.is_cuda else None
    if fused is not None:
        total: Tensor = fused(weight, inputs, labels)
    else:
        logits = functional.linear(inputs, weight).float()
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


@functools.cache
def _liger() -> Any:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")


def medusa1_loss(heads: MedusaHeads, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """``Σₖ 0.8ᵏ · CEₖ``, CEₖ the mean cross-entropy of head k where its label lies in the reduced vocabulary.

    Parameters
    ----------
    heads : MedusaHeads
    hidden : Tensor
        ``[n, hidden]`` of the heads' dtype, the target's last hidden states.
    labels : Tensor
        ``[n, heads]`` int64 target ids: at row t and head k the token t + k + 2; −100 where there is none.

    Returns
    -------
    loss : Tensor
        A scalar.
    each : Tensor
        ``[heads]``, the CEₖ in nats, without gradient.
    """
    known = heads.draft_labels(labels)
    outputs = heads.outputs(hidden)
    layers = heads.layers * (heads.num_heads // len(heads.w2))
    each = torch.stack(
        [linear_cross_entropy(outputs[:, k], layer.weight, known[:, k]) for k, layer in enumerate(layers)]
    )
    weights = HEAD_DECAY ** torch.arange(heads.num_heads, device=each.device)
    return (weights * each).sum(), each.detach()


def lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The backbone's own loss on given text: the mean cross-entropy of the next token, in nats.

    Parameters
    ----------
    logits : Tensor
        ``[n, vocab]``.
    labels : Tensor
        ``[n]`` int64, −100 where there is none.
    """
    total = functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def distillation_loss(original_logits: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The same on self-distilled text: the mean of ``KL(p_original ‖ p)`` over the labelled rows, in nats.

    A text drawn from the model is one sample of its distribution; trained on that alone the backbone would drift.
    """
    target = original_logits.float().log_softmax(-1)
    divergence = (target.exp() * (target - logits.float().log_softmax(-1))).sum(-1)
    counted = labels != IGNORED
    return torch.where(counted, divergence, 0.0).sum() / counted.sum().clamp(min=1)


def heads_weight(step: int, ramp_steps: int, final: float) -> float:
    """λ0 of ``L_LM + λ0 · L_Medusa-1``: it grows linearly from 0 to `final` over `ramp_steps`, so that the heads,
    wrong at first, do not spoil the backbone. 0.2 where the text is given, 0.01 where it is self-distilled.
    """
    return final * min(1.0, step / ramp_steps) if ramp_steps else final
