"""What a loop was given: checked before any work, and brought into the loop's form."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Drafter, TreeDrafter
from ..laws import Lossy, TargetLaw, check_law
from ..ops._common import check_params
from ..sampling import SamplingParams
from .runner import Prompt, Runner
from .state import DecodingState

ACCEPTANCES = ("token", "block", "match", "greedy")
TREE_ACCEPTANCES = (*ACCEPTANCES, "typical")
MAX_SPECULATIVE_TOKENS = 64


def check_arguments(
    runner: Runner,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    drafter: Drafter,
    sampling: SamplingParams,
    seeds: Tensor | None,
    max_new_tokens: int,
    num_speculative_tokens: int | str,
    acceptance: str,
    target_law: TargetLaw | None,
    streamer: Any,
) -> None:
    """Raise for the first argument of `generate` that is wrong."""
    check_text("generate", runner, input_ids, attention_mask, sampling, seeds, max_new_tokens)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"generate: drafter must be a Drafter (NoDrafter() for none), got {type(drafter).__name__}")
    if getattr(drafter, "runner", None) is runner:
        raise ValueError("generate: drafter must have a Runner of its own, got the target's")
    if num_speculative_tokens != "auto":
        if isinstance(num_speculative_tokens, str):
            raise ValueError(
                f"generate: num_speculative_tokens must be an integer or 'auto', got {num_speculative_tokens!r}"
            )
        check_int("generate", "num_speculative_tokens", num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    acceptances = TREE_ACCEPTANCES if isinstance(drafter, TreeDrafter) else ACCEPTANCES
    if acceptance not in acceptances:
        raise ValueError(f"generate: acceptance must be one of {', '.join(acceptances)}, got {acceptance!r}")
    if isinstance(drafter, TreeDrafter):
        _check_tree_drafter(runner, drafter, num_speculative_tokens, target_law)
    law = check_law("generate", acceptance, target_law)
    if law is not None and not isinstance(law, Lossy) and not drafter.gives_logits:
        raise ValueError(
            f"generate: this target_law needs a drafter that gives logits, as ModelDrafter, got "
            f"{type(drafter).__name__}: {law!r}"
        )
    batch = input_ids.shape[0]
    if hasattr(streamer, "put") and batch != 1:
        raise ValueError(
            f"generate: a streamer with put and end takes a batch of 1, got {batch} sequences; pass a callable, "
            "which is given the new tokens of every sequence"
        )
    if streamer is not None and not hasattr(streamer, "put") and not callable(streamer):
        raise TypeError(f"generate: streamer must have put and end, or be callable, got {type(streamer).__name__}")


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


def check_text(
    caller: str,
    runner: Runner,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    sampling: SamplingParams,
    seeds: Tensor | None,
    max_new_tokens: int,
) -> None:
    """Raise for the first wrong one of the arguments that every loop takes."""
    _check_ids(caller, runner, input_ids)
    batch, length = input_ids.shape
    if attention_mask is not None:
        _check_mask(caller, runner, attention_mask, batch, length)
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"{caller}: sampling must be a SamplingParams, got {type(sampling).__name__}")
    check_params(caller, "sampling", sampling, batch, runner.device)
    if seeds is not None:
        if not isinstance(seeds, Tensor) or seeds.dtype != torch.int64:
            raise TypeError(
                f"{caller}: seeds must be an int64 tensor, got {getattr(seeds, 'dtype', type(seeds).__name__)}"
            )
        if tuple(seeds.shape) != (batch,):
            raise ValueError(f"{caller}: seeds must be [batch={batch}], got {list(seeds.shape)}")
    check_int(caller, "max_new_tokens", max_new_tokens, 1, 2**31 - 1)
    reached = (1 if runner.decoder_start is not None else length) + max_new_tokens
    if runner.max_length is not None and reached > runner.max_length:
        raise ValueError(
            f"{caller}: {runner.name} holds {runner.max_length} positions, but prompt and max_new_tokens need {reached}"
        )


def check_draft(
    caller: str, draft: Runner, state: DecodingState, params_name: str, params: SamplingParams | None
) -> None:
    """Raise unless the model `draft` can draft for the target of `state`, with its sampling parameters `params`."""
    if draft.vocab_size != state.vocab_size:
        raise ValueError(
            f"{caller}: target and draft must share one tokenizer, but the target's vocabulary has "
            f"{state.vocab_size} ids and the draft's ({draft.name}) {draft.vocab_size}"
        )
    if draft.device != state.device:
        raise ValueError(f"{caller}: the draft ({draft.name}) must be on {state.device}, got {draft.device}")
    if (draft.decoder_start is None) != (state.prompt.source_tokens is None):
        raise ValueError(f"{caller}: target and draft ({draft.name}) must both be decoders, or both encoder-decoders")
    if draft.max_length is not None and state.max_length > draft.max_length:
        held, needed = draft.max_length, state.max_length
        raise ValueError(f"{caller}: the draft ({draft.name}) holds {held} positions, {needed} are needed")
    check_params(caller, params_name, params, state.batch_size, state.device)


def _check_ids(caller: str, runner: Runner, input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise TypeError(f"{caller}: input_ids must be an int64 or int32 tensor, got {got}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"{caller}: input_ids must be [batch >= 1, prompt >= 1], got {list(input_ids.shape)}")
    if input_ids.device != runner.device:
        raise ValueError(f"{caller}: input_ids must be on {runner.device}, got {input_ids.device}")
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= runner.vocab_size:
        raise ValueError(f"{caller}: input_ids must be in [0, vocab={runner.vocab_size}), got {lowest} … {highest}")


def _check_mask(caller: str, runner: Runner, attention_mask: Tensor, batch: int, length: int) -> None:
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"{caller}: attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"{caller}: attention_mask must be [batch={batch}, prompt={length}], got {list(attention_mask.shape)}"
        )
    if attention_mask.device != runner.device:
        raise ValueError(f"{caller}: attention_mask must be on {runner.device}, got {attention_mask.device}")
    kept = attention_mask != 0
    empty = ~kept.any(1)
    if bool(empty.any()):
        raise ValueError(
            f"{caller}: attention_mask must keep a token in every row, row {int(empty.int().argmax())} is empty"
        )
    if runner.decoder_start is None:
        holes = (kept[:, :-1] & ~kept[:, 1:]).any(1)
        if bool(holes.any()):
            row = int(holes.int().argmax())
            raise ValueError(f"{caller}: attention_mask must pad on the left (zeros, then ones), row {row} does not")


def check_int(caller: str, name: str, value: object, lowest: int, highest: int) -> None:
    """Raise unless `value` is an integer in ``[lowest, highest]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}: {name} must be an integer, got {type(value).__name__}")
    if not lowest <= value <= highest:
        raise ValueError(f"{caller}: {name} must be in [{lowest}, {highest}], got {value}")


def check_number(caller: str, name: str, value: object, lowest: float, highest: float) -> None:
    """Raise unless `value` is a number in ``[lowest, highest]``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{caller}: {name} must be a number, got {type(value).__name__}")
    if not lowest <= value <= highest:
        raise ValueError(f"{caller}: {name} must be in [{lowest}, {highest}], got {value}")


def make_prompt(runner: Runner, input_ids: Tensor, attention_mask: Tensor | None) -> Prompt:
    """The prompts without their padding: left-aligned on the device, and on the host."""
    ids = input_ids.to(torch.int64)
    mask = torch.ones_like(ids) if attention_mask is None else (attention_mask != 0).to(ids)
    batch = ids.shape[0]
    # Bool indexing and copies to the host are fine here: this is once a call, before the first step.
    host = [row[keep] for row, keep in zip(ids.cpu().numpy(), mask.cpu().numpy().astype(bool), strict=True)]
    if runner.decoder_start is not None:
        start = np.array([runner.decoder_start], dtype=np.int64)
        tokens = ids.new_full((batch, 1), runner.decoder_start)
        return Prompt(tokens, ids.new_ones(batch), [start] * batch, ids, mask, host)
    longest = max(map(len, host))
    aligned = np.zeros((batch, longest), dtype=np.int64)
    for row, text in zip(aligned, host, strict=True):
        row[: len(text)] = text
    return Prompt(torch.from_numpy(aligned).to(runner.device), mask.sum(1), host)


def make_seeds(seeds: Tensor | None, runner: Runner, batch: int) -> Tensor:
    """``[batch]`` int64 on the device; drawn from torch's default generator if not given."""
    if seeds is None:
        seeds = torch.randint(0, 2**63 - 1, (batch,), dtype=torch.int64)
    return seeds.to(runner.device)


def end_ids(caller: str, model: Any, runner: Runner, eos_token_id: int | Iterable[int] | None) -> Tensor | None:
    """``[num_eos]`` int64 ids that end a sequence, or None."""
    wanted: Any = eos_token_id
    if wanted is None:
        config = getattr(model, "generation_config", None) or getattr(model, "config", None)
        wanted = getattr(config, "eos_token_id", None)
        if wanted is None:
            return None
    try:
        ids = [operator.index(i) for i in (wanted if isinstance(wanted, Iterable) else [wanted])]
    except TypeError:
        raise TypeError(f"{caller}: eos_token_id must be an integer or several, got {type(wanted).__name__}") from None
    bad = [i for i in ids if not 0 <= i < runner.vocab_size]
    if bad and eos_token_id is not None:
        raise ValueError(f"{caller}: eos_token_id must be in [0, vocab={runner.vocab_size}), got {bad[0]}")
    ids = [i for i in ids if i not in bad]  # a config's −1 means "none", and would match the loop's placeholders
    return torch.tensor(ids, dtype=torch.int64, device=runner.device) if ids else None


def padding_id(model: Any) -> int:
    """What fills `GenerationOutput.sequences` after a sequence's end: the model's padding id, or an end id, or 0."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(config, name, None)
            if isinstance(value, (list, tuple)):
                value = value[0] if value else None
            if value is not None:
                return int(value)
    return 0
