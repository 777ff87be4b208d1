"""Bundles: what kernels and device functions are given together, as NamedTuples of tensors, numbers and flags.

To the host a member is a tensor, a float, an int, a flag as ``tl.constexpr``, or None; to a kernel a pointer, a number
or a constant. What Triton cannot handle, or not well:

- an int in a bundle is always specialised: a value of 1 or a multiple of 16 compiles a variant of its own. Strides and
  vocabularies are worth that; every other size is a parameter of its own, named in ``do_not_specialize``;
- Triton 3.6 cannot compare a bundle with None where one of its members is None. A bundle that may be absent has members
  that are all None, and a kernel asks for one of them, or for a flag beside it;
- nor can its device functions return None in a bundle: they return bundles of tensors;
- no member is named `values`, `type` or `index`: in a kernel a tuple has attributes of these names.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

# ---- What kernels are launched with ----


class Overlay(NamedTuple):
    """What processors make of the target's rows. `lists` are one a sequence, ids in them distinct and ascending."""

    stride: int | None  # rows of the bitmask that a sequence's row i lies behind that of the one before; None: each
    # sequence has one row, wherever its logits are
    ahead: Tensor | None  # [batch] int64: rows that it lies further on where each sequence has n of them; None: 0
    last_row: Tensor | None  # [1] int32: of these; a number would compile variants as batches change
    flags: Tensor | None  # [batch] int32; None: there are no processors
    words: int | None  # of a bitmask
    bitmask: Tensor | None  # [rows, words] int32
    allowed: Tensor | None  # [batch, words] int32
    bias_ids: Tensor | None  # [batch, num_bias] int32; num_bias and capacity are multiples of 16, as they change too
    bias_values: Tensor | None  # the same, float32
    bias_until: Tensor | None  # the same, int32
    generated: Tensor | None  # [batch * n] int64: tokens of the output before each
    num_bias: int | None
    bias_steps: int | None  # of a binary search
    penalties: Tensor | None  # [batch, 3] float32: repetition, frequency, presence
    count_ids: Tensor | None  # [batch, capacity] int32
    counts: Tensor | None  # the same
    capacity: int | None
    count_steps: int | None
    drafted: Tensor | None  # [batch * n, depth] int32: the draft tokens before each, -1 where there is none
    depth: int | None


NO_OVERLAY = Overlay(*[None] * len(Overlay._fields))


# What the rows hold whose law is found: logits, weights that are proportional to probabilities, or probabilities, which
# sum to 1.
LOGITS, WEIGHTS, PROBS = (tl.constexpr(number) for number in range(3))


class Rows(NamedTuple):
    """Rows of logits or probabilities: row i of sequence b starts at ``b * stride_batch + (first of b + i) *
    stride_row``.
    """

    data: Tensor
    stride_batch: int
    stride_row: int
    vocab: int  # ids a row
    overlay: Overlay = NO_OVERLAY
    kind: Any = LOGITS  # constexpr: LOGITS, WEIGHTS or PROBS
    starts: Tensor | None = None  # [batch] int64, instead of b; as `sample` has them -1 for none


def step_of(data: Tensor) -> int:
    """Elements that rows ``[batch, n, vocab]`` lie some whole number of times apart. A position that is counted in them
    tells a compiler how the row is aligned, which one that is counted in elements hides.
    """
    return math.gcd(*data.stride()[:2]) or 1


def rows_of(logits: Tensor) -> Rows:
    """``[batch, n, vocab]``."""
    return Rows(logits, logits.stride(0), logits.stride(1), logits.shape[-1])


class Layout(NamedTuple):
    """Where sequences lie: padded, or laid end to end if `cu` is given."""

    batch: int
    width: int  # most draft tokens that a sequence can have
    cu: Tensor | None
    total: int
    bonus_rows: int = 1  # of each sequence's target

    def rows(self, data: Tensor, extra: int) -> Rows:
        """Rows of a sequence's draft tokens and `extra` more, ``[batch, n, vocab]`` or ``[rows, vocab]``."""
        # laid end to end, the rows of sequence b start `extra * b` rows further than its draft tokens
        batch, row = data.stride()[:2] if self.cu is None else (extra * data.stride(0), data.stride(0))
        return Rows(data, batch, row, data.shape[-1])


class RowLaws(NamedTuple):
    """The law of each row ``[batch, n]``; entries of rows that nobody needs are not written."""

    numbers: Tensor | None  # [batch, n, 4] float32, as `row.load_law` reads them; None where rows are probabilities
    argmax: Tensor | None  # [batch, n] int64; likewise
    status: Tensor  # [batch, n] int32


class Target(NamedTuple):
    """The target's rows, and the law of each."""

    rows: Rows
    laws: RowLaws


class DraftLaws(NamedTuple):
    """The draft's rows, and the law of each."""

    rows: Rows | None
    laws: RowLaws | None
    to_draft: Tensor | None  # [map_size] int64: the draft's ids of target ids, -1 for those that its vocabulary lacks
    map_size: int | None
    given: Any  # constexpr: whether there are any rows
    bonus: Any  # constexpr: 1 where there are as many rows as of the target, because the bonus is a cascade's; else 0


NO_DRAFT = DraftLaws(None, None, None, None, tl.constexpr(False), tl.constexpr(0))  # tokens are point masses


class TileStats(NamedTuple):
    """What `law.scan` finds of every tile ``[batch, n, tiles]``."""

    maximum: Tensor  # float32
    nan: Tensor  # int32: whether it holds one
    mass: Tensor | None  # float32: sum exp((x - maximum) / T); what `law.law` makes of it is in `law.Found`
    raw_mass: Tensor | None  # the same at temperature 1, if `tempered` at T
    raw_moment: Tensor | None  # and its first moment
    of_groups: Tensor | None  # float32: the maxima of its groups of `arithmetic.GROUP` ids ``[batch, n, tiles, 4]``
    tempered: Any  # constexpr
    logarithm: Any  # constexpr: of the raw normaliser, see `law.find_laws`


class Temperature(NamedTuple):
    """The sequences' temperatures."""

    number: float
    each: Tensor | None  # [batch] float32, instead of the number
    greedy: Any  # constexpr: whatever the temperature


class Cut(NamedTuple):
    """The sampling parameters that cut rows: numbers, or one a sequence ``[batch]`` in their place."""

    top_p: float
    min_p: float
    top_ks: Tensor | None
    top_ps: Tensor | None
    min_ps: Tensor | None
    min_p_first: Any  # constexpr


class Wanted(NamedTuple):
    """Which rows are read: those that the spans need; all if there are none."""

    spans: Tensor | None  # [batch, 4] int64, see `Span`
    draft_only: Any  # constexpr: not the row after the span's last token


EVERY_ROW = Wanted(None, tl.constexpr(False))


class Chains(NamedTuple):
    """The drafted tokens, and how far the rules look at them."""

    tokens: Tensor  # [batch, width], or laid end to end
    bonus_tokens: Tensor | None  # [batch]; None: they are drawn
    spans: Tensor  # [batch, 4] int64, see `Span`
    target_spans: Tensor | None  # of the target's rows, where bonus tokens are given; None: they are `spans`
    state: Tensor  # [batch, 3] int32: status so far, accepted, whether the block rule decides
    ragged_numbers: Any  # constexpr: whether uniforms and noise keys lie end to end, as rows of a ragged batch do


class Mixtures(NamedTuple):
    """What a target law makes of each position that has a draft row ``[batch, n]``."""

    numbers: Tensor | None  # [batch, n, 4] float32, as `mixture.load_mixture` reads them
    kept_by: Any  # constexpr: whose row decides which ids are kept, see mixture.py


class Typical(NamedTuple):
    """The bounds of typical acceptance."""

    epsilon: float
    delta: float


class TargetLaw(NamedTuple):
    """A law that is not lossless, as the ops take it."""

    number: Any  # constexpr
    variant: Any  # constexpr
    alpha: float
    rest: float  # 1 - alpha, which keeps more digits than float32's alpha near 1
    beta: float


class Walked(NamedTuple):
    """What the walk of a ratio rule leaves to the draw."""

    scales: Tensor  # [batch, width + 1] float32: factor on the law in a position's remainder, 0 where none is needed
    masses: Tensor | None  # [batch, rows, tiles] float32 of the remainder: at every draft row, or where the walk ended
    rule: Any  # constexpr: the acceptance rule's number; for point masses the token rule's in place of the block rule's


class Best(NamedTuple):
    """Of every tile ``[batch, n, tiles]`` the best score ``(logit - max) / T + G`` and the lowest id that has it."""

    score: Tensor | None  # float32; -inf where nothing is kept
    id: Tensor | None  # int32


NO_NOISE = Best(None, None)


class Trees(NamedTuple):
    """The nodes ``[batch, num_nodes]`` int32 of each sequence as the rules see them, and which of its rows are read."""

    tokens: Tensor
    above: Tensor  # parents; -1 for the root and what can never be accepted
    ends: Tensor  # whether it is an EOS
    mixed: Tensor  # whether a cascade's law takes the place of P after it
    spans: Tensor  # [batch, 4] int64, see `Span`: up to the last node that can be accepted
    draft_spans: Tensor  # the same of the draft's rows
    state: Tensor  # [batch] int32: status so far
    slots: Any  # constexpr: the power of 2 that num_nodes fit in


class Siblings(NamedTuple):
    """Scratch of the walk over children that were drawn without replacement."""

    masses: Tensor  # [batch, tiles] float32: of what P has become
    removed: Tensor  # [batch, num_nodes] int32: tokens rejected along the path, each node's behind its parent's
    levels: Tensor  # [batch, max_depth + 1, LEVEL] float32: what the nodes above are left with
    traversal: Any  # constexpr: the rule


class Output(NamedTuple):
    """What a verify step returns."""

    tokens: Tensor  # [batch, most + 1] int64
    num_accepted: Tensor  # [batch] int32, as the two below
    num_tokens: Tensor
    status: Tensor
    nodes: Tensor | None  # [batch, most] int64, of trees
    slots: Any  # constexpr: so many tokens are stored in one go


class Listed(NamedTuple):
    """Scratch for the values of a row that may be kept, or scores that may be among the best, int32."""

    key: Tensor | None  # [batch, n, CANDIDATES] `arithmetic.ordered`
    id: Tensor | None  # the same
    hot: Tensor | None  # [batch, n, groups]: which groups hold any


NOTHING_LISTED = Listed(None, None, None)


class Drawn(NamedTuple):
    """What `sample` returns."""

    token: Tensor  # [batch, n, num_samples] int64
    log_prob: Tensor  # the same, float32
    to_target: Tensor | None  # [vocab] int64: the ids to return


# ---- What device functions pass on ----


class RowLaw(NamedTuple):
    """P(v) = exp((logit_v - max) * inverse_temperature) * inverse_normalizer where logit_v >= cutoff, else 0; where
    inverse_temperature is negative, all mass on argmax. Of weights: weight_v * inverse_temperature *
    inverse_normalizer, where inverse_temperature is 1 / max.
    """

    max: Any
    cutoff: Any
    inverse_temperature: Any
    inverse_normalizer: Any
    argmax: Any


class Row(NamedTuple):
    """Row i of sequence b, and its law."""

    rows: Rows
    b: Any
    i: Any
    tiles: Any
    law: RowLaw


class Groups(NamedTuple):
    """The ids of a row in groups, and the largest value of each."""

    maximum: Any
    number: Any


class Range(NamedTuple):
    """Keys from `low` on and below `high` (int64), among which a cut-off is looked for."""

    low: Any
    high: Any
    count_above: Any  # values with keys from `high` on
    mass_above: Any  # and their weights


class Position(NamedTuple):
    """Where P and Q of a position stand, or of a vector of positions."""

    b: Any
    i: Any  # row of the sequence, in target and draft
    row: Any  # number of the target's law
    draft_row: Any  # and of the draft's


class RawRow(NamedTuple):
    """What a cascade looks at in a row at temperature 1 with nothing cut: p(v) = exp(logit - max) * max_prob, or all on
    argmax where max is infinite.
    """

    max: Any
    max_prob: Any
    entropy: Any
    argmax: Any


class Mixture(NamedTuple):
    """What a target law makes of a position: an id is kept iff, in the row that decides, it is `kept_id` (`LAST_ID` is
    none), or, where that is negative, its logit is >= `bound`.
    """

    accept: Any
    scale: Any
    bound: Any
    kept_id: Any


# What follows a span's last token: one that is drawn, none, or the bonus token that is given.
OPEN, CLOSED, TAKES_BONUS = (tl.constexpr(number) for number in range(3))


class Span(NamedTuple):
    """The drafted extent of a sequence that the rules look at."""

    first: Any  # row of its first token, beside the sequence's stride
    length: Any  # tokens; -1: the sequence is idle
    closed: Any  # nothing is drawn after its last token
    token_index: Any  # of its first token among all


class Noise(NamedTuple):
    """Gumbel noise on a row's values; nothing where the keys are None."""

    key0: Any
    key1: Any
    to_target: Any  # the ids that the noise belongs to
