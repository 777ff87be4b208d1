"""Drafters by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..assets import corpus as stdlib
from ..drafters import (
    Drafter,
    MedusaDrafter,
    ModelDrafter,
    NgramDrafter,
    NgramLMDrafter,
    NgramTreeDrafter,
    NoDrafter,
)
from ..drafters.medusa_heads import MedusaHeads
from ..integrations.transformers.packing import is_packed, pack_linear_weights

__all__ = ["COMPARED", "NAMES", "make"]

COMPARED = ("lookup", "ngram-lm", "medusa")
"""What a plan compares."""
NAMES = (*COMPARED, "lookup-tree", "none")


def make(
    names: Sequence[str],
    model: Any,
    tokenizer: Any,
    *,
    corpus: bool,
    heads: Path | None = None,
    draft_model: Any = None,
) -> dict[str, Drafter]:
    """Drafters by their names, and one called "model" where a `draft_model` is given.

    Parameters
    ----------
    names : sequence of str
        Of `NAMES`.
    model, tokenizer
        The target and its tokenizer.
    corpus : bool
        "ngram-lm" begins with the counts of the standard library, which are in the tokens of the demo's model; else it
        knows the text alone.
    heads : Path, optional
        Medusa's; None: those shipped for the demo's model.
    draft_model : optional
        Of `ModelDrafter`. Where the target's weights are packed, its float32 weights and those of heads are packed too.

    Raises
    ------
    ValueError, OSError, AssetError
        No such drafter; heads that are not there, not the model's or not calibrated; a text that cannot be read.
    """
    from ..medusa import SHIPPED_HEADS

    made: dict[str, Drafter] = {}
    for name in names:
        if name == "lookup":
            made[name] = NgramDrafter()
        elif name == "ngram-lm":
            made[name] = NgramLMDrafter(stdlib.ngram_table(tokenizer) if corpus else None)
        elif name == "medusa":
            loaded = MedusaHeads.load(heads or SHIPPED_HEADS, model)
            drafter = MedusaDrafter(loaded)
            if is_packed(model):
                pack_linear_weights(loaded)
            made[name] = drafter
        elif name == "lookup-tree":
            made[name] = NgramTreeDrafter()
        elif name == "none":
            made[name] = NoDrafter()
        else:
            raise ValueError(f"make: names must be of {', '.join(NAMES)}, got {name!r}")
    if draft_model is not None:
        if is_packed(model) and draft_model.dtype == torch.float32:
            pack_linear_weights(draft_model)
        made["model"] = ModelDrafter(draft_model)
    return made
