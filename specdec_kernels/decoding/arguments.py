"""How `generate` is told to speculate: checked before any work. What every loop is given is a `Request`."""

from __future__ import annotations

from typing import Any

from ..checks import check_flag, check_int
from ..drafters.base import Drafter, TreeDrafter
from ..laws import TargetLaw, check_law
from ..ops.verify_chain import ACCEPTANCES
from .request import MAX_SPECULATIVE_TOKENS
from .runner import Runner
from .step import TREE_RULES


def check_speculation(
    runner: Runner,
    drafter: Drafter,
    num_speculative_tokens: int | str,
    acceptance: str,
    target_law: TargetLaw | None,
) -> None:
    """Raise for the first argument of `generate` that is wrong, of those that say how to speculate."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"generate: drafter must be a Drafter (NoDrafter() for none), got {type(drafter).__name__}")
    if drafter.runner is runner:
        raise ValueError("generate: drafter must have a Runner of its own, got the target's")
    if num_speculative_tokens != "auto":
        if isinstance(num_speculative_tokens, str):
            raise ValueError(
                f"generate: num_speculative_tokens must be an integer or 'auto', got {num_speculative_tokens!r}"
            )
        check_int("generate", "num_speculative_tokens", num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    acceptances = TREE_RULES if isinstance(drafter, TreeDrafter) else ACCEPTANCES
    if not isinstance(acceptance, str) or acceptance not in acceptances:
        raise ValueError(f"generate: acceptance must be one of {', '.join(acceptances)}, got {acceptance!r}")
    if isinstance(drafter, TreeDrafter):
        _check_tree_drafter(runner, drafter, num_speculative_tokens, target_law)
    law = check_law("generate", acceptance, target_law)
    if law is not None and law.is_cascade and not drafter.gives_logits:
        raise ValueError(
            f"generate: this target_law needs a drafter that gives logits, as ModelDrafter, got "
            f"{type(drafter).__name__}: {law!r}"
        )


def _check_tree_drafter(
    runner: Runner, drafter: TreeDrafter, num_speculative_tokens: int | str, target_law: TargetLaw | None
) -> None:
    name = type(drafter).__name__
    if not runner.takes_trees:
        raise ValueError(f"generate: {name} needs a decoder-only target that takes trees, got {runner.name}")
    if drafter.reads_hidden and runner.hidden_size is None:
        raise ValueError(f"generate: {name} needs the target's hidden states, which {runner.name} does not give")
    if num_speculative_tokens == "auto":
        raise ValueError(f"generate: num_speculative_tokens must be an integer: {name} has its tree, got 'auto'")
    if target_law is not None:
        raise ValueError(f"generate: target_law must be None for the one-hot trees of {name}, got {target_law!r}")


def check_streamer(streamer: Any, batch: int) -> None:
    """Raise unless `streamer` can be given the new tokens of `batch` sequences."""
    if hasattr(streamer, "put") and batch != 1:
        raise ValueError(
            f"generate: a streamer with put and end takes a batch of 1, got {batch} sequences; pass a callable, "
            "which is given the new tokens of every sequence"
        )
    takes_batches = callable(streamer) and not hasattr(streamer, "put")
    if streamer is not None and not takes_batches and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"generate: streamer must have put and end, or be callable, got {type(streamer).__name__}")


def check_listeners(stop: object, progress: object) -> None:
    """Raise unless `stop` can be asked and `progress` is a flag."""
    if stop is not None and not callable(stop):
        raise TypeError(f"generate: stop must be callable or None, got {type(stop).__name__}")
    check_flag("generate", "progress", progress)
