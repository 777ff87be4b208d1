"""What every loop is given: checked before any work, and brought into the loop's form."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import ID_DTYPES, check_id_tensor, check_instance, check_int, check_tensor, items
from ..ops._common import check_params
from ..sampling import SamplingParams
from ..types import MASK_DTYPES, TokenMap
from .runner import Prompt, Runner
from .state import DecodingState

MAX_SPECULATIVE_TOKENS = 64
DRAFT_LENGTH = 5
"""Draft tokens where no number is given and "auto" must not choose."""


@dataclass(frozen=True)
class Request:
    """What every loop is asked for; the attributes are parameters of `generate`."""

    input_ids: Tensor
    attention_mask: Tensor | None
    sampling: SamplingParams
    seeds: Tensor | None
    max_new_tokens: int
    eos_token_id: int | Iterable[int] | None

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self.input_ids.shape[0]

    def check(self, caller: str, runner: Runner) -> None:
        """Raise for the first attribute that is wrong; `eos_token_id` is checked by `ends`."""
        _check_ids(caller, runner, self.input_ids)
        batch, length = self.input_ids.shape
        if self.attention_mask is not None:
            _check_mask(caller, runner, self.attention_mask, batch, length)
            length = int((self.attention_mask != 0).sum(1).max())
        else:
            _check_unpadded(caller, runner, self.input_ids)
        check_instance(caller, "sampling", self.sampling, SamplingParams, "a SamplingParams")
        check_params(caller, "sampling", self.sampling, batch, runner.device)
        if self.seeds is not None:
            _check_seeds(caller, self.seeds, batch)
        check_int(caller, "max_new_tokens", self.max_new_tokens, 1, 2**31 - 1)
        reached = (1 if runner.decoder_start is not None else length) + self.max_new_tokens
        if runner.max_length is not None and reached > runner.max_length:
            raise ValueError(
                f"{caller}: {runner.name} holds {runner.max_length} positions, but prompt and max_new_tokens need "
                f"{reached}"
            )

    def ends(self, caller: str, runner: Runner) -> Tensor | None:
        """``[num_eos]`` int64 ids that end a sequence, or None; raises for invalid ids."""
        wanted: Any = runner.end_ids if self.eos_token_id is None else self.eos_token_id
        got = type(wanted).__name__
        given = items(wanted)
        try:
            if any(isinstance(i, bool) for i in given):  # which Python takes for 0 and 1
                raise TypeError
            ids = [operator.index(i) for i in given]
        except TypeError:
            raise TypeError(f"{caller}: eos_token_id must be an integer or several, got {got}") from None
        bad = [i for i in ids if not 0 <= i < runner.vocab_size]
        if bad and self.eos_token_id is not None:
            raise ValueError(f"{caller}: eos_token_id must be in [0, vocab={runner.vocab_size}), got {bad[0]}")
        ids = [i for i in ids if i not in bad]  # a config's −1 means "none", and would match the loop's placeholders
        return torch.tensor(ids, dtype=torch.int64, device=runner.device) if ids else None

    def prompt(self, runner: Runner) -> Prompt:
        """The prompts without their padding: left-aligned on the device, and on the host."""
        ids = self.input_ids.to(torch.int64)
        mask = torch.ones_like(ids) if self.attention_mask is None else (self.attention_mask != 0).to(ids)
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

    def make_seeds(self, runner: Runner) -> Tensor:
        """``[batch]`` int64 on the device; drawn from torch's default generator if not given."""
        return (draw_seeds(self.batch_size) if self.seeds is None else self.seeds).to(runner.device)


def draw_seeds(batch_size: int) -> Tensor:
    """``[batch]`` int64 on the CPU, from torch's default generator."""
    return torch.randint(0, 2**63 - 1, (batch_size,), dtype=torch.int64, device="cpu")


def check_draft(
    caller: str, draft: Runner, state: DecodingState, params_name: str, params: SamplingParams | None,
    token_map: TokenMap | None = None,
) -> None:  # fmt: skip
    """Raise unless the model `draft` can draft for the target of `state`, with its sampling parameters `params`; its
    logits are of the ids of `token_map`, if there is one.
    """
    if token_map is not None:
        if draft.vocab_size != len(token_map) or token_map.max_id >= state.vocab_size:
            raise ValueError(
                f"{caller}: the draft's token_map must be of its {draft.vocab_size} logits and hold ids < "
                f"vocab={state.vocab_size}, got {len(token_map)} ids up to {token_map.max_id}"
            )
    elif draft.vocab_size != state.vocab_size:
        raise ValueError(
            f"{caller}: target and draft must share one tokenizer, but the target's vocabulary has "
            f"{state.vocab_size} ids and the draft's ({draft.name}) {draft.vocab_size}"
        )
    if draft.device != state.device:
        raise ValueError(f"{caller}: the draft ({draft.name}) must be on {state.device}, got {draft.device}")
    if (draft.decoder_start is None) != (state.prompt.source_tokens is None):
        raise ValueError(f"{caller}: target and draft ({draft.name}) must both be decoders, or both encoder-decoders")
    check_room(caller, draft, state.max_length)
    check_params(caller, params_name, params, state.batch_size, state.device)


def check_room(caller: str, draft: Runner, needed: int) -> None:
    """Raise unless the model `draft` holds so many positions."""
    if draft.max_length is not None and needed > draft.max_length:
        raise ValueError(f"{caller}: the draft ({draft.name}) holds {draft.max_length} positions, {needed} are needed")


def check_real(caller: str, runner: Runner) -> None:
    """ValueError if a model's weights hold no values."""
    if runner.device.type == "meta":
        raise ValueError(f"{caller}: {runner.name} must have its weights, got them on meta (offloaded, or not loaded)")


def _check_ids(caller: str, runner: Runner, input_ids: Tensor) -> None:
    check_real(caller, runner)
    check_id_tensor(caller, "input_ids", input_ids, ID_DTYPES)
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"{caller}: input_ids must be [batch >= 1, prompt >= 1], got {list(input_ids.shape)}")
    if input_ids.device != runner.device:
        raise ValueError(f"{caller}: input_ids must be on {runner.device}, got {input_ids.device}")
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= runner.vocab_size:
        raise ValueError(f"{caller}: input_ids must be in [0, vocab={runner.vocab_size}), got {lowest} … {highest}")


def _check_mask(caller: str, runner: Runner, attention_mask: Tensor, batch: int, length: int) -> None:
    check_tensor(caller, "attention_mask", attention_mask, MASK_DTYPES, runner.device)
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"{caller}: attention_mask must be [batch={batch}, prompt={length}], got {list(attention_mask.shape)}"
        )
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


def _check_unpadded(caller: str, runner: Runner, input_ids: Tensor) -> None:
    """Refuse ids that look padded: they would be decoded with their padding."""
    ends = [0] if runner.decoder_start is None else [0, -1]
    padded = (input_ids[:, ends] == runner.prompt_padding).any(1) if runner.prompt_padding is not None else None
    if padded is not None and bool(padded.any()):
        where = "begin" if runner.decoder_start is None else "begin or end"
        raise ValueError(
            f"{caller}: attention_mask must be given where rows {where} with the padding id {runner.prompt_padding} "
            f"(ones where it counts as a token), got None, and row {int(padded.int().argmax())} does"
        )


def _check_seeds(caller: str, seeds: Tensor, batch: int) -> None:
    check_id_tensor(caller, "seeds", seeds, (torch.int64,))
    if seeds.device.type == "meta":
        raise ValueError(f"{caller}: seeds must hold numbers, got a tensor on meta")
    if tuple(seeds.shape) != (batch,):
        raise ValueError(f"{caller}: seeds must be [batch={batch}], got {list(seeds.shape)}")
