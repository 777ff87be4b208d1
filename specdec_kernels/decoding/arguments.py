"""Checks, before any work, how `generate` is told to speculate. What every loop is given is a `Request`."""

from __future__ import annotations

from typing import Any

from ..checks import check_flag, check_instance, check_int, check_one_of
from ..drafters.base import Drafter, TreeDrafter
from ..laws import BiLD, TargetLaw, check_law
from ..ops.arguments import ACCEPTANCES
from ..ops.token_logprobs import MAX_TOP
from ..ops.verify_tree import check_thresholds
from ..processors import Processors
from ..tree import MAX_DEPTH, MAX_NODES
from .costs import AUTO_DRAFT_LENGTHS, CostTable
from .grammar import Grammar
from .request import MAX_SPECULATIVE_TOKENS
from .runner import Runner
from .step import TREE_RULES


def check_speculation(
    runner: Runner,
    drafter: Drafter,
    num_speculative_tokens: int | str | CostTable,
    acceptance: str,
    target_law: TargetLaw | None,
    epsilon: float,
    delta: float,
) -> None:
    """Raise for the first wrong argument of `generate` among those that say how to speculate."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"generate: drafter must be a Drafter (NoDrafter() for none), got {type(drafter).__name__}")
    check_own_runner("generate", runner, drafter)
    check_draft_length("generate", num_speculative_tokens)
    if isinstance(num_speculative_tokens, CostTable):
        _check_costs(num_speculative_tokens, drafter)
    check_acceptance("generate", acceptance, drafter)
    if isinstance(drafter, TreeDrafter):
        _check_tree_drafter(runner, drafter, target_law)
    check_thresholds("generate", epsilon, delta)
    law = check_law("generate", acceptance, target_law)
    if law is not None and law.is_cascade and not drafter.gives_logits:
        raise ValueError(
            f"generate: this target_law needs a drafter that gives logits, as ModelDrafter, got "
            f"{type(drafter).__name__}: {law!r}"
        )
    if isinstance(law, BiLD) and law.distance == "argmax" and getattr(drafter, "token_map", None) is not None:
        raise ValueError("generate: BiLD with distance='argmax' must have a drafter without a token_map, got one")


def check_own_runner(caller: str, runner: Runner, drafter: Drafter) -> None:
    """ValueError if the drafter drafts with the target's `Runner`."""
    if drafter.runner is runner:
        raise ValueError(f"{caller}: drafter must have a Runner of its own, got the target's")


def check_acceptance(caller: str, acceptance: object, drafter: Drafter) -> None:
    """ValueError unless a rule for what `drafter` drafts."""
    check_one_of(caller, "acceptance", acceptance, TREE_RULES if isinstance(drafter, TreeDrafter) else ACCEPTANCES)


def check_draft_length(caller: str, num_speculative_tokens: object) -> None:
    """Raise unless a number of draft tokens, "auto" or a `CostTable`."""
    if isinstance(num_speculative_tokens, str) and num_speculative_tokens != "auto":
        raise ValueError(
            f"{caller}: num_speculative_tokens must be an integer, 'auto' or a CostTable, got "
            f"{num_speculative_tokens!r}"
        )
    if not isinstance(num_speculative_tokens, (str, CostTable)):
        check_int(caller, "num_speculative_tokens", num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)


def _check_costs(costs: CostTable, drafter: Drafter) -> None:
    num, expected = costs.seconds.shape[1], 2 if isinstance(drafter, TreeDrafter) else len(AUTO_DRAFT_LENGTHS)
    if num != expected:
        raise ValueError(
            f"generate: num_speculative_tokens must be a CostTable with seconds [revisions, {expected}] beside "
            f"{type(drafter).__name__}, got [{len(costs.seconds)}, {num}]"
        )


def _check_tree_drafter(runner: Runner, drafter: TreeDrafter, target_law: TargetLaw | None) -> None:
    name = type(drafter).__name__
    for size, most in (("num_nodes", MAX_NODES), ("max_depth", MAX_DEPTH)):
        check_int("generate", f"drafter.{size}", getattr(drafter, size, None), 1, most)
    if not runner.takes_trees:
        raise ValueError(f"generate: {name} needs a decoder-only target that takes trees, got {runner.name}")
    if drafter.reads_hidden and runner.hidden_size is None:
        raise ValueError(
            f"generate: {name} needs the target's hidden states, which {runner.name} does not give, "
            "nor any compiled model"
        )
    if target_law is not None:
        raise ValueError(f"generate: target_law must be None for the one-hot trees of {name}, got {target_law!r}")


def check_processors(runner: Runner, processors: object, batch: int, max_new_tokens: int) -> None:
    """Raise unless the loop can serve the target's `processors`, whose counts it keeps."""
    if processors is None:
        return
    check_instance("generate", "processors", processors, Processors, "a Processors or None")
    assert isinstance(processors, Processors)
    if processors.token_bitmask is not None:
        raise ValueError(
            "generate: processors must have no token_bitmask, which is a step's own (give a grammar), got one"
        )
    num = processors._lists(runner.device, runner.vocab_size).num
    if num not in (1, batch):
        raise ValueError(f"generate: processors must be of 1 or batch={batch} sequences, got {num}")
    counts = processors.token_counts
    if counts is None:
        return
    if len(counts) != batch or counts.ids.device != runner.device:
        raise ValueError(
            f"generate: processors.token_counts must be of batch={batch} sequences on {runner.device}, got "
            f"{len(counts)} on {counts.ids.device}"
        )
    if counts.max_new_tokens < max_new_tokens:
        raise ValueError(
            f"generate: processors.token_counts must have room for max_new_tokens={max_new_tokens}, got "
            f"{counts.max_new_tokens}"
        )
    if bool((counts.num_output != 0).any()):  # else min_tokens and penalties would count another answer
        raise ValueError(
            "generate: processors.token_counts must be new, made for this call's prompts, got some that a call has "
            "counted into"
        )


def check_grammar(grammar: object, target_law: TargetLaw | None) -> None:
    """Raise unless the loop can ask `grammar` for masks, and these bar what they should."""
    if grammar is None:
        return
    check_instance("generate", "grammar", grammar, Grammar, "a Grammar or None")
    if isinstance(target_law, TargetLaw) and target_law.is_cascade:
        raise ValueError(
            f"generate: grammar must be None with a cascade, which may emit what the draft drew, got {target_law!r}"
        )


def check_streamer(streamer: Any, batch: int) -> None:
    """Raise unless `streamer` can be given the new tokens of `batch` sequences."""
    if streamer is None or callable(getattr(streamer, "step", None)):
        return
    if hasattr(streamer, "put") and batch != 1:
        raise ValueError(
            f"generate: a streamer with put and end takes a batch of 1, got {batch} sequences; pass a callable, "
            "which is given the new tokens of every sequence"
        )
    takes_batches = callable(streamer) and not hasattr(streamer, "put")
    if not takes_batches and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"generate: streamer must have put and end, or step, or be callable, got {type(streamer).__name__}"
        )


def check_listeners(stop: object, progress: object) -> None:
    """Raise unless `stop` can be asked and `progress` is a flag."""
    if stop is not None and not callable(stop):
        raise TypeError(f"generate: stop must be callable or None, got {type(stop).__name__}")
    check_flag("generate", "progress", progress)


def check_logprobs(return_logprobs: object) -> None:
    """Raise unless a number of ids to be listed, or None."""
    if return_logprobs is not None:
        check_int("generate", "return_logprobs", return_logprobs, 0, MAX_TOP)
