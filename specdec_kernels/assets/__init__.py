"""A real model and real texts, for the demo, for training and calibration, and for the benchmarks.

Prompt sets are in `prompts`, the n-gram counts of a body of text in `corpus`.
"""

from __future__ import annotations

from .fetch import AssetError, Say, print_to_stderr
from .model import MODEL_NAME, load_folder, load_model, model_dir
from .texts import gsm8k, human_eval, mt_bench

__all__ = [
    "MODEL_NAME",
    "AssetError",
    "Say",
    "gsm8k",
    "human_eval",
    "load_folder",
    "load_model",
    "model_dir",
    "mt_bench",
    "print_to_stderr",
]
