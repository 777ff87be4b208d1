"""What a drafter is: three methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import (
    FLOAT32,
    ID_DTYPES,
    INT64,
    LOGIT_DTYPES,
    check_array,
    check_id_tensor,
    check_instance,
    check_int,
    check_tensor,
    shape_error,
)
from ..decoding.runner import Runner
from ..decoding.state import DecodingState, StepResult
from ..sampling import SamplingParams
from ..tree import DraftTree
from ..types import PLACEHOLDER_TOKEN_ID, RowStats, TokenMap

_OPTIONAL = (("logits", LOGIT_DTYPES), ("probs", FLOAT32), ("num_draft_tokens", ID_DTYPES))
_PARTS = (("params", SamplingParams), ("stats", RowStats), ("token_map", TokenMap), ("tree", DraftTree))


@dataclass(frozen=True, eq=False)
class Draft:
    """Draft tokens and the distribution that they were really drawn from.

    Without `logits` and `probs` it is one-hot: all mass on the draft token (a lookup, a greedy head). That is also all
    that acceptance "match" and "greedy" need.

    Attributes
    ----------
    tokens : Tensor
        ``[batch, width]`` int64 target ids on the target's device; a −1 ends a sequence's draft. Any width from 0 to
        what was asked.
    logits : Tensor or None
        ``[batch, width, vocab_draft]``, the row that each token was drawn from; where ``state.cascade_bonus``, one
        more: the draft's row after the last token.
    probs : Tensor or None
        Instead of `logits`: ``[batch, width, vocab_draft]`` float32, normalised.
    params : SamplingParams or None
        How the tokens were drawn from `logits`; None: temperature 1, nothing cut.
    stats : RowStats or None
        Of the rows, as `specdec_kernels.sample` returned them: saves the verifier a pass over them.
    token_map : TokenMap or None
        Where the draft's vocabulary is a reduced one.
    num_draft_tokens : Tensor or None
        ``[batch]`` int64 or int32: how many of a sequence's tokens to use, none where it is negative; None: all.
        Whether a token is used (also by a −1 in `tokens`) may depend on anything known before it was drawn, the tokens
        before it included, but not on itself or later ones: dropping a token after seeing it biases the output. Not
        with a `tree`.
    tree : DraftTree or None
        From a `TreeDrafter`: `tokens` ``[batch, num_nodes - 1]`` are those of its nodes except the root, −1 where a
        sequence lacks a node, and the distribution is one-hot.

    Raises
    ------
    TypeError
        A field of another type; a tensor of another dtype. Shapes and values are looked at where a draft is verified.
    """

    tokens: Tensor
    logits: Tensor | None = None
    probs: Tensor | None = None
    params: SamplingParams | None = None
    stats: RowStats | None = None
    token_map: TokenMap | None = None
    num_draft_tokens: Tensor | None = None
    tree: DraftTree | None = None

    def __post_init__(self) -> None:
        check_id_tensor("Draft", "tokens", self.tokens, INT64)
        for name, dtypes in _OPTIONAL:
            if (tensor := getattr(self, name)) is not None:
                check_tensor("Draft", name, tensor, dtypes, None)
        for name, kind in _PARTS:
            if (part := getattr(self, name)) is not None:
                check_instance("Draft", name, part, kind, f"a {kind.__name__} or None")

    def widened(self, width: int) -> Draft:
        """The same draft with placeholders up to `width` columns.

        Raises
        ------
        TypeError, ValueError
            Not an integer in [0, 2**31), or tensors of another rank.
        """
        check_int("Draft", "width", width, 0, 2**31 - 1)
        for name, dims in (("tokens", ()), ("logits", ("vocab_draft",)), ("probs", ("vocab_draft",))):
            if (rows := getattr(self, name)) is not None and rows.dim() != 2 + len(dims):
                raise shape_error("Draft", name, f"[{', '.join(('batch', 'num_draft', *dims))}]", rows)
        batch, drafted = self.tokens.shape
        if width <= drafted:
            return self

        def pad(rows: Tensor, value: float) -> Tensor:
            return torch.cat([rows, rows.new_full((batch, width - drafted, *rows.shape[2:]), value)], dim=1)

        stats = self.stats and RowStats(pad(self.stats.values, 0), pad(self.stats.argmax, 0), pad(self.stats.status, 0))
        return replace(
            self,
            tokens=pad(self.tokens, PLACEHOLDER_TOKEN_ID),
            logits=None if self.logits is None else pad(self.logits, 0),
            probs=None if self.probs is None else pad(self.probs, 0),
            stats=stats,
        )


@dataclass(frozen=True, eq=False)
class Foresight:
    """What a drafter is about to propose, and what tells how likely that is right: see `Drafter.foresee`.

    Attributes
    ----------
    tokens : ndarray
        ``[batch]`` int64: the first token of each sequence's draft (of a tree, the first of the root's children); −1
        where it will have none.
    matched : ndarray
        ``[batch]`` int64: how many of the text's last tokens were found again before the place that the draft is read
        from, or 0 for a guess; looked at where there is a token.

    Raises
    ------
    ValueError, TypeError
        A field that is not such an array; fields of different lengths.
    """

    tokens: NDArray[np.int64]
    matched: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, array in (("tokens", self.tokens), ("matched", self.matched)):
            check_array("Foresight", name, array, "i", "[batch] int64")
            if array.ndim != 1 or len(array) != len(self.tokens):
                batch = f"={len(self.tokens)}" if self.tokens.ndim else ""
                raise ValueError(f"Foresight: {name} must be [batch{batch}], got {list(array.shape)}")


class Drafter(ABC):
    """Proposes tokens that the target then verifies.

    One `generate` call goes ``start``, then ``propose`` and ``commit`` once a step, then ``finish``. A drafter object
    may be used again for the next call, but serves one call at a time: a second one is refused. This one always
    proposes each sequence's last token again::

        class RepeatLast(Drafter):
            def start(self, state): ...

            def propose(self, state, num_tokens):
                return Draft(state.last_tokens().expand(-1, num_tokens))

            def commit(self, state, result): ...

    `NgramDrafter` works on the host, `ModelDrafter` draws from a distribution of its own. The output keeps the target's
    distribution whatever is proposed, as long as `Draft` tells the truth about the distribution that the tokens were
    drawn from.

    Attributes
    ----------
    capturable : bool
        True: `propose` may be captured in a CUDA graph together with the verification. It then works on the device
        alone, from the tensors of `state`, which `commit` does not influence; a replay does not call it. The host may
        then be a step behind: `commit` gets a step's result when the next one is under way.
    gives_logits : bool
        True: where ``state.target_law`` is a cascade (any but `sk.laws.Lossy`), which needs them, each `Draft` has
        `logits`.
    runner : Runner or None
        What runs the drafter's model, if it has one: not the target's.
    """

    capturable: bool = False
    gives_logits: bool = False
    runner: Runner | None = None

    @abstractmethod
    def start(self, state: DecodingState) -> None:
        """Get ready for the prompts in ``state.prompt``."""

    def prepare(self, state: DecodingState) -> None:  # noqa: B027 - most have nothing to do
        """Called by the loop before each `propose`, never captured: for work that depends on what the host knows."""

    @abstractmethod
    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """Up to `num_tokens` draft tokens a sequence, to follow the `state.lengths` tokens in `state.tokens`.

        Must not wait for the device (``state.host_*`` is what the host knows), and must give the same answer if called
        again before `commit`: a step whose capture in a CUDA graph fails is run once more. Not called for steps without
        drafting, unless ``state.cascade_bonus``.
        Randomness comes from ``uniform_samples(state.seeds, state.step, n, purpose="draft")``, or, for acceptance
        "match", from the verifier's own noise at the tokens' positions.
        """

    def foresee(self, state: DecodingState) -> Foresight | None:
        """The first token that `propose` would give, whatever a grammar bars, and how much of the text supports it. Of
        a tree it is the first of the root's children.

        For drafters whose drafts are one-hot, mostly continue a match of the text's last tokens, and cost next to
        nothing; any other must return None at every step.

        With ``num_speculative_tokens="auto"`` or a `CostTable` it is asked once as the loop begins and, if it answered
        then, before every step: the loop drafts where matches of that length have been worth it, and learns that from
        plain steps as well. Beside a `target_law` or acceptance "typical" nothing is asked, nor is a drafter that reads
        hidden states.
        """
        return None

    @abstractmethod
    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Take note of what a step emitted; `state` is already the next step's. Called after every step."""

    def finish(self) -> None:  # noqa: B027 - nothing to release is a fine default
        """Release what `start` made; also called when the loop is left by an exception."""


class TreeDrafter(Drafter):
    """Proposes a tree of tokens: several continuations, verified in one forward.

    Each `Draft` has a `tree` of at most `num_nodes` nodes, `max_depth` deep, its tokens chosen in whatever way, as long
    as siblings differ. ``num_tokens`` of `propose` is the depth that is still of use.

    Attributes
    ----------
    num_nodes : int
        Rows of a verification, root included, 1 … 1024.
    max_depth : int
        Tokens that a step can accept at most, 1 … 64.
    reads_hidden : bool
        True: `propose` reads ``state.hidden``, and gives a tree at every step, of the root alone where it has no more:
        only the verification of a tree keeps those states. It is not asked in the first step, before which there are
        none.
    """

    num_nodes: int
    max_depth: int
    reads_hidden: bool = False
