"""What follows every step: a streamer, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from ..types import TokenLogprobs
from .output import of_each, origins
from .state import StepResult


def emitter(streamer: Any, prompts: list[np.ndarray], cleanup: ExitStack) -> Callable[[StepResult], None]:
    """What hands each step's tokens to the streamer, after their log-probabilities where it asks for them."""
    give = _giver(streamer, prompts, cleanup)
    if not callable(getattr(streamer, "logprobs", None)):
        return give

    def give_both(result: StepResult) -> None:
        if result.logprobs is not None:
            streamer.logprobs(
                [TokenLogprobs(*(x[b, :n] for x in result.logprobs)) for b, n in enumerate(result.num_tokens)]
            )
        give(result)

    return give_both


def _giver(streamer: Any, prompts: list[np.ndarray], cleanup: ExitStack) -> Callable[[StepResult], None]:
    """What hands the streamer the tokens."""
    if streamer is None:
        return lambda result: None
    if callable(getattr(streamer, "step", None)):
        return lambda result: streamer.step(of_each(result.tokens, result), of_each(origins(result), result))
    if not hasattr(streamer, "put"):
        return lambda result: streamer(of_each(result.tokens, result))
    cleanup.callback(streamer.end)
    streamer.put(torch.from_numpy(prompts[0]))
    return lambda result: streamer.put(torch.from_numpy(result.tokens[0, : result.num_tokens[0]]))


def progress_bar(progress: bool, total: int, cleanup: ExitStack) -> Callable[[StepResult], None]:
    """What moves a bar on by each step's tokens; ModuleNotFoundError where there is no tqdm to show one."""
    if not progress:
        return lambda result: None
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        raise ModuleNotFoundError("generate: progress=True needs tqdm, which is not installed") from None
    bar = cleanup.enter_context(tqdm(total=total, unit="token", desc="generate"))
    return lambda result: bar.update(int(result.num_tokens.sum()))
