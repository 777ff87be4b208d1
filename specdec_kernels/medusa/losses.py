"""The losses of Medusa-1 and Medusa-2 (Cai et al., arXiv 2401.10774, section 2.2)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import (
    FLOAT_DTYPES,
    INT64,
    check_given,
    check_instance,
    check_int,
    check_number,
    check_tensor,
    shape_error,
)
from ..drafters.medusa_heads import MedusaHeads
from .data import IGNORED

HEAD_DECAY = 0.8
"""0.8ᵏ, k from 0 at the first head: later ones, whose losses are larger, weigh less. (The paper has k from 1.)"""


def linear_cross_entropy(inputs: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The mean of ``−log softmax(weight · input)[label]`` over the labelled rows, in nats; 0 where none is labelled.

    On a GPU with liger-kernel installed the logits never exist as a whole; else torch's linear layer and cross-entropy.

    Parameters
    ----------
    inputs : Tensor
        ``[n, hidden]`` floats.
    weight : Tensor
        ``[vocab, hidden]`` of their dtype.
    labels : Tensor
        ``[n]`` int64 ids of the vocabulary (not checked), −100 for rows that do not count.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    name = "linear_cross_entropy"
    check_tensor(name, "inputs", inputs, FLOAT_DTYPES, None)
    check_tensor(name, "weight", weight, (inputs.dtype,), inputs.device)
    if inputs.dim() != 2:
        raise shape_error(name, "inputs", "[n, hidden]", inputs)
    if weight.dim() != 2 or weight.shape[1] != inputs.shape[1]:
        raise shape_error(name, "weight", f"[vocab, hidden={inputs.shape[1]}]", weight)
    _check_labels(name, labels, inputs)
    fused = _liger() if inputs.is_cuda else None
    if fused is not None:
        total: Tensor = fused(weight, inputs, labels)
    else:
        logits = functional.linear(inputs, weight).float()
        total = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def _check_labels(caller: str, labels: Tensor, rows: Tensor) -> None:
    check_given(caller, "labels", labels, INT64, rows.device, ("n",), (len(rows),))


def _check_logits(caller: str, name: str, logits: Tensor, like: Tensor | None = None) -> None:
    check_tensor(caller, name, logits, FLOAT_DTYPES, None if like is None else like.device)
    if logits.dim() != 2 or (like is not None and logits.shape != like.shape):
        raise shape_error(caller, name, "[n, vocab]" if like is None else str(list(like.shape)), logits)


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

    Raises
    ------
    TypeError, ValueError
        A wrong type, dtype, shape or device.
    """
    name = "medusa1_loss"
    check_instance(name, "heads", heads, MedusaHeads, "MedusaHeads")
    check_tensor(name, "hidden", hidden, FLOAT_DTYPES, None)
    if hidden.dim() != 2 or hidden.shape[1] != heads.hidden_size:
        raise shape_error(name, "hidden", f"[n, hidden={heads.hidden_size}]", hidden)
    check_given(name, "labels", labels, INT64, hidden.device, ("n", "heads"), (len(hidden), heads.num_heads))
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
        ``[n, vocab]`` floats.
    labels : Tensor
        ``[n]`` int64 ids of the vocabulary (not checked), −100 where there is none.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    _check_logits("lm_loss", "logits", logits)
    _check_labels("lm_loss", labels, logits)
    total = functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def distillation_loss(original_logits: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The same on self-distilled text: the mean of ``KL(p_original ‖ p)`` over the labelled rows, in nats.

    A text drawn from the model is one sample of its distribution; trained on that alone the backbone would drift.

    Parameters
    ----------
    original_logits, logits : Tensor
        ``[n, vocab]`` floats: of the model as it was, and as it is now.
    labels : Tensor
        ``[n]`` int64: −100 in rows that do not count, anything else in the others.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or device.
    """
    name = "distillation_loss"
    _check_logits(name, "original_logits", original_logits)
    _check_logits(name, "logits", logits, original_logits)
    _check_labels(name, labels, logits)
    target = original_logits.float().log_softmax(-1)
    apart = (target - logits.float().log_softmax(-1)).masked_fill(target == -torch.inf, 0.0)
    divergence = (target.exp() * apart).sum(-1)
    counted = labels != IGNORED
    return torch.where(counted, divergence, 0.0).sum() / counted.sum().clamp(min=1)


def heads_weight(step: int, ramp_steps: int, final: float) -> float:
    """λ0 of ``L_LM + λ0 · L_Medusa-1``: it grows linearly from 0 to `final` over `ramp_steps`, so that the heads,
    wrong at first, do not spoil the backbone. 0.2 where the text is given, 0.01 where it is self-distilled.

    Raises
    ------
    TypeError, ValueError
        `step` or `ramp_steps` is no integer >= 0, or `final` no number in [0, 1000].
    """
    check_int("heads_weight", "step", step, 0, None)
    check_int("heads_weight", "ramp_steps", ramp_steps, 0, None)
    check_number("heads_weight", "final", final, 0, 1e3)
    return final * min(1.0, step / ramp_steps) if ramp_steps else final
