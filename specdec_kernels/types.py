"""What the ops take and return besides plain tensors.

Named tuples, because a verify call has to cost microseconds: building one takes a third of what a dataclass takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntFlag
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .checks import MAX_VOCAB, check_device, check_id_tensor, check_int, check_sequence, check_tensor

PLACEHOLDER_TOKEN_ID = -1
"""Fills the slots of an output that hold no token."""


NO_ID = 2**31 - 1
"""Pads ascending lists of ids after the last one."""
MASK_DTYPES = (
    torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float64, torch.float32,
    torch.bfloat16, torch.float16,
)  # fmt: skip
"""Dtypes that an attention mask may have."""


def writing_to(tensor: Tensor) -> AbstractContextManager[object]:
    """Where something is written to it: torch refuses that for an inference tensor outside of inference mode."""
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


class Status(IntFlag):
    """What a row's values turned out to hold; ``VerifyOutput.status`` and ``RowStats.status`` are OR-ed from these."""

    OK = 0
    NAN = 1
    """A NaN logit (read as −inf) or probability."""
    INF = 2
    """A +inf logit, or a +inf probability where probabilities are given: the lowest such id takes all the mass. (In
    `draft_probs`: BAD_DRAFT instead.)"""
    EMPTY_ROW = 4
    """No id is possible (every logit is −inf or NaN, or no given probability is at least 2**-126): all mass is put on
    id 0. (In `draft_probs`: BAD_DRAFT instead.)"""
    BAD_TOKEN = 8
    """A draft token outside [−1, vocab): the sequence's draft ends before it. Or a given bonus token outside that range
    where it would be emitted: it is dropped. Of a tree any such node is left out, also one behind an EOS."""
    BAD_PARAM = 16
    """Out of range: a sampling parameter (read as its default), a length (clamped, or an idle row), an index (an idle
    row), or a uniform (read as 0). Or a row of probabilities, the target's or `sample`'s, that is not a distribution
    (it is divided by its sum; if that is infinite, all mass is put on its largest). Or ids of a `TokenCounts` that do
    not ascend (they are ignored), or an id that it has no room for (the highest are left out)."""
    BAD_TREE = 32
    """A tree on the device that is not a tree: nodes that do not hang from its root within the given depth were pruned.
    Or a path that does not fit the cache: it ends before the first node that does not."""
    BAD_DRAFT = 64
    """A draft token that its own distribution cannot have produced, or a draft distribution that is not one (it counts
    as 0 everywhere): the sequence's draft ends before it, and the next token has the target's distribution; on a tree
    the child is skipped. `verify_chain` lists what is checked."""


class RowStats(NamedTuple):
    """The distribution of each row of logits after the sampling transform, as a few numbers per row.

    ``P(v) = exp((logit_v − max) / temperature) / normalizer`` where ``logit_v >= cutoff``, else 0; a row that is greedy
    (temperature 0), holds a +inf or has no possible id puts all its mass on ``argmax``.

    Attributes
    ----------
    values : Tensor
        ``[..., 6]`` float32: max, cutoff, log_normalizer, normalizer, raw_log_normalizer, raw_entropy; each is also a
        property of that name, a ``[...]`` view.
    argmax : Tensor
        ``[...]`` int64, the lowest id of the largest logit; 0 in an empty row.
    status : Tensor
        ``[...]`` int32, flags of `Status`.
    """

    values: Tensor
    argmax: Tensor
    status: Tensor

    @property
    def max(self) -> Tensor:
        """Largest logit, in raw-logit units."""
        return self.values[..., 0]

    @property
    def cutoff(self) -> Tensor:
        """Smallest logit that truncation keeps, in raw-logit units; −inf where nothing is to be cut or argmax has all
        the mass."""
        return self.values[..., 1]

    @property
    def log_normalizer(self) -> Tensor:
        """``log Σ exp(logit / temperature)`` over the kept ids, in nats; the max itself in a greedy row."""
        return self.values[..., 2]

    @property
    def normalizer(self) -> Tensor:
        """``Σ exp((logit − max) / temperature)`` over the kept ids: what kernels divide by; 1 where argmax has all."""
        return self.values[..., 3]

    @property
    def raw_log_normalizer(self) -> Tensor:
        """``log Σ exp(logit)`` over the whole row (after processors; temperature 1, nothing cut), in nats; −inf where
        not asked for."""
        return self.values[..., 4]

    @property
    def raw_entropy(self) -> Tensor:
        """Entropy in nats of the raw distribution (after processors; temperature 1, nothing cut); −inf where not asked
        for."""
        return self.values[..., 5]

    @staticmethod
    def stack(stats: Sequence[RowStats], dim: int) -> RowStats:
        """Stack the stats of several draft positions, of one shape, along a new leading dimension `dim` (>= 0).

        Raises
        ------
        TypeError, ValueError
            Elements that are not RowStats, an empty sequence, differing shapes, or a `dim` out of range.
        """
        check_sequence("RowStats", "stats", stats, RowStats, "RowStats")
        shapes = {tuple(s.argmax.shape) for s in stats}
        if len(shapes) > 1:
            raise ValueError(f"RowStats: stats must be of one shape, got {sorted(map(list, shapes))}")
        check_int("RowStats", "dim", dim, 0, stats[0].argmax.dim())
        return RowStats(
            torch.stack([s.values for s in stats], dim),
            torch.stack([s.argmax for s in stats], dim),
            torch.stack([s.status for s in stats], dim),
        )


class ShardStats(NamedTuple):
    """What `shard_stats` computes in one pass over a shard of rows.

    Attributes
    ----------
    tile_max : Tensor
        ``[batch, n, tiles]`` float32: the largest logit of each tile of 1024 ids.
    tile_mass : Tensor
        Of the same shape: ``Σ exp((logit − tile_max) / temperature)``; 0 where the maximum is infinite, and in greedy
        rows. With `probs`: the tile's sum, infinite where a probability is negative (a −inf counts as 0).
    argmax : Tensor
        ``[batch, n]`` int64: the lowest id of the shard's largest logit, counted from its first id.
    status : Tensor
        ``[batch, n]`` int32: `Status.NAN` where the shard holds a NaN.
    """

    tile_max: Tensor
    tile_mass: Tensor
    argmax: Tensor
    status: Tensor


class ShardDraw(NamedTuple):
    """What `shard_draw` returns: a shard's part in drawing a token of each row; what was not asked for is None.

    Attributes
    ----------
    masses : Tensor or None
        ``[batch, n, tiles]`` float32: each tile's mass of what the token is drawn from.
    token : Tensor or None
        ``[batch, n]`` int64 ids in the whole vocabulary; −1: no token from this shard.
    score : Tensor or None
        ``[batch, n]`` float32: ``(logit − max) / temperature + G`` of a noisy token.
    """

    masses: Tensor | None
    token: Tensor | None
    score: Tensor | None


class Draw(NamedTuple):
    """Tokens drawn by `sample`.

    Attributes
    ----------
    token : Tensor
        int64 target ids, ``[batch]`` or ``[batch, n]`` as the logits were given; ``[..., num_samples]`` for
        ``num_samples > 1``, in the order drawn, −1 where the support was exhausted or
        `row_index` names no row.
    log_prob : Tensor
        float32 of the same shape: log-probability in nats of each token in the distribution it was drawn from, before
        any token was removed; −inf beside −1.
    stats : RowStats
        Stats of the rows drawn from; pass it to `verify_chain` as ``draft_stats`` (``RowStats.stack(…, dim=1)`` over
        positions).
    """

    token: Tensor
    log_prob: Tensor
    stats: RowStats


class TokenLogprobs(NamedTuple):
    """How likely tokens were, in nats, and the likeliest ids of the rows that they were drawn from.

    Raw: at temperature 1 with nothing cut; else after processors, temperature and truncation, −inf where barred or cut.
    Ids are ordered from the largest raw logit down, equal ones from the lowest id up; NaN is read as −inf. Where all
    mass is on one id (`RowStats`) its log-probability is 0.

    Attributes
    ----------
    raw_log_prob, log_prob : Tensor
        ``[batch, width]`` float32; −inf where there is no token.
    rank : Tensor
        ``[batch, width]`` int32: the token's place in that order, from 1 on; 0 where there is no token.
    status : Tensor
        ``[batch, width]`` int32, flags of `Status` of the token's row. A token outside [−1, vocab) (BAD_TOKEN), or from
        a row that does not exist (BAD_PARAM), counts as no token.
    top_ids : Tensor
        ``[batch, width, num_top]`` int64, the first ids in that order; −1 past the vocabulary and where there is no
        token.
    top_log_prob, top_processed_log_prob : Tensor
        Of the same shape, float32: raw, and after processors, temperature and truncation; −inf beside −1.
    """

    raw_log_prob: Tensor
    log_prob: Tensor
    rank: Tensor
    status: Tensor
    top_ids: Tensor
    top_log_prob: Tensor
    top_processed_log_prob: Tensor


class VerifyOutput(NamedTuple):
    """The outcome of one verify step.

    Attributes
    ----------
    tokens : Tensor
        ``[batch, num_draft + 1]`` int64 (`verify_packed`: max_num_draft_tokens + 1; `verify_tree`: max_depth + 1): the
        accepted draft tokens, then the recovered or bonus token, then −1.
    num_accepted : Tensor
        ``[batch]`` int32, accepted draft tokens.
    num_tokens : Tensor
        ``[batch]`` int32, tokens emitted: ``num_accepted + 1``; ``num_accepted`` after an accepted EOS, or where the
        given bonus token is −1 or outside the vocabulary; 0 in an idle row.
    status : Tensor
        ``[batch]`` int32, flags of `Status` over the rows the rule had to read.
    acceptance : Tensor or None
        ``[batch, num_draft]`` (max_num_draft_tokens) float32, ``Σ_v min(P(v), Q(v))`` of each drafted position, −1
        after the draft's end; None unless asked for. Here a draft ends at its length, a token that is no id or an EOS,
        but not at a token that Q cannot have produced.
    accepted_nodes : Tensor or None
        From `verify_tree`: ``[batch, max_depth]`` int64, the accepted nodes from the root's child on, then −1.
    """

    tokens: Tensor
    num_accepted: Tensor
    num_tokens: Tensor
    status: Tensor
    acceptance: Tensor | None = None
    accepted_nodes: Tensor | None = None


class GatherOutput(NamedTuple):
    """What `gather_kv_` made of each sequence.

    Attributes
    ----------
    lengths : Tensor
        ``[batch]`` of the dtype of context_lengths: how many rows of the cache hold the sequence now.
    status : Tensor
        ``[batch]`` int32, flags of `Status`.
    """

    lengths: Tensor
    status: Tensor


class TokenCounts:
    """What prompts and outputs contain: the distinct ids of each sequence, and how often each was emitted.

    These are lists of the ids that occur, not an array as wide as the vocabulary. They stay on their device, and `add_`
    counts a step's tokens in place.

    Parameters
    ----------
    prompt_ids : Tensor
        ``[batch, n]`` int32 or int64; negative ids, and those from 2**31 − 1 on, count as none.
    max_new_tokens : int
        How many tokens the output has at most, >= 0; with n it is below 2**30.
    attention_mask : Tensor, optional
        ``[batch, n]`` bool, integers or floats, as `generate` takes it: 0 where there is no prompt token.

    Attributes
    ----------
    ids : Tensor
        ``[batch, capacity]`` int32 with ``capacity = n + max_new_tokens``: distinct ids in ascending order, then
        2**31 − 1.
    counts : Tensor
        ``[batch, capacity]`` int32: twice how often the output holds the id, plus 1 if the prompt does. Processors
        read a negative number as 0.
    num_output : Tensor
        ``[batch]`` int32: tokens of the output.
    max_new_tokens : int
        As given: how much of the capacity `restart_` reserves for the output.

    Raises
    ------
    ValueError, TypeError
        Another dtype or shape, or a `max_new_tokens` that is no integer in 0 … 2**30 − 1 − n.
    """

    def __init__(self, prompt_ids: Tensor, max_new_tokens: int, attention_mask: Tensor | None = None) -> None:
        caller = "TokenCounts"
        check_id_tensor(caller, "prompt_ids", prompt_ids, (torch.int32, torch.int64))
        if prompt_ids.dim() != 2:
            raise ValueError(f"{caller}: prompt_ids must be [batch, n], got {list(prompt_ids.shape)}")
        check_int(caller, "max_new_tokens", max_new_tokens, 0, 2**30 - 1 - prompt_ids.shape[1])
        ids = prompt_ids
        if attention_mask is not None:
            check_tensor(caller, "attention_mask", attention_mask, MASK_DTYPES, None)
            if attention_mask.shape != ids.shape:
                shapes = f"{list(ids.shape)}, got {list(attention_mask.shape)}"
                raise ValueError(f"{caller}: attention_mask must be {shapes}")
            ids = torch.where(attention_mask.to(ids.device) != 0, ids, -1)
        ids = torch.where((ids < 0) | (ids > NO_ID), NO_ID, ids).to(torch.int32).sort(-1).values
        again = torch.zeros_like(ids, dtype=torch.bool)
        again[:, 1:] = ids[:, 1:] == ids[:, :-1]
        ids = ids.masked_fill(again, NO_ID).sort(-1).values
        self.ids = torch.nn.functional.pad(ids, (0, max_new_tokens), value=NO_ID)
        self.counts = (self.ids != NO_ID).to(torch.int32)
        self.num_output = torch.zeros(len(ids), dtype=torch.int32, device=ids.device)
        self.max_new_tokens = max_new_tokens

    _count: ClassVar[Callable[..., Tensor]]  # set by the module of `count_tokens_`, a layer above this file

    def add_(self, tokens: Tensor, num_tokens: Tensor | None = None) -> TokenCounts:
        """Count tokens of the output, as a verify step gives them. Does not wait, except for the device with
        ``SPECDEC_CHECK=1``.

        Parameters
        ----------
        tokens, num_tokens : Tensor
            As `count_tokens_` takes them.

        Returns
        -------
        TokenCounts
            Itself.

        Raises
        ------
        ValueError, TypeError
            What `count_tokens_` refuses.
        RuntimeError
            The ids do not ascend, or there is no room for an id, while ``SPECDEC_CHECK=1``; after the work.
        """
        self._count("add_", self, tokens, num_tokens, None)
        return self

    def restart_(self, slot: int, prompt_ids: Tensor) -> TokenCounts:
        """Begin a sequence again with another prompt, in place: a request takes the slot of one that has ended.

        Parameters
        ----------
        slot : int
            In [0, batch).
        prompt_ids : Tensor
            ``[n]`` int32 or int64, counted as in the constructor. The number of distinct ids is checked on the host.

        Returns
        -------
        TokenCounts
            Itself.

        Raises
        ------
        ValueError, TypeError
            Another dtype or shape, a `slot` out of range, or more distinct ids than ``capacity - max_new_tokens``.
        """
        caller = "restart_"
        check_int(caller, "slot", slot, 0, len(self) - 1)
        check_id_tensor(caller, "prompt_ids", prompt_ids, (torch.int32, torch.int64))
        if prompt_ids.dim() != 1 or prompt_ids.is_meta:
            where = " on meta" if prompt_ids.is_meta else ""
            raise ValueError(f"{caller}: prompt_ids must be [n] ids, got {list(prompt_ids.shape)}{where}")
        own = TokenCounts(prompt_ids[None].to(self.ids.device), self.max_new_tokens)
        held, capacity = int((own.ids != NO_ID).sum()), self.ids.shape[1]
        if held > capacity - self.max_new_tokens:
            raise ValueError(
                f"{caller}: prompt_ids must hold at most {capacity - self.max_new_tokens} distinct ids, got {held}"
            )
        with writing_to(self.ids):
            self.ids[slot], self.counts[slot], self.num_output[slot] = NO_ID, 0, 0
            self.ids[slot, :held], self.counts[slot, :held] = own.ids[0, :held], own.counts[0, :held]
        return self

    def clone(self) -> TokenCounts:
        """The same counts in tensors of their own."""
        other = object.__new__(TokenCounts)
        other.ids, other.counts, other.num_output = self.ids.clone(), self.counts.clone(), self.num_output.clone()
        other.max_new_tokens = self.max_new_tokens
        return other

    def __len__(self) -> int:
        return len(self.ids)


class TokenMap:
    """A reduced draft vocabulary: which target id each draft id stands for.

    Target ids that no draft id maps to have draft probability 0.

    Parameters
    ----------
    draft_to_target : Tensor
        ``[vocab_draft]`` int32 or int64, at least two distinct ids >= 0. Building the inverse reads the values once, on
        the host.

    Attributes
    ----------
    draft_to_target : Tensor
        ``[vocab_draft]`` int64.
    target_to_draft : Tensor
        ``[max_id + 1]`` int64, −1 where unmapped.
    max_id : int
        The largest target id.

    Raises
    ------
    ValueError
        Ids that are negative, repeated or >= 2**30, fewer than two ids, a tensor that is not 1-d or has no values.
    TypeError
        Not an int32 or int64 tensor.
    """

    def __init__(self, draft_to_target: Tensor) -> None:
        check_id_tensor("TokenMap", "draft_to_target", draft_to_target, (torch.int32, torch.int64))
        if draft_to_target.device.type == "meta":
            raise ValueError("TokenMap: draft_to_target must hold ids, got a tensor on meta")
        if draft_to_target.dim() != 1 or draft_to_target.numel() < 2:
            raise ValueError(f"TokenMap: draft_to_target must be [vocab_draft >= 2], got {list(draft_to_target.shape)}")
        ids = draft_to_target.to(torch.int64, copy=True).contiguous()
        lowest, self.max_id = int(ids.min()), int(ids.max())
        if lowest < 0:
            raise ValueError(f"TokenMap: draft_to_target must hold ids >= 0, got {lowest}")
        if self.max_id >= MAX_VOCAB:
            raise ValueError(f"TokenMap: draft_to_target must hold ids < 2**30, got {self.max_id}")
        if ids.unique().numel() != ids.numel():
            raise ValueError("TokenMap: draft_to_target must hold distinct ids, got repeated ones")
        self.draft_to_target = ids
        self.target_to_draft = ids.new_full((self.max_id + 1,), -1)
        self.target_to_draft[ids] = torch.arange(ids.numel(), device=ids.device)

    def __len__(self) -> int:
        return self.draft_to_target.numel()

    def to(self, device: torch.device | str) -> TokenMap:
        """The same map on another device.

        Raises
        ------
        ValueError
            Not a device or the name of one.
        """
        device = check_device("TokenMap", "device", device)
        moved = object.__new__(TokenMap)
        moved.max_id = self.max_id
        moved.draft_to_target = self.draft_to_target.to(device)
        moved.target_to_draft = self.target_to_draft.to(device)
        return moved
