"""A small draft model with a target's vocabulary: its start, its training, and how often the target accepts it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import FLOAT_DTYPES, check_instance, check_int, check_model, check_tensor, shape_error
from ..types import TokenMap
from .data import IGNORED, Features, digest
from .fitting import Order, Recipe, check_plain_logits, check_run, fit, hidden_of, product_dtype
from .losses import distillation_loss


def first_layers(model: Any, num_layers: int = 2) -> Any:
    """The target's embeddings, first layers, last norm and LM head: a draft model to be trained by `train_draft`.

    It learns far sooner than a model of its size whose layers start from random weights.

    Parameters
    ----------
    model : PreTrainedModel
        The target. It is not changed, and shares nothing with the result.
    num_layers : int
        ``1 <= num_layers <= num_hidden_layers``.

    Returns
    -------
    PreTrainedModel
        Of the target's class, float32, on its device, in evaluation mode.

    Raises
    ------
    ValueError, TypeError
        More layers than there are; no transformers model.
    """
    caller = "first_layers"
    check_model(caller, "model", model)
    config = copy.deepcopy(model.config)
    of_text = config.get_text_config()
    check_int(caller, "num_layers", num_layers, 1, of_text.num_hidden_layers)
    of_text.num_hidden_layers = num_layers
    if getattr(of_text, "layer_types", None):
        of_text.layer_types = of_text.layer_types[:num_layers]
    draft = type(model)(config)
    weights = model.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    return draft.to(model.device, torch.float32).eval().requires_grad_(False)


def train_draft(
    draft: Any,
    head: Tensor,
    features: Features,
    recipe: Recipe,
    token_map: TokenMap | None = None,
    checkpoint: Path | None = None,
    progress: bool = False,
) -> list[float]:
    """Train a draft model to give the target's distributions: the loss is their KL divergence.

    On self-distilled text this is distillation as of DistillSpec (Zhou et al., arXiv 2310.08461) with the target's
    samples and the forward divergence. Matrix products are in bfloat16 where the
    device multiplies it, weights and optimizer in float32.

    Parameters
    ----------
    draft : PreTrainedModel
        Changed in place; see `first_layers`.
    head : Tensor
        ``[vocab, hidden]``: the target's LM head; its output must not be scaled, capped or biased afterwards.
    features, recipe, checkpoint, progress
        See `train_heads`.
    token_map : TokenMap, optional
        The ids that the draft is to propose: both distributions are conditioned on these.

    Returns
    -------
    list of float
        The loss of every step, in nats.

    Raises
    ------
    TypeError, ValueError
        As `train_heads`; another vocabulary than the draft's; a draft without an LM head, or whose logits are not that
        head's alone, but scaled, capped or biased afterwards.
    """
    caller = "train_draft"
    check_plain_logits(caller, "draft", draft)
    check_run(caller, features, recipe, checkpoint, progress, draft=draft)
    ids = _check_head(caller, head, draft, features, token_map)
    labels = features.next_tokens()
    order = Order.of_documents(caller, features, labels, recipe)
    own_head, of_ids = draft.get_output_embeddings(), head.detach()[ids]

    def loss_at(step: int) -> Tensor:
        with torch.autocast(draft.device.type, torch.bfloat16, product_dtype(draft.device) is torch.bfloat16):
            rows, hidden = hidden_of(draft, features, order.batch(step))
            counted = labels[rows] != IGNORED
            wanted = nn.functional.linear(features.hidden[rows[counted]].to(of_ids), of_ids)
            given = nn.functional.linear(hidden[counted.to(hidden.device)], own_head.weight[ids])
            return distillation_loss(wanted, given, labels[rows[counted]].to(hidden.device))

    groups = [(list(draft.parameters()), recipe.learning_rate)]
    data = digest(features.digest(), head, ids)
    return fit(loss_at, groups, {"draft": draft}, order, checkpoint, progress, data)


@torch.inference_mode()
def acceptance_of(
    draft: Any, head: Tensor, features: Features, token_map: TokenMap | None = None, batch_size: int = 8
) -> tuple[float, float]:
    """How well a draft does on a text: two probabilities, averaged over the tokens that are to be predicted.

    Parameters
    ----------
    draft : PreTrainedModel
    head : Tensor
        ``[vocab, hidden]``: the target's LM head; its output must not be scaled, capped or biased afterwards.
    features : Features
        Of the target, on text that the draft was not trained on.
    token_map : TokenMap, optional
        What the draft proposes; None: any id.
    batch_size : int
        Documents run together.

    Returns
    -------
    sampled : float
        Σ min(P, Q) at temperature 1: the probability that a draft token is accepted (arXiv 2211.17192, corollary 3.6).
    greedy : float
        The share of tokens at which both models find the same token likeliest.

    Raises
    ------
    ValueError, TypeError
        A head of another vocabulary or width; nothing to predict in `features`; a draft that `train_draft` refuses.
    """
    caller = "acceptance_of"
    check_plain_logits(caller, "draft", draft)
    check_instance(caller, "features", features, Features, "Features")
    check_int(caller, "batch_size", batch_size, 1, None)
    ids = _check_head(caller, head, draft, features, token_map)
    of_ids = draft.get_output_embeddings().weight[ids]
    labels = features.next_tokens()
    total = int((labels != IGNORED).sum())
    if total == 0:
        raise ValueError(f"{caller}: features must have tokens to predict, got none")
    sampled = greedy = 0.0
    for documents in torch.arange(len(features.starts), device="cpu").split(batch_size):
        rows, hidden = hidden_of(draft, features, documents)
        for part in (labels[rows] != IGNORED).nonzero()[:, 0].split(512):  # in pieces, as the vocabulary is wide
            wanted = nn.functional.linear(features.hidden[rows[part]].to(head), head)
            given = nn.functional.linear(hidden[part.to(hidden.device)], of_ids)
            sampled += float(torch.minimum(wanted.softmax(-1)[:, ids], given.softmax(-1)).sum())
            greedy += float((wanted.argmax(-1) == ids[given.argmax(-1)]).sum())
    return sampled / total, greedy / total


def _check_head(caller: str, head: Tensor, draft: Any, features: Features, token_map: TokenMap | None) -> Tensor:
    """The ids that the draft is to propose."""
    check_tensor(caller, "head", head, FLOAT_DTYPES, draft.device)
    vocab, hidden = len(draft.get_output_embeddings().weight), features.hidden.shape[1]
    if head.shape != (vocab, hidden):
        raise shape_error(caller, "head", f"[vocab={vocab}, hidden={hidden}]", head)
    if token_map is None:
        return torch.arange(vocab, device=head.device)
    check_instance(caller, "token_map", token_map, TokenMap, "a TokenMap or None")
    if token_map.max_id >= vocab:
        raise ValueError(f"{caller}: token_map must hold ids < vocab={vocab}, got {token_map.max_id}")
    return token_map.draft_to_target.to(head.device)
