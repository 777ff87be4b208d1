"""Training of Medusa's heads: alone (Medusa-1), or together with the backbone (Medusa-2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_instance, check_int, shape_error
from ..drafters.medusa_heads import MedusaHeads
from ..types import TokenMap
from .data import Features
from .fitting import Order, Recipe, check_plain_logits, check_run, fit, hidden_of
from .losses import distillation_loss, heads_weight, lm_loss, medusa1_loss


def choose_vocabulary(features: Features, size: int) -> TokenMap:
    """The `size` most frequent tokens that heads are to predict, by ascending id; fewer where there are no more.

    Raises
    ------
    TypeError, ValueError
        Another type; a `size` below 2; `features` with fewer than two different tokens to predict.
    """
    check_instance("choose_vocabulary", "features", features, Features, "Features")
    check_int("choose_vocabulary", "size", size, 2, None)
    labels = features.next_tokens()
    counts = torch.bincount(labels[labels >= 0])
    if (different := int((counts > 0).sum())) < 2:
        raise ValueError(
            f"choose_vocabulary: features must have two different tokens to predict or more, got {different}"
        )
    order = counts.argsort(descending=True, stable=True)[:size]
    return TokenMap(order[counts[order] > 0].sort().values)


def train_heads(
    heads: MedusaHeads,
    features: Features,
    recipe: Recipe,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> list[float]:
    """Medusa-1: train the heads on hidden states of a frozen backbone.

    Parameters
    ----------
    heads : MedusaHeads
        Changed in place.
    features : Features
    recipe : Recipe
    checkpoint : Path, optional
        File to resume from and to save the run in; it stays when the run is over.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of float
        The loss of every step, those before a resumed checkpoint included.

    Raises
    ------
    TypeError, ValueError
        Another type; a checkpoint of another recipe or other data; `features` of another hidden size, or with nothing
        to learn; weights that `pack_linear_weights` has packed.
    """
    check_instance("train_heads", "heads", heads, MedusaHeads, "MedusaHeads")
    check_run("train_heads", features, recipe, checkpoint, progress, heads=heads)
    _check_hidden("train_heads", features, heads)
    labels = features.labels(heads.num_heads)
    device, dtype = heads.w1.weight.device, heads.w1.weight.dtype
    rows = (heads.draft_labels(labels.to(device)) >= 0).any(1).nonzero()[:, 0].cpu()
    order = Order("train_heads", len(rows), recipe)

    def loss_at(step: int) -> Tensor:
        batch = rows[order.batch(step)]
        return medusa1_loss(heads, features.hidden[batch].to(device, dtype), labels[batch].to(device))[0]

    groups = [(list(heads.parameters()), recipe.learning_rate)]
    return fit(loss_at, groups, {"heads": heads}, order, checkpoint, progress, features.digest())


def _check_hidden(caller: str, features: Features, heads: MedusaHeads) -> None:
    """Raise unless the features are of the heads' hidden size."""
    if features.hidden.shape[1] != heads.hidden_size:
        raise shape_error(caller, "features.hidden", f"[n, hidden={heads.hidden_size}]", features.hidden)


def train_jointly(
    model: Any,
    heads: MedusaHeads,
    features: Features,
    recipe: Recipe,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> list[float]:
    """Medusa-2: train backbone and heads together, ``L_LM + λ0 · L_Medusa-1``.

    Best after `train_heads`, whose steps are the first of the paper's two stages.

    Parameters
    ----------
    model : PreTrainedModel
        Changed in place, and frozen afterwards; `features` must be its own from before the training.
    heads : MedusaHeads
        Of `model`; changed in place.
    features, recipe, checkpoint, progress
        See `train_heads`.

    Returns
    -------
    list of float
        The loss of every step.

    Raises
    ------
    TypeError, ValueError
        As `train_heads`; a model of another dtype or hidden size than `heads`, one without an LM head, or whose logits
        are not that head's alone, as `train_draft` refuses them.
    """
    check_plain_logits("train_jointly", "model", model)
    check_instance("train_jointly", "heads", heads, MedusaHeads, "MedusaHeads")
    head = model.get_output_embeddings()
    own, given = (str(layer.weight.dtype).removeprefix("torch.") for layer in (heads.w1, head))
    if own != given:
        raise ValueError(f"train_jointly: model must be {own}, as heads are, got {given}")
    if (width := head.weight.shape[1]) != heads.hidden_size:
        raise ValueError(f"train_jointly: model must have hidden_size={heads.hidden_size}, as heads have, got {width}")
    check_run("train_jointly", features, recipe, checkpoint, progress, model=model, heads=heads)
    _check_hidden("train_jointly", features, heads)
    medusa_labels, labels = features.labels(heads.num_heads), features.next_tokens()
    order = Order.of_documents("train_jointly", features, labels, recipe)
    original = head.weight.detach().clone()  # it may be tied to the embeddings, which are trained

    def loss_at(step: int) -> Tensor:
        rows, hidden = hidden_of(model, features, order.batch(step))
        next_tokens = labels[rows].to(hidden.device)
        logits = head(hidden)
        if recipe.distilled:
            before = features.hidden[rows].to(hidden.device, original.dtype)
            loss = distillation_loss(nn.functional.linear(before, original), logits, next_tokens)
        else:
            loss = lm_loss(logits, next_tokens)
        weight = heads_weight(step, recipe.ramp_steps, recipe.final_heads_weight)
        return loss + weight * medusa1_loss(heads, hidden, medusa_labels[rows].to(hidden.device))[0]

    groups = [
        (list(heads.parameters()), recipe.learning_rate),
        (list(model.parameters()), recipe.backbone_learning_rate),
    ]
    modules = {"heads": heads, "model": model}
    return fit(loss_at, groups, modules, order, checkpoint, progress, features.digest())
