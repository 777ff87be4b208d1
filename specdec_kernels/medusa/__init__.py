"""Medusa: heads beside the LM head that draft several tokens at once, their training and calibration; and the
training of a small draft model on the same text.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv
2401.10774).
"""

from __future__ import annotations

from pathlib import Path

from ..drafters.medusa_heads import MedusaHeads
from .calibrate import count_accuracy, falling
from .data import Document, Features, extract, prepare
from .draft_model import acceptance_of, first_layers, train_draft
from .fitting import Recipe
from .losses import distillation_loss, heads_weight, linear_cross_entropy, lm_loss, medusa1_loss
from .train import choose_vocabulary, train_heads, train_jointly

SHIPPED_HEADS = Path(__file__).with_name("smollm2-135m-instruct.safetensors")
"""Trained and calibrated heads of the demo's model; their card stands beside them."""

__all__ = [
    "SHIPPED_HEADS",
    "Document",
    "Features",
    "MedusaHeads",
    "Recipe",
    "acceptance_of",
    "choose_vocabulary",
    "count_accuracy",
    "distillation_loss",
    "extract",
    "falling",
    "first_layers",
    "heads_weight",
    "linear_cross_entropy",
    "lm_loss",
    "medusa1_loss",
    "prepare",
    "train_draft",
    "train_heads",
    "train_jointly",
]
