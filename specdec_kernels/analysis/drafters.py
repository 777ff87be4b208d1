"""Drafters by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..assets import corpus as stdlib
from ..drafters import (
    Drafter,
    MedusaDrafter,
    ModelDrafter,
    ModelTreeDrafter,
    NgramDrafter,
    NgramLMDrafter,
    NgramTreeDrafter,
    NoDrafter,
)
from ..drafters.medusa_heads import MedusaHeads
from ..integrations.runners import as_runner
from ..integrations.transformers.packing import is_packed, pack_linear_weights

__all__ = ["COMPARED", "NAMES", "OF_DRAFT_MODEL", "OF_TREES", "PLANNED", "check_heads", "make", "of_draft_model"]

COMPARED = ("lookup", "ngram-lm", "medusa")
"""What a plan compares by default."""
PLANNED = (*COMPARED, "lookup-tree")
"""What a plan can compare without a draft model."""
NAMES = (*PLANNED, "none")
"""What needs no draft model."""
OF_DRAFT_MODEL = ("model", "model-tree")
"""What needs one."""
OF_TREES = ("medusa", "lookup-tree", "model-tree")
"""What drafts trees."""


def of_draft_model(model: Any, draft_model: Any) -> tuple[str, ...]:
    """Those of `OF_DRAFT_MODEL` that serve: trees where both models take them."""
    takes_trees = all(as_runner(each, "plan").takes_trees for each in (model, draft_model))
    return OF_DRAFT_MODEL if takes_trees else OF_DRAFT_MODEL[:1]


def check_heads(names: Sequence[str], model: Path | None, heads: Path | None) -> None:
    """ValueError if Medusa is to draft for a `model` other than the demo's and its heads are not given."""
    if "medusa" in names and model is not None and heads is None:
        raise ValueError("--drafter medusa needs --heads, the Medusa heads of --model")


def make(
    names: Sequence[str],
    model: Any,
    tokenizer: Any,
    *,
    corpus: bool,
    heads: Path | None = None,
    draft_model: Any = None,
    min_confidence: float = 0.0,
) -> dict[str, Drafter]:
    """Drafters by their names.

    Parameters
    ----------
    names : sequence of str
        Of `NAMES` and `OF_DRAFT_MODEL`.
    model, tokenizer
        The target and its tokenizer.
    corpus : bool
        "ngram-lm" begins with the counts of the standard library, which are in the tokens of the demo's model; else it
        knows the text alone.
    heads : Path, optional
        Medusa's; None: those shipped for the demo's model.
    draft_model : optional
        For "model", a `ModelDrafter`, and "model-tree", a `ModelTreeDrafter`; not touched if `names` has neither. If
        the target's weights are packed, those of heads are packed too, and those of the draft model if it is a
        transformers model in float32 that is not packed yet.
    min_confidence : float
        Of "model": see `ModelDrafter`.

    Raises
    ------
    ValueError, OSError, AssetError
        No such drafter; a draft model that is not given, or takes no trees; heads that are not there, not the model's
        or not calibrated; a text that cannot be read.
    """
    from ..medusa import SHIPPED_HEADS

    asked = any(name in OF_DRAFT_MODEL for name in names)
    if asked and is_packed(model) and isinstance(draft_model, nn.Module) and not is_packed(draft_model):
        if getattr(draft_model, "dtype", None) == torch.float32:
            pack_linear_weights(draft_model)
    made: dict[str, Drafter] = {}
    for name in names:
        if name in OF_DRAFT_MODEL and draft_model is None:
            raise ValueError(f"make: draft_model must be given for {name!r}, got None")
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
        elif name == "model":
            made[name] = ModelDrafter(draft_model, min_confidence=min_confidence)
        elif name == "model-tree":
            made[name] = ModelTreeDrafter(draft_model)
        else:
            raise ValueError(f"make: names must be of {', '.join((*NAMES, *OF_DRAFT_MODEL))}, got {name!r}")
    return made
