"""What goes into and comes out of the ops, beside plain tensors.

Named tuples, because a verify call has to cost microseconds: building one takes a third of what a dataclass takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_integers

PLACEHOLDER_TOKEN_ID = -1
"""Fills the slots of an output that hold no token."""


class Status(IntFlag):
    """What a row's values turned out to hold; ``VerifyOutput.status`` and ``RowStats.status`` are OR-ed from these."""

    OK = 0
    NAN = 1
    """A NaN logit (read as −inf) or draft probability."""
    INF = 2
    """A +inf logit: the lowest such id takes all the mass."""
    EMPTY_ROW = 4
    """No id is possible (every logit −inf or NaN): all mass is put on id 0."""
    BAD_TOKEN = 8
    """A draft token outside [−1, vocab): the sequence's draft ends before it."""
    BAD_PARAM = 16
    """Out of range: a sampling parameter (read as its default), a length (clamped, or an idle row), or a uniform (read
    as 0)."""
    BAD_TREE = 32
    """A tree on the device that is not one: what does not hang from its root within the depth given was pruned. Or a
    path that does not fit the cache: it ends before the first node that does not."""
    BAD_DRAFT = 64
    """A draft token that its own distribution cannot have given, or a draft distribution that is none (it counts as 0
    everywhere): the sequence's draft ends before it, and the next token has the target's distribution; on a tree: a
    child that is skipped. `verify_chain` says what is looked at."""


class RowStats(NamedTuple):
    """The distribution of each row of logits after the sampling transform, as a few numbers per row.

    ``P(v) = exp((logit_v − max) / temperature) / normalizer`` where ``logit_v >= cutoff``, else 0; a row that is greedy
    (temperature 0), holds a +inf or nothing possible has all its mass on ``argmax``.

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
        """Smallest logit that truncation keeps, in raw-logit units; −inf where nothing is cut, or argmax has all."""
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
        """``log Σ exp(logit)`` over the whole row (temperature 1, nothing cut), in nats; −inf where not asked for."""
        return self.values[..., 4]

    @property
    def raw_entropy(self) -> Tensor:
        """Entropy in nats of the raw distribution (temperature 1, nothing cut); −inf where not asked for."""
        return self.values[..., 5]

    @staticmethod
    def stack(stats: Sequence[RowStats], dim: int) -> RowStats:
        """Stack the stats of several draft positions along a new leading dimension `dim` (>= 0)."""
        return RowStats(
            torch.stack([s.values for s in stats], dim),
            torch.stack([s.argmax for s in stats], dim),
            torch.stack([s.status for s in stats], dim),
        )


class Draw(NamedTuple):
    """Tokens drawn by `sample`.

    Attributes
    ----------
    token : Tensor
        int64 target ids, ``[batch]`` or ``[batch, n]`` as the logits were given; ``[..., num_samples]`` for
        ``num_samples > 1``, in the order drawn, −1 where the support was exhausted.
    log_prob : Tensor
        float32 of the same shape: log-probability in nats of each token in the distribution it was drawn from, before
        any token was removed; −inf beside −1.
    stats : RowStats
        Of the rows drawn from; pass it to `verify_chain` as ``draft_stats`` (``RowStats.stack(…, dim=1)`` over
        positions).
    """

    token: Tensor
    log_prob: Tensor
    stats: RowStats


class VerifyOutput(NamedTuple):
    """The outcome of one verify step.

    Attributes
    ----------
    tokens : Tensor
        ``[batch, num_draft + 1]`` int64: the accepted draft tokens, then the recovered or bonus token, then −1.
    num_accepted : Tensor
        ``[batch]`` int32, accepted draft tokens.
    num_tokens : Tensor
        ``[batch]`` int32, tokens emitted: ``num_accepted + 1``; ``num_accepted`` after an accepted EOS; 0 in an idle
        row.
    status : Tensor
        ``[batch]`` int32, flags of `Status` over the rows the rule had to read.
    acceptance : Tensor or None
        ``[batch, num_draft]`` float32, ``Σ_v min(P(v), Q(v))`` of each drafted position, −1 after the draft's end; None
        unless asked for.
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


class TokenMap:
    """A reduced draft vocabulary: which target id each draft id stands for.

    Target ids that no draft id maps to have draft probability 0.

    Parameters
    ----------
    draft_to_target : Tensor
        ``[vocab_draft]`` int32 or int64, distinct ids >= 0. Building the inverse looks at the values once, on the host.

    Attributes
    ----------
    draft_to_target : Tensor
        ``[vocab_draft]`` int64.
    target_to_draft : Tensor
        ``[max id + 1]`` int64, −1 where unmapped.

    Raises
    ------
    ValueError
        Ids that are negative, repeated or 2**30 and more, an empty or non-1-d tensor, one without values.
    TypeError
        Not an int32 or int64 tensor.
    """

    def __init__(self, draft_to_target: Tensor) -> None:
        check_integers("TokenMap", "draft_to_target", draft_to_target, (torch.int32, torch.int64))
        if draft_to_target.device.type == "meta":
            raise ValueError("TokenMap: draft_to_target must hold ids, got a tensor on meta")
        if draft_to_target.dim() != 1 or draft_to_target.numel() == 0:
            raise ValueError(f"TokenMap: draft_to_target must be [vocab_draft >= 1], got {list(draft_to_target.shape)}")
        ids = draft_to_target.to(torch.int64).contiguous()
        lowest, self.max_id = int(ids.min()), int(ids.max())
        if lowest < 0:
            raise ValueError(f"TokenMap: draft_to_target must hold ids >= 0, got {lowest}")
        if self.max_id >= 1 << 30:
            raise ValueError(f"TokenMap: draft_to_target must hold ids < 2**30, got {self.max_id}")
        if ids.unique().numel() != ids.numel():
            raise ValueError("TokenMap: draft_to_target must hold distinct ids, got repeated ones")
        self.draft_to_target = ids
        self.target_to_draft = ids.new_full((self.max_id + 1,), -1)
        self.target_to_draft[ids] = torch.arange(ids.numel(), device=ids.device)

    def __len__(self) -> int:
        return self.draft_to_target.numel()

    def to(self, device: torch.device | str) -> TokenMap:
        """The same map on another device."""
        moved = object.__new__(TokenMap)
        moved.max_id = self.max_id
        moved.draft_to_target = self.draft_to_target.to(device)
        moved.target_to_draft = self.target_to_draft.to(device)
        return moved
