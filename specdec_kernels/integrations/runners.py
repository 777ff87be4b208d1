"""Which integration serves a model."""

from __future__ import annotations

from typing import Any

from ..decoding.runner import Runner
from .transformers.models import ENCODER_DECODERS, check_served


def as_runner(model: Any, caller: str, name: str = "") -> Runner:
    """`model` itself if it is a `Runner`, else one that runs it.

    Raises
    ------
    ValueError
        A model that cannot be served, by name, with the reason; begins with `caller`, and with the argument's `name`
        where there are several models.
    """
    if isinstance(model, Runner):
        return model
    check_served(model, caller, name)
    # Only now is transformers needed, and known to be there.
    if model.config.model_type in ENCODER_DECODERS:
        from .transformers.encoder_decoder import EncoderDecoderRunner

        return EncoderDecoderRunner(model)
    from .transformers.decoder import DecoderRunner

    return DecoderRunner(model)
