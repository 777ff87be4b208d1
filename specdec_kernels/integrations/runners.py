"""Which integration serves a model."""

from __future__ import annotations

from typing import Any

from ..decoding.runner import Runner
from ..types import TokenMap
from .transformers.models import ENCODER_DECODERS, check_served


def as_runner(model: Any, caller: str, name: str = "", token_map: TokenMap | None = None) -> Runner:
    """`model` itself if it is a `Runner`, else one that runs it; with a `token_map`, one that gives logits of its ids.

    Raises
    ------
    ValueError
        A model that cannot be served, by name, with the reason; begins with `caller`, and with the argument's `name`
        where there are several models. A `token_map` with ids that it does not have, or for a model with a wrapper or
        hooks, whose head cannot be replaced without changing the caller's model.
    """
    if isinstance(model, Runner):
        return model
    check_served(model, caller, name)
    vocab = len(model.get_output_embeddings().weight)
    if token_map is not None:
        if token_map.max_id >= vocab:
            raise ValueError(f"{caller}: token_map must hold ids < vocab={vocab}, got {token_map.max_id}")
        model = model._modules.get("_orig_mod", model)  # of one that is compiled
        if "forward" in vars(model) or getattr(model.set_output_embeddings, "__self__", None) is not model:
            raise ValueError(
                f"{caller}: token_map (or config.draft_token_ids) must be of a model without hooks that is no wrapper "
                f"around another, got one of {type(model).__name__}"
            )
    # Only now is transformers needed, and known to be there.
    if model.config.model_type in ENCODER_DECODERS:
        from .transformers.encoder_decoder import EncoderDecoderRunner

        return EncoderDecoderRunner(model, token_map)
    from .transformers.decoder import DecoderRunner

    return DecoderRunner(model, token_map)
