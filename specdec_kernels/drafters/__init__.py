"""Where draft tokens come from: a file for each drafter, with a `Drafter` in it."""

from __future__ import annotations

from .base import Draft, Drafter, Foresight, TreeDrafter
from .medusa import MedusaDrafter
from .model import ModelDrafter
from .model_tree import ModelTreeDrafter
from .ngram import NgramDrafter
from .ngram_lm import NgramLMDrafter
from .ngram_table import NgramTable
from .ngram_tree import NgramTreeDrafter
from .none import NoDrafter

__all__ = [
    "Draft",
    "Drafter",
    "Foresight",
    "MedusaDrafter",
    "ModelDrafter",
    "ModelTreeDrafter",
    "NgramDrafter",
    "NgramLMDrafter",
    "NgramTable",
    "NgramTreeDrafter",
    "NoDrafter",
    "TreeDrafter",
]
